"""One step's documents by length: which layout computes them, in which packs, on which replica, and
which layout comes first.

    documents ─ by length ─> groups (lo, hi] ─ by cost ─> shares of the layout's replicas
              ─ best fit ─> packs of up to `pack` tokens

Every document is in one pack of one group. Documents are dealt, not packs: they are smaller, so the
shares come out nearly equal. Of a layout only its replicas have a say in this. A group without
documents does not exist: its layout is not visited.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from longshift.errors import UsageError, did_you_mean, shown
from longshift.layout.layout import MOST_SIZE, Layout, format_size, parse_size
from longshift.spec.model import ModelSpec
from longshift.workload.packs import cost, pack, shares

MOST_EXACT = 14  # nodes: some 10 ms of dynamic programming; every further node doubles them


@dataclass(frozen=True)
class Edge:
    """Documents of up to `upto` tokens, and longer than the edge before, are computed under `use`,
    in packs of up to `pack` tokens, which is `upto` where it is not given.
    A line of the config's `layout:`."""

    upto: int
    use: Layout
    pack: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pack", self.pack or self.upto)

    def __str__(self) -> str:
        """As in `dp2 <= 8K in 32K`: the pack where it is another size."""
        return f"{self.use} <= {format_size(self.upto)}" + self.packs

    @property
    def packs(self) -> str:
        """Words on the size of its packs, where that is not `upto`: ` in 32K`."""
        return f" in {format_size(self.pack)}" if self.pack != self.upto else ""

    def told(self) -> dict[str, str]:
        """The line that `parse_edges` reads."""
        pack = {"pack": format_size(self.pack)} if self.pack != self.upto else {}
        return {"upto": format_size(self.upto), "use": str(self.use)} | pack


def home_layout(edges: Sequence[Edge]) -> Layout:
    """The layout that cuts home: the only one, or the longest group's, sharded."""
    last = edges[-1].use
    return last if len(edges) == 1 else replace(last, zero=max(1, last.zero))


