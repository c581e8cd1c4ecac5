"""Attention by matmuls of tiles, for CPUs that multiply bf16 much faster than float32.

Paper: FlashAttention-2 (arXiv 2307.08691), its order of tiles, forward and backward. Torch's own flash kernel for CPUs multiplies many
small tiles; here a tile is one large matmul. Scores and the gradients of their weights need float32: their factors are bf16 already, so
float32 copies are multiplied, which the CPU rounds to bf16 again, for nothing, and sums in float32.

    for rows of q                   for rows of q, grad
        for columns of k, v             for columns of k, v
            s = q k^T                       p = exp(q k^T - lse)      ds = p (grad v^T - delta)
            out, max, sum: online           dv += p^T grad    dk += ds^T q    dq += ds k

Query heads that share a key/value head are stacked as rows. Memory beyond q, k, v and the results: three tiles, and dk and dv in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 1024, 1024  # of a tile, for all heads that share keys; powers of two


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    fold(out, lse, q, k, v, causal, scale, first=True)
    return out, lse


def fold(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, first: bool) -> None:
    """Attention to these keys, too, into `out` and `lse`, in place; if they are the `first`, what was there counts for nothing."""
    wide, narrow = _scratch(q, k, torch.float32), _scratch(q, k, q.dtype)
    with _in_bf16():
        for heads, head in _heads(q, k):
            for rows, tiles in _tiles(q, k, causal):
                queries = _stacked(q[rows, heads]).float()
                if first:
                    o, most = torch.zeros_like(queries), queries.new_full((len(queries), 1), float("-inf"))
                    total = torch.zeros_like(most)
                else:
                    o, most = _stacked(out[rows, heads]).to(torch.float32, copy=True), _stacked(lse[rows, heads].unsqueeze(-1))
                    total = torch.ones_like(most)
                for columns in tiles:
                    s, p = (_part(flat, len(queries), columns) for flat in (wide, narrow))
                    torch.mm(queries, k[columns, head].float().T, out=s)
                    top = (_hide_later(s, rows, columns, float("-inf")) if causal else s).amax(1, keepdim=True).mul_(scale)
                    torch.add(-top, s, alpha=scale, out=s).exp_()
                    part, weight = p.copy_(s) @ v[columns, head].contiguous(), s.sum(1, keepdim=True)
                    above = torch.maximum(most, top)
                    old, new = (most - above).exp_(), (top - above).exp_()
                    o.mul_(old).addcmul_(part, new)
                    total.mul_(old).addcmul_(weight, new)
                    most = above
                out[rows, heads] = _unstacked(o.div_(total), out[rows, heads])
                lse[rows, heads] = _unstacked(most + total.log_(), lse[rows, heads].unsqueeze(-1)).squeeze(-1)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> list[Tensor]:
    dq, dk, dv = torch.zeros_like(q), *(torch.zeros(x.shape, device=x.device) for x in (k, v))
    add(dq, dk, dv, grad, q, k, v, out, lse, causal, scale)
    return [dq, dk.to(k.dtype), dv.to(v.dtype)]


def add(
    dq: Tensor, dk: Tensor, dv: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> None:
    """Add what these keys and values give to the gradients, in place: dk and dv are float32."""
    delta = torch.einsum("tnh,tnh->tn", grad.float(), out.float())
    wide, wide_too, narrow = (_scratch(q, k, dtype) for dtype in (torch.float32, torch.float32, q.dtype))
    with _in_bf16():
        for heads, head in _heads(q, k):
            for rows, tiles in _tiles(q, k, causal):
                queries, grads = (_stacked(x[rows, heads]) for x in (q, grad))
                below, minus = (_stacked(x[rows, heads].unsqueeze(-1)) for x in (lse, delta))
                wide_queries, wide_grads = queries.float(), grads.float()
                own = torch.zeros(queries.shape, device=q.device)
                for columns in tiles:
                    keys, values = (x[columns, head].contiguous() for x in (k, v))
                    p, ds, sent = (_part(flat, len(queries), columns) for flat in (wide, wide_too, narrow))
                    torch.mm(wide_queries, keys.float().T, out=p)
                    torch.add(-below, p, alpha=scale, out=p).exp_()
                    if causal:
                        _hide_later(p, rows, columns, 0.0)
                    dv[columns, head] += sent.copy_(p).T @ grads
                    torch.mm(wide_grads, values.float().T, out=ds).sub_(minus).mul_(p)
                    dk[columns, head].add_(sent.copy_(ds).T @ queries, alpha=scale)
                    own += sent @ keys
                dq[rows, heads].add_(_unstacked(own, dq[rows, heads]), alpha=scale)


@contextmanager
def _in_bf16() -> Iterator[None]:
    """Matmuls of float32 round their inputs to bf16. [Note: process-wide] No other thread of a rank multiplies."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (unknown to type checkers)
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[slice, int]]:
    """Query heads, and the key/value head that they share."""
    group = q.shape[1] // k.shape[1]
    return ((slice(head * group, (head + 1) * group), head) for head in range(k.shape[1]))


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Rows, and the columns they see. Columns begin at multiples of their number, which the rows' number divides: where the mask is causal
    every row of a tile sees at least its first column."""
    tokens, keys = q.shape[0], k.shape[0]
    height = _height(q, k)
    for start in range(0, tokens, height):
        rows = slice(start, min(tokens, start + height))
        seen = rows.stop if causal else keys
        yield rows, [slice(at, min(seen, at + COLUMNS)) for at in range(0, seen, COLUMNS)]


def _height(q: Tensor, k: Tensor) -> int:
    return max(1, ROWS >> (q.shape[1] // k.shape[1] - 1).bit_length())


def _hide_later(s: Tensor, rows: slice, columns: slice, value: float) -> Tensor:
    """In place: columns that are later than their row."""
    if columns.stop > rows.start + 1:
        count = rows.stop - rows.start
        later = torch.ones(count, columns.stop - columns.start, dtype=torch.bool).triu(rows.start - columns.start + 1)
        s.view(-1, count, s.shape[1]).masked_fill_(later, value)
    return s


def _scratch(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a tile: fresh memory for each would cost as much as what is computed in it."""
    group = q.shape[1] // k.shape[1]
    return torch.empty(min(q.shape[0], _height(q, k)) * group * min(k.shape[0], COLUMNS), dtype=dtype, device=q.device)


def _part(flat: Tensor, rows: int, columns: slice) -> Tensor:
    width = columns.stop - columns.start
    return flat[: rows * width].view(rows, width)


def _stacked(x_TGH: Tensor) -> Tensor:
    """[G T, H]"""
    return x_TGH.transpose(0, 1).reshape(-1, x_TGH.shape[2])


def _unstacked(x: Tensor, like_TGH: Tensor) -> Tensor:
    return x.view(like_TGH.shape[1], like_TGH.shape[0], -1).transpose(0, 1)
