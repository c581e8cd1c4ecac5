"""Groups of ranks: fused buffers that move between them, and the differentiable collectives that
models are cut with.

Native collectives serve NCCL. gloo's reduce-scatter is an all-reduce underneath and its all-gather
a ring of copies; on gloo both are all-to-alls here, each rank to each peer (see docs/dev/log.md,
"gloo: everything is an all-to-all"). That moves the same bytes, (P-1)/P of the buffer in and out of
every rank, and a sum is taken once, in rank order and in at least float32. Two ranks swap: what a
rank keeps for
itself is not copied through gloo.

What is sent must not change until `wait`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LOCALLY = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}


@dataclass
class Pending:
    """Traffic under way. `keep` holds tensors that must live until `wait`, which may be called
    once."""

    works: Sequence[dist.Work | None] = ()
    keep: tuple[Tensor, ...] = ()
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()
        if self.finish is not None:
            self.finish()
        self.works = ()
        self.keep = ()
        self.finish = None

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return all(work is None or work.is_completed() for work in self.works)


class Group:
    """`ranks` in ascending order; `index` is this rank's place among them; alone when `handle` is
    None."""

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None):
        self.ranks = ranks
        self.handle = handle
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.direct = handle is not None and dist.get_backend(handle) == "gloo"
        self.swaps = self.direct and self.size == 2

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """out [P, ...] = every rank's x [...]. Valid after `wait`."""
        if self.handle is None:
            out.copy_(x.view_as(out))
            return Pending()
        if self.swaps:
            # Only the peer's row travels.
            rows = out.view(2, -1)
            pending = self._swap(rows[1 - self.index], x)
            rows[self.index].copy_(x.reshape(-1))
            return pending
        if self.direct:
            copies = x.expand((self.size, *x.shape)).contiguous()
            work = self._native_all_to_all(out.view_as(copies), copies)
            return Pending([work], (copies, out))
        return Pending([self._native_all_gather(out.view(-1), x.view(-1))], (x, out))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """out [...] = sum over ranks of their x [P, ...] at this rank's index. Valid after
        `wait`."""
        if self.handle is None:
            out.copy_(x.view_as(out))
            return Pending()
        if self.swaps:
            peer_part = torch.empty_like(out)
            parts = x.view((2, *out.shape))
            pending = self._swap(peer_part, parts[1 - self.index])
            pending.finish = lambda: torch.add(parts[self.index], peer_part, out=out)
            return pending
        if not self.direct:
            return Pending([self._native_reduce_scatter(out.view(-1), x.view(-1))], (x, out))

        # Each rank sums the parts that it was sent, at once and in rank order.
        parts = torch.empty_like(x).view((self.size, *out.shape))
        work = self._native_all_to_all(parts, x.view_as(parts))
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        return Pending([work], (parts, x), lambda: out.copy_(torch.sum(parts, 0, dtype=sum_dtype)))

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """out [P, ...] = what each rank has for this one, its own part too; x [P, ...] goes out
        likewise. Valid after `wait`."""
        if self.handle is None:
            out.copy_(x)
            return Pending()
        return Pending([self._native_all_to_all(out, x)], (x, out))

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """In place, for small tensors, the same bits on every rank; returns x."""
        if self.direct:
            # All ranks reduce the same rows, so that they have the same bits.
            rows = x.new_empty((self.size, *x.shape))
            self.all_gather(rows, x).wait()
            return x.copy_(LOCALLY[op](rows, 0))
        if self.handle is not None:
            self._native_all_reduce(x, op)
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """x = sum over ranks of their x, in place, bitwise the same on all. Valid after `wait`. A
        pair on gloo trades whole buffers, the bytes of gloo's ring in one step."""
        if self.swaps:
            # a + b and b + a have the same bits.
            peer_x = torch.empty_like(x)
            pending = self._swap(peer_x, x)
            pending.finish = lambda: x.add_(peer_x)
            return pending
        if self.handle is None:
            return Pending((), (x,))
        return Pending([self._native_all_reduce(x, later=True)], (x,))

    def exchange(
        self, sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Pending, list[Tensor]]:
        """Send `sends[i]` to the i-th rank and receive a tensor of `shapes[i]` from it; all of one
        dtype, empty ones included. Returns what has arrived after `wait`. Both sides of a pair must
        agree on the size."""
        local = sends[self.index]
        out_sizes = [math.prod(shape) for shape in shapes]
        in_sizes = [tensor.numel() for tensor in sends]
        # What a rank keeps for itself is not copied.
        out_sizes[self.index] = 0
        in_sizes[self.index] = 0
        # Copies that `reshape` makes get no name, so that they are gone after `cat`.
        fused = torch.cat(
            [local.new_empty(0), *(t.reshape(-1) for i, t in enumerate(sends) if i != self.index)]
        )
        out = local.new_empty(sum(out_sizes))
        pieces = out.split(out_sizes)
        received = []
        for index, shape in enumerate(shapes):
            received.append(local if index == self.index else pieces[index].view(shape))
        pending = self.trade(out, fused, out_sizes, in_sizes)
        return pending, received

    def trade(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        """out [sum(out_sizes)] = what each rank has for this one, by rank; x [sum(in_sizes)] goes
        out likewise. Valid after `wait`."""
        if self.handle is None:
            return Pending()
        return Pending([self._native_all_to_all(out, x, out_sizes, in_sizes)], (x, out))

    # torch's collectives, each in one place: a recorder has others (`weigh.recorder`)

    def _native_all_to_all(self, out: Tensor, x: Tensor, *sizes: list[int]) -> dist.Work | None:
        return dist.all_to_all_single(out, x, *sizes, group=self.handle, async_op=True)

    def _native_all_gather(self, out: Tensor, x: Tensor) -> dist.Work | None:
        return _all_gather(out, x, group=self.handle, async_op=True)

    def _native_reduce_scatter(self, out: Tensor, x: Tensor) -> dist.Work | None:
        return _reduce_scatter(out, x, group=self.handle, async_op=True)

    def _native_all_reduce(
        self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, later: bool = False
    ) -> dist.Work | None:
        return dist.all_reduce(x, op, group=self.handle, async_op=later)

    def _swap(self, out: Tensor, x: Tensor) -> Pending:
        """out = the other rank's x, of a pair. Valid after `wait`."""
        sizes = [0, 0]
        sizes[1 - self.index] = x.numel()
        return self.trade(out.view(-1), x.reshape(-1), sizes, sizes)

    def meet(self, device: torch.device) -> None:
        """Each rank sends a byte to the next, around the group. [Note: first contact] NCCL makes
        the communicator of a pair when the two first send or receive, and each waits there for the
        other: a rank that posts a receive before it computes what its peer needs for the send would
        wait for ever. So pairs meet before, in one order."""
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        # Of two ranks the ring has one pair, not two.
        num_pairs = self.size if self.size > 2 else self.size - 1
        for source in range(num_pairs):
            target = (source + 1) % self.size
            if self.index == source:
                self.send(token, target, tag=0).wait()
            elif self.index == target:
                self.receive(token, source, tag=0).wait()

    def send(self, x: Tensor, to: int, tag: int) -> Pending:
        """To the `to`-th rank of the group."""
        return Pending([dist.isend(x, group=self.handle, group_dst=to, tag=tag)], (x,))

    def receive(self, out: Tensor, source: int, tag: int) -> Pending:
        """From the `source`-th rank of the group."""
        return Pending([dist.irecv(out, group=self.handle, group_src=source, tag=tag)], (out,))


class GatherTokens(torch.autograd.Function):
    """[T/P, ...] on each rank -> [T, ...] on all; backward sums over the ranks and scatters."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:  # pyright: ignore
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return scatter_tokens(grad, ctx.group), None


class ScatterTokens(torch.autograd.Function):
    """Partial sums [T, ...] on each rank -> their sum's [T/P, ...] share; backward gathers."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:  # pyright: ignore
        ctx.group = group
        return scatter_tokens(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_tokens(grad, ctx.group), None


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Concatenation along dim 0 of every rank's x."""
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    group.all_gather(out, x.contiguous()).wait()
    return out


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's share along dim 0 of the sum of every rank's x."""
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    group.reduce_scatter(out, x.contiguous()).wait()
    return out
