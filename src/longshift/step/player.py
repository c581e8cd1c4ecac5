"""The player: what the operations of a program do on this rank's tensors.

What differs between layouts is in the program; here is no choice among them. A rank keeps a
`Runner` for every layout of the run, and the layouts' working copies by cut of the model
(`state.visit`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from longshift.cluster.cluster import Heads
from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.documents.batch import Document
from longshift.documents.micro import HostPack
from longshift.layout.layout import Layout
from longshift.model.chosen_kernel import choose, kernels
from longshift.model.functions import WRITTEN_OUT, compiled
from longshift.model.kernels import Kernel
from longshift.program.operations import Op, Program
from longshift.program.step import Steps
from longshift.program.turns import Visit
from longshift.schedule.chunks import StreamOptions
from longshift.spec.model import ModelSpec
from longshift.state.copies import Copies
from longshift.state.home import Home
from longshift.state.precision import Precision
from longshift.state.transfer import SwitchTransfer
from longshift.state.visit import Switches, copies_of
from longshift.step.chunk_runner import ChunkedPacks
from longshift.step.compose import prepare
from longshift.step.operation_player import OperationPlayer
from longshift.step.runner import Runner, WholePacks
from longshift.stream.gpu_tiers import tier_of
from longshift.stream.tiers import BytesMoved
from longshift.stream.trace import Recorder
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.links import Links, assumed
from longshift.switch.options import SwitchOptions
from longshift.workload.groups import Edge, LengthGroup


@dataclass
class GroupVisit:
    """One group of a step, as this rank saw it. Seconds: of all, of switching with nothing else
    going on, of exchanges under way meanwhile; bytes: that the switch and the gradients' way home
    sent inside and between nodes, of all ranks; `moved`: what its tier did, where it has one."""

    group: LengthGroup
    tokens: int
    seconds: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    intra_node_bytes: int = 0
    inter_node_bytes: int = 0
    moved: BytesMoved | None = None


@dataclass(frozen=True, eq=False)
class Ready:
    """A step before it is played: its groups in visiting order, the lengths of its documents, its
    visits, and this rank's tokens of each pack that its program loads, by visit and micro-batch.
    `learns`: whether it has what only gradients need."""

    groups: Sequence[LengthGroup]
    lengths: Sequence[int]
    visits: tuple[Visit, ...]
    learns: bool
    packs: dict[tuple[int, int], HostPack]


def leave_alone(unit: int, early: bool, loss_sum: float, squared_norm: float) -> bool:
    """Make no update: home stays as it is."""
    return False


def _choose_kernel(spec: ModelSpec, dtype: torch.dtype, world: World) -> tuple[Kernel, str]:
    """The attention kernel that is fastest on all ranks, and the reason in words."""
    heads = Heads(spec.heads, spec.kv_heads, spec.head_width)
    slowest = partial(world.everyone.all_reduce, op=dist.ReduceOp.MAX)
    return choose(kernels(world.device, dtype), heads, dtype, world.device, slowest)


class Player(OperationPlayer):
    """Plays programs on this rank. Mutable: it knows where the step is, and what has begun to
    move."""

    def __init__(
        self,
        spec: ModelSpec,
        edges: Sequence[Edge],
        world: World,
        home: Home,
        precision: Precision,
        switch: SwitchOptions,
        stream: StreamOptions,
        home_cut: Layout | None = None,
        links: Links | None = None,
        compile: bool = False,
    ):
        """`home_cut`: the layout that `home` is cut by, where that is not `home_layout(edges)`.
        `links`: equal on all ranks (`switch.links.agreed`); assumed ones where None. `compile`:
        whether the arithmetic between matmuls is compiled. Raises UsageError where it cannot be."""
        super().__init__()
        self.spec = spec
        self.edges = tuple(edges)
        self.world = world
        self.home = home
        self.precision = precision
        self.stream = stream
        weight_bytes = precision.compute.itemsize
        sum_bytes = precision.home.itemsize

        # 1. The programs of steps, and the arithmetic that all ranks agree on.
        self.itinerary = Itinerary(
            spec, edges, links or assumed(world.per_node), weight_bytes, sum_bytes, switch, home_cut
        )
        self.steps = Steps(
            self.itinerary,
            world.rank,
            weight_bytes,
            sum_bytes,
            home_in=home.home_in,
            moments=len(home.moments),
            packed=home.packed,
            wire=precision.wire,
            doubled=home.doubled,
        )
        self.kernel, self.why_kernel = _choose_kernel(spec, precision.compute, world)
        self.by = compiled(world.device) if compile else WRITTEN_OUT

        # 2. What plays a layout, and what switches between layouts.
        self.runners: dict[Layout, Runner] = {}
        self.copies_of: dict[Layout, Copies] = {}
        self.everyone = tuple(range(edges[0].use.world))
        self._make_runners()
        self.switches = Switches(self.itinerary, home, world, self.everyone, precision)

        # 3. Where the step is.
        self._begin_state()

    def _begin_state(self) -> None:
        """Set where the step is: before the first one."""
        self.visited: list[GroupVisit] = []
        self.after: Callable[[Op], object] | None = None  # sees each operation when it is done
        self.groups_here: Sequence[LengthGroup] = ()
        self.packs: dict[tuple[int, int], HostPack] = {}  # by visit and micro-batch
        self.lengths: Sequence[int] = ()
        # Of all ranks: the loss, and the squared norm of the gradient.
        self.sums: tuple[float, float] = (0.0, 0.0)
        self.update: Callable[[int, bool, float, float], bool] = leave_alone
        self.left: tuple[int, ...] = ()  # units whose updates the last step has left
        self.early: set[int] = set()  # units that this step has updated before its norm
        self.unclipped = False  # whether the last norm did not clip
        # Units whose updates were left to this step, and whether it makes its own early.
        self.how: tuple[tuple[int, ...], bool] = (), False
        self._began = 0.0

    def _make_runners(self) -> None:
        """Make runners by layout, and copies by cut. Communicators are made in one order on all
        ranks."""
        # Layouts that cut the weights alike share their working copies.
        by_cut: dict[Cut, Copies] = {}
        for layout, cut in self.itinerary.cuts.items():
            prepare(self.world, self.spec, layout)
            if cut not in by_cut:
                by_cut[cut] = copies_of(self.spec, cut, self.world, self.home, self.precision)
            self.copies_of[layout] = by_cut[cut]
            self.runners[layout] = self._runner(layout)
        if any(not cut.at_home for cut in by_cut):
            self.world.prepare([self.everyone], "weights")
            self.world.prepare([self.everyone], "sums")

    def _runner(self, layout: Layout) -> Runner:
        """What plays a layout: packs whole, or in chunks."""
        copies = self.copies_of[layout]
        # Chunks wait in a tier, be it the device; whole packs where they are offloaded.
        tier = None
        if layout.chunk or layout.offload != "device":
            tier = tier_of(
                layout.offload, self.world.device, Path(self.stream.folder), self.stream.checked
            )

        def accumulate(unit: int) -> None:
            for moving in self.steps.views[layout].learning(unit):
                copies.accumulate(moving)

        make_runner = partial(WholePacks, tier=tier)
        if layout.chunk:
            assert tier is not None
            make_runner = partial(ChunkedPacks, tier=tier, accumulate=accumulate)
        return make_runner(
            self.spec, layout, self.world, copies, self.precision, self.kernel, self.by
        )

    def close(self) -> None:
        """Give back the threads, files and pinned memory of tiers."""
        for runner in self.runners.values():
            if runner.tier is not None:
                runner.tier.close()

    def groups(self, lengths: Sequence[int]) -> tuple[LengthGroup, ...]:
        """The step's groups in visiting order."""
        return self.itinerary.groups(lengths, self.edges)

    def record(self, recorder: Recorder | None) -> None:
        """Have a recorder see the events of streams; None: no longer."""
        for runner in self.runners.values():
            if isinstance(runner, ChunkedPacks):
                runner.recorder = recorder
                runner.tier.watch = recorder.copying if recorder else None

    def ready(
        self,
        documents: Sequence[Document],
        groups: Sequence[LengthGroup] | None = None,
        learns: bool = True,
    ) -> Ready:
        """A step with these documents, in these groups, their own where not given; without what
        only gradients need where it does not learn. It depends on nothing that a step changes:
        another thread may ask for it while this one plays the step before."""
        lengths = [len(document.ids) for document in documents]
        groups = self.groups(lengths) if groups is None else groups
        visits, packs = self.steps.visits(groups, lengths)
        pending, early = self.how if learns else ((), False)  # most likely as it is played
        host_packs = {}
        for op in self.steps.program(visits, learns, pending, early):
            if op.kind == "load":
                pack = [documents[number] for number in packs[op.visit][op.micro]]
                runner = self.runners[groups[op.visit].layout]
                host_packs[op.visit, op.micro] = runner.on_host(pack)
        return Ready(groups, lengths, visits, learns, host_packs)

    def take(self, ready: Ready, seed: float | None) -> Program:
        """The program of a step that is played next. `seed`: what losses are multiplied with before
        gradients are formed, None where only the loss is wanted."""
        self.groups_here = ready.groups
        self.lengths = ready.lengths
        self.packs = ready.packs
        self.visited = []
        for group in ready.groups:
            runner = self.runners[group.layout]
            runner.seed = seed or 0.0
            runner.learns = seed is not None
            runner.loss = runner.loss.new_zeros(())

        # A step without a backward updates nothing early: the next one may, if the last norm did
        # not clip.
        pending = self.left
        early = self.unclipped and ready.learns
        self.unclipped = self.unclipped and not ready.learns
        self.how = pending, early
        self.left = ()
        self.early = set()
        return self.steps.program(ready.visits, ready.learns, pending, early)

    def finish(self) -> None:
        """Make the updates that the last step has left."""
        pending = self.left
        self.left = ()
        if pending:
            self.play(self.steps.program((), left=pending))

    def play(
        self, program: Program, update: Callable[[int, bool, float, float], bool] | None = None
    ) -> None:
        """Do what the operations say, in their order. `update`: what home does with a unit, whether
        that is before the norm, the loss sum and the squared gradient norm of all ranks: for all,
        unit -1, and for each unit of a home that is updated by unit. It answers whether the last
        norm left gradients as they were."""
        self.update = update or self.update
        for op in program:
            self.table[op.kind](op)
            if self.after:
                self.after(op)

    def _layout(self, op: Op) -> Layout:
        return self.groups_here[op.visit].layout

    def _runner_of(self, op: Op) -> Runner:
        return self.runners[self._layout(op)]

    def _copies(self, op: Op) -> Copies:
        return self.copies_of[self._layout(op)]

    def _enter(self, op: Op) -> None:
        """Begin to count seconds and bytes of a group."""
        group = self.groups_here[op.visit]
        self._began = self.world.now()
        tokens = sum(self.lengths[document] for document in group.documents)
        self.visited.append(GroupVisit(group, tokens))
        # A layout's tier stays from step to step, and a visit counts its own bytes.
        tier = self.runners[group.layout].tier
        if tier is not None:
            tier.moved.restart()

    def _leave(self, op: Op) -> None:
        """End that."""
        visit = self.visited[-1]
        tier = self._runner_of(op).tier
        # A copy, since the tier counts anew in the next step.
        visit.moved = replace(tier.moved) if tier is not None else None
        visit.seconds = self.world.now() - self._began

    # Messages between stages

    def _group(self, op: Op) -> Group:
        stages = self._layout(op).ranks("pp", of=self.world.rank)
        return self.world.group(stages, op.way)

    # Switches

    def _transfer(self, op: Op) -> SwitchTransfer:
        """The switch to a visit from the one before, or home."""
        copies = self._copies(op)
        if op.way == "sums":
            return self.switches.take_home(copies)
        # The first group's weights come from home alone.
        previous = self.groups_here[op.visit - 1].layout if op.visit else None
        source = None
        if previous is not None and self.itinerary.source(previous) is not None:
            source = self.copies_of[previous]
        return self.switches.bring(source, copies)

    def _total(self, op: Op) -> None:
        self.world.now()  # what the backward still does is no part of the switch
        self.switches.total(op.unit)

    def _update(self, op: Op) -> None:
        """Update home, or a unit of it, and remember what that leaves to the next step."""
        # Early updates stand if the norm does not clip; else their units are updated again.
        is_early = op.part == "early"
        if is_early:
            self.early.add(op.unit)
        loss_sum, squared_norm = self.sums
        unclipped = self.update(op.unit, is_early, loss_sum, squared_norm)
        if op.unit < 0:
            self.unclipped = unclipped
            self.left = self.steps.left(self.early if unclipped else ())

    def _norm(self, op: Op) -> None:
        """Loss and squared gradient norm of all ranks, in one message."""
        # Groups with packs of their own may share one.
        layouts = dict.fromkeys(group.layout for group in self.groups_here)
        loss_sum = torch.stack([self.runners[layout].loss for layout in layouts]).sum()
        squared_norm = self.home.squared_norm().to(loss_sum.device)
        sums = torch.stack((loss_sum, squared_norm))
        self.sums = tuple(self.world.everyone.all_reduce(sums).tolist())

    def _count(self, op: Op, way: str) -> None:
        """Add times and bytes of a finished transfer to its visit. A device may be behind the
        host."""
        transfer = self._transfers.pop((op.visit, way))
        visit = self.visited[op.visit]
        # `now` waits for the device: what the switch has queued there is exposed too.
        queued_s = time.perf_counter()
        visit.exposed_s += transfer.exposed_s + self.world.now() - queued_s
        visit.hidden_s += transfer.under_way_s
        visit.intra_node_bytes += transfer.traffic.intra_node_bytes
        visit.inter_node_bytes += transfer.traffic.inter_node_bytes
