"""How the pieces of a bucket lie in the slots of its fused buffer, and where their codes and scales
lie when they travel in eight bits.

buffer [slots, width]       a slot holds the rows that one holder keeps at home, piece after piece
┌───────────┬──────┬──┐
│ A rows 0:3│ B 0:2│n │ ─┐  Slots that keep equally many rows of a piece at one place of theirs are
├───────────┼──────┼──┤  │  one strip. Pieces whose rows divide evenly are one strip each, however
│ A rows 3:6│ B 2:4│n │ ─┘  many holders there are; each that does not adds one to those behind it.
├────────┬──┴───┬──┴──┤
│ A 6:8  │ B 4:6│n│   │     The end of a slot that is shorter than the width is padding, and never
└────────┴──────┴─┴───┘     read.

on the wire    │ n, as it is │ scales of A, of B │ codes of A │ codes of B │
               each area begins at a multiple of ALIGNED bytes

[Note: wide vectors] Weights of one dim (norms, biases) are few, and a block of theirs could belong
to two holders: they travel as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from longshift.layout.blocks import BLOCK, scales_of
from longshift.layout.placement import Bucket, Piece

ALIGNED = 8
# Elements that are coded at one time, at most: fewer are more launches, more take memory.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Strip:
    """Rows of one piece in slots `first` to `last` (exclusive).

    rows          of each slot
    begin         the first row of slot `first`, as a row of the piece
    offset        elements before it in a slot
    wire_offset   elements of its kind, codes or vectors, before it on the wire
    scale_offset  scales before it on the wire
    """

    piece: Piece
    first: int
    last: int
    begin: int
    rows: int
    offset: int
    wire_offset: int
    scale_offset: int

    @property
    def coded(self) -> bool:
        """Whether it travels as codes. [Note: wide vectors]"""
        return _is_coded(self.piece)

    @property
    def scales(self) -> int:
        """How many scales a row of the piece has."""
        return _row_scales(self.piece)

    @property
    def elements(self) -> int:
        """How many elements a slot has of it."""
        return self.rows * prod(self.piece.box.shape[1:])

    @property
    def has_whole_blocks(self) -> bool:
        """Whether its rows are whole blocks."""
        box = self.piece.box
        return box.start[-1] % BLOCK == 0 and box.shape[-1] % BLOCK == 0

    def rows_at_once(self, slots: int) -> int:
        """How many rows of the piece, in so many slots, are coded at one time."""
        return min(self.rows, max(1, AT_ONCE // (slots * self.scales * BLOCK)))

    def elements_at_once(self, slots: int) -> int:
        """How many elements are coded at one time, those of whole blocks; 0 if it is not coded."""
        return slots * self.rows_at_once(slots) * self.scales * BLOCK if self.coded else 0


def _is_coded(piece: Piece) -> bool:
    return len(piece.box.shape) > 1


def _row_scales(piece: Piece) -> int:
    return prod(scales_of(piece.box).shape[1:])


def strips_of(bucket: Bucket) -> Iterator[Strip]:
    """The strips of a bucket, piece by piece."""
    num_slots = len(bucket.holders) if bucket.sharded else 1
    slots = np.arange(num_slots)
    # Elements, codes, vectors and scales of the pieces before, int64 [slots].
    offset, codes, vectors, scales = np.zeros((4, num_slots), np.int64)
    for piece in bucket.pieces:
        # 1. The rows of each slot: nearly equal shares, as `spec.param.share` has them.
        num_rows = piece.box.shape[0]
        share_rows, extra = divmod(num_rows, num_slots)
        rows = share_rows + (slots < extra)
        begin = slots * share_rows + np.minimum(slots, extra)

        # 2. A strip ends where slots differ in rows or offset.
        is_coded = _is_coded(piece)
        wire_offset = codes if is_coded else vectors
        edges = np.flatnonzero(np.diff(rows) | np.diff(offset)) + 1
        for first, last in pairwise((0, *edges.tolist(), num_slots)):
            if rows[first]:
                yield Strip(
                    piece=piece,
                    first=first,
                    last=last,
                    begin=int(begin[first]),
                    rows=int(rows[first]),
                    offset=int(offset[first]),
                    wire_offset=int(wire_offset[first]),
                    scale_offset=int(scales[first]),
                )

        # 3. `wire_offset` is a view of one kind: both counts move on in place.
        elements = rows * (piece.box.elements // max(1, num_rows))
        offset += elements
        wire_offset += elements
        if is_coded:
            scales += rows * _row_scales(piece)


@dataclass(frozen=True)
class Areas:
    """Where the areas of a slot begin in bytes, and how long it is; vectors come first."""

    scales: int
    codes: int
    size: int


def areas(strips: Iterable[Strip], vector_bytes: int) -> Areas:
    """The areas of the largest slot, the first. `vector_bytes`: of an element that is no code."""
    codes = vectors = scales = 0
    for strip in strips:
        if strip.first > 0:
            continue
        if strip.coded:
            codes += strip.elements
            scales += strip.rows * strip.scales
        else:
            vectors += strip.elements
    scales_start = _align(vectors * vector_bytes)
    codes_start = scales_start + _align(4 * scales)
    return Areas(scales_start, codes_start, codes_start + _align(codes))


def _align(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
