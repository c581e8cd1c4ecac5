"""How the pieces of a bucket lie in the slots of its fused buffer, and where their codes and scales lie when they travel in eight bits.

buffer [slots, width]          a slot holds the rows that one holder keeps at home, piece after piece
┌───────────┬──────┬──┐
│ A rows 0:3│ B 0:2│n │ ─┐     Slots that keep equally many rows of a piece at one place of theirs are one strip. Pieces whose rows divide
├───────────┼──────┼──┤  │     evenly are one strip each, however many holders there are; each that does not adds one to those behind it.
│ A rows 3:6│ B 2:4│n │ ─┘
├────────┬──┴───┬──┴──┤
│ A 6:8  │ B 4:6│n│   │        The end of a slot that is shorter than the width is padding, and never read.
└────────┴──────┴─┴───┘

on the wire    │ n, as it is │ scales of A, of B │ codes of A │ codes of B │      each area begins at a multiple of ALIGNED bytes

[Note: wide vectors] Weights of one dim (norms, biases) are few, and a block of theirs could belong to two holders: they travel as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from longshift.layout.blocks import BLOCK, scales_of
from longshift.layout.placement import Bucket, Piece

ALIGNED = 8
AT_ONCE = 1 << 22  # elements that are coded at one time, at the most: fewer are more launches, more take memory


@dataclass(frozen=True)
class Strip:
    """Rows of one piece in slots `first` to `last` (exclusive): `rows` of each, that of slot `first` begins with row `begin` of the piece.
    In a slot they lie from element `offset` on; on the wire behind `before` elements of their kind, codes or vectors, and behind
    `scales_before` scales."""

    piece: Piece
    first: int
    last: int
    begin: int
    rows: int
    offset: int
    before: int
    scales_before: int

    @property
    def coded(self) -> bool:
        """Whether it travels as codes. [Note: wide vectors]"""
        return len(self.piece.box.shape) > 1

    @property
    def scales(self) -> int:
        """How many scales a row of the piece has."""
        return prod(scales_of(self.piece.box).shape[1:])

    @property
    def elements(self) -> int:
        """How many elements a slot has of it."""
        return self.rows * prod(self.piece.box.shape[1:])

    @property
    def whole(self) -> bool:
        """Whether its rows are whole blocks."""
        box = self.piece.box
        return box.start[-1] % BLOCK == 0 and box.shape[-1] % BLOCK == 0

    def at_once(self, slots: int) -> int:
        """How many rows of the piece, in so many slots, are coded at one time."""
        return min(self.rows, max(1, AT_ONCE // (slots * self.scales * BLOCK)))

    def elements_at_once(self, slots: int) -> int:
        """How many elements are coded at one time, those of whole blocks; none where it is not coded."""
        return slots * self.at_once(slots) * self.scales * BLOCK if self.coded else 0


def strips_of(bucket: Bucket) -> Iterator[Strip]:
    """The strips of a bucket, piece by piece."""
    slots = len(bucket.holders) if bucket.sharded else 1
    offset, codes, vectors, scales = np.zeros((4, slots), np.int64)
    number = np.arange(slots)
    for piece in bucket.pieces:
        each, extra = divmod(piece.box.shape[0], slots)
        rows, begin = each + (number < extra), number * each + np.minimum(number, extra)
        coded = len(piece.box.shape) > 1
        before = codes if coded else vectors
        edges = np.flatnonzero(np.diff(rows) | np.diff(offset)) + 1
        for first, last in zip((0, *edges.tolist()), (*edges.tolist(), slots)):
            if count := int(rows[first]):
                yield Strip(piece, first, last, int(begin[first]), count, *(int(some[first]) for some in (offset, before, scales)))
        own = rows * (piece.box.elements // max(1, piece.box.shape[0]))
        offset += own
        before += own
        if coded:
            scales += rows * prod(scales_of(piece.box).shape[1:])


@dataclass(frozen=True)
class Areas:
    """Where the areas of a slot begin in bytes, and how long it is; vectors come first."""

    scales: int
    codes: int
    size: int


def areas(strips: Iterable[Strip], vector_bytes: int) -> Areas:
    """The areas of the largest slot, the first; `vector_bytes`: of an element that is no code."""
    codes = vectors = scales = 0
    for strip in strips:
        if strip.first == 0:
            codes += strip.elements * strip.coded
            vectors += strip.elements * (not strip.coded)
            scales += strip.rows * strip.scales * strip.coded
    scales_at = _up(vectors * vector_bytes)
    codes_at = scales_at + _up(4 * scales)
    return Areas(scales_at, codes_at, codes_at + _up(codes))


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
