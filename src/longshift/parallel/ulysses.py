"""Ulysses sequence parallelism.

Paper: DeepSpeed-Ulysses (arXiv 2309.14509).

Sharding over u ranks: tokens everywhere, x[T_u, D], but heads inside attention, q[T, N_u, H]. One all-to-all turns one into the other,
another turns back. Heads are dealt nearly equally; with fewer key/value heads than ranks, neighbours get the same one and its gradient
is their sum (by autograd, where the slices overlap).

    q[T_u, N, H] ┐
    k[T_u, K, H] ├ all-to-all ─ q[T, N_u, H], k, v ─ attention ─ o[T, N_u, H] ─ all-to-all ─ o[T_u, N, H]
    v[T_u, K, H] ┘

Bytes in and out of a rank, forward: (T/u) * (2 N + 2 max(K, u)) * H * (u-1)/u elements when heads divide; backward the same.
"""

import torch
from torch import Tensor

from longshift.dist.collectives import AllToAll, Group
from longshift.layout.heads import heads_of
from longshift.spec.model import share


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, heads: range, kv_heads: range, group_size: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, N_u, H] and k, v [T, K_u, H] with this rank's heads (`heads_of`), from those of its tokens, q [T/u, N, H] and k, v [T/u, K, H].

    `heads` and `kv_heads` are the global numbers of the heads in q and in k, v; `group_size` query heads share one key/value head.
    """
    deals = [heads_of(heads, group_size, group.size, i) for i in range(group.size)]
    sends = [torch.cat((_pick(q, mine, heads), _pick(k, kv, kv_heads), _pick(v, kv, kv_heads)), 1) for mine, kv in deals]
    queries, keys = deals[group.index]
    n, m = len(queries), len(keys)
    received = AllToAll.apply(group, [(q.shape[0], n + 2 * m, q.shape[2])] * group.size, *sends)
    return torch.cat(received).split((n, m, m), dim=1)  # pyright: ignore[reportArgumentType, reportCallIssue, reportReturnType]


def to_tokens(o: Tensor, heads: range, group: Group) -> Tensor:
    """o [T/u, N, H] of this rank's tokens, from o [T, N_u, H] with its heads."""
    tokens = o.shape[0] // group.size
    shapes = [(tokens, last - first, o.shape[2]) for first, last in (share(len(heads), group.size, i) for i in range(group.size))]
    return torch.cat(AllToAll.apply(group, shapes, *o.split(tokens)), 1)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _pick(x: Tensor, wanted: range, held: range) -> Tensor:
    return x[:, wanted.start - held.start : wanted.stop - held.start]
