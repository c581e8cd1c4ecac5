"""The ledger: a program played on bytes. Which tensors are alive when, where they lie, and the most
bytes that they take.

The ledger has the table and the runners of the player (`step.operation_player`, `step.runner`,
`step.chunk_runner`), and keeps simulated allocations in the place of tensors. What operations need
as workspace is in their profiles (`weigh.turn_profile`). Bytes are those of tensors: an allocator's
rounding and holes, and the process itself, come on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longshift.dist.collectives import Pending
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.program.turns import Visit
from longshift.step.operation_player import OperationPlayer
from longshift.switch.itinerary import Cut
from longshift.weigh.activation_memory import ActivationMemory, ChunkedPackMemory, WholePackMemory
from longshift.weigh.allocations import WHOLE_STEP, Peak, RankMemory
from longshift.weigh.state_memory import StateMemory
from longshift.weigh.switch_memory import SwitchMemory
from longshift.weigh.weight_memory import WeightMemory


@dataclass(frozen=True)
class StepEstimate:
    """What a step needs on one rank.

    `peaks`: by place.
    `sent`: bytes out of the rank to others, by communicator.
    `moved`: bytes "put" into tiers and "fetched", and of the state "home in" and "home out".
    `flops`: of matmuls and of attention, causal scores counted once, recomputation included; only
    where the step itself was played.
    """

    peaks: dict[str, Peak]
    sent: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def device(self) -> int:
        return self.peaks["device"].total


class Ledger(OperationPlayer):
    """Plays programs of one rank on bytes. Mutable."""

    def __init__(self, memory: RankMemory):
        super().__init__()
        self.memory = memory
        self.steps = steps = memory.steps
        self.allocations = memory.allocations
        self.allocations.op_name = self.op_name
        self.home = StateMemory(self.memory)
        self.weights: dict[Cut, WeightMemory] = {}
        self.runners: dict[Layout, ActivationMemory] = {}
        for layout, view in steps.views.items():
            if view.cut not in self.weights:
                self.weights[view.cut] = WeightMemory(self.memory, view, self.home)
            runner_class = ChunkedPackMemory if layout.chunk else WholePackMemory
            self.runners[layout] = runner_class(self.memory, view, self.weights[view.cut])
        self.pending_updates: tuple[int, ...] = ()  # units that the next step updates first
        self.num_steps = 0
        self.visits: Sequence[Visit] = ()
        self.visit_runners: list[ActivationMemory] = []  # of each visit
        self.visit_weights: list[WeightMemory] = []

    def play(
        self,
        visits: Sequence[Visit],
        packs: Sequence[Sequence[Sequence[int]]],
        after: Callable[[Op], object] | None = None,
        steps: int | None = None,
        last: tuple[Sequence[int], bool] | None = None,
    ) -> StepEstimate:
        """Play some equal steps. Returns their peaks, and what the last one sends and moves.

        `packs`: lengths of the documents of each micro-batch, by visit.
        `after`: is given the last step's operations when they are done.
        `steps`: how many; as many as there are kinds of them by default.
        `last`: pending updates of the last step, and whether it makes its own early.
        """
        # There are three kinds of steps where units are updated early: the first leaves working
        # copies. The norm of the first clips, so the second makes all updates late, and its own
        # early. The third is as those are whose norm does not clip.
        steps = steps or (3 if self.steps.early else 2)
        self.visits = visits
        self.visit_runners = [self.runners[visit.layout] for visit in visits]
        self.visit_weights = [self.weights[self._cut(visit)] for visit in visits]
        self.packs = {}
        for visit, visit_packs in enumerate(packs):
            for micro, pack in enumerate(visit_packs):
                self.packs[visit, micro] = pack

        for step in range(steps):
            is_last = step == steps - 1
            pending, early = self.pending_updates, self.num_steps > 0
            if last and is_last:
                pending, early = last
            step_visits = visits
            if self.num_steps == 0 and not is_last:
                # One micro-batch leaves and needs no more than all of a later step.
                step_visits = [_first_micro(visit, packs[n]) for n, visit in enumerate(visits)]
            program = self.steps.program(step_visits, left=pending, early=early)
            early_units = {op.unit for op in program if op.part == "early"}
            self.pending_updates = self.steps.left(early_units)
            self.num_steps += 1
            self._play_step(program, after if is_last else None)

        return StepEstimate(
            peaks=dict(self.allocations.snapshots.get(WHOLE_STEP, {})),
            sent=dict(self.memory.sent),
            moved=dict(self.memory.moved),
            flops=self.memory.flops,
        )

    def _play_step(self, program: Sequence[Op], after: Callable[[Op], object] | None) -> None:
        # Traffic is told of the last step alone.
        self.memory.clear_traffic()
        for number, op in enumerate(program):
            self.allocations.begin_op(number, op)
            self.table[op.kind](op)
            self.allocations.save_peaks()
            if after:
                after(op)

    def op_name(self, op: Op) -> str:
        """An operation, and under which layout, where there are several."""
        is_of_step = op.kind in ("norm", "update", "pack") or op.part == "record"
        if is_of_step or len(self.visits) == 1:
            return str(op)
        return f"{op} under {self.visits[op.visit].layout}"

    def _cut(self, visit: Visit) -> Cut:
        return self.steps.views[visit.layout].cut

    def _runner_of(self, op: Op) -> ActivationMemory:
        return self.visit_runners[op.visit]

    def _copies(self, op: Op) -> WeightMemory:
        return self.visit_weights[op.visit]

    def _group(self, op: Op) -> "_StageGroup":
        return _StageGroup(self.memory, op.way)

    def _transfer(self, op: Op) -> SwitchMemory:
        previous = self.visits[op.visit - 1].layout if op.visit else None
        layout = self.visits[op.visit].layout
        plan = self.steps.itinerary.plan_of(op.way, previous, layout)
        return SwitchMemory(self.memory, plan, op.way)

    def _total(self, op: Op) -> None:
        self.home.total(op.unit)

    def _norm(self, op: Op) -> None:
        # Two float64: the loss and the squared norm.
        self.memory.begin_collective("everyone", "sum", self.steps.world, elements=2, item_bytes=8)

    def _update(self, op: Op) -> None:
        self.home.update(op.unit)


class _StageGroup(NamedTuple):
    """The stages that boundary activations go between, in the place of `dist.collectives.Group`."""

    memory: RankMemory
    way: str

    def receive(self, out: Any, source: int, tag: int) -> Pending:
        return Pending()

    def send(self, x: Any, to: int, tag: int) -> Pending:
        self.memory.send(self.way, x.nbytes)
        return Pending(keep=(x,))


def _first_micro(visit: Visit, packs: Sequence[Sequence[int]]) -> Visit:
    """A visit with the first of its micro-batches alone, where all are equal."""
    is_uniform = len(set(map(tuple, packs))) == 1
    return Visit(visit.layout, 1, visit.loss_blocks[:1]) if is_uniform else visit
