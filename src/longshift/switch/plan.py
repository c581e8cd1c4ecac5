"""Switch plans: which slice of which weight goes from which rank to which, in which bucket and
round. Pure, the same on every rank.

    held: home, copies of layout A ─┐
                                    ├─ refine ─> slices ─ planner ─> moves ─ buckets ─> Plan
    wanted: copies of layout B ─────┘                              digest: ranks compare it first

A bucket is played round by round: a round's moves between two ranks are one buffer, in the plan's
order, and need what arrived in the rounds before. Buckets follow one another; no rank sends or
receives more than `bucket_bytes` in one, all rounds together.

[Note: sums] Gradients go home by the plan that would bring the weights from there, backwards: every
move turned round and the last round first, each rank adding what it gets to what it has. As every
copy hangs on home by exactly one path, every partial sum is counted once.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longshift.layout.box import Box
from longshift.switch.links import Links
from longshift.switch.planners import BETWEEN, ENTERED, INSIDE, Moves, Planner, assign
from longshift.switch.slices import Slices, merge_boxes, refine
from longshift.switch.spread import BoxesByWeight, Spread


@dataclass(frozen=True, order=True)
class Move:
    """`box` of weight `name` goes from rank `source` to rank `target`, which may be the same."""

    source: int
    target: int
    name: str
    box: Box


class Transit(NamedTuple):
    """When a box moves, and between which ranks."""

    bucket: int
    round: int
    source: int
    target: int


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives in one round of a bucket, in the global order."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


@dataclass(frozen=True)
class Turn:
    """One rank's part of a bucket. `local`: what it wants and has already, moves to itself."""

    local: tuple[Move, ...]
    rounds: tuple[Round, ...]


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """One weight. `bucket`: ascending int32 [slices]. Weights that lie and move alike share
    `slices` and `moves`."""

    name: str
    slices: Slices
    moves: Moves
    bucket: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """All moves of a switch. `buffer_bytes`: the most that a rank sends and receives in one bucket.
    `sums`: see [Note: sums]."""

    planner: Planner
    links: Links
    world: int
    itemsize: int
    bucket_bytes: int | None
    buffer_bytes: int
    weights: tuple[WeightPlan, ...]
    sums: bool = False

    @cached_property
    def rounds(self) -> int:
        """How many a bucket has: 2 where something enters a node and spreads there, else 1."""
        return 1 + max((int(w.moves.round.max()) for w in self.weights if len(w.moves)), default=0)

    @property
    def buckets(self) -> int:
        return 1 + max((int(w.bucket[-1]) for w in self.weights if len(w.bucket)), default=0)

    @property
    def exchanges(self) -> int:
        """How many exchanges play the plan: each carries a round of a bucket, and the round after
        of the bucket before."""
        return self.buckets + self.rounds - 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that the ranks must agree on: hexadecimal."""
        facts = (self.planner, self.world, self.itemsize, self.bucket_bytes, self.sums)
        digest = hashlib.sha256(repr(facts).encode())
        for w in self.weights:
            digest.update(w.name.encode() + b"\0" + w.slices.digest + w.moves.digest)
            digest.update(w.bucket.astype("<i4").tobytes())
        return digest.hexdigest()

    @cached_property
    def bytes_by_pair(self) -> np.ndarray:
        """Bytes from rank to rank: int64 [world, world]; what a rank has already is not moved and
        not counted."""
        # Weights that move alike share their moves: count these once, times the weights.
        times = Counter(id(w.moves) for w in self.weights)
        weights = {id(w.moves): w for w in self.weights}
        total = np.zeros((self.world, self.world), np.int64)
        for key, w in weights.items():
            moves = w.moves
            size_bytes = w.slices.size_bytes[moves.slice] * times[key]
            np.add.at(total, (moves.source, moves.target), size_bytes)
        return total

    def turns(self, rank: int) -> Iterator[Turn]:
        """What `rank` does, bucket by bucket. Slices that travel together are merged
        into few boxes."""
        # By bucket and round, -1 for what stays.
        sends = defaultdict[tuple[int, int], list[Move]](list)
        receives = defaultdict[tuple[int, int], list[Move]](list)

        # Weights that lie and move alike have the same boxes, in buckets that begin elsewhere.
        cache: dict[tuple[int, int, bytes], list[tuple[Transit, Box]]] = {}
        for weight in self.weights if rank < self.world else ():
            first_bucket = int(weight.bucket[0]) if len(weight.bucket) else 0
            bucket = weight.bucket - first_bucket
            key = id(weight.slices), id(weight.moves), bucket.tobytes()
            if key not in cache:
                cache[key] = self._boxes(weight.slices, weight.moves, bucket.tolist(), rank)
            for transit, box in cache[key]:
                moves = receives if transit.target == rank else sends
                move = Move(transit.source, transit.target, weight.name, box)
                place = first_bucket + transit.bucket, transit.round
                moves[place].append(move)

        for number in range(self.buckets):
            rounds = []
            for index in range(self.rounds):
                place = number, index
                rounds.append(Round(tuple(sends[place]), tuple(receives[place])))
            local = receives[number, -1]
            yield Turn(tuple(local), tuple(rounds))

    def _boxes(
        self, slices: Slices, moves: Moves, bucket: list[int], rank: int
    ) -> list[tuple[Transit, Box]]:
        """Merged boxes of one weight that stay on `rank` (round -1), arrive or leave,
        each with its transit.

        They are in the order of their first slices. A box lies in one tensor of its sender and in
        one of its receiver, as it is a view of each. A slice that only passes through
        is not merged.
        """
        # 1. List the slices: those that stay, then those that move.
        stays = np.flatnonzero(slices.has[:, rank] & slices.wants[:, rank]).tolist()
        rows = [(index, -1, rank, rank) for index in stays]
        of_rank = np.flatnonzero((moves.source == rank) | (moves.target == rank))
        rows += zip(
            moves.slice[of_rank].tolist(),
            moves.round[of_rank].tolist(),
            moves.source[of_rank].tolist(),
            moves.target[of_rank].tolist(),
        )

        # 2. Group them by transit and by the tensors that they are views of.
        groups: dict[tuple, list[tuple[int, Box]]] = {}
        for index, number, source, target in rows:
            transit = Transit(bucket[index], number, source, target)
            box = slices.boxes[index]
            sender, receiver = (target, source) if self.sums else (source, target)
            held = slices.held.around(box, sender)
            relayed = slices.wanted.around(box, sender)
            wanted_box = slices.wanted.around(box, receiver)
            passes = wanted_box is None or (held is None and relayed is None)
            tensors = (box,) if passes else (held, None if held else relayed, wanted_box)
            groups.setdefault((transit, *tensors), []).append((index, box))

        # 3. Merge each group.
        merged = []
        for (transit, *_), parts in groups.items():
            merged += [(index, transit, box) for index, box in merge_boxes(parts)]
        return [(transit, box) for _, transit, box in sorted(merged)]

    def reversed(self) -> "Plan":
        """The sum plan of a plan that copies from home.

        Raises ValueError where an element is held twice: of which would it be a sum?
        """
        cache: dict[int, Moves] = {}
        for w in self.weights:
            if (w.slices.has.sum(1) != 1).any():
                raise ValueError(
                    f"{w.name} is held more than once: a sum needs one home for every element"
                )
            m = w.moves
            if id(m) in cache:
                continue
            # [Note: sums] The last round comes first, and every move is turned round.
            number = self.rounds - 1 - m.round
            order = np.lexsort((m.source, number, m.slice))
            cache[id(m)] = Moves(
                slice=m.slice[order],
                round=number[order],
                source=m.target[order],
                target=m.source[order],
            )
        weights = tuple(replace(w, moves=cache[id(w.moves)]) for w in self.weights)
        return replace(self, sums=not self.sums, weights=weights)


def switch_plan(
    held: BoxesByWeight,
    wanted: BoxesByWeight,
    links: Links,
    itemsize: int,
    planner: Planner = "fan_out",
    bucket_bytes: int | None = None,
) -> Plan:
    """The plan that brings every wanted element to every rank that lacks it,
    in the order of `wanted`.

    `itemsize`: bytes an element on the wire.
    `bucket_bytes`: None makes one bucket.
    Raises ValueError for an element that nobody holds, UsageError for a bucket too small to move a
    single one."""
    world = world_of(held, wanted)
    loads = np.zeros((3, world), np.int64)
    slices_cache: dict[tuple[Spread, Spread], Slices] = {}
    moves_cache: dict[tuple[Slices, bytes], tuple[Moves, np.ndarray]] = {}
    rows = []
    for name, spread in wanted.items():
        # 1. Refine, once for all weights that lie alike.
        source = held.get(name, Spread(()))
        if (source, spread) not in slices_cache:
            try:
                slices_cache[source, spread] = refine(source, spread, world, itemsize, bucket_bytes)
            except ValueError as fault:
                raise ValueError(f"{name}: {fault}") from None
        slices = slices_cache[source, spread]

        # 2. Assign, once for all that the planner would assign alike.
        key = (slices, _differences(slices, links, loads))
        if key in moves_cache:
            moves, added_loads = moves_cache[key]
            loads += added_loads
        else:
            previous_loads = loads.copy()
            moves = assign(planner, slices, links, loads)
            moves_cache[key] = (moves, loads - previous_loads)
        rows.append((name, slices, moves))

    # 3. Deal the slices into buckets.
    buckets, buffer_bytes = _buckets(rows, world, bucket_bytes)
    weights = tuple(
        WeightPlan(name, slices, moves, bucket)
        for (name, slices, moves), bucket in zip(rows, buckets)
    )
    return Plan(planner, links, world, itemsize, bucket_bytes, buffer_bytes, weights)


def world_of(*sides: BoxesByWeight) -> int:
    """How many ranks the sides speak of: those up to the highest that has something."""
    spreads = {spread for side in sides for spread in side.values()}
    return 1 + max(
        (rank for spread in spreads for _, ranks in spread.boxes for rank in ranks), default=0
    )


def _differences(slices: Slices, links: Links, loads: np.ndarray) -> bytes:
    """Differences between the loads of ranks that a planner compares: its decisions depend on
    nothing else.

    Weights of many layers meet the same differences again and again. They are then decided once.
    """
    # 1. Holders among which a planner chooses: of needed slices that several ranks have.
    world = loads.shape[1]
    per_node = min(links.per_node, world)
    has_choice = slices.needs.any(1) & (slices.has.sum(1) > 1)
    choice = slices.has[has_choice].any(0)

    # 2. Loads inside nodes, and of what enters them, are compared within a node.
    starts = np.arange(0, world, per_node)
    node = np.arange(world) // per_node
    relevant = np.zeros_like(loads)
    for row in (INSIDE, ENTERED):
        least = np.minimum.reduceat(loads[row], starts)
        relevant[row] = loads[row] - least[node]
    relevant[INSIDE] *= choice

    # 3. Loads between nodes are compared among all holders.
    if choice.any():
        between = loads[BETWEEN, choice]
        relevant[BETWEEN, choice] = between - between.min()
    return relevant.tobytes()


def _buckets(
    rows: Sequence[tuple[str, Slices, Moves]], world: int, bucket_bytes: int | None
) -> tuple[list[np.ndarray], int]:
    """The bucket of every slice, by weight, and the most bytes that a rank sends and receives in
    one bucket.

    A bucket ends before the slice with which some rank would send, or receive,
    more than `bucket_bytes`."""
    limit = np.iinfo(np.int64).max if bucket_bytes is None else bucket_bytes
    totals: dict[int, np.ndarray] = {}
    number = 0
    buffer_bytes = 0
    used = np.zeros((2, world), np.int64)  # sent, received
    buckets = []
    for _, slices, moves in rows:
        # A whole weight that has room needs no look at its slices.
        if id(moves) not in totals:
            totals[id(moves)] = _volumes(slices, moves, slice(None), world)
        total = totals[id(moves)]
        if (used + total).max() <= limit:
            used = used + total
            buckets.append(np.full(len(slices), number, np.int32))
            continue

        # Moves are in the order of slices: those of a slice are a run.
        edges = np.searchsorted(moves.slice, np.arange(len(slices) + 1))
        bucket = np.zeros(len(slices), np.int32)
        for index in range(len(slices)):
            volumes = _volumes(slices, moves, slice(edges[index], edges[index + 1]), world)
            if (used + volumes).max() > limit:
                buffer_bytes = max(buffer_bytes, int(used.sum(0).max()))
                number += 1
                used = np.zeros_like(used)
            used = used + volumes
            bucket[index] = number
        buckets.append(bucket)
    return buckets, max(buffer_bytes, int(used.sum(0).max()))


def _volumes(slices: Slices, moves: Moves, part: slice, world: int) -> np.ndarray:
    """Bytes sent and received: int64 [2, world]."""
    size = slices.size_bytes[moves.slice[part]]
    volumes = np.zeros((2, world), np.int64)
    np.add.at(volumes[0], moves.source[part], size)
    np.add.at(volumes[1], moves.target[part], size)
    return volumes
