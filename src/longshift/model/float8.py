"""Matmuls of a block whose factors have eight bits, as DeepSeek-V3 trains with (arXiv 2412.19437,
section 3.3).

    y = x W^T       x and W rounded to e4m3                 contracted over I
    dx = dy W       dy and W rounded to e4m3                contracted over O
    dW = dy^T x     dy and x as they are                    contracted over T

    scales   x [T, I], dy [T, O]: one for 1 x 128 elements
             W [O, I]: one for 128 x 128, the same codes in both directions

A block at the end of a row may be shorter. All codes are e4m3, dy's too: with a scale for every 128
elements the range of e5m2 is not needed, and its codes are twice as far apart. Sums are those of
the matmul.

[Note: powers of two] A scale is the least power of two that brings the largest magnitude of its
block to LARGEST or less. What a code stands for then has four significant bits, so that bf16,
float32 and float64 hold it exactly, and the matmul of the rounded factors in these formats is that
of codes and scales.

[Note: blocks of logical factors] Blocks are counted in global coordinates: tokens share no scale,
and a layout whose tensor-parallel ranks cut a weight elsewhere than at multiples of 128 is refused
(`layout.legal`). So rounding does not depend on the layout. A gradient of a weight is a sum over
tokens, and packs, chunks and ranks cut these anywhere: its factors are not rounded.

[Note: not finite] A cast to e4m3 makes 448 of infinity. A block with a value that is not finite has
an infinite scale, with which all of the block becomes NaN.

[Note: who multiplies codes] GPUs of compute capability 9.0 do, by a matmul of cuBLAS that takes
these blocks, where both sides of a weight are multiples of 128 and the compute format is bf16.
Everywhere else factors are rounded, and multiplied in the compute format, with sums of at least
float32. The two sum the same products. Within 128 of them Hopper's tensor cores are said to keep
fewer bits (DeepSeek-V3, 3.3.2); where a GPU was tried (`tests/gpu`), rounding the result to bf16
hid that.

    codes    x [T, I] e4m3      scales  [T, I / 128], float32, tokens next to each other;
                                        T is filled up to a multiple of 4 with zeros
             W [O, I] e4m3              [O / 128, I / 128], float32;
                                        rows are filled up to a multiple of 4
"""

import math
import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.layout.blocks import BLOCK, runs
from longshift.model.torch_compile import compiled_for, why
from longshift.spec.formats import LARGEST, LEAST_SCALE

CODE = torch.float8_e4m3fn
FILLED = 4  # sides of scales are multiples of it


def rounded(x: Tensor, rows: int = 1) -> Tensor:
    """x [R, C] as codes and scales of blocks of `rows` x BLOCK have it, in its own format."""
    y = x.new_empty(x.shape)
    for row_slice, height in runs(x.shape[0], rows):
        for column_slice, width in runs(x.shape[1], BLOCK):
            # [blocks down, height, blocks across, width]
            blocks, codes = (
                t[row_slice, column_slice].unflatten(1, (-1, width)).unflatten(0, (-1, height))
                for t in (x, y)
            )
            scale = _scale(torch.linalg.vector_norm(blocks, math.inf, (1, 3), keepdim=True))
            torch.div(blocks, scale, out=codes)
            codes.copy_(codes.to(CODE)).mul_(scale)
    return y


def _scale(largest: Tensor) -> Tensor:
    """The scales of blocks with these largest magnitudes, of their format."""
    share = (
        largest.to(torch.float32, copy=True)
        .div_(LARGEST)
        .nan_to_num_(nan=math.inf, posinf=math.inf)
    )
    share.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000)  # up to a power of two
    return share.clamp_(min=LEAST_SCALE).to(largest.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, float8: bool = True) -> Tensor:
    """x [T, I] W^T + b of a weight [O, I] -> [T, O]. `float8`: of factors of eight bits."""
    if not float8:
        return F.linear(x, weight, bias)
    if multiplies_codes(x, weight):
        y = _product(x, weight)
        return y if bias is None else y.add_(bias)
    return F.linear(rounded(x), rounded(weight, BLOCK), bias)


def linear_back(grad: Tensor, weight: Tensor, float8: bool = True) -> Tensor:
    """dy [T, O] W of a weight [O, I] -> dx [T, I]. `float8`: of factors of eight bits."""
    if not float8:
        return torch.mm(grad, weight)
    if multiplies_codes(grad, weight):
        return _product(grad, weight.mT)
    return torch.mm(rounded(grad), rounded(weight, BLOCK))


def multiplies_codes(x: Tensor, weight: Tensor) -> bool:
    """Whether this device multiplies codes of x, or of a gradient, and of a weight."""
    has_whole_blocks = x.shape[0] > 0 and weight.shape[0] % BLOCK == weight.shape[1] % BLOCK == 0
    is_bf16 = x.dtype == weight.dtype == torch.bfloat16
    return x.device.type == "cuda" and has_whole_blocks and is_bf16 and has_codes(x.device)


@cache
def has_codes(device: torch.device) -> bool:
    """Whether a GPU has matmuls of codes with these blocks: cuBLAS has them for Hopper, from CUDA
    12.9 on."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return (
        version >= (12, 9)
        and hasattr(F, "scaled_mm")
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] W^T of a weight [N, K] -> [T, N], by codes."""
    code_rows, code_blocks = _coders(x.device)
    codes, scales = code_rows(x)
    weight_codes, weight_scales = code_blocks(weight)
    y = F.scaled_mm(
        codes,
        weight_codes.mT,
        scales.mT,
        F.ScalingType.BlockWise1x128,
        weight_scales.mT,
        F.ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return y[: x.shape[0]]  # without the rows that filled up


def rows_coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [C / BLOCK, R] of x [T, C], in blocks of a row; R is T filled up to a
    multiple of FILLED with zeros."""
    blocks = F.pad(x, (0, 0, 0, -x.shape[0] % FILLED)).unflatten(1, (-1, BLOCK))
    scale = _scale(blocks.abs().amax(2))
    codes = (blocks / scale.unsqueeze(2)).to(CODE).flatten(1).contiguous()
    return codes, scale.to(torch.float32).mT.contiguous()


def blocks_coded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [R / BLOCK, S] of a weight [R, C], in blocks of BLOCK x BLOCK; S is C
    / BLOCK filled up to a multiple of FILLED with zeros."""
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _scale(blocks.abs().amax((1, 3), keepdim=True))
    codes = (blocks / scale).to(CODE).flatten(2).flatten(0, 1).contiguous()
    scales = scale.squeeze((1, 3)).to(torch.float32)
    return codes, F.pad(scales, (0, -blocks.shape[2] % FILLED)).contiguous()


Coder = Callable[[Tensor], tuple[Tensor, Tensor]]


@cache
def _coders(device: torch.device) -> tuple[Coder, Coder]:
    """`rows_coded` and `blocks_coded`, in one kernel or two for each shape of a weight and each
    width of rows, where torch compiles here: written out they take eight times as long."""
    compiled_rows = compiled_for(rows_coded, 1)
    code_blocks = compiled_for(blocks_coded, 0, dynamic=False)

    def code_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.mark_static(x, 1)
        return compiled_rows(x)

    try:
        code_rows(torch.ones(8, BLOCK, dtype=torch.bfloat16, device=device))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as fault:
        warnings.warn(
            "codes of eight bits are made without torch.compile, eight times as slowly:"
            f" {why(fault)}",
            stacklevel=2,
        )
        return rows_coded, blocks_coded
    return code_rows, code_blocks
