"""Loads: seconds of a group of documents under layouts, in closed form; expected ones of a length distribution, and those of real draws.

Expected, a step has the group with probability p = 1 - exp(-documents); where it has, the busiest replica has its share of the tokens, or
one document where that is more, in packs that are not quite full. Of real draws every pack is known (`workload.packs`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longshift.planner.enumerated import Meshes, unevenness
from longshift.simulate.closed import Candidates, closed_form
from longshift.simulate.cost import Cost
from longshift.spec.model import ModelSpec
from longshift.workload.packs import pack, shares

UNFILLED = 0.25  # of a document's length, that a pack leaves empty at its end: assumed, and corrected by real draws
# What is left of the wait for the dearest pack: dp8.ring2.u2 and dp4.u8 of 13B on real draws of lognormal(6.5, 1.65) take 6 to 8 % longer
# under ZeRO-2 and 3 than replicas that wait at the end, and packs dealt at random would take 30 %.
ALIGNED = 0.25


def candidates(at: Meshes, micros: np.ndarray | float, tokens: np.ndarray | float, pairs: np.ndarray | float) -> Candidates:
    """Meshes as `simulate.closed` takes them."""
    return Candidates(at.tp, at.ulysses, at.ring, at.dp, at.pp, at.virtual, at.zero, at.recompute, micros, tokens, pairs)


@dataclass(frozen=True, eq=False)
class Expected:
    """Seconds of groups, arrays that were broadcast: `group` without what a step takes once (`Forecast.once`), and `once`; `micros`,
    `tokens` of packs."""

    group: np.ndarray
    once: np.ndarray
    micros: np.ndarray
    tokens: np.ndarray


def present(documents: np.ndarray) -> np.ndarray:
    """Share of steps that have a document of a group with so many on average."""
    return -np.expm1(-np.asarray(documents, dtype=float))


def expected(cost: Cost, spec: ModelSpec, at: Meshes, capacity: np.ndarray, load: tuple[np.ndarray, ...]) -> Expected:
    """Expected seconds a step of groups under each layout in packs of up to `capacity`. `load`: a step's mean documents, tokens, squares
    and fourths (of `Lengths` in `planner.assign`) of each group, and its longest document. Arrays of one length."""
    documents, tokens, squares, fourths, longest = load
    often = np.maximum(present(documents), 1e-9)
    length = squares / np.maximum(tokens, 1e-9)  # of the document that a token is in
    share = tokens / often / at.dp
    longest = np.maximum(longest, tokens / np.maximum(documents, 1e-9))
    linear, quadratic = spec.flops_per_token(0), spec.flops_per_token(0.5) - spec.flops_per_token(0)
    seen = 2 * spec.attended(longest) / np.maximum(longest, 1e-9)  # the longest document's length, as far as it is seen
    alone = longest * (linear + quadratic * seen) > share * (linear + quadratic * length)
    micros = np.where(alone, 1.0, np.maximum(1.0, np.ceil(share / (capacity - UNFILLED * length))))
    of_pack = np.maximum(np.where(alone, longest, share / micros), 1.0)
    found = closed_form(cost, candidates(at, micros, of_pack, of_pack * np.where(alone, seen, length) / 2))
    # Under ZeRO-2 and 3 every micro-batch waits for the dearest of dp packs: sqrt(2 ln dp) deviations above the mean, at most one document,
    # of which ALIGNED is left as replicas come to their dearest packs together.
    spread = np.sqrt(fourths / np.maximum(squares, 1e-9) / np.maximum(length * capacity, 1.0)) * np.sqrt(2 * np.log(at.dp))
    flat = linear / quadratic
    dearest = (flat + np.minimum(length * (1 + spread), np.minimum(seen, capacity))) / (flat + length)
    group = (
        (found.total - found.once)
        * unevenness(spec, at)
        * np.where((at.zero >= 2) & (micros > 1), 1 + ALIGNED * np.maximum(dearest - 1, 0.0), 1.0)
    )
    return Expected(np.where(documents > 0, group * often, 0.0), found.once, micros, of_pack)


def switch_seconds(cost: Cost, at: Meshes, home_layers: float, ahead_bytes: float) -> np.ndarray:
    """Seconds that entering each layout's cut takes and bringing its gradients home, float64 [candidates]: every rank gets its weights from
    all others and gives sums back. A slice goes to a node once and is passed on inside it."""
    sizes, fabric = cost.sizes, cost.rates.fabric
    world = at.tp * at.ulysses * at.ring * at.dp * at.pp
    wanted = (sizes.layers / at.pp * sizes.block_elements + home_layers * sizes.head_elements / at.pp) / at.tp
    per_node = np.minimum(fabric.per_node, world)
    nodes = np.ceil(world / per_node)
    distinct = np.minimum(per_node, np.where(world / at.pp < per_node, at.tp * per_node * at.pp / world, at.tp)) / per_node

    def moved_s(size_bytes: np.ndarray) -> np.ndarray:
        inside = size_bytes * (per_node - 1) / per_node / fabric.node_bytes_per_s
        between = size_bytes * distinct * (nodes - 1) / nodes / fabric.network_bytes_per_s
        return np.maximum(inside, between)

    weights = cost.rates.element_bytes * wanted
    hidden = np.minimum(1.0, ahead_bytes / np.maximum(weights, 1.0))
    return moved_s(weights) * (1 - hidden) + moved_s(cost.habits.gradient_bytes * wanted)


@dataclass(frozen=True)
class Dealing:
    """A group of some assignment: documents longer than `lo` and of up to `hi` tokens, in packs of up to `capacity` on `dp` replicas."""

    lo: int
    hi: int
    capacity: int
    dp: int


def dealt(documents: np.ndarray, how: Dealing, spec: ModelSpec) -> list[list[tuple[int, float]]]:
    """Packs of each replica as (tokens, pairs), dealt as `workload.groups` does; empty where the step has none of these documents."""
    some = documents[(documents > how.lo) & (documents <= how.hi)]
    if not len(some):
        return []
    linear, quadratic = spec.flops_per_token(0), spec.flops_per_token(0.5) - spec.flops_per_token(0)
    costs = (some * linear + 2 * quadratic * spec.attended(some)).tolist()
    found = []
    for share in shares(costs, how.dp):
        own = some[list(share)].tolist()
        packs = [[own[i] for i in one] for one in pack(own, how.capacity)]
        found.append([(sum(one), float(sum(spec.attended(np.array(one))))) for one in packs])
    return found


def dealt_seconds(cost: Cost, spec: ModelSpec, at: Meshes, groups: Sequence[tuple[int, list[list[tuple[int, float]]]]]) -> np.ndarray:
    """Seconds of groups of real steps without what a step takes once, float64 [groups]. A group: the index of its layout, and packs of
    replicas. Replicas wait for the slowest at a group's end, under ZeRO-2 and 3 at every micro-batch."""
    rows: list[tuple[int, int, int, int, float]] = []  # group, replica, micro-batch, tokens, pairs
    for number, (_, replicas) in enumerate(groups):
        for replica, packs in enumerate(replicas):
            rows += [(number, replica, micro, *one) for micro, one in enumerate(packs)]
    seconds = np.zeros(len(groups))
    if not rows:
        return seconds
    group, replica, micro, tokens, pairs = (np.array(column) for column in zip(*rows))
    layouts = at.take(np.array([layout for layout, _ in groups]))
    slot_s = _slots(cost, layouts.take(group), tokens.astype(float), pairs.astype(float))
    together = layouts.zero >= 2
    # One after another: micro-batches of a replica, the longest replica counts; or, together, the longest micro-batch of each number.
    key = np.where(together[group], micro, replica)
    waits = np.zeros((len(groups), int(key.max()) + 1))
    np.maximum.at(waits, (group[together[group]], key[together[group]]), slot_s[together[group]])
    np.add.at(waits, (group[~together[group]], key[~together[group]]), slot_s[~together[group]])
    busy_s = np.where(together, waits.sum(1), waits.max(1))

    there = np.unique(group)
    some, packs = layouts.take(there), np.bincount(group)[there]
    mean = [np.bincount(group, values)[there] / packs for values in (tokens, pairs)]
    micros = np.zeros(len(groups))
    np.maximum.at(micros, group, micro + 1.0)
    whole = closed_form(cost, candidates(some, micros[there], *mean))
    beside_s = whole.total - whole.once - micros[there] * _slots(cost, some, *mean)
    piped = np.flatnonzero(some.pp > 1)
    if len(piped):  # a pipeline fills and drains with its dearest pack, or waits for it on the way
        dearest = np.lexsort((slot_s, group))[np.cumsum(packs) - 1][piped]
        longer = closed_form(cost, candidates(some.take(piped), micros[there][piped], tokens[dearest], pairs[dearest]))
        beside_s[piped] += longer.fill - whole.fill[piped]
    seconds[there] = (busy_s[there] + beside_s) * unevenness(spec, some)
    return seconds


def _slots(cost: Cost, at: Meshes, tokens: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Seconds that one more micro-batch takes, in rounds of pp, which leave no interleaved order a rest."""
    once, twice = closed_form(cost, candidates(at, np.array([[1.0], [2.0]]) * at.pp, tokens, pairs)).total
    return (twice - once) / at.pp
