"""Working copies of a layout, and the three verbs between them and home: gather, reduce, release.
Here for a layout that is cut as home is; `state.visit` has them for one that is not.

    gather    home rows of every holder, cast at the source ── all-gather ──> the rank's tensors
    reduce    the rank's gradients, summed over micro-batches in the home format
              ── reduce-scatter (ZeRO-0: all-reduce) ──> home
              (a matmul's go into their sum as they are formed, where its device can; all others
              after the backward)
    release   the copies' storage is dropped

One fused collective a bucket, started at once and waited for as late as possible. Bytes in and out
of a holder, P holders, W elements: gather W (P-1)/P in the compute format; reduce W (P-1)/P in the
home format, twice that under ZeRO-0. In fewer bits: `state.wire`.

When the verbs are called is the program's (`program.step`).

[Note: released storage] A graph kept for backward holds views of the copies. Release shrinks their
storage to nothing and gather fills the same storage again, through an alias with a version counter
of its own, so that autograd sees the tensors it saved. Copies have no storage before they are
gathered for the first time.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longshift.dist.collectives import Pending
from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.placement import assemble, boxes_on, local_shape, moving_unit
from longshift.model.decoder import Unit
from longshift.model.functions import add_product
from longshift.spec.formats import adds_inside
from longshift.spec.model import ModelSpec
from longshift.state.home import Home, Shard
from longshift.state.precision import Precision
from longshift.state.resizable import Tensors
from longshift.state.strip_views import Strips
from longshift.state.wire import CodedSlots, RoundedSlots, sent_gradients
from longshift.switch.itinerary import Cut


@dataclass(frozen=True)
class UnitCopies:
    """One moving unit on this rank. `memory`: of the weights that are not home's own tensors, the
    `borrowed` ones."""

    weights: dict[str, nn.Parameter]
    memory: Tensors[str]
    borrowed: set[str]


class Copies(ABC):
    """The working copies of one cut of the model on this rank, with `home` as their source.
    Mutable. `renewed`: whose gradient sums are what `total` has views of."""

    renewed: Sequence[Shard] = ()

    def __init__(self, spec: ModelSpec, cut: Cut, world: World, home: Home, precision: Precision):
        self.spec = spec
        self.cut = cut
        self.world = world
        self.home = home
        self.compute = precision.compute
        self.sum_format = precision.home
        self.precision = precision
        self.adds_inside = adds_inside(
            precision.compute.itemsize, precision.home.itemsize, world.device.type != "cpu"
        )
        # Moving units that matmuls of a unit's backward add to.
        self.expected: dict[int, set[int]] = {}
        self.blank: dict[int, set[str]] = {}  # weights whose sums have no numbers yet
        self.boxes: dict[str, tuple[Box, ...]] = {}
        self.units: dict[int, UnitCopies] = {}
        self.weights: dict[str, Tensor] = {}  # without their gradients
        for unit, boxes in boxes_on(spec, cut.layout, world.rank).items():
            self.boxes |= boxes
            self.units[unit] = self._allocate(unit, list(boxes))
            self.weights |= {name: w.data for name, w in self.units[unit].weights.items()}
            self.prepare(unit)
            self.units[unit].memory.drop()

    def prepare(self, unit: int) -> None:  # noqa: B027  (most need none)
        """Make the views of a unit's copies that are used again and again; the copies have storage
        now, and lose it after."""

    def _allocate(self, unit: int, names: list[str]) -> UnitCopies:
        """Tensors of a unit: home's own where home keeps all of a weight in the compute format,
        else slices of one flat vector."""
        # 1. Borrow home's tensors.
        borrowed = {}
        for shard in self.home.shards:
            is_local = shard.master.device == self.world.device and not shard.on_disk
            is_whole = shard.bucket.unit == unit and not shard.bucket.sharded
            if is_local and is_whole and shard.master.dtype == self.compute:
                for name, box, view in shard.views(shard.master):
                    if self.boxes[name] == (box,):
                        borrowed[name] = view

        # 2. Make the others. [Note: released storage]
        shapes = {
            name: local_shape(self.spec.by_name[name], self.boxes[name])
            for name in names
            if name not in borrowed
        }
        memory = Tensors(shapes, self.compute, self.world.device)
        views = {name: view.data for name, view in borrowed.items()} | memory.views
        weights = {
            name: nn.Parameter(view, requires_grad=not self.spec.by_name[name].frozen)
            for name, view in views.items()
        }
        return UnitCopies(weights, memory, set(borrowed))

    def part(self, name: str, box: Box) -> Tensor | None:
        """A view of a box of a weight; None where it is not here."""
        return self.box_of(self.weights, name, box)

    def box_of(self, tensors: Mapping[str, Tensor], name: str, box: Box) -> Tensor | None:
        """A view of a box of the rank's tensor of a weight; None where it is not here."""
        held = self.boxes.get(name, ())
        if not any(box in part for part in held):
            return None
        return tensors[name][assemble(box, held, self.spec.by_name[name].dim)]

    def fill(self, module: Unit) -> None:
        """Make a unit of the model compute with these copies."""
        unit = module.unit
        inside = self.spec.multiplied[unit] if self.adds_inside else frozenset()
        for param in module.table:
            # A tied embedding moves with another unit than the head's.
            moving = moving_unit(self.spec, param)
            weight = self.units[moving].weights[param.name]
            module.register_parameter(param.role, weight)
            if param.name in inside:
                module.adds[param.role] = partial(self.add, moving, param.name)
                self.expected.setdefault(unit, set()).add(moving)

    def open(self, unit: int) -> None:
        """Have storage for what a switch brings of a unit."""
        self.units[unit].memory.hold()

    def close(self, unit: int) -> None:
        """Drop the copies of a unit, of all where it is -1."""
        for number in self.units if unit < 0 else (unit,):
            self.units[number].memory.drop()

    def total(self, name: str, box: Box) -> Tensor | None:
        """A view of a box of a gradient sum that a switch takes home; None where it is not here."""
        return None

    def forget_totals(self) -> None:  # noqa: B027  (at home there are none)
        """Drop the gradient sums that a switch has taken home."""

    def release(self, unit: int) -> None:
        """Drop a unit's copies. Gradients not yet accumulated must not need them."""
        self.units[unit].memory.drop()

    @abstractmethod
    def gather(self, unit: int) -> None:
        """Start bringing a unit's weights here."""

    @abstractmethod
    def ready(self, unit: int) -> None:
        """Return when a unit's weights are here."""

    def expect(self, module: int) -> None:
        """Make the sums that matmuls of a unit's backward add to, where there are none."""
        for unit in self.expected.get(module, ()):
            self._begin(unit)

    def _begin(self, unit: int) -> None:
        if self.make_sums(unit):
            self.blank[unit] = {
                name for name, weight in self.units[unit].weights.items() if weight.requires_grad
            }

    def add(self, unit: int, name: str, left: Tensor, right: Tensor) -> None:
        """Add a weight's gradient, left^T right, to its sum. left [T, rows], right [T, columns]."""
        first = name in self.blank[unit]
        self.blank[unit].discard(name)
        for total, (rows, columns) in self.sum_of(unit, name):
            add_product(total, left[:, rows], right[:, columns], first)

    def accumulate(self, unit: int) -> None:
        """Add the gradients that a backward left on the unit's weights to their sums, in the home
        format. A weight that computed nothing contributes zeros."""
        self._begin(unit)
        blank = self.blank[unit]
        weights = self.units[unit].weights
        grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        # A sum without numbers takes a copy of its first gradient, and needs no zeros.
        first = grads.keys() & blank
        later = grads.keys() - blank
        for names, put in ((first, torch._foreach_copy_), (later, torch._foreach_add_)):
            totals = []
            parts = []
            for name in weights:
                if name in names:
                    for total, place in self.sum_of(unit, name):
                        totals.append(total)
                        parts.append(grads[name][place].unflatten(0, total.shape[:2]))
            if totals:
                put(totals, parts)
        empty = [total for name in blank - grads.keys() for total, _ in self.sum_of(unit, name)]
        if empty:
            torch._foreach_zero_(empty)
        blank.clear()
        for weight in weights.values():
            weight.grad = None

    @abstractmethod
    def make_sums(self, unit: int) -> bool:
        """Make the sums of a unit, with any numbers in them, if there are none.
        Whether there were none."""

    @abstractmethod
    def sum_of(self, unit: int, name: str) -> list[tuple[Tensor, tuple[slice, ...]]]:
        """The sum of a weight's gradient: views [slots, rows of each, ...], and where their rows
        lie in the weight."""

    @abstractmethod
    def reduce(self, unit: int) -> None:
        """Start bringing the unit's sums home."""

    @abstractmethod
    def reduced(self, unit: int) -> None:
        """Return when home holds the sums of the unit's oldest reduction under way."""


