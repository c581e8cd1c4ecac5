"""Attention of whole documents, laid end to end, in one call of a kernel.

A call for each document costs a pack of many short ones more than their arithmetic.
FlashAttention-2 (arXiv 2307.08691) takes cumulative lengths instead, `ends` [documents + 1], int32,
from 0; and a window, as the last tokens that a token sees, so that a band is one call too.

    ends   0        5 6              43    a token sees the keys of its document up to its own,
           |document| |   document   |     the last `window` of them

Letters as in `model.kernels`; out [T, N, H], lse [T, N], float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

aten = torch.ops.aten

# cuDNN's attention takes multiples of this many tokens. Chunks and their cuts are such; most
# documents are not (`model.cut`).
EVEN = 1024
# Of pieces above this many tokens it takes what it can; such documents have a call of their own.
LONG = 6144

# (q, k, v, ends, lengths, window, scale) -> (out, lse).
Forward = Callable[..., tuple[Tensor, Tensor]]
# (grad, q, k, v, out, lse, ends, lengths, window, scale) -> (dq, dk, dv).
Backward = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class PackedKernel:
    """A kernel over packs. `repeats`: as of `model.kernels.Kernel`."""

    forward: Forward
    backward: Backward
    repeats: Literal["always", "asked", "never"] = "always"

    def takes(self, lengths: Sequence[int], window: int | None) -> bool:
        """Whether it computes this pack; a single document without a window is one call
        of any kernel."""
        return banded(lengths, window) or len(lengths) > 1


def banded(lengths: Sequence[int], window: int | None) -> bool:
    """Whether a window hides keys of a document."""
    return window is not None and window < max(lengths)


def ends_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where documents begin and the last one ends. On a GPU the copy waits for the device: who can
    makes them before."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    lengths: Sequence[int],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out and lse of all documents, by FlashAttention-2."""
    longest = max(lengths)
    # ends and longest of queries, then of keys; no dropout, causal, no debug mask
    out, lse = aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=scale, **_band(window)
    )[:2]
    return out, lse.view(q.shape[1], q.shape[0]).t().contiguous()


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    lengths: Sequence[int],
    window: int | None,
    scale: float,
) -> Sequence[Tensor]:
    """Gradients (dq, dk, dv) of all documents, by FlashAttention-2."""
    longest = max(lengths)
    # Nothing is dropped, so nothing reads it.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    lse = lse.t().contiguous()
    return aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        ends,
        ends,
        longest,
        longest,
        0.0,
        True,
        seed,
        seed,
        scale=scale,
        **_band(window),
    )


def _band(window: int | None) -> dict[str, int]:
    """Keys before a query's own that it sees; none after it."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


FLASH = PackedKernel(flash_forward, flash_backward, repeats="asked")  # as the kernel of pieces
