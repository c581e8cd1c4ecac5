"""Causal attention over packed documents, with its log-sum-exp.

A pack is a list of runs laid end to end; a token attends only inside its own run. Kernels work on one run (or one pair of runs) at a
time and return (out, lse), so that pieces computed apart can be merged exactly (ring attention, streaming).

Letters: T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longshift.layout.heads import matched_heads

aten = torch.ops.aten


def flash(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """One attention. Returns out [T, N, H] and the log-sum-exp of the scaled scores [T, N], float32 (float64 for float64)."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_TNH, k_SKH, v_SKH))
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif q.dtype in (torch.float16, torch.bfloat16):
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        out, lse = reference(q, k, v, causal, scale)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def flash_backward(
    grad_TNH: Tensor, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, out_TNH: Tensor, lse_TN: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of one attention whose `out` and `lse` may be those of a larger one that it is a part of."""
    grad, q, k, v, out = (t.transpose(0, 1).unsqueeze(0) for t in (grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH))
    lse = lse_TN.transpose(0, 1).unsqueeze(0)
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    elif q.dtype in (torch.float16, torch.bfloat16):
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
        )
    else:
        grads = reference_backward(grad, q, k, v, out, lse, causal, scale)
    dq, dk, dv = (g.squeeze(0).transpose(0, 1) for g in grads[:3])
    return dq, dk, dv


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention by its definition, [1, N, T, H]; for devices without a kernel of this dtype, and to test the kernels."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ _per_query_head(v, q), lse


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by their definition, for a global `out` and `lse`."""
    p = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    ds = p * (grad @ _per_query_head(v, q).mT - (grad * out).sum(-1, keepdim=True)) * scale
    groups = (1, k.shape[1], q.shape[1] // k.shape[1], k.shape[2], k.shape[3])
    dk, dv = ((t.mT @ other).view(groups).sum(2) for t, other in ((ds, q), (p, grad)))
    return ds @ _per_query_head(k, q), dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ _per_query_head(k, q).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores


def _per_query_head(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Fold one partial attention into `out` and `lse`, both in at least float32, in place. The `first` is the causal diagonal, which
    reaches every query, so that nothing is ever -inf; logaddexp keeps any gap between the two finite."""
    if first:
        out.copy_(part)
        lse.copy_(part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp().unsqueeze(-1)).add_(part * (part_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


class PackedAttention(torch.autograd.Function):
    """Causal attention inside each of the runs that tile the tokens: apply(q, k, v, lengths, scale) -> out [T, N, H]."""

    @staticmethod
    def forward(ctx, q, k, v, lengths: Sequence[int], scale: float):  # pyright: ignore[reportIncompatibleMethodOverride]
        outs = [flash(q_, k_, v_, True, scale) for q_, k_, v_ in _runs(lengths, q, k, v)]
        out, lse = (torch.cat(parts) for parts in zip(*outs))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        grads = [flash_backward(*run, causal=True, scale=ctx.scale) for run in _runs(ctx.lengths, grad, q, k, v, out, lse)]
        dq, dk, dv = (torch.cat(parts) for parts in zip(*grads))
        return dq, dk, dv, None, None


def _runs(lengths: Sequence[int], *tensors: Tensor) -> Any:
    """The tensors' pieces of each run."""
    return zip(*(t.split(lengths) for t in tensors))


def match_heads(k: Tensor, v: Tensor, queries: range, keys: range, group: int) -> tuple[Tensor, Tensor]:
    """Repeat key/value heads where this rank's query heads `queries` do not divide evenly over its key/value heads `keys` (both global
    numbers; `group` query heads share one): the kernels assume that they do."""
    if matched_heads(queries, keys, group) == len(keys):
        return k, v
    owner = [head // group - keys.start for head in queries]
    return k[:, owner], v[:, owner]
