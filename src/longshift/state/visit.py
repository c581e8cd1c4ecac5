"""Stops of a step: one cut of the model each, where one or several layouts compute
with the same copies.

    at home     the layout is cut as home is: fused collectives between its ranks (`state.copies`)
    visiting    the copies come and go by switch plans between all ranks (`state.transfer`), from
                home and from whatever the stop before holds; their gradient sums go home by the
                plan that would bring the weights from there, backwards
    in rows     visiting, ZeRO-2 and 3: what comes and goes are the rows of each piece, dealt over
                its holders; they gather and reduce among themselves as at home

Optimizer state never moves, and no gradient goes from stop to stop: every one reduces into home.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.spec.model import ModelSpec
from longshift.state.copies import AlignedCopies, Copies
from longshift.state.home import Home
from longshift.state.precision import Precision
from longshift.state.resizable import ResizableStorage, Tensors
from longshift.state.transfer import SwitchTransfer
from longshift.switch.itinerary import Cut, Itinerary


class PlannedCopies(Copies):
    """Copies that switches fill, unit by unit, and empty. Mutable. `sums` have storage from the
    first gradients on until they are home."""

    def __init__(self, spec: ModelSpec, cut: Cut, world: World, home: Home, precision: Precision):
        self.sums: dict[int, Tensors[str]] = {}
        self._totals: dict[str, Tensor] = {}
        super().__init__(spec, cut, world, home, precision)

    def prepare(self, unit: int) -> None:
        shapes = {}
        for name, weight in self.units[unit].weights.items():
            if weight.requires_grad:
                shapes[name] = tuple(weight.shape)
        sums = Tensors(shapes, self.sum_format, self.world.device)
        self.sums[unit] = sums
        self._totals |= sums.views
        sums.drop()

    def gather(self, unit: int) -> None:
        raise AssertionError(f"unit {unit}: a switch brings it")

    ready = reduce = reduced = gather

    def make_sums(self, unit: int) -> bool:
        first = not self.sums[unit].held
        self.sums[unit].hold()
        return first

    def sum_of(self, unit: int, name: str) -> list[tuple[Tensor, tuple[slice, ...]]]:
        view = self._totals[name]
        return [(view.unsqueeze(0), (slice(None),) * view.dim())]

    def total(self, name: str, box: Box) -> Tensor | None:
        return self.box_of(self._totals, name, box)

    def forget_totals(self) -> None:
        for sums in self.sums.values():
            sums.drop()


class RowCopies(AlignedCopies):
    """Copies of a layout whose ranks gather and reduce rows among themselves; switches fill and
    empty these rows. Mutable."""

    def __init__(self, spec: ModelSpec, cut: Cut, world: World, precision: Precision):
        # Rows are weights as they compute: they have no masters, and no moments.
        formats = replace(precision, home=precision.compute)
        super().__init__(
            spec,
            cut,
            world,
            Home(spec, cut.layout, world, formats, lambda _, box: torch.zeros(box.shape)),
            precision,
        )
        self.renewed = self.home.learning
        self._rows = [
            (shard.bucket.unit, ResizableStorage(shard.master)) for shard in self.home.shards
        ]
        self.close(-1)

    def part(self, name: str, box: Box) -> Tensor | None:
        return self.home.part(name, box, "master")

    def total(self, name: str, box: Box) -> Tensor | None:
        return self.home.part(name, box, "grad")

    def forget_totals(self) -> None:
        self.home.drop_gradients()

    def open(self, unit: int) -> None:
        for rows_unit, rows in self._rows:
            if rows_unit == unit:
                rows.hold()

    def close(self, unit: int) -> None:
        super().close(unit)
        for rows_unit, rows in self._rows:
            if unit in (-1, rows_unit):
                rows.drop()


def copies_of(spec: ModelSpec, cut: Cut, world: World, home: Home, precision: Precision) -> Copies:
    """The copies of one cut of the model on this rank."""
    if cut.at_home:
        return AlignedCopies(spec, cut, world, home, precision)
    if cut.side == "copies":
        return PlannedCopies(spec, cut, world, home, precision)
    return RowCopies(spec, cut, world, precision)


class Switches:
    """The transfers between home and copies that `itinerary` plans, each made when it is first
    wanted. Mutable: a cache. Its methods are collective over `ranks`."""

    def __init__(
        self,
        itinerary: Itinerary,
        home: Home,
        world: World,
        ranks: tuple[int, ...],
        precision: Precision,
    ):
        self.itinerary = itinerary
        self.home = home
        self.world = world
        self.ranks = ranks
        self.precision = precision
        self._transfers: dict[tuple[Cut | None, Cut | None], SwitchTransfer] = {}

    def bring(self, source: Copies | None, target: Copies) -> SwitchTransfer:
        """The transfer that brings the weights of `target` from home and, where given, from what
        `source` holds."""
        source_cut = source.cut if source else None
        key = (source_cut, target.cut)
        if key not in self._transfers:

            def held(name: str, box: Box) -> Tensor | None:
                part = source.part(name, box) if source else None
                return self.home.part(name, box, "master") if part is None else part

            group = self.world.group(self.ranks, "weights")
            plan = self.itinerary.weights(source_cut, target.cut)
            self._transfers[key] = SwitchTransfer(
                plan, self.world, group, held, target.part, self.precision.compute
            )
        return self._transfers[key]

    def total(self, unit: int) -> None:
        """Make home's gradient sums of a unit, of all where it is -1, where there are none; the
        others are there when it returns."""
        # Views of the sums are taken next: none may be on its way.
        self.home.settled()
        for shard in self.home.learning:
            if shard.grad is None and unit in (-1, shard.bucket.unit):
                shard.begin().zero_()

    def take_home(self, source: Copies) -> SwitchTransfer:
        """The transfer that adds the gradient sums of `source` to home's, which are there."""
        key = source.cut, None
        if key not in self._transfers:
            group = self.world.group(self.ranks, "sums")
            self._transfers[key] = SwitchTransfer(
                plan=self.itinerary.sums(source.cut),
                world=self.world,
                group=group,
                held=source.total,
                wanted=partial(self.home.part, what="grad"),
                dtype=self.precision.home,
                renewed=(*self.home.learning, *source.renewed),
            )
        return self._transfers[key]
