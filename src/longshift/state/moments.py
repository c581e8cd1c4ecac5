"""Moments in fewer bits between updates: bf16, or eight-bit codes (e4m3) with a float32 scale a
block (`layout.blocks`). An update takes place on float32 values,
which exist for one unit at a time.

    pack      y = x / scale, scale = max|x| of the block / 448;  code = e4m3(y)
              of a second moment x is its square root
    unpack    x = code * scale
              of a second moment squared again

[Note: square root] The second moment of a block spans more powers of ten than the 5 of e4m3. What
is rounded to zero then divides its first moment by eps alone, and the weight is gone: plain codes
give NaN within 400 steps of a noisy quadratic. Of square roots the codes span 10 powers of ten, and
what is smaller keeps the smallest code: only what is zero is zero.

[Note: rounding] An update moves a second moment by 5 % where beta is 0.95, its root by 2.5 %, and
codes are 6 to 12 % apart: rounded to the nearest it would never fall. So of the values that lie
between two codes a share goes up that is as large as their way to the upper one: before the bits
that a code has not are cut off, a number below one unit of its last bit is added, one of 128
equally far apart that take turns from place to place in a block and from update to update. Rounding
so has no bias, and gives the same bits everywhere.

A block with a value that is not finite has an infinite scale ([Note: not finite] of
`state.block_codec`), which is found where a moment in float32 would be, before a checkpoint, and
gives values that are not finite.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longshift.layout.blocks import BLOCK, rows_at_once, scales_of, widen_to_blocks
from longshift.layout.box import Box
from longshift.spec.formats import MomentFormat
from longshift.state.block_codec import (
    CODES,
    block_maxima,
    decode,
    in_blocks,
    in_rows,
    maxima_to_scales,
)
from longshift.state.records import PlacedBox
from longshift.state.resizable import ResizableStorage

Read = Callable[[str, str, Box], Tensor]  # the values of a kind, weight and box
DTYPES = {"bf16": torch.bfloat16, "float8": CODES}
CUT_BITS = {"bf16": 16, "float8": 20}  # of a float32, that the format has not
SMALLEST = 2.0**-9  # of e4m3
ROOTS = ("exp_avg_sq",)  # moments that are packed as square roots
SCALE = ".scale"  # ends the name of a moment's scales


def saved_moments(
    moments: Sequence[str], format: MomentFormat, home: torch.dtype
) -> dict[str, torch.dtype]:
    """Kinds of vectors that moments are kept as, and their types. `home`: the type of masters."""
    scales = {name + SCALE: torch.float32 for name in moments if format == "float8"}
    return {name: DTYPES.get(format, home) for name in moments} | scales


class PackedMoment:
    """A moment of a shard. Mutable. `codes`: an element each; `scales`: a block each, box by box,
    None where the format needs none; `wide`: the moment in the home format, whose storage exists
    during an update."""

    def __init__(
        self,
        boxes: Sequence[PlacedBox],
        format: MomentFormat,
        root: bool,
        wide: Tensor,
        codes: Tensor,
        scales: Tensor | None,
    ):
        self.format: MomentFormat = format
        self.root = root
        self.wide = wide
        self.codes = codes
        self.scales = scales
        self.memory = ResizableStorage(wide)
        # Some rows at a time: column, moment, codes, scales.
        self._runs: list[tuple[int, Tensor, Tensor, Tensor | None]] = []
        for placed in boxes:
            if placed.box:
                rows = rows_at_once(placed.box)
                wide_runs = _rows(placed.values(wide)).split(rows)
                code_runs = _rows(placed.values(codes)).split(rows)
                scale_runs: Sequence[Tensor | None] = [None] * len(wide_runs)
                if scales is not None:
                    scale_runs = _rows(placed.scales(scales)).split(rows)
                columns = [placed.box.start[-1]] * len(wide_runs)
                self._runs += zip(columns, wide_runs, code_runs, scale_runs)

    def unpack(self) -> None:
        """Have the moment in the home format."""
        self.memory.hold()
        for column, wide, codes, scales in self._runs:
            wide.copy_(decoded(codes, scales, column, self.root, wide.dtype))

    def measure(self) -> None:
        """Let `scales` be the largest magnitudes that scales are made for,
        of this rank's parts of blocks."""
        for column, wide, _, scales in self._runs:
            if scales is not None:
                scales.copy_(largest(wide, column, self.root))

    def pack(self, number: int) -> None:
        """Keep codes alone, with the scales of blocks that were measured.
        `number`: of the update."""
        if self.scales is not None:
            maxima_to_scales(self.scales)
        for column, wide, codes, scales in self._runs:
            codes.copy_(encoded(wide, scales, column, self.root, self.format, number))
        self.memory.drop()


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def largest(x: Tensor, column: int, root: bool) -> Tensor:
    """The largest magnitude of each block, float32 [rows, blocks], of rows that begin in this
    column of the weight; of square roots where `root`. Infinite where one is not finite."""
    maxima = block_maxima(in_blocks(x.sqrt() if root else x, column, copy=False))
    return torch.where(maxima.isfinite(), maxima, torch.inf)


