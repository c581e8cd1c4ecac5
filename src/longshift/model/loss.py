"""Cross-entropy as a *sum* over target tokens; labels of -100 contribute nothing. The only division is by the step's global count of
target tokens, and it happens elsewhere.

Works on a slice of the vocabulary too (Megatron-LM, arXiv 1909.08053, section 3): a rank that holds rows [first, first + V_i) of the
head passes how to take the maximum and the sum over the ranks that hold the others; [T] numbers travel, never logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longshift.model.functions import WRITTEN_OUT, Elementwise

IGNORE = -100


class CrossEntropySum(torch.autograd.Function):
    """apply(logits [T, V_i], labels [T] global ids, first, all_max, all_sum, arithmetic) -> scalar, float32 (float64 for float64)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        logits,
        labels,
        first: int,
        all_max: Callable[[Tensor], Tensor],
        all_sum: Callable[[Tensor], Tensor],
        by: Elementwise = WRITTEN_OUT,
    ):
        highest = all_max(logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32)))
        here = (labels >= first) & (labels < first + logits.shape[1])
        column = torch.where(here, labels - first, 0).unsqueeze(-1)
        kept, total, target = by.weights(logits, highest, column)
        total, target = all_sum(torch.stack((total, torch.where(here, target, 0.0)))).unbind()
        counted = labels != IGNORE
        ctx.save_for_backward(kept, highest, total, column, here, counted)
        ctx.dtype, ctx.by = logits.dtype, by
        return torch.where(counted, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        kept, highest, total, column, here, counted = ctx.saved_tensors
        grad_T = grad * counted
        return ctx.by.weights_grad(kept, highest, grad_T / total, column, grad_T * here, ctx.dtype), None, None, None, None, None
