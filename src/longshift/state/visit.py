"""Stops of a step: one cut of the model each, where one or several layouts compute with the same copies.

    at home     the layout is cut as home is: fused collectives between its ranks (`state.copies`)
    visiting    the copies come and go by switch plans between all ranks (`state.transfer`), from home and from whatever the stop before
                holds; their gradient sums go home by the plan that would bring the weights from there, backwards
    in rows     visiting, ZeRO-2 and 3: what comes and goes are the rows of each piece, dealt over its holders; they gather and reduce
                among themselves as at home

Optimizer state never moves, and no gradient goes from stop to stop: every one reduces into home.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import assemble, buckets, moving_unit
from longshift.spec.model import ModelSpec
from longshift.state.copies import AlignedCopies, Copies
from longshift.state.home import Home
from longshift.state.precision import Precision
from longshift.state.transfer import Part, Transfer
from longshift.switch.links import Links
from longshift.switch.placed import Placed, Side, placed, together, turn_about
from longshift.switch.plan import Plan, switch_plan
from longshift.switch.planners import Planner


class PlannedCopies(Copies):
    """Copies that switches fill, unit by unit, and empty. Mutable. `sums` are shaped as the weights, in the home format."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, home: Home, precision: Precision):
        super().__init__(spec, layout, world, home, precision.compute)
        self.sums: dict[str, Tensor] = {}
        self._home_format = precision.home

    def gather(self, unit: int) -> None:
        assert self.units[unit].present, f"unit {unit} has not arrived"

    def ready(self, unit: int) -> None:
        self.gather(unit)

    def release(self, unit: int) -> None:
        """Nothing: a visit's copies stay for the visit."""

    def accumulate(self, unit: int) -> None:
        totals, grads = [], []
        for name, weight in self.units[unit].weights.items():
            first = name not in self.sums
            if first:
                self.sums[name] = torch.zeros(weight.shape, dtype=self._home_format, device=weight.device)
            if weight.grad is not None:
                totals.append(self.sums[name])
                grads.append(weight.grad)
                weight.grad = None
        if totals:
            torch._foreach_add_(totals, grads)

    def reduce(self, unit: int) -> None:
        self.accumulate(unit)

    def finish(self, leave: int = 0) -> None:
        """Nothing is under way: the sums go home when the visit ends."""

    def total(self, name: str, box: Box) -> Tensor | None:
        """A view of a box of a gradient sum; None where it is not here."""
        if not any(box in held for held in self.boxes.get(name, ())):
            return None
        return self.sums[name][assemble(box, self.boxes[name], self.spec.by_name[name].dim)]


