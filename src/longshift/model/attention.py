"""Causal attention over packed documents, by pieces.

A pack is a list of runs laid end to end; a token attends only inside its own run. A piece is one
run, or some queries and the keys of earlier tokens; pieces add to (out, lse), so that those
computed apart make one exact attention (ring attention, streaming, windows).

Letters: T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshift.layout.placement import kernel_kv_heads
from longshift.model.functions import accum_dtype
from longshift.model.kernels import Kernel, add_up, copy_each, empty_output, merge
from longshift.model.packed_attention import LONG, PackedKernel, banded, ends_of
from longshift.schedule.windows import Mask, pieces


@dataclass(frozen=True)
class Attention:
    """A kernel, and what it multiplies scores with. `again`: the backward computes output and
    log-sum-exp again from queries, keys and values (selective recomputation, arXiv 2205.05198), so
    that the forward keeps neither. `kept`: a list into which the forward puts output and
    log-sum-exp where it is empty, and from which it takes them where it is not."""

    kernel: Kernel
    scale: float
    again: bool = False
    kept: list[Tensor] | None = None

    def packed(self, lengths: Sequence[int], window: int | None) -> PackedKernel | None:
        """What computes these documents in one call, where the kernel has it."""
        packed = self.kernel.packed
        return packed if packed and packed.takes(lengths, window) else None

    def calls(
        self, lengths: Sequence[int], window: int | None, ends: Tensor | None
    ) -> "list[Call]":
        """The calls of a pack, in the order of its documents. A packed kernel takes all of a pack
        that has a window. Without one it takes those between long documents: a long one fills a GPU
        alone, by any kernel; memory is then the same whichever is chosen, but for `model.cut`.
        `ends`: of all documents."""
        # 1. Which documents are computed together.
        groups: list[tuple[int, ...]] = []
        if self.packed(lengths, window) is None:
            groups = [(length,) for length in lengths]
        elif banded(lengths, window):
            groups = [tuple(lengths)]
        else:
            for length in lengths:
                # Calls end before and after a long document: none mixes long and short ones.
                if groups and max(length, groups[-1][-1]) < LONG:
                    groups[-1] = (*groups[-1], length)
                else:
                    groups.append((length,))

        # 2. Where they lie.
        calls: list[Call] = []
        document = 0
        token = 0
        for group in groups:
            packed = self.packed(group, window)
            group_ends = ends
            if packed and len(group) < len(lengths):
                assert ends is not None
                group_ends = ends[document : document + len(group) + 1] - ends[document]
            rows = slice(token, token + sum(group))
            calls.append(Call(group, rows, packed, group_ends))
            document += len(group)
            token = rows.stop
        return calls

    def output_and_lse(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a pack: those that are `kept`, or computed."""
        # Autograd takes the output that a forward returns for its own, so it gets a new one.
        if self.kept:
            out, lse = self.kept
            return out.detach(), lse

        out, lse = compute()
        if self.kept is not None:
            self.kept.extend((out, lse))
        return out, lse

    def fold(
        self,
        out_TNH: Tensor,
        lse_TN: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        mask: Mask,
        first: bool,
    ) -> None:
        """Attention to these keys, too, into the output and the log-sum-exp of the scaled scores,
        in place; in at least float32, but for an output that nothing else is folded into. The
        `first` must reach every query; what was there before it counts for nothing."""
        # Kernels know causal and full masks; later keys are causal ones in the opposite order.
        causal = mask != "all"
        kernel = self.kernel.of(q_TNH, k_SKH, causal)
        if mask == "later":
            out, lse = kernel.forward(
                q_TNH.flip(0), k_SKH.flip(0), v_SKH.flip(0), causal, self.scale
            )
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
        """Add the gradients (dq, dk, dv) of a piece to `totals`, in place and in at least float32.
        `out` and `lse` may be those of a larger attention that the piece is a part of."""
        kernel = self.kernel.of(q_TNH, k_SKH, mask != "all")
        if kernel.add and mask != "later":
            kernel.add(
                *totals,
                grad_TNH,
                q_TNH,
                k_SKH,
                v_SKH,
                out_TNH,
                lse_TN,
                mask == "causal",
                self.scale,
            )
        else:
            add_up(totals, self.backward(grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN, mask))

    def backward(
        self,
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        out_TNH: Tensor,
        lse_TN: Tensor,
        mask: Mask,
    ) -> Sequence[Tensor]:
        """Gradients (dq, dk, dv) of a piece, as in `add`."""
        kernel = self.kernel.of(q_TNH, k_SKH, mask != "all")
        if mask != "later":
            return kernel.backward(
                grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN, mask == "causal", self.scale
            )

        # [Note: later keys] Taken in the opposite order, keys from a query's own number on are keys
        # up to it.
        grad, q, k, v, out, lse = (
            t.flip(0) for t in (grad_TNH, q_TNH, k_SKH, v_SKH, out_TNH, lse_TN)
        )
        return [t.flip(0) for t in kernel.backward(grad, q, k, v, out, lse, True, self.scale)]


