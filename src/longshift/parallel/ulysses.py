"""Ulysses sequence parallelism: sharded by tokens outside attention, by heads inside it.

Paper: DeepSpeed-Ulysses (arXiv 2309.14509).

An all-to-all before attention trades tokens for heads, and one after it trades back. In between,
each rank has all tokens of the pack, so it can run any attention kernel on its share of the heads.

    q[t, N, H] ┐                ┌ q[T, n, H] ┐
    k[t, K, H] ├─ all-to-all ─> ┤ k[T, k, H] ├─ attention ─> o[T, n, H] ─ all-to-all ─> o[t, N, H]
    v[t, K, H] ┘                └ v[T, k, H] ┘

Upper case is a whole dim, lower case this rank's share of it. There are u ranks:

    T   tokens of the pack     t = T / u
    N   query heads            n = N / u; where u does not divide N, the first ranks have one more
    K   key/value heads        k = those that the rank's query heads read
    H   head width

If two ranks read the same key/value head, as they must with K < u, both get a copy of it, and its
gradient is the sum of theirs. Under tensor parallelism, N and K count the heads of one
tensor-parallel rank.

Elements in and out of a rank: t * (2 N + 2 max(K, u)) * H * (u - 1) / u in the forward if u divides
the heads; the same in the backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshift.dist.collectives import Group
from longshift.layout.placement import heads_of
from longshift.model.attention import match_heads
from longshift.parallel.seams import LayoutOps
from longshift.spec.param import share


class UlyssesSeams(LayoutOps):
    """Ulysses around attention."""

    def to_heads(
        self, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = self.groups["ulysses"]
        group_size = self.spec.heads // self.spec.kv_heads

        q_TnH, k_TkH, v_TkH = to_heads(
            q_tNH, k_tKH, v_tKH, self.heads, self.kv_heads, group_size, group
        )
        # Where a rank's query heads begin or end inside a group, key/value heads are matched.
        rank_heads, rank_kv_heads = heads_of(self.heads, group_size, group.size, group.index)
        k_TkH, v_TkH = match_heads(k_TkH, v_TkH, rank_heads, rank_kv_heads, group_size)
        return q_TnH, k_TkH, v_TkH

    def to_tokens(self, o_TnH: Tensor) -> Tensor:
        group = self.groups["ulysses"]
        spans = [share(len(self.heads), group.size, index) for index in range(group.size)]
        return ToTokens.apply(o_TnH, [stop - first for first, stop in spans], group)  # pyright: ignore


class HeadSlices(NamedTuple):
    """The heads that one rank attends with, as slices of q[t, N, H] and of k, v[t, K, H]."""

    query: slice
    kv: slice

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads of q, k and v in the buffer that fuses them along the head dim."""
        num_queries = self.query.stop - self.query.start
        num_kv = self.kv.stop - self.kv.start
        return num_queries, num_kv, num_kv


