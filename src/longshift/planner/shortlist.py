"""Shortlist: the plans that rate cards put first. The ledger and the clock
judge them (`planner.plan_evaluator`).

    candidates ─ bound ─> fit packs of some lengths ─ rate cards ─┐
      ┌───────────────────────────────────────────────────────────┘
      ├─> the fastest at each length ─ program over edges ─┬─> plans
      └─> the fastest single layouts ──────────────────────┘

Candidates are compared at a few key lengths. At each, those that fit get the documents between it
and the key before, in packs as small as they may be and as large as fits. A layout that another one
dominates at every key can still be the best in an assignment;
`planner.neighbors` finds most of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longshift.layout.layout import Layout
from longshift.planner.assign import Tally, best_assignments, tally_lengths
from longshift.planner.candidates import (
    ORDERS,
    Candidates,
    Enumeration,
    cut_names,
    enumerate_layouts,
    mesh_choices,
    mesh_names,
)
from longshift.planner.group_seconds import GroupLoad, GroupSeconds, group_seconds
from longshift.planner.memory_bound import Training, min_device_bytes
from longshift.planner.switch_seconds import switch_seconds
from longshift.planner.task import Edges, PlanTask
from longshift.simulate.cost import Cost
from longshift.switch.options import SwitchOptions
from longshift.weigh.needs import micro_counts
from longshift.workload.groups import Edge

KEY_RATIO = 4  # of neighboring key lengths, at least
MAX_KEYS = 6
BEST_AT_KEY = 4  # meshes of each key length, that an assignment chooses among
MAX_LAYOUTS = 16  # of these
MAX_SINGLES = 8  # single layouts, each of another mesh
MAX_RIVALS = 3  # that lack memory
REPACKED = 128  # single layouts that larger packs are tried for
DOUBLINGS = 12  # of packs, down from a step's tokens
HALVINGS = 3  # of the largest packs of a group
MAX_CUTS = 3  # of the best single layouts, that assignments of one cut are looked for
FASTER = 1 - 1e-6  # of the seconds so far: larger packs must gain more than rounding


@dataclass(frozen=True, eq=False)
class Problem:
    """A task as rate cards take it.

    enumeration  all layouts of whole packs
    tally        documents of a mean step
    training     as bounds of memory take it
    """

    task: PlanTask
    enumeration: Enumeration
    tally: Tally
    cost: Cost
    training: Training

    @classmethod
    def of(cls, task: PlanTask) -> "Problem":
        """Raises UsageError if what is fixed does not exist."""
        float8 = task.formats.float8
        return cls(
            task=task,
            enumeration=enumerate_layouts(task.spec, task.world, task.fixed_fields, float8),
            tally=tally_lengths(task.spec, task.lengths, task.tokens_per_step, task.longest),
            cost=task.cost,
            training=task.training,
        )

    @property
    def all_documents(self) -> GroupLoad:
        return self.tally.between(0, len(self.tally.edges))

    def min_bytes(self, candidates: Candidates, capacity: np.ndarray | float) -> np.ndarray:
        """Bytes that a device needs at least in the largest step of packs of `capacity` tokens,
        float64 [candidates]."""
        is_1f1b = candidates.order == ORDERS.index("1f1b")
        step_tokens = capacity * candidates.dp
        num_stages = candidates.pp * candidates.virtual
        longest = np.minimum(capacity, self.task.longest)
        tokens = self.task.tokens_per_step
        micros = micro_counts(tokens, longest, step_tokens, num_stages, is_1f1b)
        return min_device_bytes(self.training, candidates, capacity, micros)

    def seconds(
        self,
        candidates: Candidates,
        capacity: np.ndarray | float,
        load: GroupLoad,
    ) -> GroupSeconds:
        return group_seconds(self.cost, candidates, capacity, load)

    def step_seconds(self, candidates: Candidates, capacity: float, load: GroupLoad) -> np.ndarray:
        """Seconds of steps of one group, float64 [candidates]."""
        seconds = self.seconds(candidates, capacity, load)
        return seconds.group + seconds.once


@dataclass(frozen=True)
class PlanEstimate:
    """A plan, and its seconds by rate cards."""

    edges: Edges
    seconds: float


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """Candidates at key lengths within a budget.

    `keys`: numbers of edges of the tally, 1 to E.
    `seconds`: float64 [candidates, keys], inf where packs of that length do not fit.
    """

    problem: Problem
    budget_bytes: float
    keys: np.ndarray
    seconds: np.ndarray

    @property
    def candidates(self) -> Candidates:
        return self.problem.enumeration.candidates

    @cached_property
    def singles(self) -> list[PlanEstimate]:
        """The best single layout of each mesh that fits the longest documents, fastest first."""
        return _best_singles(self)

    @property
    def num_too_large(self) -> int:
        """Candidates that do not fit packs of the shortest key length."""
        return int(np.isinf(self.seconds[:, 0]).sum())

    @property
    def longest_fitting(self) -> int:
        """Number of the longest key that has documents and fits some layout; 0 if there is none."""
        fits = np.isfinite(self.seconds).any(0)
        has_documents = self.problem.tally.sums[self.keys, 0] > 0
        return int(self.keys[fits & has_documents].max(initial=0))


def compare(problem: Problem, budget_bytes: float) -> CandidateTable:
    """Compare every candidate at every key length."""
    candidates = problem.enumeration.candidates
    keys = _key_edges(problem.tally.edges)
    lengths = problem.tally.edges[keys - 1].astype(float)

    # 1. What does not fit a length fits no longer one.
    fits = np.zeros((len(candidates), len(keys)), bool)
    largest_packs = np.zeros(len(candidates))
    fitting = np.arange(len(candidates))
    for key, length in enumerate(lengths):
        needs = problem.min_bytes(candidates.take(fitting), length)
        fitting = fitting[needs <= budget_bytes]
        fits[fitting, key] = True
        largest_packs[fitting] = length

    # 2. Seconds in packs as small as they may be, and as large as fits.
    row, key = np.nonzero(fits)
    shorter_key = np.concatenate([[0], keys])[key]
    load = problem.tally.between(shorter_key, keys[key])
    seconds = np.full(fits.shape, np.inf)
    for packs in (lengths[key], largest_packs[row]):
        group_s = problem.seconds(candidates.take(row), packs, load).group
        seconds[row, key] = np.minimum(seconds[row, key], group_s)
    return CandidateTable(problem, budget_bytes, keys, seconds)


def _key_edges(edges: np.ndarray) -> np.ndarray:
    """Numbers, 1 to E, of the edges that candidates are compared at, ascending."""
    keys = [len(edges)]
    for number in range(len(edges) - 1, 0, -1):
        if edges[number - 1] * KEY_RATIO <= edges[keys[-1] - 1] and len(keys) < MAX_KEYS:
            keys.append(number)
    return np.array(keys[::-1])


def shortlist(table: CandidateTable) -> list[PlanEstimate]:
    """The best plans by rate cards, fastest first.

    They are single layouts of different meshes, assignments to any layouts, and assignments to
    layouts that cut the weights alike, which switch no weights.
    """
    singles = table.singles
    if not singles:
        return []
    layouts = [single.edges[0].use for single in singles]
    plans = singles + _best_plans(table, _fastest_candidates(table, layouts[0]))
    for cut in list(dict.fromkeys(map(weight_cut, layouts)))[:MAX_CUTS]:
        plans += _best_plans(table, _candidates_of_cut(table, cut))
    return sorted(plans, key=lambda plan: plan.seconds)


def weight_cut(layout: Layout) -> tuple[int, ...]:
    """The degrees that cut the weights."""
    return mesh_choices(layout, cut_names())


def _best_singles(table: CandidateTable) -> list[PlanEstimate]:
    """`CandidateTable.singles`."""
    problem = table.problem
    longest = int(problem.tally.edges[-1])
    load = problem.all_documents

    # 1. The fastest in packs of the longest document.
    fitting = np.flatnonzero(np.isfinite(table.seconds[:, -1]))
    seconds = problem.step_seconds(table.candidates.take(fitting), float(longest), load)
    fastest = np.argsort(seconds, kind="stable")[:REPACKED]
    candidates = table.candidates.take(fitting[fastest])
    seconds = seconds[fastest]
    packs = np.full(len(fastest), float(longest))

    # 2. The same in larger packs.
    next_power = float(1 << longest.bit_length())
    for pack in (next_power, 2.0 * next_power):
        fits = problem.min_bytes(candidates, pack) <= table.budget_bytes
        larger_s = np.where(fits, problem.step_seconds(candidates, pack, load), np.inf)
        is_faster = larger_s < seconds * FASTER
        seconds = np.where(is_faster, larger_s, seconds)
        packs = np.where(is_faster, pack, packs)

    # 3. The fastest of each mesh.
    order = np.argsort(seconds, kind="stable")
    plans = []
    for index in order[_first_rows(candidates.take(order).columns(mesh_names()))][
        :MAX_SINGLES
    ].tolist():
        edge = Edge(longest, candidates.layout(index), int(packs[index]))
        plans.append(PlanEstimate((edge,), float(seconds[index])))
    return plans


def _first_rows(rows: np.ndarray) -> np.ndarray:
    """Indices of the first of equal rows, ascending."""
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


def _best_plans(table: CandidateTable, numbers: Sequence[int]) -> list[PlanEstimate]:
    """The best assignments of documents to these candidates."""
    problem = table.problem
    edges = [0, *problem.tally.edges.tolist()]
    num_edges = len(edges) - 1
    candidates = _shard_state(table, table.candidates.take(np.array(numbers)))

    # 1. Costs of groups, and of switches between them.
    cost, packs = _group_costs(table, candidates)
    i, j = np.triu_indices(len(edges), 1)
    probability = np.zeros((num_edges, len(edges)))
    probability[i, j] = problem.tally.between(i, j).probability
    switch_s = _switch_costs(problem, candidates)
    last_s = problem.seconds(candidates, float(edges[-1]), problem.all_documents).once

    # 2. Neighbors with one layout and equal packs are one group.
    seconds_by_plan: dict[Edges, float] = {}
    for assignment in best_assignments(cost, probability, switch_s, last_s):
        groups = []
        start = 0
        for end, index in zip(assignment.ends, assignment.layouts):
            layout = candidates.layout(index)
            pack = int(packs[start, end, index])
            if groups and (groups[-1].use, groups[-1].pack) == (layout, pack):
                groups.pop()
            groups.append(Edge(edges[end], layout, pack))
            start = end
        seconds_by_plan.setdefault(tuple(groups), assignment.seconds)
    return [PlanEstimate(groups, seconds) for groups, seconds in seconds_by_plan.items()]


def _fastest_candidates(table: CandidateTable, single: Layout) -> list[int]:
    """Numbers of the best single layout, and of the fastest meshes at each key by turns, long
    documents first."""
    candidates = table.candidates
    is_single = (candidates.columns() == Candidates.of([single]).columns()).all(1)
    return _pick_by_turns(table, _is_sharded(table), np.flatnonzero(is_single).tolist())


def _candidates_of_cut(table: CandidateTable, cut: Sequence[int]) -> list[int]:
    """Numbers of the fastest meshes at each key by turns, of those with this cut of the weights."""
    candidates = table.candidates
    is_of_cut = (candidates.columns(cut_names()) == np.array(cut)).all(1)
    return _pick_by_turns(table, _is_sharded(table) & is_of_cut)


def _pick_by_turns(
    table: CandidateTable,
    is_usable: np.ndarray,
    first: Sequence[int] = (),
) -> list[int]:
    """Numbers of the first ones, and of the fastest usable candidates of each key by turns."""
    rankings = []
    for seconds in table.seconds.T:
        rankings.append(_fastest_meshes(table.candidates, np.where(is_usable, seconds, np.inf)))

    numbers = list(first)
    for place in range(BEST_AT_KEY):
        numbers += [ranking[place] for ranking in reversed(rankings) if len(ranking) > place]
    return list(dict.fromkeys(numbers))[:MAX_LAYOUTS]


def _fastest_meshes(candidates: Candidates, seconds: np.ndarray) -> list[int]:
    """Numbers of the fastest candidates of BEST_AT_KEY different meshes."""
    # A mesh has fewer than 64 policies, so these are enough.
    fastest = np.argsort(seconds, kind="stable")[: 64 * BEST_AT_KEY]
    fastest = fastest[np.isfinite(seconds[fastest])]
    meshes = candidates.take(fastest).columns(mesh_names())
    return fastest[_first_rows(meshes)][:BEST_AT_KEY].tolist()


def _has_replicas(table: CandidateTable, candidates: Candidates) -> np.ndarray:
    """Which candidates have state that ZeRO shards."""
    return candidates.state_holders(table.problem.task.spec.experts > 0) > 1


def _is_sharded(table: CandidateTable) -> np.ndarray:
    """Which candidates shard their state, or have no equal that does: with several layouts every
    state is sharded."""
    candidates = table.candidates
    has_replicas = _has_replicas(table, candidates)
    if not ((candidates.zero == 1) & has_replicas).any():
        return np.ones(len(candidates), bool)
    return (candidates.zero > 0) | ~has_replicas


def _shard_state(table: CandidateTable, candidates: Candidates) -> Candidates:
    """The layouts as a step with several of them takes them:
    ZeRO-1 at least, where ranks share weights."""
    sharded = np.maximum(candidates.zero, 1)
    zero = np.where(_has_replicas(table, candidates), sharded, candidates.zero)
    return Candidates({**candidates.codes, "zero": zero})


def _group_costs(table: CandidateTable, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of documents between two edges under each layout, and the packs that take least.

    float64 and int64 [E, E + 1, layouts]. Seconds are inf where a layout does not fit.
    """
    problem = table.problem
    num_layouts = len(candidates)
    edges = np.concatenate([[0.0], problem.tally.edges])
    i, j = np.triu_indices(len(edges), 1)
    layout = np.tile(np.arange(num_layouts), len(i))
    i = np.repeat(i, num_layouts)
    j = np.repeat(j, num_layouts)
    load = problem.tally.between(i, j)

    # 1. The smallest packs are of a power of two, if that fits.
    max_packs = _largest_packs(table, candidates)[layout]
    powers = 2.0 ** np.ceil(np.log2(edges[j]))
    min_packs = np.where(powers <= max_packs, powers, edges[j])

    # 2. Try packs from the smallest to the largest.
    best_s = np.full(len(layout), np.inf)
    best_packs = np.zeros(len(layout))
    previous_packs = np.zeros(len(layout))
    for halving in range(HALVINGS, -1, -1):
        packs = np.maximum(min_packs, max_packs / 2.0**halving)
        new = np.flatnonzero((packs <= max_packs) & (packs > previous_packs))
        seconds = np.full(len(layout), np.inf)
        group = problem.seconds(candidates.take(layout[new]), packs[new], load.take(new))
        seconds[new] = group.group
        is_faster = seconds < best_s * FASTER
        best_s = np.where(is_faster, seconds, best_s)
        best_packs = np.where(is_faster, packs, best_packs)
        previous_packs = packs

    shape = (len(edges) - 1, len(edges), num_layouts)
    cost = np.full(shape, np.inf)
    packs_by_group = np.zeros(shape, np.int64)
    cost[i, j, layout] = best_s
    packs_by_group[i, j, layout] = best_packs
    return cost, packs_by_group


