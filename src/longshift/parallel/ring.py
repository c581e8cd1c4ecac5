"""Ring attention over packed documents.

Papers: Ring Attention (arXiv 2310.01889), its causal balance by two-ended cuts as in Llama 3 (arXiv
2407.21783). The merge of partial attentions by log-sum-exp is FlashAttention's (arXiv 2205.14135).

Sharding over r ranks: every document is cut in 2r pieces and rank i holds pieces i and 2r-1-i
(`schedule.sequence`). Keys and values travel round the ring, their gradients behind them in
float32; queries, outputs and log-sum-exps stay.

    step 0   keys of rank i       causal            rank 0 ── k,v ──> rank 1
    step s   keys of rank i - s   earlier pieces       ^                │
             (all queries or all keys of half)         └── rank r-1 <───┘

For every document, step and rank the work is half a square, whoever holds the keys. Bytes in and
out of a rank: forward 2 (T/r) K H (r-1) elements; backward the same and, in float32, 2 (T/r) K H r.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longshift.dist.collectives import Group, Pending
from longshift.model.attention import Attention
from longshift.model.decoder import MicroBatch
from longshift.model.functions import accum_dtype
from longshift.model.kernels import empty_output
from longshift.parallel.seams import LayoutOps
from longshift.schedule.sequence import Pair, TokenOrder, pairs
from longshift.schedule.sequence import (
    pairs_across as pairs_across,
)  # step.chunk_runner takes it from here


def forward_into(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: Tensor,
    pairs_of: Callable[[int], Sequence[Pair]],
    attention: Attention,
    group: Group,
    first: bool,
) -> None:
    """Fold the attention of q [L, N, H] to the keys and values kv [2, L, K, H] of all ranks into
    `out` [L, N, H] and `lse` [L, N], in at least float32.

    `pairs_of(i)`: what there is to do with the keys of the i-th rank.
    `first`: whether `out` is empty. This rank's keys then reach every query.
    """
    for step in range(group.size):
        # 1. Pass the keys on while attending to them.
        arrival = _pass_on(kv, group) if step < group.size - 1 else Arrival(Pending(), kv)
        for queries, keys, mask in pairs_of((group.index - step) % group.size):
            is_first = first and step == 0 and mask == "causal"
            # No names for k and v: they would keep these keys when the next ones are here.
            attention.fold(
                out[queries], lse[queries], q[queries], kv[0, keys], kv[1, keys], mask, is_first
            )

        # 2. Take those of the rank before.
        arrival.pending.wait()
        kv = arrival.tensor


def backward_into(
    dq: Tensor,
    dkv: Tensor,
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    lse: Tensor,
    pairs_of: Callable[[int], Sequence[Pair]],
    attention: Attention,
    group: Group,
) -> None:
    """Add the gradients of q and of this rank's kv to `dq` and `dkv`, both in at least float32.

    `o`, `lse`: of attention to all keys.
    """
    grads_arrival = Arrival(Pending(), dkv)
    for step in range(group.size):
        # 1. Pass the keys on while forming this rank's part of their gradients.
        arrival = _pass_on(kv, group) if step < group.size - 1 else Arrival(Pending(), kv)
        part = torch.zeros_like(dkv) if group.size > 1 else dkv
        for queries, keys, mask in pairs_of((group.index - step) % group.size):
            attention.add(
                (dq[queries], part[0, keys], part[1, keys]),
                grad[queries],
                q[queries],
                kv[0, keys],
                kv[1, keys],
                o[queries],
                lse[queries],
                mask,
            )
        if group.size == 1:
            return

        # 2. Add it to what the ranks before have formed, and send the sum after the keys.
        grads_arrival.pending.wait()
        total = part + grads_arrival.tensor if step else part
        grads_arrival = _pass_on(total, group)
        del total  # it is there until it is sent, no longer
        arrival.pending.wait()
        kv = arrival.tensor

    # 3. After a whole round the sum is back at the rank of its keys.
    grads_arrival.pending.wait()
    dkv += grads_arrival.tensor


class RingSeams(LayoutOps):
    """The ring in place of attention, on the heads that Ulysses leaves."""

    def attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        micro: MicroBatch,
        window: int | None = None,
    ) -> Tensor:
        q, k, v = self.to_heads(q_TNH, k_TKH, v_TKH)
        group = self.groups["ring"]
        o = RingAttention.apply(q, k, v, micro.order, window, self.attention, group)
        return self.to_tokens(o)  # pyright: ignore[reportArgumentType]


class RingAttention(torch.autograd.Function):
    """Ring attention of a pack: apply(q [L, N, H], k [L, K, H], v [L, K, H], order, window,
    attention, group) -> o [L, N, H] for this rank's L tokens of the pack."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, q, k, v, order: TokenOrder, window: int | None, attention: Attention, group: Group
    ):
        pairs_of = partial(pairs, order, group.index, window=window)
        o, lse = attention.output_and_lse(
            lambda: _forward(q, torch.stack((k, v)), pairs_of, attention, group)
        )
        output = () if attention.again else (o, lse)
        ctx.save_for_backward(q, k, v, *output)
        ctx.pairs_of = pairs_of
        ctx.attention = attention
        ctx.group = group
        return o

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *output = ctx.saved_tensors
        kv = torch.stack((k, v))
        o, lse = output or _forward(q, kv, ctx.pairs_of, ctx.attention, ctx.group)

        # Gradients grow in at least float32 from pair to pair.
        dq = torch.zeros_like(q, dtype=accum_dtype(q))
        dkv = torch.zeros_like(kv, dtype=accum_dtype(q))
        backward_into(dq, dkv, grad, q, kv, o, lse, ctx.pairs_of, ctx.attention, ctx.group)
        return dq.to(q.dtype), *dkv.to(k.dtype).unbind(), None, None, None, None


def _forward(
    q: Tensor,
    kv: Tensor,
    pairs_of: Callable[[int], Sequence[Pair]],
    attention: Attention,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Output, in the format of q, and log-sum-exp of a pack."""
    out, lse = empty_output(q, accum_dtype(q))
    forward_into(out, lse, q, kv, pairs_of, attention, group, first=True)
    return out.to(q.dtype), lse


class Arrival(NamedTuple):
    """A tensor from the rank before, which is there when `pending` has been waited for."""

    pending: Pending
    tensor: Tensor


def _pass_on(x: Tensor, group: Group) -> Arrival:
    """Send x to the next rank of the ring, and receive a tensor of its shape."""
    next_index = (group.index + 1) % group.size
    previous_index = (group.index - 1) % group.size

    # The exchange is one of all ranks, and most send each other nothing.
    sends = [x.new_empty(0)] * group.size
    sends[next_index] = x
    shapes: list[tuple[int, ...]] = [(0,)] * group.size
    shapes[previous_index] = x.shape

    pending, received = group.exchange(sends, shapes)
    return Arrival(pending, received[previous_index])
