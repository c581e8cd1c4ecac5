"""The general case of gather and reduce: a layout that is not cut as home is.

The layout gets a home of its own for as long as it computes, the *guest*, cut so that its collectives are fused and aligned. Before a
step the weights move there box by box, after it the gradient sums move back; the optimizer's state never moves.

    home (z1 over dp4) ── boxes ──> guest (tp2 x pp2) ── gather ──> copies
                       <── boxes ──                   <── reduce ──

Moves between two ranks travel as one buffer, in the home format: bytes out of a rank are the elements of its moves to others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.placement import Bucket
from longshift.state.home import Home, Shard
from longshift.switch.plan import Move, plan

Held = tuple[Shard, Tensor]  # a shard, and a vector of its shape


class Visit:
    """Moves between `home` and `guest`; collective over the world. Mutable: fills them."""

    def __init__(self, home: Home, guest: Home, world: World):
        self.home, self.guest, self.world = home, guest, world
        everywhere = _boxes(guest.buckets, world.size, owners_only=False)
        at_home = _boxes(home.buckets, world.size, owners_only=False)
        self.there = plan(at_home, everywhere)
        self.back = plan(_boxes(guest.buckets, world.size, owners_only=True), at_home)

    def lend(self) -> None:
        """The guest's masters become home's, bit for bit."""
        self._move(self.there, [(s, s.master) for s in self.home.shards], [(s, s.master) for s in self.guest.shards])

    def give_back(self) -> None:
        """Home's gradients become the guest's sums, which are dropped."""
        for shard in self.home.shards:
            shard.grad = torch.zeros_like(shard.master)
        sums, totals = ([(s, s.grad) for s in home.shards if s.grad is not None] for home in (self.guest, self.home))
        self._move(self.back, sums, totals)
        self.guest.drop_gradients()

    def _move(self, moves: Sequence[Move], sources: Sequence[Held], targets: Sequence[Held]) -> None:
        """Every rank plays the same moves, between vectors shaped as shards."""
        size, me = self.world.size, self.world.rank
        dtype, device = targets[0][1].dtype, targets[0][1].device
        leaving = [[m for m in moves if m.source == me and m.target == peer] for peer in range(size)]
        arriving = [[m for m in moves if m.source == peer and m.target == me] for peer in range(size)]
        held, wanted = _views(sources), _views(targets)
        nothing = torch.empty(0, dtype=dtype, device=device)
        sends = [torch.cat([nothing, *(_find(held, m).reshape(-1) for m in row)]) for row in leaving]
        pending, received = self.world.everyone.exchange(sends, [(sum(m.box.elements for m in row),) for row in arriving])
        pending.wait()
        for row, buffer in zip(arriving, received):
            for move, flat in zip(row, buffer.split([m.box.elements for m in row])):
                _find(wanted, move).copy_(flat.view(move.box.shape))


def _boxes(buckets: Sequence[Bucket], size: int, owners_only: bool) -> list[list[tuple[str, Box]]]:
    """By rank, what is kept of these buckets."""
    return [
        [box for b in buckets if rank in b.holders and (b.owns(rank) or not owners_only) for box in b.home(rank)] for rank in range(size)
    ]


def _views(vectors: Sequence[Held]) -> dict[str, list[tuple[Box, Tensor]]]:
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for shard, flat in vectors:
        for name, box, view in shard.views(flat):
            found.setdefault(name, []).append((box, view))
    return found


def _find(views: dict[str, list[tuple[Box, Tensor]]], move: Move) -> Tensor:
    """The part of a view that a move is about."""
    box, view = next((box, view) for box, view in views[move.name] if move.box in box)
    return view[move.box.within(box)]