def _largest_packs(table: CandidateTable, candidates: Candidates) -> np.ndarray:
    """The largest pack of each layout that fits, a power of two or the longest document, float64
    [candidates]; 0 if none does."""
    problem = table.problem
    last_power = int(problem.task.tokens_per_step).bit_length()
    powers = [float(1 << n) for n in range(8, last_power)]
    largest = np.zeros(len(candidates))
    # Packs of the longest document are the smallest that hold all documents.
    for capacity in (float(problem.tally.edges[-1]), *powers[-DOUBLINGS:]):
        fits = problem.min_bytes(candidates, capacity) <= table.budget_bytes
        largest = np.where(fits, np.maximum(largest, capacity), largest)
    return largest


def _switch_costs(problem: Problem, candidates: Candidates) -> np.ndarray:
    """Seconds to enter each layout from each, float64 [layouts, layouts]; 0 where they cut the
    weights alike."""
    # Layouts of one cut switch no weights.
    cuts = candidates.columns(cut_names())
    is_same_cut = (cuts[:, None] == cuts[None]).all(2)
    switch_s = switch_seconds(problem.cost, candidates, float(SwitchOptions().ahead_bytes))
    return np.where(is_same_cut, 0.0, switch_s[None])


@dataclass(frozen=True)
class Rival:
    """A single layout that would be faster and does not fit.

    `times`: its seconds over those of the best one, by rate cards.
    `short_bytes`: that a device lacks for packs of the longest documents.
    """

    layout: str
    times: float
    short_bytes: float


def find_rivals(table: CandidateTable, best_s: float) -> tuple[Rival, ...]:
    """Single layouts that fit shorter documents, would be faster than `best_s`, and lack least
    memory for the longest."""
    problem = table.problem
    longest = float(problem.tally.edges[-1])
    too_large = np.isinf(table.seconds[:, -1]) & np.isfinite(table.seconds[:, 0])
    if not too_large.any():
        return ()
    candidates = table.candidates.take(too_large)
    short_bytes = problem.min_bytes(candidates, longest) - table.budget_bytes
    nearest = np.argsort(short_bytes, kind="stable")[:REPACKED]
    candidates = candidates.take(nearest)
    short_bytes = short_bytes[nearest]

    # Those that lack least memory come first, however fast they are.
    seconds = problem.step_seconds(candidates, longest, problem.all_documents)
    rivals = []
    for index in np.flatnonzero(seconds < best_s)[:MAX_RIVALS].tolist():
        layout = str(candidates.layout(index))
        rivals.append(Rival(layout, float(seconds[index] / best_s), float(short_bytes[index])))
    return tuple(rivals)