class PackedAttention(torch.autograd.Function):
    """Causal attention inside each of the runs that tile the tokens, to the last `window` tokens
    where there is one:
    apply(q, k, v, lengths, window, attention, ends) -> out [T, N, H]. `ends`: of
    `model.packed_attention`, made here where a kernel wants them."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        q,
        k,
        v,
        lengths: Sequence[int],
        window: int | None,
        attention: Attention,
        ends: Tensor | None = None,
    ):
        if ends is None and attention.packed(lengths, window):
            ends = ends_of(lengths, q.device)
        out, lse = attention.output_and_lse(
            lambda: _forward(q, k, v, lengths, window, attention, ends)
        )
        ctx.save_for_backward(q, k, v, *(() if attention.again else (out, lse)))
        ctx.lengths = lengths
        ctx.window = window
        ctx.attention = attention
        ctx.ends = ends
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *results = ctx.saved_tensors
        window = ctx.window
        attention = ctx.attention
        calls = attention.calls(ctx.lengths, window, ctx.ends)
        # Gradients of a single call are returned as the kernel makes them, without a copy. Those of
        # several, or of a band of pieces, are copied to their rows.
        is_band = banded(ctx.lengths, window) and not calls[0].packed
        is_copied = len(calls) > 1 or is_band
        totals = [torch.empty_like(t) for t in (q, k, v)] if is_copied else []

        for call in calls:
            # 1. Output and log-sum-exp, as kept or computed again.
            call_grad, call_q, call_k, call_v = (t[call.rows] for t in (grad, q, k, v))
            if results:
                out, lse = (t[call.rows] for t in results)
            else:
                out, lse = _forward(
                    call_q, call_k, call_v, call.lengths, window, attention, call.ends
                )

            # 2. Gradients.
            call_grads = _backward(
                call_grad, call_q, call_k, call_v, out, lse, call, window, attention
            )
            if not is_copied:
                return *call_grads, None, None, None, None
            copy_each([total[call.rows] for total in totals], call_grads)
            del call_grads, out, lse  # freed before the next call allocates its own
        return *totals, None, None, None, None


class Call(NamedTuple):
    """Documents that are computed together: their lengths, the rows of their tokens in the pack,
    and the packed kernel that computes them in one call by their `ends`, where one does."""

    lengths: tuple[int, ...]
    rows: slice
    packed: PackedKernel | None
    ends: Tensor | None


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    window: int | None,
    attention: Attention,
) -> Sequence[Tensor]:
    """Gradients (dq, dk, dv); in at least float32 where a window is computed by pieces."""
    if call.packed:
        return call.packed.backward(
            grad, q, k, v, out, lse, call.ends, call.lengths, window, attention.scale
        )
    # Without a packed kernel a window is a band of pieces.
    if banded(call.lengths, window):
        assert window is not None
        return _windowed_backward(grad, q, k, v, out, lse, window, attention)
    return attention.backward(grad, q, k, v, out, lse, mask="causal")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    window: int | None,
    attention: Attention,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output, in the format of q, and log-sum-exp of a pack."""
    calls = attention.calls(lengths, window, ends)
    if len(calls) == 1 and calls[0].packed:
        return calls[0].packed.forward(q, k, v, ends, lengths, window, attention.scale)

    out, lse = empty_output(q, q.dtype)
    for call in calls:
        call_q, call_k, call_v, call_out, call_lse = (t[call.rows] for t in (q, k, v, out, lse))
        if call.packed:
            # Without a name for the results, which would keep them while the next call allocates
            # its own.
            copy_each(
                (call_out, call_lse),
                call.packed.forward(
                    call_q, call_k, call_v, call.ends, call.lengths, window, attention.scale
                ),
            )
        elif window is None or len(call_q) <= window:
            attention.fold(call_out, call_lse, call_q, call_k, call_v, mask="causal", first=True)
        else:
            # Several pieces add to the same rows, so they are summed in at least float32.
            sums = call_out.to(accum_dtype(q))
            for queries, keys, mask in _pieces(len(call_q), window):
                attention.fold(
                    sums[queries],
                    call_lse[queries],
                    call_q[queries],
                    call_k[keys],
                    call_v[keys],
                    mask,
                    first=mask == "causal",
                )
            if sums is not call_out:
                call_out.copy_(sums)
    return out, lse


def _windowed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int,
    attention: Attention,
) -> Sequence[Tensor]:
    """Gradients (dq, dk, dv) of a run longer than its window, in at least float32."""
    dq, dk, dv = (torch.zeros_like(t, dtype=accum_dtype(t)) for t in (q, k, v))
    for queries, keys, mask in _pieces(len(q), window):
        totals = dq[queries], dk[keys], dv[keys]
        attention.add(
            totals, grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries], mask
        )
    return dq, dk, dv


def _pieces(length: int, window: int) -> Iterator[tuple[slice, slice, Mask]]:
    """Of one run."""
    for queries, keys, mask in pieces((0, length), (0, length), window):
        yield slice(queries[0], queries[1]), slice(keys[0], keys[1]), mask


def match_heads(
    k: Tensor, v: Tensor, queries: range, keys: range, group: int
) -> tuple[Tensor, Tensor]:
    """Repeat key/value heads where this rank's query heads `queries` do not divide evenly over its
    key/value heads `keys` (both global numbers; `group` query heads share one): the kernels assume
    that they do."""
    if kernel_kv_heads(queries, keys, group) == len(keys):
        return k, v
    # A head at a time: an index would be copied to the device.
    owner = [head // group - keys.start for head in queries]
    k, v = (torch.cat([t[:, head : head + 1] for head in owner], dim=1) for t in (k, v))
    return k, v