class FusedBucket:
    """A bucket of a unit, as its fused collectives see it. Immutable."""

    def __init__(self, strips: Strips, shard: Shard, copies: UnitCopies, precision: Precision):
        self.strips = strips
        self.shard = shard
        # How weights and gradients travel, where not as they are.
        self.coded: CodedSlots | None = None
        self.sent: CodedSlots | RoundedSlots | None = None
        if strips.bucket.sharded:
            if precision.wire.weights == "float8":
                self.coded = CodedSlots(strips, precision.compute)
            if not strips.bucket.frozen:
                self.sent = sent_gradients(precision.wire.gradients, strips, precision.home)
        # What a gather writes: the strips of the weights that are not home's own. From `sources`,
        # where home is not sharded.
        self.gathered = [views for views in strips.strips if views.name not in copies.borrowed]
        self.targets = [views.in_weight(copies.weights[views.name].data) for views in self.gathered]
        self.sources: list[Tensor] = []
        if not strips.bucket.sharded:
            self.sources = [views.in_buffer(shard.master.unsqueeze(0)) for views in self.gathered]

    def copy_in(self, buffer: Tensor | None = None) -> None:
        """Copy into the weights: from the fused buffer, or from home where that is not sharded."""
        if self.coded is not None and buffer is not None:
            for views, target in zip(self.gathered, self.targets):
                self.coded.decode(views, buffer, target)
        # Home's own tensors need no copy, and torch refuses an empty list.
        elif self.targets:
            sources = self.sources
            if buffer is not None:
                sources = [views.in_buffer(buffer) for views in self.gathered]
            torch._foreach_copy_(self.targets, sources)


