"""The fused buffer of a bucket as few strided views: what a gather copies into the weights, and
what their gradients are copied into. A strip (`layout.strips`) is one strided view of the buffer,
[slots, rows, ...], and one of the weight, whose rows follow one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from longshift.layout.box import Box
from longshift.layout.placement import Bucket, assemble
from longshift.layout.strips import Strip, strips_of
from longshift.spec.model import ModelSpec


@dataclass(frozen=True)
class StripViews:
    """Where a strip lies. `shape`: slots, rows of each, the other dims; `at`: where its rows lie in
    the rank's tensor of weight `name`."""

    name: str
    strip: Strip
    shape: tuple[int, ...]
    at: tuple[slice, ...]

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """The strip of a fused buffer [slots, width], as a view of shape `shape`."""
        strip = self.strip
        end = strip.offset + prod(self.shape[1:])
        return buffer[strip.first : strip.last, strip.offset : end].view(self.shape)

    def in_weight(self, tensor: Tensor) -> Tensor:
        """The strip of the rank's tensor of the weight, or of its gradient, as a view of shape
        `shape`."""
        return tensor[self.at].unflatten(0, self.shape[:2])


class Strips:
    """How one bucket lies in its fused buffer. Immutable. `slots`: one a holder where home is
    sharded, else one; `index`: this rank's; `width`: elements of the largest; `own`: of this
    rank's."""

    def __init__(
        self, bucket: Bucket, rank: int, boxes: Mapping[str, tuple[Box, ...]], spec: ModelSpec
    ):
        """`boxes`: of this rank's tensors, by weight."""
        self.bucket = bucket
        self.slots = len(bucket.holders) if bucket.sharded else 1
        self.index = bucket.holders.index(rank) if bucket.sharded else 0
        views: list[StripViews] = []
        for strip in strips_of(bucket):
            piece = strip.piece
            name = piece.name
            # Rows of neighbouring slots follow one another in the weight: one box has them all.
            slots = strip.last - strip.first
            start = piece.box.start[0] + strip.begin
            box = piece.box.cut(0, start, start + strip.rows * slots)
            shape = (slots, strip.rows, *box.shape[1:])
            place = assemble(box, boxes[name], spec.by_name[name].dim)
            views.append(StripViews(name, strip, shape, place))
        self.strips = tuple(views)
        self.width = bucket.width
        self.own = bucket.kept(rank)

    @cached_property
    def of(self) -> dict[str, list[StripViews]]:
        """Strips by weight."""
        strips: dict[str, list[StripViews]] = {}
        for strip in self.strips:
            strips.setdefault(strip.name, []).append(strip)
        return strips