@dataclass(frozen=True)
class LengthGroup:
    """The documents of one step whose length lies in (lo, hi].

    `packs`: the documents of each, as indices into the step's; `shares`: the packs of each replica
    (`layout.dp`), as indices into `packs`, maybe none; `costs`: FLOP of each pack.
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


def parse_edges(items: Sequence[object]) -> tuple[Edge, ...]:
    """The groups that a config's `layout:` lists, as in [{upto: 1K, use: dp8, pack: 16K}, {upto:
    32K, use: tp8}]. Raises UsageError."""
    edges = tuple(_parse_edge(item) for item in items)
    check_edges(edges)
    return edges


def _parse_edge(item: object) -> Edge:
    needed_keys = ("upto", "use")
    keys = (*needed_keys, "pack")
    if not isinstance(item, dict):
        raise UsageError(
            f"{shown(item)}: a group has the keys upto and use, as in {{upto: 4K, use: dp4}}"
        )
    for key in item:
        if key not in keys:
            raise UsageError(
                f"{str(key)[:80]}: no such key of a group{did_you_mean(str(key), keys)}"
            )
    for key in needed_keys:
        if key not in item:
            raise UsageError(f"{shown(item)}: a group needs {key}, as in {{upto: 4K, use: dp4}}")
    if not isinstance(item["use"], str):
        raise UsageError(f"use: {shown(item['use'])} is not a layout, such as dp2.tp2")
    pack = _tokens("pack", item["pack"]) if "pack" in item else 0
    return Edge(_tokens("upto", item["upto"]), Layout.parse(item["use"]), pack)


def _tokens(key: str, value: object) -> int:
    try:
        size = parse_size(value)
    except ValueError as fault:
        raise UsageError(f"{key}: {fault}") from None
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_SIZE:
        is_too_large = isinstance(size, int) and size > MOST_SIZE
        limit = f" of at most {MOST_SIZE}" if is_too_large else ""
        raise UsageError(f"{key}: {shown(value)} is not a number of tokens{limit}, such as 4K")
    return size


def check_edges(edges: Sequence[Edge]) -> None:
    """Raise UsageError unless the edges ascend, there is one, and every pack holds its group's
    longest document."""
    if not edges:
        raise UsageError(
            "layout: an empty list; name at least one group, as in layout: [{upto: 4K, use: dp4}]"
        )
    for shorter, longer in pairwise(edges):
        if longer.upto <= shorter.upto:
            fault = f"upto {longer.upto} ({longer.use}) comes after {shorter.upto} ({shorter.use})"
            raise UsageError(f"layout: {fault}; groups go from short to long")
    if edges[0].upto < 1:
        raise UsageError(
            f"layout: upto {edges[0].upto} ({edges[0].use}) holds no document; it is at least 1"
        )
    for edge in edges:
        if edge.pack < edge.upto:
            upto = format_size(edge.upto)
            fault = (
                f"pack {format_size(edge.pack)} of upto {upto} ({edge.use}) does not hold the"
                " group's longest document"
            )
            raise UsageError(f"layout: {fault}; write pack: {upto} or more, or leave it out")


def length_groups(
    lengths: Sequence[int], edges: Sequence[Edge], spec: ModelSpec
) -> tuple[LengthGroup, ...]:
    """The groups that have documents, from short to long.

    Raises UsageError for edges that do not ascend, and for a document longer than the last edge:
    the over-length policy comes before."""
    check_edges(edges)
    last = edges[-1]
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > last.upto:
        raise UsageError(
            f"document {longest} of the step has {lengths[longest]} tokens and the last group"
            f" ({last.use}) ends at {last.upto}; raise its upto to {lengths[longest]}, or cut long"
            " documents with data.max_len and data.overlong"
        )
    # An edge includes its length, so bisect_left finds the group.
    ends = [edge.upto for edge in edges]
    members: list[list[int]] = [[] for _ in edges]
    for index, length in enumerate(lengths):
        members[bisect_left(ends, length)].append(index)

    groups = list[LengthGroup]()
    for lo, edge, documents in zip((0, *ends), edges, members):
        if documents:
            groups.append(_group(lo, edge, documents, lengths, spec))
    return tuple(groups)


def _group(
    lo: int, edge: Edge, documents: Sequence[int], lengths: Sequence[int], spec: ModelSpec
) -> LengthGroup:
    """The group of some documents: dealt over replicas by cost, then packed on each. `documents`:
    indices into `lengths`."""
    document_costs = [cost([lengths[d]], spec) for d in documents]
    packs: list[tuple[int, ...]] = []
    pack_shares: list[tuple[int, ...]] = []
    for share in shares(document_costs, edge.use.dp):
        replica_documents = [documents[i] for i in share]
        first_pack = len(packs)
        for indices in pack([lengths[d] for d in replica_documents], edge.pack):
            packs.append(tuple(replica_documents[i] for i in indices))
        pack_shares.append(tuple(range(first_pack, len(packs))))

    pack_costs = tuple(cost([lengths[d] for d in pack_documents], spec) for pack_documents in packs)
    return LengthGroup(lo, edge.upto, edge.use, tuple(packs), tuple(pack_shares), pack_costs)


def visiting_order(first: Sequence[float], hop: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The order of visiting n nodes whose switches cost least together; of equal orders the
    lexicographically least.

    `first[i]`: from home to node i. `hop[i][j]`: from i to j, with home's help. The way back costs
    nothing: gradients of every node go home in any order. Exact for up to MOST_EXACT nodes; more
    are visited in the order given.
    """
    n = len(first)
    if n > MOST_EXACT:
        return tuple(range(n))
    # Without a node, `hop` has no second dim.
    hops = np.reshape(np.array(hop, float), (n, n))
    return _best_order(np.array(first, float), hops)


def _best_order(begin: np.ndarray, hops: np.ndarray) -> tuple[int, ...]:
    """The cheapest order, by dynamic programming over subsets (Held, Karp 1962): 2^n n^2 steps.

    `begin` [n]: from home to each node; `hops` [n, n].
    """
    n = len(begin)
    sets = np.arange(1 << n)  # a bit a node
    sizes = sum((sets >> i & 1 for i in range(n)), np.zeros_like(sets))

    # 1. min_costs[s, i]: of visiting all nodes of set s, node i first. A node alone needs no hop.
    min_costs = np.full((1 << n, n), np.inf)
    min_costs[1 << np.arange(n), np.arange(n)] = 0.0
    for size in range(2, n + 1):
        for i in range(n):
            has_node = sets >> i & 1 == 1
            sets_with_node = sets[(sizes == size) & has_node]
            rest = sets_with_node ^ 1 << i
            min_costs[sets_with_node, i] = (hops[i] + min_costs[rest]).min(1)

    # 2. Walk the cheapest way. argmin takes the first of equal nodes:
    # the lexicographically least order.
    order = []
    unvisited = (1 << n) - 1
    costs = begin
    while unvisited:
        node = int((costs + min_costs[unvisited]).argmin())
        order.append(node)
        unvisited ^= 1 << node
        costs = hops[node]
    return tuple(order)
