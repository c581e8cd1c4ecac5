"""What it takes to send a bucket in another format than it is kept in (`state.wire`), in bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

from longshift.layout.placement import Bucket
from longshift.layout.strips import Strip, areas, strips_of
from longshift.spec.formats import SCALE_EVERY, Wire


@dataclass(frozen=True)
class Coding:
    """`size`: of a slot on the wire. `encoding`, `decoding`: of memory that these need inside themselves; `encoded`, `decoded`: that they
    read and write."""

    size: int
    encoding: int
    decoding: int
    encoded: int
    decoded: int


def gradients_of(bucket: Bucket, rank: int, wire: Wire, sum_bytes: int) -> Coding | None:
    """Of a bucket's reductions on a rank, where sums have so many bytes an element; None where they travel as they are."""
    if wire.gradients == "float32" or not bucket.sharded or bucket.frozen:
        return None
    slots, elements = len(bucket.holders), len(bucket.holders) * bucket.width
    if wire.gradients == "bf16":
        return Coding(2 * bucket.width, 0, 0, elements * (sum_bytes + 2), elements * (2 + 2 * sum_bytes))
    strips = tuple(strips_of(bucket))
    encoding = max(_encoding(strip.elements_at_once(strip.last - strip.first), sum_bytes) for strip in strips)
    decoding = max((_decoding(strip.elements_at_once(slots), sum_bytes) for strip in _own(strips, bucket, rank)), default=0)
    size = areas(strips, sum_bytes).size
    return Coding(size, encoding, decoding, elements * (6 * sum_bytes + 1), elements * (3 + 6 * sum_bytes))


def weights_of(bucket: Bucket, rank: int, wire: Wire, weight_bytes: int, master_bytes: int) -> Coding | None:
    """Of a bucket's gathers on a rank, whose copies and masters have so many bytes an element; None where they travel as they are."""
    if wire.weights != "float8" or not bucket.sharded:
        return None
    strips, wide = tuple(strips_of(bucket)), max(4, weight_bytes)
    encoding = max((_encoding(strip.elements_at_once(1), master_bytes) for strip in _own(strips, bucket, rank)), default=0)
    decoding = max(_decoding(strip.elements_at_once(strip.last - strip.first), wide) for strip in strips)
    own, all_of_them = bucket.kept(rank), bucket.elements
    size = areas(strips, weight_bytes).size
    return Coding(size, encoding, decoding, own * (6 * master_bytes + 1), all_of_them * (3 + 4 * wide + weight_bytes))


def _own(strips: Iterable[Strip], bucket: Bucket, rank: int) -> Iterable[Strip]:
    """The strips that a rank's slot is in."""
    index = bucket.holders.index(rank)
    return (strip for strip in strips if strip.first <= index < strip.last)


def _encoding(elements: int, wide_bytes: int) -> int:
    """A copy in blocks, the least and the largest of each, and whether it is infinite."""
    return elements * wide_bytes + elements // SCALE_EVERY * (2 * wide_bytes + 1 + 4 * (wide_bytes != 4))


def _decoding(elements: int, wide_bytes: int) -> int:
    """Codes in blocks, and what they stand for."""
    return elements * (1 + wide_bytes)
