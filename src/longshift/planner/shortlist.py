"""Shortlist: the few assignments of documents to layouts that take a step least time in closed form; and why not others.

    candidates ─ rules ─> possible ─ bound ─> fit some length ─ best at each length ─> survivors ─ program ─> assignments ─ typical steps ─>
    ledger

The best single layouts of all candidates, and the best assignments that change ring, Ulysses and dp alone ("context parallelism only", what
dynamic context parallelism of other systems can choose), are always among what is compared. A pure function of its arguments.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.home_tiers import HomeTiers
from longshift.model.kernel_calls import LONG
from longshift.planner.assign import assignments, cut_at, tally
from longshift.planner.chosen import Answer, Chosen, Rival, Shortlist
from longshift.planner.enumerated import Fixed, Meshes, enumerate_layouts
from longshift.planner.least_bytes import reserved
from longshift.planner.loads import Dealing, dealt, dealt_seconds, present, switch_seconds
from longshift.planner.remedies import binding, remedies, too_large
from longshift.planner.siblings import meshes
from longshift.planner.streaming import Streamed, streamed
from longshift.planner.survive import FAMILY, MESH, Compared, Problem, best_static, capacities, compared, families, survivors, take_shared
from longshift.simulate.cost import LONGSHIFT, Cost, Habits
from longshift.simulate.rates import rates
from longshift.spec.formats import Format, MomentFormat, Wire, formats_of
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Itinerary, SwitchOptions
from longshift.switch.links import links_of
from longshift.weigh.needs import StepShape
from longshift.workload.given import Lengths
from longshift.workload.groups import Edge

MOST_STEPS = 8
MOST_DEALT = 12_000  # documents that are dealt in all steps: some 10 us each
AHEAD_BYTES = float(SwitchOptions().ahead_bytes)
HALVINGS = 3  # of a layout's largest packs, that are compared
MOST_SINGLES = 8  # single layouts of different meshes whose packs are dealt
WORTH = 0.01  # of a step's seconds, that another round may gain
KINDS = ("best", "single", "context parallel")
ROUNDS, MOST_ROUNDS = 3, 12  # of a search: the next one knows which families need more than their bounds say; where nothing fits yet
TOLD, TOLD_SINGLES = 5, 3  # assignments that a shortlist names besides its best, and single layouts among these, at least
SELDOM = (200_000, 20, 20)  # of `gc.set_threshold`


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage seldom. What a search drops goes by reference counts; passes over what it keeps took a quarter of its time."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True)
class Proposal:
    """An assignment: groups as (edge before, edge, row of the pool of layouts, capacity of packs), edges by number from 0."""

    groups: tuple[tuple[int, int, int, int], ...]


@seldom_collected()
def shortlist(
    spec: ModelSpec,
    cluster: Cluster,
    lengths: np.ndarray,
    counts: np.ndarray,
    tokens_per_step: int,
    max_len: int,
    precision: str = "bf16",
    fixed: Fixed | None = None,
    memory_bytes: float | None = None,
    habits: Habits = LONGSHIFT,
    ahead_bytes: float = AHEAD_BYTES,
    moments: int = 2,
    packed: MomentFormat = "float32",
    wire: Wire = Wire(),  # noqa: B008  (frozen)
    home: HomeTiers = HomeTiers(),  # noqa: B008  (frozen)
) -> Shortlist:
    """The best assignments for documents of these `lengths` (int64, ascending), so many of each (`counts`), on all devices of `cluster`.

    `fixed`: what a person decided, as {"tp": [1, 2, 4]}; `memory_bytes`: of a device, the cluster's where not given; `moments`: how
    many the optimizer keeps, `packed` into this format between updates; `wire`: formats of what travels; `home`: where the training
    state lies. Documents longer than `max_len` are split. Where nothing fits, the shortlist says by how much and which changes would help,
    the smallest first. Raises UsageError.
    """
    lengths, counts = cut_at(np.asarray(lengths, np.int64), np.asarray(counts, np.int64), max_len)
    cost = Cost(spec, rates(cluster, precision), habits)
    formats = formats_of(precision, moments, packed, wire)
    budget = float(cluster.device.memory_bytes if memory_bytes is None else memory_bytes)
    known = enumerate_layouts(spec, cluster.devices, fixed, formats.float8)
    everything = tally(spec, lengths, counts, tokens_per_step, max_len)
    told = {"devices": cluster.devices, "max_len": max_len, "budget_bytes": budget, "candidates": known.total}
    refused: Mapping[str, int] = known.refused
    ledger = _Weigher(spec, cluster, formats, tokens_per_step, budget, home)
    found: list[dict[str, Answer]] = []
    before: Compared | None = None
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and any("best" in one for one in found):
            break
        over = tuple(sorted(ledger.over.items()))
        problem = Problem(spec, cost, formats, everything, tokens_per_step, budget, ledger.on_cpu, home.outside(ledger.on_cpu), over)
        at_keys = before = compared(problem, known.meshes, before)
        if number == 0:
            refused = {**known.refused, **at_keys.refused}
        if not np.isfinite(at_keys.seconds[:, -1]).any():
            break
        made = _Comparison(problem, known.meshes, at_keys, lengths, counts, ahead_bytes)
        found.append(made.answers(ledger))
        if len(found[-1]) == len(KINDS) and found[-1]["best"].seconds <= made.seconds.min() * (1 + WORTH):
            break
    answers = {name: min((one[name] for one in found if name in one), key=lambda answer: answer.seconds) for one in found for name in one}
    if "best" not in answers:
        need, changes = remedies(problem, cluster, known.meshes, fixed or {})
        none = Shortlist(**told, refused=refused, binding=need, changes=changes)
        shorter = _longest_whole(problem, at_keys)
        more = sums_of_others(problem, cluster.devices) if shorter else 0.0
        one = streamed(problem, cluster, known.meshes, shorter, more, home)
        if one is None:
            return none
        answers["best"] = answers["single"] = _streamed_answer(problem, one, 0)
        if shorter:
            upto, tokens = int(everything.edges[shorter - 1]), int(everything.tokens[shorter])
            short = lengths <= upto
            under = (precision, fixed, budget - more, habits, ahead_bytes, moments, packed, wire, home)
            part = shortlist(spec, cluster, lengths[short], counts[short], tokens, upto, *under).best
            if part is not None:
                both = _both(problem, part, _streamed_answer(problem, one, shorter), shorter)
                answers["best"] = min(both, answers["best"], key=lambda answer: answer.seconds)
        return replace(
            none,
            best=answers["best"],
            single=answers["single"],
            binding=f"streamed, as {need}",
            changes=(),
        )
    best = min(answers.values(), key=lambda answer: answer.seconds)
    return Shortlist(
        **told,
        refused=refused,
        best=best,
        single=answers.get("single"),
        context_parallel=answers.get("context parallel"),
        others=made.others(best),
        rivals=(*(made.rivals(answers["single"]) if "single" in answers else ()), *too_large(problem, known.meshes, at_keys, made.statics)),
        binding=binding(budget, best),
    )


def sums_of_others(problem: Problem, world: int) -> float:
    """Bytes of a device that gradients take which have come home from one cut, while another one's groups are computed."""
    return 0.0 if problem.outside else float(reserved(problem.formats.home_bytes * problem.spec.learned / world, on_cpu=True))


