"""Shortlist: the ways that rate cards put first. The ledger and the clock judge them (`planner.replay`).

    candidates ─ bound ─> fit packs of some lengths ─ rate cards ─> the fastest at each length ─ program over edges ─> ways
                                                                 └> the fastest single layouts ────────────────────────┘

Candidates are compared at a few key lengths. At each, those that fit get the documents between it and the key before, in packs as small as
they may be and as large as fits. A layout that another one dominates at every key can still be the best in an assignment; the clock's
looks at siblings (`planner.siblings`) find most of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.planner.assign import Tally, assignments, tally
from longshift.planner.candidates import ORDERS, Candidates, Enumeration, enumerate_layouts
from longshift.planner.group_seconds import GroupSeconds, Load, group_seconds, switch_seconds
from longshift.planner.memory_bound import Training, device_bytes
from longshift.planner.task import Task
from longshift.simulate.cost import Cost
from longshift.simulate.rates import rates
from longshift.weigh.needs import micro_counts
from longshift.workload.groups import Edge

KEY_RATIO = 4  # of neighbouring key lengths, at least
MOST_KEYS = 6
BEST_AT_KEY = 4  # meshes of each key length, that an assignment chooses among
MOST_LAYOUTS = 16  # of these
MOST_SINGLES = 8  # single layouts, each of another mesh
REPACKED = 128  # single layouts that larger packs are tried for
DOUBLINGS = 12  # of packs, down from a step's tokens
HALVINGS = 3  # of the largest packs of a group
MESH = (*axes.names(), "virtual")
CUT = (*(axis.name for axis in axes.AXES if axis.shares in ("weights", "blocks")), "virtual")  # what cuts the weights
MOST_CUTS = 3  # of the best single layouts, that assignments of one cut are looked for


@dataclass(frozen=True, eq=False)
class Problem:
    """A task as rate cards take it.

    known     all layouts of whole packs
    tally     documents of a mean step
    training  as bounds of memory take it
    """

    task: Task
    known: Enumeration
    tally: Tally
    cost: Cost
    training: Training

    @classmethod
    def of(cls, task: Task) -> "Problem":
        """Raises UsageError where what is fixed does not exist."""
        cost = Cost(task.spec, rates(task.cluster, task.precision), task.habits)
        known = enumerate_layouts(task.spec, task.world, task.fixed_fields, task.formats.float8)
        return cls(task, known, tally(task.spec, task.lengths, task.tokens_per_step), cost, task.training)

    def bytes(self, at: Candidates, capacity: np.ndarray | float) -> np.ndarray:
        """Bytes that a device needs at the least in the largest step of packs of `capacity` tokens, float64 [candidates]."""
        task = self.task
        is_1f1b = at.order == ORDERS.index("1f1b")
        micros = micro_counts(task.tokens_per_step, capacity * at.dp, at.pp * at.virtual, is_1f1b)
        return device_bytes(self.training, at, capacity, micros)

    def seconds(self, at: Candidates, capacity: np.ndarray | float, load: Load) -> GroupSeconds:
        return group_seconds(self.cost, at, capacity, load)


@dataclass(frozen=True)
class Listed:
    """A way, and its seconds by rate cards."""

    edges: tuple[Edge, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """Candidates at key lengths within a budget. `keys`: edges of the tally by number, 1 to E; `seconds`: float64 [candidates, keys], inf
    where packs of that length do not fit."""

    problem: Problem
    budget_bytes: float
    keys: np.ndarray
    seconds: np.ndarray

    @property
    def candidates(self) -> Candidates:
        return self.problem.known.candidates

    @cached_property
    def singles(self) -> list["Listed"]:
        """The best single layout of each mesh that fits the longest documents, fastest first."""
        return _best_singles(self)

    @property
    def too_large(self) -> int:
        """Candidates that do not fit packs of the shortest key length."""
        return int(np.isinf(self.seconds[:, 0]).sum())

    @property
    def longest_fitting(self) -> int:
        """The longest key that has documents and fits some layout, as a number of its edge; 0 where there is none."""
        fits = np.isfinite(self.seconds).any(0)
        has_documents = self.problem.tally.sums[self.keys, 0] > 0
        return int(self.keys[fits & has_documents].max(initial=0))


def compare(problem: Problem, budget_bytes: float) -> CandidateTable:
    """Every candidate at every key length."""
    at, tally = problem.known.candidates, problem.tally
    keys = _key_edges(tally.edges)
    lengths = tally.edges[keys - 1].astype(float)
    fits, largest = np.zeros((len(at), len(keys)), bool), np.zeros(len(at))
    fitting = np.arange(len(at))
    for key, length in enumerate(lengths):
        fitting = fitting[problem.bytes(at.take(fitting), length) <= budget_bytes]
        fits[fitting, key] = True
        largest[fitting] = length

    number, key = np.nonzero(fits)
    before = np.concatenate([[0], keys])[key]
    seconds = np.full(fits.shape, np.inf)
    for packs in (lengths[key], largest[number]):  # as small as they may be, and as large as fits
        group = problem.seconds(at.take(number), packs, tally.between(before, keys[key])).group
        seconds[number, key] = np.minimum(seconds[number, key], group)
    return CandidateTable(problem, budget_bytes, keys, seconds)


def _key_edges(edges: np.ndarray) -> np.ndarray:
    """Numbers, 1 to E, of the edges that candidates are compared at, ascending."""
    keys = [len(edges)]
    for number in range(len(edges) - 1, 0, -1):
        if edges[number - 1] * KEY_RATIO <= edges[keys[-1] - 1] and len(keys) < MOST_KEYS:
            keys.append(number)
    return np.array(keys[::-1])


def shortlist(table: CandidateTable) -> list[Listed]:
    """The best ways by rate cards, fastest first: single layouts of different meshes, assignments to any layouts, and assignments to
    layouts that cut the weights alike, which switch no weights."""
    singles = table.singles
    if not singles:
        return []
    uses = [way.edges[0].use for way in singles]
    ways = singles + _assigned(table, _survivors(table, uses[0]))
    cuts = dict.fromkeys(tuple(getattr(use, name) for name in CUT) for use in uses)
    for cut in list(cuts)[:MOST_CUTS]:
        ways += _assigned(table, _of_cut(table, cut))
    return sorted(ways, key=lambda way: way.seconds)


def _best_singles(table: CandidateTable) -> list[Listed]:
    """`CandidateTable.singles`."""
    problem, at, budget = table.problem, table.candidates, table.budget_bytes
    longest = float(problem.tally.edges[-1])
    load = problem.tally.between(0, len(problem.tally.edges))

    # 1. In packs of the longest document.
    fitting = np.flatnonzero(np.isfinite(table.seconds[:, -1]))
    seconds = _step_seconds(problem, at.take(fitting), longest, load)
    fastest = np.argsort(seconds, kind="stable")[:REPACKED]
    fitting, seconds = fitting[fastest], seconds[fastest]

    # 2. In larger ones.
    some, packs = at.take(fitting), np.full(len(fitting), longest)
    first = 1 << int(longest).bit_length()
    for pack in (float(first), 2.0 * first):
        larger_s = np.where(problem.bytes(some, pack) <= budget, _step_seconds(problem, some, pack, load), np.inf)
        is_faster = larger_s < seconds * (1 - 1e-6)
        seconds, packs = np.where(is_faster, larger_s, seconds), np.where(is_faster, pack, packs)

    ways: dict[tuple[int, ...], Listed] = {}
    for place in np.argsort(seconds, kind="stable").tolist():
        mesh = tuple(int(getattr(some, name)[place]) for name in MESH)
        edge = Edge(int(longest), some.layout(place), int(packs[place]))
        ways.setdefault(mesh, Listed((edge,), float(seconds[place])))
    return list(ways.values())[:MOST_SINGLES]


def _step_seconds(problem: Problem, at: Candidates, capacity: float, load: Load) -> np.ndarray:
    found = problem.seconds(at, capacity, load)
    return found.group + found.once


def _assigned(table: CandidateTable, numbers: Sequence[int]) -> list[Listed]:
    """The best assignments of documents to these candidates. Neighbours with one layout and equal packs are one group."""
    problem, edges = table.problem, (0, *map(int, table.problem.tally.edges))
    at = _shared(table.candidates.take(np.array(numbers)))
    cost, packs = _table(table, at)
    ends = np.arange(len(edges))
    probability = np.zeros((len(edges) - 1, len(edges)))
    i, j = np.triu_indices(len(edges), 1)
    probability[i, j] = problem.tally.between(i, j).probability
    last_s = problem.seconds(at, float(edges[-1]), problem.tally.between(0, ends[-1])).once
    ways: dict[tuple[Edge, ...], float] = {}
    for way in assignments(cost, probability, _hops(problem, at), last_s):
        groups: list[Edge] = []
        for before, end, row in zip((0, *way.ends), way.ends, way.layouts):
            layout, pack = at.layout(row), int(packs[before, end, row])
            if groups and (groups[-1].use, groups[-1].pack) == (layout, pack):
                groups.pop()
            groups.append(Edge(edges[end], layout, pack))
        ways.setdefault(tuple(groups), way.seconds)
    return [Listed(groups, seconds) for groups, seconds in ways.items()]


def _survivors(table: CandidateTable, single: Layout) -> list[int]:
    """Numbers of the best single layout, and of the fastest meshes at each key by turns, long documents first."""
    at, wanted = table.candidates, Candidates.of([single])
    is_single = (at.columns() == wanted.columns()).all(1)
    return _by_turns(table, _is_sharded(at), np.flatnonzero(is_single).tolist())


def _of_cut(table: CandidateTable, cut: Sequence[int]) -> list[int]:
    """Numbers of the fastest meshes at each key by turns, of those with this cut of the weights."""
    at = table.candidates
    is_of_cut = np.logical_and.reduce([getattr(at, name) == degree for name, degree in zip(CUT, cut)])
    return _by_turns(table, _is_sharded(at) & is_of_cut)


def _by_turns(table: CandidateTable, is_usable: np.ndarray, first: Sequence[int] = ()) -> list[int]:
    ranked = [_first_of_meshes(table.candidates, np.where(is_usable, seconds, np.inf)) for seconds in table.seconds.T]
    numbers = list(first)
    for place in range(BEST_AT_KEY):
        numbers += [of_key[place] for of_key in reversed(ranked) if len(of_key) > place]
    return list(dict.fromkeys(numbers))[:MOST_LAYOUTS]


def _first_of_meshes(at: Candidates, seconds: np.ndarray) -> list[int]:
    """The fastest candidates of BEST_AT_KEY different meshes."""
    fastest: dict[tuple[int, ...], int] = {}
    few = np.argsort(seconds, kind="stable")[: 64 * BEST_AT_KEY]
    for number in few[np.isfinite(seconds[few])].tolist():
        fastest.setdefault(tuple(int(getattr(at, name)[number]) for name in MESH), number)
    return list(fastest.values())[:BEST_AT_KEY]


def _is_sharded(at: Candidates) -> np.ndarray:
    """Candidates that keep their state sharded, where others are equal to them but for that: with several layouts every state is."""
    if not ((at.zero == 1) & (at.holders > 1)).any():
        return np.ones(len(at), bool)
    return (at.zero > 0) | (at.holders == 1)


def _shared(at: Candidates) -> Candidates:
    """The layouts as a step with several of them takes them: ZeRO-1 at least, where ranks share weights."""
    return replace(at, zero=np.where(at.holders > 1, np.maximum(at.zero, 1), at.zero))


def _table(table: CandidateTable, at: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of documents between two edges under each layout, float64 [E, E + 1, layouts], inf where it cannot; and the packs that take
    least, int64."""
    problem = table.problem
    edges = np.concatenate([[0.0], problem.tally.edges])
    count = len(edges) - 1
    i, j = np.triu_indices(count + 1, 1)
    row = np.tile(np.arange(len(at)), len(i))
    i, j = np.repeat(i, len(at)), np.repeat(j, len(at))
    most = _largest_packs(table, at)[row]
    power = 2.0 ** np.ceil(np.log2(edges[j]))
    least = np.where(power <= most, power, edges[j])

    load = problem.tally.between(i, j)
    best_s, best_pack = np.full(len(row), np.inf), np.zeros(len(row))
    packs_before = np.zeros(len(row))
    for halving in range(HALVINGS, -1, -1):
        pack = np.maximum(least, most / 2.0**halving)
        able = np.flatnonzero((pack <= most) & (pack > packs_before))
        seconds = np.full(len(row), np.inf)
        seconds[able] = problem.seconds(at.take(row[able]), pack[able], load.take(able)).group
        is_faster = seconds < best_s * (1 - 1e-6)
        best_s, best_pack = np.where(is_faster, seconds, best_s), np.where(is_faster, pack, best_pack)
        packs_before = pack
    cost = np.full((count, count + 1, len(at)), np.inf)
    packs = np.zeros(cost.shape, np.int64)
    cost[i, j, row], packs[i, j, row] = best_s, best_pack
    return cost, packs


