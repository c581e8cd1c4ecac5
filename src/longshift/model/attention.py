"""Causal attention over packed documents, by pieces.

A pack is a list of runs laid end to end; a token attends only inside its own run. A piece is one run, or some queries and the keys of
earlier tokens; pieces add to (out, lse), so that those computed apart make one exact attention (ring attention, streaming, windows).

Letters: T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshift.layout.heads import matched_heads
from longshift.model.kernel_calls import LONG, banded
from longshift.model.kernels import Kernel, add_up, copy_each, merge
from longshift.model.packed import Packed, ends_of
from longshift.schedule.windows import Mask, pieces


@dataclass(frozen=True)
class Attention:
    """A kernel, and what it multiplies scores with. `again`: the backward computes output and log-sum-exp again from queries, keys and
    values (selective recomputation, arXiv 2205.05198), so that the forward keeps neither. `kept`: a list into which the forward puts
    output and log-sum-exp where it is empty, and from which it takes them where it is not."""

    kernel: Kernel
    scale: float
    again: bool = False
    kept: list[Tensor] | None = None

    def packed(self, lengths: Sequence[int], window: int | None) -> Packed | None:
        """What computes these documents in one call, where the kernel has it."""
        found = self.kernel.packed
        return found if found and found.takes(lengths, window) else None

    def calls(self, lengths: Sequence[int], window: int | None) -> list[tuple[int, ...]]:
        """Lengths of the documents that are computed together, in their order. A packed kernel takes all of a pack that has a window.
        Without one it takes those between long documents: a long one fills a GPU alone, by any kernel; memory is then the same whichever
        is chosen, but for `model.cut`."""
        if self.packed(lengths, window) is None:
            return [(length,) for length in lengths]
        if banded(lengths, window):
            return [tuple(lengths)]
        calls: list[tuple[int, ...]] = []
        for length in lengths:
            if calls and max(length, calls[-1][-1]) < LONG:
                calls[-1] = (*calls[-1], length)
            else:
                calls.append((length,))
        return calls

    def whole(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a pack: those that are `kept`, or computed."""
        if self.kept:
            out, lse = self.kept
            return out.detach(), lse
        out, lse = compute()
        if self.kept is not None:
            self.kept.extend((out, lse))
        return out, lse

    def fold(self, out_TNH: Tensor, lse_TN: Tensor, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Mask, first: bool) -> None:
        """Attention to these keys, too, into the output and the log-sum-exp of the scaled scores, in place; in at least float32, but for an
        output that nothing else is folded into. The `first` must reach every query; what was there before it counts for nothing."""
        causal = mask != "all"
        kernel = self.kernel.of(q_TNH, k_SKH, causal)
        if mask == "later":
            out, lse = kernel.forward(q_TNH.flip(0), k_SKH.flip(0), v_SKH.flip(0), causal, self.scale)
            merge(out_TNH, lse_TN, out.flip(0), lse.flip(0), first)
        elif kernel.fold:
            kernel.fold(out_TNH, lse_TN, q_TNH, k_SKH, v_SKH, causal, self.scale, first)
        else:
            merge(out_TNH, lse_TN, *kernel.forward(q_TNH, k_SKH, v_SKH, causal, self.scale), first)

    def add(
        self,
        totals: Sequence[Tensor],
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        out_TNH: Tensor,
        lse_TN: Tensor,
        mask: Mask,
    ) -> None:
        """Add the gradients (dq, dk, dv) of a piece to `totals`, in place and in at least float32. `out` and `lse` may be those of a
        larger attention that the piece is a part of."""
        given = grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN
        kernel = self.kernel.of(q_TNH, k_SKH, mask != "all")
        if kernel.add and mask != "later":
            kernel.add(*totals, *given, mask == "causal", self.scale)
        else:
            add_up(totals, self.backward(*given, mask))

    def backward(
        self, grad_TNH: Tensor, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, out_TNH: Tensor, lse_TN: Tensor, mask: Mask
    ) -> Sequence[Tensor]:
        """Gradients (dq, dk, dv) of a piece, as in `add`. [Note: later keys] Taken in the opposite order, keys from a query's own number on
        are keys up to it."""
        given = grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN
        kernel = self.kernel.of(q_TNH, k_SKH, mask != "all")
        if mask == "later":
            flipped: Any = (t.flip(0) for t in given)
            return [t.flip(0) for t in kernel.backward(*flipped, True, self.scale)]
        return kernel.backward(*given, mask == "causal", self.scale)


