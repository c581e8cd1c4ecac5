"""One step's documents by length: which layout computes them, in which packs, on which replica, and which layout comes first.

    documents ─ by length ─> groups (lo, hi] ─ by cost ─> shares of the layout's replicas ─ best fit ─> packs of up to hi tokens

Every document is in one pack of one group. Documents are dealt, not packs: they are smaller, so the shares come out nearly equal. Of a
layout only its replicas have a say in this. A group without documents does not exist: its layout is not visited.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec
from longshift.workload.packs import cost, pack, shares

MOST_EXACT = 14  # nodes: some 10 ms of dynamic programming; every further node doubles them


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


def visiting_order(first: Sequence[float], hop: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The order of visiting n nodes whose switches cost least together; of equal orders the lexicographically least.

    `first[i]`: from home to node i. `hop[i][j]`: from i to j, with home's help. The way back costs nothing: gradients of every node go home
    in any order. Exact for up to MOST_EXACT nodes; beyond, the best of the orders that go to the nearest node next.
    """
    begin, hops = np.array(first, float), np.reshape(np.array(hop, float), (len(first), len(first)))
    if len(begin) <= MOST_EXACT:
        return _best_order(begin, hops)
    orders = [_nearest_next(start, hops) for start in range(len(begin))]
    return min(orders, key=lambda order: (begin[order[0]] + sum(hops[step] for step in pairwise(order)), order))


def _best_order(begin: np.ndarray, hops: np.ndarray) -> tuple[int, ...]:
    """Dynamic programming over subsets (Held, Karp 1962), 2^n n^2 steps: of every set of nodes and every one of them to be visited first,
    the least cost."""
    n = len(begin)
    sets, least = np.arange(1 << n), np.full((1 << n, n), np.inf)
    least[1 << np.arange(n), np.arange(n)] = 0.0
    sizes = sum((sets >> i & 1 for i in range(n)), np.zeros_like(sets))
    for size in range(2, n + 1):
        for i in range(n):
            some = sets[(sizes == size) & (sets >> i & 1 == 1)]
            least[some, i] = (hops[i] + least[some ^ 1 << i]).min(1)
    order, left, costs = [], (1 << n) - 1, begin
    while left:
        at = int((costs + least[left]).argmin())
        order.append(at)
        left, costs = left ^ 1 << at, hops[at]
    return tuple(order)


def _nearest_next(start: int, hops: np.ndarray) -> tuple[int, ...]:
    order, left = [start], [node for node in range(len(hops)) if node != start]
    while left:
        order.append(min(left, key=lambda node: (hops[order[-1], node], node)))
        left.remove(order[-1])
    return tuple(order)
