"""What it takes to send a bucket in another format than it is kept in (`state.wire`), in bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

from longshift.layout.placement import Bucket
from longshift.layout.strips import Strip, areas, strips_of
from longshift.spec.formats import SCALE_EVERY, Wire


@dataclass(frozen=True)
class Coding:
    """Bytes of coding a bucket.

    `size`: of a slot on the wire.
    `encoding`, `decoding`: workspace of each.
    `encoded`, `decoded`: bytes that each reads and writes.
    """

    size: int
    encoding: int
    decoding: int
    encoded: int
    decoded: int


def gradient_passes(wire: Wire, sum_bytes: int) -> tuple[int, int]:
    """Bytes read and written for an element of a gradient sum: by its sender, by its receiver."""
    match wire.gradients:
        case "float32":
            return 0, 0
        case "bf16":
            return sum_bytes + 2, 2 + 2 * sum_bytes
        case "float8":
            # One byte is the code; the others are passes over values in the home format.
            return 4 * sum_bytes + 1, 1 + 6 * sum_bytes


def weight_passes(wire: Wire, weight_bytes: int, master_bytes: int) -> tuple[int, int]:
    """Bytes read and written for an element of a weight: by its sender, by its receiver."""
    if wire.weights != "float8":
        return 0, 0
    return 4 * master_bytes + 1, 1 + 4 * max(4, weight_bytes) + weight_bytes


def gradient_coding(bucket: Bucket, rank: int, wire: Wire, sum_bytes: int) -> Coding | None:
    """The coding of a bucket's reductions on a rank; None where sums travel as they are.

    `sum_bytes`: of an element of a sum.
    """
    if wire.gradients == "float32" or bucket.frozen or not bucket.sharded:
        return None
    slots = len(bucket.holders)
    elements = slots * bucket.width
    sent_bytes, received_bytes = gradient_passes(wire, sum_bytes)
    size, encoding, decoding = 2 * bucket.width, 0, 0
    if wire.gradients == "float8":
        strips = tuple(strips_of(bucket))
        size = areas(strips, sum_bytes).size
        sizes = [strip.elements_at_once(strip.last - strip.first) for strip in strips]
        encoding = max(_encoding(elements_at_once, sum_bytes) for elements_at_once in sizes)
        shard_strips = _strips_of_rank(strips, bucket, rank)
        decoding = max((_decoding(strip, slots, sum_bytes) for strip in shard_strips), default=0)
    return Coding(
        size=size,
        encoding=encoding,
        decoding=decoding,
        encoded=elements * sent_bytes,
        decoded=elements * received_bytes,
    )


def weight_coding(
    bucket: Bucket, rank: int, wire: Wire, weight_bytes: int, master_bytes: int
) -> Coding | None:
    """The coding of a bucket's gathers on a rank; None where weights travel as they are.

    `weight_bytes`, `master_bytes`: of an element of the copies and of the masters.
    """
    if wire.weights != "float8" or not bucket.sharded:
        return None
    strips = tuple(strips_of(bucket))
    accum_bytes = max(4, weight_bytes)
    sizes = [strip.elements_at_once(1) for strip in _strips_of_rank(strips, bucket, rank)]
    sent_bytes, received_bytes = weight_passes(wire, weight_bytes, master_bytes)
    return Coding(
        size=areas(strips, weight_bytes).size,
        encoding=max((_encoding(elements, master_bytes) for elements in sizes), default=0),
        decoding=max(_decoding(strip, strip.last - strip.first, accum_bytes) for strip in strips),
        encoded=bucket.kept(rank) * sent_bytes,
        decoded=bucket.elements * received_bytes,
    )


def _strips_of_rank(strips: Iterable[Strip], bucket: Bucket, rank: int) -> list[Strip]:
    """The strips that a rank's slot is in."""
    index = bucket.holders.index(rank)
    return [strip for strip in strips if strip.first <= index < strip.last]


def _encoding(elements: int, item_bytes: int) -> int:
    # A copy in blocks; of each block the least and the largest value, and whether it is infinite;
    # a float32 scale of its own, where values have another format.
    block_bytes = 2 * item_bytes + 1 + 4 * (item_bytes != 4)
    return elements * item_bytes + elements // SCALE_EVERY * block_bytes


def _decoding(strip: Strip, slots: int, item_bytes: int) -> int:
    # The values; and codes in blocks, where rows do not consist of whole blocks.
    return strip.elements_at_once(slots) * (item_bytes + (not strip.has_whole_blocks))