class PackedAttention(torch.autograd.Function):
    """Causal attention inside each of the runs that tile the tokens, to the last `window` tokens where there is one:
    apply(q, k, v, lengths, window, attention, ends) -> out [T, N, H]. `ends`: of `model.packed`, made here where a kernel wants them."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, q, k, v, lengths: Sequence[int], window: int | None, attention: Attention, ends: Tensor | None = None
    ):
        if ends is None and attention.packed(lengths, window):
            ends = ends_of(lengths, q.device)
        out, lse = attention.whole(lambda: _forward(q, k, v, lengths, window, attention, ends))
        ctx.save_for_backward(q, k, v, *(() if attention.again else (out, lse)))
        ctx.lengths, ctx.window, ctx.attention, ctx.ends = lengths, window, attention, ends
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *made = ctx.saved_tensors
        every = _calls(ctx.lengths, ctx.window, ctx.attention, ctx.ends)
        if len(every) == 1 and (every[0].ends is not None or not banded(ctx.lengths, ctx.window)):
            result = made or _forward(q, k, v, ctx.lengths, ctx.window, ctx.attention, ctx.ends)
            return *_backward((grad, q, k, v, *result), every[0], ctx.window, ctx.attention), None, None, None, None
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for call, run in zip(every, _runs([call.tokens for call in every], *grads, grad, q, k, v, *made)):
            result = run[7:] or _forward(run[4], run[5], run[6], call.lengths, ctx.window, ctx.attention, call.ends)
            found = _backward((*run[3:7], *result), call, ctx.window, ctx.attention)
            copy_each(run[:3], found)
            del found, result
        return *grads, None, None, None, None


@dataclass(frozen=True)
class Call:
    """Lengths of documents that are computed together, and their `ends` where one call of a packed kernel does that."""

    lengths: tuple[int, ...]
    ends: Tensor | None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def _calls(lengths: Sequence[int], window: int | None, attention: Attention, ends: Tensor | None) -> list[Call]:
    found, first = [], 0
    for call in attention.calls(lengths, window):
        last, own = first + len(call), None
        if attention.packed(call, window):
            assert ends is not None
            own = ends if len(call) == len(lengths) else ends[first : last + 1] - ends[first]
        found.append(Call(call, own))
        first = last
    return found


def _backward(given: tuple[Tensor, ...], call: Call, window: int | None, attention: Attention) -> Sequence[Tensor]:
    """Gradients (dq, dk, dv); in at least float32 where a window is computed by pieces."""
    if packed := attention.packed(call.lengths, window):
        return packed.backward(*given, call.ends, call.lengths, window, attention.scale)
    if banded(call.lengths, window):
        assert window is not None
        return _windowed_backward(given, window, attention)
    return attention.backward(*given, mask="causal")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None, attention: Attention, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    every, packed = _calls(lengths, window, attention, ends), attention.packed(lengths, window)
    if packed and len(every) == 1:
        return packed.forward(q, k, v, every[0].ends, lengths, window, attention.scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide)
    for call, run in zip(every, _runs([call.tokens for call in every], out, lse, q, k, v)):
        if packed and call.ends is not None:
            copy_each(run[:2], packed.forward(*run[2:], call.ends, call.lengths, window, attention.scale))
            continue
        length = call.tokens
        if window is None or length <= window:
            attention.fold(*run, mask="causal", first=True)
            continue
        run_out, run_lse, *given = run
        sums = run_out.to(wide, copy=True) if run_out.dtype != wide else run_out
        for queries, keys, mask in _pieces(length, window):
            attention.fold(sums[queries], run_lse[queries], given[0][queries], given[1][keys], given[2][keys], mask, mask == "causal")
        if sums is not run_out:
            run_out.copy_(sums)
    return out, lse


def _windowed_backward(given: tuple[Tensor, ...], window: int, attention: Attention) -> Sequence[Tensor]:
    """Gradients (dq, dk, dv) of a run longer than its window, in at least float32."""
    grad, q, k, v, out, lse = given
    totals = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v)]
    for queries, keys, mask in _pieces(len(q), window):
        sums = totals[0][queries], totals[1][keys], totals[2][keys]
        attention.add(sums, grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries], mask)
    return totals


def _pieces(length: int, window: int) -> Iterator[tuple[slice, slice, Mask]]:
    """Of one run."""
    return ((slice(*queries), slice(*keys), mask) for queries, keys, mask in pieces((0, length), (0, length), window))


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
