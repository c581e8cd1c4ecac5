"""Ulysses sequence parallelism.

Paper: DeepSpeed-Ulysses (arXiv 2309.14509).

Sharding over u ranks: tokens everywhere, x[T_u, D], but heads inside attention, q[T, N_u, H]. One all-to-all turns one into the other,
another turns back. Heads are dealt nearly equally; with fewer key/value heads than ranks, neighbours get the same one and its gradient
is their sum.

    q[T_u, N, H] ┐
    k[T_u, K, H] ├ all-to-all ─ q[T, N_u, H], k, v ─ attention ─ o[T, N_u, H] ─ all-to-all ─ o[T_u, N, H]
    v[T_u, K, H] ┘

Bytes in and out of a rank, forward: (T/u) * (2 N + 2 max(K, u)) * H * (u-1)/u elements when heads divide; backward the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longshift.dist.collectives import Group
from longshift.layout.heads import heads_of
from longshift.model.attention import match_heads
from longshift.parallel.seams import LayoutOps
from longshift.spec.model import share


class UlyssesSeams(LayoutOps):
    """Ulysses around attention."""

    def to_heads(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group, group_size = self.groups["ulysses"], self.spec.heads // self.spec.kv_heads
        q, k, v = to_heads(q_TNH, k_TKH, v_TKH, self.heads, self.kv_heads, group_size, group)
        queries, keys = heads_of(self.heads, group_size, group.size, group.index)
        return q, *match_heads(k, v, queries, keys, group_size)

    def to_tokens(self, o_TNH: Tensor) -> Tensor:
        return to_tokens(o_TNH, self.heads, self.groups["ulysses"])


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, heads: range, kv_heads: range, group_size: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, N_u, H] and k, v [T, K_u, H] with this rank's heads (`heads_of`), from those of its tokens, q [T/u, N, H] and k, v [T/u, K, H].

    `heads` and `kv_heads` are the global numbers of the heads in q and in k, v; `group_size` query heads share one key/value head.
    """
    deals = [heads_of(heads, group_size, group.size, i) for i in range(group.size)]
    slices = [(_within(mine, heads), _within(kv, kv_heads)) for mine, kv in deals]
    return ToHeads.apply(q, k, v, slices, group)  # pyright: ignore[reportReturnType]


def to_tokens(o: Tensor, heads: range, group: Group) -> Tensor:
    """o [T/u, N, H] of this rank's tokens, from o [T, N_u, H] with its heads."""
    counts = [last - first for first, last in (share(len(heads), group.size, i) for i in range(group.size))]
    return ToTokens.apply(o, counts, group)  # pyright: ignore[reportReturnType]


class ToHeads(torch.autograd.Function):
    """The exchange of `to_heads`: apply(q, k, v, slices, group). `slices[i]` are the query heads and the key/value heads, of those here,
    that the i-th rank needs."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, slices, group: Group):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.slices, ctx.group, ctx.shapes = slices, group, (q.shape, k.shape)
        sends = [torch.cat((q[:, mine], k[:, kv], v[:, kv]), 1) for mine, kv in slices]
        received = exchange(group, sends, [sends[group.index].shape] * group.size)
        return torch.cat(received).split(_counts(*slices[group.index]), 1)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        slices, group, (q_shape, k_shape) = ctx.slices, ctx.group, ctx.shapes
        shapes = [(q_shape[0], sum(_counts(*some)), q_shape[2]) for some in slices]
        received = exchange(group, torch.cat((dq, dk, dv), 1).chunk(group.size), shapes)
        dq, dk, dv = dq.new_empty(q_shape), dk.new_zeros(k_shape), dv.new_zeros(k_shape)
        for (mine, kv), part in zip(slices, received):
            from_q, from_k, from_v = part.split(_counts(mine, kv), 1)
            dq[:, mine].copy_(from_q)
            _add(dk, kv, from_k)
            _add(dv, kv, from_v)
        return dq, dk, dv, None, None


class ToTokens(torch.autograd.Function):
    """The exchange of `to_tokens`: apply(o, counts, group). `counts[i]` is how many query heads the i-th rank has."""

    @staticmethod
    def forward(ctx, o: Tensor, counts: Sequence[int], group: Group) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.counts, ctx.group = counts, group
        tokens = o.shape[0] // group.size
        return torch.cat(exchange(group, o.chunk(group.size), [(tokens, count, o.shape[2]) for count in counts]), 1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        sends = grad.split(ctx.counts, 1)
        return torch.cat(exchange(ctx.group, sends, [sends[ctx.group.index].shape] * ctx.group.size)), None, None


def exchange(group: Group, sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors that came from each rank; `sends` need not be contiguous."""
    pending, received = group.exchange(sends, shapes)
    pending.wait()
    return received


def _add(total: Tensor, heads: slice, part: Tensor) -> None:
    total[:, heads].add_(part)


def _within(wanted: range, held: range) -> slice:
    return slice(wanted.start - held.start, wanted.stop - held.start)


def _counts(queries: slice, keys: slice) -> tuple[int, int, int]:
    n, m = queries.stop - queries.start, keys.stop - keys.start
    return n, m, m