def encoded(
    x: Tensor, scales: Tensor | None, column: int, root: bool, format: MomentFormat, number: int
) -> Tensor:
    """Codes of rows that begin in this column of the weight. [Note: rounding]"""
    # 1. Numbers of the range of the codes.
    y = in_blocks(x, column)
    y = y.sqrt_() if root else y
    if scales is not None:
        y = y.div_(scales[..., None])
    if scales is not None and root:
        # Only what is zero becomes zero. [Note: square root]
        is_positive = y > 0
        y = y.clamp_(min=SMALLEST).mul_(is_positive)

    # 2. Cut off the bits that a code has not. What is added is below a unit of the last that stays.
    bits = y.float().view(torch.int32)
    cut = CUT_BITS[format]
    bits = bits.add_((2 * turn(number, x.device) + 1) << (cut - 8)).bitwise_and_(-1 << cut)
    return in_rows(bits.view(torch.float32).to(DTYPES[format]), column, x.shape[-1])


def turn(number: int, device: torch.device) -> Tensor:
    """By place in a block, whose turn of 0 to 127 it is in this update; int32."""
    # Both factors are odd: 128 places, and 128 updates, each have all turns.
    return (
        torch.arange(BLOCK, dtype=torch.int32, device=device) * 77 + 79 * number % BLOCK
    ) % BLOCK


def decoded(
    codes: Tensor, scales: Tensor | None, column: int, root: bool, dtype: torch.dtype
) -> Tensor:
    """What codes of rows that begin in this column of the weight stand for."""
    if scales is None:
        return codes.to(dtype)
    y = decode(codes, scales, column, dtype)
    return y.square_() if root else y


def converted(
    read: Read,
    kind: str,
    name: str,
    box: Box,
    shape: tuple[int, ...],
    was: MomentFormat,
    now: MomentFormat,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Values, or codes and scales, of a box of a moment in one format, from what was saved in
    another. `read`: the saved values of a kind, weight and box; `shape`: of the weight. Scales are
    those of whole blocks, whoever has the rest of them."""
    blocks = scales_of(box)
    if was == now:
        return read(kind, name, box), read(kind + SCALE, name, blocks) if was == "float8" else None

    # Blocks that the box has a part of are read, and coded, as a whole.
    wide_box = widen_to_blocks(box, shape)
    root = kind in ROOTS
    column = wide_box.start[-1]
    values = _rows(read(kind, name, wide_box))

    if was != "float32":
        scales = _rows(read(kind + SCALE, name, blocks)) if was == "float8" else None
        values = decoded(values, scales, column, root and was == "float8", dtype)

    scales = None
    if now == "float8":
        scales = maxima_to_scales(largest(values, column, root))
    if now != "float32":
        values = encoded(values, scales, column, root and now == "float8", now, 0)
    values = values.view(wide_box.shape)[box.within(wide_box)]
    return values, None if scales is None else scales.view(blocks.shape)
