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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from longshift.dist.collectives import Pending
from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.placement import assemble, boxes_on, local_shape, moving_unit
from longshift.model.decoder import Unit
from longshift.model.functions import add_product
from longshift.spec.formats import Wire, adds_inside
from longshift.spec.model import ModelSpec
from longshift.state.crossing import Crossing
from longshift.state.home import Home, Shard
from longshift.state.precision import Precision
from longshift.state.resizable import Tensors
from longshift.state.strip_views import Strips, StripViews
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
        self.wire = precision.wire
        self.adds_inside = adds_inside(
            precision.compute.itemsize, precision.home.itemsize, world.device.type != "cpu"
        )
        # Moving units that matmuls of a unit's backward add to.
        self.expected: dict[int, set[int]] = {}
        self.blank: dict[int, set[str]] = {}  # weights whose sums have no numbers yet
        self.boxes: dict[str, tuple[Box, ...]] = {}
        self.units: dict[int, UnitCopies] = {}
        for unit, boxes in boxes_on(spec, cut.layout, world.rank).items():
            self.boxes |= boxes
            self.units[unit] = self._allocate(unit, list(boxes))
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
        place = self.place(name, box)
        if place is None:
            return None
        unit = moving_unit(self.spec, self.spec.by_name[name])
        return self.units[unit].weights[name].data[place]

    def place(self, name: str, box: Box) -> tuple[slice, ...] | None:
        """Where a box lies in the rank's tensor of a weight; None where it is not here."""
        held = self.boxes.get(name, ())
        return (
            assemble(box, held, self.spec.by_name[name].dim)
            if any(box in part for part in held)
            else None
        )

    def fill(self, module: Unit) -> None:
        """Make a unit of the model compute with these copies."""
        inside = self.spec.multiplied[module.unit] if self.adds_inside else frozenset()
        for param in module.table:
            moving = moving_unit(self.spec, param)
            module.register_parameter(param.role, self.units[moving].weights[param.name])
            if param.name in inside:
                module.adds[param.role] = partial(self.add, moving, param.name)
                self.expected.setdefault(module.unit, set()).add(moving)

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
        for names, put in (
            (grads.keys() & blank, torch._foreach_copy_),
            (grads.keys() - blank, torch._foreach_add_),
        ):
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


class FusedCollectives:
    """What the collectives of one unit need. Mutable."""

    def __init__(
        self,
        copies: UnitCopies,
        buckets: list[tuple[Strips, Shard]],
        compute: torch.dtype,
        sums: torch.dtype,
        wire: Wire,
    ):
        """`compute`, `sums`: the formats of copies and of gradient sums."""
        self.buckets = buckets
        self.learning = [(strips, shard) for strips, shard in buckets if not strips.bucket.frozen]
        self.coded = [
            CodedSlots(strips, compute)
            if wire.weights == "float8" and strips.bucket.sharded
            else None
            for strips, _ in buckets
        ]
        self.sent = [
            sent_gradients(wire.gradients, strips, sums) if strips.bucket.sharded else None
            for strips, _ in self.learning
        ]
        # Of every bucket, what a gather writes: the strips of the weights that are not home's own;
        # `sources`, where home is not sharded.
        self.gather_strips: list[list[StripViews]] = []
        self.targets: list[list[Tensor]] = []
        self.sources: list[list[Tensor]] = []
        for strips, shard in buckets:
            views = [strip for strip in strips.strips if strip.name not in copies.borrowed]
            self.gather_strips.append(views)
            self.targets.append(
                [strip.in_weight(copies.weights[strip.name].data) for strip in views]
            )
            if strips.bucket.sharded:
                self.sources.append([])
            else:
                self.sources.append([strip.in_buffer(shard.master.unsqueeze(0)) for strip in views])
        self.arriving: list[Pending] | None = None
        # Fused gradient buffers, one a bucket that is trained.
        self.sums: list[Tensor] | None = None
        self.reducing: deque[
            list[tuple[Pending, Tensor, CodedSlots | RoundedSlots | None, Shard]]
        ] = deque()

    def copy_in(self, number: int, buffer: Tensor | None = None) -> None:
        """Copy into the weights: from the fused buffer of a bucket,
        or from home where that is not sharded."""
        if (coded := self.coded[number]) is not None and buffer is not None:
            for strip, target in zip(self.gather_strips[number], self.targets[number]):
                coded.decode(strip, buffer, target)
        elif self.targets[number]:
            if buffer is None:
                sources = self.sources[number]
            else:
                sources = [strip.in_buffer(buffer) for strip in self.gather_strips[number]]
            torch._foreach_copy_(self.targets[number], sources)


