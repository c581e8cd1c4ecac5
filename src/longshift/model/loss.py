"""Cross-entropy as a *sum* over target tokens; labels of -100 contribute nothing. The only division
is by the step's global count of target tokens, and it happens elsewhere.

Works on a slice of the vocabulary too (Megatron-LM, arXiv 1909.08053, section 3): a rank that holds
rows [first, first + V_i) of the head passes how to take the maximum and the sum over the ranks that
hold the others; [T] numbers travel, never logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longshift.model.functions import WRITTEN_OUT, Elementwise

IGNORE = -100


class CrossEntropySum(torch.autograd.Function):
    """apply(logits [T, V_i], labels [T] global ids, first, all_max, all_sum, arithmetic) -> scalar,
    float32 (float64 for float64)."""

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
        # 1. Each row's highest logit, over all ranks, is taken off before logits are raised to e.
        highest = all_max(logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32)))

        # 2. Sums of the weights, and the target's logit from the rank that holds its column, in one
        # message.
        is_held = (labels >= first) & (labels < first + logits.shape[1])
        column = torch.where(is_held, labels - first, 0).unsqueeze(-1)
        weights, total, target = by.weights(logits, highest, column)
        total, target = all_sum(torch.stack((total, torch.where(is_held, target, 0.0)))).unbind()

        # 3. The sum over target tokens.
        is_target = labels != IGNORE
        ctx.save_for_backward(weights, highest, total, column, is_held, is_target)
        ctx.dtype = logits.dtype
        ctx.by = by
        return torch.where(is_target, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, highest, total, column, is_held, is_target = ctx.saved_tensors
        grad_T = grad * is_target
        dlogits = ctx.by.weights_grad(
            weights, highest, grad_T / total, column, grad_T * is_held, ctx.dtype
        )
        return dlogits, None, None, None, None, None
