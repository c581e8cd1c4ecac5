"""One step's documents by length: which layout computes them, in which packs, on which replica, and
which layout comes first.

    documents ─ by length ─> groups (lo, hi] ─ by cost ─> shares of the layout's replicas
              ─ best fit ─> packs of up to `pack` tokens

Every document is in one pack of one group. Documents are dealt, not packs: they are smaller, so the
shares come out nearly equal. Of a layout only its replicas have a say in this. A group without
documents does not exist: its layout is not visited.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from longshift.errors import UsageError, did_you_mean, shown
from longshift.layout.layout import MOST_SIZE, Layout, format_size, parse_size
from longshift.spec.model import ModelSpec

# Nodes: some 50 ms of dynamic programming; every further one takes three times as long.
MOST_EXACT = 10

LEAST_S = 600.0
SLOW_FLOPS: Mapping[str, float] = {"cpu": 2e9, "cuda": 1e13}
"""Model FLOP/s that a rank is sure to reach, by type of its device: about a tenth of what a CPU
core multiplies in float32, and of what a GPU of 2018 multiplies in 16 bits. Recomputation, waiting
for a tier and small matrices slow a rank down by less. A timeout that is too long delays the news
of a rank that hangs (one that dies is noticed at once); one that is too short ends a good run."""


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
    keys = ("upto", "use", "pack")
    for key in item if isinstance(item, dict) else ():
        if key not in keys:
            raise UsageError(
                f"{str(key)[:80]}: no such key of a group{did_you_mean(str(key), keys)}"
            )
    if not isinstance(item, dict) or not {"upto", "use"} <= item.keys():
        raise UsageError(f"{shown(item)}: a group needs upto and use, as in {{upto: 4K, use: dp4}}")
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
        raise UsageError(
            f"{key}: {shown(value)} is not a number of tokens of at most {MOST_SIZE}, such as 4K"
        )
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
    """The groups that have documents, from short to long. No document is longer than the
    last edge: the over-length policy comes before."""
    # An edge includes its length, so bisect_left finds the group.
    ends = [edge.upto for edge in edges]
    members: list[list[int]] = [[] for _ in edges]
    for index, length in enumerate(lengths):
        members[bisect_left(ends, length)].append(index)

    # A group without documents is left out, so that its layout is not visited.
    groups = []
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
    pack_shares = []
    for share in shares(document_costs, edge.use.dp):
        replica_documents = [documents[i] for i in share]
        first_pack = len(packs)
        for indices in pack([lengths[d] for d in replica_documents], edge.pack):
            packs.append(tuple(replica_documents[i] for i in indices))
        pack_shares.append(tuple(range(first_pack, len(packs))))

    pack_costs = tuple(cost([lengths[d] for d in pack_documents], spec) for pack_documents in packs)
    return LengthGroup(lo, edge.upto, edge.use, tuple(packs), tuple(pack_shares), pack_costs)


def pack(lengths: Sequence[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Best-fit decreasing: whole documents, longest first, each into the fullest pack that still
    holds it, else into a new one.

    Returns indices into `lengths`; the packs in the order they were opened. A function of its
    arguments alone: equal lengths keep their order, and of equally full packs the first is taken.
    Needs at most 11/9 of the fewest possible packs, plus one. No document is longer than
    `capacity`: the over-length policy comes before packing.
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fit = bisect_left(free, (length, 0))
        if fit < len(free):
            space, pack_index = free.pop(fit)
        else:
            space = capacity
            pack_index = len(packs)
            packs.append([])
        packs[pack_index].append(index)
        insort(free, (space - length, pack_index))
    return tuple(map(tuple, packs))


def shares(costs: Sequence[float], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Longest processing time first: each pack, dearest first, goes to the replica with the least
    to do.

    Returns indices into `costs` for every replica, dearest first. Shares may differ in number and
    may be empty. A function of its arguments alone: equal costs keep their order, and of equally
    loaded replicas the first is taken. The dearest share costs at most 4/3 of the best possible.
    """
    replica_shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]  # sorted, so a heap
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, replica = loads[0]
        replica_shares[replica].append(index)
        heapq.heapreplace(loads, (load + costs[index], replica))
    return tuple(map(tuple, replica_shares))


def cost(lengths: Sequence[int], spec: ModelSpec) -> float:
    """Model FLOP of forward and backward over a pack of documents: linear in its tokens, quadratic
    in each document as far as the model's sliding window reaches."""
    return sum(n * spec.flops_per_token(float(spec.attended(n)) / n) for n in lengths if n)


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
    costs = [*hop, first]

    # Dynamic programming over subsets (Held, Karp 1962).
    @cache
    def cheapest(node: int, unvisited: frozenset[int]) -> tuple[float, tuple[int, ...]]:
        """Cost and order of visiting these nodes after `node`; `n` is home."""
        orders: list[tuple[float, tuple[int, ...]]] = [] if unvisited else [(0.0, ())]
        for next_node in unvisited:
            rest_cost, rest = cheapest(next_node, unvisited - {next_node})
            orders.append((costs[node][next_node] + rest_cost, (next_node, *rest)))
        return min(orders)

    _, order = cheapest(n, frozenset(range(n)))
    return order


def timeout_s(
    spec: ModelSpec, edges: Sequence[Edge], max_len: int, tokens_per_step: int, flops_per_s: float
) -> float:
    """Seconds after which a collective fails: LEAST_S, or more where one rank may have to wait
    longer for another inside a step.

        replica 0   short documents ░░░░ waits ........................ reduce
        replica 1   one document of 1M tokens ░░░░░░░░░░░░░░░░░░░░░░░░░ reduce

    Documents are dealt dearest first to the replica with the least to do (`shares`), so a replica's
    share of a group costs at most the mean of the replicas and one document of the group's longest.
    Stages of a pipeline do not shorten one pack.
    """
    longest_flops = 0.0
    mean_flops = 0.0
    for edge in edges:
        length = min(edge.upto, max_len)
        document_flops = cost([length], spec) / edge.use.sequence

        # Groups that share copies of the weights do not wait for each other, so their longest
        # documents add up.
        longest_flops += document_flops
        # The last document of a step may exceed its tokens by max_len.
        group_flops = document_flops / length * (tokens_per_step + max_len) / edge.use.dp
        mean_flops = max(mean_flops, group_flops)
    return max(LEAST_S, (longest_flops + mean_flops) / flops_per_s)
