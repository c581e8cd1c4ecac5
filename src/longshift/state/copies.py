"""Working copies of a layout, and the three verbs between them and home: gather, reduce, release. Here for a layout that is cut as home
is; `state.visit` has them for one that is not.

    gather    home rows of every holder, cast at the source ── all-gather ──> the rank's tensors
    reduce    the rank's gradients, summed over micro-batches in the home format ── reduce-scatter (ZeRO-0: all-reduce) ──> home
    release   the copies' storage is dropped

One fused collective a bucket, started at once and waited for as late as possible. Bytes in and out of a holder, P holders, W elements:
gather W (P-1)/P in the compute format; reduce W (P-1)/P in the home format, twice that under ZeRO-0.

When the verbs are called is the program's (`program.step`).

[Note: released storage] A graph kept for backward holds views of the copies. Release shrinks their storage to nothing and gather fills
the same storage again, through an alias with a version counter of its own, so that autograd sees the tensors it saved. Copies have no
storage before they are gathered for the first time.
"""

from abc import ABC, abstractmethod
from collections import deque
from functools import partial

import torch
from torch import Tensor, nn

from longshift.dist.collectives import Pending
from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import Bucket, assemble, local_boxes, local_shape, moving_unit, stages_of
from longshift.model.decoder import Unit
from longshift.spec.model import ModelSpec
from longshift.state.home import Home, Shard

Place = tuple[str, tuple[slice, ...]]  # a weight's name, and where in the rank's tensor of it


class Route:
    """How one bucket lies in its fused buffer [slots, width]: one slot a holder when home is sharded, else one. Immutable."""

    def __init__(self, bucket: Bucket, rank: int, boxes: dict[str, tuple[Box, ...]], spec: ModelSpec):
        self.bucket = bucket
        self.slots = len(bucket.holders) if bucket.sharded else 1
        self.places: list[Place] = []
        self.spans: list[tuple[int, int, int, tuple[int, ...]]] = []  # slot, start, stop, shape: same order as `places`
        ends = []
        for slot in range(self.slots):
            start = 0
            for name, box in bucket.home(bucket.holders[slot]):
                if box:
                    dim = spec.by_name[name].dim
                    self.places.append((name, assemble(box, boxes[name], dim)))
                    self.spans.append((slot, start, start + box.elements, box.shape))
                start += box.elements
            ends.append(start)
        self.width = max(ends)
        self.own = ends[bucket.holders.index(rank)] if bucket.sharded else self.width

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The buffer's pieces, in the order of `places`."""
        return [buffer[slot, start:stop].view(shape) for slot, start, stop, shape in self.spans]


class UnitCopies:
    """One moving unit on this rank. Mutable. `flat` holds the weights that are not home's own tensors, the `borrowed` ones."""

    def __init__(self, weights: dict[str, nn.Parameter], flat: Tensor | None, borrowed: set[str]):
        self.weights, self.flat, self.borrowed = weights, flat, borrowed
        self.bytes = 0 if flat is None else flat.untyped_storage().nbytes()

    def hold(self) -> None:
        """Have storage; contents are undefined where there was none."""
        if self.flat is not None:
            self.flat.untyped_storage().resize_(self.bytes)

    def drop(self) -> None:
        if self.flat is not None:
            self.flat.untyped_storage().resize_(0)


class Copies(ABC):
    """The working copies of `layout` on this rank, with `home` as their source. Mutable."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, home: Home, compute: torch.dtype):
        self.spec, self.layout, self.world, self.home, self.compute = spec, layout, world, home, compute
        at = layout.coord(world.rank)
        mine: dict[int, list[str]] = {}
        for param in spec.params:
            if at.pp in stages_of(spec, layout, param):
                mine.setdefault(moving_unit(spec, param), []).append(param.name)
        self.boxes = {name: local_boxes(spec.by_name[name], layout, at.tp) for names in mine.values() for name in names}
        self.units: dict[int, UnitCopies] = {}
        for unit, names in mine.items():
            self.units[unit] = self._allocate(unit, names)
            self.prepare(unit)
            self.units[unit].drop()

    def prepare(self, unit: int) -> None:  # noqa: B027  (most need none)
        """Make the views of a unit's copies that are used again and again; the copies have storage now, and lose it after."""

    def _allocate(self, unit: int, names: list[str]) -> UnitCopies:
        """Tensors of a unit: home's own where home keeps all of a weight in the compute format, else slices of one flat vector."""
        at_home = {}
        for shard in self.home.shards:
            if shard.bucket.unit == unit and not shard.bucket.sharded and shard.master.dtype == self.compute:
                at_home |= {name: view for name, box, view in shard.views(shard.master) if self.boxes[name] == (box,)}
        shapes = {name: local_shape(self.spec.by_name[name], self.boxes[name]) for name in names if name not in at_home}
        flat, start = None, 0
        weights = {name: nn.Parameter(view.data) for name, view in at_home.items()}
        if shapes:
            sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
            flat = torch.empty(sum(sizes.values()), dtype=self.compute, device=self.world.device)
            alias = flat.data  # [Note: released storage]
            for name, shape in shapes.items():
                weights[name] = nn.Parameter(alias[start : start + sizes[name]].view(shape))
                start += sizes[name]
        return UnitCopies(weights, flat, set(at_home))

    def part(self, name: str, box: Box) -> Tensor | None:
        """A view of a box of a weight; None where it is not here."""
        at = self.place(name, box)
        return None if at is None else self.units[moving_unit(self.spec, self.spec.by_name[name])].weights[name].data[at]

    def place(self, name: str, box: Box) -> tuple[slice, ...] | None:
        """Where a box lies in the rank's tensor of a weight; None where it is not here."""
        held = self.boxes.get(name, ())
        return assemble(box, held, self.spec.by_name[name].dim) if any(box in part for part in held) else None

    def fill(self, module: Unit) -> None:
        """Make a unit of the model compute with these copies."""
        for param in module.table:
            module.register_parameter(param.role, self.units[moving_unit(self.spec, param)].weights[param.name])

    def release(self, unit: int) -> None:
        """Drop a unit's copies. Gradients not yet accumulated must not need them."""
        self.units[unit].drop()

    @abstractmethod
    def gather(self, unit: int) -> None:
        """Start bringing a unit's weights here."""

    @abstractmethod
    def ready(self, unit: int) -> None:
        """Return when a unit's weights are here."""

    @abstractmethod
    def accumulate(self, unit: int) -> None:
        """Add the gradients that a backward left on the unit's weights to their sums, in the home format. A unit that computed nothing
        contributes zeros."""

    @abstractmethod
    def reduce(self, unit: int) -> None:
        """Start bringing the unit's sums home."""

    @abstractmethod
    def reduced(self, unit: int) -> None:
        """Return when home holds the sums of the unit's oldest reduction under way."""


