"""Ways to train, weighed by the ledger and played on the clock: what the ranks of a run need at the most, and what its steps take.

Steps have typical documents of the corpus (`Lengths.typical`), dealt and packed as a run does.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from longshift.layout.legal import faults
from longshift.planner.memory_bound import least_of_way
from longshift.planner.shortlist import CUT
from longshift.planner.siblings import first_of_meshes, lower, siblings, smaller
from longshift.planner.task import Task
from longshift.planner.uneven import evened
from longshift.simulate.clock import Clock, StepTime, in_visiting_order
from longshift.simulate.cost import Cost
from longshift.simulate.rates import rates
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.workload.groups import Edge

STEPS = 4  # that finalists are played on; one more, typical by itself, says which ways are finalists
FINALISTS = 4  # sets of meshes
LOOKS = 8  # at siblings of ways that lead
PACE_S = 5.0  # between two reports of progress


@dataclass(frozen=True)
class Way:
    """Groups of lengths, weighed and played. `seconds`: the mean of `steps` where it is `sure`, else estimated; `bytes`: that a rank needs
    at most, by place; `peak`: the operation after which the device's is; `shape`: of the run's steps; `steps`: those that were played on
    the clock, and the lengths of their documents."""

    edges: tuple[Edge, ...]
    seconds: float
    bytes: Mapping[str, int]
    peak: str
    shape: StepShape = field(repr=False)
    steps: tuple[tuple[StepTime, tuple[int, ...]], ...] = field(repr=False)

    @property
    def sure(self) -> bool:
        """Whether its seconds are those of several steps."""
        return len(self.steps) > 1

    def __str__(self) -> str:
        if len(self.edges) == 1:
            return f"{self.edges[0].use}{self.edges[0].packs}"
        return " > ".join(map(str, self.edges))


class Replay:
    """Weighs and plays the ways of a task. Mutable: it keeps what it has weighed and played. `tell`: takes reports of progress."""

    def __init__(self, task: Task, tell: Callable[[str], None] = lambda line: None):
        self.task, self.tell, self.told_s = task, tell, time.monotonic()
        self.cost = Cost(task.spec, rates(task.cluster, task.precision), task.habits)
        typical = [step for count in (1, STEPS) for step in task.lengths.typical(count, task.tokens_per_step)]
        self.typical = [tuple(step.tolist()) for step in typical]
        self.weighed: dict[tuple[Edge, ...], tuple[Mapping[str, int], str]] = {}
        self.late: set[tuple[Edge, ...]] = set()  # that have room only if no unit is updated before the norm
        self.clocks: dict[tuple[Edge, ...], Clock] = {}
        self.steps: dict[tuple[Edge, ...], dict[int, StepTime]] = {}

    def shape(self, edges: tuple[Edge, ...]) -> StepShape:
        return self.task.step_shape(edges, early=edges not in self.late)

    def weigh(self, edges: tuple[Edge, ...]) -> tuple[Mapping[str, int], str]:
        """Bytes that a rank needs at most, by place, and after which operation the device's peak is. Where updates before the norm have no
        room, as without them: so a run is admitted, too."""
        if edges not in self.weighed:
            self._say_how_far()
            self.weighed[edges] = self._weigh(edges)
            if "disk" in self.task.home.named and not self.fits(edges):
                self.late.add(edges)
                self.weighed[edges] = self._weigh(edges)
        return self.weighed[edges]

    def _weigh(self, edges: tuple[Edge, ...]) -> tuple[Mapping[str, int], str]:
        needed = memory_needs(self.shape(edges), edges, self.task.transport, not self.task.on_gpu)
        by_place = {place: max(need.of(place) for need in needed) for place in ("device", "host", "disk")}
        return by_place, largest_need(needed).device.op

    def lacks(self, edges: tuple[Edge, ...]) -> tuple[float, str]:
        """The most bytes that a place lacks for what the ledger says, 0 or less where all of it fits, and which place."""
        weighed = self.weigh(edges)[0]
        return max((weighed[place] - limit, place) for place, limit in self.task.limits.items())

    def fits(self, edges: tuple[Edge, ...]) -> bool:
        """Whether every place has room for what the ledger says."""
        return self.lacks(edges)[0] <= 0

    def fastest(self, ways: Iterable[tuple[Edge, ...]]) -> list[Way]:
        """Those that fit, fastest first. All are played on the first step, in smaller packs where they do not fit else, and with the next
        lower ZeRO stage; then siblings of the fastest, of the fastest single layout and of the fastest of one cut, until these lead; then
        the fastest FINALISTS that have a pipeline, with uneven stages. The four fastest of all these, the fastest way of each of the first
        FINALISTS sets of meshes, the best single layout and the best of one cut are played on the STEPS after it. The rest are taken to be
        as much slower as on the first."""
        fitted = list(map(self._fitted, ways))
        first = self._first([*fitted, *self._possible(map(lower, fitted))])
        looked_at = list[tuple[Edge, ...]]()
        while len(looked_at) < LOOKS and (leaders := [edges for edges in _leaders(first, 1) if edges not in looked_at]):
            looked_at += leaders
            first = self._first([*first, *self._possible(sibling for edges in leaders for sibling in siblings(edges))])
        pipelines = [edges for edges in first if any(edge.use.pp > 1 for edge in edges)]
        first = self._first([*first, *map(self.evened, pipelines[:FINALISTS])])
        finalists = dict.fromkeys([*_leaders(first, 4), *first_of_meshes(first)[:FINALISTS]])
        means = {edges: self.mean_second(edges) for edges in finalists}
        scale = means[first[0]] / self.second(first[0], 0) if first else 1.0
        return _in_order(self.way(edges, means.get(edges, scale * self.second(edges, 0))) for edges in first)

    def surer(self, ways: Iterable[Way], some: Sequence[Way]) -> list[Way]:
        """These ways, fastest first, when `some` of them have been played on the STEPS."""
        unsure = {way.edges for way in some}
        return _in_order(self.way(way.edges, self.mean_second(way.edges)) if way.edges in unsure else way for way in ways)

    def _fitted(self, edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
        """A way with the largest packs that fit, of its own and half of these over and over; with the smallest, where none do."""
        while not self.fits(edges) and (less := smaller(edges)) != edges:
            edges = less
        return edges

    def _possible(self, ways: Iterable[tuple[Edge, ...]]) -> list[tuple[Edge, ...]]:
        """Those that the ledger is worth asking about."""
        return [edges for edges in ways if not self._faulty(edges) and not self._too_large(edges)]

    def _faulty(self, edges: tuple[Edge, ...]) -> bool:
        """Whether a layout is impossible, or other than what is fixed."""
        task, float8 = self.task, self.task.formats.float8
        other = any(getattr(edge.use, name) not in values for name, values in task.fixed_fields.items() for edge in edges)
        return other or any(faults(task.spec, edge.use, task.world, edge.upto, edge.pack, float8) for edge in edges)

    def _too_large(self, edges: tuple[Edge, ...]) -> bool:
        """Whether a bound says that a device lacks memory for them: the ledger, which is slower, need not be asked."""
        task = self.task
        return least_of_way(task.training, edges, task.tokens_per_step) > task.budget_bytes

    def _first(self, ways: Iterable[tuple[Edge, ...]]) -> list[tuple[Edge, ...]]:
        """Those that fit, fastest on the first step first."""
        fitting = [edges for edges in dict.fromkeys(ways) if self.fits(edges)]
        return sorted(fitting, key=lambda edges: (self.second(edges, 0), str(edges)))

    def step(self, edges: tuple[Edge, ...], number: int) -> StepTime:
        """A step on the clock."""
        if edges not in self.clocks:
            self.clocks[edges] = Clock(self.shape(edges), self.task.cluster, self.cost, self.task.precision)
        steps, clock = self.steps.setdefault(edges, {}), self.clocks[edges]
        if number not in steps:
            self._say_how_far()
            steps[number] = clock.step(in_visiting_order(clock.shape, self.typical[number]))
        return steps[number]

    def _say_how_far(self) -> None:
        """Report progress, unless the last report is less than PACE_S old."""
        if time.monotonic() - self.told_s > PACE_S:
            self.told_s = time.monotonic()
            self.tell(f"{len(self.weighed)} ways weighed, {sum(map(len, self.steps.values()))} steps played on the clock")

    def second(self, edges: tuple[Edge, ...], number: int) -> float:
        """Seconds of a step."""
        return self.step(edges, number).seconds

    def mean_second(self, edges: tuple[Edge, ...]) -> float:
        """Mean seconds of the STEPS."""
        return float(np.mean([self.second(edges, number) for number in range(1, 1 + STEPS)]))

    def evened(self, edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
        """These groups with the stages of their pipelines by what units take on the first step."""
        step, layers = self.step(edges, 0), self.task.spec.layers
        visited = in_visiting_order(self.clocks[edges].shape, self.typical[0])
        better = {group.layout: evened(layers, group.layout, pieces) for group, pieces in zip(visited, step.played)}
        return tuple(replace(edge, use=better.get(edge.use, edge.use)) for edge in edges)

    def way(self, edges: tuple[Edge, ...], seconds: float = np.inf) -> Way:
        """What is known of a way."""
        played = self.steps.get(edges, {})
        steps = tuple((step, self.typical[number]) for number, step in sorted(played.items()) if number or len(played) == 1)
        return Way(edges, seconds, *self.weigh(edges), self.shape(edges), steps)


def _in_order(ways: Iterable[Way]) -> list[Way]:
    """These ways, fastest first; of equal ones that of which more steps were played."""
    return sorted(ways, key=lambda way: (way.seconds, -len(way.steps), str(way)))


def _leaders(ways: Sequence[tuple[Edge, ...]], number: int) -> list[tuple[Edge, ...]]:
    """The first of all, so many, the first single layout and the first of one cut of the weights."""
    singles = [edges for edges in ways if len(edges) == 1]
    of_one_cut = [edges for edges in ways if one_cut(edges)]
    return list(dict.fromkeys([*ways[:number], *singles[:1], *of_one_cut[:1]]))


def one_cut(edges: Sequence[Edge]) -> bool:
    """Whether the layouts cut the weights alike: what context parallelism alone can choose."""
    return len({tuple(getattr(edge.use, name) for name in CUT) for edge in edges}) == 1
