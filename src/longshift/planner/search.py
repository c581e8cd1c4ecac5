"""The best layouts for the documents of a run: one for all, or one for each group of lengths.

    every layout ─ rate cards ─> shortlist ─ ledger, clock ─> plans, fastest first

A shortlist (`planner.shortlist`) compares every layout and assignment by rate cards, within the
device's memory or a part of it. The ledger weighs what it names, and the clock plays it as a run
would (`planner.plan_evaluator`); the fastest pipelines again with uneven stages
(`planner.balance_stages`). Plans that a run would try, and those that they are compared with, are
played on several steps. So the choice is, on the clock, never worse than the best single layout
that was played. Where no whole pack fits, streamed layouts are tried.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from longshift.errors import UsageError
from longshift.planner.neighbors import complexity, first_of_meshes
from longshift.planner.plan_evaluator import PlanCandidate, PlanEvaluator, has_one_cut
from longshift.planner.remedies import remedies
from longshift.planner.shortlist import (
    CandidateTable,
    Problem,
    Rival,
    compare,
    find_rivals,
    shortlist,
)
from longshift.planner.streaming import streamed_layouts
from longshift.planner.task import Edges, PlanTask
from longshift.workload.groups import Edge
from longshift.workload.length_file import Lengths

# Of a device's memory, that other shortlists may fill: groups together need more than each alone.
SHARES = (0.9, 0.8)
SMALL_SHARES = (0.65, 0.5)  # where too few plans fit that the larger ones name
NAMED = 5  # plans that a shortlist names, and plans of one cut of the weights
NAMED_SINGLES = 4  # of one layout
ENOUGH = 3  # plans that fit
# Times the seconds of the fastest plan: calibrated clocks were off by 4 to 7 % in the median.
CLOSE = 1.05
# The same of what is worth trying: of single plans calibrated clocks were off by up to 19 %.
NEAR = 1.15
MAX_TRIALS = 6  # plans that a run tries
RARE = (200_000, 20, 20)  # of `gc.set_threshold`


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    plans           those that fit, fastest first
    short           plans that do not fit, with the bytes that each lacks and where
    num_candidates  layouts that were compared
    refused         how many of them are impossible, by reason
    rivals          single layouts that would be faster and lack memory
    changes         the smallest that would make something fit, where nothing does
    """

    plans: tuple[PlanCandidate, ...]
    short: tuple[tuple[PlanCandidate, int, str], ...] = ()
    num_candidates: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    rivals: tuple[Rival, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def best(self) -> PlanCandidate | None:
        return next(iter(self.plans), None)

    @property
    def single(self) -> PlanCandidate | None:
        """The best plan of one layout; None if none fits."""
        return next((plan for plan in self.plans if len(plan.edges) == 1), None)

    @property
    def context_parallel(self) -> PlanCandidate | None:
        """The best plan whose layouts differ in context parallelism alone; None if none fits."""
        return next((plan for plan in self.plans if has_one_cut(plan.edges)), None)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step of the best plan; None if nothing fits."""
        return None if self.best is None else self.best.seconds

    def trial_plans(self) -> list[PlanCandidate]:
        """The plans to try; their steps and the clock say which goes on (`trainer.plan_file`).

        1. The simplest that the clock has CLOSE to the fastest; a run begins with it.
        2. The fastest, and the best single layout if neither is one.
        3. The fastest of other meshes that are NEAR, single layouts first: an error of the clock is
           common to all plans that compute alike.
        4. Neighbors that are CLOSE fill the rest of MAX_TRIALS, single layouts first.
        """
        if self.best is None:
            return []
        close = self._plans_within(CLOSE)
        first = [min(close, key=complexity), self.best.edges]
        if self.single is not None and min(map(len, first)) > 1:
            first.append(self.single.edges)
        other_meshes = first_of_meshes([*first, *self._plans_within(NEAR)])
        order = dict.fromkeys([*first, *other_meshes, *close])
        by_edges = {plan.edges: plan for plan in self.plans}
        return [by_edges[edges] for edges in order][:MAX_TRIALS]

    def _plans_within(self, ratio: float) -> list[Edges]:
        """Plans that take so many times the seconds of the fastest at most, of one layout first."""
        limit_s = ratio * self.plans[0].seconds
        plans = [plan.edges for plan in self.plans if plan.seconds <= limit_s]
        return sorted(plans, key=lambda edges: len(edges) > 1)


@contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Collect garbage rarely.

    Reference counts free what a search drops; passes over what it keeps took a quarter of its time.
    """
    generation0, generation1, generation2 = gc.get_threshold()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(generation0, generation1, generation2)


@collect_garbage_rarely()
def search(
    task: PlanTask,
    tell: Callable[[str], None] = lambda line: None,
    single: bool = False,
) -> SearchResult:
    """Search the best plans of a task.

    `tell`: takes reports of progress.
    `single`: whether only one layout for all documents is searched.
    Raises UsageError if home is on a disk of which nothing is known.
    """
    if "disk" in task.home.tiers and task.cluster.disk is None:
        raise UsageError(
            f"home: {task.home}: nothing is known of a disk of {task.cluster.name}: plan from a"
            " file of longshift profile -o on such a machine, or write home=host"
        )
    problem = Problem.of(task)
    evaluator = PlanEvaluator(task, tell)
    single = single or task.wire.weights != "compute"  # a switch must not take coded weights
    num_candidates = problem.enumeration.total
    tell(f"{num_candidates:,} layouts of {task.world} ranks compared")

    # 1. Plans of whole packs.
    table = compare(problem, task.budget_bytes)
    plans = _name_plans(table, single)
    for share in SHARES:
        plans += _name_plans(compare(problem, share * task.budget_bytes), single)
    for share in SMALL_SHARES:
        if sum(map(evaluator.fits, plans)) < ENOUGH:
            plans += _name_plans(compare(problem, share * task.budget_bytes), single)

    # 2. Streamed ones.
    if not any(map(evaluator.fits, plans)):
        tell("no whole pack fits; trying streamed layouts")
        plans += _streamed_plans(table, single)

    # 3. On the ledger and the clock.
    plans = list(dict.fromkeys(plans))
    ranking = tuple(evaluator.rank(plans))
    short = []
    for edges in plans:
        if edges not in evaluator.weighed:
            continue  # with streamed groups, and slower than those that fit
        lacking_bytes, place = evaluator.shortage(edges)
        if lacking_bytes > 0:
            short.append((evaluator.candidate(edges), int(lacking_bytes), place))
    short.sort(key=lambda row: row[1])
    result = SearchResult(
        plans=ranking,
        short=tuple(short),
        num_candidates=num_candidates,
        refused=_refusals(table),
        rivals=find_rivals(table, table.singles[0].seconds) if table.singles else (),
        changes=() if ranking else tuple(remedies(problem)),
    )

    # 4. Several steps of what is tried or compared. They may change the order: repeat.
    while unsure := _unsure_plans(result):
        result = replace(result, plans=tuple(evaluator.measure(result.plans, unsure)))
    return result


def _unsure_plans(result: SearchResult) -> list[PlanCandidate]:
    """Of the plans to try, and of those that they are compared with, those that were played on one
    step alone."""
    plans = (*result.trial_plans(), result.single, result.context_parallel)
    return [plan for plan in plans if plan and not plan.is_sure]


def _name_plans(table: CandidateTable, single: bool = False) -> list[Edges]:
    """Of a shortlist the first NAMED plans, as many of one cut of the weights, and the first
    NAMED_SINGLES of one layout."""
    estimates = table.singles if single else shortlist(table)
    plans = [estimate.edges for estimate in estimates]
    one_cut = [edges for edges in plans if len(edges) > 1 and has_one_cut(edges)]
    singles = [edges for edges in plans if len(edges) == 1]
    return list(dict.fromkeys([*plans[:NAMED], *one_cut[:NAMED], *singles[:NAMED_SINGLES]]))


def _streamed_plans(table: CandidateTable, single: bool) -> list[Edges]:
    """Streamed layouts for all documents; and for those longer than whole packs can be, with the
    best plans for the shorter ones."""
    problem = table.problem
    task = problem.task
    tally = problem.tally

    plans = []
    for layout in streamed_layouts(problem, first_edge=0):
        plans.append((Edge(task.longest, layout),))
    num_short = table.longest_fitting
    if single or num_short in (0, len(tally.edges)):
        return plans

    # A plan of the shorter documents, as if there were no others.
    lengths = task.lengths
    is_short = lengths.lengths <= int(tally.edges[num_short - 1])
    short_task = replace(
        task,
        lengths=Lengths(lengths.lengths[is_short], lengths.counts[is_short]),
        tokens_per_step=int(tally.sums[num_short, 1]),
        max_len=0,
    )
    short_table = compare(Problem.of(short_task), SHARES[0] * task.budget_bytes)
    short_plans = _name_plans(short_table)[:NAMED]

    for layout in streamed_layouts(problem, first_edge=num_short):
        plans += [(*edges, Edge(task.longest, layout)) for edges in short_plans]
    return plans


def _refusals(table: CandidateTable) -> dict[str, int]:
    """How many candidates are impossible, by reason, or too large for any packs."""
    refused = dict(table.problem.enumeration.refused)
    if table.num_too_large:
        shortest = table.problem.tally.edges[table.keys[0] - 1]
        reason = f"weights, state and packs of {shortest} tokens above the device's memory"
        refused[reason] = table.num_too_large
    return refused