def _longest_whole(problem: Problem, found: Compared) -> int:
    """The longest key length below the longest, as a number of its edge, that some layout of whole packs fits; 0 where there is none."""
    able = np.isfinite(found.seconds).any(0) & (problem.tally.documents[found.keys] > 0) & (found.keys < len(problem.tally.edges))
    return int(found.keys[able].max(initial=0))


def _streamed_answer(problem: Problem, one: Streamed, before: int) -> Answer:
    """A streamed layout for all documents longer than edge `before`."""
    seconds = one.seconds(problem, before)
    sums, count = problem.tally, len(problem.tally.edges)
    documents, tokens, *_ = sums.between(before, count)
    shares = float(documents / sums.documents[-1]), float(tokens / sums.tokens[-1])
    longest = int(sums.edges[-1])
    told = seconds, float(tokens) / seconds, one.device_bytes, one.host_bytes, one.disk_bytes
    return Answer((Chosen(longest, str(one.layout), longest, *shares, *told),), seconds)


def _both(problem: Problem, short: Answer, long: Answer, edge: int) -> Answer:
    """Groups of whole packs for documents of up to an edge, and the streamed group of longer ones."""
    documents = float(problem.tally.documents[edge] / problem.tally.documents[-1])
    tokens = float(problem.tally.tokens[edge] / problem.tally.tokens[-1])
    groups = tuple(replace(one, documents=one.documents * documents, tokens=one.tokens * tokens) for one in short.groups)
    return Answer((*groups, *long.groups), short.seconds + long.seconds, short.switch_seconds)


