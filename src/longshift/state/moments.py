"""Moments in fewer bits between updates: bf16, or eight-bit codes (e4m3) with a float32 scale a block (`layout.blocks`). An update takes
place on float32 values, which exist for one unit at a time.

    pack      y = x / scale, scale = max|x| of the block / 448;  code = e4m3(y)        of a second moment x is its square root
    unpack    x = code * scale                                                         squared again

[Note: square root] The second moment of a block spans more powers of ten than the 5 of e4m3. What is rounded to zero then divides its
first moment by eps alone, and the weight is gone: plain codes give NaN within 400 steps of a noisy quadratic. Of square roots the codes
span 10 powers of ten, and what is smaller keeps the smallest code: only what is zero is zero.

[Note: rounding] An update moves a second moment by 5 % where beta is 0.95, its root by 2.5 %, and codes are 6 to 12 % apart: rounded to the
nearest it would never fall. So of the values that lie between two codes a share goes up that is as large as their way to the upper one:
before the bits that a code has not are cut off, a number below one unit of its last bit is added, one of 128 equally far apart that take
turns from place to place in a block and from update to update. Rounding so has no bias, and gives the same bits everywhere.

[Note: not finite] A cast to e4m3 makes the largest code of infinity, silently. A block with a value that is not finite has an infinite
scale instead, which is found where a moment in float32 would be, before a checkpoint, and gives values that are not finite.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.layout.blocks import BLOCK, rows_at_once, scales_of, widened
from longshift.layout.box import Box
from longshift.spec.formats import LARGEST, LEAST_SCALE, MomentFormat
from longshift.state.resized import Resized

DTYPES = {"bf16": torch.bfloat16, "float8": torch.float8_e4m3fn}
CUT_BITS = {"bf16": 16, "float8": 20}  # of a float32, that the format has not
SMALLEST = 2.0**-9  # of e4m3
ROOTS = ("exp_avg_sq",)  # moments that are packed as square roots
SCALE = ".scale"  # ends the name of a moment's scales


def saved_moments(moments: Sequence[str], format: MomentFormat, home: torch.dtype) -> dict[str, torch.dtype]:
    """Kinds of vectors that moments are kept as, and their types. `home`: the type of masters."""
    scales = {name + SCALE: torch.float32 for name in moments if format == "float8"}
    return {name: DTYPES.get(format, home) for name in moments} | scales


@dataclass(repr=False)  # torch cannot print a tensor without storage
class PackedMoment:
    """A moment of a shard. Mutable. `codes`: an element each; `scales`: a block each, box by box, None where the format needs none; `wide`:
    the moment in the home format, whose storage exists during an update."""

    boxes: Sequence[Box]
    format: MomentFormat
    root: bool
    wide: Tensor
    codes: Tensor
    scales: Tensor | None

    def __post_init__(self) -> None:
        self.memory = Resized(self.wide)

    def unpack(self) -> None:
        """Have the moment in the home format."""
        self.memory.hold()
        for box, wide, codes, scales in self._runs(self.codes):
            wide.copy_(decoded(codes, scales, box.start[-1], self.root, wide.dtype))

    def maxima(self) -> Tensor:
        """By block, the largest magnitude that its scale is made for, of this rank's part of it; infinite where one is not finite."""
        assert self.scales is not None
        found = torch.empty_like(self.scales)
        for box, wide, _, maxima in self._runs(self.codes, found):
            assert maxima is not None
            maxima.copy_(largest(wide, box.start[-1], self.root))
        return found

    def pack(self, maxima: Tensor | None, number: int) -> None:
        """Keep codes alone. `maxima`: of whole blocks; `number`: of the update."""
        if maxima is not None:
            torch.div(maxima, LARGEST, out=self.scales).clamp_(min=LEAST_SCALE)
        for box, wide, codes, scales in self._runs(self.codes):
            codes.copy_(encoded(wide, scales, box.start[-1], self.root, self.format, number))
        self.memory.drop()

    def places(self) -> Iterator[tuple[Box, int]]:
        """Every box of scales, and where its part of `scales` begins."""
        start = 0
        for box in map(scales_of, self.boxes):
            yield box, start
            start += box.elements

    def _runs(self, codes: Tensor, scales: Tensor | None = None) -> Iterator[tuple[Box, Tensor, Tensor, Tensor | None]]:
        """Some rows of a box at a time: the box, and the rows of the moment, of codes and of scales, all of two dims."""
        scales, start = self.scales if scales is None else scales, 0
        for box, (blocks, first) in zip(self.boxes, self.places()):
            if not box:
                continue
            columns, per_row, rows = box.shape[-1], blocks.shape[-1], rows_at_once(box)
            wide, coded = (flat[start : start + box.elements].view(-1, columns) for flat in (self.wide, codes))
            scaled = None if scales is None else scales[first : first + blocks.elements].view(-1, per_row)
            start += box.elements
            for row in range(0, len(wide), rows):
                part = slice(row, row + rows)
                yield box, wide[part], coded[part], None if scaled is None else scaled[part]


