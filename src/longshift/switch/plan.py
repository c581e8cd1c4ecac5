"""Switch plans: which slice of which weight goes from which rank to which, in which bucket and round. Pure, the same on every rank.

    held: home, copies of layout A ─┐
                                    ├─ refine ─> slices ─ planner ─> moves ─ buckets ─> Plan ─ digest: ranks compare it first
    wanted: copies of layout B ─────┘

A bucket is played round by round: a round's moves between two ranks are one buffer, in the plan's order, and need what arrived in the
rounds before. Buckets follow one another; no rank sends or receives more than `bucket_bytes` in one, all rounds together.

[Note: sums] Gradients go home by the plan that would bring the weights from there, backwards: every move turned round and the last round
first, each rank adding what it gets to what it has. As every copy hangs on home by exactly one path, every partial sum is counted once.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longshift.layout.box import Box
from longshift.switch.links import Links
from longshift.switch.merge_boxes import merge_boxes
from longshift.switch.options import Planner
from longshift.switch.placed import Placed, Spread
from longshift.switch.planners import BETWEEN, ENTERED, INSIDE, Moves, assign
from longshift.switch.slices import Slices, refine


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
    """One weight. `bucket`: ascending int32 [slices]. Weights that lie and move alike share `slices` and `moves`."""

    name: str
    slices: Slices
    moves: Moves
    bucket: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """All moves of a switch. `buffer_bytes`: the most that a rank sends and receives in one bucket. `sums`: see [Note: sums]."""

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
        """How many exchanges play the plan: each carries a round of a bucket, and the round after of the bucket before."""
        return self.buckets + self.rounds - 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that the ranks must agree on: hexadecimal."""
        whole = hashlib.sha256(repr((self.planner, self.world, self.itemsize, self.bucket_bytes, self.sums)).encode())
        for w in self.weights:
            whole.update(w.name.encode() + b"\0" + w.slices.digest + w.moves.digest + w.bucket.astype("<i4").tobytes())
        return whole.hexdigest()

    @cached_property
    def bytes_by_pair(self) -> np.ndarray:
        """Bytes from rank to rank: int64 [world, world]; what a rank has already is not moved and not counted."""
        times = Counter(id(w.moves) for w in self.weights)
        total = np.zeros(self.world * self.world, np.int64)
        for w in {id(w.moves): w for w in self.weights}.values():
            pair = w.moves.source.astype(np.int64) * self.world + w.moves.target
            np.add.at(total, pair, w.slices.size_bytes[w.moves.slice] * times[id(w.moves)])
        return total.reshape(self.world, self.world)

    def turns(self, rank: int) -> Iterator[Turn]:
        """What `rank` does, bucket by bucket. Slices that travel together are merged into few boxes."""
        local: list[list[Move]] = [[] for _ in range(self.buckets)]
        sends: list[list[list[Move]]] = [[[] for _ in range(self.rounds)] for _ in local]
        receives: list[list[list[Move]]] = [[[] for _ in range(self.rounds)] for _ in local]

        # Weights that lie and move alike have the same boxes, in buckets that begin elsewhere.
        cache: dict[tuple[int, int, bytes], list[tuple[Transit, Box]]] = {}
        for weight in self.weights if rank < self.world else ():
            first_bucket = int(weight.bucket[0]) if len(weight.bucket) else 0
            bucket = weight.bucket - first_bucket
            key = id(weight.slices), id(weight.moves), bucket.tobytes()
            if key not in cache:
                cache[key] = self._boxes(weight.slices, weight.moves, bucket.tolist(), rank)
            for transit, box in cache[key]:
                move, at = Move(transit.source, transit.target, weight.name, box), first_bucket + transit.bucket
                if transit.round < 0:
                    local[at].append(move)
                else:
                    (receives if transit.target == rank else sends)[at][transit.round].append(move)

        for bucket in range(self.buckets):
            rounds = zip(sends[bucket], receives[bucket])
            yield Turn(tuple(local[bucket]), tuple(Round(tuple(sent), tuple(received)) for sent, received in rounds))

    def _boxes(self, slices: Slices, moves: Moves, bucket: list[int], rank: int) -> list[tuple[Transit, Box]]:
        """One weight's boxes that stay on `rank`, in round -1, that come and that go, in the order of the first slice of each. A box
        lies in one that its sender has and in one that its receiver wants, as each is a view of one tensor there; what passes through is
        not merged."""
        of_rank = np.flatnonzero((moves.source == rank) | (moves.target == rank))
        columns = (column[of_rank].tolist() for column in (moves.slice, moves.round, moves.source, moves.target))
        kept = np.flatnonzero(slices.has[:, rank] & slices.wants[:, rank]).tolist()
        together: dict[tuple, list[tuple[int, Box]]] = {}
        for index, number, source, target in (*((index, -1, rank, rank) for index in kept), *zip(*columns)):
            transit, box = Transit(bucket[index], number, source, target), slices.boxes[index]
            sender, receiver = (target, source) if self.sums else (source, target)
            held, relayed = slices.held.around(box, sender), slices.wanted.around(box, sender)
            wanted = slices.wanted.around(box, receiver)
            passes = wanted is None or (held is None and relayed is None)
            tensors = (box,) if passes else (held, None if held else relayed, wanted)
            together.setdefault((transit, *tensors), []).append((index, box))
        merged = [(index, transit, box) for (transit, *_), parts in together.items() for index, box in merge_boxes(parts)]
        return [(transit, box) for _, transit, box in sorted(merged)]

    def reversed(self) -> "Plan":
        """The sum plan of a plan that copies from home. Raises ValueError where an element is held twice: of which would it be a sum?"""
        turned: dict[int, Moves] = {}
        for w in self.weights:
            if (w.slices.has.sum(1) != 1).any():
                raise ValueError(f"{w.name} is held more than once: a sum needs one home for every element")
            m = w.moves
            if id(m) not in turned:
                parts = m.slice, self.rounds - 1 - m.round, m.target, m.source
                order = np.lexsort((parts[2], parts[1], parts[0]))
                turned[id(m)] = Moves(*(column[order] for column in parts))
        return replace(self, sums=not self.sums, weights=tuple(replace(w, moves=turned[id(w.moves)]) for w in self.weights))