def _largest_packs(table: CandidateTable, at: Candidates) -> np.ndarray:
    """The largest pack of each layout, a power of two or the longest document, that fits, float64 [candidates]; 0 where none does."""
    problem = table.problem
    powers = [float(1 << n) for n in range(8, int(problem.task.tokens_per_step).bit_length())]
    largest = np.zeros(len(at))
    for capacity in (float(problem.tally.edges[-1]), *powers[-DOUBLINGS:]):
        fits = problem.bytes(at, capacity) <= table.budget_bytes
        largest = np.where(fits, np.maximum(largest, capacity), largest)
    return largest


def _hops(problem: Problem, at: Candidates) -> np.ndarray:
    """Seconds to enter each layout from each, float64 [layouts, layouts]: 0 where they cut the weights alike."""
    cuts = np.stack([getattr(at, name) for name in CUT], 1)
    entered_s = switch_seconds(problem.cost, at, float(problem.task.switch.ahead_bytes))
    return np.where((cuts[:, None] == cuts[None]).all(2), 0.0, entered_s[None])


@dataclass(frozen=True)
class Rival:
    """A single layout that would be faster and does not fit: `times` the seconds of the best one, by rate cards; `short_bytes`: that a
    device lacks for packs of the longest documents."""

    layout: str
    times: float
    short_bytes: float


def too_large(table: CandidateTable, best_s: float, most: int) -> tuple[Rival, ...]:
    """Single layouts that fit shorter documents, would be faster than `best_s`, and lack least memory for the longest."""
    problem, at = table.problem, table.candidates
    longest = float(problem.tally.edges[-1])
    out = np.flatnonzero(np.isinf(table.seconds[:, -1]) & np.isfinite(table.seconds[:, 0]))
    if not len(out):
        return ()
    short = problem.bytes(at.take(out), longest) - table.budget_bytes
    nearest = np.argsort(short, kind="stable")[:REPACKED]
    out, short = out[nearest], short[nearest]
    seconds = _step_seconds(problem, at.take(out), longest, problem.tally.between(0, len(problem.tally.edges)))
    faster: Sequence[int] = np.flatnonzero(seconds < best_s).tolist()[:most]
    return tuple(Rival(str(at.layout(int(out[n]))), float(seconds[n] / best_s), float(short[n])) for n in faster)
