"""One step's documents by length: which layout computes them, in which packs, on which replica, and which layout comes first.

    documents ─ by length ─> groups (lo, hi] ─ by cost ─> shares of the layout's replicas ─ best fit ─> packs of up to hi tokens

Every document is in one pack of one group. Documents are dealt, not packs: they are smaller, so the shares come out nearly equal. Of a
layout only its replicas have a say in this. A group without documents does not exist: its layout is not visited.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec
from longshift.workload.packs import cost, pack, shares

MOST_EXACT = 14  # nodes: some 10 ms of dynamic programming; every further node doubles them
MOST_IMPROVED = 8  # orders that local search starts from


@dataclass(frozen=True)
class Edge:
    """Documents of up to `upto` tokens, and longer than the edge before, are computed under `use`. A line of the config's `layout:`."""

    upto: int
    use: Layout


@dataclass(frozen=True)
class LengthGroup:
    """The documents of one step whose length lies in (lo, hi].

    `packs`: the documents of each, as indices into the step's; `shares`: the packs of each replica (`layout.dp`), as indices into
    `packs`, maybe none; `costs`: FLOP of each pack.
    """

    lo: int
    hi: int
    layout: Layout
    packs: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]

    @property
    def documents(self) -> tuple[int, ...]:
        """In the step's order."""
        return tuple(sorted(index for documents in self.packs for index in documents))

    @property
    def balance(self) -> float:
        """The replicas' mean cost over their largest: 1.0 where none waits for another."""
        loads = [sum(self.costs[p] for p in share) for share in self.shares]
        return sum(loads) / len(loads) / max(loads)


def check_edges(edges: Sequence[Edge]) -> None:
    """Raise UsageError unless the edges ascend and there is one."""
    if not edges:
        raise UsageError("layout: an empty list; name at least one group, as in layout: [{upto: 4K, use: dp4}]")
    for before, after in pairwise(edges):
        if after.upto <= before.upto:
            wrong = f"upto {after.upto} ({after.use}) comes after {before.upto} ({before.use})"
            raise UsageError(f"layout: {wrong}; groups go from short to long")
    if edges[0].upto < 1:
        raise UsageError(f"layout: upto {edges[0].upto} ({edges[0].use}) holds no document; it is at least 1")


def length_groups(lengths: Sequence[int], edges: Sequence[Edge], spec: ModelSpec) -> tuple[LengthGroup, ...]:
    """The groups that have documents, from short to long. Raises UsageError for edges that do not ascend and for a document longer than
    the last: the over-length policy comes before grouping."""
    check_edges(edges)
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > (last := edges[-1]).upto:
        raise UsageError(
            f"document {longest} of the step has {lengths[longest]} tokens and the last group ({last.use}) ends at {last.upto}; raise its "
            f"upto to {lengths[longest]}, or cut long documents with data.max_len and data.overlong"
        )
    ends = [edge.upto for edge in edges]
    members: list[list[int]] = [[] for _ in edges]
    for index, length in enumerate(lengths):
        members[bisect_left(ends, length)].append(index)
    return tuple(_group(lo, edge, some, lengths, spec) for lo, edge, some in zip((0, *ends), edges, members) if some)


def _group(lo: int, edge: Edge, members: Sequence[int], lengths: Sequence[int], spec: ModelSpec) -> LengthGroup:
    packs: list[tuple[int, ...]] = []
    dealt: list[tuple[int, ...]] = []
    for share in shares([cost([lengths[m]], spec) for m in members], edge.use.dp):
        own = [members[i] for i in share]
        first = len(packs)
        packs += [tuple(own[i] for i in packed) for packed in pack([lengths[m] for m in own], edge.upto)]
        dealt.append(tuple(range(first, len(packs))))
    costs = tuple(cost([lengths[i] for i in documents], spec) for documents in packs)
    return LengthGroup(lo, edge.upto, edge.use, tuple(packs), tuple(dealt), costs)


