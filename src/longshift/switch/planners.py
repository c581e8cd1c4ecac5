"""Who sends each needed slice to whom. Two planners, each a pure function of one weight's slices
and of what everyone has sent so far. A run plans by `fan_out`.

    algorithm1    HotSPa (SOSP 2024), Algorithm 1: for every slice and every rank that needs it, the
                  holder on the same node that has sent least inside nodes; where there is none, the
                  holder that has sent least between nodes
    fan_out       a slice enters a node that lacks it once, by the network card of whichever of its
                  ranks has received least, and spreads inside the node from there: two rounds.
                  Between nodes a byte then travels once a node instead of once a rank

        algorithm1   A0 ──> B0, B1, B2, B3          fan_out   round 0   A0 ──> B1
                     (four times between nodes)               round 1   B1 ──> B0, B2, B3

Ties go to the lowest rank; loads are whole bytes. So every rank finds the same plan.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longshift.switch.links import Links
from longshift.switch.options import Planner
from longshift.switch.slices import Slices

FULL = 2**62
# Rows of the loads: sent inside nodes, sent between nodes, received from other nodes.
INSIDE, BETWEEN, ENTERED = range(3)


@dataclass(frozen=True, eq=False)
class Moves:
    """Moves of one weight, by slice, then round, then target: int32 [moves] each. A round's moves
    need those of the round before."""

    slice: np.ndarray
    round: np.ndarray
    source: np.ndarray
    target: np.ndarray

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the moves."""
        columns = self.slice, self.round, self.source, self.target
        return hashlib.sha256(
            b"".join(column.astype("<i4").tobytes() for column in columns)
        ).digest()

    def __len__(self) -> int:
        return len(self.slice)


class MoveColumns(NamedTuple):
    """Some of the moves, in any order; fields as of `Moves`."""

    slice: np.ndarray
    round: np.ndarray
    source: np.ndarray
    target: np.ndarray


class Wave(ABC):
    """Slices `rows` of a weight, no two with a common holder, which a planner deals together.
    `near`: needed where the node has a holder; `far`: where it has none."""

    def __init__(self, slices: Slices, rows: np.ndarray, links: Links, loads: np.ndarray):
        self.rows = rows
        self.loads = loads
        self.has = slices.has[rows]
        self.wants = slices.wants[rows]
        self.size = slices.size_bytes[rows]

        # Nodes of consecutive ranks; the last one may have fewer.
        world = self.has.shape[1]
        self.per_node = min(links.per_node, world)
        self.node = np.arange(world) // self.per_node
        self.starts = np.arange(0, world, self.per_node)

        needs = slices.needs[rows]
        is_on_node = self._by_node(self.has)[:, self.node] > 0
        self.near = needs & is_on_node
        self.far = needs & ~is_on_node

    @abstractmethod
    def parts(self) -> list[MoveColumns]:
        """The moves that bring each slice to the ranks that need it. Adds what they send to
        `loads`."""

    def _by_node(self, flags: np.ndarray) -> np.ndarray:
        """Counts, int64 [slices, nodes]."""
        return np.add.reduceat(flags, self.starts, axis=1, dtype=np.int64)

    def _deal_near(self) -> MoveColumns:
        """The moves inside each node, whose holders share what the others need."""
        count = self._by_node(self.near)
        row, targets = np.nonzero(self.near)

        # A slice and a node that needs it are a group; its members are the node's holders.
        group = np.cumsum(count.ravel() > 0).reshape(count.shape) - 1
        group_row, group_node = np.nonzero(count)
        holder_row, holder = np.nonzero(self.has & (count > 0)[:, self.node])
        sources = deal(
            group=group[holder_row, self.node[holder]],
            rank=holder,
            count=count[group_row, group_node],
            size=self.size[group_row],
            load=self.loads[INSIDE],
        )
        return MoveColumns(self.rows[row], np.zeros_like(row), sources, targets)

    def _deal_far(self, count: np.ndarray) -> np.ndarray:
        """The sources, by slice, where all holders of a slice share its `count` sends
        to other nodes."""
        rows = np.flatnonzero(count)
        group, holder = np.nonzero(self.has[rows])
        return deal(group, holder, count[rows], self.size[rows], self.loads[BETWEEN])


class _Algorithm1(Wave):
    def parts(self) -> list[MoveColumns]:
        row, targets = np.nonzero(self.far)
        sources = self._deal_far(self.far.sum(1))
        far = MoveColumns(self.rows[row], np.zeros_like(row), sources, targets)
        return [self._deal_near(), far]