class Fused:
    """What the collectives of one unit need. Mutable."""

    def __init__(self, copies: UnitCopies, routes: list[tuple[Route, Shard]]):
        self.routes = routes
        # For every route, what a gather writes: the views of the fused buffer to read (by number) and those of the weights to fill.
        self.wanted = [[i for i, (name, _) in enumerate(route.places) if name not in copies.borrowed] for route, _ in routes]
        places = ((route, [route.places[i] for i in wanted]) for (route, _), wanted in zip(routes, self.wanted))
        self.targets = [[copies.weights[name].data[at] for name, at in some] for _, some in places]
        self.arriving: list[Pending] | None = None
        self.sums: list[Tensor] | None = None  # fused gradient buffers, one a route
        self.reducing: deque[list[tuple[Pending, Tensor, Shard]]] = deque()

    def copy_in(self, number: int, buffer: Tensor) -> None:
        """From the fused buffer of a route into the weights."""
        if self.targets[number]:
            views = self.routes[number][0].views(buffer)
            torch._foreach_copy_(self.targets[number], [views[i] for i in self.wanted[number]])


class AlignedCopies(Copies):
    """Copies of a layout that is cut as `home` is. Mutable."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, home: Home, compute: torch.dtype, sums: torch.dtype):
        self.sums = sums
        self.fused: dict[int, Fused] = {}
        super().__init__(spec, layout, world, home, compute)

    def prepare(self, unit: int) -> None:
        shards = [shard for shard in self.home.shards if shard.bucket.unit == unit]
        routes = [(Route(shard.bucket, self.world.rank, self.boxes, self.spec), shard) for shard in shards]
        self.fused[unit] = Fused(self.units[unit], routes)

    def gather(self, unit: int) -> None:
        fused = self.fused[unit]
        self.units[unit].hold()
        fused.arriving = [self._start(fused, number) for number in range(len(fused.routes))]

    def _start(self, fused: Fused, number: int) -> Pending:
        route, shard = fused.routes[number]
        if not route.bucket.sharded:
            fused.copy_in(number, shard.master.unsqueeze(0))
            return Pending()
        own = torch.zeros(route.width, dtype=self.compute, device=self.world.device)
        own[: route.own].copy_(shard.master)
        buffer = own.new_empty((route.slots, route.width))
        pending = self.world.group(route.bucket.holders, "gather").all_gather(buffer, own)
        pending.finish = partial(fused.copy_in, number, buffer)
        return pending

    def ready(self, unit: int) -> None:
        fused = self.fused[unit]
        while fused.arriving:
            fused.arriving.pop(0).wait()

    def accumulate(self, unit: int) -> None:
        fused, weights = self.fused[unit], self.units[unit].weights
        first = fused.sums is None
        if fused.sums is None:
            fused.sums = [shard.master.new_zeros((route.slots, route.width), dtype=self.sums) for route, shard in fused.routes]
        for (route, _), total in zip(fused.routes, fused.sums):
            pairs = [
                (view, grad[at]) for view, (name, at) in zip(route.views(total), route.places) if (grad := weights[name].grad) is not None
            ]
            if pairs:
                views, grads = map(list, zip(*pairs))
                (torch._foreach_copy_ if first else torch._foreach_add_)(views, grads)
        for weight in weights.values():
            weight.grad = None

    def reduce(self, unit: int) -> None:
        fused, sums = self.fused[unit], self.fused[unit].sums
        assert sums is not None, f"unit {unit} has no gradients"
        fused.sums, leaving = None, []
        while sums:
            (route, shard), total = fused.routes[len(leaving)], sums.pop(0)
            group = self.world.group(route.bucket.holders, "reduce")
            if route.bucket.sharded:
                out = total.new_empty(route.width)
                leaving.append((group.reduce_scatter(out, total), out[: route.own], shard))
            else:
                flat = total.view(-1)
                leaving.append((group.start_all_reduce(flat), flat, shard))
        fused.reducing.append(leaving)

    def reduced(self, unit: int) -> None:
        leaving = self.fused[unit].reducing.popleft()
        while leaving:
            pending, total, shard = leaving.pop(0)
            pending.wait()
            shard.receive(total)
