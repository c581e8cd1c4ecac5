"""The program of a training step on one rank: which operations, in which order. Pure, and a
function of the layouts, of how many packs each replica has, and of the rank's place; never of what
has already arrived.

    group 1                                       group 2                        end
    ┌ gathers ahead ─ turns ─ reductions ┐        ┌ rest of the switch ─ ... ┐   norm ─ update
      └ late updates    └ exchanges of the switch to group 2, ahead ┘└ early updates

ZeRO (arXiv 1910.02054) is when units are gathered, reduced and released: stage 3 gathers a unit for
each use and releases it after, stages 0 to 2 gather it once a group; stages 2 and 3 reduce after
every backward, stages 0 and 1 after the last.

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
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain

from longshift.program.byte_window import ByteWindow
from longshift.program.disk_home import READ_AHEAD, DiskHome
from longshift.program.exchanges import Exchanges
from longshift.program.gather_queue import GatherQueue
from longshift.program.operations import Op, Program
from longshift.program.rank_inputs import RankInputs
from longshift.program.turns import UnitTurn, Visit
from longshift.program.turns import turns as group_turns
from longshift.switch.itinerary import Cut


class Steps(RankInputs):
    """Makes the programs of one rank. Mutable: it keeps what it has made. Several threads may ask
    for programs."""

    @cached_property
    def _programs(self) -> dict[tuple[tuple[Visit, ...], bool, tuple[int, ...], bool], Program]:
        """By visits, whether they learn, the units left, and whether some are early."""
        return {}

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


class _Step:
    """A program while it grows. Mutable."""

    def __init__(
        self,
        inputs: RankInputs,
        visits: tuple[Visit, ...],
        learns: bool,
        left: Sequence[int],
        early: bool,
    ):
        self.inputs = inputs
        self.visits = visits
        self.learns = learns
        self.pending_updates = deque(left)  # units
        self.early = inputs.early if early and learns else frozenset[int]()
        self.reductions = Counter[int]()  # of the last visit, by unit: those that have not ended
        self.to_come = Counter[int]()  # and those that have not begun
        self.views = [inputs.views[visit.layout] for visit in visits]
        self.cut: Cut | None = None  # under which the working copies are
        self.present: set[int] = set()  # units whose copies can be used
        self.ahead = 0  # exchanges of the next switch that have been posted
        self.disk = DiskHome(inputs.on_disk)

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
            if self.inputs.by_unit and not self.inputs.late:
                self.pending_updates.extend(self.inputs.trained)
                yield from self._update()

    def _update(self, last: int | None = None) -> Iterator[Op]:
        """Pending updates, up to that of unit `last`, or all. Of units on disk the next one comes
        while one is updated, and the one before goes."""
        place = self.inputs.place
        while self.pending_updates and (
            last is None or place(self.pending_updates[0]) <= place(last)
        ):
            unit = self.pending_updates.popleft()
            on_disk = unit in self.disk.units
            if on_disk:
                next_unit = next((u for u in self.pending_updates if u in self.disk.units), None)
                yield from self.disk.await_writes("record")
                yield from self.disk.have_record(unit, next_unit)

            yield Op("update", unit=unit)
            if self.inputs.packed != "float32":
                yield Op("pack", unit=unit)
            if on_disk:
                yield from self.disk.write(0, unit, "record")
                if unit in self.inputs.mixed:  # a record is no whole master of these
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
            yield from self._exchange_rest(number, exchanges, "weights", self.ahead)
            yield Op("arrived", number)
        if self.cut is not None:
            yield Op("close", number - 1)

        # No unit of the new cut is gathered yet.
        self.cut = cut
        self.present = set()
        self.ahead = 0

    def _switch(self, number: int) -> Exchanges:
        """The switch to a visit from the one before."""
        itinerary = self.inputs.itinerary
        previous = self.visits[number - 1].layout if number else None
        plan = itinerary.plan_of("weights", previous, self.visits[number].layout)
        return self.inputs.exchanges(plan, itinerary.source(previous), self.views[number].cut)

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

            # What an exchange sends is kept until it ends, so its storage can be dropped now.
            for unit in exchanges.closes[i]:
                yield Op("close", number - 1, unit)

    def _exchange_rest(
        self, number: int, exchanges: Exchanges, way: str, start: int
    ) -> Iterator[Op]:
        """Exchanges of a switch from `start` on, up to the end of the last."""
        yield from self._exchange(number, exchanges, way, start, exchanges.count)
        yield from self._await_exchange(number, exchanges, way, exchanges.count - 1)

    def _await_exchange(self, number: int, exchanges: Exchanges, way: str, i: int) -> Iterator[Op]:
        """The end of exchange i, and what of a home on disk goes with it."""
        yield Op("await exchange", number, number=i, way=way)
        yield from self._from_home(number, exchanges, way, i, True)

    def _before_exchange(self, exchanges: Exchanges, i: int) -> Iterator[Op]:
        """Late updates of the units that an exchange may read from home."""
        readable = [unit for unit, (first, _) in exchanges.spans.items() if first <= i]
        if readable:
            yield from self._update(max(readable, key=self.inputs.place))
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
        # Weights that are not trained have no sums.
        for unit in units:
            if unit in self.inputs.trained and ended:
                yield from self.disk.write(number, unit, "sums")
            elif unit in self.inputs.trained:
                yield from self.disk.have_sums(number, unit)

    def _go(self, number: int) -> Iterator[Op]:
        """Operations that bring gradient sums home which no later group adds to."""
        view = self.views[number]
        later_views = self.views[number + 1 :]
        if any(later.cut == view.cut for later in later_views):
            return
        if view.cut.at_home:
            # The next step may begin with another cut.
            if not later_views and len(self.inputs.cuts) > 1:
                yield Op("close", number)
            return
        if self.learns:
            yield from self._update()
            if not self.disk.units:
                yield Op("total", number)
            else:
                # Sums of units on disk come with the exchanges that add to them.
                in_memory = [unit for unit in self.inputs.trained if unit not in self.disk.units]
                yield from (Op("total", number, unit) for unit in in_memory)
            exchanges = self.inputs.exchanges(self.inputs.itinerary.sums(view.cut))
            yield from self._exchange_rest(number, exchanges, "sums", 0)
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
        _, sum_bytes = self.inputs.bytes
        window = ByteWindow(view, sum_bytes, learned=True)
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
            # What was updated early before may still be written, and is awaited below.
            write = self.disk.write_beside if is_early else self.disk.write
            yield from write(number, unit, "sums")
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
        kept = self.inputs.kept
        for unit in (turn.unit for turn in turns if turn.unit in self.early):
            in_memory = {other for other, part in self.disk.asked if part == "state"}
            # There is room for those of two units that are updated one after the other, and for a
            # quarter more: for a small one, such as a last norm.
            size = sum(kept[u] for u in {unit, *in_memory})
            has_room = 4 * size <= 5 * self.inputs.early_pair
            if unit not in in_memory:
                if (unit, "record") in self.disk.asked or not has_room:
                    return
                yield from self.disk.ask(unit, "state", number)

    def _gather(self, number: int, unit: int, next_units: Sequence[int] = ()) -> Iterator[Op]:
        """A gather, with the master from disk where home is there. `next_units`: those gathered
        next. Their masters are read, too: of one unit, or of READ_AHEAD while late updates are to
        come, as far as the second of these. A record moves seven times the bytes of a master, and
        masters must not wait for it; nor the disk, while its update waits for the turn before."""
        if not self.views[number].cut.at_home:
            yield Op("gather", number, unit)
            return

        # 1. Read the unit, and ahead of it.
        num_records = 0
        for ahead in (unit, *next_units[: READ_AHEAD if self.pending_updates else 1]):
            is_pending = ahead in self.pending_updates
            num_records += is_pending and ahead != unit
            if num_records > 1:
                break
            if ahead in self.disk.units and is_pending:
                yield from self.disk.ask(ahead, "record")
            elif ahead in self.disk.units:
                yield from self.disk.ask(ahead, "master", number)

        # 2. Gather it, up to date.
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

        weight_bytes, _ = self.inputs.bytes
        window = ByteWindow(view, weight_bytes, learned=False)
        queue = GatherQueue(number, gathers, self.present, window, partial(self._gather, number))

        # 2. The turns. What an early update reads comes with the rank's last backward.
        is_last = number == len(self.visits) - 1 and view.cut.at_home
        first_final = next((index for index, turn in enumerate(turns) if turn.final), len(turns))
        for index, turn in enumerate(turns):
            yield from self.disk.await_writes("record", but=turn.unit)
            if is_last and not self.pending_updates and index + READ_AHEAD > first_final:
                yield from self._ask_states(number, turns[max(index, first_final) :][:READ_AHEAD])
            has_weights = turn.unit in view.units
            if gathers and has_weights and (releases or turn.unit not in self.present):
                yield from queue.use(turn.unit)
            yield from queue.post()
            yield from self._exchanges_ahead(number, ahead.get(index, ()))
            yield from turn.ops
            if releases and has_weights and not queue.stays[turn.unit]:
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

        # They are spread over the turns of the last backward, or come after all turns.
        places = [len(turns)]
        if self.views[number].leads:
            places = [index for index, turn in enumerate(turns) if turn.final] or places
        by_turn: dict[int, list[int]] = {}
        for i in range(self.ahead):
            place = places[i * len(places) // self.ahead]
            by_turn.setdefault(place, []).append(i)
        return by_turn
