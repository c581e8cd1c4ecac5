"""The program of a training step on one rank: which operations, in which order. Pure, and a function of the layouts, of how many packs each
replica has, and of the rank's place; never of what has already arrived.

    group 1                                       group 2                        end
    ┌ gathers ahead ─ turns ─ reductions ┐        ┌ rest of the switch ─ ... ┐   norm ─ update
      └ late updates    └ exchanges of the switch to group 2, ahead ┘└ early updates

ZeRO (arXiv 1910.02054) is when units are gathered, reduced and released: stage 3 gathers a unit for each use and releases it after, stages
0 to 2 gather it once a group; stages 2 and 3 reduce after every backward, stages 0 and 1 after the last.

[Note: windows] Gathers that are not yet used, and reductions that are not yet home, may have as many bytes as those of the largest block.
One of each may always be under way, however large. Bytes are nominal (a unit's elements over `tp`), the same number on every rank, so that
all decide alike.

[Note: late updates] A home outside the device is updated under the forward of the next step. The norm, and so the clip, is known since the
end of the step before, and a unit is updated before the first gather, or exchange, that reads its master: nothing is stale. Ranks update in
one order, that of the forward, up to the unit that is read, whoever keeps it, so that collectives of `pack` cross no others.

[Note: early updates] A unit on disk may be updated under the backward, when its last reduction has ended, as if the norm would not clip
(SuperOffload, arXiv 2509.21271, does so in host memory). Its masters and moments go to a second place in the file, and its gradient sums
to theirs. Where the norm does not clip, the second places count from then on; where it does, or is not finite, the first ones do, and the
unit is updated late. Bits are the same. Ranks need not agree: no other one sees it. `early_units` (`layout.home_tiers`) leaves some units
to the forward, which has its part of the bytes so. The unit that is reduced last in a step is updated late too: no backward hides its
writing. All are late where moments are packed in fewer bits: ranks agree on scales while they pack, in one order. Masters and moments of
two units are in memory, one that is updated or written and the next. From the end of the forward on, masters and moments are read up to
READ_AHEAD turns before the unit's backward, as far as there is room.

[Note: order] Members of a communicator post its operations in one order, and no rank waits for an operation that another can only post
after this rank has done what follows. So exchanges of a switch that go ahead are posted between the turns of the last backward only where
no stage waits for that backward; other stages post them after their last message.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from longshift.layout.home_tiers import HomeTiers, StateBytes, early_units, tiers_of, trained_elements
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets_of, moving_unit, place_of
from longshift.program.operations import Op, Program
from longshift.program.turns import RankLayout, UnitTurn, Visit, visit_of
from longshift.program.turns import turns as made_turns
from longshift.spec.formats import MomentFormat, Wire
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.plan import Plan
from longshift.workload.groups import LengthGroup

READ_AHEAD = 3  # how far ahead the disk is read: masters in units, where a forward moves records too; masters and moments in turns


@dataclass(frozen=True)
class Exchanges:
    """A switch as the program needs it. `opens[i]`: the units that need storage before exchange i; `closes[i]`: the units of the layout
    that is left which nothing reads after exchange i is posted; `ahead`: how many exchanges may go ahead; `spans`: by unit the first
    exchange that reads a source or adds to a target, and the last that does."""

    count: int
    opens: tuple[tuple[int, ...], ...]
    closes: tuple[tuple[int, ...], ...]
    ahead: int
    spans: Mapping[int, tuple[int, int]]


class Steps:
    """Makes the programs of one rank. Mutable: it keeps what it has made. Several threads may ask for programs."""

    def __init__(
        self,
        itinerary: Itinerary,
        rank: int,
        weight_bytes: int,
        sum_bytes: int,
        home_in: HomeTiers = HomeTiers(),  # noqa: B008  (frozen)
        moments: int = 2,
        packed: MomentFormat = "float32",
        wire: Wire = Wire(),  # noqa: B008  (frozen)
        doubled: bool = True,
    ):
        """`home_in`: where the training state lies; `moments`: how many the optimizer keeps, `packed` into this format between updates;
        `wire`: formats of gathers and reductions; `doubled`: whether a home on disk has second places."""
        self.itinerary, self.rank, self.home_in, self.wire = itinerary, rank, home_in, wire
        self.moments = moments
        self.packed: MomentFormat = packed if moments else "float32"
        self.late = home_in.late
        self.by_unit = self.late or self.packed != "float32"
        self.buckets = buckets_of(itinerary.spec, itinerary.home, rank)
        self.state_bytes = StateBytes(weight_bytes, sum_bytes, moments, self.packed)
        self.home_tiers = tiers_of(home_in, self.buckets, rank, self.state_bytes)
        self.on_disk = [unit for unit, tier in self.home_tiers.items() if tier == "disk"]
        self.kept = trained_elements(itinerary.spec, self.buckets, rank)
        self.trained = list(self.kept)
        self.mixed = {bucket.unit for bucket in self.buckets if bucket.frozen}.intersection(self.trained)
        self.early = early_units(self.home_tiers, self.kept) if doubled and self.packed == "float32" else frozenset[int]()
        sizes = [size for unit, size in self.kept.items() if unit in self.early]
        self.early_pair = max(
            (a + b for a, b in pairwise(sizes)), default=sum(sizes)
        )  # elements of two that are updated one after the other
        self.bytes = weight_bytes, sum_bytes
        self.views = {layout: RankLayout(itinerary.spec, layout, cut, rank) for layout, cut in itinerary.cuts.items()}
        self.cuts = set(itinerary.cuts.values())
        self.world = itinerary.home.world
        self._programs: dict[tuple[tuple[Visit, ...], bool, tuple[int, ...], bool], Program] = {}
        self._exchanges: dict[Plan, Exchanges] = {}

    def program(self, visits: Sequence[Visit], learns: bool = True, left: Sequence[int] = (), early: bool = False) -> Program:
        """The operations of a step that visits these groups, in this order; without what only gradients need where it does not learn.
        `left`: units whose updates the step before has left; without visits the program makes these alone. `early`: whether units are
        updated before the norm, as far as they can be."""
        key = tuple(visits), learns, tuple(left), early and bool(self.early)
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) >= 64:
                self._programs.clear()
            found = self._programs[key] = tuple(_Step(self, *key).operations())
        return found

    def visits(self, groups: Sequence[LengthGroup], lengths: Sequence[int]) -> tuple[tuple[Visit, ...], list[list[tuple[int, ...]]]]:
        """The groups as a program needs them, and the documents of each micro-batch of this rank's replica, by visit. A micro-batch has no
        documents where the replica has fewer packs than another. `lengths`: of the step's documents."""
        visits, packs = [], []
        for group in groups:
            view, layout = self.views[group.layout], group.layout
            own = [group.packs[p] for p in group.shares[view.at.dp]]
            packs.append(own + [()] * (max(map(len, group.shares)) - len(own)))
            visits.append(visit_of(self.itinerary.spec, layout, [[lengths[d] for d in pack] for pack in packs[-1]]))
        return tuple(visits), packs

    def left(self, early: Collection[int] = ()) -> tuple[int, ...]:
        """Units whose updates a step leaves where it has updated some early."""
        return tuple(unit for unit in self.trained if unit not in early) if self.late else ()

    def place(self, unit: int) -> int:
        """Where a unit comes in the forward."""
        return place_of(self.itinerary.spec, unit)

    def source(self, before: Layout | None) -> Cut | None:
        """Whose copies a switch takes weights from, besides home, when `before` has computed."""
        return None if before is None else self.itinerary.source(before)

    def bring(self, source: Cut | None, target: Cut) -> Exchanges:
        """The switch that brings the weights of `target`."""
        return self._planned(self.itinerary.weights(source, target), source, target)

    def take_home(self, source: Cut) -> Exchanges:
        """The switch that brings the sums of `source` home."""
        return self._planned(self.itinerary.sums(source), None, None)

    def _planned(self, plan: Plan, source: Cut | None, target: Cut | None) -> Exchanges:
        if plan in self._exchanges:
            return self._exchanges[plan]
        count = plan.exchanges
        first, last, most = _spans(self.itinerary.spec, plan)
        opens: list[list[int]] = [[] for _ in range(count)]
        closes: list[list[int]] = [[] for _ in range(count)]
        for unit in sorted(self._here(target)):
            opens[first[unit]].append(unit)
        for unit in sorted(self._here(source)):
            closes[last[unit]].append(unit)
        ahead = next((number for number, taken in enumerate(most) if taken > self.itinerary.options.ahead_bytes), count)
        spans = {unit: (first[unit], min(count, last[unit] + plan.rounds) - 1) for unit in first}
        return self._exchanges.setdefault(plan, Exchanges(count, tuple(map(tuple, opens)), tuple(map(tuple, closes)), ahead, spans))

    def _here(self, cut: Cut | None) -> frozenset[int]:
        """The moving units that this rank has under a cut."""
        return next((view.units for view in self.views.values() if view.cut == cut), frozenset())


