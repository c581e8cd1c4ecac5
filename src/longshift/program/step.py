"""The program of a training step on one rank: which operations, in which order. Pure, and a function of the layouts, of how many packs each
replica has, and of the rank's place; never of what has already arrived.

    group 1                                       group 2                        end
    ┌ gathers ahead ─ turns ─ reductions ┐        ┌ rest of the switch ─ ... ┐   norm ─ update
                        └ exchanges of the switch to group 2, ahead ┘

ZeRO (arXiv 1910.02054) is when units are gathered, reduced and released: stage 3 gathers a unit for each use and releases it after, stages
0 to 2 gather it once a group; stages 2 and 3 reduce after every backward, stages 0 and 1 after the last.

[Note: windows] What is under way is bounded in bytes: gathers that are not yet used, reductions that are not yet home. One of each may
always be under way, however large. Bytes are nominal (a unit's elements over `tp`), the same number on every rank, so that all decide
alike.

[Note: order] Members of a communicator post its operations in one order, and no rank waits for an operation that another can only post
after this rank has done what follows. So exchanges of a switch that go ahead are posted between the turns of the last backward only where
no stage waits for that backward; other stages post them after their last message.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from longshift.layout.layout import Layout
from longshift.layout.memory import loss_blocks
from longshift.layout.placement import moving_unit, units_on
from longshift.program.operations import Kind, Op, Program
from longshift.schedule import pipeline
from longshift.schedule.sequence import token_order
from longshift.schedule.streamed import backward_turns, forward_turns
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.plan import Plan
from longshift.workload.groups import LengthGroup

# Of recomputation (arXiv 1604.06174, 2205.05198): the parts of a block in order, and whether a part's graph is kept for the backward. What
# `selective` computes again, it does inside the backward of the block: see `model.attention`.
PARTS = {
    "none": (("block", True),),
    "selective": (("block", True),),
    "attention": (("attention half", False), ("mlp half", True)),
    "full": (("block", False),),
    "full.keep-output": (("block with output", False),),  # which keeps the output of attention, and again takes it
}


def parts_of(layout: Layout) -> tuple[tuple[str, bool], ...]:
    """The parts of a block, as in PARTS."""
    return PARTS[layout.recompute + ".keep-output" * layout.keep_output]


@dataclass(frozen=True)
class Windows:
    """How many bytes of gathers, and of reductions, may be under way; None: as many as the largest block's."""

    gather: int | None = None
    reduce: int | None = None


@dataclass(frozen=True)
class Visit:
    """A length group as the program needs it. `micros`: micro-batches of each replica. `loss_blocks`: into how many blocks of rows the loss
    of each is cut; empty in chunked layouts, where events say so."""

    layout: Layout
    micros: int
    loss_blocks: tuple[int, ...] = ()