class AlignedCopies(Copies):
    """Copies of a layout that is cut as `home` is. Mutable."""

    def __init__(self, spec: ModelSpec, cut: Cut, world: World, home: Home, precision: Precision):
        self.fused: dict[int, FusedCollectives] = {}
        super().__init__(spec, cut, world, home, precision)

    def prepare(self, unit: int) -> None:
        shards = [shard for shard in self.home.shards if shard.bucket.unit == unit]
        buckets = [
            (Strips(shard.bucket, self.world.rank, self.boxes, self.spec), shard)
            for shard in shards
        ]
        masters = [shard.vectors["master"] for shard in shards]
        for vector in masters:
            vector.hold()
        self.fused[unit] = FusedCollectives(
            self.units[unit], buckets, self.compute, self.sum_format, self.wire
        )
        for vector in masters:
            vector.evict()

    def gather(self, unit: int) -> None:
        fused = self.fused[unit]
        self.units[unit].memory.hold()
        fused.arriving = [self._start(fused, number) for number in range(len(fused.buckets))]

    def _start(self, fused: FusedCollectives, number: int) -> Pending:
        strips, shard = fused.buckets[number]
        if shard.crossing is not None:
            return self._start_across(fused, number, shard.crossing)
        if not strips.bucket.sharded:
            fused.copy_in(number)
            return Pending()
        if (coded := fused.coded[number]) is not None:
            rank_slot = coded.own(shard.master).to(self.world.device)
        else:
            rank_slot = torch.zeros(strips.width, dtype=self.compute, device=self.world.device)
            rank_slot[: strips.own].copy_(shard.master)
        buffer = rank_slot.new_empty((strips.slots, len(rank_slot)))
        pending = self.world.group(strips.bucket.holders, "gather").all_gather(buffer, rank_slot)
        pending.finish = partial(fused.copy_in, number, buffer)
        return pending

    def _start_across(self, fused: FusedCollectives, number: int, crossing: Crossing) -> Pending:
        """As `_start`, of a home outside the GPU: the collective follows the copies
        on their stream."""
        strips, shard = fused.buckets[number]
        if not strips.bucket.sharded:
            crossing.bring(zip(fused.sources[number], fused.targets[number]))
            return Pending(finish=crossing.arrived())
        if (coded := fused.coded[number]) is not None:
            source = coded.own(shard.master)
            rank_slot = torch.zeros(coded.size, dtype=torch.uint8, device=self.world.device)
        else:
            source = shard.master
            rank_slot = torch.zeros(strips.width, dtype=self.compute, device=self.world.device)
        buffer = rank_slot.new_empty((strips.slots, len(rank_slot)))
        crossing.bring([(source[None], rank_slot[None, : len(source)])])
        with torch.cuda.stream(crossing.back):
            pending = self.world.group(strips.bucket.holders, "gather").all_gather(
                buffer, rank_slot
            )
        arrived = crossing.arrived()
        pending.finish = lambda: (arrived(), fused.copy_in(number, buffer))
        return pending

    def ready(self, unit: int) -> None:
        fused = self.fused[unit]
        while fused.arriving:
            fused.arriving.pop(0).wait()

    def make_sums(self, unit: int) -> bool:
        fused = self.fused[unit]
        if fused.sums is not None:
            return False
        sizes = [(strips.slots, strips.width) for strips, _ in fused.learning]
        fused.sums = [
            torch.empty(size, dtype=self.sum_format, device=self.world.device) for size in sizes
        ]
        return True

    def sum_of(self, unit: int, name: str) -> list[tuple[Tensor, tuple[slice, ...]]]:
        fused = self.fused[unit]
        assert fused.sums is not None
        buffers = [
            (strips.of.get(name, ()), total)
            for (strips, _), total in zip(fused.learning, fused.sums)
        ]
        return [(strip.in_buffer(total), strip.at) for strips, total in buffers for strip in strips]

    def reduce(self, unit: int) -> None:
        fused = self.fused[unit]
        sums = fused.sums
        assert sums is not None, f"unit {unit} has no gradients"
        fused.sums = None
        leaving = []
        while sums:
            strips, shard = fused.learning[len(leaving)]
            sent = fused.sent[len(leaving)]
            total = sums.pop(0)
            group = self.world.group(strips.bucket.holders, "reduce")
            if sent is not None:
                total = sent.pieces(total)
                out = torch.empty_like(total)
                leaving.append((group.all_to_all(out, total), out, sent, shard))
            elif strips.bucket.sharded:
                out = total.new_empty(strips.width)
                leaving.append((group.reduce_scatter(out, total), out[: strips.own], None, shard))
            else:
                flat = total.view(-1)
                leaving.append((group.start_all_reduce(flat), flat, None, shard))
        fused.reducing.append(leaving)

    def reduced(self, unit: int) -> None:
        leaving = self.fused[unit].reducing.popleft()
        while leaving:
            pending, total, sent, shard = leaving.pop(0)
            pending.wait()
            shard.receive(total if sent is None else sent.summed(total))
