"""Bytes of a cut's working copies, of their gradients on the way home, and of sending them in
another format than they are kept in (`state.wire`), on a rank: see `weigh.ledger`."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from longshift.layout.placement import Bucket, boxes_on, buckets_of
from longshift.layout.strips import Strip, areas, strips_of
from longshift.program.turns import RankLayout
from longshift.spec.formats import SCALE_EVERY, Wire
from longshift.weigh.allocations import Allocation, RankMemory
from longshift.weigh.state_memory import StateMemory


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
    # A sum in bf16 is a cast of the whole buffer, with no workspace beside it.
    size = 2 * bucket.width
    encoding = decoding = 0
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
    # A rank encodes its own slot, and decodes those of all, in float32 at least.
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


class BucketShare(NamedTuple):
    """A bucket of a unit on this rank, and how it is coded on the wire, where it is.

    `elements`: that this rank keeps at home.
    """

    bucket: Bucket
    elements: int
    gather_coding: Coding | None
    reduce_coding: Coding | None


@dataclass(frozen=True)
class UnitSizes:
    """Elements of one moving unit on this rank.

    `flat`: of the copies that are no tensors of home's.
    `weights`: of each weight that is trained, by name.
    """

    flat: int
    weights: Mapping[str, int]
    buckets: tuple[BucketShare, ...]

    @property
    def trained_buckets(self) -> list[BucketShare]:
        return [share for share in self.buckets if not share.bucket.frozen]


def unit_sizes(memory: RankMemory, view: RankLayout, is_guest: bool) -> dict[int, UnitSizes]:
    """Elements of each moving unit on this rank.

    `is_guest`: the layout's copies are gathered from rows of its own, in the compute format, else
    from home.
    """
    spec = view.spec
    rank = memory.steps.rank
    wire = memory.steps.wire
    home_layout = view.cut.layout if is_guest else memory.steps.itinerary.home
    has_same_format = is_guest or memory.same_format

    # 1. Sizes of the buckets. A whole bucket in the compute format needs no other copy.
    home_boxes = {}
    buckets_by_unit: dict[int, list[BucketShare]] = {}
    for bucket in buckets_of(spec, home_layout, rank):
        is_near = is_guest or memory.is_state_on_device(bucket.unit)
        if not bucket.sharded and is_near and (has_same_format or bucket.frozen):
            home_boxes.update(bucket.home(rank))
        master_bytes = memory.weight_bytes if is_guest or bucket.frozen else memory.sum_bytes
        share = BucketShare(
            bucket=bucket,
            elements=bucket.kept(rank),
            gather_coding=weight_coding(bucket, rank, wire, memory.weight_bytes, master_bytes),
            reduce_coding=gradient_coding(bucket, rank, wire, memory.sum_bytes),
        )
        buckets_by_unit.setdefault(bucket.unit, []).append(share)

    # 2. Sizes of the copies.
    units = {}
    for unit, local_boxes in boxes_on(spec, view.layout, rank).items():
        flat = 0
        trained = {}
        for name, boxes in local_boxes.items():
            elements = sum(box.elements for box in boxes)
            if boxes != (home_boxes.get(name),):
                flat += elements
            if not spec.by_name[name].frozen:
                trained[name] = elements
        units[unit] = UnitSizes(flat, trained, tuple(buckets_by_unit.get(unit, ())))
    return units


class Gather(NamedTuple):
    """A bucket whose gather is under way, and how it is coded."""

    buffer: Allocation
    coding: Coding | None


class Reduction(NamedTuple):
    """A bucket whose reduction is under way: where it ends, and what else it holds meanwhile.

    `end_bytes`: workspace of its end.
    """

    share: BucketShare
    out: Allocation
    buffers: list[Allocation]
    end_bytes: int


class WeightMemory:
    """`state.copies.Copies` on bytes, and `state.visit.RowCopies` of a guest. Mutable.

    A guest is a cut that fused collectives bring here from rows of its own.
    """

    def __init__(self, memory: RankMemory, view: RankLayout, home: StateMemory):
        self.memory = memory
        self.view = view
        self.home = home
        self.is_guest = view.collective and not view.cut.at_home
        self.units = unit_sizes(memory, view, self.is_guest)
        self.name = str(view.cut.layout)

        # By unit.
        self.flats: dict[int, Allocation] = {}
        self.gathers: dict[int, deque[Gather]] = {}
        self.grads: dict[int, Allocation] = {}  # that a backward has left on weights
        self.sums: dict[int, list[Allocation]] = {}
        self.reductions: dict[int, deque[deque[Reduction]]] = {}

        # Of a guest.
        self.rows: dict[int, Allocation] = {}
        self.totals: dict[tuple[int, int], Allocation] = {}  # by unit and bucket

    def open(self, unit: int) -> None:
        if self.is_guest:
            elements = sum(share.elements for share in self.units[unit].buckets)
            size = elements * self.memory.weight_bytes
            self.rows[unit] = self.memory.allocate(f"rows of {self.name}", size)
        else:
            self._allocate_copies(unit)

    def close(self, unit: int) -> None:
        """Free a unit, all units where it is -1."""
        for number in list(self.units) if unit < 0 else [unit]:
            self.release(number)
            self.rows.pop(number, None)

    def forget_totals(self) -> None:
        self.sums.clear()
        self.totals.clear()

    def _allocate_copies(self, unit: int) -> None:
        if unit not in self.flats:
            size = self.units[unit].flat * self.memory.weight_bytes
            self.flats[unit] = self.memory.allocate(f"working copies of {self.name}", size)

    def release(self, unit: int) -> None:
        self.flats.pop(unit, None)

    # Gathers

    def gather(self, unit: int) -> None:
        self._allocate_copies(unit)
        gathers = deque[Gather]()
        for share in self.units[unit].buckets:
            if share.bucket.sharded:
                gathers.append(Gather(self._start_gather(unit, share), share.gather_coding))
        self.gathers[unit] = gathers

    def _start_gather(self, unit: int, share: BucketShare) -> Allocation:
        memory = self.memory
        size, item_bytes = share.bucket.width, memory.weight_bytes
        if coding := share.gather_coding:
            size, item_bytes = coding.size, 1
            memory.coded_bytes += coding.encoded
            # Rows are coded where they lie: a guest's on the device, masters at home.
            place = "device" if self.is_guest else memory.state_place(unit)
            memory.allocations.add_workspace(size + coding.encoding, place)

        begin = memory.begin_collective(
            "gather", "all_gather", len(share.bucket.holders), size, item_bytes
        ).begin
        return memory.allocate("gathers under way", begin.output + begin.graph)

    def ready(self, unit: int) -> None:
        gathers = self.gathers.pop(unit)
        while gathers:
            gather = gathers.popleft()
            if coding := gather.coding:
                self.memory.coded_bytes += coding.decoded
                self.memory.allocations.add_workspace(coding.decoding)
            del gather  # frees its buffer before the next one is decoded

    # Gradients

    def added_weights(self, module: int) -> frozenset[str]:
        """Weights whose gradients go into their sums as they are formed."""
        return self.view.spec.multiplied[module] if self.memory.adds_inside else frozenset()

    def expect(self, module: int) -> None:
        added_weights = self.added_weights(module)
        for unit in self.view.learning(module):
            if added_weights & self.units[unit].weights.keys():
                self._allocate_sums(unit)

    def _allocate_sums(self, unit: int) -> None:
        if unit in self.sums:
            return
        sizes = self.units[unit]
        # Sums of fused collectives are whole buffers, those of switches the weights' own.
        if self.view.collective:
            counts = []
            for bucket, *_ in sizes.trained_buckets:
                slots = len(bucket.holders) if bucket.sharded else 1
                counts.append(slots * bucket.width)
        else:
            counts = list(sizes.weights.values())
        item = self.memory.sum_bytes
        self.sums[unit] = [self.memory.allocate("gradient sums", n * item) for n in counts]

    def leave_grads(self, unit: int, size: int) -> None:
        """Have gradients on a unit's weights."""
        self.grads[unit] = self.memory.allocate("gradients of weights", size)

    def accumulate(self, unit: int) -> None:
        self._allocate_sums(unit)
        if grads := self.grads.pop(unit, None):
            self.memory.added_bytes += grads.nbytes

    def reduce(self, unit: int) -> None:
        sums = deque(self.sums.pop(unit))
        reductions = deque[Reduction]()
        for share in self.units[unit].trained_buckets:
            # No name here keeps a sum alive that its reduction has done with.
            reductions.append(self._start_reduction(share, [sums.popleft()]))
        self.reductions.setdefault(unit, deque()).append(reductions)

    def _start_reduction(self, share: BucketShare, total: list[Allocation]) -> Reduction:
        """Reduce the sum that is the one item of `total`, which is emptied."""
        memory = self.memory
        bucket = share.bucket
        holders = len(bucket.holders)

        # 1. Codes go to all holders, and each adds up its own.
        if coding := share.reduce_coding:
            codes_bytes = holders * coding.size
            memory.coded_bytes += coding.encoded
            buffers = [self._allocate_reduction(codes_bytes)]
            memory.allocations.add_workspace(coding.encoding)
            total.clear()
            memory.send("reduce", codes_bytes - coding.size)
            out = self._allocate_reduction(codes_bytes)
            return Reduction(share, out, buffers, end_bytes=0)

        # 2. A reduce-scatter, or an all-reduce in place.
        operation = "reduce_scatter" if bucket.sharded else "all_reduce"
        begin, end = memory.begin_collective(
            "reduce", operation, holders, bucket.width, memory.sum_bytes
        )
        out = self._allocate_reduction(begin.output) if bucket.sharded else total[0]
        buffers = [total.pop(), self._allocate_reduction(begin.graph)]
        return Reduction(share, out, buffers, end.peak)

    def _allocate_reduction(self, size: int) -> Allocation:
        return self.memory.allocate("reductions under way", size)

    def reduced(self, unit: int) -> None:
        memory = self.memory
        reductions = self.reductions[unit].popleft()
        for number in range(len(reductions)):
            share, out, buffers, end_bytes = reductions.popleft()
            memory.allocations.add_workspace(end_bytes)
            buffers.clear()
            if coding := share.reduce_coding:
                memory.coded_bytes += coding.decoded
                codes = out
                out = self._allocate_reduction(share.bucket.width * memory.sum_bytes)
                memory.allocations.add_workspace(coding.decoding)
                del codes  # they are there until they are decoded
            if self.is_guest:
                self.totals.setdefault((unit, number), out)
            else:
                self.home.receive(unit, number, out, share.elements * memory.sum_bytes)
            del out  # where home has copied it, it is gone before the next bucket
