"""Siblings of a way: groups on the same meshes, with less recomputation, another ZeRO stage, other packs or ends; how plain a way is.

A shortlist names each set of meshes once, with the recomputation, the ZeRO stage and the packs that are best by rate card. On the clock
others may be.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from longshift.layout import axes
from longshift.planner.shortlist import MESH
from longshift.simulate.cost import RECOMPUTE, recompute_code
from longshift.workload.groups import Edge


def siblings(edges: Sequence[Edge]) -> Iterator[tuple[Edge, ...]]:
    """Ways in which one group has packs of half or twice the size, recomputes less in packs of any of the three sizes, or has another ZeRO
    stage; of several groups, in which one ends at other documents, and the `lower` way. Streamed groups stay as they are."""
    least = int(len(edges) > 1)
    for place, edge in enumerate(edges):
        if edge.use.chunk:
            continue
        less = [replace(edge.use, recompute=one) for one in RECOMPUTE[: RECOMPUTE.index(edge.use.recompute)]]
        has_replicas = edge.use.ranks_along(axes.holder_axes()) > 1
        other_zero = [replace(edge.use, zero=zero) for zero in range(least, 4 if has_replicas else 1)]
        packs = [pack for pack in (edge.pack, edge.pack // 2, 2 * edge.pack) if pack >= edge.upto]
        others = [(use, pack) for use in (edge.use, *less) for pack in packs] + [(use, edge.pack) for use in other_zero]
        for use, pack in others:
            if (use, pack) != (edge.use, edge.pack):
                yield (*edges[:place], replace(edge, use=use, pack=pack), *edges[place + 1 :])
    yield from _moved_edges(edges)
    if len(edges) > 1 and (below := lower(edges)) != tuple(edges):
        yield below


def _moved_edges(edges: Sequence[Edge]) -> Iterator[tuple[Edge, ...]]:
    """Ways in which a group ends at another power of two, the next one or the one before, between its neighbours' ends."""
    for place, edge in enumerate(edges[:-1]):
        shortest = edges[place - 1].upto if place else 0
        power = 1 << (edge.upto - 1).bit_length()  # the next one, or the end itself
        for upto in (power // 2, power, 2 * power):
            if shortest < upto < edges[place + 1].upto and upto != edge.upto:
                moved = replace(edge, upto=upto, pack=max(edge.pack, upto))
                yield (*edges[:place], moved, *edges[place + 1 :])


def lower(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """The way in which every group has the next lower ZeRO stage. Where layouts change, every state is sharded. Streamed groups stay as
    they are."""
    least = int(len(edges) > 1)
    below = [edge.use.zero - (edge.use.zero > least and not edge.use.chunk) for edge in edges]
    return tuple(replace(edge, use=replace(edge.use, zero=zero)) for edge, zero in zip(edges, below))


def smaller(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """The way with packs of half the size, as far as they hold the longest document."""
    return tuple(replace(edge, pack=max(edge.upto, edge.pack // 2)) for edge in edges)


def meshes(edges: Sequence[Edge]) -> frozenset[tuple[int, ...]]:
    """The set of meshes of a way's groups, which its siblings have, too."""
    return frozenset(tuple(getattr(edge.use, name) for name in MESH) for edge in edges)


def first_of_meshes(ways: Iterable[tuple[Edge, ...]]) -> list[tuple[Edge, ...]]:
    """The first way of each set of meshes, in their order."""
    found: dict[frozenset[tuple[int, ...]], tuple[Edge, ...]] = {}
    for edges in ways:
        found.setdefault(meshes(edges), edges)
    return list(found.values())


def plainness(edges: Sequence[Edge]) -> tuple[int, ...]:
    """What the plainest of several ways has least of, the first of these first: groups, streamed groups, axes, recomputation, stages of
    ZeRO, packs larger than their longest document."""
    uses = [edge.use for edge in edges]
    num_axes = sum(degree > 1 for use in uses for degree in (*map(use.degree, axes.names()), use.virtual))
    return (
        len(edges),
        sum(use.chunk > 0 for use in uses),
        num_axes,
        sum(map(recompute_code, uses)),
        sum(use.zero for use in uses),
        sum(edge.pack != edge.upto for edge in edges),
    )
