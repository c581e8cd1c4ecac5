"""Siblings of a way: the same groups on the same meshes, with less recomputation or other packs.

A shortlist names each set of meshes once, with the recomputation and the packs that are best in closed form. On the clock others may be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from longshift.simulate.cost import RECOMPUTE
from longshift.workload.groups import Edge


def siblings(edges: Sequence[Edge]) -> Iterator[tuple[Edge, ...]]:
    """Ways in which one group has packs of half or twice the size, or recomputes less in packs of any of the three sizes. Streamed groups
    stay as they are."""
    for place, edge in enumerate(edges):
        if edge.use.chunk:
            continue
        less = [replace(edge.use, recompute=one, keep_output=False) for one in RECOMPUTE[: RECOMPUTE.index(edge.use.recompute)]]
        packs = [pack for pack in (edge.pack, edge.pack // 2, 2 * edge.pack) if pack >= edge.upto]
        for use in (edge.use, *less):
            for pack in packs:
                if (use, pack) != (edge.use, edge.pack):
                    yield (*edges[:place], replace(edge, use=use, pack=pack), *edges[place + 1 :])
