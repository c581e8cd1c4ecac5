"""Eight-bit codes (e4m3) with a float32 scale for each block of a row (`layout.blocks`): of moments
between updates, and of what travels.

    encode    y = x / scale, scale = max|x| of the block / 448;  code = e4m3(y)
    decode    x = code * scale

Rows begin in any column of their weight: a block that begins before, or ends behind them, is filled
up with zeros.

[Note: not finite] A cast to e4m3 makes the largest code of infinity, silently. A block with a value
that is not finite has an infinite scale instead, with which all of it becomes NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.layout.blocks import BLOCK
from longshift.spec.formats import LARGEST, LEAST_SCALE

CODES = torch.float8_e4m3fn


def in_blocks(x: Tensor, column: int, copy: bool = True) -> Tensor:
    """Rows [..., columns] that begin in this column of the weight as blocks [..., blocks, BLOCK],
    with zeros beyond the ends of the rows. `copy`: in memory of their own, also where rows are
    whole blocks."""
    left_pad = column % BLOCK
    right_pad = -(column + x.shape[-1]) % BLOCK
    if copy or left_pad or right_pad:
        x = F.pad(x, (left_pad, right_pad))
    return x.unflatten(-1, (-1, BLOCK))


def in_rows(blocks: Tensor, column: int, columns: int) -> Tensor:
    """The rows of blocks [..., blocks, BLOCK]: what `in_blocks` undoes."""
    return blocks.flatten(-2)[..., column % BLOCK :][..., :columns]


def maxima_to_scales(maxima: Tensor) -> Tensor:
    """Scales, in place, of blocks with these largest magnitudes, float32. [Note: not finite]"""
    return maxima.div_(LARGEST).nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=LEAST_SCALE)


def block_maxima(blocks: Tensor) -> Tensor:
    """The largest magnitude of each of blocks [..., BLOCK], float32."""
    # `blocks.abs().amax()` would need a copy of the blocks.
    low, high = blocks.aminmax(dim=-1)
    return torch.maximum(low.neg_(), high, out=high).to(torch.float32)


def encode(x: Tensor, column: int, scales: Tensor, codes: Tensor) -> None:
    """Scales and codes of rows x [..., columns] that begin in this column of the weight."""
    columns = x.shape[-1]
    blocks = in_blocks(x, column, copy=False)
    scales.copy_(maxima_to_scales(block_maxima(blocks)))
    # x must not change: where blocks are a view of it, quotients have memory of their own.
    is_view = column % BLOCK == columns % BLOCK == 0
    out = torch.empty_like(blocks) if is_view else blocks
    scaled = torch.div(blocks, scales[..., None], out=out)
    codes.copy_(in_rows(scaled, column, columns))


def decode(codes: Tensor, scales: Tensor, column: int, dtype: torch.dtype) -> Tensor:
    """What codes of rows that begin in this column of the weight stand for."""
    blocks = in_blocks(codes.view(torch.uint8), column, copy=False).view(codes.dtype)
    return in_rows(blocks.to(dtype).mul_(scales[..., None]), column, codes.shape[-1])
