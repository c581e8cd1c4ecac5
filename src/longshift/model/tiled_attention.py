"""Attention by matmuls of tiles, for CPUs that multiply bf16 much faster than float32.

Paper: FlashAttention-2 (arXiv 2307.08691), its order of tiles, forward and backward. Torch's own
flash kernel for CPUs multiplies many small tiles; here a tile is one large matmul. Scores and the
gradients of their weights need float32: their factors are bf16 already, so float32 copies are
multiplied, which the CPU rounds to bf16 again, for nothing, and sums in float32.

    for rows of q                   for rows of q, grad
        for columns of k, v             for columns of k, v
            s = q k^T                       p = exp(q k^T - lse)      ds = p (grad v^T - delta)
            out, max, sum: online           dv += p^T grad    dk += ds^T q    dq += ds k

Query heads that share a key/value head are stacked as rows. Memory beyond q, k, v and the results:
three tiles, and dk and dv in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Of a tile, for all heads that share keys; powers of two.
ROWS = 1024
COLUMNS = 1024


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Out, in the format of q, and lse."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    fold(out, lse, q, k, v, causal, scale, first=True)
    return out, lse


def fold(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    first: bool,
) -> None:
    """Attention to these keys, too, into `out` and `lse`, in place; if they are the `first`, what
    was there counts for nothing."""
    wide = _scratch(q, k, torch.float32)
    narrow = _scratch(q, k, q.dtype)
    with _in_bf16():
        for heads, head in _heads(q, k):
            for rows, tiles in _tiles(q, k, causal):
                # 1. Sums begin at nothing, or at what the keys before these gave: weights that add
                # up to 1 below its log-sum-exp.
                queries = _stacked(q[rows, heads]).float()
                if first:
                    o = torch.zeros_like(queries)
                    highest = queries.new_full((len(queries), 1), float("-inf"))
                    total = torch.zeros_like(highest)
                else:
                    o = _stacked(out[rows, heads]).to(torch.float32, copy=True)
                    highest = _stacked(lse[rows, heads].unsqueeze(-1))
                    total = torch.ones_like(highest)

                for columns in tiles:
                    # 2. Weights of a tile, relative to its highest score in a row.
                    s = _part(wide, len(queries), columns)
                    p = _part(narrow, len(queries), columns)
                    torch.mm(queries, k[columns, head].float().T, out=s)
                    if causal:
                        _hide_later(s, rows, columns, float("-inf"))
                    tile_highest = s.amax(1, keepdim=True).mul_(scale)
                    torch.add(-tile_highest, s, alpha=scale, out=s).exp_()
                    tile_out = p.copy_(s) @ v[columns, head].contiguous()
                    tile_total = s.sum(1, keepdim=True)

                    # 3. Both sums are brought to the higher of the two, and added.
                    new_highest = torch.maximum(highest, tile_highest)
                    shrink = (highest - new_highest).exp_()
                    tile_shrink = (tile_highest - new_highest).exp_()
                    o.mul_(shrink).addcmul_(tile_out, tile_shrink)
                    total.mul_(shrink).addcmul_(tile_total, tile_shrink)
                    highest = new_highest
                out[rows, heads] = _unstacked(o.div_(total), out[rows, heads])
                lse[rows, heads] = _unstacked(
                    highest + total.log_(), lse[rows, heads].unsqueeze(-1)
                ).squeeze(-1)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients (dq, dk, dv), in the format of their tensors, for a global `out` and `lse`."""
    # dk and dv gather from all rows in float32, dq is complete after its rows.
    dq = torch.zeros_like(q)
    dk = torch.zeros(k.shape, device=k.device)
    dv = torch.zeros(v.shape, device=v.device)
    add(dq, dk, dv, grad, q, k, v, out, lse, causal, scale)
    return [dq, dk.to(k.dtype), dv.to(v.dtype)]


