"""Evaluates plans: the ledger says what a rank needs at most, the clock what a step takes.

Steps have typical documents of the corpus (`Lengths.typical`), assigned and packed as a run does.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from longshift.layout.legal import faults
from longshift.planner.balance_stages import balance_stages
from longshift.planner.memory_bound import min_plan_bytes
from longshift.planner.neighbors import first_of_meshes, halve_packs, lower_zero, neighbors
from longshift.planner.shortlist import weight_cut
from longshift.planner.task import Edges, PlanTask
from longshift.simulate.clock import Clock, StepTime, in_visiting_order
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.workload.groups import Edge

STEPS = 4  # that finalists are played on; one more says which plans are finalists
FINALISTS = 4  # sets of meshes
MAX_SEARCHED = 8  # plans whose neighbors are played
ENOUGH_STREAMED = 6  # plans with streamed groups that fit; further ones are not weighed
REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class PlanCandidate:
    """A plan on the ledger and the clock.

    seconds  mean of `steps` if it `is_sure`, else an estimate
    bytes    that a rank needs at most, by place
    peak     operation after which the device's is reached
    shape    of the run's steps
    steps    those that were played on the clock, and the lengths of their documents
    """

    edges: Edges
    seconds: float
    bytes: Mapping[str, int]
    peak: str
    shape: StepShape = field(repr=False)
    steps: tuple[tuple[StepTime, tuple[int, ...]], ...] = field(repr=False)

    @property
    def is_sure(self) -> bool:
        """Whether its seconds are those of several steps."""
        return len(self.steps) > 1

    def __str__(self) -> str:
        if len(self.edges) == 1:
            return f"{self.edges[0].use}{self.edges[0].packs}"
        return " > ".join(map(str, self.edges))


class PlanEvaluator:
    """Evaluates the plans of a task. Mutable: it caches what it has weighed and played.

    `tell`: takes reports of progress.
    """

    def __init__(self, task: PlanTask, tell: Callable[[str], None] = lambda line: None):
        self.task = task
        self.tell = tell
        self.reported_s = time.monotonic()
        self.cost = task.cost
        first = task.lengths.typical(1, task.tokens_per_step)
        further = task.lengths.typical(STEPS, task.tokens_per_step)
        self.typical = [tuple(step.tolist()) for step in (*first, *further)]
        self.weighed: dict[Edges, tuple[Mapping[str, int], str]] = {}
        # These have room only if no unit is updated before the norm.
        self.late_updates: set[Edges] = set()
        self.clocks: dict[Edges, Clock] = {}
        self.steps: dict[Edges, dict[int, StepTime]] = {}

    def shape(self, edges: Edges) -> StepShape:
        return self.task.step_shape(edges, early=edges not in self.late_updates)

    def weigh(self, edges: Edges) -> tuple[Mapping[str, int], str]:
        """Bytes that a rank needs at most, by place, and after which operation the device's peak is
        reached."""
        if edges not in self.weighed:
            self._report_progress()
            self.weighed[edges] = self._weigh(edges)
            # As a run is admitted: if early updates have no room, without them.
            if "disk" in self.task.home.tiers and not self.fits(edges):
                self.late_updates.add(edges)
                self.weighed[edges] = self._weigh(edges)
        return self.weighed[edges]

    def _weigh(self, edges: Edges) -> tuple[Mapping[str, int], str]:
        rank_needs = memory_needs(self.shape(edges), edges, self.task.transport)
        max_bytes = {}
        for place in ("device", "host", "disk"):
            max_bytes[place] = max(need.of(place) for need in rank_needs)
        return max_bytes, largest_need(rank_needs).device.op

    def shortage(self, edges: Edges) -> tuple[float, str]:
        """The most bytes that a place lacks by the ledger, and which place. 0 or less: the plan
        fits."""
        needed, _ = self.weigh(edges)
        return max((needed[place] - limit, place) for place, limit in self.task.limits.items())

    def fits(self, edges: Edges) -> bool:
        """Whether every place has room, by the ledger."""
        return self.shortage(edges)[0] <= 0

    def rank(self, plans: Iterable[Edges]) -> list[PlanCandidate]:
        """The plans that fit, and neighbors of the fastest. Fastest first.

        Finalists are played on STEPS; the others are assumed to be slower by as much as on the
        first step."""
        # 1. Play all on the first step, also with the next lower ZeRO stage.
        fitted = self._fit(plans)
        ranking = self._rank_first_step([*fitted, *self._plausible(map(lower_zero, fitted))])

        # 2. Play neighbors of the leaders, until these lead.
        searched = []
        while len(searched) < MAX_SEARCHED:
            leaders = [edges for edges in _leaders(ranking, 1) if edges not in searched]
            if not leaders:
                break
            searched += leaders
            nearby = [neighbor for edges in leaders for neighbor in neighbors(edges)]
            nearby = self._worth_weighing(self._plausible(nearby), ranking[0])
            ranking = self._rank_first_step([*ranking, *nearby])

        # 3. Play the fastest pipelines with uneven stages.
        pipelines = [edges for edges in ranking if any(edge.use.pp > 1 for edge in edges)]
        balanced = [self._balance_stages(edges) for edges in pipelines[:FINALISTS]]
        ranking = self._rank_first_step([*ranking, *balanced])

        # 4. Play the finalists on several steps: leaders, and the fastest of some sets of meshes.
        finalists = [*_leaders(ranking, 4), *first_of_meshes(ranking)[:FINALISTS]]
        means = {edges: self.mean_seconds(edges) for edges in dict.fromkeys(finalists)}
        scale = means[ranking[0]] / self.seconds(ranking[0], 0) if ranking else 1.0
        candidates = []
        for edges in ranking:
            seconds = means.get(edges, scale * self.seconds(edges, 0))
            candidates.append(self.candidate(edges, seconds))
        return _sort_by_seconds(candidates)

    def measure(
        self,
        candidates: Iterable[PlanCandidate],
        unsure: Sequence[PlanCandidate],
    ) -> list[PlanCandidate]:
        """Play those that are `unsure` on STEPS. Returns all candidates, fastest first."""
        plans = {candidate.edges for candidate in unsure}
        ranking = []
        for candidate in candidates:
            if candidate.edges in plans:
                candidate = self.candidate(candidate.edges, self.mean_seconds(candidate.edges))
            ranking.append(candidate)
        return _sort_by_seconds(ranking)

    def _fit(self, plans: Iterable[Edges]) -> list[Edges]:
        """The plans with the largest packs that fit.

        The ledger takes seconds for a plan of several groups with a streamed one: of these, the
        fastest are weighed until ENOUGH_STREAMED fit."""
        quick = []
        slow = []
        for edges in plans:
            is_slow = len(edges) > 1 and _is_streamed(edges)
            (slow if is_slow else quick).append(edges)
        fitted = [self._fit_packs(edges) for edges in quick]

        slow.sort(key=lambda edges: (self.seconds(edges, 0), str(edges)))
        num_streamed = 0
        for edges in slow:
            if num_streamed == ENOUGH_STREAMED:
                break
            fitted.append(self._fit_packs(edges))
            num_streamed += self.fits(fitted[-1])
        return fitted

    def _fit_packs(self, edges: Edges) -> Edges:
        """The plan with the largest packs that fit: its packs, halved until they do; the smallest,
        if none do."""
        # Where a streamed group lacks memory, each halving would be weighed for nothing.
        smallest = tuple(replace(edge, pack=edge.upto) for edge in edges)
        if _is_streamed(edges) and not self.fits(edges) and not self.fits(smallest):
            return smallest
        while not self.fits(edges):
            smaller = halve_packs(edges)
            if smaller == edges:
                break
            edges = smaller
        return edges

    def _plausible(self, plans: Iterable[Edges]) -> list[Edges]:
        """The plans that are worth asking the ledger about, which is slower than rules and
        bounds."""
        possible = [edges for edges in plans if not self._is_faulty(edges)]
        return [edges for edges in possible if not self._is_too_large(edges)]

    def _worth_weighing(self, plans: Iterable[Edges], leader: Edges) -> list[Edges]:
        """All plans of whole packs. Of those with streamed groups, for which the ledger takes
        seconds, the ones that are faster than the leader on the first step."""
        leader_s = self.seconds(leader, 0)
        return [
            edges for edges in plans if not _is_streamed(edges) or self.seconds(edges, 0) < leader_s
        ]

    def _is_faulty(self, edges: Edges) -> bool:
        """Whether a layout is impossible, or other than what is fixed."""
        task = self.task
        for name, values in task.fixed_fields.items():
            if any(getattr(edge.use, name) not in values for edge in edges):
                return True

        float8 = task.formats.float8
        return any(
            faults(task.spec, edge.use, task.world, edge.upto, edge.pack, float8) for edge in edges
        )

    def _is_too_large(self, edges: Edges) -> bool:
        """Whether a bound says that a device lacks memory for the plan."""
        task = self.task
        return min_plan_bytes(task.training, edges, task.tokens_per_step) > task.budget_bytes

    def _rank_first_step(self, plans: Iterable[Edges]) -> list[Edges]:
        """The plans that fit, fastest on the first step first."""
        fitting = [edges for edges in dict.fromkeys(plans) if self.fits(edges)]
        return sorted(fitting, key=lambda edges: (self.seconds(edges, 0), str(edges)))

    def step(self, edges: Edges, number: int) -> StepTime:
        """A step on the clock."""
        if edges not in self.clocks:
            shape = self.shape(edges)
            self.clocks[edges] = Clock(shape, self.task.cluster, self.cost)
        clock = self.clocks[edges]
        steps = self.steps.setdefault(edges, {})
        if number not in steps:
            self._report_progress()
            steps[number] = clock.step(in_visiting_order(clock.shape, self.typical[number]))
        return steps[number]

    def _report_progress(self) -> None:
        """Report progress, unless the last report is less than REPORT_EVERY_S old."""
        if time.monotonic() - self.reported_s > REPORT_EVERY_S:
            self.reported_s = time.monotonic()
            num_steps = sum(map(len, self.steps.values()))
            self.tell(f"{len(self.weighed)} ways weighed, {num_steps} steps played on the clock")

    def seconds(self, edges: Edges, number: int) -> float:
        """Seconds of a step."""
        return self.step(edges, number).seconds

    def mean_seconds(self, edges: Edges) -> float:
        """Mean seconds of the STEPS."""
        return float(np.mean([self.seconds(edges, number) for number in range(1, 1 + STEPS)]))

    def _balance_stages(self, edges: Edges) -> Edges:
        """The plan with stages balanced by what units take on the first step."""
        step = self.step(edges, 0)
        groups = in_visiting_order(self.clocks[edges].shape, self.typical[0])
        balanced = {}
        for group, pieces in zip(groups, step.played):
            balanced[group.layout] = balance_stages(self.task.spec.layers, group.layout, pieces)
        return tuple(replace(edge, use=balanced.get(edge.use, edge.use)) for edge in edges)

    def candidate(self, edges: Edges, seconds: float = np.inf) -> PlanCandidate:
        """What is known of a plan."""
        steps = self.steps.get(edges, {})
        # The first step only says which plans are finalists: their seconds are those of the others.
        numbers = sorted(steps) if len(steps) == 1 else [n for n in sorted(steps) if n > 0]
        needed, peak = self.weigh(edges)
        return PlanCandidate(
            edges=edges,
            seconds=seconds,
            bytes=needed,
            peak=peak,
            shape=self.shape(edges),
            steps=tuple((steps[number], self.typical[number]) for number in numbers),
        )


def _sort_by_seconds(candidates: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Fastest first; of equal ones that of which more steps were played."""
    return sorted(
        candidates,
        key=lambda candidate: (candidate.seconds, -len(candidate.steps), str(candidate)),
    )


def _leaders(ranking: Sequence[Edges], number: int) -> list[Edges]:
    """The first `number` of all, the first single layout and the first of one cut of the
    weights."""
    singles = [edges for edges in ranking if len(edges) == 1]
    one_cut = [edges for edges in ranking if has_one_cut(edges)]
    return list(dict.fromkeys([*ranking[:number], *singles[:1], *one_cut[:1]]))


def _is_streamed(edges: Edges) -> bool:
    return any(edge.use.chunk for edge in edges)


def has_one_cut(edges: Sequence[Edge]) -> bool:
    """Whether the layouts cut the weights alike: they differ in context parallelism alone."""
    return len({weight_cut(edge.use) for edge in edges}) == 1