class _FanOut(Wave):
    def parts(self) -> list[MoveColumns]:
        # Round 0: each slice enters each node that lacks it, by one rank.
        lacking = self._by_node(self.far) > 0
        row, nodes = np.nonzero(lacking)
        entries = self._entries(lacking)
        doors = entries[row, nodes]
        sources = self._deal_far(lacking.sum(1))
        first = MoveColumns(self.rows[row], np.zeros_like(row), sources, doors)

        # Round 1: that rank sends it to all others of its node that need it.
        spread = self.far.copy()
        spread[row, doors] = False
        inner, targets = np.nonzero(spread)
        sources = entries[inner, self.node[targets]]
        np.add.at(self.loads[INSIDE], sources, self.size[inner])
        second = MoveColumns(self.rows[inner], np.ones_like(inner), sources, targets)

        # Last, as holders inside nodes are dealt by what these sends add to their loads.
        return [first, second, self._deal_near()]

    def _entries(self, lacking: np.ndarray) -> np.ndarray:
        """The rank by which each slice enters each lacking node: int64 [slices, nodes], -1 where
        nothing enters.

        It is the rank that has received least from outside. A rank that does not want the slice
        counts as one slice fuller, for it would only pass it on.
        """
        num_rows, num_nodes = lacking.shape
        world = len(self.node)

        # The last node may have fewer ranks: its missing ones are full.
        received = np.full(num_nodes * self.per_node, FULL)
        received[:world] = self.loads[ENTERED]
        received = received.reshape(num_nodes, self.per_node)
        detour = np.zeros((num_rows, num_nodes * self.per_node), np.int64)
        detour[:, :world] = self.size[:, None] * ~self.wants
        detour = detour.reshape(num_rows, num_nodes, self.per_node)

        entries = np.full(lacking.shape, -1)
        for row in np.flatnonzero(lacking.any(1)):
            nodes = np.flatnonzero(lacking[row])
            door = (received[nodes] + detour[row, nodes]).argmin(1)
            received[nodes, door] += self.size[row]
            entries[row, nodes] = nodes * self.per_node + door
        self.loads[ENTERED] = received.ravel()[:world]
        return entries


PLANNERS: dict[str, type[Wave]] = {"fan_out": _FanOut, "algorithm1": _Algorithm1}


def assign(planner: Planner, slices: Slices, links: Links, loads: np.ndarray) -> Moves:
    """The moves of one weight. Adds what they send to `loads`, int64 [3, world]."""
    wave = PLANNERS[planner]
    empty = np.zeros(0, np.int32)
    parts = [MoveColumns(empty, empty, empty, empty)]
    for rows in slices.waves:
        parts += wave(slices, rows, links, loads).parts()
    row, number, source, target = (
        np.concatenate(column).astype(np.int32) for column in zip(*parts)
    )
    order = np.lexsort((target, number, row))
    return Moves(slice=row[order], round=number[order], source=source[order], target=target[order])


def deal(
    group: np.ndarray, rank: np.ndarray, count: np.ndarray, size: np.ndarray, load: np.ndarray
) -> np.ndarray:
    """The ranks that are picked, by group, in the order of picking. `count` times the member of
    least load, the first of equals, takes `size`.

    `group`, `rank`: the members, by group (0, 1, ... without gaps), then by rank; no rank is in
    two. `count`, `size`: by group. Adds the sizes to `load`.

    A member picked j times before has load + j * size: the picks of a group are the `count` least
    of these numbers."""
    groups = np.arange(len(count))
    first = np.searchsorted(group, groups)
    members = np.diff(np.append(first, len(group)))
    if (members == 1).all():
        picks = rank.repeat(count)
    else:
        # 1. Find a level up to which a group has `count` numbers or more.
        base = load[rank]
        even_share = -(-count // members)
        level = np.maximum.reduceat(base, first) + size * (even_share - 1)

        # 2. List each member's numbers up to there, least first.
        turns = np.minimum((level[group] - base) // size[group] + 1, count[group])
        member = np.repeat(np.arange(len(rank)), turns)
        nth = np.arange(len(member)) - np.repeat(np.cumsum(turns) - turns, turns)
        number = base[member] + nth * size[group[member]]
        order = np.lexsort((member, number, group[member]))

        # 3. Keep the first `count` of each group.
        member = member[order]
        group_of = group[member]
        place = np.arange(len(member)) - np.searchsorted(group_of, groups)[group_of]
        picks = rank[member[place < count[group_of]]]
    np.add.at(load, picks, size.repeat(count))
    return picks
