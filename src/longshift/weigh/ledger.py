"""The ledger: a program played on bytes. Which tensors are alive when, where they lie, and how much that is at the most.

The ledger keeps what the player keeps (`step.player`, `step.runner`, `state.copies`), under names instead of with numbers, and lets it go
when the player does. What operations need inside themselves is in their profiles (`weigh.turn_profile`). Bytes of tensors: an
allocator's rounding and holes, and the process itself, come on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.program.step import Steps
from longshift.program.turns import Visit
from longshift.switch.itinerary import Cut
from longshift.switch.plan import Plan
from longshift.weigh.book import Account, Held, Peak
from longshift.weigh.held_copies import Exchanged, HeldCopies, exchanged
from longshift.weigh.held_home import HeldHome
from longshift.weigh.held_packs import HeldChunked, HeldPacks, HeldWhole
from longshift.weigh.recorder import Transport


@dataclass(frozen=True)
class Weighed:
    """What a step needs on one rank. `sent`: bytes out of the rank to others, by communicator; `moved`: bytes put into tiers and
    fetched; `flops`: of matmuls and of attention, causal scores counted once, recomputation included, where the step itself was played."""

    peaks: dict[str, Peak]
    sent: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)

    @property
    def device(self) -> int:
        return self.peaks["device"].total


class Ledger:
    """Plays programs of one rank on bytes. The arguments are those of `Account`. Mutable."""

    def __init__(
        self,
        steps: Steps,
        transport: Transport,
        same_format: bool,
        host_is_device: bool,
        ahead: int = 1,
        float8: bool = False,
        inside: bool = True,
    ):
        self.steps, home = steps, steps.itinerary.home
        how = transport, same_format, host_is_device, ahead, steps.home_tiers
        self.account = Account(steps.rank, home, *steps.bytes, *how, wire=steps.wire, float8=float8, inside=inside)
        self.book = self.account.book
        self.home = HeldHome(self.account, steps)
        self.copies: dict[Cut, HeldCopies] = {}
        self.runners: dict[Layout, HeldPacks] = {}
        for layout, view in steps.views.items():
            if view.cut not in self.copies:
                self.copies[view.cut] = HeldCopies(self.account, view)
            self.runners[layout] = (HeldChunked if layout.chunk else HeldWhole)(self.account, view, self.copies[view.cut])
        self.left: tuple[int, ...] = ()  # units whose updates the step before has left
        self.played = 0  # steps
        self.visits: Sequence[Visit] = ()
        self.at: list[tuple[HeldPacks, HeldCopies]] = []  # what a visit runs and has copies in
        self.packs: Sequence[Sequence[Sequence[int]]] = ()
        self.table: dict[str, Callable[[Op], object]] = {
            "enter": lambda op: None,
            "leave": lambda op: None,
            "load": lambda op: self._runner(op).load(op.micro, self.packs[op.visit][op.micro]),
            "unload": lambda op: self._runner(op).unload(op.micro),
            "gather": lambda op: self._copies(op).gather(op.unit),
            "await gather": lambda op: self._copies(op).gathered(op.unit),
            "release": lambda op: self._copies(op).release(op.unit),
            "receive": lambda op: self._runner(op).receive(op),
            "await receive": lambda op: self._runner(op).received(op),
            "send": lambda op: self._runner(op).send(op),
            "await send": lambda op: self._runner(op).sending.pop(op.number),
            "compute": lambda op: self._runner(op).compute(op),
            "arrive": lambda op: self._runner(op).arrive(op),
            "depart": lambda op: self._runner(op).depart(op),
            "put": lambda op: self._runner(op).put(op),
            "fetch": lambda op: self._runner(op).fetch(op),
            "await fetch": lambda op: self._runner(op).await_fetch(op),
            "drop": lambda op: self._runner(op).drop(op),
            "accumulate": lambda op: self._copies(op).accumulate(op.unit, self._runner(op).grads.pop(op.unit, [])),
            "reduce": lambda op: self._copies(op).reduce(op.unit),
            "await reduce": lambda op: self._copies(op).reduced(op.unit),
            "open": lambda op: self._copies(op).open(op.unit),
            "exchange": self._exchange,
            "await exchange": self._await_exchange,
            "close": lambda op: self._copies(op).close(op.unit),
            "arrived": lambda op: None,
            "total": self.home.total,
            "forget": lambda op: self._copies(op).forget(),
            "norm": lambda op: self.account.send("everyone", self._of_norm()),
            "update": self.home.update,
            "pack": self.home.pack,
            "read": self.home.read,
            "await read": lambda op: None,
            "evict": self.home.evict,
            "write": self.home.write,
            "await write": self.home.written,
        }
        self._fused: dict[tuple[int, str], Held] = {}
        self._passing: dict[tuple[int, str, int], Held] = {}
        self._moved: dict[int, Exchanged] = {}
        self._switches: dict[tuple[int, str], tuple[Exchanged, int]] = {}

    def play(
        self,
        visits: Sequence[Visit],
        packs: Sequence[Sequence[Sequence[int]]],
        after: Callable[[Op], object] | None = None,
        steps: int | None = None,
        last: tuple[Sequence[int], bool] | None = None,
    ) -> Weighed:
        """What some equal steps need at the most, and what the last one sends and moves. The first leaves working copies. Where units are
        updated early, the norm of the first clips, so that the second makes all updates late, and its own early, and the third is as those
        are whose norm does not. As many steps as there are kinds where not given. `packs`: lengths of the documents of each micro-batch,
        by visit; of a first step of equal packs one a visit is played, which leaves and needs no more than all of a later one. `after` sees
        the last step's operations when they are done. `last`: which updates were left to it, and whether it makes its own early, where
        these are known."""
        steps = steps or (3 if self.steps.early else 2)
        self.book.told, inside = self._told, self.account.inside
        self.visits, self.packs = visits, packs
        self._switches.clear()
        self.at = [(self.runners[visit.layout], self.copies[self.steps.views[visit.layout].cut]) for visit in visits]
        for step in range(steps):
            left, early = last if last and step == steps - 1 else (self.left, self.played > 0)
            opening = self.played == 0 and step < steps - 1
            these = [_first_micro(*one) for one in zip(visits, packs)] if opening else visits
            program = self.steps.program(these, left=left, early=early)
            self.left = self.steps.left({op.unit for op in program if op.part == "early"})
            self.played += 1
            for counted in (self.account.sent, self.account.moved, self.account.flops):
                counted.clear()
            for number, op in enumerate(program):
                if inside:
                    self.book.begin(number, op)
                self.table[op.kind](op)
                if inside:
                    self.book.settle()
                if after and step == steps - 1:
                    after(op)
        return Weighed(self.book.peaks, *map(dict, (self.account.sent, self.account.moved, self.account.flops)))

    def _told(self, op: Op) -> str:
        """An operation, and under which layout, where there are several."""
        whole = len(self.visits) == 1 or op.kind in ("norm", "update", "pack") or op.part == "record"
        return str(op) if whole else f"{op} under {self.visits[op.visit].layout}"

    def _runner(self, op: Op) -> HeldPacks:
        return self.at[op.visit][0]

    def _copies(self, op: Op) -> HeldCopies:
        return self.at[op.visit][1]

    def _of_norm(self) -> int:
        """Bytes that go out for the sum of two float64 over all ranks."""
        return self.account.all_reduced(16, self.steps.world)

    def _exchange(self, op: Op) -> None:
        """The fused buffer of a switch has the size of the largest exchange; what passes through stays for all rounds of its bucket."""
        moved, rounds = self._switch(op)
        self.account.send(op.way, moved.sent[op.number])
        if op.number == 0:
            self._fused[op.visit, op.way] = self.account.held("exchanges of a switch", moved.most)
        if moved.passing[op.number]:
            self._passing[op.visit, op.way, op.number] = self.account.held("passing through", moved.passing[op.number])
        self._passing.pop((op.visit, op.way, op.number - rounds + 1), None)

    def _await_exchange(self, op: Op) -> None:
        if op.number == len(self._switch(op)[0].sent) - 1:
            del self._fused[op.visit, op.way]

    def _switch(self, op: Op) -> tuple[Exchanged, int]:
        """What the switch of an exchange moves on the rank, and its rounds."""
        key = op.visit, op.way
        if key not in self._switches:
            plan = self._plan(op)
            if id(plan) not in self._moved:
                self._moved[id(plan)] = exchanged(plan, self.steps.rank)
            self._switches[key] = self._moved[id(plan)], plan.rounds
        return self._switches[key]

    def _plan(self, op: Op) -> Plan:
        cut = self.steps.views[self.visits[op.visit].layout].cut
        if op.way == "sums":
            return self.steps.itinerary.sums(cut)
        before = self.visits[op.visit - 1].layout if op.visit else None
        return self.steps.itinerary.weights(self.steps.source(before), cut)


def _first_micro(visit: Visit, packs: Sequence[Sequence[int]]) -> Visit:
    """A visit with the first of its micro-batches alone, where all are equal."""
    alike = len(set(map(tuple, packs))) == 1
    return Visit(visit.layout, 1, visit.loss_blocks[:1]) if alike else visit
