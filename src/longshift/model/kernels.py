"""Attention kernels, torch's and our tiles: what they take and return.

Ring attention and streaming need two things of a kernel beside speed: the log-sum-exp of the
scores, and a backward that takes the output and log-sum-exp of a *larger* attention, of which the
keys at hand are a part.

Shapes: q [T, N, H], k and v [S, K, H], out [T, N, H], lse [T, N], float32 (float64 for float64); K
divides N. `causal` takes as many keys as queries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from longshift.model import tiled_attention
from longshift.model.functions import accum_dtype
from longshift.model.packed_attention import PackedKernel

aten = torch.ops.aten
MOST_SCORES = 2**26  # that the definition of attention holds at one time
# Of queries and of keys, where the mask is not causal, and where it is: half a tile on its edge is
# in vain.
TILED_TOKENS = {False: 2048, True: 4096}

Forward = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, causal, scale) -> (out, lse)
# (grad, q, k, v, out, lse, causal, scale) -> (dq, dk, dv).
Backward = Callable[..., Sequence[Tensor]]
Fold = Callable[..., None]  # (out, lse, q, k, v, causal, scale, first), the first two in place
# (dq, dk, dv, grad, q, k, v, out, lse, causal, scale), the first three in place.
Add = Callable[..., None]


@dataclass(frozen=True)
class Kernel:
    """`fold` and `add`: as `forward` and `backward`, on sums that grow from piece to piece, where a
    kernel does better than to merge what those two return. `packed`: what takes whole documents in
    one call, where there is something. `rest`: another kernel for the pieces that this one does not
    take. `uncut`: of a kernel that is cut (`model.cut`), the one that takes most of each piece.
    `repeats`: whether its backward on a GPU gives the same bits every time: always, where torch is
    asked for deterministic algorithms, or never; on a CPU every kernel does, for a number of
    threads."""

    name: str
    forward: Forward
    backward: Backward
    fold: Fold | None = None
    add: Add | None = None
    packed: PackedKernel | None = None
    rest: "Kernel | None" = None
    uncut: "Kernel | None" = None
    takes: Callable[[Tensor, Tensor, bool], bool] = lambda q, k, causal: True
    repeats: Literal["always", "asked", "never"] = "always"

    def deterministic(self, device: torch.device) -> bool:
        """Whether equal inputs give equal bits on this device, as torch is set now."""
        if device.type != "cpu":
            repeating = ("always", "asked") if asked() else ("always",)
            if self.repeats not in repeating or (
                self.packed and self.packed.repeats not in repeating
            ):
                return False
        return self.rest is None or self.rest.deterministic(device)

    def of(self, q: Tensor, k: Tensor, causal: bool) -> "Kernel":
        """The one for a piece of this size."""
        return self if self.rest is None or self.takes(q, k, causal) else self.rest


def asked() -> bool:
    """Whether torch is asked for deterministic algorithms, and not only for warnings."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def empty_output(q: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for the output of q's attention, in this format, and for its log-sum-exp."""
    out = torch.empty_like(q, dtype=out_dtype)
    return out, q.new_empty(q.shape[:2], dtype=accum_dtype(q))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Fold one partial attention into `out` and `lse`, both in at least float32, in place. The
    `first` is the causal diagonal, which reaches every query, so that nothing is ever -inf;
    logaddexp keeps any gap between the two finite."""
    if first:
        out.copy_(part)
        lse.copy_(part_lse)
        return

    # Both are brought to the log-sum-exp of their union.
    total_lse = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total_lse).exp().unsqueeze(-1))
    out.add_(part * (part_lse - total_lse).exp().unsqueeze(-1))
    lse.copy_(total_lse)


def add_up(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total += part


def copy_each(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total.copy_(part)


def batched(*tensors: Tensor) -> Any:
    """[T, N, H] -> [1, N, T, H]; [T, N] -> [1, N, T]"""
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]


def flat(t: Tensor) -> Tensor:
    """[1, N, T, H] -> [T, N, H]; [1, N, T] -> [T, N]"""
    return t.squeeze(0).transpose(0, 1)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """On a GPU 16-bit numbers only have a fused kernel; others go by the definition, which is
    slow."""
    if q.device.type == "cpu":
        return flash_on_cpu(q, k, v, causal, scale)
    if q.dtype not in (torch.float16, torch.bfloat16):
        return reference(q, k, v, causal, scale)
    out, lse = aten._scaled_dot_product_flash_attention(
        *batched(q, k, v), 0.0, causal, False, scale=scale
    )[:2]
    return flat(out), flat(lse)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients (dq, dk, dv) for a global `out` and `lse`, by the kernel that `flash` takes."""
    if q.device.type == "cpu":
        return flash_on_cpu_backward(grad, q, k, v, out, lse, causal, scale)
    if q.dtype not in (torch.float16, torch.bfloat16):
        return reference_backward(grad, q, k, v, out, lse, causal, scale)
    grad, q, k, v, out, lse = batched(grad, q, k, v, out, lse)
    lse = lse.contiguous()
    seed = torch.empty(0, dtype=torch.uint64, device=q.device)
    # Without lengths of documents, and nothing is dropped.
    grads = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        seed,
        seed,
        scale=scale,
    )
    return [flat(g) for g in grads[:3]]


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Out and lse by torch's kernel for CPUs, which takes all formats."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *batched(q, k, v), 0.0, causal, scale=scale
    )
    return flat(out), flat(lse)


