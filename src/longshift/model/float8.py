"""Matmuls of a block whose factors have eight bits, as DeepSeek-V3 trains with (arXiv 2412.19437, section 3.3).

    y = x W^T       x and W rounded to e4m3                 contracted over I
    dx = dy W       dy and W rounded to e4m3                contracted over O
    dW = dy^T x     dy and x as they are                    contracted over T

    scales   x [T, I], dy [T, O]: one for 1 x 128 elements       W [O, I]: one for 128 x 128, the same codes in both directions

A block at the end of a row may be shorter. All codes are e4m3, dy's too: with a scale for every 128 elements the range of e5m2 is not
needed, and its codes are twice as far apart. Sums are those of the matmul, in at least float32.

[Note: powers of two] A scale is the least power of two that brings the largest magnitude of its block to LARGEST or less. What a code
stands for then has four significant bits, so that bf16, float32 and float64 hold it exactly, and the matmul of the rounded factors in
these formats is that of codes and scales.

[Note: blocks of logical factors] Blocks are counted in global coordinates: tokens share no scale, and a layout whose tensor-parallel ranks
cut a weight elsewhere than at multiples of 128 is refused (`layout.legal`). So rounding does not depend on the layout. A gradient of a
weight is a sum over tokens, and packs, chunks and ranks cut these anywhere: its factors are not rounded.

[Note: not finite] A cast to e4m3 makes 448 of infinity. A block with a value that is not finite has an infinite scale, with which all of
the block becomes NaN.

Codes are not multiplied as such by any device: factors are rounded, and multiplied in the compute format.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.layout.blocks import BLOCK, runs
from longshift.spec.formats import LARGEST, LEAST_SCALE

CODE = torch.float8_e4m3fn


def rounded(x: Tensor, rows: int = 1) -> Tensor:
    """x [R, C] as codes and scales of blocks of `rows` x BLOCK have it, in its own format."""
    y = x.new_empty(x.shape)
    for at_rows, high in runs(x.shape[0], rows):
        for at_columns, wide in runs(x.shape[1], BLOCK):
            part, into = (t[at_rows, at_columns].unflatten(1, (-1, wide)).unflatten(0, (-1, high)) for t in (x, y))
            scale = _scale(torch.linalg.vector_norm(part, math.inf, (1, 3), keepdim=True))
            torch.div(part, scale, out=into)
            into.copy_(into.to(CODE)).mul_(scale)
    return y


def _scale(largest: Tensor) -> Tensor:
    """The scales of blocks with these largest magnitudes, of their format."""
    share = largest.to(torch.float32, copy=True).div_(LARGEST).nan_to_num_(nan=math.inf, posinf=math.inf)
    share.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000)  # up to a power of two
    return share.clamp_(min=LEAST_SCALE).to(largest.dtype)


def factors(x: Tensor, weight: Tensor, float8: bool = True) -> tuple[Tensor, Tensor]:
    """What a matmul of x, or of a gradient, and a weight takes."""
    return (rounded(x), rounded(weight, BLOCK)) if float8 else (x, weight)


class Float8Linear(torch.autograd.Function):
    """apply(x [T, I], weight [O, I], bias [O] or None, add or None) -> [T, O]. `add`: as of `model.functions.SummedLinear`; the weight's
    gradient is in the graph where there is none."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, add: Callable[[Tensor, Tensor], None] | None
    ) -> Tensor:
        ctx.save_for_backward(weight, *((x,) if add or ctx.needs_input_grad[1] else ()))
        ctx.add = add
        return F.linear(*factors(x, weight), bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, *kept = ctx.saved_tensors
        dx, dw = torch.mm(*factors(grad, weight)), None
        if ctx.add:
            ctx.add(grad, *kept)
        elif ctx.needs_input_grad[1]:
            (x,) = kept
            dw = torch.mm(grad.mT, x) if weight.is_contiguous() else torch.mm(x.mT, grad).mT  # as the weight is stored
        return dx, dw, grad.sum(0) if ctx.needs_input_grad[2] else None, None