def visit_of(spec: ModelSpec, layout: Layout, packs: Sequence[Sequence[int]]) -> Visit:
    """A group whose micro-batches have documents of these lengths. An empty pack is one token without a target."""
    shared = layout.ulysses * layout.tp
    known = {pack: token_order(list(pack) or [1], layout.ring, shared).local_tokens // shared for pack in set(map(tuple, packs))}
    blocks = () if layout.chunk else tuple(loss_blocks(spec, known[tuple(pack)]) for pack in packs)
    return Visit(layout, len(packs), blocks)


@dataclass(frozen=True)
class Exchanges:
    """A switch as the program needs it. `opens[i]`: the units that need storage before exchange i; `closes[i]`: the units of the layout
    that is left which nothing reads after exchange i is posted; `ahead`: how many exchanges may go ahead."""

    count: int
    opens: tuple[tuple[int, ...], ...]
    closes: tuple[tuple[int, ...], ...]
    ahead: int


class RankLayout:
    """A layout from one rank: which units it computes, which weights it has, how they come. Immutable."""

    def __init__(self, spec: ModelSpec, layout: Layout, cut: Cut, rank: int):
        self.spec, self.layout, self.cut = spec, layout, cut
        self.at = layout.coord(rank)
        self.chunks = layout.units_of(spec.layers, self.at.pp)
        self.units = frozenset(unit.unit for unit in units_on(spec, layout, rank))
        self.tied = (spec.units,) if spec.units in self.units else ()
        self.collective = cut.at_home or cut.side == "rows"  # weights come and sums go by collectives among holders

    @property
    def leads(self) -> bool:
        """Whether no other stage waits for this rank's last backward. [Note: order]"""
        return self.at.pp == 0

    @cached_property
    def elements(self) -> dict[int, int]:
        """Nominal elements of each moving unit on a rank. [Note: windows]"""
        found: dict[int, int] = {}
        for param in self.spec.params:
            unit = moving_unit(self.spec, param)
            found[unit] = found.get(unit, 0) + -(-param.elements // (self.layout.tp if param.dim is not None else 1))
        return found

    def own(self, unit: int) -> bool:
        """Whether a unit has weights of its own here. Llama's embedding has none when it is tied."""
        return unit in self.units

    def shared(self, unit: int) -> tuple[int, ...]:
        """The tied embedding, where `unit` uses it."""
        return self.tied if unit in (0, self.spec.layers + 1) else ()


class Steps:
    """Makes the programs of one rank. Mutable: it keeps what it has made."""

    def __init__(self, itinerary: Itinerary, rank: int, weight_bytes: int, sum_bytes: int, windows: Windows):
        self.itinerary, self.rank, self.windows = itinerary, rank, windows
        self.bytes = weight_bytes, sum_bytes
        self.views = {layout: RankLayout(itinerary.spec, layout, cut, rank) for layout, cut in itinerary.cuts.items()}
        self.cuts = set(itinerary.cuts.values())
        self.world = itinerary.home.world
        self._programs: dict[tuple[Visit, ...], Program] = {}
        self._exchanges: dict[tuple[Cut | None, Cut | None], Exchanges] = {}

    def program(self, visits: Sequence[Visit]) -> Program:
        """The operations of a step that visits these groups, in this order."""
        key = tuple(visits)
        if key not in self._programs:
            if len(self._programs) >= 64:
                self._programs.clear()
            self._programs[key] = tuple(_Step(self, key).operations())
        return self._programs[key]

    def visits(self, groups: Sequence[LengthGroup], lengths: Sequence[int]) -> tuple[tuple[Visit, ...], list[list[tuple[int, ...]]]]:
        """The groups as a program needs them, and the documents of each micro-batch of this rank's replica, by visit: none where the replica
        has fewer packs than another. `lengths`: of the step's documents."""
        visits, packs = [], []
        for group in groups:
            view, layout = self.views[group.layout], group.layout
            own = [group.packs[p] for p in group.shares[view.at.dp]]
            packs.append(own + [()] * (max(map(len, group.shares)) - len(own)))
            visits.append(visit_of(self.itinerary.spec, layout, [[lengths[d] for d in pack] for pack in packs[-1]]))
        return tuple(visits), packs

    def source(self, before: Layout | None) -> Cut | None:
        """Whose copies a switch takes weights from, besides home, when `before` has computed."""
        return None if before is None else self.itinerary.source(before)

    def bring(self, source: Cut | None, target: Cut) -> Exchanges:
        """The switch that brings the weights of `target`."""
        if (source, target) not in self._exchanges:
            plan = self.itinerary.weights(source, target)
            self._exchanges[source, target] = self._planned(plan, source, target, self.itinerary.options.ahead_bytes)
        return self._exchanges[source, target]

    def take_home(self, source: Cut) -> Exchanges:
        """The switch that brings the sums of `source` home."""
        if (source, None) not in self._exchanges:
            self._exchanges[source, None] = self._planned(self.itinerary.sums(source), None, None, 0)
        return self._exchanges[source, None]

    def _planned(self, plan: Plan, source: Cut | None, target: Cut | None, ahead_bytes: int) -> Exchanges:
        count = plan.buckets + plan.rounds - 1 if plan.bytes_by_pair.any() else plan.buckets
        first, last, most = _spans(self.itinerary.spec, plan, count)
        opens: list[list[int]] = [[] for _ in range(count)]
        closes: list[list[int]] = [[] for _ in range(count)]
        for unit in sorted(self._here(target)):
            opens[first[unit]].append(unit)
        for unit in sorted(self._here(source)):
            closes[last[unit]].append(unit)
        ahead = next((number for number, taken in enumerate(most) if taken > ahead_bytes), count)
        return Exchanges(count, tuple(map(tuple, opens)), tuple(map(tuple, closes)), ahead)

    def _here(self, cut: Cut | None) -> frozenset[int]:
        """The moving units that this rank has under a cut."""
        return next((view.units for view in self.views.values() if view.cut == cut), frozenset())


def _spans(spec: ModelSpec, plan: Plan, exchanges: int) -> tuple[dict[int, int], dict[int, int], list[int]]:
    """The first and the last bucket of each moving unit; the most bytes of wanted weights that any rank has storage for after each
    exchange's `open`."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    wanted: dict[int, np.ndarray] = {}
    for w in plan.weights:
        unit = moving_unit(spec, spec.by_name[w.name])
        start, stop = (int(w.bucket[0]), int(w.bucket[-1])) if len(w.bucket) else (0, 0)
        first[unit], last[unit] = min(start, first.get(unit, start)), max(stop, last.get(unit, stop))
        wanted[unit] = wanted.get(unit, 0) + w.slices.size_bytes @ w.slices.wants
    opened = np.zeros((exchanges, plan.world), np.int64)
    for unit, number in first.items():
        opened[number] += wanted[unit]
    return first, last, opened.cumsum(0).max(1).tolist()


class _Step:
    """A program while it grows. Mutable."""

    def __init__(self, steps: Steps, visits: tuple[Visit, ...]):
        self.steps, self.visits = steps, visits
        self.views = [steps.views[visit.layout] for visit in visits]
        self.here: Cut | None = None
        self.present: set[int] = set()  # units whose copies, under the cut that is here, can be used
        self.ahead = 0  # exchanges of the next switch that have been posted

    def operations(self) -> Iterator[Op]:
        for number in range(len(self.visits)):
            yield Op("enter", number)
            yield from self._come(number)
            yield from self._run(number)
            yield from self._go(number)
            yield Op("leave", number)
        yield Op("norm")
        yield Op("update")

    def _come(self, number: int) -> Iterator[Op]:
        """The group's weights, as far as they are not here."""
        cut = self.views[number].cut
        if cut == self.here:
            return
        if not cut.at_home:
            exchanges = self._switch(number)
            for units in exchanges.closes[: self.ahead]:  # what went ahead left them, for they were still in use
                yield from (Op("close", number - 1, unit) for unit in units)
            yield from self._exchange(number, exchanges, "weights", self.ahead, exchanges.count)
            yield Op("await exchange", number, number=exchanges.count - 1, way="weights")
            yield Op("arrived", number)
        if self.here is not None:
            yield Op("close", number - 1)
        self.here, self.present, self.ahead = cut, set(), 0

    def _switch(self, number: int) -> Exchanges:
        """The switch to a visit from the one before."""
        before = self.visits[number - 1].layout if number else None
        return self.steps.bring(self.steps.source(before), self.views[number].cut)

    def _exchange(self, number: int, exchanges: Exchanges, way: str, start: int, stop: int) -> Iterator[Op]:
        for i in range(start, stop):
            if i:
                yield Op("await exchange", number, number=i - 1, way=way)
            yield from (Op("open", number, unit) for unit in exchanges.opens[i])
            yield Op("exchange", number, number=i, way=way)
            yield from (Op("close", number - 1, unit) for unit in exchanges.closes[i])

    def _go(self, number: int) -> Iterator[Op]:
        """Gradient sums that no later group adds to go home."""
        view, later = self.views[number], self.views[number + 1 :]
        if any(other.cut == view.cut for other in later):
            return
        if view.cut.at_home:
            if not later and len(self.steps.cuts) > 1:  # the next step may begin with another cut
                yield Op("close", number)
            return
        yield Op("total", number)
        exchanges = self.steps.take_home(view.cut)
        yield from self._exchange(number, exchanges, "sums", 0, exchanges.count)
        yield Op("await exchange", number, number=exchanges.count - 1, way="sums")
        yield Op("forget", number)
        if not later:
            yield Op("close", number)

    def _run(self, number: int) -> Iterator[Op]:
        """Forward and backward of the group's micro-batches, and reductions."""
        view, visit = self.views[number], self.visits[number]
        closing = all(other.cut != view.cut for other in self.views[number + 1 :])
        turns = list(_turns(view, visit, number, closing))
        ahead = self._going_ahead(number, turns)
        reductions = _Window(self.steps, view, "reduce")
        for op in self._with_gathers(number, turns, ahead):
            if op.kind == "reduce":
                yield from (Op("await reduce", number, unit) for unit in reductions.room_for(op.unit))
                yield op
                reductions.add(op.unit)
            else:
                yield op
        if closing and view.collective:
            for unit in view.tied:
                yield from (Op("await reduce", number, other) for other in reductions.room_for(unit))
                yield Op("reduce", number, unit)
                reductions.add(unit)
        yield from (Op("await reduce", number, unit) for unit in reductions.all())

    def _with_gathers(self, number: int, turns: "list[_Turn]", ahead: dict[int, list[Op]]) -> Iterator[Op]:
        """The turns with gathers before them, as far ahead as the window allows, and releases after them."""
        view, visit = self.views[number], self.visits[number]
        window, kept = _Window(self.steps, view, "gather"), dict[int, int]()
        release = visit.layout.zero == 3 and view.collective
        wanted: list[int] = []
        if view.collective:
            for unit in view.tied:
                if unit not in self.present:
                    yield Op("gather", number, unit)
                    yield Op("await gather", number, unit)
                    self.present.add(unit)
            wanted = [turn.unit for turn in turns if view.own(turn.unit)]
            wanted = wanted if release else [u for u in dict.fromkeys(wanted) if u not in self.present]
        posted = 0  # of `wanted`

        def post() -> Iterator[Op]:
            """Gathers of what comes next, as far as there is room."""
            nonlocal posted
            while posted < len(wanted):
                unit = wanted[posted]
                if unit in self.present or unit in window:  # it stays until then
                    if not window.fits(unit):
                        return
                    kept[unit] = kept.get(unit, 0) + 1
                elif window.fits(unit):
                    window.add(unit)
                    yield Op("gather", number, unit)
                else:
                    return
                posted += 1

        used = 0
        for index, turn in enumerate(turns):
            if wanted and view.own(turn.unit) and (release or turn.unit not in self.present):
                if posted <= used:
                    yield from post()
                if kept.get(turn.unit, 0) and turn.unit in self.present:
                    kept[turn.unit] -= 1
                else:
                    window.remove(turn.unit)
                    yield Op("await gather", number, turn.unit)
                    self.present.add(turn.unit)
                used += 1
            yield from post()
            yield from ahead.get(index, ())
            yield from turn.ops
            if release and view.own(turn.unit) and not kept.get(turn.unit, 0):
                self.present.discard(turn.unit)
                yield Op("release", number, turn.unit)
        yield from ahead.get(len(turns), ())

    def _going_ahead(self, number: int, turns: "list[_Turn]") -> dict[int, list[Op]]:
        """Exchanges of the switch to the next group, by the turn that they are posted before. [Note: order]"""
        if number + 1 == len(self.visits):
            return {}
        after = self.views[number + 1].cut
        if after.at_home or after == self.views[number].cut:
            return {}
        exchanges = self._switch(number + 1)
        self.ahead = exchanges.ahead
        last = [index for index, turn in enumerate(turns) if turn.final]
        found: dict[int, list[Op]] = {}
        for i in range(exchanges.ahead):
            at = last[i * len(last) // exchanges.ahead] if self.views[number].leads and last else len(turns)
            ops = self._exchange(number + 1, exchanges, "weights", i, i + 1)
            found.setdefault(at, []).extend(op for op in ops if op.kind != "close")
        return found


class _Window:
    """What is under way of one kind. Mutable. [Note: windows]"""

    def __init__(self, steps: Steps, view: RankLayout, kind: str):
        itemsize = steps.bytes[kind == "reduce"]
        self.size = {unit: elements * itemsize for unit, elements in view.elements.items()}
        given = steps.windows.gather if kind == "gather" else steps.windows.reduce
        blocks = [self.size[unit] for unit in range(1, view.spec.layers + 1)]
        self.most = given if given is not None else max(blocks)
        self.under_way: deque[int] = deque()

    def __contains__(self, unit: int) -> bool:
        return unit in self.under_way

    def fits(self, unit: int) -> bool:
        return not self.under_way or sum(self.size[u] for u in self.under_way) + self.size[unit] <= self.most

    def add(self, unit: int) -> None:
        self.under_way.append(unit)

    def remove(self, unit: int) -> None:
        self.under_way.remove(unit)

    def room_for(self, unit: int) -> Iterator[int]:
        """Those that must end first, oldest first."""
        while not self.fits(unit):
            yield self.under_way.popleft()

    def all(self) -> Iterator[int]:
        while self.under_way:
            yield self.under_way.popleft()


@dataclass(frozen=True)
class _Turn:
    """Consecutive operations that compute with the weights of one unit (-1: with none). `final`: of the rank's last backward."""

    unit: int
    ops: tuple[Op, ...]
    final: bool = False


def _turns(view: RankLayout, visit: Visit, number: int, closing: bool) -> Iterator[_Turn]:
    """All that a group computes on a rank, messages between stages included, without gathers."""
    layout, at = view.layout, view.at
    order = pipeline.events(layout, at.pp, visit.micros)
    last = {event.micro: index for index, event in enumerate(order)}
    loaded: set[int] = set()
    sent: deque[Op] = deque()
    make = (_ChunkedTurns if layout.chunk else _WholeTurns)(view, visit, number, closing)
    receives = [pipeline.receives(layout, at.pp, event) for event in order]

    def load(micro: int) -> list[Op]:
        fresh = {micro} - loaded
        loaded.update(fresh)
        return [Op("load", number, micro=micro) for micro in fresh]

    def message(kind: Kind, moved: pipeline.Transfer | None, event: pipeline.Event, source: bool) -> list[Op]:
        if moved is None:
            return []
        rising = moved.source % layout.pp < moved.target % layout.pp
        peer = (moved.source if source else moved.target) % layout.pp
        way = "rising" if rising else "falling"
        return [Op(kind, number, micro=event.micro, chunk=event.chunk, turn=event.kind, number=moved.tag, peer=peer, way=way)]

    def receive(index: int) -> list[Op]:
        """What event number `index` waits for, posted."""
        if index == len(order) or receives[index] is None:
            return []
        return [*load(order[index].micro), *message("receive", receives[index], order[index], True)]

    posted = receive(0)
    for index, event in enumerate(order):
        before, posted = [*posted, *load(event.micro), *receive(index + 1)], []
        arrived = message("await receive", receives[index], event, True)
        yield _Turn(-1, (*before, *arrived))
        made = (make.forward if event.kind == "forward" else make.backward)(event, bool(arrived))
        yield from (replace(turn, final=True) for turn in made) if index == len(order) - 1 else made
        after = message("send", pipeline.sends(layout, at.pp, event), event, False)
        sent.extend(op._replace(kind="await send") for op in after)
        if len(sent) > layout.pp:
            after.append(sent.popleft())
        if last[event.micro] == index:
            after.append(Op("unload", number, micro=event.micro))
        yield _Turn(-1, tuple(after))
    yield _Turn(-1, tuple(sent))


class _Turns:
    """What whole and chunked packs have in common: where gradients go."""

    def __init__(self, view: RankLayout, visit: Visit, number: int, closing: bool):
        self.view, self.visit, self.number, self.closing = view, visit, number, closing

    def collect(self, unit: int, reduce: bool) -> Iterator[Op]:
        """Gradients that a backward of `unit` left on weights: to their sums, and home where `reduce`."""
        yield from (Op("accumulate", self.number, tied) for tied in self.view.shared(unit))
        if self.view.own(unit):
            yield Op("accumulate", self.number, unit)
            if reduce and self.view.collective:
                yield Op("reduce", self.number, unit)

    def reduces(self, micro: int) -> bool:
        """Whether sums go home after a backward of this micro-batch."""
        return self.view.layout.zero >= 2 or (self.closing and micro == self.visit.micros - 1)


class _WholeTurns(_Turns):
    """Turns of packs that are computed whole."""

    def __init__(self, view: RankLayout, visit: Visit, number: int, closing: bool):
        super().__init__(view, visit, number, closing)
        self.moves = view.layout.offload != "device"

    def forward(self, event: pipeline.Event, arrived: bool) -> Iterator[_Turn]:
        for unit in self.view.chunks[event.chunk]:
            if unit <= self.view.spec.layers:  # the head's forward is part of its loss
                yield _Turn(unit, tuple(self._forward(unit, event.micro)))

    def backward(self, event: pipeline.Event, arrived: bool) -> Iterator[_Turn]:
        """What waits in a tier is fetched one unit ahead."""
        units = self.view.chunks[event.chunk][::-1]
        reduce = self.reduces(event.micro)
        fetches = [tuple(self._fetches(unit, event.micro)) for unit in units] + [()]
        for index, unit in enumerate(units):
            ops = [*(fetches[0] if index == 0 else ()), *fetches[index + 1]]
            if unit > self.view.spec.layers:
                blocks = self.visit.loss_blocks[event.micro]
                for block in range(blocks):
                    ops.append(Op("compute", self.number, unit, event.micro, turn="loss", number=block))
                    ops += self.collect(unit, reduce and block == blocks - 1)
            else:
                ops += self._backward(unit, event.micro)
                ops += self.collect(unit, reduce)
            yield _Turn(unit, tuple(ops))

    def _parts(self, unit: int) -> tuple[tuple[str, bool], ...]:
        return (("embed", True),) if unit == 0 else parts_of(self.view.layout)

    def _forward(self, unit: int, micro: int) -> Iterator[Op]:
        for part, graph in self._parts(unit):
            yield Op("compute", self.number, unit, micro, turn="forward" if graph else "pass", part=part)
            if self.moves and not graph:
                yield Op("put", self.number, unit, micro, part=part)

    def _fetches(self, unit: int, micro: int) -> Iterator[Op]:
        if self.moves and unit <= self.view.spec.layers:
            for part, graph in reversed(self._parts(unit)):
                if not graph:
                    yield Op("fetch", self.number, unit, micro, part=part)

    def _backward(self, unit: int, micro: int) -> Iterator[Op]:
        for part, graph in reversed(self._parts(unit)):
            if not graph:
                if self.moves:
                    yield Op("await fetch", self.number, unit, micro, part=part)
                yield Op("compute", self.number, unit, micro, turn="again", part=part)
            yield Op("compute", self.number, unit, micro, turn="backward", part=part)
            if self.moves and not graph:
                yield Op("drop", self.number, unit, micro, part=part)


class _ChunkedTurns(_Turns):
    """Turns of packs that are computed chunk by chunk. Their events add gradients to sums as they come."""

    def forward(self, event: pipeline.Event, arrived: bool) -> Iterator[_Turn]:
        units, view = self.view.chunks[event.chunk], self.view
        if arrived:
            yield _Turn(-1, (Op("arrive", self.number, units[0], event.micro, event.chunk, "forward"),))
        for unit, turn in forward_turns(units, view.spec.layers, view.layout.every):
            if turn != "later":
                yield _Turn(unit, (Op("compute", self.number, unit, event.micro, event.chunk, turn),))
        if units[-1] <= view.spec.layers:
            yield _Turn(-1, (Op("depart", self.number, units[-1], event.micro, event.chunk, "forward"),))

    def backward(self, event: pipeline.Event, arrived: bool) -> Iterator[_Turn]:
        units, view = self.view.chunks[event.chunk], self.view
        if arrived:
            yield _Turn(-1, (Op("arrive", self.number, units[-1], event.micro, event.chunk, "backward"),))
        for unit, turn in backward_turns(units, view.spec.layers, view.layout.every):
            ops = [Op("compute", self.number, unit, event.micro, turn=turn)]
            if turn != "forward" and self.reduces(event.micro) and view.own(unit) and view.collective:
                ops.append(Op("reduce", self.number, unit))
            yield _Turn(unit, tuple(ops))
        if units[0]:
            yield _Turn(-1, (Op("depart", self.number, units[0], event.micro, event.chunk, "backward"),))
