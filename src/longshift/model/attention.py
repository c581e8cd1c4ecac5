"""Causal attention over packed documents, by pieces.

A pack is a list of runs laid end to end; a token attends only inside its own run. A piece is one run, or some queries and the keys of
earlier tokens; pieces return (out, lse), so that those computed apart can be merged exactly (ring attention, streaming).

Letters: T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshift.layout.heads import matched_heads
from longshift.model.kernels import Kernel


@dataclass(frozen=True)
class Attention:
    """A kernel, and what it multiplies scores with."""

    kernel: Kernel
    scale: float

    def piece(self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """out [T, N, H] and the log-sum-exp of the scaled scores [T, N]."""
        return self.kernel.forward(q_TNH, k_SKH, v_SKH, causal, self.scale)

    def backward(
        self, grad_TNH: Tensor, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, out_TNH: Tensor, lse_TN: Tensor, causal: bool
    ) -> Sequence[Tensor]:
        """Gradients (dq, dk, dv) of a piece whose `out` and `lse` may be those of a larger attention that it is a part of."""
        assert self.kernel.backward is not None, f"{self.kernel.name} cannot go back through a piece"
        return self.kernel.backward(grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN, causal, self.scale)


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
    """Causal attention inside each of the runs that tile the tokens: apply(q, k, v, lengths, attention) -> out [T, N, H]."""

    @staticmethod
    def forward(ctx, q, k, v, lengths: Sequence[int], attention: Attention):  # pyright: ignore[reportIncompatibleMethodOverride]
        outs = [attention.piece(q_, k_, v_, True) for q_, k_, v_ in _runs(lengths, q, k, v)]
        out, lse = (torch.cat(parts) for parts in zip(*outs))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.attention = lengths, attention
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        grads = [ctx.attention.backward(*run, causal=True) for run in _runs(ctx.lengths, grad, q, k, v, out, lse)]
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
