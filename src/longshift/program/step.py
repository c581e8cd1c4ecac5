"""The program of a training step on one rank: which operations, in which order. Pure, and a
function of the layouts, of how many packs each replica has, and of the rank's place; never of what
has already arrived.

    group 1                                       group 2                        end
    ┌ gathers ahead ─ turns ─ reductions ┐        ┌ rest of the switch ─ ... ┐   norm ─ update
      └ late updates    └ exchanges of the switch to group 2, ahead ┘└ early updates

ZeRO (arXiv 1910.02054) is when units are gathered, reduced and released: stage 3 gathers a unit for
each use and releases it after, stages 0 to 2 gather it once a group; stages 2 and 3 reduce after
every backward, stages 0 and 1 after the last.

[Note: windows] Gathers that are not yet used, and reductions that are not yet home, may have as
many bytes as those of the largest block. One of each may always be under way, however large. Bytes
are nominal (a unit's elements over `tp`), the same number on every rank, so that all decide alike.

[Note: late updates] A home outside the device is updated under the forward of the next step. The
norm, and so the clip, is known since the end of the step before, and a unit is updated before the
first gather, or exchange, that reads its master: nothing is stale. Ranks update in one order, that
of the forward, up to the unit that is read, whoever keeps it, so that collectives of `pack` cross
no others.

[Note: early updates] A unit on disk may be updated under the backward, when its last reduction has
ended, as if the norm would not clip (SuperOffload, arXiv 2509.21271, does so in host memory). Its
masters and moments go to a second place in the file, and its gradient sums to theirs. Where the
norm does not clip, the second places count from then on; where it does, or is not finite, the first
ones do, and the unit is updated late. Bits are the same. Ranks need not agree: no other one sees
it. `early_units` (`layout.home_tiers`) leaves some units to the forward, which has its part of the
bytes so. The unit that is reduced last in a step is updated late too: no backward hides its
writing. All are late where moments are packed in fewer bits: ranks agree on scales while they pack,
in one order. Masters and moments of two units are in memory, one that is updated or written and the
next. From the end of the forward on, masters and moments are read up to READ_AHEAD turns before the
unit's backward, as far as there is room.

[Note: order] Members of a communicator post its operations in one order, and no rank waits for an
operation that another can only post after this rank has done what follows. So exchanges of a switch
that go ahead are posted between the turns of the last backward only where no stage waits for that
backward; other stages post them after their last message.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np

from longshift.layout.home_tiers import (
    HomeTiers,
    StateBytes,
    early_units,
    tiers_of,
    trained_elements,
)
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets_of, moving_unit, place_of
from longshift.program.operations import Op, Program
from longshift.program.turns import RankLayout, UnitTurn, Visit, visit_of
from longshift.program.turns import turns as group_turns
from longshift.spec.formats import MomentFormat, Wire
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.plan import Plan
from longshift.workload.groups import LengthGroup

# How far ahead the disk is read: masters in units, where a forward moves records too; masters and
# moments in turns.
READ_AHEAD = 3


@dataclass(frozen=True)
class Exchanges:
    """A switch as the program needs it. `opens[i]`: the units that need storage before exchange i;
    `closes[i]`: the units of the layout that is left which nothing reads after exchange i is
    posted; `ahead`: how many exchanges may go ahead; `spans`: by unit the first exchange that reads
    a source or adds to a target, and the last that does."""

    count: int
    opens: tuple[tuple[int, ...], ...]
    closes: tuple[tuple[int, ...], ...]
    ahead: int
    spans: Mapping[int, tuple[int, int]]


class Steps:
    """Makes the programs of one rank. Mutable: it keeps what it has made. Several threads may ask
    for programs."""

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
        """`home_in`: where the training state lies; `moments`: how many the optimizer keeps,
        `packed` into this format between updates; `wire`: formats of gathers and reductions;
        `doubled`: whether a home on disk has second places."""
        self.itinerary = itinerary
        self.rank = rank
        self.home_in = home_in
        self.wire = wire
        self.moments = moments
        self.packed: MomentFormat = packed if moments else "float32"
        self.late = home_in.updates_late
        self.by_unit = self.late or self.packed != "float32"
        self.buckets = buckets_of(itinerary.spec, itinerary.home, rank)
        self.state_bytes = StateBytes(weight_bytes, sum_bytes, moments, self.packed)
        self.home_tiers = tiers_of(home_in, self.buckets, rank, self.state_bytes)
        self.on_disk = [unit for unit, tier in self.home_tiers.items() if tier == "disk"]
        self.kept = trained_elements(itinerary.spec, self.buckets, rank)
        self.trained = list(self.kept)
        self.mixed = {bucket.unit for bucket in self.buckets if bucket.frozen}.intersection(
            self.trained
        )
        self.early = (
            early_units(self.home_tiers, self.kept)
            if doubled and self.packed == "float32"
            else frozenset[int]()
        )
        # Elements of two units that are updated one after the other.
        early_sizes = [size for unit, size in self.kept.items() if unit in self.early]
        self.early_pair = max((a + b for a, b in pairwise(early_sizes)), default=sum(early_sizes))
        self.bytes = weight_bytes, sum_bytes
        self.views = {
            layout: RankLayout(itinerary.spec, layout, cut, rank)
            for layout, cut in itinerary.cuts.items()
        }
        self.cuts = set(itinerary.cuts.values())
        self.world = itinerary.home.world
        self._programs: dict[tuple[tuple[Visit, ...], bool, tuple[int, ...], bool], Program] = {}
        self._exchanges: dict[Plan, Exchanges] = {}

    def program(
        self,
        visits: Sequence[Visit],
        learns: bool = True,
        left: Sequence[int] = (),
        early: bool = False,
    ) -> Program:
        """The operations of a step that visits these groups, in this order; without what only
        gradients need where it does not learn. `left`: units whose updates the step before has
        left; without visits the program makes these alone. `early`: whether units are updated
        before the norm, as far as they can be."""
        visits = tuple(visits)
        early = early and bool(self.early)
        key = visits, learns, tuple(left), early
        program = self._programs.get(key)
        if program is None:
            # A run has few kinds of steps; one with many would fill memory with programs.
            if len(self._programs) >= 64:
                self._programs.clear()
            program = self._programs[key] = tuple(
                _Step(self, visits, learns, left, early).operations()
            )
        return program

    def visits(
        self, groups: Sequence[LengthGroup], lengths: Sequence[int]
    ) -> tuple[tuple[Visit, ...], list[list[tuple[int, ...]]]]:
        """The groups as a program needs them, and the documents of each micro-batch of this rank's
        replica, by visit. A micro-batch has no documents where the replica has fewer packs than
        another. `lengths`: of the step's documents."""
        visits = []
        packs_by_visit = []
        for group in groups:
            # Replicas run one program, so that one with fewer packs computes empty ones.
            share = group.shares[self.views[group.layout].at.dp]
            num_packs = max(map(len, group.shares))
            packs = [group.packs[number] for number in share] + [()] * (num_packs - len(share))
            pack_lengths = [[lengths[document] for document in pack] for pack in packs]
            visits.append(visit_of(self.itinerary.spec, group.layout, pack_lengths))
            packs_by_visit.append(packs)
        return tuple(visits), packs_by_visit

    def left(self, early: Collection[int] = ()) -> tuple[int, ...]:
        """Units whose updates a step leaves where it has updated some early."""
        return tuple(unit for unit in self.trained if unit not in early) if self.late else ()

    def place(self, unit: int) -> int:
        """Where a unit comes in the forward."""
        return place_of(self.itinerary.spec, unit)

    def source(self, previous: Layout | None) -> Cut | None:
        """Whose copies a switch takes weights from, besides home, when layout `previous` has
        computed."""
        return None if previous is None else self.itinerary.source(previous)

    def exchanges(
        self, plan: Plan, source: Cut | None = None, target: Cut | None = None
    ) -> Exchanges:
        """A plan as the program needs it. `source`: the cut that it leaves; `target`: the cut that
        it fills; None where home does both."""
        if plan in self._exchanges:
            return self._exchanges[plan]
        count = plan.exchanges
        first, last, max_bytes = _spans(self.itinerary.spec, plan)
        opens: list[list[int]] = [[] for _ in range(count)]
        closes: list[list[int]] = [[] for _ in range(count)]
        for unit in sorted(self._units_under(target)):
            opens[first[unit]].append(unit)
        for unit in sorted(self._units_under(source)):
            closes[last[unit]].append(unit)
        limit = self.itinerary.options.ahead_bytes
        exchanges = Exchanges(
            count=count,
            opens=tuple(map(tuple, opens)),
            closes=tuple(map(tuple, closes)),
            ahead=next(
                (number for number, opened in enumerate(max_bytes) if opened > limit), count
            ),
            spans={unit: (first[unit], min(count, last[unit] + plan.rounds) - 1) for unit in first},
        )
        return self._exchanges.setdefault(plan, exchanges)  # another thread may have been first

    def _units_under(self, cut: Cut | None) -> frozenset[int]:
        """The moving units that this rank has under a cut."""
        return next((view.units for view in self.views.values() if view.cut == cut), frozenset())


