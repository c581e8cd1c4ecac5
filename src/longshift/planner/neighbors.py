"""Neighbors of a plan: groups on the same meshes, with less recomputation, another ZeRO stage,
other packs or ends.

A shortlist names each set of meshes once, with the recomputation, the ZeRO stage and the packs that
are best by rate card. On the clock others may be.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.planner.candidates import mesh_choices, mesh_names
from longshift.planner.task import Edges
from longshift.simulate.cost import RECOMPUTE, recompute_code
from longshift.workload.groups import Edge


def neighbors(edges: Edges) -> Iterator[Edges]:
    """Yield plans that differ in one group, and the plan of `lower_zero`.

    The group has packs of half or twice the size, recomputes less in packs of any of the three
    sizes, has another ZeRO stage, or ends at other documents. Streamed groups stay as they are.
    """
    for index, edge in enumerate(edges):
        if edge.use.chunk:
            continue
        sizes = (edge.pack, edge.pack // 2, 2 * edge.pack)
        # A pack holds the longest document of its group.
        packs = [pack for pack in sizes if pack >= edge.upto]
        less_recompute = RECOMPUTE[: RECOMPUTE.index(edge.use.recompute)]
        uses = [edge.use, *(replace(edge.use, recompute=recompute) for recompute in less_recompute)]
        variants = [(use, pack) for use in uses for pack in packs]
        variants += [(use, edge.pack) for use in _zero_stages(edge.use, len(edges))]
        for use, pack in variants:
            if (use, pack) != (edge.use, edge.pack):
                yield _replace_group(edges, index, replace(edge, use=use, pack=pack))
    yield from _move_ends(edges)
    if len(edges) > 1:
        lower = lower_zero(edges)
        if lower != edges:
            yield lower


def _zero_stages(layout: Layout, num_groups: int) -> list[Layout]:
    """The layout under every ZeRO stage."""
    has_replicas = layout.holders > 1
    stages = range(_min_zero(num_groups), 4 if has_replicas else 1)
    return [replace(layout, zero=zero) for zero in stages]


def _min_zero(num_groups: int) -> int:
    """Where layouts change, every state is sharded."""
    return 1 if num_groups > 1 else 0


def _replace_group(edges: Edges, index: int, group: Edge) -> Edges:
    return (*edges[:index], group, *edges[index + 1 :])


def _move_ends(edges: Edges) -> Iterator[Edges]:
    """Yield plans in which a group ends at another power of two: the nearest one below, or one
    of the two after that."""
    for index, edge in enumerate(edges[:-1]):
        shortest = edges[index - 1].upto if index else 0
        power = 1 << (edge.upto - 1).bit_length()  # the next one, or the end itself
        for upto in (power // 2, power, 2 * power):
            if shortest < upto < edges[index + 1].upto and upto != edge.upto:
                group = replace(edge, upto=upto, pack=max(edge.pack, upto))
                yield _replace_group(edges, index, group)


def lower_zero(edges: Edges) -> Edges:
    """The plan in which every group has the next lower ZeRO stage. Streamed groups stay as they
    are."""
    groups = []
    for edge in edges:
        if edge.use.zero > _min_zero(len(edges)) and not edge.use.chunk:
            edge = replace(edge, use=replace(edge.use, zero=edge.use.zero - 1))
        groups.append(edge)
    return tuple(groups)


def halve_packs(edges: Edges) -> Edges:
    """The plan with packs of half the size. They still hold the longest document."""
    return tuple(replace(edge, pack=max(edge.upto, edge.pack // 2)) for edge in edges)


def mesh_set(edges: Edges) -> frozenset[tuple[int, ...]]:
    """The set of meshes of a plan's groups, which its neighbors share."""
    return frozenset(mesh_choices(edge.use, mesh_names()) for edge in edges)


def first_of_meshes(plans: Iterable[Edges]) -> list[Edges]:
    """The first plan of each set of meshes, in their order."""
    firsts: dict[frozenset[tuple[int, ...]], Edges] = {}
    for edges in plans:
        firsts.setdefault(mesh_set(edges), edges)
    return list(firsts.values())


def complexity(edges: Sequence[Edge]) -> tuple[int, ...]:
    """What the simplest of several plans has least of, by weight.

    Groups, streamed groups, axes, recomputation, stages of ZeRO, packs larger than their longest
    document."""
    num_axes = num_streamed = recompute = zero = num_large_packs = 0
    for edge in edges:
        degrees = [edge.use.degree(name) for name in axes.names()]
        num_axes += sum(degree > 1 for degree in (*degrees, edge.use.virtual))
        num_streamed += edge.use.chunk > 0
        recompute += recompute_code(edge.use)
        zero += edge.use.zero
        num_large_packs += edge.pack != edge.upto
    return len(edges), num_streamed, num_axes, recompute, zero, num_large_packs