class PendingReduction(NamedTuple):
    """A bucket whose reduction into `out` is under way."""

    bucket: FusedBucket
    pending: Pending
    out: Tensor


class FusedUnit:
    """The buckets of one unit, and what is under way. Mutable. `sums`: fused gradient buffers, one
    a bucket that is trained."""

    def __init__(self, buckets: list[FusedBucket]):
        self.buckets = buckets
        self.learning = [bucket for bucket in buckets if not bucket.strips.bucket.frozen]
        self.arriving: list[Pending] = []
        self.sums: list[Tensor] | None = None
        self.reducing: deque[list[PendingReduction]] = deque()


class AlignedCopies(Copies):
    """Copies of a layout that is cut as `home` is. Mutable."""

    def __init__(self, spec: ModelSpec, cut: Cut, world: World, home: Home, precision: Precision):
        self.fused: dict[int, FusedUnit] = {}
        super().__init__(spec, cut, world, home, precision)

    def prepare(self, unit: int) -> None:
        buckets = []
        copies = self.units[unit]
        for shard in self.home.shards:
            if shard.bucket.unit == unit:
                strips = Strips(shard.bucket, self.world.rank, self.boxes, self.spec)
                # A master on disk needs storage while views of it are made.
                master = shard.vectors["master"]
                master.hold()
                buckets.append(FusedBucket(strips, shard, copies, self.precision))
                master.evict()
        self.fused[unit] = FusedUnit(buckets)

    def gather(self, unit: int) -> None:
        fused = self.fused[unit]
        self.units[unit].memory.hold()
        fused.arriving = [self._start(bucket) for bucket in fused.buckets]

    def _start(self, bucket: FusedBucket) -> Pending:
        """Start to bring a bucket's weights. Of a home outside the GPU, the collective follows the
        copies, on their stream."""
        strips = bucket.strips
        crossing = bucket.shard.crossing
        if not strips.bucket.sharded:
            if crossing is None:
                bucket.copy_in()
                return Pending()
            crossing.bring(zip(bucket.sources, bucket.targets))
            return Pending(finish=crossing.arrived())

        # 1. Have this rank's slot on the device, and room for all.
        if bucket.coded is not None:
            source = bucket.coded.own(bucket.shard.master)
            slot = source if crossing is None else self._empty_slot(len(source), torch.uint8)
        else:
            source = bucket.shard.master
            slot = self._empty_slot(strips.width, self.compute)
        buffer = slot.new_empty((strips.slots, len(slot)))
        group = self.world.group(strips.bucket.holders, "gather")

        # 2. Start the collective.
        if crossing is None:
            if slot is not source:
                slot[: len(source)].copy_(source)
            pending = group.all_gather(buffer, slot)
            pending.finish = partial(bucket.copy_in, buffer)
            return pending
        crossing.bring([(source[None], slot[None, : len(source)])])
        with torch.cuda.stream(crossing.back):
            pending = group.all_gather(buffer, slot)
        arrived = crossing.arrived()
        pending.finish = lambda: (arrived(), bucket.copy_in(buffer))
        return pending

    def _empty_slot(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.world.device)

    def ready(self, unit: int) -> None:
        fused = self.fused[unit]
        while fused.arriving:
            fused.arriving.pop(0).wait()

    def make_sums(self, unit: int) -> bool:
        fused = self.fused[unit]
        if fused.sums is not None:
            return False
        sizes = [(bucket.strips.slots, bucket.strips.width) for bucket in fused.learning]
        fused.sums = [
            torch.empty(size, dtype=self.sum_format, device=self.world.device) for size in sizes
        ]
        return True

    def sum_of(self, unit: int, name: str) -> list[tuple[Tensor, tuple[slice, ...]]]:
        fused = self.fused[unit]
        assert fused.sums is not None
        return [
            (views.in_buffer(total), views.at)
            for bucket, total in zip(fused.learning, fused.sums)
            for views in bucket.strips.of.get(name, ())
        ]

    def reduce(self, unit: int) -> None:
        fused = self.fused[unit]
        sums = fused.sums
        assert sums is not None, f"unit {unit} has no gradients"
        fused.sums = None
        reductions = []
        for bucket in fused.learning:
            # No other name keeps the sum: coded, it is gone before the next bucket.
            total = sums.pop(0)
            holders = bucket.strips.bucket.holders
            group = self.world.group(holders, "reduce")
            if bucket.sent is not None:
                total = bucket.sent.pieces(total)
                out = torch.empty_like(total)
                pending = group.all_to_all(out, total)
            elif bucket.strips.bucket.sharded:
                out = total.new_empty(bucket.strips.width)
                pending = group.reduce_scatter(out, total)
            else:
                out = total.view(-1)
                pending = group.start_all_reduce(out)
            reductions.append(PendingReduction(bucket, pending, out))
        fused.reducing.append(reductions)

    def reduced(self, unit: int) -> None:
        reductions = self.fused[unit].reducing.popleft()
        while reductions:
            bucket, pending, out = reductions.pop(0)
            pending.wait()
            total = out[: bucket.strips.own] if bucket.sent is None else bucket.sent.summed(out)
            bucket.shard.receive(total)