def _spans(spec: ModelSpec, plan: Plan) -> tuple[dict[int, int], dict[int, int], list[int]]:
    """The first and the last bucket of each moving unit; the most bytes of wanted weights that any
    rank has storage for after each exchange's `open`."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    unit_bytes: dict[int, np.ndarray] = {}  # int64 [ranks]
    for weight in plan.weights:
        unit = moving_unit(spec, spec.by_name[weight.name])
        buckets = weight.bucket if len(weight.bucket) else [0]
        first[unit] = min(int(buckets[0]), first.get(unit, plan.exchanges))
        last[unit] = max(int(buckets[-1]), last.get(unit, 0))
        unit_bytes[unit] = unit_bytes.get(unit, 0) + weight.slices.size_bytes @ weight.slices.wants
    opened = np.zeros((plan.exchanges, plan.world), np.int64)
    for unit, number in first.items():
        opened[number] += unit_bytes[unit]
    return first, last, opened.cumsum(0).max(1).tolist()


class _Step:
    """A program while it grows. Mutable."""

    def __init__(
        self,
        steps: Steps,
        visits: tuple[Visit, ...],
        learns: bool,
        left: Sequence[int],
        early: bool,
    ):
        self.steps = steps
        self.visits = visits
        self.learns = learns
        self.pending_updates = deque(left)  # units
        self.early = steps.early if early and learns else frozenset[int]()
        self.reductions = Counter[int]()  # of the last visit, by unit: those that have not ended
        self.to_come = Counter[int]()  # and those that have not begun
        self.views = [steps.views[visit.layout] for visit in visits]
        self.cut: Cut | None = None  # under which the working copies are
        self.present: set[int] = set()  # units whose copies can be used
        self.ahead = 0  # exchanges of the next switch that have been posted
        self.disk = _Disk(steps.on_disk)

    def operations(self) -> Iterator[Op]:
        """All operations of the step, in order."""
        for number in range(len(self.visits)):
            yield Op("enter", number)
            yield from self._come(number)
            yield from self._run(number)
            yield from self._go(number)
            yield Op("leave", number)
        yield from self._update()
        yield from self.disk.await_writes()
        if not self.visits:
            return
        yield Op("norm")
        if self.learns:
            yield Op("update")
            if self.steps.by_unit and not self.steps.late:
                self.pending_updates.extend(self.steps.trained)
                yield from self._update()

    def _update(self, last: int | None = None) -> Iterator[Op]:
        """Pending updates, up to that of unit `last`, or all. Of units on disk the next one comes
        while one is updated, and the one before goes."""
        while self.pending_updates and (
            last is None or self.steps.place(self.pending_updates[0]) <= self.steps.place(last)
        ):
            unit = self.pending_updates.popleft()
            on_disk = unit in self.disk.units
            if on_disk:
                next_on_disk = next(
                    (pending for pending in self.pending_updates if pending in self.disk.units),
                    None,
                )
                yield from self.disk.await_writes("record")
                yield from self.disk.have_record(unit, next_on_disk)
            yield Op("update", unit=unit)
            if self.steps.packed != "float32":
                yield Op("pack", unit=unit)
            if on_disk:
                yield from self.disk.write(0, unit, "record")
                if unit in self.steps.mixed:  # a record is no whole master of these
                    yield from self.disk.await_writes()

    def _come(self, number: int) -> Iterator[Op]:
        """Operations that bring the group's weights, as far as they are not here."""
        cut = self.views[number].cut
        if cut == self.cut:
            return
        if not cut.at_home:
            exchanges = self._switch(number)
            # What went ahead left them, for they were still in use.
            for units in exchanges.closes[: self.ahead]:
                yield from (Op("close", number - 1, unit) for unit in units)
            yield from self._exchange(number, exchanges, "weights", self.ahead, exchanges.count)
            yield from self._await_exchange(number, exchanges, "weights", exchanges.count - 1)
            yield Op("arrived", number)
        if self.cut is not None:
            yield Op("close", number - 1)
        self.cut = cut
        self.present = set()
        self.ahead = 0

    def _switch(self, number: int) -> Exchanges:
        """The switch to a visit from the one before."""
        previous = self.visits[number - 1].layout if number else None
        source = self.steps.source(previous)
        target = self.views[number].cut
        plan = self.steps.itinerary.weights(source, target)
        return self.steps.exchanges(plan, source, target)

    def _exchange(
        self, number: int, exchanges: Exchanges, way: str, start: int, stop: int
    ) -> Iterator[Op]:
        """Exchanges `start` to `stop` of a switch, one awaited before the next. `number`: of the
        visit."""
        for i in range(start, stop):
            if i:
                yield from self._await_exchange(number, exchanges, way, i - 1)
            if self.pending_updates or self.disk.units:
                yield from self._before_exchange(exchanges, i)
            for unit in exchanges.opens[i]:
                yield Op("open", number, unit)
            yield from self._from_home(number, exchanges, way, i, False)
            yield Op("exchange", number, number=i, way=way)
            for unit in exchanges.closes[i]:
                yield Op("close", number - 1, unit)

    def _await_exchange(self, number: int, exchanges: Exchanges, way: str, i: int) -> Iterator[Op]:
        """The end of exchange i, and what of a home on disk goes with it."""
        yield Op("await exchange", number, number=i, way=way)
        yield from self._from_home(number, exchanges, way, i, True)

    def _before_exchange(self, exchanges: Exchanges, i: int) -> Iterator[Op]:
        """Late updates of the units that an exchange may read from home."""
        readable = [unit for unit, (first, _) in exchanges.spans.items() if first <= i]
        if readable:
            yield from self._update(max(readable, key=self.steps.place))
            # Its memory goes when it is written, and an exchange may last longer.
            yield from self.disk.await_writes("record")

    def _from_home(
        self, number: int, exchanges: Exchanges, way: str, i: int, ended: bool
    ) -> Iterator[Op]:
        """What exchange i reads or adds to of a home on disk: brought before it, gone when it has
        `ended`."""
        units = [
            unit
            for unit in self.disk.units
            if unit in exchanges.spans and exchanges.spans[unit][ended] == i
        ]
        if way == "weights":
            for unit in units:
                yield from self.disk.leave(number, unit) if ended else self.disk.have(number, unit)
            return
        for unit in units:
            if unit in self.steps.trained:
                yield from (
                    self.disk.write(number, unit, "sums")
                    if ended
                    else self.disk.have_sums(number, unit)
                )

    def _go(self, number: int) -> Iterator[Op]:
        """Operations that bring gradient sums home which no later group adds to."""
        view = self.views[number]
        later_views = self.views[number + 1 :]
        if any(later.cut == view.cut for later in later_views):
            return
        if view.cut.at_home:
            # The next step may begin with another cut.
            if not later_views and len(self.steps.cuts) > 1:
                yield Op("close", number)
            return
        if self.learns:
            yield from self._update()
            if not self.disk.units:
                yield Op("total", number)
            else:
                yield from (
                    Op("total", number, unit)
                    for unit in self.steps.trained
                    if unit not in self.disk.units
                )
            exchanges = self.steps.exchanges(self.steps.itinerary.sums(view.cut))
            yield from self._exchange(number, exchanges, "sums", 0, exchanges.count)
            yield from self._await_exchange(number, exchanges, "sums", exchanges.count - 1)
            yield Op("forget", number)
        if not later_views:
            yield Op("close", number)

    def _run(self, number: int) -> Iterator[Op]:
        """Operations of the group's micro-batches, forward and backward, and reductions."""
        # 1. The group's turns. A tied embedding adds up all that its two uses leave, so it is
        # reduced last.
        view = self.views[number]
        closing = self.learns and all(later.cut != view.cut for later in self.views[number + 1 :])
        turns = list(group_turns(view, self.visits[number], number, closing, self.learns))
        tied = [
            Op("reduce", number, unit)
            for unit in view.tied
            if closing and view.collective and unit in view.learned
        ]

        # 2. Which reductions are the last of their unit: early updates wait for these.
        # No other sums come home after these.
        if number == len(self.visits) - 1 and view.cut.at_home:
            ops = chain((op for turn in turns for op in turn.ops), tied)
            reduced_units = [op.unit for op in ops if op.kind == "reduce"]
            self.reductions = Counter(reduced_units)
            self.to_come = Counter(reduced_units)
            self.early -= set(reduced_units[-1:])

        # 3. A reduction begins when its unit is up to date and there is room for it.
        window = _Window(self.steps, view, "reduce")
        for op in chain(
            self._with_gathers(number, turns, self._exchanges_by_turn(number, turns)), tied
        ):
            if op.kind != "reduce":
                yield op
                continue
            self.to_come[op.unit] -= 1
            yield from self._update(op.unit)
            for unit in window.make_room(op.unit):
                yield from self._end_reduction(number, unit, window[0] if window else op.unit)
            window.append(op.unit)
            yield op
            yield from self._ask_state(number, window[0])
        while window:
            yield from self._end_reduction(number, window.popleft(), window[0] if window else None)

    def _end_reduction(self, number: int, unit: int, next_unit: int | None) -> Iterator[Op]:
        """The end of a reduction, and what home on disk does with its sum; `next_unit`: whose
        reduction ends next."""
        on_disk = self.views[number].cut.at_home and unit in self.disk.units
        self.reductions[unit] -= 1
        is_early = unit in self.early and self.reductions[unit] == 0
        if on_disk:
            yield from self.disk.bring_sums(number, unit)
        yield Op("await reduce", number, unit)
        if on_disk:
            yield from (
                self.disk.write_beside(number, unit, "sums")
                if is_early
                else self.disk.write(number, unit, "sums")
            )
        if is_early:
            yield from self._ask_state(number, unit)
            yield Op("await read", number, unit, part="state")
            yield from self.disk.await_writes(but=unit)  # the unit before is in memory until then
            yield from self._ask_state(number, next_unit)
            yield Op("update", number, unit, part="early")
            yield from self.disk.write_beside(number, unit, "state")

    def _ask_state(self, number: int, unit: int | None) -> Iterator[Op]:
        """Read the masters and moments of a unit that is updated early, once its last reduction has
        begun."""
        if unit is not None and unit in self.early and not self.to_come[unit]:
            yield from self.disk.ask(unit, "state", number)

    def _ask_states(self, number: int, turns: Sequence[UnitTurn]) -> Iterator[Op]:
        """Read the masters and moments of units that are updated early, in the order of the turns
        to come, as far as there is room."""
        kept = self.steps.kept
        for unit in (turn.unit for turn in turns if turn.unit in self.early):
            held = {asked for asked, part in self.disk.asked if part == "state"}
            # There is room for those of two units that are updated one after the other, and for a
            # quarter more: for a small one, such as a last norm.
            has_room = 4 * sum(kept[u] for u in {unit, *held}) <= 5 * self.steps.early_pair
            if unit not in held:
                if (unit, "record") in self.disk.asked or not has_room:
                    return
                yield from self.disk.ask(unit, "state", number)

    def _gather(self, number: int, unit: int, next_units: Sequence[int] = ()) -> Iterator[Op]:
        """A gather, with the master from disk where home is there. `next_units`: that are gathered
        next. Their masters are asked for,
        too: of one unit, and of READ_AHEAD units while late updates are to come, as far as the
        second of these. A record moves seven times the bytes of a master, in and out, and masters
        must not wait behind it; nor must the disk, while its update waits for the turn before."""
        if not self.views[number].cut.at_home:
            yield Op("gather", number, unit)
            return
        num_records = 0
        for ahead in (unit, *next_units[: READ_AHEAD if self.pending_updates else 1]):
            is_pending = ahead in self.pending_updates
            num_records += is_pending and ahead != unit
            if num_records > 1:
                break
            if ahead in self.disk.units:
                yield from (
                    self.disk.ask(ahead, "record")
                    if is_pending
                    else self.disk.ask(ahead, "master", number)
                )
        yield from self._update(unit)
        on_disk = unit in self.disk.units
        if on_disk:
            yield from self.disk.have(number, unit)
        yield Op("gather", number, unit)
        if on_disk:
            yield from self.disk.leave(number, unit)

    def _with_gathers(
        self, number: int, turns: list[UnitTurn], ahead: dict[int, list[int]]
    ) -> Iterator[Op]:
        """The turns with gathers before them, as far ahead as the window allows, and releases after
        them. `ahead`: numbers of exchanges by the turn that they are posted before."""
        view = self.views[number]
        releases = self.visits[number].layout.zero == 3 and view.collective

        # 1. What is gathered, in order: at each use, or before the first.
        gathers: list[int] = []
        if view.collective:
            yield from self._gather_tied(number)
            gathers = [turn.unit for turn in turns if turn.unit in view.units]
            if not releases:
                gathers = [unit for unit in dict.fromkeys(gathers) if unit not in self.present]

        # 2. Gathers are posted as far as there is room. A unit that is there still, or under way,
        # stays for its next use instead.
        window = _Window(self.steps, view, "gather")
        stays = Counter[int]()
        num_posted = 0  # of `gathers`

        def post() -> Iterator[Op]:
            """Post gathers of what comes next, as far as there is room."""
            nonlocal num_posted
            while num_posted < len(gathers) and window.fits(gathers[num_posted]):
                unit = gathers[num_posted]
                if unit in self.present or unit in window:
                    stays[unit] += 1
                else:
                    window.append(unit)
                    upcoming = gathers[num_posted + 1 :][:READ_AHEAD]
                    absent = [u for u in upcoming if u not in self.present and u not in window]
                    yield from self._gather(number, unit, absent)
                num_posted += 1

        # 3. The turns. What an early update reads comes with the rank's last backward.
        is_last = number == len(self.visits) - 1 and view.cut.at_home
        first_final = next((index for index, turn in enumerate(turns) if turn.final), len(turns))
        num_used = 0
        for index, turn in enumerate(turns):
            yield from self.disk.await_writes("record", but=turn.unit)
            if is_last and not self.pending_updates and index + READ_AHEAD > first_final:
                yield from self._ask_states(number, turns[max(index, first_final) :][:READ_AHEAD])
            has_weights = turn.unit in view.units
            if gathers and has_weights and (releases or turn.unit not in self.present):
                if num_posted <= num_used:
                    yield from post()
                if stays[turn.unit] and turn.unit in self.present:
                    stays[turn.unit] -= 1
                else:
                    window.remove(turn.unit)
                    yield Op("await gather", number, turn.unit)
                    self.present.add(turn.unit)
                num_used += 1
            yield from post()
            yield from self._exchanges_ahead(number, ahead.get(index, ()))
            yield from turn.ops
            if releases and has_weights and not stays[turn.unit]:
                self.present.discard(turn.unit)
                yield Op("release", number, turn.unit)
        yield from self._exchanges_ahead(number, ahead.get(len(turns), ()))

    def _gather_tied(self, number: int) -> Iterator[Op]:
        """Gather a tied embedding, which stays: the first and the last turn of a forward use it."""
        for unit in self.views[number].tied:
            if unit not in self.present:
                yield from self._gather(number, unit)
                yield Op("await gather", number, unit)
                self.present.add(unit)

    def _exchanges_ahead(self, number: int, exchanges: Sequence[int]) -> Iterator[Op]:
        """Exchanges of the switch to the next group. What they leave is closed later: it is still
        in use."""
        for i in exchanges:
            ops = self._exchange(number + 1, self._switch(number + 1), "weights", i, i + 1)
            yield from (op for op in ops if op.kind != "close")

    def _exchanges_by_turn(self, number: int, turns: list[UnitTurn]) -> dict[int, list[int]]:
        """Numbers of the exchanges of the switch to the next group, by the turn that they are
        posted before. [Note: order]"""
        if number + 1 == len(self.visits) or not self.learns:
            return {}
        # Copies that are home's, or this group's own, need no exchange.
        next_cut = self.views[number + 1].cut
        if next_cut.at_home or next_cut == self.views[number].cut:
            return {}
        self.ahead = self._switch(number + 1).ahead
        leads = self.views[number].leads
        final_turns = [index for index, turn in enumerate(turns) if turn.final and leads]
        by_turn: dict[int, list[int]] = {}
        for i in range(self.ahead):
            turn = final_turns[i * len(final_turns) // self.ahead] if final_turns else len(turns)
            by_turn.setdefault(turn, []).append(i)
        return by_turn


class _Disk:
    """What of a home on disk is in memory, while a program grows. Mutable. `units`: that lie
    there."""

    def __init__(self, units: Sequence[int]):
        self.units = frozenset(units)
        self.masters = Counter[int]()  # users
        # Units with the part that was asked for: a master until it is used, others until they are
        # written.
        self.asked: set[tuple[int, str]] = set()
        self.sums: set[int] = set()  # units that have gradient sums
        self.writing: deque[Op] = deque()

    def ask(self, unit: int, part: str, number: int = 0) -> Iterator[Op]:
        """Read a part of a unit, unless that has been asked for."""
        if (unit, part) in self.asked or (part == "master" and self.masters[unit]):
            return
        if part == "state" and (unit, "record") in self.asked:
            yield from self.await_writes()
        self.asked.add((unit, part))
        yield Op("read", number, unit, part=part)

    def have(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the master of a unit, until it is left."""
        if not self.masters[unit]:
            yield from self.ask(unit, "master", number)
            self.asked.remove((unit, "master"))
            yield Op("await read", number, unit, part="master")
        self.masters[unit] += 1

    def leave(self, number: int, unit: int) -> Iterator[Op]:
        """End a use of a master, which goes with the last one."""
        self.masters[unit] -= 1
        if not self.masters[unit]:
            yield Op("evict", number, unit, part="master")

    def have_record(self, unit: int, next_unit: int | None) -> Iterator[Op]:
        """Bring the record of a unit, until it is written, and ask for that of `next_unit`."""
        yield from self.ask(unit, "record")
        yield Op("await read", unit=unit, part="record")
        if next_unit is not None:
            yield from self.ask(next_unit, "record")
        self.masters[unit] += 1

    def bring_sums(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the gradient sums of a unit, if there are some."""
        if unit in self.sums:
            if any(op.unit == unit for op in self.writing):
                yield from self.await_writes()
            yield Op("read", number, unit, part="sums")
            yield Op("await read", number, unit, part="sums")
        self.sums.add(unit)

    def have_sums(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the gradient sums of a unit; zeros, if there are none."""
        is_new = unit not in self.sums
        yield from self.bring_sums(number, unit)
        if is_new:
            yield Op("total", number, unit)

    def write(self, number: int, unit: int, part: str) -> Iterator[Op]:
        """Write a part of a unit, when that before it is written."""
        yield from self.await_writes()
        yield from self.write_beside(number, unit, part)

    def write_beside(self, number: int, unit: int, part: str) -> Iterator[Op]:
        """Write a part of a unit while that before it is written."""
        self.writing.append(Op("write", number, unit, part=part))
        yield self.writing[-1]

    def await_writes(self, part: str | None = None, but: int | None = None) -> Iterator[Op]:
        """Await what is written, oldest first: all, or as far as it is of a part. What is of the
        unit `but`, and what follows it, goes on."""
        while self.writing and part in (None, self.writing[0].part) and self.writing[0].unit != but:
            op = self.writing.popleft()
            self.asked.discard((op.unit, op.part))
            if op.part == "record":
                self.masters[op.unit] -= 1
            yield op._replace(kind="await write")


@lru_cache(maxsize=256)
def _nominal_elements(spec: ModelSpec, layout: Layout, learned: bool) -> Mapping[int, int]:
    """Elements of each moving unit on a rank, all or those that are trained. [Note: windows]"""
    elements = dict.fromkeys(range(spec.units + 1), 0)
    for param in spec.params:
        if not (learned and param.frozen):
            slices = layout.weight_ranks if param.dim is not None else 1
            elements[moving_unit(spec, param)] += -(-param.elements // slices)
    return elements


class _Window(deque[int]):
    """Units whose gathers, or reductions, are under way, oldest first. Mutable. [Note: windows]"""

    def __init__(self, steps: Steps, view: RankLayout, kind: str):
        super().__init__()
        itemsize = steps.bytes[kind == "reduce"]
        elements = _nominal_elements(view.spec, view.layout, kind == "reduce")
        self.size = {unit: elements * itemsize for unit, elements in elements.items()}
        self.capacity = max(self.size[unit] for unit in range(1, view.spec.layers + 1))

    def fits(self, unit: int) -> bool:
        """Whether a unit may be under way beside the others. One always may."""
        return not self or sum(self.size[u] for u in self) + self.size[unit] <= self.capacity

    def make_room(self, unit: int) -> Iterator[int]:
        """Those that must end before this unit begins, oldest first."""
        while not self.fits(unit):
            yield self.popleft()
