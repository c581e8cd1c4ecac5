"""Plays a switch plan (`switch.plan`): what moves between two ranks at one time is one buffer.

    exchange        0          1          2          3          Exchange i carries round 0 of bucket i and round 1 of bucket i - 1, which
    bucket 0     round 0    round 1                             needs what arrived in exchange i - 1. So one exchange is under way at a
    bucket 1                round 0    round 1                  time, on a group of its own, in one order on all ranks.
    bucket 2                           round 0    round 1

A copy plan writes `wanted`, cast at the source; a sum plan adds. A slice that only passes through a rank stays in a buffer of its bucket.
Bytes out of a rank, and its two fused buffers: the plan's.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longshift.dist.collectives import Group, Pending
from longshift.dist.world import World
from longshift.errors import PeerError
from longshift.layout.box import Box
from longshift.switch.plan import Move, Plan
from longshift.switch.traffic import traffic

Part = Callable[[str, Box], Tensor | None]  # a view of a box of a weight; None where this rank does not have it


class Transfer:
    """This rank's part of `plan`, to be played again and again: `begin`, then `post` and `take_in` each exchange in turn. `held` and
    `wanted` are asked anew each time. Mutable.

    Collective. Raises PeerError, before anything moves, when the ranks do not agree on the plan."""

    def __init__(self, plan: Plan, world: World, group: Group, held: Part, wanted: Part, dtype: torch.dtype):
        self.plan, self.group, self.held, self.wanted, self.dtype, self.device = plan, group, held, wanted, dtype, world.device
        self.turns, self.moving = list(plan.turns(world.rank)), bool(plan.bytes_by_pair.any())
        self.traffic = traffic(plan)
        self.exchanges = plan.buckets + plan.rounds - 1 if self.moving else plan.buckets
        self.arriving: tuple[Pending, Tensor, list[list[Tensor]]] | None = None
        self.passing: dict[int, dict[tuple[str, Box], Tensor]] = {}  # by bucket
        self.exposed_s, self.under_way_s, self._since = 0.0, 0.0, 0.0
        self.fused = torch.empty(0, dtype=dtype, device=self.device)
        _agree(plan, world)

    def begin(self) -> "Transfer":
        """Nothing has moved yet."""
        self.exposed_s, self.under_way_s = 0.0, 0.0
        return self

    def post(self, number: int) -> None:
        """Start an exchange; the one before has been taken in."""
        began = time.perf_counter()
        if number < len(self.turns):
            self._move_locally(self.turns[number].local)
        if self.moving:
            self._post(number)
        self._since = time.perf_counter()
        self.exposed_s += self._since - began

    def take_in(self, number: int) -> None:
        """Wait for an exchange, and put what it brought where it belongs."""
        began = time.perf_counter()
        if self.arriving is not None:
            self._take_in()
        if number == self.exchanges - 1:
            self.fused = self.fused.new_empty(0)
        self.exposed_s += time.perf_counter() - began

    def _post(self, number: int) -> None:
        sends, receives = ([[] for _ in range(self.group.size)] for _ in range(2))
        for which in range(self.plan.rounds):
            if 0 <= (bucket := number - which) < len(self.turns):
                played, passing = self.turns[bucket].rounds[which], self.passing.setdefault(bucket, {})
                for move in played.sends:
                    sends[move.target].append(self._source(move, passing))
                for move in played.receives:
                    receives[move.source].append(self._target(move, which, passing))
        out_sizes, in_sizes = ([sum(t.numel() for t in row) for row in rows] for rows in (receives, sends))
        buffer, out = self._buffers(sum(in_sizes), sum(out_sizes))
        sources = [t for row in sends for t in row]
        if sources:
            torch._foreach_copy_(_cut(buffer, sources), sources)
        self.passing.pop(number - self.plan.rounds + 1, None)
        self.arriving = self.group.trade(out, buffer, out_sizes, in_sizes), out, receives

    def _buffers(self, sends: int, receives: int) -> tuple[Tensor, Tensor]:
        """Two fused buffers, from one that all exchanges share: memory is slow when it is touched for the first time."""
        if self.fused.numel() < sends + receives:
            self.fused = self.fused.new_empty(0)  # first the old one goes
            self.fused = self.fused.new_empty(sends + receives)
        return self.fused[:sends], self.fused[sends : sends + receives]

    def _take_in(self) -> None:
        assert self.arriving is not None
        pending, out, receives = self.arriving
        self.under_way_s += time.perf_counter() - self._since
        pending.wait()
        self.arriving = None
        place = torch._foreach_add_ if self.plan.sums else torch._foreach_copy_
        start = 0
        for targets in receives:  # peer by peer: two may add to the same target
            size = sum(t.numel() for t in targets)
            if targets:
                place(targets, _cut(out[start : start + size], targets))
            start += size

    def _move_locally(self, moves: Sequence[Move]) -> None:
        for move in moves:
            source, target = self.held(move.name, move.box), self.wanted(move.name, move.box)
            assert source is not None
            assert target is not None
            if self.plan.sums:
                target += source
            elif source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def _source(self, move: Move, passing: dict[tuple[str, Box], Tensor]) -> Tensor:
        found = self.held(move.name, move.box)
        if found is None and not self.plan.sums:
            found = self.wanted(move.name, move.box)
        return passing[move.name, move.box] if found is None else found

    def _target(self, move: Move, which: int, passing: dict[tuple[str, Box], Tensor]) -> Tensor:
        last = which == self.plan.rounds - 1
        found = self.held(move.name, move.box) if self.plan.sums and not last else self.wanted(move.name, move.box)
        if found is None:
            key = move.name, move.box
            if key not in passing:
                passing[key] = torch.zeros(move.box.shape, dtype=self.dtype, device=self.device)
            found = passing[key]
        return found


def _cut(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The buffer as tensors of these shapes, one after another."""
    return [flat.view(t.shape) for flat, t in zip(buffer.split([t.numel() for t in like]), like)]


def _agree(plan: Plan, world: World) -> None:
    """Compare the digests of all ranks."""
    digests = world.gather_text(plan.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise PeerError(
                f"rank {rank} plans another switch ({digest[:12]}) than rank 0 ({digests[0][:12]}); nothing was moved. All ranks need the "
                "same config, longshift and numpy"
            )