class Stop:
    """One cut of the model on this rank. Mutable: its copies come and go."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, home: Home, precision: Precision):
        self.spec, self.layout, self.home = spec, layout, home
        self.visiting = home.buckets != (own := buckets(spec, layout))
        self.guest: Home | None = None
        self.copies: Copies
        if self.visiting and layout.zero < 2:
            self.copies = self.planned = PlannedCopies(spec, layout, world, home, precision)
        else:
            if self.visiting:
                self.guest = Home(spec, own, world.rank, precision.compute, world.device, lambda _, box: torch.zeros(box.shape))
            self.copies = AlignedCopies(spec, layout, world, self.guest or home, precision.compute, precision.home)

    @property
    def side(self) -> Side:
        """What switches bring here, and can take from here."""
        return "rows" if self.guest else "copies"

    def weight(self, name: str, box: Box) -> Tensor | None:
        return self.guest.part(name, box, "master") if self.guest else self.copies.part(name, box)

    def total(self, name: str, box: Box) -> Tensor | None:
        return self.guest.part(name, box, "grad") if self.guest else self.planned.total(name, box)

    def units(self, names: set[str]) -> set[int]:
        """The units of those of these weights that are here."""
        return {moving_unit(self.spec, self.spec.by_name[name]) for name in names if name in self.copies.boxes}

    def open(self, names: set[str]) -> None:
        """Have storage for these weights."""
        for unit in self.units(names) if not self.guest else ():
            self.copies.units[unit].hold()

    def arrived(self) -> None:
        """A switch has brought everything."""
        if self.guest:
            self.copies.outdated()
        else:
            for copies in self.copies.units.values():
                copies.present = True

    def forget_totals(self) -> None:
        """The gradient sums are at home."""
        if self.guest:
            self.guest.drop_gradients()
        else:
            self.planned.sums.clear()

    def close(self) -> None:
        """Drop the copies."""
        for copies in self.copies.units.values():
            copies.drop()


NEAR_TO_FAR = 8.0  # what a link inside a node carries, to one between nodes, where nothing was measured


@dataclass(frozen=True)
class SwitchOptions:
    """`bucket_bytes`: the most that a rank sends, or receives, in one exchange. `ahead_bytes`: how much of the next layout's weights may
    arrive while the one before still computes."""

    planner: Planner = "fan_out"
    bucket_bytes: int = 32 << 20
    ahead_bytes: int = 256 << 20


class Switches:
    """The transfers between home and stops, each planned when it is first wanted. Mutable: a cache. All methods but `plan` are collective
    over `ranks`, and play on their group for "switch"."""

    def __init__(
        self,
        spec: ModelSpec,
        home: Home,
        home_cut: Layout,
        world: World,
        ranks: tuple[int, ...],
        precision: Precision,
        options: SwitchOptions,
    ):
        """`home_cut`: the layout that `home` is cut by."""
        self.spec, self.home, self.world, self.ranks, self.precision, self.options = spec, home, world, ranks, precision, options
        self.links = Links(world.per_node, NEAR_TO_FAR, 1.0)
        self._rows = placed(spec, home_cut, "rows")
        self._plans: dict[tuple[Stop | None, Stop], Plan] = {}
        self._transfers: dict[tuple[Stop | None, Stop | None], Transfer] = {}

    def plan(self, source: Stop | None, target: Stop) -> Plan:
        """Of the weights of `target`, from home and, where given, from what `source` holds."""
        if (source, target) not in self._plans:
            held = together(self._rows, placed(self.spec, source.layout, source.side)) if source else self._rows
            self._plans[source, target] = self._plan(held, target, self.precision.compute)
        return self._plans[source, target]

    def bring(self, source: Stop | None, target: Stop) -> Transfer:
        """The weights of `target`, about to move."""
        if (source, target) not in self._transfers:

            def held(name: str, box: Box) -> Tensor | None:
                found = source.weight(name, box) if source else None
                return self.home.part(name, box, "master") if found is None else found

            transfer = self._transfer(self.plan(source, target), held, target.weight, self.precision.compute)
            ahead = torch.tensor(self._fit(transfer, target), device=self.world.device)
            transfer.ahead = int(self.world.group(self.ranks, "switch").all_reduce(ahead, dist.ReduceOp.MIN))
            self._transfers[source, target] = transfer
        return self._transfers[source, target].begin()

    def take_home(self, source: Stop) -> Transfer:
        """The gradient sums of `source`, about to be added to home's."""
        for shard in self.home.shards:
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard.master)
        if (source, None) not in self._transfers:
            plan = self._plan(self._rows, source, self.precision.home).reversed()
            wanted = partial(self.home.part, what="grad")
            self._transfers[source, None] = self._transfer(plan, source.total, wanted, self.precision.home)
        return self._transfers[source, None].begin()

    def _plan(self, held: Placed, target: Stop, dtype: torch.dtype) -> Plan:
        wanted = turn_about(held, placed(self.spec, target.layout, target.side))
        return switch_plan(held, wanted, self.links, dtype.itemsize, self.options.planner, self.options.bucket_bytes)

    def _transfer(self, plan: Plan, held: Part, wanted: Part, dtype: torch.dtype) -> Transfer:
        return Transfer(plan, self.world, self.world.group(self.ranks, "switch"), held, wanted, dtype)

    def _fit(self, transfer: Transfer, target: Stop) -> int:
        """How many exchanges fill no more than `ahead_bytes` on this rank."""
        opened, total = set(), 0
        for number, names in enumerate(transfer.filled):
            fresh = target.units(names) - opened
            total += sum(target.copies.units[unit].bytes for unit in fresh)
            opened |= fresh
            if total > self.options.ahead_bytes:
                return number
        return transfer.exchanges