def visiting_order(first: Sequence[float], hop: Sequence[Sequence[float]], last: Sequence[float]) -> tuple[int, ...]:
    """The order of visiting n nodes whose switches cost least together; of equal orders the lexicographically least.

    `first[i]`: from home to node i. `hop[i][j]`: from i to j, with home's help. `last[i]`: from i back to home, beyond what every node's
    gradients cost anyway (zeros where nothing depends on who is last). Exact for up to MOST_EXACT nodes; beyond, a good order, the same on
    every rank and never worse than going to the nearest node next, from whichever first node that is best.
    """
    n = len(first)
    costs = np.zeros((n + 1, n + 1))  # node n is home
    costs[:n, :n], costs[n, :n], costs[:n, n] = np.reshape(np.array(hop, float), (n, n)), first, last
    return _best_order(costs) if n <= MOST_EXACT else _good_order(costs)


def _best_order(costs: np.ndarray) -> tuple[int, ...]:
    """Dynamic programming over subsets (Held, Karp 1962), 2^n n^2 steps: of every set of nodes and every one of them to be visited first,
    the least cost until home."""
    n = len(costs) - 1
    sets, least = np.arange(1 << n), np.full((1 << n, n), np.inf)
    least[1 << np.arange(n), np.arange(n)] = costs[:n, n]
    sizes = sum((sets >> i & 1 for i in range(n)), np.zeros_like(sets))
    for size in range(2, n + 1):
        for i in range(n):
            some = sets[(sizes == size) & (sets >> i & 1 == 1)]
            least[some, i] = (costs[i, :n] + least[some ^ 1 << i]).min(1)
    order, left, at = [], (1 << n) - 1, n
    while left:
        at = int((costs[at, :n] + least[left]).argmin())
        order.append(at)
        left ^= 1 << at
    return tuple(order)


def _good_order(costs: np.ndarray) -> tuple[int, ...]:
    """The best of nearest-neighbour orders from every first node, the cheapest of them improved."""
    n = len(costs) - 1
    found = sorted((_length(order, costs), order) for order in (_nearest_next(start, costs) for start in range(n)))
    better = [_improved(order, costs) for _, order in found[:MOST_IMPROVED]]
    return min(found + [(_length(order, costs), order) for order in better])[1]


def _nearest_next(start: int, costs: np.ndarray) -> tuple[int, ...]:
    order, left = [start], [node for node in range(len(costs) - 1) if node != start]
    while left:
        order.append(min(left, key=lambda node: (costs[order[-1], node], node)))
        left.remove(order[-1])
    return tuple(order)


def _length(order: Sequence[int], costs: np.ndarray) -> float:
    home = len(costs) - 1
    return sum(float(costs[a, b]) for a, b in pairwise((home, *order, home)))


def _improved(order: tuple[int, ...], costs: np.ndarray) -> tuple[int, ...]:
    """Local search: while the order gets cheaper by it, the best of all exchanges of two neighbouring runs of nodes (or-opt) and of all
    reversals of one run (2-opt)."""
    home = len(costs) - 1
    way = np.array((home, *order, home))
    i, j, k = np.array(list(combinations(range(1, home + 2), 3))).T  # runs way[i:j], way[j:k]
    first, after = np.array(list(combinations(range(1, home + 2), 2))).T  # a run way[first:after]
    while True:
        steps = costs[way[:-1], way[1:]]
        exchanged = costs[way[i - 1], way[j]] + costs[way[k - 1], way[i]] + costs[way[j - 1], way[k]]
        exchanged -= steps[i - 1] + steps[j - 1] + steps[k - 1]
        more = np.concatenate(([0.0], (costs[way[1:], way[:-1]] - steps).cumsum()))  # of walking every step up to here backwards
        turned = costs[way[first - 1], way[after - 1]] + costs[way[first], way[after]] + more[after - 1] - more[first]
        turned -= steps[first - 1] + steps[after - 1]
        least, tolerance = min(exchanged.min(), turned.min()), 1e-9 * steps.sum()
        if least >= -tolerance:
            return tuple(map(int, way[1:-1]))
        if exchanged.min() == least:
            a, b, c = (int(edge[exchanged.argmin()]) for edge in (i, j, k))
            way = np.concatenate((way[:a], way[b:c], way[a:b], way[c:]))
        else:
            a, b = (int(edge[turned.argmin()]) for edge in (first, after))
            way = np.concatenate((way[:a], way[a:b][::-1], way[b:]))
