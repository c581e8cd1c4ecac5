"""Ring attention over packed documents.

Papers: Ring Attention (arXiv 2310.01889), its causal balance by two-ended cuts as in Llama 3 (arXiv 2407.21783); the merge of partial
attentions by log-sum-exp is FlashAttention's (arXiv 2205.14135).

Sharding over r ranks: every document is cut in 2r pieces and rank i holds pieces i and 2r-1-i (`schedule.sequence`). Keys and values
travel round the ring, their gradients behind them in float32; queries, outputs and log-sum-exps stay.

    step 0   own keys        causal            rank 0 ── k,v ──> rank 1
    step s   keys of i - s   earlier pieces       ^                │
             (all queries or all keys of half)    └── rank r-1 <───┘

For every document, step and rank the work is half a square, whoever holds the keys. Bytes in and out of a rank: forward
2 (T/r) K H (r-1) elements; backward the same and, in float32, 2 (T/r) K H r.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from longshift.dist.collectives import Group, Pending
from longshift.model.attention import Attention
from longshift.model.decoder import MicroBatch
from longshift.parallel.seams import LayoutOps
from longshift.schedule.sequence import Pair, TokenOrder, pairs
from longshift.schedule.sequence import pairs_across as pairs_across  # step.chunked takes it from here


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
    """Fold the attention of q [L, N, H] to the keys and values kv [2, L, K, H] of all ranks into `out` [L, N, H] and `lse` [L, N], in at
    least float32. `pairs_of(i)`: what there is to do with those of the i-th rank; the own ones reach every query where `first`."""
    for step in range(group.size):
        pending, following = _pass_on(kv, group) if step < group.size - 1 else (Pending(), kv)
        for queries, keys, mask in pairs_of((group.index - step) % group.size):
            begins = first and step == 0 and mask == "causal"
            attention.fold(out[queries], lse[queries], q[queries], kv[0, keys], kv[1, keys], mask, begins)
        pending.wait()
        kv = following


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
    """Add the gradients of q and of this rank's kv, for the global `o` and `lse`, to `dq` and `dkv`, both in at least float32."""
    arriving, received = Pending(), dkv
    for step in range(group.size):
        pending, following = _pass_on(kv, group) if step < group.size - 1 else (Pending(), kv)
        here = torch.zeros_like(dkv) if group.size > 1 else dkv
        for queries, keys, mask in pairs_of((group.index - step) % group.size):
            totals = dq[queries], here[0, keys], here[1, keys]
            attention.add(totals, grad[queries], q[queries], kv[0, keys], kv[1, keys], o[queries], lse[queries], mask)
        if group.size == 1:
            return
        arriving.wait()
        arriving, received = _pass_on(here + received if step else here, group)
        pending.wait()
        kv = following
    arriving.wait()
    dkv += received


class RingSeams(LayoutOps):
    """The ring in place of attention, on the heads that Ulysses leaves."""

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch, window: int | None = None) -> Tensor:
        qkv = self.to_heads(q_TNH, k_TKH, v_TKH)
        return self.to_tokens(RingAttention.apply(*qkv, micro.order, window, self.attention, self.groups["ring"]))  # pyright: ignore


class RingAttention(torch.autograd.Function):
    """Ring attention of a pack: apply(q [L, N, H], k [L, K, H], v [L, K, H], order, window, attention, group) -> o [L, N, H] for this
    rank's L tokens of the pack."""

    @staticmethod
    def forward(ctx, q, k, v, order: TokenOrder, window, attention: Attention, group: Group):  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs_of = partial(pairs, order, group.index, window=window)
        o, lse = attention.whole(lambda: _forward(q, torch.stack((k, v)), pairs_of, attention, group))
        ctx.save_for_backward(q, k, v, *(() if attention.again else (o, lse)))
        ctx.pairs_of, ctx.attention, ctx.group = pairs_of, attention, group
        return o

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *made = ctx.saved_tensors
        wide, kv = torch.promote_types(q.dtype, torch.float32), torch.stack((k, v))
        o, lse = made or _forward(q, kv, ctx.pairs_of, ctx.attention, ctx.group)
        dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
        backward_into(dq, dkv, grad, q, kv, o, lse, ctx.pairs_of, ctx.attention, ctx.group)
        return dq.to(q.dtype), *dkv.to(k.dtype).unbind(), None, None, None, None


def _forward(q: Tensor, kv: Tensor, pairs_of: Callable[[int], Sequence[Pair]], attention: Attention, group: Group) -> tuple[Tensor, Tensor]:
    """Output, in the format of q, and log-sum-exp of a pack."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q, dtype=wide), q.new_empty(q.shape[:2], dtype=wide)
    forward_into(out, lse, q, kv, pairs_of, attention, group, first=True)
    return out.to(q.dtype), lse


def _pass_on(x: Tensor, group: Group) -> tuple[Pending, Tensor]:
    """Send x to the next rank of the ring; returns the traffic and what is arriving from the rank before."""
    following, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    nothing = x.new_empty(0)
    pending, received = group.exchange(
        [x if i == following else nothing for i in range(group.size)], [x.shape if i == before else (0,) for i in range(group.size)]
    )
    return pending, received[before]