def flash_on_cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients (dq, dk, dv) for a global `out` and `lse`, by torch's kernel for CPUs."""
    grad, q, k, v, out, lse = batched(grad, q, k, v, out, lse)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return [flat(g) for g in grads[:3]]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, some rows at a time. `cap`: scores are cap * tanh(score / cap).
    `window`: of a causal one, the last tokens that a token sees."""
    q, k, v = batched(q, k, v)
    keys = _per_query_head(k, q)
    values = _per_query_head(v, q)

    outs = []
    lses = []
    for first, rows in _rows(q, k):
        scores = _scores(q[:, :, rows], keys, causal, scale, first, cap, window)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1].unsqueeze(-1)).exp() @ values)

    return flat(torch.cat(outs, 2)), flat(torch.cat(lses, 2))


def reference_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
) -> list[Tensor]:
    """Gradients by their definition, for a global `out` and `lse`."""
    grad, q, k, v, out, lse = batched(grad, q, k, v, out, lse)
    keys = _per_query_head(k, q)
    values = _per_query_head(v, q)

    dqs = []
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    groups = (1, k.shape[1], q.shape[1] // k.shape[1], k.shape[2], k.shape[3])
    for first, rows in _rows(q, k):
        # 1. Probabilities, from the log-sum-exp of the forward.
        row_q = q[:, :, rows]
        row_grad = grad[:, :, rows]
        scores = _scores(row_q, keys, causal, scale, first, cap, window)
        p = (scores - lse[:, :, rows].unsqueeze(-1)).exp()
        # The derivative of tanh; 0 where hidden.
        slope = scores.div_(cap).clamp_(min=-1).square_().neg_().add_(1) if cap else None
        del scores  # freed before the gradients of the scores are allocated

        # 2. Gradients of the scores, in units of q k^T.
        ds = p * (row_grad @ values.mT - (row_grad * out[:, :, rows]).sum(-1, keepdim=True)) * scale
        if slope is not None:
            ds *= slope

        # 3. Query heads that share a key/value head add to its gradient.
        dqs.append(ds @ keys)
        dk += (ds.mT @ row_q).view(groups).sum(2)
        dv += (p.mT @ row_grad).view(groups).sum(2)

    return [flat(t) for t in (torch.cat(dqs, 2), dk, dv)]


def _rows(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice]]:
    """Their first, and them all, so that no more than MOST_SCORES are there at one time."""
    count = max(1, MOST_SCORES // (q.shape[1] * k.shape[2]))
    return ((first, slice(first, first + count)) for first in range(0, q.shape[2], count))


def _scores(
    q: Tensor,
    keys: Tensor,
    causal: bool,
    scale: float,
    first: int,
    cap: float | None,
    window: int | None,
) -> Tensor:
    """Of rows from number `first` on, with a key for every query head."""
    scores = q @ keys.mT * scale
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    if causal:
        scores = scores.masked_fill(_hidden(scores[0, 0], first, window), float("-inf"))
    return scores


def _hidden(scores: Tensor, first: int, window: int | None) -> Tensor:
    """Which keys these rows do not see."""
    ones = torch.ones_like(scores, dtype=torch.bool)
    return ones.triu(1 + first) if window is None else ~ones.tril(first).triu(1 + first - window)


def _per_query_head(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values [1, K, S, H], each repeated for the query heads that share it: [1, N, S,
    H]."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse by cuDNN, which returns a log-sum-exp with one dim more."""
    out, lse = aten._scaled_dot_product_cudnn_attention(
        *batched(q, k, v), None, True, 0.0, causal, False, scale=scale
    )[:2]
    return flat(out), flat(lse.reshape(1, q.shape[1], q.shape[0]))


def _cudnn_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Sequence[Tensor]:
    """Gradients (dq, dk, dv) for a global `out` and `lse`, by cuDNN."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grad, q, k, v, out, lse = batched(grad, q, k, v, out, lse)
    lse = lse.unsqueeze(-1).contiguous()
    # Without a bias and lengths of documents, and nothing is dropped.
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return [flat(t) for t in grads]


def _large(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Large matmuls round to bf16, and are worth their number of operations from TILED_TOKENS
    on."""
    return q.dtype == torch.bfloat16 and q.shape[0] * k.shape[0] >= TILED_TOKENS[causal] ** 2


# Its backward adds to dq atomically, and in one order where that is asked.
FLASH = Kernel("flash", flash, flash_backward, repeats="asked")
# The same for tensors whose device does not tell.
FLASH_ON_CPU = Kernel("flash", flash_on_cpu, flash_on_cpu_backward)
TILED = Kernel(
    "tiled",
    tiled_attention.forward,
    tiled_attention.backward,
    tiled_attention.fold,
    tiled_attention.add,
)
BY_SIZE = replace(TILED, name="tiled or flash", rest=FLASH, takes=_large)
CUDNN = Kernel("cudnn", _cudnn, _cudnn_backward, repeats="never")  # torch asks it for nothing


def _widened(*tensors: Tensor) -> list[Tensor]:
    """In at least float32."""
    return [t.to(accum_dtype(t)) for t in tensors]


def capped(cap: float) -> Kernel:
    """Attention whose scores are soft-capped, as no kernel of torch has it: by its definition, in
    at least float32."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide_q, wide_k, wide_v = _widened(q, k, v)
        out, lse = reference(wide_q, wide_k, wide_v, causal, scale, cap)
        return out.to(q.dtype), lse

    def backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Sequence[Tensor]:
        grad, wide_q, wide_k, wide_v, out = _widened(grad, q, k, v, out)
        return [
            g.to(q.dtype)
            for g in reference_backward(grad, wide_q, wide_k, wide_v, out, lse, causal, scale, cap)
        ]

    # cuBLAS repeats its bits where each stream has a workspace of its own.
    return Kernel(f"math, scores capped at {cap:g}", forward, backward, repeats="asked")