def _spans(spec: ModelSpec, plan: Plan) -> tuple[dict[int, int], dict[int, int], list[int]]:
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
    opened = np.zeros((plan.exchanges, plan.world), np.int64)
    for unit, number in first.items():
        opened[number] += wanted[unit]
    return first, last, opened.cumsum(0).max(1).tolist()


class _Step:
    """A program while it grows. Mutable."""

    def __init__(self, steps: Steps, visits: tuple[Visit, ...], learns: bool, left: Sequence[int], early: bool):
        self.steps, self.visits, self.learns = steps, visits, learns
        self.left = deque(left)  # units that are to be updated
        self.early = steps.early if early and learns else frozenset[int]()
        self.reductions = Counter[int]()  # of the last visit, by unit: those that have not ended
        self.to_come = Counter[int]()  # and those that have not begun
        self.views = [steps.views[visit.layout] for visit in visits]
        self.here: Cut | None = None
        self.present: set[int] = set()  # units whose copies, under the cut that is here, can be used
        self.ahead = 0  # exchanges of the next switch that have been posted
        self.disk = _Disk(steps.on_disk)

    def operations(self) -> Iterator[Op]:
        for number in range(len(self.visits)):
            yield Op("enter", number)
            yield from self._come(number)
            yield from self._run(number)
            yield from self._go(number)
            yield Op("leave", number)
        yield from self._updated()
        yield from self.disk.settled()
        if not self.visits:
            return
        yield Op("norm")
        if self.learns:
            yield Op("update")
            if self.steps.by_unit and not self.steps.late:
                self.left.extend(self.steps.trained)
                yield from self._updated()

    def _updated(self, upto: int | None = None) -> Iterator[Op]:
        """Updates of the units that are left, up to one, or of all. Of units on disk the next one comes while one is updated, and the last
        goes."""
        while self.left and (upto is None or self.steps.place(self.left[0]) <= self.steps.place(upto)):
            unit = self.left.popleft()
            if unit in self.disk.units:
                yield from self.disk.settled("record")
                yield from self.disk.have_record(unit, next((after for after in self.left if after in self.disk.units), None))
            yield Op("update", unit=unit)
            if self.steps.packed != "float32":
                yield Op("pack", unit=unit)
            if unit in self.disk.units:
                yield from self.disk.write(0, unit, "record")
                yield from self.disk.settled() if unit in self.steps.mixed else ()  # a record is no whole master of these

    def _come(self, number: int) -> Iterator[Op]:
        """Operations that bring the group's weights, as far as they are not here."""
        cut = self.views[number].cut
        if cut == self.here:
            return
        if not cut.at_home:
            exchanges = self._switch(number)
            for units in exchanges.closes[: self.ahead]:  # what went ahead left them, for they were still in use
                yield from (Op("close", number - 1, unit) for unit in units)
            yield from self._exchange(number, exchanges, "weights", self.ahead, exchanges.count)
            yield Op("await exchange", number, number=exchanges.count - 1, way="weights")
            yield from self._from_home(number, exchanges, "weights", exchanges.count - 1, True)
            yield Op("arrived", number)
        if self.here is not None:
            yield Op("close", number - 1)
        self.here, self.present, self.ahead = cut, set(), 0

    def _switch(self, number: int) -> Exchanges:
        """The switch to a visit from the one before."""
        before = self.visits[number - 1].layout if number else None
        return self.steps.bring(self.steps.source(before), self.views[number].cut)

    def _exchange(self, number: int, exchanges: Exchanges, way: str, start: int, stop: int) -> Iterator[Op]:
        away = self.disk.units
        for i in range(start, stop):
            if i:
                yield Op("await exchange", number, number=i - 1, way=way)
                yield from self._from_home(number, exchanges, way, i - 1, True) if away else ()
            yield from self._before_exchange(exchanges, i) if self.left or away else ()
            for unit in exchanges.opens[i]:
                yield Op("open", number, unit)
            yield from self._from_home(number, exchanges, way, i, False) if away else ()
            yield Op("exchange", number, number=i, way=way)
            for unit in exchanges.closes[i]:
                yield Op("close", number - 1, unit)

    def _before_exchange(self, exchanges: Exchanges, i: int) -> Iterator[Op]:
        """Late updates of the units that an exchange may read from home."""
        wanted = [unit for unit, (first, _) in exchanges.spans.items() if first <= i]
        if wanted:
            yield from self._updated(max(wanted, key=self.steps.place))
            yield from self.disk.settled("record")  # its memory goes when it is written, and an exchange may last longer

    def _from_home(self, number: int, exchanges: Exchanges, way: str, i: int, after: bool) -> Iterator[Op]:
        """What an exchange reads or adds to of a home on disk: brought before it, gone when it has ended."""
        units = [unit for unit in self.disk.units if unit in exchanges.spans and exchanges.spans[unit][after] == i]
        if way == "weights":
            for unit in units:
                yield from self.disk.leave(number, unit) if after else self.disk.have(number, unit)
            return
        for unit in units:
            if unit in self.steps.trained:
                yield from self.disk.write(number, unit, "sums") if after else self.disk.have_sums(number, unit)

    def _go(self, number: int) -> Iterator[Op]:
        """Operations that bring gradient sums home which no later group adds to."""
        view, later = self.views[number], self.views[number + 1 :]
        if any(other.cut == view.cut for other in later):
            return
        if view.cut.at_home:
            if not later and len(self.steps.cuts) > 1:  # the next step may begin with another cut
                yield Op("close", number)
            return
        if self.learns:
            yield from self._updated()
            if not self.disk.units:
                yield Op("total", number)
            else:
                yield from (Op("total", number, unit) for unit in self.steps.trained if unit not in self.disk.units)
            exchanges = self.steps.take_home(view.cut)
            yield from self._exchange(number, exchanges, "sums", 0, exchanges.count)
            yield Op("await exchange", number, number=exchanges.count - 1, way="sums")
            yield from self._from_home(number, exchanges, "sums", exchanges.count - 1, True)
            yield Op("forget", number)
        if not later:
            yield Op("close", number)

    def _run(self, number: int) -> Iterator[Op]:
        """Operations of the group's micro-batches, forward and backward, and reductions."""
        view, visit = self.views[number], self.visits[number]
        closing = self.learns and all(other.cut != view.cut for other in self.views[number + 1 :])
        turns = list(made_turns(view, visit, number, closing, self.learns))
        ahead = self._going_ahead(number, turns)
        reductions = _Window(self.steps, view, "reduce")
        tied = [Op("reduce", number, unit) for unit in view.tied if closing and view.collective and unit in view.learned]
        if number == len(self.visits) - 1 and view.cut.at_home:  # no other sums come home after these
            reduced = [op.unit for op in chain((op for turn in turns for op in turn.ops), tied) if op.kind == "reduce"]
            self.reductions = Counter(reduced)
            self.to_come = Counter(reduced)
            self.early -= set(reduced[-1:])
        for op in chain(self._with_gathers(number, turns, ahead), tied):
            if op.kind != "reduce":
                yield op
                continue
            self.to_come[op.unit] -= 1
            yield from self._updated(op.unit)
            for unit in reductions.room_for(op.unit):
                yield from self._reduced(number, unit, [*reductions, op.unit][0])
            reductions.append(op.unit)
            yield op
            yield from self._ask_state(number, reductions[0])
        while reductions:
            yield from self._reduced(number, reductions.popleft(), reductions[0] if reductions else None)

    def _reduced(self, number: int, unit: int, after: int | None = None) -> Iterator[Op]:
        """The end of a reduction, and what home on disk does with its sum; `after`: the unit whose reduction ends next."""
        away = self.views[number].cut.at_home and unit in self.disk.units
        self.reductions[unit] -= 1
        early = unit in self.early and self.reductions[unit] == 0
        yield from self.disk.known_sums(number, unit) if away else ()
        yield Op("await reduce", number, unit)
        if away:
            yield from self.disk.write_beside(number, unit, "sums") if early else self.disk.write(number, unit, "sums")
        if early:
            yield from self._ask_state(number, unit)
            yield Op("await read", number, unit, part="state")
            yield from self.disk.settled(but=unit)  # the unit before is in memory until then
            yield from self._ask_state(number, after)
            yield Op("update", number, unit, part="early")
            yield from self.disk.write_beside(number, unit, "state")

    def _ask_state(self, number: int, unit: int | None) -> Iterator[Op]:
        """Read the masters and moments of a unit that is updated early, once its last reduction has begun."""
        if unit is not None and unit in self.early and not self.to_come[unit]:
            yield from self.disk.ask_state(number, unit)

    def _room_for_state(self, unit: int) -> bool:
        """Whether masters and moments of a unit can be read beside those in memory. There is room for those of two units that are updated
        one after the other, and for a quarter more: for a small one, such as a last norm."""
        return 4 * sum(self.steps.kept[some] for some in {unit, *self.disk.states}) <= 5 * self.steps.early_pair

    def _states_ahead(self, number: int, coming: Sequence[UnitTurn]) -> Iterator[Op]:
        """Read the masters and moments of units that are updated early, in the order of the turns to come, as far as there is room."""
        for unit in (turn.unit for turn in coming if turn.unit in self.early and turn.unit not in self.disk.states):
            if unit in self.disk.records or not self._room_for_state(unit):
                return
            yield from self.disk.ask_state(number, unit)

    def _gather(self, number: int, unit: int, after: Sequence[int] = ()) -> Iterator[Op]:
        """A gather, with the master from disk where home is there. `after`: the units that are gathered next. Their masters are asked for,
        too: of one unit, and of READ_AHEAD units while late updates are to come, as far as the second of these. A record moves seven times
        the bytes of a master, in and out, and masters must not wait behind it; nor must the disk, while its update waits for the turn
        before."""
        at_home = self.views[number].cut.at_home
        away, records = self.disk.units if at_home else frozenset(), 0
        for some in (unit, *after[: READ_AHEAD if self.left else 1]):
            records += some in self.left and some != unit
            if records > 1:
                break
            if some in away:
                yield from self.disk.ask_record(some) if some in self.left else self.disk.ask(number, some)
        yield from self._updated(unit) if at_home else ()
        yield from self.disk.have(number, unit) if unit in away else ()
        yield Op("gather", number, unit)
        yield from self.disk.leave(number, unit) if unit in away else ()

    def _with_gathers(self, number: int, turns: list[UnitTurn], ahead: dict[int, list[int]]) -> Iterator[Op]:
        """The turns with gathers before them, as far ahead as the window allows, and releases after them."""
        view, visit = self.views[number], self.visits[number]
        closes = number == len(self.visits) - 1 and view.cut.at_home
        window, kept = _Window(self.steps, view, "gather"), dict[int, int]()
        release = visit.layout.zero == 3 and view.collective
        wanted: list[int] = []
        if view.collective:
            for unit in view.tied:
                if unit not in self.present:
                    yield from self._gather(number, unit)
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
                    window.append(unit)
                    after = wanted[posted + 1 :][:READ_AHEAD]
                    yield from self._gather(number, unit, [some for some in after if some not in self.present and some not in window])
                else:
                    return
                posted += 1

        used = 0
        first = next((index for index, turn in enumerate(turns) if turn.final), len(turns))
        for index, turn in enumerate(turns):
            yield from self.disk.settled("record", but=turn.unit)
            if closes and not self.left and index + READ_AHEAD > first:
                yield from self._states_ahead(number, turns[max(index, first) :][:READ_AHEAD])
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
            yield from self._exchanges_ahead(number, ahead.get(index, ()))
            yield from turn.ops
            if release and view.own(turn.unit) and not kept.get(turn.unit, 0):
                self.present.discard(turn.unit)
                yield Op("release", number, turn.unit)
        yield from self._exchanges_ahead(number, ahead.get(len(turns), ()))

    def _exchanges_ahead(self, number: int, exchanges: Sequence[int]) -> Iterator[Op]:
        """Exchanges of the switch to the next group. What they leave is closed later: it is still in use."""
        for i in exchanges:
            ops = self._exchange(number + 1, self._switch(number + 1), "weights", i, i + 1)
            yield from (op for op in ops if op.kind != "close")

    def _going_ahead(self, number: int, turns: list[UnitTurn]) -> dict[int, list[int]]:
        """Numbers of the exchanges of the switch to the next group, by the turn that they are posted before. [Note: order]"""
        if number + 1 == len(self.visits) or not self.learns:
            return {}
        after = self.views[number + 1].cut
        if after.at_home or after == self.views[number].cut:
            return {}
        exchanges = self._switch(number + 1)
        self.ahead = exchanges.ahead
        last = [index for index, turn in enumerate(turns) if turn.final]
        found: dict[int, list[int]] = {}
        for i in range(exchanges.ahead):
            at = last[i * len(last) // exchanges.ahead] if self.views[number].leads and last else len(turns)
            found.setdefault(at, []).append(i)
        return found


class _Disk:
    """What of a home on disk is in memory, while a program grows. Mutable. `units`: that lie there."""

    def __init__(self, units: Sequence[int]):
        self.units = frozenset(units)
        self.masters = Counter[int]()  # users
        self.asked: set[int] = set()
        self.records: set[int] = set()  # units whose records are here, or asked for
        self.states: set[int] = set()  # units whose masters and moments are here, or asked for
        self.known: set[int] = set()  # units that have gradient sums
        self.writing: deque[Op] = deque()

    def ask(self, number: int, unit: int) -> Iterator[Op]:
        """Read the master of a unit, for `have`."""
        if not self.masters[unit] and unit not in self.asked:
            self.asked.add(unit)
            yield Op("read", number, unit, part="master")

    def have(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the master of a unit, until it is left."""
        if not self.masters[unit]:
            yield from self.ask(number, unit)
            self.asked.remove(unit)
            yield Op("await read", number, unit, part="master")
        self.masters[unit] += 1

    def leave(self, number: int, unit: int) -> Iterator[Op]:
        self.masters[unit] -= 1
        if not self.masters[unit]:
            yield Op("evict", number, unit, part="master")

    def have_record(self, unit: int, after: int | None) -> Iterator[Op]:
        """Bring the record of a unit, until it is written, and ask for the one `after`."""
        yield from self.ask_record(unit)
        yield Op("await read", unit=unit, part="record")
        yield from self.ask_record(after) if after is not None else ()
        self.masters[unit] += 1

    def ask_record(self, unit: int) -> Iterator[Op]:
        """Read the record of a unit, for `have_record`."""
        if unit not in self.records:
            self.records.add(unit)
            yield Op("read", unit=unit, part="record")

    def ask_state(self, number: int, unit: int) -> Iterator[Op]:
        """Read the masters and moments of a unit, until they are written."""
        if unit not in self.states:
            yield from self.settled() if unit in self.records else ()
            self.states.add(unit)
            yield Op("read", number, unit, part="state")

    def known_sums(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the gradient sums of a unit, if there are some."""
        if unit in self.known:
            if any(op.unit == unit for op in self.writing):
                yield from self.settled()
            yield Op("read", number, unit, part="sums")
            yield Op("await read", number, unit, part="sums")
        self.known.add(unit)

    def have_sums(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the gradient sums of a unit; zeros, if there are none."""
        new = unit not in self.known
        yield from self.known_sums(number, unit)
        if new:
            yield Op("total", number, unit)

    def write(self, number: int, unit: int, part: str) -> Iterator[Op]:
        """Write a part of a unit, when that before it is written."""
        yield from self.settled()
        yield from self.write_beside(number, unit, part)

    def write_beside(self, number: int, unit: int, part: str) -> Iterator[Op]:
        """Write a part of a unit while that before it is written."""
        self.writing.append(Op("write", number, unit, part=part))
        yield self.writing[-1]

    def settled(self, part: str | None = None, but: int | None = None) -> Iterator[Op]:
        """Await what is written, oldest first: all, or as far as it is of a part. What is of the unit `but`, and what follows it, goes
        on."""
        while self.writing and part in (None, self.writing[0].part) and self.writing[0].unit != but:
            written = self.writing.popleft()
            self.states -= {written.unit} if written.part == "state" else set()
            if written.part == "record":
                self.records.remove(written.unit)
                self.masters[written.unit] -= 1
            yield written._replace(kind="await write")


class _Window(deque[int]):
    """Units whose gathers, or reductions, are under way, oldest first. Mutable. [Note: windows]"""

    def __init__(self, steps: Steps, view: RankLayout, kind: str):
        super().__init__()
        itemsize = steps.bytes[kind == "reduce"]
        elements = view.elements if kind == "gather" else view.learned_elements
        self.size = {unit: elements * itemsize for unit, elements in elements.items()}
        self.most = max(self.size[unit] for unit in range(1, view.spec.layers + 1))

    def fits(self, unit: int) -> bool:
        return not self or sum(self.size[u] for u in self) + self.size[unit] <= self.most

    def room_for(self, unit: int) -> Iterator[int]:
        """Those that must end first, oldest first."""
        while not self.fits(unit):
            yield self.popleft()
