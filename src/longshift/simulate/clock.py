"""The clock: a step's programs played on lanes. When each operation begins and ends, and so how
long the step takes.

The operations are `program.step`'s, the bytes that they send and move the ledger's, their seconds
`simulate.cost`'s. One rank plays for all that are like it: in a length group, one of each stage of
the replica with most to do. Ranks wait for each other where a group ends: an exchange of a switch
joins them there.

What overlaps is what the program overlaps: gathers, reductions, messages, exchanges and copies go
on in their lanes from where they are begun until they are awaited, and share a link where they use
the same. Inside a turn, tensor parallelism and Ulysses are waited for, and the ring passes keys
under attention. On CPUs what travels takes a share of the cores that computing takes, as a profile
says; on GPUs it crowds them. Each visit ends with what ranks wait for the slowest of them.

A home outside a GPU has its masters cast and its units updated by the host, at HOST_BYTES_PER_S.
The host is in a lane with the gathers, which wait for the updates before them, and not with what
the device computes. Weights cross the device's link while others are cast; gradients cross it
beside what is computed, and those of a home on disk are waited for. What a switch takes from such a
home, and brings to it, is not charged with that.

Of many micro-batches, which a pipeline computes at an even pace once it is full, an even choice is
played, and the seconds that the rest takes at that pace are added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.layout import Coord, Layout
from longshift.program.turns import Visit, visit_of
from longshift.simulate.cost import Cost
from longshift.simulate.lanes import TimedWork, play
from longshift.simulate.op_seconds import OpSeconds
from longshift.simulate.op_traffic import OpTraffic, record_traffic
from longshift.simulate.stage_actions import StageActions
from longshift.weigh.ledger import Ledger
from longshift.weigh.needs import StepShape
from longshift.weigh.recorder import transport_on

# At least so many micro-batches of a visit are played, and of a pipeline FILLS times its stages'
# chunks.
LEAST_PLAYED = 16
FILLS = 3

Packs = tuple[tuple[int, ...], ...]  # lengths of the documents of each micro-batch


@dataclass(frozen=True)
class GroupPacks:
    """A length group of a step: its layout, and the micro-batches of each replica."""

    layout: Layout
    replicas: tuple[Packs, ...]


@dataclass(frozen=True)
class StepTime:
    """A step on the clock. `starts`: seconds at which each visit begins; `played`: by visit, every
    piece of work of one rank of each stage, its times from the visit's start on; `shares`: of what
    there is to compute in each visit, that was played."""

    seconds: float
    starts: tuple[float, ...]
    played: tuple[tuple[TimedWork, ...], ...] = field(repr=False)
    shares: tuple[float, ...]

    def busy_s(self, lane: str) -> float:
        """Seconds in which a lane does something, of each visit's busiest stage, of all visits;
        what was not played as what was."""
        total = 0.0
        for pieces, share in zip(self.played, self.shares):
            # One rank of each stage was played: a rank's number here is its stage.
            by_stage = {}
            for piece in pieces:
                if piece.lane == lane:
                    busy_s = by_stage.get(piece.rank, 0.0)
                    by_stage[piece.rank] = busy_s + (piece.end - piece.start)

            total += max(by_stage.values(), default=0.0) / share
        return total


@dataclass(frozen=True, eq=False)
class _Sample:
    """Micro-batches of a group that are played.

    `packs`: of the busiest replica; `costs`: seconds of a block on each of them.
    `large`, `small`: numbers of the packs of two samples.
    """

    layout: Layout
    packs: Packs
    costs: np.ndarray
    large: tuple[int, ...]
    small: tuple[int, ...]

    @property
    def is_partial(self) -> bool:
        """Whether some micro-batches are left out."""
        return self.large != self.small

    def select(self, numbers: Sequence[int]) -> Packs:
        """The packs of one of the samples."""
        return tuple(self.packs[number] for number in numbers)

    @property
    def skipped_cost(self) -> float:
        """Seconds of a block on what the large sample leaves out."""
        return float(self.costs.sum() - self.costs[list(self.large)].sum())

    @property
    def cost_difference(self) -> float:
        """Seconds of a block on what the small sample leaves out of the large one."""
        return float(self.costs[list(self.large)].sum() - self.costs[list(self.small)].sum())


class Clock:
    """Plays steps of a run on a cluster's rates. Mutable: it caches what it has computed."""

    def __init__(self, shape: StepShape, cluster: Cluster, cost: Cost):
        self.shape = shape
        self.constants = cost.rates.constants
        self.op_seconds = OpSeconds(shape, cluster, cost)

        # Seconds of a visit per second of one block on its packs. Known of sampled layouts alone.
        self.paces: dict[Layout, float] = {}

        # By rank and by the layouts that its steps visit.
        self.ledgers: dict[tuple[int, tuple[Layout, ...]], Ledger] = {}

    def step(self, groups: Sequence[GroupPacks]) -> StepTime:
        """A step that visits these groups, in this order."""
        # 1. Choose a sample of each group's micro-batches, and play it.
        samples = [self._sample(group) for group in groups]
        layouts = [sample.layout for sample in samples]
        timelines = self._play(layouts, [sample.select(sample.large) for sample in samples])

        # 2. Learn at which pace a layout computes further micro-batches.
        if any(sample.is_partial and sample.layout not in self.paces for sample in samples):
            self._learn_paces(samples, timelines)

        # 3. Extrapolate each group to all its micro-batches. The next group begins when all ranks
        #    have ended this one.
        start_s = float(self.constants.begin_s)
        starts = []
        shares = []
        for sample, timeline in zip(samples, timelines):
            skipped_s = self.paces.get(sample.layout, 0.0) * sample.skipped_cost
            wait_factor = 1 + float(self.constants.jitter) * math.log2(sample.layout.world)
            starts.append(start_s)
            shares.append(1 - sample.skipped_cost / float(sample.costs.sum()))

            start_s += (_end_s(timeline) + skipped_s) * wait_factor

        return StepTime(
            seconds=float(start_s),
            starts=tuple(starts),
            played=tuple(tuple(timeline) for timeline in timelines),
            shares=tuple(shares),
        )

    def _sample(self, group: GroupPacks) -> _Sample:
        """Choose the micro-batches of a group that are played."""
        packs = self.busiest_replica(group)
        costs = self.op_seconds.block_seconds(group.layout, packs)
        large, small = _sample_sizes(group.layout, len(packs))
        return _Sample(
            layout=group.layout,
            packs=packs,
            costs=costs,
            large=_even_choice(costs, large),
            small=_even_choice(costs, small),
        )

    def _learn_paces(
        self, samples: Sequence[_Sample], timelines: Sequence[list[TimedWork]]
    ) -> None:
        """Play the small samples too. A pace is the difference of the two in seconds."""
        layouts = [sample.layout for sample in samples]

        # All visits are played again: the exchange that begins one depends on the visit before.
        packs_by_visit = [sample.select(sample.small) for sample in samples]
        small_timelines = self._play(layouts, packs_by_visit)

        for sample, large, small in zip(samples, timelines, small_timelines):
            if sample.is_partial:
                difference_s = _end_s(large) - _end_s(small)
                self.paces[sample.layout] = difference_s / sample.cost_difference

    def _play(
        self, layouts: Sequence[Layout], packs_by_visit: Sequence[Packs]
    ) -> list[list[TimedWork]]:
        """Play a step. Returns the pieces of work of one rank of each stage, by visit."""
        spec = self.shape.itinerary.spec
        visits = tuple(
            visit_of(spec, layout, packs) for layout, packs in zip(layouts, packs_by_visit)
        )
        # Stages of several layouts may have the same first rank, which is asked once.
        traffic_of_rank: dict[int, list[list[OpTraffic]]] = {}
        timelines = []
        for number, (layout, packs) in enumerate(zip(layouts, packs_by_visit)):
            actions_by_stage = []
            for stage in range(layout.pp):
                rank = layout.rank(Coord(pp=stage))
                if rank not in traffic_of_rank:
                    traffic_of_rank[rank] = self._traffic(rank, visits, packs_by_visit)
                rank_actions = StageActions(self.op_seconds, layout, stage, visits, packs)
                actions_by_stage.append(list(rank_actions.actions(traffic_of_rank[rank][number])))
            timelines.append(play(actions_by_stage, float(self.constants.crowd)))
        return timelines

    def _traffic(
        self,
        rank: int,
        visits: tuple[Visit, ...],
        packs_by_visit: Sequence[Packs],
    ) -> list[list[OpTraffic]]:
        """The operations of a rank's step by visit, with what they move."""
        key = rank, tuple(visit.layout for visit in visits)
        steps = None
        if key in self.ledgers:
            # Weights are as the last step of the same visits has left them: one step is enough.
            steps = 1
        else:
            transport = transport_on(not self.op_seconds.on_cpu)
            self.ledgers[key] = self.shape.ledger(rank, transport, with_peaks=False)
        return record_traffic(self.ledgers[key], visits, packs_by_visit, steps)

    def busiest_replica(self, group: GroupPacks) -> Packs:
        """The packs of the replica with the most work.

        Under ZeRO-3 replicas gather each unit together, so every micro-batch takes as long as the
        largest one of any replica. Those largest ones are returned.
        """
        # A replica with fewer packs than others computes one token in place of each.
        num_packs = max(len(packs) for packs in group.replicas)
        replicas = [packs + ((),) * (num_packs - len(packs)) for packs in group.replicas]
        all_packs = [pack for packs in replicas for pack in packs]
        seconds = self.op_seconds.block_seconds(group.layout, all_packs)
        seconds = seconds.reshape(len(replicas), num_packs)
        if group.layout.zero == 3:
            slowest_replica = seconds.argmax(axis=0)
            return tuple(replicas[r][number] for number, r in enumerate(slowest_replica))
        return replicas[int(seconds.sum(axis=1).argmax())]