def switch_plan(
    held: Placed, wanted: Placed, links: Links, itemsize: int, planner: Planner = "fan_out", bucket_bytes: int | None = None
) -> Plan:
    """The plan that brings every wanted element to every rank that wants it and does not have it, in the order of `wanted`.

    `itemsize`: bytes an element on the wire. `bucket_bytes` None: one bucket. Raises ValueError for an element that nobody holds,
    UsageError for a bucket too small to move a single one.
    """
    world = world_of(held, wanted)
    loads = np.zeros((3, world), np.int64)
    refined: dict[tuple[Spread, Spread], Slices] = {}
    known: dict[tuple[Slices, bytes], tuple[Moves, np.ndarray]] = {}
    found = []
    for name, spread in wanted.items():
        key = held.get(name, Spread(())), spread
        if key not in refined:
            try:
                refined[key] = refine(*key, world, itemsize, bucket_bytes)
            except ValueError as fault:
                raise ValueError(f"{name}: {fault}") from None
        slices = refined[key]
        state = slices, _differences(slices, links, loads)
        if state not in known:
            before = loads.copy()
            known[state] = assign(planner, slices, links, loads), loads - before
        else:
            loads += known[state][1]
        found.append((name, slices, known[state][0]))
    buckets, buffer_bytes = _buckets(found, world, bucket_bytes)
    weights = tuple(WeightPlan(name, slices, moves, bucket) for (name, slices, moves), bucket in zip(found, buckets))
    return Plan(planner, links, world, itemsize, bucket_bytes, buffer_bytes, weights)


def world_of(*sides: Placed) -> int:
    """How many ranks the sides speak of: those up to the highest that has something."""
    spreads = {spread for side in sides for spread in side.values()}
    return 1 + max((rank for spread in spreads for _, ranks in spread.boxes for rank in ranks), default=0)


def _differences(slices: Slices, links: Links, loads: np.ndarray) -> bytes:
    """All that a planner's decisions about these slices depend on: by how much the loads of ranks that it compares differ. Weights of
    many layers meet the same differences again and again, and are then decided once."""
    world = loads.shape[1]
    needed = slices.needs.any(1)
    choice = slices.has[needed & (slices.has.sum(1) > 1)].any(0)
    nodes = np.arange(0, world, min(links.per_node, world))
    node = np.arange(world) // min(links.per_node, world)
    relevant = np.zeros_like(loads)
    for row in (INSIDE, ENTERED):
        relevant[row] = loads[row] - np.minimum.reduceat(loads[row], nodes)[node]
    relevant[INSIDE] *= choice
    if choice.any():
        relevant[BETWEEN, choice] = loads[BETWEEN, choice] - loads[BETWEEN, choice].min()
    return relevant.tobytes()


def _buckets(found: Sequence[tuple[str, Slices, Moves]], world: int, bucket_bytes: int | None) -> tuple[list[np.ndarray], int]:
    """The bucket of every slice, by weight, and the most that a rank sends and receives in one. A bucket ends before the slice with
    which some rank would send, or receive, more than `bucket_bytes`."""
    limit = np.iinfo(np.int64).max if bucket_bytes is None else bucket_bytes
    totals: dict[int, np.ndarray] = {}
    number, most, used = 0, 0, np.zeros((2, world), np.int64)  # used: sent, received
    result = []
    for _, slices, moves in found:
        if id(moves) not in totals:
            totals[id(moves)] = _volumes(slices, moves, slice(None), world)
        if (used + totals[id(moves)]).max() <= limit:
            used = used + totals[id(moves)]
            result.append(np.full(len(slices), number, np.int32))
            continue
        edges = np.searchsorted(moves.slice, np.arange(len(slices) + 1))
        bucket = np.zeros(len(slices), np.int32)
        for index in range(len(slices)):
            more = _volumes(slices, moves, slice(edges[index], edges[index + 1]), world)
            if (used + more).max() > limit:
                number, most, used = number + 1, max(most, int(used.sum(0).max())), np.zeros_like(used)
            used = used + more
            bucket[index] = number
        result.append(bucket)
    return result, max(most, int(used.sum(0).max()))


def _volumes(slices: Slices, moves: Moves, part: slice, world: int) -> np.ndarray:
    """Bytes sent and received: int64 [2, world]."""
    size = slices.size_bytes[moves.slice[part]]
    volumes = np.zeros((2, world), np.int64)
    np.add.at(volumes[0], moves.source[part], size)
    np.add.at(volumes[1], moves.target[part], size)
    return volumes
