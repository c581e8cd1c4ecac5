"""The ledger: a program played on bytes. Which tensors are alive when, where they lie, and how much that is at the most.

The ledger has the table and the runners of the player (`step.operation_player`, `step.runner`, `step.chunked`), and keeps what they do, as
bytes with names. What operations need inside themselves is in their profiles (`weigh.turn_profile`). Bytes of tensors: an allocator's
rounding and holes, and the process itself, come on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longshift.dist.collectives import Pending
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.program.step import Steps
from longshift.program.turns import Visit
from longshift.step.operation_player import OperationPlayer
from longshift.switch.itinerary import Cut
from longshift.weigh.book import ALL, Account, Peak
from longshift.weigh.held_copies import HeldCopies, HeldTransfer
from longshift.weigh.held_home import HeldHome
from longshift.weigh.held_packs import HeldChunked, HeldRunner, HeldWhole
from longshift.weigh.recorder import Transport


@dataclass(frozen=True)
class Weighed:
    """What a step needs on one rank. `sent`: bytes out of the rank to others, by communicator; `moved`: bytes put into tiers and
    fetched; `flops`: of matmuls and of attention, causal scores counted once, recomputation included, where the step itself was played."""

    peaks: dict[str, Peak]
    sent: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def device(self) -> int:
        return self.peaks["device"].total


class Ledger(OperationPlayer):
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
        super().__init__()
        self.steps = steps
        self.account = Account(steps, transport, same_format, host_is_device, ahead, float8, inside)
        self.book = self.account.book
        self.home = HeldHome(self.account)
        self.copies_of: dict[Cut, HeldCopies] = {}
        self.runners: dict[Layout, HeldRunner] = {}
        for layout, view in steps.views.items():
            if view.cut not in self.copies_of:
                self.copies_of[view.cut] = HeldCopies(self.account, view, self.home)
            self.runners[layout] = (HeldChunked if layout.chunk else HeldWhole)(self.account, view, self.copies_of[view.cut])
        self.left: tuple[int, ...] = ()  # units whose updates the step before has left
        self.played = 0  # steps
        self.visits: Sequence[Visit] = ()
        self.at: list[tuple[HeldRunner, HeldCopies]] = []  # what a visit runs and has copies in

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
        inside = self.account.inside
        self.visits = visits
        self.packs = {(visit, micro): pack for visit, some in enumerate(packs) for micro, pack in enumerate(some)}
        self.at = [(self.runners[visit.layout], self.copies_of[self.steps.views[visit.layout].cut]) for visit in visits]
        for step in range(steps):
            left, early = last if last and step == steps - 1 else (self.left, self.played > 0)
            opening = self.played == 0 and step < steps - 1
            these = [_first_micro(*one) for one in zip(visits, packs)] if opening else visits
            program = self.steps.program(these, left=left, early=early)
            self.left = self.steps.left({op.unit for op in program if op.part == "early"})
            self.played += 1
            self.account.sent.clear()
            self.account.moved.clear()
            self.account.flops = 0
            for number, op in enumerate(program):
                if inside:
                    self.book.begin(number, op)
                self.table[op.kind](op)
                if inside:
                    self.book.settle()
                if after and step == steps - 1:
                    after(op)
        peaks = {place: mark.peak(self.name) for place, mark in self.book.marks.get(ALL, {}).items()}
        return Weighed(peaks, dict(self.account.sent), dict(self.account.moved), self.account.flops)

    def name(self, op: Op) -> str:
        """An operation, and under which layout, where there are several."""
        whole = len(self.visits) == 1 or op.kind in ("norm", "update", "pack") or op.part == "record"
        return str(op) if whole else f"{op} under {self.visits[op.visit].layout}"

    def _runner_of(self, op: Op) -> HeldRunner:
        return self.at[op.visit][0]

    def _copies(self, op: Op) -> HeldCopies:
        return self.at[op.visit][1]

    def _group(self, op: Op) -> "_Stages":
        return _Stages(self.account, op.way)

    def _transfer(self, op: Op) -> HeldTransfer:
        cut = self.steps.views[self.visits[op.visit].layout].cut
        if op.way == "sums":
            return HeldTransfer(self.account, self.steps.itinerary.sums(cut), op.way)
        before = self.visits[op.visit - 1].layout if op.visit else None
        return HeldTransfer(self.account, self.steps.itinerary.weights(self.steps.source(before), cut), op.way)

    def _total(self, op: Op) -> None:
        self.home.total(op.unit)

    def _norm(self, op: Op) -> None:
        self.account.send("everyone", self.account.all_reduced(16, self.steps.world))  # two float64

    def _update(self, op: Op) -> None:
        self.home.update(op.unit)


class _Stages(NamedTuple):
    """The stages that boundary activations go between."""

    account: Account
    way: str

    def receive(self, out: Any, source: int, tag: int) -> Pending:
        return Pending()

    def send(self, x: Any, to: int, tag: int) -> Pending:
        self.account.send(self.way, x.nbytes)
        return Pending(keep=(x,))


def _first_micro(visit: Visit, packs: Sequence[Sequence[int]]) -> Visit:
    """A visit with the first of its micro-batches alone, where all are equal."""
    alike = len(set(map(tuple, packs))) == 1
    return Visit(visit.layout, 1, visit.loss_blocks[:1]) if alike else visit
