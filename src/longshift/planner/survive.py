"""Survivors: of all candidates those few that an assignment may need; at each of some lengths the fastest that fit.

Lengths that are compared at are edges at least KEY_RATIO apart, the longest among them. At each, every candidate that fits packs of it
gets the documents between it and the one before, in packs as small as they may be and as large as fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from longshift.planner.assign import Tally
from longshift.planner.enumerated import Meshes
from longshift.planner.least_bytes import device_bytes, reserved
from longshift.planner.loads import expected
from longshift.simulate.cost import Cost
from longshift.spec.formats import Format
from longshift.spec.model import ModelSpec

MOST_LAYOUTS = 16  # that an assignment chooses among
KEY_RATIO = 4
MOST_KEYS = 6
BEST_AT_KEY = 4  # meshes that survive at each key
MESH = ("tp", "ulysses", "ring", "dp", "pp", "virtual")
FAMILY = ("tp", "pp", "virtual", "order", "zero", "recompute")  # what context parallelism alone leaves as it is
MOST_FAMILIES = 2
STATICS = 128  # single layouts whose packs are chosen, too
AT_ONCE = 8192  # candidates that closed forms take at once; of 30,000 at once each took a third longer


@dataclass(frozen=True, eq=False)
class Problem:
    """What is planned. `budget_bytes`: of a device; `outside`: whether all of home may lie outside it; `over`: families (codes of FAMILY)
    whose ledgers say more than their bounds, so many times."""

    spec: ModelSpec
    cost: Cost
    formats: Format
    tally: Tally
    tokens_per_step: float
    budget_bytes: float
    on_cpu: bool = False
    outside: bool = False
    over: tuple[tuple[tuple[int, ...], float], ...] = ()

    def bound(self, at: Meshes, capacity: np.ndarray | float) -> np.ndarray:
        """Bytes that a device is asked for at the least in the largest step of packs of `capacity` tokens, float64 [candidates]."""
        found = device_bytes(self.spec, at, self.formats, capacity, self.micros(at, capacity), outside=self.outside)
        return reserved(found, self.on_cpu)

    def bytes(self, at: Meshes, capacity: np.ndarray | float) -> np.ndarray:
        """The bound, and more for families that are known to need more."""
        found = self.bound(at, capacity)
        for family, times in self.over:
            found = np.where(_of_family(at, family), found * times, found)
        return found

    def micros(self, at: Meshes, capacity: np.ndarray | float) -> np.ndarray:
        """Packs of a replica in that step, as `weigh.needs` takes them."""
        full = np.maximum(1, np.ceil(self.tokens_per_step / (np.asarray(capacity) * at.dp)))
        return np.where(at.order == 0, np.minimum(full, 2 * at.pp * at.virtual + 1), full).astype(np.int64)

    def expected(self, at: Meshes, capacity: np.ndarray | float, i: np.ndarray | int, j: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds a step of the documents between two edges of the tally, under each layout; and what a step takes once besides."""
        load = (*self.tally.between(i, j), self.tally.longest[j])
        capacity, *load = (np.broadcast_to(one, len(at)) for one in (capacity, *load))
        found = np.zeros((2, len(at)))
        for piece in (slice(start, start + AT_ONCE) for start in range(0, len(at), AT_ONCE)):
            one = expected(self.cost, self.spec, at.take(piece), capacity[piece], tuple(part[piece] for part in load))
            found[:, piece] = one.group, one.once
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class Compared:
    """Candidates at key lengths. `keys`: edges of the tally by number, 1 to E; `seconds`: float64 [candidates, keys], inf where one does
    not fit; `refused`: number of those that fit none, by reason; `over`: of the problem."""

    keys: np.ndarray
    seconds: np.ndarray
    refused: Mapping[str, int]
    over: tuple[tuple[tuple[int, ...], float], ...]


def key_edges(edges: np.ndarray) -> np.ndarray:
    """Numbers, 1 to E, of the edges that candidates are compared at, ascending."""
    keys = [len(edges)]
    for number in range(len(edges) - 1, 0, -1):
        if edges[number - 1] * KEY_RATIO <= edges[keys[-1] - 1] and len(keys) < MOST_KEYS:
            keys.append(number)
    return np.array(keys[::-1])


def compared(problem: Problem, at: Meshes, known: Compared | None = None) -> Compared:
    """Every candidate at every key length that it fits. `known`: of the same problem before more was known of what families need; what it
    says of other families stays, and so does what it refuses."""
    if known is not None:
        other = [family for family, times in problem.over if (family, times) not in known.over]
        rows = np.flatnonzero(np.logical_or.reduce([_of_family(at, family) for family in other])) if other else np.arange(0)
        seconds = known.seconds.copy()
        seconds[rows] = compared(problem, at.take(rows)).seconds
        return replace(known, seconds=seconds, over=problem.over)
    keys = key_edges(problem.tally.edges)
    seconds, fitting = np.full((len(at), len(keys)), np.inf), np.arange(len(at))
    largest = np.zeros(len(at))
    lengths = problem.tally.edges[keys - 1]
    fits = np.zeros((len(at), len(keys)), bool)
    for key, length in enumerate(lengths):
        fitting = fitting[problem.bytes(at.take(fitting), float(length)) <= problem.budget_bytes]
        fits[fitting, key] = True
        largest[fitting] = length
    number, key = np.nonzero(fits)
    least, most = lengths[key].astype(float), largest[number]
    packs = [np.arange(len(key)), np.flatnonzero(most > least)]  # as small as they may be, and as large as fits
    of, capacity = np.concatenate(packs), np.concatenate([least, most[packs[1]]])
    found, _ = problem.expected(at.take(number[of]), capacity, np.concatenate([[0], keys])[key[of]], keys[key[of]])
    np.minimum.at(seconds, (number[of], key[of]), found)
    short = int((~fits[:, 0]).sum())
    refused = {f"weights, state and packs of {lengths[0]} tokens above the device's memory": short} if short else {}
    return Compared(keys, seconds, refused, problem.over)