def to_heads(
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKH: Tensor,
    heads: range,
    kv_heads: range,
    group_size: int,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, n, H] and k, v [T, k, H]: all tokens, this rank's heads.

    `heads`, `kv_heads`: the model's numbers of the heads in q and in k, v.
    `group_size`: query heads that share one key/value head (grouped-query attention).
    """
    slices_by_rank = []
    for index in range(group.size):
        rank_heads, rank_kv_heads = heads_of(heads, group_size, group.size, index)
        slices_by_rank.append(
            HeadSlices(
                query=_slice_within(rank_heads, heads),
                kv=_slice_within(rank_kv_heads, kv_heads),
            )
        )
    return ToHeads.apply(q_tNH, k_tKH, v_tKH, slices_by_rank, group)  # pyright: ignore


class ToHeads(torch.autograd.Function):
    """The all-to-all before attention. `slices_by_rank[i]`: the heads that rank i attends with."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx,
        q_tNH: Tensor,
        k_tKH: Tensor,
        v_tKH: Tensor,
        slices_by_rank: Sequence[HeadSlices],
        group: Group,
    ):
        ctx.slices_by_rank = slices_by_rank
        ctx.group = group
        ctx.q_shape = q_tNH.shape
        ctx.kv_shape = k_tKH.shape

        # One buffer for each rank: this rank's tokens, the heads that the other attends with.
        sends = [
            torch.cat((q_tNH[:, heads.query], k_tKH[:, heads.kv], v_tKH[:, heads.kv]), dim=1)
            for heads in slices_by_rank
        ]

        # What comes back has this rank's heads, so all buffers have the shape of the one that it
        # sends itself.
        rank_shape = sends[group.index].shape
        received = exchange(group, sends, [rank_shape] * group.size)

        # Ranks hold tokens in order, so concatenating by rank restores the order of the pack.
        qkv = torch.cat(received, dim=0)
        return qkv.split(slices_by_rank[group.index].counts, dim=1)

    @staticmethod
    def backward(ctx, dq_TnH: Tensor, dk_TkH: Tensor, dv_TkH: Tensor):  # pyright: ignore
        group = ctx.group

        # 1. The exchange of the forward, reversed: each rank gets the gradients of its tokens.
        local_tokens, _, head_width = ctx.q_shape
        shapes = [(local_tokens, sum(heads.counts), head_width) for heads in ctx.slices_by_rank]
        sends = torch.cat((dq_TnH, dk_TkH, dv_TkH), dim=1).chunk(group.size)
        received = exchange(group, sends, shapes)
        del sends  # freed before the gradients below are allocated

        # 2. A query head went to one rank, so its gradient is copied. A key/value head may have
        #    gone to several, so its gradients are summed.
        dq_tNH = dq_TnH.new_empty(ctx.q_shape)
        dk_tKH = dk_TkH.new_zeros(ctx.kv_shape)
        dv_tKH = dv_TkH.new_zeros(ctx.kv_shape)
        for heads, dqkv in zip(ctx.slices_by_rank, received):
            dq, dk, dv = dqkv.split(heads.counts, dim=1)
            dq_tNH[:, heads.query].copy_(dq)
            _add_to_heads(dk_tKH, heads.kv, dk)
            _add_to_heads(dv_tKH, heads.kv, dv)

        return dq_tNH, dk_tKH, dv_tKH, None, None


class ToTokens(torch.autograd.Function):
    """The all-to-all after attention. `head_counts[i]`: how many query heads rank i has."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx, o_TnH: Tensor, head_counts: Sequence[int], group: Group
    ) -> Tensor:
        ctx.head_counts = head_counts
        ctx.group = group

        tokens, _, head_width = o_TnH.shape
        local_tokens = tokens // group.size
        shapes = [(local_tokens, count, head_width) for count in head_counts]
        return torch.cat(exchange(group, o_TnH.chunk(group.size), shapes), dim=1)

    @staticmethod
    def backward(ctx, do_tNH: Tensor):  # pyright: ignore
        group = ctx.group
        sends = do_tNH.split(ctx.head_counts, dim=1)
        rank_shape = sends[group.index].shape
        do_TnH = torch.cat(exchange(group, sends, [rank_shape] * group.size), dim=0)
        return do_TnH, None, None


def exchange(
    group: Group, sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Send `sends[i]` to rank i and return what came from each rank, `shapes[i]` from rank i.

    `sends` need not be contiguous.
    """
    pending, received = group.exchange(sends, shapes)
    pending.wait()
    return received


def _add_to_heads(grad: Tensor, heads: slice, part: Tensor) -> None:
    """grad[:, heads] += part, without the copy that Python's `+=` on a slice makes."""
    grad[:, heads].add_(part)


def _slice_within(numbers: range, dim_numbers: range) -> slice:
    """Where `numbers` are in a dim of the numbers `dim_numbers`."""
    return slice(numbers.start - dim_numbers.start, numbers.stop - dim_numbers.start)