def add(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> None:
    """Add what these keys and values give to the gradients, in place: dk and dv are float32."""
    delta = torch.einsum("tnh,tnh->tn", grad.float(), out.float())
    scratch_p, scratch_ds, scratch_bf16 = (
        _scratch(q, k, dtype) for dtype in (torch.float32, torch.float32, q.dtype)
    )
    with _in_bf16():
        for heads, head in _heads(q, k):
            for rows, tiles in _tiles(q, k, causal):
                # Scores and gradients of weights need float32, the products that are summed take
                # factors in bf16.
                queries = _stacked(q[rows, heads])
                grads = _stacked(grad[rows, heads])
                wide_queries = queries.float()
                wide_grads = grads.float()
                row_lse = _stacked(lse[rows, heads].unsqueeze(-1))
                row_delta = _stacked(delta[rows, heads].unsqueeze(-1))
                row_dq = torch.zeros(queries.shape, device=q.device)

                for columns in tiles:
                    # 1. Weights of a tile, from the log-sum-exp of the forward.
                    keys = k[columns, head].contiguous()
                    values = v[columns, head].contiguous()
                    p, ds, factor = (
                        _part(flat, len(queries), columns)
                        for flat in (scratch_p, scratch_ds, scratch_bf16)
                    )
                    torch.mm(wide_queries, keys.float().T, out=p)
                    torch.add(-row_lse, p, alpha=scale, out=p).exp_()
                    if causal:
                        _hide_later(p, rows, columns, 0.0)

                    # 2. Gradients of values, then of keys and queries.
                    dv[columns, head] += factor.copy_(p).T @ grads
                    torch.mm(wide_grads, values.float().T, out=ds).sub_(row_delta).mul_(p)
                    dk[columns, head].add_(factor.copy_(ds).T @ queries, alpha=scale)
                    row_dq += factor @ keys
                dq[rows, heads].add_(_unstacked(row_dq, dq[rows, heads]), alpha=scale)


@contextmanager
def _in_bf16() -> Iterator[None]:
    """Matmuls of float32 round their inputs to bf16. [Note: process-wide] No other thread of a rank
    multiplies."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (unknown to type checkers)
    previous = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = previous


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[slice, int]]:
    """Query heads, and the key/value head that they share."""
    group = q.shape[1] // k.shape[1]
    return ((slice(head * group, (head + 1) * group), head) for head in range(k.shape[1]))


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Rows, and the columns they see. Columns begin at multiples of their number, which the rows'
    number divides: where the mask is causal every row of a tile sees at least its first column."""
    height = _height(q, k)
    for start in range(0, len(q), height):
        rows = slice(start, min(len(q), start + height))
        # Keys after the last row are hidden from all of them.
        num_keys = rows.stop if causal else len(k)
        tiles = []
        for first in range(0, num_keys, COLUMNS):
            tiles.append(slice(first, min(num_keys, first + COLUMNS)))
        yield rows, tiles


def _height(q: Tensor, k: Tensor) -> int:
    """Rows of a tile for each query head: a power of two, so that all heads of a group have ROWS or
    fewer."""
    return max(1, ROWS >> (q.shape[1] // k.shape[1] - 1).bit_length())


def _hide_later(s: Tensor, rows: slice, columns: slice, value: float) -> None:
    """Set columns that are later than their row to `value`, in place."""
    if columns.stop > rows.start + 1:
        count = rows.stop - rows.start
        later = torch.ones(count, columns.stop - columns.start, dtype=torch.bool).triu(
            rows.start - columns.start + 1
        )
        s.view(-1, count, s.shape[1]).masked_fill_(later, value)


def _scratch(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a tile: fresh memory for each would cost as much as what is computed in it."""
    group = q.shape[1] // k.shape[1]
    return torch.empty(
        min(q.shape[0], _height(q, k)) * group * min(k.shape[0], COLUMNS),
        dtype=dtype,
        device=q.device,
    )


def _part(flat: Tensor, rows: int, columns: slice) -> Tensor:
    """The first elements of scratch memory as a tile [rows, columns]."""
    width = columns.stop - columns.start
    return flat[: rows * width].view(rows, width)


def _stacked(x_TGH: Tensor) -> Tensor:
    """[G T, H]"""
    return x_TGH.transpose(0, 1).reshape(-1, x_TGH.shape[2])


def _unstacked(x: Tensor, like_TGH: Tensor) -> Tensor:
    return x.view(like_TGH.shape[1], like_TGH.shape[0], -1).transpose(0, 1)
