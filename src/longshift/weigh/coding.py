"""What it takes to send a bucket in another format than it is kept in (`state.wire`), in bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

from longshift.layout.placement import Bucket
from longshift.layout.strips import Strip, areas, strips_of
from longshift.spec.formats import SCALE_EVERY, Wire


@dataclass(frozen=True)
class Coding:
    """Bytes of coding a bucket. `size`: of a slot on the wire; `encoding`, `decoding`: of memory that each needs inside itself; `encoded`,
    `decoded`: that each reads and writes."""

    size: int
    encoding: int
    decoding: int
    encoded: int
    decoded: int


def gradient_passes(wire: Wire, sum_bytes: int) -> tuple[int, int]:
    """Bytes that are read and written for an element of a gradient sum, where it is sent and where it is taken."""
    coded = 4 * sum_bytes + 1, 1 + 6 * sum_bytes
    return {"float32": (0, 0), "bf16": (sum_bytes + 2, 2 + 2 * sum_bytes), "float8": coded}[wire.gradients]


def weight_passes(wire: Wire, weight_bytes: int, master_bytes: int) -> tuple[int, int]:
    """Bytes that are read and written for an element of a weight, where it is sent and where it is taken."""
    return (4 * master_bytes + 1, 1 + 4 * max(4, weight_bytes) + weight_bytes) if wire.weights == "float8" else (0, 0)


def gradients_of(bucket: Bucket, rank: int, wire: Wire, sum_bytes: int) -> Coding | None:
    """The coding of a bucket's reductions on a rank; None where sums travel as they are. `sum_bytes`: of an element of a sum."""
    if wire.gradients == "float32" or not bucket.sharded or bucket.frozen:
        return None
    slots = len(bucket.holders)
    passes = (slots * bucket.width * size for size in gradient_passes(wire, sum_bytes))
    if wire.gradients == "bf16":
        return Coding(2 * bucket.width, 0, 0, *passes)
    strips = tuple(strips_of(bucket))
    encoding = max(_encoding(strip.elements_at_once(strip.last - strip.first), sum_bytes) for strip in strips)
    decoding = max((_decoding(strip, slots, sum_bytes) for strip in _own(strips, bucket, rank)), default=0)
    return Coding(areas(strips, sum_bytes).size, encoding, decoding, *passes)


def weights_of(bucket: Bucket, rank: int, wire: Wire, weight_bytes: int, master_bytes: int) -> Coding | None:
    """The coding of a bucket's gathers on a rank; None where weights travel as they are. `weight_bytes`, `master_bytes`: of an element of
    the copies and of the masters."""
    if wire.weights != "float8" or not bucket.sharded:
        return None
    strips, wide = tuple(strips_of(bucket)), max(4, weight_bytes)
    encoding = max((_encoding(strip.elements_at_once(1), master_bytes) for strip in _own(strips, bucket, rank)), default=0)
    decoding = max(_decoding(strip, strip.last - strip.first, wide) for strip in strips)
    sent, taken = weight_passes(wire, weight_bytes, master_bytes)
    return Coding(areas(strips, weight_bytes).size, encoding, decoding, bucket.kept(rank) * sent, bucket.elements * taken)


def _own(strips: Iterable[Strip], bucket: Bucket, rank: int) -> Iterable[Strip]:
    """The strips that a rank's slot is in."""
    index = bucket.holders.index(rank)
    return (strip for strip in strips if strip.first <= index < strip.last)


def _encoding(elements: int, wide_bytes: int) -> int:
    """A copy in blocks, the least and the largest of each, and whether it is infinite."""
    return elements * wide_bytes + elements // SCALE_EVERY * (2 * wide_bytes + 1 + 4 * (wide_bytes != 4))


def _decoding(strip: Strip, slots: int, wide_bytes: int) -> int:
    """Codes in blocks, where rows are none by themselves, and what they stand for."""
    return strip.elements_at_once(slots) * (wide_bytes + (not strip.whole))
