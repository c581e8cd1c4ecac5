"""Search: the groups of lengths, and the layout and packs of each, that take a step least time; and why not others.

    candidates ─ rules ─> possible ─ bound ─> fit some length ─ best at each length ─> survivors ─ program ─> assignments ─ real draws ─> choice

The best single layout of all candidates, and the best assignment that changes ring, Ulysses and dp alone ("context parallelism only", what
dynamic context parallelism of other systems can choose), are always among what is compared. A pure function of its arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.layout import format_size
from longshift.planner.assign import assignments, cut_at, tally
from longshift.planner.chosen import GIB, Answer, Choice, Chosen, Rival
from longshift.planner.loads import Dealing, dealt, dealt_seconds, drawn, present, switch_seconds
from longshift.planner.meshes import Fixed, Layouts, enumerate_layouts
from longshift.planner.survive import (
    MESH,
    Compared,
    Problem,
    best_static,
    capacities,
    compared,
    families,
    survivors,
    take_shared,
)
from longshift.simulate.closed import BAND, model_flops
from longshift.simulate.cost import LONGSHIFT, Cost, Habits, sizes
from longshift.simulate.rates import Constants, rates
from longshift.spec.model import ModelSpec

MOST_DRAWS = 8
MOST_DEALT = 12_000  # documents that are dealt in all draws: some 10 us each
AHEAD_BYTES = 256 << 20  # as `switch.itinerary.SwitchOptions`
HALVINGS = 3  # of a layout's largest packs, that are compared
MOST_RIVALS = 6
NEAR = 4096  # candidates that do not fit and are nearest to it
MOST_DEVICES = 64  # times as many are tried where nothing fits


@dataclass(frozen=True, eq=False)
class Proposal:
    """An assignment as it is compared: groups (edge before, edge, row of `pool`, capacity), edges by number; `pool`: layouts."""

    groups: tuple[tuple[int, int, int, int], ...]


def search(
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
    constants: Constants | None = None,
    ahead_bytes: float = AHEAD_BYTES,
    seed: int = 0,
) -> Choice:
    """The choice for documents of these `lengths` (int64, ascending), so many of each (`counts`), on all devices of `cluster`.

    `fixed`: what a person decided, as {"tp": [1, 2, 4]}; `memory_bytes`: of a device, the cluster's where not given. Documents longer than
    `max_len` are split. Where nothing fits, the choice says by how much and which small changes would help. Raises UsageError.
    """
    lengths, counts = cut_at(lengths, counts, max_len)
    cost = Cost(sizes(spec), rates(cluster, precision, constants), habits)
    budget = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    problem = Problem(spec, cost, precision, tally(lengths, counts, tokens_per_step, max_len), tokens_per_step, budget)
    known = enumerate_layouts(spec, cluster.devices, fixed)
    found = compared(problem, known.layouts)
    told = {"devices": cluster.devices, "max_len": max_len, "budget_bytes": budget, "candidates": known.total}
    refused = {**known.refused, **found.refused}
    if not np.isfinite(found.seconds[:, -1]).any():
        return Choice(**told, refused=refused, binding="nothing")
    return _Search(problem, known.layouts, found, lengths, counts, ahead_bytes, seed).choice(told, refused)


class _Search:
    """A search while it goes on. Mutable."""

    def __init__(
        self,
        problem: Problem,
        at: Layouts,
        found: Compared,
        lengths: np.ndarray,
        counts: np.ndarray,
        ahead_bytes: float,
        seed: int,
    ):
        self.problem, self.at, self.found = problem, at, found
        self.lengths, self.counts, self.ahead_bytes, self.seed = lengths, counts, ahead_bytes, seed
        self.statics = best_static(problem, at, found)
        chosen = survivors(at, found, int(self.statics[0][0]))
        alike = families(at, found)
        numbers = np.unique(np.concatenate([chosen, *alike]))
        self.pool = _joined(take_shared(at.take(numbers)), at.take(self.statics[0][:1]))
        self.single = len(numbers)  # its row of the pool
        self.rows = {int(number): row for row, number in enumerate(numbers)}
        self.alike = [[self.rows[int(number)] for number in some] for some in alike]
        self.switch_s = switch_seconds(problem.cost, self.pool, problem.spec.layers > 0, ahead_bytes)

    def choice(self, told: dict, refused: dict[str, int]) -> Choice:
        problem, edges = self.problem, self.problem.tally.edges
        every = self._proposals(list(range(self.single)))
        static = Proposal(((0, len(edges), self.single, int(self.statics[1][0])),))
        alike = [one for rows in self.alike for one in self._proposals(rows)[:2]]
        proposals = list({one.groups: one for one in [static, *every, *alike]}.values())
        seconds, by_group, optimizer = self._on_draws(proposals)
        least = int(np.argmin(seconds))
        cp = [n for n, one in enumerate(proposals) if self._context_parallel(one)]
        only_cp = min(cp, key=lambda n: seconds[n])
        answers = {
            name: self._answer(proposals[n], by_group[n], float(seconds[n])) for name, n in (("best", least), ("single", 0), ("cp", only_cp))
        }
        flops = model_flops(problem.cost.sizes, problem.tally.tokens[-1], problem.tally.squares[-1] / 2, problem.spec.parameters)
        peak = problem.cost.rates.matmul_flops_per_s
        return Choice(
            **told,
            refused=refused,
            best=answers["best"],
            single=answers["single"],
            context_parallel=answers["cp"],
            band=BAND,
            mfu={name: float(value / (seconds[least] * told["devices"] * peak)) for name, value in flops.items()},
            rivals=self._rivals(),
        )

    def _proposals(self, rows: list[int]) -> list[Proposal]:
        """The best assignments of these layouts under the model."""
        problem, some = self.problem, self.pool.take(np.array(rows))
        edges, count = problem.tally.edges, len(problem.tally.edges)
        i, j = (axis.reshape(-1) for axis in np.triu_indices(count + 1, 1))
        cost = np.full((count, count + 1, len(rows)), np.inf)
        packs = np.zeros((count, count + 1, len(rows)), np.int64)
        documents, _, _ = problem.tally.between(i, j)
        often = np.zeros((count, count + 1))
        often[i, j] = present(documents)
        largest = capacities(problem, some, int(edges[-1]))
        k = np.tile(np.arange(len(rows)), len(i))
        pair_i, pair_j = np.repeat(i, len(rows)), np.repeat(j, len(rows))
        edge = edges[pair_j - 1].astype(float)
        least = np.minimum(2.0 ** np.ceil(np.log2(edge)), np.where(edge <= largest[k], largest[k], edge))
        seen = np.zeros(len(k))
        for halving in range(-1, HALVINGS):
            capacity = least if halving < 0 else largest[k] / 2.0 ** (HALVINGS - 1 - halving)
            able = (capacity >= edge) & (capacity <= largest[k]) & (capacity > seen)
            if not able.any():
                continue
            where = pair_i[able], pair_j[able], k[able]
            seconds, optimizer = problem.expected(some.take(k[able]), capacity[able], pair_i[able], pair_j[able])
            better = seconds < cost[where] * (1 - 1e-6)
            better |= ~np.isfinite(cost[where])
            cost[where] = np.where(better, seconds, cost[where])
            packs[where] = np.where(better, capacity[able], packs[where])
            seen = np.where(able, capacity, seen)
        _, optimizer = problem.expected(some, largest, 0, count)
        found = assignments(cost, often, self._hops(rows), optimizer)
        return [Proposal(tuple(self._groups(one.ends, one.layouts, rows, packs))) for one in found]

    @staticmethod
    def _groups(ends: Sequence[int], layouts: Sequence[int], rows: list[int], packs: np.ndarray):
        for before, end, k in zip((0, *ends), ends, layouts):
            yield before, end, rows[k], int(packs[before, end, k])

    def _hops(self, rows: list[int]) -> np.ndarray:
        """Seconds to enter each of these layouts from each: 0 where they cut the model alike."""
        cuts = np.stack([self.pool.tp, self.pool.pp, self.pool.virtual], 1)[rows]
        return np.where((cuts[:, None] == cuts[None]).all(2), 0.0, self.switch_s[rows][None])

    def _on_draws(self, proposals: Sequence[Proposal]) -> tuple[np.ndarray, list[list[float]], np.ndarray]:
        """Mean seconds of real steps under each proposal, and of its groups."""
        problem, edges = self.problem, (0, *map(int, self.problem.tally.edges))
        of_step = problem.tally.documents[-1]
        draws = int(np.clip(MOST_DEALT // max(1.0, of_step * len(proposals)), 1, MOST_DRAWS))
        documents = drawn(self.lengths, self.counts, problem.tokens_per_step, draws, self.seed)
        known: dict[tuple, list] = {}
        numbers: dict[tuple, int] = {}
        groups = []
        for proposal in proposals:
            for before, end, row, capacity in proposal.groups:
                how = Dealing(edges[before], edges[end], capacity, int(self.pool.dp[row]))
                for draw in range(draws):
                    if (draw, how) not in known:
                        known[draw, how] = dealt(documents[draw], how, problem.spec)
                    if (draw, how, row) not in numbers:
                        numbers[draw, how, row] = len(groups)
                        groups.append((row, known[draw, how]))
        of_group = dealt_seconds(problem.cost, problem.spec, self.pool, groups)
        longest = float(edges[-1])
        _, optimizer = problem.expected(self.pool, longest, 0, len(edges) - 1)
        seconds, by_group = np.zeros(len(proposals)), []
        for number, proposal in enumerate(proposals):
            own = np.zeros((draws, len(proposal.groups)))
            switched = np.zeros(draws)
            for draw in range(draws):
                cuts = {self._cut(proposal.groups[-1][2])}
                for index, (before, end, row, capacity) in enumerate(proposal.groups):
                    how = Dealing(edges[before], edges[end], capacity, int(self.pool.dp[row]))
                    own[draw, index] = of_group[numbers[draw, how, row]]
                    if known[draw, how] and self._cut(row) not in cuts:
                        cuts.add(self._cut(row))
                        switched[draw] += self.switch_s[row]
            by_group.append([*own.mean(0).tolist(), float(switched.mean())])
            seconds[number] = own.sum(1).mean() + switched.mean() + optimizer[proposal.groups[-1][2]]
        return seconds, by_group, optimizer

    def _cut(self, row: int) -> tuple[int, int, int]:
        return int(self.pool.tp[row]), int(self.pool.pp[row]), int(self.pool.virtual[row])

    def _context_parallel(self, proposal: Proposal) -> bool:
        """Whether its layouts differ in ring, Ulysses and dp alone."""
        rows = [row for _, _, row, _ in proposal.groups]
        same = ("tp", "pp", "virtual", "order", "zero", "recompute")
        return all(len({int(getattr(self.pool, name)[row]) for row in rows}) == 1 for name in same)

    def _answer(self, proposal: Proposal, seconds: Sequence[float], total: float) -> Answer:
        tally_, edges = self.problem.tally, self.problem.tally.edges
        groups = []
        for (before, end, row, capacity), own in zip(proposal.groups, seconds):
            documents, tokens, _ = tally_.between(before, end)
            one = self.pool.take(np.array([row]))
            need = float(self.problem.bytes(one, float(capacity))[0])
            shares = float(documents / tally_.documents[-1]), float(tokens / tally_.tokens[-1])
            speed = float(tokens) / own if own else 0.0
            groups.append(Chosen(int(edges[end - 1]), str(one.layout(0)), capacity, *shares, own, speed, need))
        return Answer(tuple(groups), total, seconds[-1])

    def _rivals(self) -> tuple[Rival, ...]:
        """The best single layouts of other meshes, and faster ones that do not fit."""
        numbers, _, seconds = self.statics
        first, seen, found = self.at.take(numbers[:1]), set(), []
        for number, one in zip(numbers, seconds):
            layout = self.at.layout(int(number))
            key = tuple(getattr(layout, name) for name in MESH)
            if key not in seen and len(seen) < MOST_RIVALS:
                seen.add(key)
                found.append(Rival(str(layout), float(one / seconds[0] - 1), 0.0))
        return tuple(found[1:])


def _joined(*some: Layouts) -> Layouts:
    return Layouts(*(np.concatenate([getattr(one, f.name) for one in some]) for f in fields(Layouts)))
