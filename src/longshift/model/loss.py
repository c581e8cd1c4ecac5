"""Cross-entropy as a *sum* over target tokens; labels of -100 contribute nothing. The only division is by the step's global count of
target tokens, and it happens elsewhere.

Works on a slice of the vocabulary too (Megatron-LM, arXiv 1909.08053, section 3): a rank that holds rows [first, first + V_i) of the
head passes how to take the maximum and the sum over the ranks that hold the others; [T] numbers travel, never logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

IGNORE = -100


def alone(x: Tensor) -> Tensor:
    """Reduction over one holder."""
    return x


class CrossEntropySum(torch.autograd.Function):
    """apply(logits [T, V_i], labels [T] global ids, first, all_max, all_sum) -> scalar, float32 (float64 for float64)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, logits, labels, first: int, all_max: Callable[[Tensor], Tensor], all_sum: Callable[[Tensor], Tensor]
    ):
        highest = all_max(logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32)))
        wide = logits - highest.unsqueeze(-1)
        here = (labels >= first) & (labels < first + wide.shape[1])
        column = torch.where(here, labels - first, 0).unsqueeze(-1)
        target = torch.where(here, wide.gather(-1, column).squeeze(-1), 0.0)
        weight = wide.exp_()
        total, target = all_sum(torch.stack((weight.sum(-1), target))).unbind()
        counted = labels != IGNORE
        ctx.save_for_backward(weight, total, column, here, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, total, column, here, counted = ctx.saved_tensors
        grad_T = grad * counted
        d = weight.mul_((grad_T / total).unsqueeze(-1))  # in place: [T, V_i] is the largest activation there is
        return d.scatter_add_(-1, column, -(grad_T * here).unsqueeze(-1)).to(ctx.dtype), None, None, None, None