def _end_s(timeline: Sequence[TimedWork]) -> float:
    """When the last piece of work ends."""
    return max((piece.end for piece in timeline), default=0.0)


def _sample_sizes(layout: Layout, num_packs: int) -> tuple[int, int]:
    """How many micro-batches the larger and the smaller sample have; both all of them if few.

    Each leaves out whole rounds of the stages, so that the pipeline runs full in the same way.
    """
    pp = layout.pp
    target = max(LEAST_PLAYED, FILLS * pp * layout.virtual)
    surplus = max(0, num_packs - target)
    large = num_packs - pp * -(-surplus // pp)
    small = large - pp * max(1, target // 2 // pp)

    if large == num_packs or small < 1:
        return num_packs, num_packs
    return large, small


def _even_choice(costs: np.ndarray, size: int) -> tuple[int, ...]:
    """Choose `size` micro-batches at even quantiles of the costs. Returns their numbers."""
    # Stable: of equal costs any version of numpy chooses the same.
    by_cost = np.argsort(costs, kind="stable")
    quantiles = ((np.arange(size) + 0.5) * len(costs) / size).astype(int)
    return tuple(sorted(by_cost[quantiles].tolist()))


def in_visiting_order(shape: StepShape, lengths: Sequence[int]) -> list[GroupPacks]:
    """The groups of a step of documents of these lengths, packed, in the order of their visits."""
    visits = []
    # Packs are of the group's documents, shares of its packs: both are numbers.
    for group in shape.itinerary.groups(lengths, shape.edges):
        packs = [tuple(lengths[document] for document in pack) for pack in group.packs]
        replicas = tuple(tuple(packs[number] for number in share) for share in group.shares)
        visits.append(GroupPacks(group.layout, replicas))
    return visits