class _Weigher:
    """What the ledger says of single groups. Mutable: it keeps what it has weighed. `over`: by family, the ledger's bytes over the bound's
    where these did not fit."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, formats: Format, tokens_per_step: int, budget_bytes: float, home: HomeTiers):
        self.home, self.spec, self.formats, self.tokens, self.on_cpu = home, spec, formats, tokens_per_step, cluster.device.kind == "cpu"
        self.links, self.budget_bytes = links_of(cluster, cluster.devices_per_node, cluster.nodes), budget_bytes
        self.known: dict[tuple[str, int, int], float] = {}
        self.over: dict[tuple[int, ...], float] = {}

    def reserved(self, at: Meshes, row: int, capacity: int, longest: int, bound: float) -> float:
        """Bytes of a device that the largest step with this group alone asks for, of the first and the last stage; of a layout whose
        family is known to need more than its `bound`, that much more without weighing it."""
        one = at.take(np.array([row]))
        layout, family = one.layout(0), tuple(int(getattr(one, name)[0]) for name in FAMILY)
        # On a GPU attention holds as much whatever the documents, but for long ones, which are calls of their own.
        key = str(layout), capacity, longest if self.on_cpu or longest >= LONG else 0
        if key not in self.known:
            if bound * self.over.get(family, 1.0) > self.budget_bytes:
                return bound * self.over.get(family, 1.0)
            edges = (Edge(capacity, layout),)
            way = Itinerary(self.spec, edges, self.links, self.formats.compute_bytes, self.formats.home_bytes, SwitchOptions())
            shape = StepShape(way, edges, self.formats, self.tokens, longest, home_in=self.home, early=False)
            stages = {0, layout.world - layout.world // layout.pp}
            weighed = [shape.weighed(edges, rank, "gloo" if self.on_cpu else "nccl", self.on_cpu).device for rank in stages]
            self.known[key] = float(reserved(max(weighed), self.on_cpu))
            if self.known[key] > self.budget_bytes:
                self.over[family] = max(self.over.get(family, 1.0), self.known[key] / bound)
        return self.known[key]


class _Comparison:
    """Assignments on typical steps, within one budget for the bound. Mutable while it is made."""

    def __init__(self, problem: Problem, at: Meshes, found: Compared, lengths: np.ndarray, counts: np.ndarray, ahead_bytes: float):
        self.problem, self.at = problem, at
        self.statics = best_static(problem, at, found)
        self.edges = (0, *map(int, problem.tally.edges))
        alike = families(at, found)
        numbers = np.unique(np.concatenate([survivors(at, found, int(self.statics.numbers[0])), *alike]))
        singles = self._singles()
        self.pool = _joined(take_shared(at.take(numbers)), at.take(self.statics.numbers[singles]))
        rows = {int(number): row for row, number in enumerate(numbers)}
        self.switch_s = switch_seconds(problem.cost, self.pool, 2.0 - problem.spec.tied, ahead_bytes)
        last = len(self.edges) - 1
        _, self.once_s = problem.expected(self.pool, float(self.edges[-1]), 0, last)
        self.more_bytes = sums_of_others(problem, int(np.prod(self.pool.columns()[0, :5])))
        self.table = self._table(np.arange(len(numbers)))
        some = [Proposal(((0, last, len(numbers) + n, int(self.statics.packs[single])),)) for n, single in enumerate(singles)]
        every = np.arange(len(numbers))
        some += self._proposals(every) + self._proposals(every, self.more_bytes)
        for family in alike:
            some += self._proposals(np.array([rows[int(number)] for number in family]))[:3]
        self.proposals = list(dict.fromkeys(some))
        self.bounds, self.bytes = self._bytes()
        self.seconds, self.parts = self._on_steps(lengths, counts)

    def _bytes(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """`Problem.bound` and `Problem.bytes` of each row and pack of the proposals."""
        pairs = list({group[2:]: None for proposal in self.proposals for group in proposal.groups})
        rows, packs = map(np.array, zip(*pairs))
        found = (says(self.pool.take(rows), packs.astype(float)) for says in (self.problem.bound, self.problem.bytes))
        bound, needed = (dict(zip(pairs, one.tolist())) for one in found)
        return bound, needed

    def answers(self, ledger: _Weigher) -> dict[str, Answer]:
        """The best, the best single layout, and the best that changes context parallelism alone, of those that the ledger lets through."""
        order = [int(n) for n in np.argsort(self.seconds, kind="stable")]
        singles = [n for n in order if len(self.proposals[n].groups) == 1]
        alike = [n for n in order if self._context_parallel(self.proposals[n])]
        found = {}
        for name, some in zip(KINDS, (order, singles, alike)):
            for number in some:
                if (needed := self._needed(number, ledger)) is not None:
                    found[name] = self._answer(number, needed)
                    break
        return found

    def _needed(self, number: int, ledger: _Weigher) -> list[float] | None:
        """Bytes of a device for each group of a proposal; None where one does not fit. Those whose bounds leave much are weighed last, and
        of equal bounds those of the longest documents first."""
        groups = self.proposals[number].groups
        more = self.more_bytes if len({self._cut(row) for _, _, row, _ in groups}) > 1 else 0.0
        found = dict[int, float]()
        for place in sorted(range(len(groups)), key=lambda n: (-self.bytes[groups[n][2:]], -n)):
            _, end, row, pack = groups[place]
            found[place] = ledger.reserved(self.pool, row, pack, self.edges[end], self.bounds[row, pack]) + more
            if found[place] > self.problem.budget_bytes:
                return None
        return [found[place] for place in range(len(groups))]

    def others(self, best: Answer) -> tuple[Answer, ...]:
        """The TOLD next best assignments, and the next best single layouts until TOLD_SINGLES are among them, each of other meshes, with
        what their bounds say of memory."""
        found, seen = list[Answer](), {meshes(best.edges)}
        for number in map(int, np.argsort(self.seconds, kind="stable")):
            groups = self.proposals[number].groups
            if len(found) >= TOLD and (len(groups) > 1 or sum(len(other.groups) == 1 for other in found) >= TOLD_SINGLES):
                continue
            more = self.more_bytes if len({self._cut(row) for _, _, row, _ in groups}) > 1 else 0.0
            needed = [self.bytes[group[2:]] + more for group in groups]
            answer = self._answer(number, needed)
            if meshes(answer.edges) not in seen and answer.seconds >= best.seconds and max(needed) <= self.problem.budget_bytes:
                seen.add(meshes(answer.edges))
                found.append(answer)
        return tuple(found)

    def rivals(self, single: Answer) -> tuple[Rival, ...]:
        """The next best single layouts, each of another mesh, and how much slower than the best one they are."""
        found, own = dict[tuple, Rival](), tuple(getattr(single.edges[0].use, name) for name in MESH)
        for number in map(int, np.argsort(self.seconds, kind="stable")):
            if len(self.proposals[number].groups) == 1:
                layout = self.pool.layout(self.proposals[number].groups[0][2])
                mesh = tuple(getattr(layout, name) for name in MESH)
                slower = float(self.seconds[number] / single.seconds - 1)
                if slower >= 0 and mesh != own:
                    found.setdefault(mesh, Rival(str(layout), slower, 0.0))
        return tuple(found.values())[: MOST_SINGLES - 1]

    def _singles(self) -> list[int]:
        """Of the best single layouts, the best one of each mesh and the best one of each family, by place in `statics`."""
        places = set[int]()
        for names in (MESH, FAMILY):
            kinds = np.stack([getattr(self.at, name)[self.statics.numbers] for name in names], 1)
            _, first = np.unique(kinds, axis=0, return_index=True)
            places |= set(np.sort(first)[:MOST_SINGLES].tolist())
        return sorted(places)

    def _proposals(self, rows: np.ndarray, more_bytes: float = 0.0) -> list[Proposal]:
        """The best assignments to these rows of the pool as expected, of groups that leave so many bytes of a device. Neighbours with one
        layout and equal packs are one group."""
        cost, packs, often = self.table
        if more_bytes:
            i, j, k = np.nonzero(np.isfinite(cost))
            needed = self.problem.bytes(self.pool.take(k), packs[i, j, k].astype(float)) + more_bytes
            cost = cost.copy()
            cost[i, j, k] = np.where(needed <= self.problem.budget_bytes, cost[i, j, k], np.inf)
        found = []
        for one in assignments(cost[:, :, rows], often, self._hops(rows), self.once_s[rows]):
            groups: list[tuple[int, int, int, int]] = []
            for before, end, k in zip((0, *one.ends), one.ends, one.layouts):
                row, capacity = int(rows[k]), int(packs[before, end, rows[k]])
                if groups and groups[-1][2:] == (row, capacity):
                    before = groups.pop()[0]
                groups.append((before, end, row, capacity))
            found.append(Proposal(tuple(groups)))
        return found

    def _table(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Expected seconds of documents between two edges under each layout, [E, E + 1, K], in the packs that take least; these packs; and
        how often a step has such documents, [E, E + 1]."""
        problem, some, count = self.problem, self.pool.take(rows), len(self.edges) - 1
        i, j = np.triu_indices(count + 1, 1)
        often = np.zeros((count, count + 1))
        often[i, j] = present(problem.tally.between(i, j)[0])
        largest = capacities(problem, some, self.edges[-1])
        k, i, j = np.tile(np.arange(len(rows)), len(i)), np.repeat(i, len(rows)), np.repeat(j, len(rows))
        edge, most = np.array(self.edges, float)[j], largest[k]
        least = 2.0 ** np.ceil(np.log2(edge))
        least = np.where(least <= most, least, edge)
        tried = np.maximum(least, most / 2.0 ** np.arange(HALVINGS, -1, -1)[:, None])  # [halvings + 1, groups], ascending
        able = tried <= most
        able[1:] &= tried[1:] > tried[:-1]
        seconds, (_, which) = np.full(tried.shape, np.inf), np.nonzero(able)
        seconds[able], _ = problem.expected(some.take(k[which]), tried[able], i[which], j[which])
        best, pack = np.full(len(k), np.inf), np.zeros(len(k))
        for capacity, taken in zip(tried, seconds):
            better = ~(taken >= best * (1 - 1e-6))
            best, pack = np.where(better, taken, best), np.where(better, capacity, pack)
        cost, packs = np.full((count, count + 1, len(rows)), np.inf), np.zeros((count, count + 1, len(rows)), np.int64)
        cost[i, j, k], packs[i, j, k] = best, pack.astype(np.int64)
        return cost, packs, often

    def _hops(self, rows: np.ndarray) -> np.ndarray:
        """Seconds to enter each of these layouts from each: 0 where they cut the model alike."""
        cuts = np.stack([self.pool.tp, self.pool.pp, self.pool.virtual], 1)[rows]
        return np.where((cuts[:, None] == cuts[None]).all(2), 0.0, self.switch_s[rows][None])

    def _on_steps(self, lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, list[list[float]]]:
        """Mean seconds of typical steps under each proposal; and those of its groups and, last, of its switches. Groups that no step has
        count as expected."""
        problem = self.problem
        count = int(np.clip(MOST_DEALT // max(1.0, problem.tally.documents[-1] * len(self.proposals)), 1, MOST_STEPS))
        steps = Lengths(lengths, counts).typical(count, problem.tokens_per_step)
        numbers: dict[tuple[int, Dealing, int], int] = {}
        known: dict[tuple[int, Dealing], list] = {}
        work = []
        for how, row in {(self._dealing(group), group[2]): None for proposal in self.proposals for group in proposal.groups}:
            for step, documents in enumerate(steps):
                if (step, how) not in known:
                    known[step, how] = dealt(documents, how, problem.spec)
                numbers[step, how, row] = len(work)
                work.append((row, known[step, how]))
        of_group = dealt_seconds(problem.cost, problem.spec, self.pool, work)
        seconds, parts = np.zeros(len(self.proposals)), []
        for number, proposal in enumerate(self.proposals):
            groups = [(self._dealing(group), group[2]) for group in proposal.groups]
            own = np.array([[of_group[numbers[step, how, row]] for how, row in groups] for step in range(count)])
            there = [[bool(known[step, how]) for how, _ in groups] for step in range(count)]
            switched = float(np.mean([self._switched(proposal, some) for some in there]))
            of_groups = own.mean(0)
            for place in np.flatnonzero(~np.any(there, 0)):
                of_groups[place] = self._expected(proposal.groups[place])
            parts.append([*of_groups.tolist(), switched])
            seconds[number] = of_groups.sum() + switched + self.once_s[proposal.groups[-1][2]]
        return seconds, parts

    def _expected(self, group: tuple[int, int, int, int]) -> float:
        """Seconds of a group as expected: what counts where its documents are so rare that no step has one."""
        before, end, row, capacity = group
        return float(self.problem.expected(self.pool.take(np.array([row])), float(capacity), before, end)[0][0])

    def _dealing(self, group: tuple[int, int, int, int]) -> Dealing:
        before, end, row, capacity = group
        return Dealing(self.edges[before], self.edges[end], capacity, int(self.pool.dp[row]))

    def _switched(self, proposal: Proposal, there: Sequence[bool]) -> float:
        """Seconds of the switches of a step with these of its groups: each cut but home's is entered once."""
        cuts = {self._cut(proposal.groups[-1][2])}
        seconds = 0.0
        for (_, _, row, _), some in zip(proposal.groups, there):
            if some and self._cut(row) not in cuts:
                cuts.add(self._cut(row))
                seconds += float(self.switch_s[row])
        return seconds

    def _cut(self, row: int) -> tuple[int, int, int]:
        return int(self.pool.tp[row]), int(self.pool.pp[row]), int(self.pool.virtual[row])

    def _context_parallel(self, proposal: Proposal) -> bool:
        """Whether its layouts differ in ring, Ulysses and dp alone."""
        rows = [row for _, _, row, _ in proposal.groups]
        return all(len(set(getattr(self.pool, name)[rows].tolist())) == 1 for name in FAMILY)

    def _answer(self, number: int, needed: Sequence[float]) -> Answer:
        sums, groups = self.problem.tally, []
        for (before, end, row, capacity), own, need in zip(self.proposals[number].groups, self.parts[number], needed):
            documents, tokens, *_ = sums.between(before, end)
            shares = float(documents / sums.documents[-1]), float(tokens / sums.tokens[-1])
            speed = float(tokens) / own if own else 0.0
            groups.append(Chosen(self.edges[end], str(self.pool.layout(row)), capacity, *shares, own, speed, need))
        return Answer(tuple(groups), float(self.seconds[number]), self.parts[number][-1])


def _joined(*some: Meshes) -> Meshes:
    return Meshes(*(np.concatenate([getattr(one, f.name) for one in some]) for f in fields(Meshes)))
