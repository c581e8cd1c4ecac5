"""All layouts of a run on one rank, and the walk of a step through them (`switch.itinerary`).

[Note: one order] Weights that go ahead and gradients on their way home share one process group. How far the weights have come when the
backward ends differs from rank to rank, so each first posts all exchanges that may go ahead, the same number everywhere.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from longshift.cluster.cluster import Heads
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.model.kernels import choose, kernels
from longshift.schedule.chunks import StreamOptions
from longshift.spec.model import ModelSpec
from longshift.state.home import Home
from longshift.state.precision import Precision
from longshift.state.transfer import Transfer
from longshift.state.visit import Stop, Switches
from longshift.stream.tiers import Moved
from longshift.stream.trace import Recorder
from longshift.switch.itinerary import Cut, Itinerary, SwitchOptions
from longshift.switch.links import Links, assumed
from longshift.train.build import Worker, prepare
from longshift.workload.groups import Edge, LengthGroup, length_groups


@dataclass
class Visited:
    """One group of a step, as this rank saw it. Seconds: of all, of switching with nothing else going on, of exchanges under way
    meanwhile; bytes: that the switch and the gradients' way home sent inside and between nodes, of all ranks; `moved`: what its tier did,
    where it has one."""

    group: LengthGroup
    tokens: int
    seconds: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    intra_node_bytes: int = 0
    inter_node_bytes: int = 0
    moved: Moved | None = None


class Team:
    """Mutable: it knows where the step is, and what has begun to move."""

    def __init__(
        self,
        spec: ModelSpec,
        edges: Sequence[Edge],
        world: World,
        home: Home,
        precision: Precision,
        options: SwitchOptions,
        stream: StreamOptions,
        home_cut: Layout | None = None,
        links: Links | None = None,
    ):
        """`home_cut`: the layout that `home` is cut by, where that is not `home_layout(edges)`. `links`: equal on all ranks
        (`switch.links.agreed`); assumed ones where None."""
        self.spec, self.edges, self.world, self.home = spec, tuple(edges), world, home
        self.itinerary = Itinerary(
            spec, edges, links or assumed(world.per_node), precision.compute.itemsize, precision.home.itemsize, options, home_cut
        )
        heads = Heads(spec.heads, spec.kv_heads, spec.head_width)
        slowest = partial(world.everyone.all_reduce, op=dist.ReduceOp.MAX)
        self.kernel, self.why_kernel = choose(kernels(world.device, precision.compute), heads, precision.compute, world.device, slowest)
        self.workers: dict[Layout, Worker] = {}
        self.stop_of: dict[Layout, Stop] = {}
        stops: dict[Cut, Stop] = {}
        for layout, cut in self.itinerary.cuts.items():
            prepare(world, spec, layout)
            if cut not in stops:
                stops[cut] = Stop(spec, cut, world, home, precision)
            self.stop_of[layout] = stops[cut]
            self.workers[layout] = Worker(spec, layout, world, stops[cut].copies, precision, stream, self.kernel)
        self.everyone = tuple(range(edges[0].use.world))
        world.prepare([self.everyone], "switch")
        self.switches = Switches(self.itinerary, home, world, self.everyone, precision)
        self.here: Stop | None = None
        self.visited: list[Visited] = []
        self._coming: Transfer | None = None

    def groups(self, lengths: Sequence[int]) -> tuple[LengthGroup, ...]:
        """The step's groups in visiting order."""
        found = length_groups(lengths, self.edges, self.spec)
        return tuple(found[i] for i in self.itinerary.order(tuple(group.layout for group in found)))

    def record(self, recorder: Recorder | None) -> None:
        for worker in self.workers.values():
            worker.record(recorder)

    def begin(self) -> None:
        """A step begins: home has changed."""
        for stop in set(self.stop_of.values()):
            stop.copies.outdated()
        self.here, self.visited = None, []

    def enter(self, group: LengthGroup, tokens: int) -> Worker:
        """Bring the group's weights here, as far as they are not on their way, and drop those of the layout before."""
        self._began = self.world.now()
        self.visited.append(Visited(group, tokens))
        stop = self.stop_of[group.layout]
        if stop is not self.here:
            if not stop.cut.at_home:
                self._arrive(stop)
            elif self.here is not None:
                self.here.close()
            self.here = stop
        worker = self.workers[group.layout]
        if worker.tier is not None:
            worker.tier.moved.restart()
        return worker

    def meanwhile(self, after: LengthGroup | None) -> Callable[[], object] | None:
        """What the worker is to call again and again in its last micro-batch: it brings the next group's weights as far as `ahead_bytes`
        allows."""
        if after is None or (stop := self.stop_of[after.layout]).cut.at_home or stop is self.here:
            return None
        self._coming = transfer = self.switches.bring(self._source(), stop)

        def advance() -> None:
            if transfer.posted < transfer.ahead:
                transfer.advance(stop.open, wait=False)

        return advance

    def leave(self, later: Sequence[LengthGroup]) -> None:
        """The group is computed; gradients that no later group adds to go home. [Note: one order]"""
        stop, visit = self.here, self.visited[-1]
        assert stop is not None
        while self._coming is not None and self._coming.posted < self._coming.ahead:
            self._coming.advance(self.stop_of[later[0].layout].open, wait=True)
        if not stop.cut.at_home and self.closing(later):
            self.world.now()  # what the backward still does is no part of the switch
            transfer = self.switches.take_home(stop)
            while transfer.advance(lambda names: None, wait=True):
                pass
            stop.forget_totals()
            if not later:
                stop.close()
            self._count(visit, transfer)
        tier = self.workers[visit.group.layout].tier
        visit.moved = replace(tier.moved) if tier is not None else None
        visit.seconds = self.world.now() - self._began

    def closing(self, later: Sequence[LengthGroup]) -> bool:
        """Whether no later group of the step uses the copies that are in use."""
        return all(self.stop_of[group.layout] is not self.here for group in later)

    def _arrive(self, stop: Stop) -> None:
        transfer, self._coming = self._coming or self.switches.bring(self._source(), stop), None
        self.switches.complete(transfer, self.here, stop)
        self._count(self.visited[-1], transfer)

    def _source(self) -> Stop | None:
        """The stop whose weights are here, besides home."""
        return self.here if self.visited and self.itinerary.source(self.visited[-1].group.layout) else None

    def _count(self, visit: Visited, transfer: Transfer) -> None:
        """Of a transfer whose last exchange was taken in; a device may be behind the host."""
        queued = time.perf_counter()
        visit.exposed_s += transfer.exposed_s + self.world.now() - queued
        visit.hidden_s += transfer.under_way_s
        visit.intra_node_bytes += transfer.traffic.intra_node_bytes
        visit.inter_node_bytes += transfer.traffic.inter_node_bytes