@dataclass(frozen=True, eq=False)
class Statics:
    """Single layouts that fit the longest documents, fastest first: numbers of candidates, packs, and seconds of a step as expected."""

    numbers: np.ndarray
    packs: np.ndarray
    seconds: np.ndarray


def best_static(problem: Problem, at: Meshes, found: Compared) -> Statics:
    """The best single layouts."""
    last, longest = int(found.keys[-1]), float(problem.tally.edges[-1])
    able = np.flatnonzero(np.isfinite(found.seconds[:, -1]))
    group, once = problem.expected(at.take(able), longest, 0, last)
    order = np.argsort(group + once, kind="stable")[:STATICS]
    able, seconds, packs = able[order], (group + once)[order], np.full(len(order), longest)
    larger = _larger(longest)
    every, tokens = at.take(np.tile(able, len(larger))), np.repeat(larger, len(able))
    group, once = problem.expected(every, tokens, 0, last)
    step_s = np.where(problem.bytes(every, tokens) <= problem.budget_bytes, group + once, np.inf)
    for capacity, taken in zip(larger, step_s.reshape(len(larger), len(able))):
        better = taken < seconds * (1 - 1e-6)
        seconds, packs = np.where(better, taken, seconds), np.where(better, capacity, packs)
    order = np.argsort(seconds, kind="stable")
    return Statics(able[order], packs[order].astype(np.int64), seconds[order])


def _of_family(at: Meshes, family: tuple[int, ...]) -> np.ndarray:
    """Which candidates are of a family."""
    return np.logical_and.reduce([getattr(at, name) == value for name, value in zip(FAMILY, family)])


def survivors(at: Meshes, found: Compared, first: int) -> np.ndarray:
    """Numbers of at most MOST_LAYOUTS candidates: candidate `first`, then the fastest meshes at each key length by turns."""
    usable = _sharded(at)
    mesh = _classes(at, MESH)
    ranked = []
    for key in range(len(found.keys)):
        seconds = np.where(usable, found.seconds[:, key], np.inf)
        few = _smallest(seconds, 64 * BEST_AT_KEY)
        seen, some = set[int](), list[int]()
        for number in few:
            if int(mesh[number]) not in seen and len(some) < BEST_AT_KEY:
                seen.add(int(mesh[number]))
                some.append(int(number))
        ranked.append(some)
    kept = [first]
    for place in range(BEST_AT_KEY):
        kept += [some[place] for some in reversed(ranked) if len(some) > place]
    return np.array(list(dict.fromkeys(kept))[:MOST_LAYOUTS])


def families(at: Meshes, found: Compared) -> list[np.ndarray]:
    """Of the best families of candidates that differ in ring, Ulysses and dp alone: their fastest members at each key length."""
    usable, member = _sharded(at), _classes(at, FAMILY)
    number = int(member.max(initial=-1)) + 1
    best = np.full((number, len(found.keys)), np.inf)
    for key in range(len(found.keys)):
        np.minimum.at(best[:, key], member[usable], found.seconds[usable, key])
    total = best.sum(1)
    result = []
    for family in _smallest(total, MOST_FAMILIES):
        mine = np.flatnonzero((member == family) & usable)
        some = {int(mine[np.argmin(found.seconds[mine, key])]) for key in range(len(found.keys))}
        result.append(np.array(sorted(some)))
    return result


def _sharded(at: Meshes) -> np.ndarray:
    """Candidates whose state is sharded, where that is another one: in a step with several layouts every state is."""
    if not ((at.zero == 1) & (at.holders > 1)).any():
        return np.ones(len(at), bool)
    return (at.zero > 0) | (at.holders == 1)


def _classes(at: Meshes, names: tuple[str, ...]) -> np.ndarray:
    """A number for each candidate, equal for those that are equal in these."""
    code = np.zeros(len(at), np.int64)
    for name in names:
        values, where = np.unique(getattr(at, name), return_inverse=True)
        code = code * len(values) + where
    return np.unique(code, return_inverse=True)[1]


def _smallest(values: np.ndarray, most: int) -> np.ndarray:
    """Indices of the smallest finite values, ascending, the first of equal ones first."""
    able = np.flatnonzero(np.isfinite(values))
    if len(able) > 8 * most:
        able = able[values[able] <= np.partition(values[able], most - 1)[most - 1]]
    return able[np.argsort(values[able], kind="stable")][:most]


def _larger(length: float, doublings: int = 2) -> list[float]:
    """Powers of two above a length."""
    first = 1 << int(length).bit_length()
    return [float(first << n) for n in range(doublings)]


def capacities(problem: Problem, at: Meshes, length: int, doublings: int = 12) -> np.ndarray:
    """The largest pack of each layout, a power of two or `length`, that fits, float64 [candidates]; 0 where none does."""
    found = np.where(problem.bytes(at, float(length)) <= problem.budget_bytes, float(length), 0.0)
    powers = [float(1 << n) for n in range(8, int(problem.tokens_per_step).bit_length())]
    for capacity in powers[-doublings:]:
        found = np.where(problem.bytes(at, capacity) <= problem.budget_bytes, np.maximum(found, capacity), found)
    return found


def take_shared(at: Meshes) -> Meshes:
    """The layouts as a step with several of them takes them: states are sharded, ZeRO-1 at least, where ranks share them."""
    return replace(at, zero=np.where(at.holders > 1, np.maximum(at.zero, 1), at.zero))
