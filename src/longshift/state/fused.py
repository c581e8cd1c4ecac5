"""The fused buffer of a bucket as few strided views: what a gather copies into the weights, and what their gradients are copied into.

buffer [slots, width]          a slot holds the rows that one holder keeps at home, piece after piece
┌───────────┬──────┬──┐
│ A rows 0:3│ B 0:2│n │ ─┐     Slots that keep equally many rows of a piece at one place of theirs are one strip: one strided view of the
├───────────┼──────┼──┤  │     buffer, [slots, rows, ...], and one of the weight, whose rows follow one another. Pieces whose rows divide
│ A rows 3:6│ B 2:4│n │ ─┘     evenly are one strip each, however many holders there are; each that does not adds one to those behind it.
├────────┬──┴───┬──┴──┤
│ A 6:8  │ B 4:6│n│   │        The end of a slot that is shorter than the width is padding, and never read.
└────────┴──────┴─┴───┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from longshift.layout.box import Box
from longshift.layout.placement import Bucket, assemble
from longshift.spec.model import ModelSpec


@dataclass(frozen=True)
class Strip:
    """Rows of one piece in slots `first` to `last` (exclusive), from element `offset` of each on. `shape`: slots, rows of each, the other
    dims; `at`: where those rows lie in the rank's tensor of weight `name`."""

    name: str
    first: int
    last: int
    offset: int
    shape: tuple[int, ...]
    at: tuple[slice, ...]

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """The strip of a fused buffer [slots, width], as a view of shape `shape`."""
        size = int(np.prod(self.shape[1:]))
        return buffer[self.first : self.last, self.offset : self.offset + size].view(self.shape)

    def in_weight(self, tensor: Tensor) -> Tensor:
        """The strip of the rank's tensor of the weight, or of its gradient, as a view of shape `shape`."""
        return tensor[self.at].unflatten(0, self.shape[:2])


class Strips:
    """How one bucket lies in its fused buffer. Immutable. `slots`: one a holder where home is sharded, else one; `width`: elements of the
    largest; `own`: of this rank's."""

    def __init__(self, bucket: Bucket, rank: int, boxes: Mapping[str, tuple[Box, ...]], spec: ModelSpec):
        """`boxes`: of this rank's tensors, by weight."""
        self.bucket = bucket
        self.slots = len(bucket.holders) if bucket.sharded else 1
        offset, number = np.zeros(self.slots, np.int64), np.arange(self.slots)
        found: list[Strip] = []
        for piece in bucket.pieces:
            each, extra = divmod(piece.box.shape[0], self.slots)
            rows, begin = each + (number < extra), number * each + np.minimum(number, extra)
            edges = np.flatnonzero(np.diff(rows) | np.diff(offset)) + 1
            for first, last in zip((0, *edges.tolist()), (*edges.tolist(), self.slots)):
                if count := int(rows[first]):
                    start = piece.box.start[0] + int(begin[first])
                    box = piece.box.cut(0, start, start + count * (last - first))
                    at = assemble(box, boxes[piece.name], spec.by_name[piece.name].dim)
                    shape = (last - first, count, *box.shape[1:])
                    found.append(Strip(piece.name, first, last, int(offset[first]), shape, at))
            offset += rows * (piece.box.elements // max(1, piece.box.shape[0]))
        self.strips = tuple(found)
        self.width = int(offset[0])
        self.own = int(offset[bucket.holders.index(rank)]) if bucket.sharded else self.width

    @cached_property
    def of(self) -> dict[str, list[Strip]]:
        """Strips by weight."""
        found: dict[str, list[Strip]] = {}
        for strip in self.strips:
            found.setdefault(strip.name, []).append(strip)
        return found
