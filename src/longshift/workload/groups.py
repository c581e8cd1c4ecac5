"""One step's documents by length: which layout computes them, in which packs, on which replica, and which layout comes first.

    documents ─ by length ─> groups (lo, hi] ─ by cost ─> shares of the layout's replicas ─ best fit ─> packs of up to hi tokens

Every document is in one pack of one group. Documents are dealt, not packs: they are smaller, so the shares come out nearly equal. Of a
layout only its replicas have a say in this. A group without documents does not exist: its layout is not visited.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec
from longshift.workload.packs import cost, pack, shares


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
    """The order of visiting n groups whose switches cost least together; of equal orders the lexicographically least.

    `first[i]`: from home to group i. `hop[i][j]`: from i to j, with home's help. `last[i]`: from i back to home, beyond what every group's
    gradients cost anyway (zeros where nothing depends on who is last). Exact: dynamic programming over subsets (Held, Karp 1962),
    2^n n^2 steps. Raises ValueError for more than 16 groups.
    """
    n = len(first)
    if n > 16:
        raise ValueError(f"{n} groups: the exact search is for at most 16")
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1 << i, i): (first[i], (i,)) for i in range(n)}
    for visited in range(1, 1 << n):
        for end in range(n):
            if (visited, end) not in best:
                continue
            spent, order = best[visited, end]
            for after in range(n):
                if not visited >> after & 1:
                    key, way = (visited | 1 << after, after), (spent + hop[end][after], (*order, after))
                    best[key] = min(best.get(key, way), way)
    full = (1 << n) - 1
    return min(((spent + last[end], order) for (visited, end), (spent, order) in best.items() if visited == full), default=(0.0, ()))[1]
