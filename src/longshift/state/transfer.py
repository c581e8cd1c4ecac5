"""Plays a switch plan (`switch.plan`): what moves between two ranks at one time is one buffer.

    exchange        0          1          2          3
    bucket 0     round 0    round 1
    bucket 1                round 0    round 1
    bucket 2                           round 0    round 1

Exchange i carries round 0 of bucket i and round 1 of bucket i - 1, which needs what arrived in
exchange i - 1. So one exchange is under way at a time, on a group of its own,
in one order on all ranks.

A copy plan writes `wanted`, cast at the source; a sum plan adds. A slice that only passes through a
rank stays in a buffer of its bucket. Bytes out of a rank, and its two fused buffers: the plan's.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshift.dist.collectives import Group, Pending
from longshift.dist.world import World
from longshift.errors import PeerError
from longshift.layout.box import Box
from longshift.state.home import Shard
from longshift.state.resizable import ResizableStorage, Tensors
from longshift.switch.plan import Move, Plan
from longshift.switch.traffic import traffic

# A view of a box of a weight; None where this rank does not have it.
BoxView = Callable[[str, Box], Tensor | None]


class _InSum(NamedTuple):
    """A view of the gradient sum of a shard, which begins its storage."""

    shard: Shard
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def now(self) -> Tensor:
        assert self.shard.grad is not None
        return self.shard.grad.as_strided(self.size, self.stride, self.offset)


class Views:
    """Views of tensors that last, and of the gradient sums of `renewed`, which are other tensors in
    every step: made once, and good for every step. Immutable."""

    def __init__(self, views: Iterable[Tensor], renewed: Iterable[Shard]):
        """Take `views` while the gradient sums are there."""
        owners: dict[int, Shard] = {}  # by address of their sums
        for shard in renewed:
            if shard.grad is not None:
                owners[shard.grad.untyped_storage().data_ptr()] = shard
        self._views: list[Tensor | _InSum] = []
        for view in views:
            shard = owners.get(view.untyped_storage().data_ptr())
            if shard is None:
                self._views.append(view)
            else:
                offset = int(view.storage_offset())
                self._views.append(_InSum(shard, view.shape, view.stride(), offset))

    def now(self) -> list[Tensor]:
        """The views, of the gradient sums that are there now."""
        return [view.now() if isinstance(view, _InSum) else view for view in self._views]


@dataclass(frozen=True)
class Exchange:
    """One exchange on this rank's tensors. `local`: what it adds or copies to what on this rank
    itself; `sends` go out from `leaving`; `coming`, by peer, goes to `receives`; `out` and `into`
    are the parts of the fused buffer that hold `leaving` and `coming`."""

    local: tuple[Views, Views]
    sends: Views
    leaving: list[Tensor]
    out: Tensor
    out_sizes: list[int]
    receives: list[tuple[list[Tensor], Views]]
    into: Tensor
    in_sizes: list[int]


class SwitchTransfer:
    """This rank's part of `plan`, to be played again and again: `post` and `take_in` each exchange
    in turn. `held` and `wanted` are asked when an exchange is posted for the first
    time: what they give lasts, though its storage need not,
    besides the gradient sums of `renewed`. Mutable.

    Collective. Raises PeerError, before anything moves, when the ranks do not agree on the plan."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        group: Group,
        held: BoxView,
        wanted: BoxView,
        dtype: torch.dtype,
        renewed: Sequence[Shard] = (),
    ):
        self.plan = plan
        self.group = group
        self.held = held
        self.wanted = wanted
        self.dtype = dtype
        self.device = world.device
        self.renewed = renewed
        self.turns = list(plan.turns(world.rank))
        self.moving = bool(plan.bytes_by_pair.any())
        self.traffic = traffic(plan)
        self._exchanges: dict[int, Exchange] = {}
        self.arriving: tuple[Pending, Exchange] | None = None
        # By bucket, what this rank only passes on.
        self.passing: dict[int, Tensors[tuple[str, Box]]] = {}
        buffer = torch.empty(self._max_elements(), dtype=dtype, device=world.device)
        self.fused = ResizableStorage(buffer)
        self.fused.drop()
        self.exposed_s = 0.0
        self.under_way_s = 0.0
        self._posted_s = 0.0
        _agree(plan, world)

    def post(self, number: int) -> None:
        """Start an exchange; the one before has been taken in."""
        begin_s = time.perf_counter()
        if number == 0:
            self.exposed_s = self.under_way_s = 0.0
        self._post(number)
        self._posted_s = time.perf_counter()
        self.exposed_s += self._posted_s - begin_s

    def take_in(self, number: int) -> None:
        """Wait for an exchange, and put what it brought where it belongs."""
        begin_s = time.perf_counter()
        if self.arriving is not None:
            pending, exchange = self.arriving
            self.under_way_s += begin_s - self._posted_s
            pending.wait()
            self.arriving = None
            # Peer by peer: two may add to the same target.
            for coming, receives in exchange.receives:
                self._put(receives.now(), coming)
        if number == self.plan.exchanges - 1:
            self.fused.drop()
        self.exposed_s += time.perf_counter() - begin_s

    def _post(self, number: int) -> None:
        self._make_room(number)
        if number not in self._exchanges:
            self._exchanges[number] = self._resolve(number)
        exchange = self._exchanges[number]
        if number in self.passing and self.plan.sums:
            self.passing[number].flat.zero_()
        sources, targets = exchange.local
        self._put(targets.now(), sources.now())
        if exchange.leaving:
            torch._foreach_copy_(exchange.leaving, exchange.sends.now())
        if (gone := self.passing.get(number - self.plan.rounds + 1)) is not None:
            gone.drop()
        if self.moving:
            pending = self.group.trade(
                exchange.into, exchange.out, exchange.in_sizes, exchange.out_sizes
            )
            self.arriving = (pending, exchange)

    def _make_room(self, number: int) -> None:
        """Have storage for what only passes through, and for the fused buffer. All exchanges share
        that: memory is slow when it is touched for the first time."""
        self.fused.hold()
        if number in self.passing:
            self.passing[number].hold()

    def _max_elements(self) -> int:
        """Elements that go out and come in, in the largest exchange."""
        totals = [0] * (len(self.turns) + self.plan.rounds)
        for bucket, turn in enumerate(self.turns):
            for index, bucket_round in enumerate(turn.rounds):
                moves = (*bucket_round.sends, *bucket_round.receives)
                totals[bucket + index] += sum(move.box.elements for move in moves)
        return max(totals)

    def _put(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if targets:
            if targets[0].device != sources[0].device:  # sums of a home in host memory
                sources = [source.to(targets[0].device) for source in sources]
            put = torch._foreach_add_ if self.plan.sums else torch._foreach_copy_
            put(targets, sources)

    def _resolve(self, number: int) -> Exchange:
        """The tensors of an exchange; all have storage."""
        # 1. List the tensors of each peer.
        sends: list[list[Tensor]] = [[] for _ in range(self.group.size)]
        receives: list[list[Tensor]] = [[] for _ in range(self.group.size)]
        if number < len(self.turns):
            self._pass_through(number)
        for index in range(self.plan.rounds):
            bucket = number - index
            if 0 <= bucket < len(self.turns):
                bucket_round = self.turns[bucket].rounds[index]
                for move in bucket_round.sends:
                    sends[move.target].append(self._source(move, bucket))
                for move in bucket_round.receives:
                    receives[move.source].append(self._target(move, bucket, index))

        # 2. Give each a part of the fused buffer: what goes out, then what comes in.
        out_sizes = [sum(t.numel() for t in row) for row in sends]
        in_sizes = [sum(t.numel() for t in row) for row in receives]
        num_out = sum(out_sizes)
        num_in = sum(in_sizes)
        out = self.fused.flat[:num_out]
        into = self.fused.flat[num_out : num_out + num_in]
        sources = [t for row in sends for t in row]
        coming = []
        for part, row in zip(into.split(in_sizes), receives):
            if row:
                coming.append((_cut(part, row), Views(row, self.renewed)))
        return Exchange(
            local=self._local(number),
            sends=Views(sources, self.renewed),
            leaving=_cut(out, sources),
            out=out,
            out_sizes=out_sizes,
            receives=coming,
            into=into,
            in_sizes=in_sizes,
        )

    def _local(self, number: int) -> tuple[Views, Views]:
        sources = []
        targets = []
        for move in self.turns[number].local if number < len(self.turns) else ():
            source = self.held(move.name, move.box)
            target = self.wanted(move.name, move.box)
            assert source is not None
            assert target is not None
            # A copy that is a tensor of home's is there already.
            if self.plan.sums or source.data_ptr() != target.data_ptr():
                sources.append(source)
                targets.append(target)
        return Views(sources, self.renewed), Views(targets, self.renewed)

    def _pass_through(self, bucket: int) -> None:
        """Make tensors for the slices of a bucket that this rank only passes on."""
        local_part = self.held if self.plan.sums else self.wanted
        shapes = {}
        # What the last round brings stays here: only earlier rounds bring what passes through.
        for bucket_round in self.turns[bucket].rounds[:-1]:
            for move in bucket_round.receives:
                if local_part(move.name, move.box) is None:
                    shapes[move.name, move.box] = move.box.shape
        if shapes:
            self.passing[bucket] = Tensors(shapes, self.dtype, self.device)

    def _source(self, move: Move, bucket: int) -> Tensor:
        part = self.held(move.name, move.box)
        if part is None and not self.plan.sums:
            part = self.wanted(move.name, move.box)
        return self.passing[bucket].views[move.name, move.box] if part is None else part

    def _target(self, move: Move, bucket: int, index: int) -> Tensor:
        is_last = index == self.plan.rounds - 1
        # Earlier rounds of a sum plan add to what a rank will send; the last one adds to home.
        local_part = self.held if self.plan.sums and not is_last else self.wanted
        part = local_part(move.name, move.box)
        return self.passing[bucket].views[move.name, move.box] if part is None else part


def _cut(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The buffer as tensors of these shapes, one after another."""
    return [flat.view(t.shape) for flat, t in zip(buffer.split([t.numel() for t in like]), like)]


def _agree(plan: Plan, world: World) -> None:
    """Compare the digests of all ranks."""
    digests = world.gather_text(plan.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise PeerError(
                f"rank {rank} plans another switch ({digest[:12]}) than rank 0 ({digests[0][:12]});"
                " nothing was moved. All ranks need the same config, longshift and numpy"
            )