def largest(x: Tensor, column: int, root: bool) -> Tensor:
    """The largest magnitude of each block, float32 [rows, blocks], of rows that begin in this column of the weight; of square roots where
    `root`. Infinite where one is not finite."""
    blocks = in_blocks(x, column)
    found = (blocks.sqrt_() if root else blocks.abs_()).amax(-1).float()
    return torch.where(found.isfinite(), found, torch.inf)


def encoded(x: Tensor, scales: Tensor | None, column: int, root: bool, format: MomentFormat, number: int) -> Tensor:
    """Codes of rows that begin in this column of the weight. [Note: rounding]"""
    y = in_blocks(x, column)
    y = y.sqrt_() if root else y
    if scales is not None:
        y = y.div_(scales[..., None])
    if scales is not None and root:
        kept = y > 0
        y = y.clamp_(min=SMALLEST).mul_(kept)
    bits = y.float().view(torch.int32)
    cut = CUT_BITS[format]
    bits = bits.add_((2 * turn(number, x.device) + 1) << (cut - 8)).bitwise_and_(-1 << cut)
    codes = bits.view(torch.float32).to(DTYPES[format])
    return codes.flatten(-2)[:, column % BLOCK :][:, : x.shape[-1]]


def turn(number: int, device: torch.device) -> Tensor:
    """By place in a block, whose turn of 0 to 127 it is in this update; int32."""
    return (torch.arange(BLOCK, dtype=torch.int32, device=device) * 77 + 79 * number % BLOCK) % BLOCK


def decoded(codes: Tensor, scales: Tensor | None, column: int, root: bool, dtype: torch.dtype) -> Tensor:
    """What codes of rows that begin in this column of the weight stand for."""
    if scales is None:
        return codes.to(dtype)
    y = in_blocks(codes.view(torch.uint8), column).view(codes.dtype).to(dtype).mul_(scales[..., None])
    y = y.square_() if root else y
    return y.flatten(-2)[..., column % BLOCK :][..., : codes.shape[-1]]


def converted(
    read: Callable[[str, Box], Tensor],
    kind: str,
    box: Box,
    shape: tuple[int, ...],
    was: MomentFormat,
    now: MomentFormat,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Values, or codes and scales, of a box of a moment in one format, from what was saved in another. `read`: a kind's saved values of a
    box; `shape`: of the weight. Scales are those of whole blocks, whoever has the rest of them."""
    root, whole = kind in ROOTS, widened(box, shape)
    saved, scales = read(kind, whole), read(kind + SCALE, scales_of(box)) if was == "float8" else None
    columns = whole.shape[-1]
    flat = None if scales is None else scales.view(-1, scales.shape[-1])
    values = (
        saved.view(-1, columns) if was == "float32" else decoded(saved.view(-1, columns), flat, whole.start[-1], _root(root, was), dtype)
    )
    scales = None
    if now == "float8":
        scales = largest(values, whole.start[-1], root).div_(LARGEST).clamp_(min=LEAST_SCALE)
    if now != "float32":
        values = encoded(values, scales, whole.start[-1], _root(root, now), now, 0)
    scales = None if scales is None else scales.view(scales_of(box).shape)
    return values.view(whole.shape)[box.within(whole)], scales


def _root(root: bool, format: MomentFormat) -> bool:
    return root and format == "float8"


def in_blocks(x: Tensor, column: int) -> Tensor:
    """Rows [..., columns] that begin in this column of the weight as blocks [..., blocks, BLOCK], in memory of their own, with zeros beyond
    the ends of the rows."""
    before = column % BLOCK
    return F.pad(x, (before, -(before + x.shape[-1]) % BLOCK)).unflatten(-1, (-1, BLOCK))
