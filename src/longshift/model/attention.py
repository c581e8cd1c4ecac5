"""Causal attention over packed documents, by pieces.

A pack is a list of runs laid end to end; a token attends only inside its own run. A piece is one run, or some queries and the keys of
earlier tokens; pieces add to (out, lse), so that those computed apart make one exact attention (ring attention, streaming).

Letters: T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshift.layout.heads import matched_heads
from longshift.model.kernels import Kernel, add_up, copy_each, merge


@dataclass(frozen=True)
class Attention:
    """A kernel, and what it multiplies scores with. `again`: the backward computes output and log-sum-exp again from queries, keys and
    values (selective recomputation, arXiv 2205.05198), so that the forward keeps neither. `kept`: a list into which the forward puts
    output and log-sum-exp where it is empty, and from which it takes them where it is not."""

    kernel: Kernel
    scale: float
    again: bool = False
    kept: list[Tensor] | None = None

    def whole(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a pack: those that are `kept`, or computed."""
        if self.kept:
            out, lse = self.kept
            return out.detach(), lse
        out, lse = compute()
        if self.kept is not None:
            self.kept.extend((out, lse))
        return out, lse

    def fold(self, out_TNH: Tensor, lse_TN: Tensor, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, causal: bool, first: bool) -> None:
        """Attention to these keys, too, into the output and the log-sum-exp of the scaled scores, in place; in at least float32, but for an
        output that nothing else is folded into. The `first` must reach every query; what was there before it counts for nothing."""
        kernel = self.kernel.of(q_TNH, k_SKH, causal)
        if kernel.fold:
            kernel.fold(out_TNH, lse_TN, q_TNH, k_SKH, v_SKH, causal, self.scale, first)
        else:
            merge(out_TNH, lse_TN, *kernel.forward(q_TNH, k_SKH, v_SKH, causal, self.scale), first)

    def diagonal(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of causal attention to one run."""
        return _forward(q_TNH, k_TKH, v_TKH, [len(q_TNH)], self)

    def add(
        self,
        totals: Sequence[Tensor],
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        out_TNH: Tensor,
        lse_TN: Tensor,
        causal: bool,
    ) -> None:
        """Add the gradients (dq, dk, dv) of a piece to `totals`, in place and in at least float32. `out` and `lse` may be those of a
        larger attention that the piece is a part of."""
        given = grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN
        kernel = self.kernel.of(q_TNH, k_SKH, causal)
        if kernel.add:
            kernel.add(*totals, *given, causal, self.scale)
        else:
            add_up(totals, self.backward(*given, causal))

    def backward(
        self, grad_TNH: Tensor, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, out_TNH: Tensor, lse_TN: Tensor, causal: bool
    ) -> Sequence[Tensor]:
        """Gradients (dq, dk, dv) of a piece, as in `add`."""
        kernel = self.kernel.of(q_TNH, k_SKH, causal)
        return kernel.backward(grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN, causal, self.scale)


class PackedAttention(torch.autograd.Function):
    """Causal attention inside each of the runs that tile the tokens: apply(q, k, v, lengths, attention) -> out [T, N, H]."""

    @staticmethod
    def forward(ctx, q, k, v, lengths: Sequence[int], attention: Attention):  # pyright: ignore[reportIncompatibleMethodOverride]
        out, lse = attention.whole(lambda: _forward(q, k, v, lengths, attention))
        ctx.save_for_backward(q, k, v, *(() if attention.again else (out, lse)))
        ctx.lengths, ctx.attention = lengths, attention
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *made = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for run in _runs(ctx.lengths, *grads, grad, q, k, v, *made):
            result = run[7:] or ctx.attention.diagonal(*run[4:])
            copy_each(run[:3], ctx.attention.backward(*run[3:7], *result, causal=True))
        return *grads, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], attention: Attention) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for run in _runs(lengths, out, lse, q, k, v):
        attention.fold(*run, causal=True, first=True)
    return out, lse


def _runs(lengths: Sequence[int], *tensors: Tensor) -> Any:
    """The tensors' pieces of each run."""
    return zip(*(t.split(lengths) for t in tensors))


def match_heads(k: Tensor, v: Tensor, queries: range, keys: range, group: int) -> tuple[Tensor, Tensor]:
    """Repeat key/value heads where this rank's query heads `queries` do not divide evenly over its key/value heads `keys` (both global
    numbers; `group` query heads share one): the kernels assume that they do."""
    if matched_heads(queries, keys, group) == len(keys):
        return k, v
    owner = [head // group - keys.start for head in queries]
    k, v = (torch.cat([t[:, head : head + 1] for head in owner], 1) for t in (k, v))  # an index would be copied to the device
    return k, v
