"""Stops of a step: one cut of the model each, where one or several layouts compute with the same copies.

    at home     the layout is cut as home is: fused collectives between its ranks (`state.copies`)
    visiting    the copies come and go by switch plans between all ranks (`state.transfer`), from home and from whatever the stop before
                holds; their gradient sums go home by the plan that would bring the weights from there, backwards
    in rows     visiting, ZeRO-2 and 3: what comes and goes are the rows of each piece, dealt over its holders; they gather and reduce
                among themselves as at home

Optimizer state never moves, and no gradient goes from stop to stop: every one reduces into home.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets, moving_unit
from longshift.spec.model import ModelSpec
from longshift.state.copies import AlignedCopies, Copies
from longshift.state.home import Home
from longshift.state.precision import Precision
from longshift.state.transfer import Part, Transfer
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.plan import Plan


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
        at = self.place(name, box)
        return None if at is None else self.sums[name][at]


class Stop:
    """One cut of the model on this rank. Mutable: its copies come and go."""

    def __init__(self, spec: ModelSpec, cut: Cut, world: World, home: Home, precision: Precision):
        self.spec, self.cut, self.home = spec, cut, home
        self.guest: Home | None = None
        self.copies: Copies
        if cut.side == "copies" and not cut.at_home:
            self.copies = self.planned = PlannedCopies(spec, cut.layout, world, home, precision)
            return
        if not cut.at_home:
            own = buckets(spec, cut.layout)
            self.guest = Home(spec, own, world.rank, precision.compute, world.device, lambda _, box: torch.zeros(box.shape))
        self.copies = AlignedCopies(spec, cut.layout, world, self.guest or home, precision.compute, precision.home)

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


class Switches:
    """The transfers between home and stops that `itinerary` plans, each made when it is first wanted. Mutable: a cache. Its methods are
    collective over `ranks`, and play on their group for "switch"."""

    def __init__(self, itinerary: Itinerary, home: Home, world: World, ranks: tuple[int, ...], precision: Precision):
        self.itinerary, self.home, self.world, self.ranks, self.precision = itinerary, home, world, ranks, precision
        self._transfers: dict[tuple[Cut | None, Cut | None], Transfer] = {}

    def bring(self, source: Stop | None, target: Stop) -> Transfer:
        """The weights of `target`, about to move; from home and, where given, from what `source` holds."""
        key = source.cut if source else None, target.cut
        if key not in self._transfers:

            def held(name: str, box: Box) -> Tensor | None:
                found = source.weight(name, box) if source else None
                return self.home.part(name, box, "master") if found is None else found

            transfer = self._transfer(self.itinerary.weights(*key), held, target.weight, self.precision.compute)
            ahead = torch.tensor(self._fit(transfer, target), device=self.world.device)
            transfer.ahead = int(self.world.group(self.ranks, "switch").all_reduce(ahead, dist.ReduceOp.MIN))
            self._transfers[key] = transfer
        return self._transfers[key].begin()

    def complete(self, transfer: Transfer, leaving: Stop | None, target: Stop, watch: Callable[[], object] = lambda: None) -> None:
        """Play the rest of a switch to `target`. Copies of `leaving` are dropped when nothing reads them any more. `watch` is called after
        every exchange that was posted."""
        last = {w.name: int(w.bucket[-1]) for w in transfer.plan.weights if len(w.bucket)}
        units = leaving.copies.units.values() if leaving else ()
        waiting = sorted(((max(last[name] for name in unit.weights), unit) for unit in units), key=lambda pair: -pair[0])
        while transfer.advance(target.open, wait=True):
            watch()
            while waiting and waiting[-1][0] < transfer.posted:
                waiting.pop()[1].drop()
        target.arrived()
        if leaving is not None:
            leaving.close()

    def take_home(self, source: Stop) -> Transfer:
        """The gradient sums of `source`, about to be added to home's."""
        for shard in self.home.shards:
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard.master)
        key = source.cut, None
        if key not in self._transfers:
            wanted = partial(self.home.part, what="grad")
            self._transfers[key] = self._transfer(self.itinerary.sums(source.cut), source.total, wanted, self.precision.home)
        return self._transfers[key].begin()

    def _transfer(self, plan: Plan, held: Part, wanted: Part, dtype: torch.dtype) -> Transfer:
        return Transfer(plan, self.world, self.world.group(self.ranks, "switch"), held, wanted, dtype)

    def _fit(self, transfer: Transfer, target: Stop) -> int:
        """How many exchanges fill no more than `ahead_bytes` on this rank."""
        opened, total = set(), 0
        for number, names in enumerate(transfer.filled):
            fresh = target.units(names) - opened
            total += sum(target.copies.units[unit].bytes for unit in fresh)
            opened |= fresh
            if total > self.itinerary.options.ahead_bytes:
                return number
        return transfer.exchanges
