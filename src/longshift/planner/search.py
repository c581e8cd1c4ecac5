"""The best layouts for the documents of a run: one for all, or one for each group of lengths.

    every layout ─ closed form ─> shortlist ─ ledger, clock ─> ways, fastest first

The shortlist (`planner.shortlist`) compares every layout and assignment in closed form. Its best, and the best single layouts among them,
are weighed by the ledger and played on the clock as a run would play them (`planner.replay`); the fastest pipelines again with uneven
stages (`planner.uneven`). What a run would try, and what it is compared with, is played on several steps. So what is chosen is, on the
clock, never worse than the best single layout that was played. Ways that a shortlist names for less memory are among them: what closed
forms put first with more of it may be slower on the clock. Where no whole pack fits, streamed layouts are tried.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from longshift.errors import UsageError
from longshift.layout import legal
from longshift.layout.layout import Layout
from longshift.planner.chosen import Shortlist
from longshift.planner.replay import Replay, Task, Way, one_cut
from longshift.planner.shortlist import seldom_collected, shortlist
from longshift.planner.siblings import first_of_meshes, plainness
from longshift.workload.groups import Edge

BUDGETS = (1.0, 0.9, 0.8, 0.65)  # of a device's memory, that a shortlist may fill: groups together need more than each alone
ENOUGH = 3  # ways that fit
CHUNKS = (1 << 14, 1 << 16)  # of streamed layouts, in tokens
CLOSE = 1.05  # times as many seconds as the fastest way: calibrated clocks were off by 4 to 7 % in the median
NEAR = 1.15  # the same of what is worth trying: of single ways calibrated clocks were off by up to 19 %
TRIED = 6  # ways that a run tries, at most


@dataclass(frozen=True)
class Choice:
    """What a search found. `ways`: those that fit, fastest first; `short`: ways that do not fit, with the bytes that each lacks and where;
    `shortlist`: the first of them, which counts and refuses layouts."""

    ways: tuple[Way, ...]
    short: tuple[tuple[Way, int, str], ...]
    shortlist: Shortlist

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
        found = [way.edges for way in self.ways if way.seconds <= times * self.ways[0].seconds]
        return sorted(found, key=lambda edges: len(edges) > 1)


@seldom_collected()
def search(task: Task, tell: Callable[[str], None] = lambda line: None, single: bool = False) -> Choice:
    """The best ways of a task. `tell`: what is being done; `single`: whether only one layout for all documents is looked for. Raises
    UsageError where home is on a disk of which nothing is known."""
    if "disk" in task.home.named and task.cluster.disk is None:
        raise UsageError(
            f"home: {task.home}: nothing is known of a disk of {task.cluster.name}: plan from a file of longshift profile -o on such a "
            "machine, or write home=host"
        )
    replay = Replay(task, tell)
    listed = _listed(task, BUDGETS[0])
    tell(f"{listed.candidates:,} layouts of {task.world} ranks compared")
    ways = _ways(task, listed, single)
    for part in BUDGETS[1:]:
        if listed.fits:
            less = _listed(task, part)
            found = _ways(task, less if sum(map(replay.fits, ways)) < ENOUGH else replace(less, others=()), single)
            ways = list(dict.fromkeys([*ways, *found]))
    if not any(map(replay.fits, ways)):
        tell("no whole pack fits; trying streamed layouts")
        ways += _streamed(task)
    fastest = tuple(replay.fastest(ways))
    lacking = [(way, *replay.lacks(way.edges)) for way in map(replay.way, ways) if not replay.fits(way.edges)]
    short = sorted(((way, int(lack), place) for way, lack, place in lacking), key=lambda row: row[1])
    found = Choice(fastest, tuple(short), listed)
    while unsure := [way for way in (*found.worth_trying(), found.single, found.context_parallel) if way and not way.sure]:
        found = replace(found, ways=tuple(replay.surer(found.ways, unsure)))
    return found


def _listed(task: Task, part: float) -> Shortlist:
    total = task.cluster.device.memory_bytes if task.memory_bytes is None else task.memory_bytes
    lengths = task.lengths
    return shortlist(
        task.spec,
        task.cluster,
        lengths.lengths,
        lengths.counts,
        task.tokens_per_step,
        task.longest,
        task.precision,
        fixed=task.fixed_degrees,
        memory_bytes=part * total,
        habits=task.habits,
        ahead_bytes=float(task.switch.ahead_bytes),
        moments=task.moments,
        packed=task.packed,
        wire=task.wire,
        home=task.home,
    )


def _ways(task: Task, found: Shortlist, single: bool) -> list[tuple[Edge, ...]]:
    """Assignments of a shortlist. Where `single` is asked for, or gathered weights are coded, only those of one layout: a switch must not
    take coded weights."""
    answers = [one for one in (found.best, found.single, found.context_parallel, *found.others) if one is not None]
    ways = dict.fromkeys(answer.edges for answer in answers)
    return [edges for edges in ways if len(edges) == 1 or (task.wire.weights == "compute" and not single)]


def _streamed(task: Task) -> list[tuple[Edge, ...]]:
    """Single streamed layouts, which need least: sequences over all ranks, Ulysses as far as heads allow."""
    found = []
    ulysses = max(n for n in range(1, task.spec.heads + 1) if task.world % n == 0 and task.spec.heads % n == 0)
    for chunk in CHUNKS:
        for offload in ("device", "host"):
            zero = 3 if task.world > 1 else 0
            layout = Layout(ulysses=ulysses, ring=task.world // ulysses, zero=zero, chunk=chunk, offload=offload)
            if not legal.faults(task.spec, layout, task.world, task.longest):
                found.append((Edge(task.longest, layout),))
    return found
