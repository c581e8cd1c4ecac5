"""The best layouts for the documents of a run: one for all, or one for each group of lengths.

    every layout ─ rate cards ─> shortlist ─ ledger, clock ─> ways, fastest first

A shortlist (`planner.shortlist`) compares every layout and assignment by rate cards, within the device's memory or a part of it. The
ledger weighs what it names, and the clock plays it as a run would (`planner.replay`); the fastest pipelines again with uneven stages
(`planner.uneven`). What a run would try, and what it is compared with, is played on several steps. So what is chosen is, on the clock,
never worse than the best single layout that was played. Where no whole pack fits, streamed layouts are tried.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from longshift.errors import UsageError
from longshift.planner.remedies import remedies
from longshift.planner.replay import Replay, Way, one_cut
from longshift.planner.shortlist import CandidateTable, Problem, Rival, compare, shortlist, too_large
from longshift.planner.siblings import first_of_meshes, plainness
from longshift.planner.streaming import streamed_layouts
from longshift.planner.task import Task
from longshift.workload.given import Lengths
from longshift.workload.groups import Edge

SHARES = (0.9, 0.8)  # of a device's memory, that other shortlists may fill: groups together need more than each alone
SMALL_SHARES = (0.65, 0.5)  # where too few ways fit that the larger ones name
NAMED = 5  # ways that a shortlist names, and ways of one cut of the weights
NAMED_SINGLES = 4  # of one layout
ENOUGH = 3  # ways that fit
MOST_RIVALS = 3  # that lack memory
CLOSE = 1.05  # times as many seconds as the fastest way: calibrated clocks were off by 4 to 7 % in the median
NEAR = 1.15  # the same of what is worth trying: of single ways calibrated clocks were off by up to 19 %
TRIED = 6  # ways that a run tries, at most
SELDOM = (200_000, 20, 20)  # of `gc.set_threshold`


@dataclass(frozen=True)
class Choice:
    """What a search has come to.

    ways        those that fit, fastest first
    short       ways that do not fit, with the bytes that each lacks and where
    candidates  layouts that were compared
    refused     how many of them are impossible, by reason
    rivals      single layouts that would be faster and lack memory
    changes     the smallest that would make something fit, where nothing does
    """

    ways: tuple[Way, ...]
    short: tuple[tuple[Way, int, str], ...] = ()
    candidates: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    rivals: tuple[Rival, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def best(self) -> Way | None:
        return next(iter(self.ways), None)

    @property
    def single(self) -> Way | None:
        """The best way of one layout; None where none fits."""
        return next((way for way in self.ways if len(way.edges) == 1), None)

    @property
    def context_parallel(self) -> Way | None:
        """The best way whose layouts differ in context parallelism alone; None where none fits."""
        return next((way for way in self.ways if one_cut(way.edges)), None)

    @property
    def seconds(self) -> float | None:
        """Of a step of the best way; None where nothing fits."""
        return None if self.best is None else self.best.seconds

    def worth_trying(self) -> list[Way]:
        """The ways to try; their steps and the clock say which goes on (`trainer.trial_ranking`). A run begins with the plainest that the
        clock has CLOSE to the fastest. After it come the fastest, the best single layout where neither is one, and the fastest of other
        meshes that are NEAR, single layouts first: what the clock gets wrong of one way, it gets wrong of all that compute alike. Siblings
        that are CLOSE fill what TRIED leaves, single layouts first."""
        if self.best is None:
            return []
        first = [min(self._within(CLOSE), key=plainness), self.best.edges]
        if self.single is not None and min(map(len, first)) > 1:
            first.append(self.single.edges)
        near, close = (self._within(times) for times in (NEAR, CLOSE))
        order = dict.fromkeys([*first, *first_of_meshes([*first, *near]), *close])
        by_edges = {way.edges: way for way in self.ways}
        return [by_edges[edges] for edges in order][:TRIED]

    def _within(self, times: float) -> list[tuple[Edge, ...]]:
        """Ways that take so many times the seconds of the fastest at most, of one layout first."""
        near = [way.edges for way in self.ways if way.seconds <= times * self.ways[0].seconds]
        return sorted(near, key=lambda edges: len(edges) > 1)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage seldom. What a search drops goes by reference counts; passes over what it keeps took a quarter of its time."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@seldom_collected()
def search(task: Task, tell: Callable[[str], None] = lambda line: None, single: bool = False) -> Choice:
    """The best ways of a task. `tell`: what is being done; `single`: whether only one layout for all documents is looked for. Raises
    UsageError where home is on a disk of which nothing is known."""
    if "disk" in task.home.named and task.cluster.disk is None:
        raise UsageError(
            f"home: {task.home}: nothing is known of a disk of {task.cluster.name}: plan from a file of longshift profile -o on such a "
            "machine, or write home=host"
        )
    problem = Problem.of(task)
    replay = Replay(task, tell)
    single = single or task.wire.weights != "compute"  # a switch must not take coded weights
    tell(f"{problem.known.total:,} layouts of {task.world} ranks compared")

    # 1. Ways of whole packs.
    table = compare(problem, task.budget_bytes)
    ways = _named(table, single)
    for share in SHARES:
        ways += _named(compare(problem, share * task.budget_bytes), single)
    for share in SMALL_SHARES:
        if sum(map(replay.fits, ways)) < ENOUGH:
            ways += _named(compare(problem, share * task.budget_bytes), single)

    # 2. Streamed ones.
    if not any(map(replay.fits, ways)):
        tell("no whole pack fits; trying streamed layouts")
        ways += _streamed(table, single)

    # 3. On the ledger and the clock.
    ways = list(dict.fromkeys(ways))
    fastest = tuple(replay.fastest(ways))
    lacking = [(way, *replay.lacks(way.edges)) for way in map(replay.way, ways) if not replay.fits(way.edges)]
    choice = Choice(
        ways=fastest,
        short=tuple(sorted(((way, int(lack), place) for way, lack, place in lacking), key=lambda row: row[1])),
        candidates=problem.known.total,
        refused=_refused(table),
        rivals=_rivals(table),
        changes=() if fastest else tuple(remedies(problem)),
    )
    while unsure := [way for way in (*choice.worth_trying(), choice.single, choice.context_parallel) if way and not way.sure]:
        choice = replace(choice, ways=tuple(replay.surer(choice.ways, unsure)))
    return choice


def _named(table: CandidateTable, single: bool = False) -> list[tuple[Edge, ...]]:
    """Of a shortlist the first NAMED ways, as many of one cut of the weights, and the first NAMED_SINGLES of one layout."""
    listed = [way.edges for way in (table.singles if single else shortlist(table))]
    of_one_cut = [edges for edges in listed if len(edges) > 1 and one_cut(edges)]
    singles = [edges for edges in listed if len(edges) == 1]
    return list(dict.fromkeys([*listed[:NAMED], *of_one_cut[:NAMED], *singles[:NAMED_SINGLES]]))


def _streamed(table: CandidateTable, single: bool) -> list[tuple[Edge, ...]]:
    """Streamed layouts for all documents; and for those longer than whole packs can be, with the best ways for the shorter ones."""
    problem, task = table.problem, table.problem.task
    ways = [(Edge(task.longest, layout),) for layout in streamed_layouts(problem, 0)]
    number = table.longest_fitting
    if single or number in (0, len(problem.tally.edges)):
        return ways
    upto, tokens = int(problem.tally.edges[number - 1]), int(problem.tally.sums[number, 1])
    lengths = task.lengths
    is_short = lengths.lengths <= upto
    short = replace(task, lengths=Lengths(lengths.lengths[is_short], lengths.counts[is_short]), tokens_per_step=tokens)
    of_short = Problem.of(short)
    named = _named(compare(of_short, SHARES[0] * task.budget_bytes))
    long = streamed_layouts(problem, number)
    return [*ways, *((*edges, Edge(task.longest, layout)) for layout in long for edges in named[:NAMED])]


def _refused(table: CandidateTable) -> dict[str, int]:
    """How many candidates are impossible, by reason, or too large for any packs."""
    shortest = table.problem.tally.edges[table.keys[0] - 1]
    reason = f"weights, state and packs of {shortest} tokens above the device's memory"
    refused = dict(table.problem.known.refused)
    return refused | {reason: table.too_large} if table.too_large else refused


def _rivals(table: CandidateTable) -> tuple[Rival, ...]:
    return too_large(table, table.singles[0].seconds, MOST_RIVALS) if table.singles else ()
