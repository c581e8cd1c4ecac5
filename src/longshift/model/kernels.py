"""Attention kernels, torch's and our tiles: which run here, what they return, how exact and how fast they are.

Ring attention and streaming need two things of a kernel beside speed: the log-sum-exp of the scores, and a backward that takes the
output and log-sum-exp of a *larger* attention, of which the keys at hand are a part.

Shapes: q [T, N, H], k and v [S, K, H], out [T, N, H], lse [T, N], float32 (float64 for float64); K divides N. `causal` takes as many keys
as queries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from longshift.cluster.cluster import Backend, Heads
from longshift.errors import UsageError
from longshift.model import packed, tiled
from longshift.model.packed import Packed, ends_of
from longshift.schedule.inside_rank import EVEN, MOST_SCORES

aten = torch.ops.aten
HEADS = Heads(8, 2, 64)
TOKENS = 256
TIMED_TOKENS = 4096
TILED_TOKENS = {False: 2048, True: 4096}  # of queries and of keys, where the mask is not causal, and is: half a tile on its edge is in vain
PACK, BAND = (60, 1, 130, 65), 48  # of a packed kernel that is tried: lengths of documents, and a window
WRONG = 0.05  # a relative error above this is no rounding
SECONDS = 0.05  # of timing, a kernel and direction

Forward = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, causal, scale) -> (out, lse)
Backward = Callable[..., Sequence[Tensor]]  # (grad, q, k, v, out, lse, causal, scale) -> (dq, dk, dv)
Fold = Callable[..., None]  # (out, lse, q, k, v, causal, scale, first), the first two in place
Add = Callable[..., None]  # (dq, dk, dv, grad, q, k, v, out, lse, causal, scale), the first three in place


@dataclass(frozen=True)
class Kernel:
    """`fold` and `add`: as `forward` and `backward`, on sums that grow from piece to piece, where a kernel does better than to merge what
    those two return. `packed`: what takes whole documents in one call, where there is something. `rest`: another kernel for the pieces
    that this one does not take. `repeats`: whether its backward on a GPU gives the same bits every time: always, where torch is asked for
    deterministic algorithms, or never; on a CPU every kernel does, for a number of threads."""

    name: str
    forward: Forward
    backward: Backward
    fold: Fold | None = None
    add: Add | None = None
    most_scores: int = 2**62  # query heads x queries x keys that fit in memory
    packed: Packed | None = None
    rest: "Kernel | None" = None
    takes: Callable[[Tensor, Tensor, bool], bool] = lambda q, k, causal: True
    repeats: Literal["always", "asked", "never"] = "always"

    def deterministic(self, device: torch.device) -> bool:
        """Whether equal inputs give equal bits on this device, as torch is set now."""
        parts = (self, self.packed) if self.packed else (self,)
        own = device.type == "cpu" or all(one.repeats == "always" or (one.repeats == "asked" and _asked()) for one in parts)
        return own and (self.rest is None or self.rest.deterministic(device))

    def of(self, q: Tensor, k: Tensor, causal: bool) -> "Kernel":
        """The one for a piece of this size."""
        return self if self.rest is None or self.takes(q, k, causal) else self.rest


def _asked() -> bool:
    """Whether torch is asked for deterministic algorithms, and not only for warnings."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


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


def add_up(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total += part


def copy_each(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total.copy_(part)


def probe(kernel: Kernel, dtype: torch.dtype, name: str, device: torch.device, heads: Heads = HEADS) -> Backend:
    """Run a kernel on small inputs against its definition in float64. `name` of the dtype."""
    grad, q, k, v = _inputs(TOKENS, 2 * TOKENS, heads, dtype, device)
    own, scale = (grad, q, k[:TOKENS], v[:TOKENS]), heads.width**-0.5
    exact = grad.double(), q.double(), k[:TOKENS].double(), v[:TOKENS].double()
    whole = reference(exact[1], k.double(), v.double(), False, scale)
    diagonal = reference(*exact[1:], True, scale)
    try:
        out, lse = kernel.forward(*own[1:], True, scale)
        forward_error = _error([out], [diagonal[0]])
        has_lse = lse.shape == diagonal[1].shape and _error([lse], [diagonal[1]]) < WRONG
        found = kernel.backward(*own, out, lse, True, scale)
        backward_error = _error(found, reference_backward(*exact, *diagonal, True, scale))
        global_lse = False
        if has_lse:
            found = kernel.backward(*own, whole[0].to(dtype), whole[1].to(lse.dtype), False, scale)
            global_lse = _error(found, reference_backward(*exact, *whole, False, scale)) < WRONG
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as fault:
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        return Backend(kernel.name, name, why_not=reason.split(". ")[0].rstrip("."))
    if not (forward_error < WRONG and backward_error < WRONG):
        return Backend(kernel.name, name, f"wrong: {forward_error:.1e} forward, {backward_error:.1e} backward")
    return Backend(kernel.name, name, "", has_lse, global_lse, forward_error, backward_error)


def gradients(kernel: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Callable[[], Sequence[Tensor]]:
    """What computes (dq, dk, dv), forward done."""
    return partial(kernel.backward, grad, q, k, v, *kernel.forward(q, k, v, causal, scale), causal, scale)


def choose(
    candidates: Sequence[Kernel], heads: Heads, dtype: torch.dtype, device: torch.device, slowest: Callable[[Tensor], Tensor]
) -> tuple[Kernel, str]:
    """The fastest of those that can be used here, with its packed form as far as that can be, and the reason in words. Where torch is asked
    for deterministic algorithms, the first that is deterministic: timing may choose another one in every run. `slowest`: the largest of
    every number over all ranks, for one choice on all. Raises UsageError, on every rank, where none can be used on all."""
    verdicts = [probe(kernel, dtype, str(dtype), device, heads) for kernel in candidates]
    most = [2 * min(errors) for errors in zip(*map(_errors, verdicts))]
    refusals = [_refusal(kernel, verdict, most, device) for kernel, verdict in zip(candidates, verdicts)]
    timed = len(candidates) > 1 and not _asked()
    usable = [_seconds(k, heads, dtype, device) if timed and not no else float(n) for n, (k, no) in enumerate(zip(candidates, refusals))]
    own = [float("inf") if no else s for s, no in zip(usable, refusals)]
    windows = {number: _windows(kernel, heads, dtype, device) for number, kernel in enumerate(candidates) if kernel.packed}
    given = [*own, *(-float(one) for one in windows.values())]
    found = slowest(torch.tensor(given, dtype=torch.float64, device=device)).tolist()
    seconds, agreed = found[: len(own)], {number: -one for number, one in zip(windows, found[len(own) :])}
    refusals = [
        "" if s < float("inf") else no or (f"fails at {TIMED_TOKENS} tokens" if mine == s else "not on every rank")
        for s, mine, no in zip(seconds, own, refusals)
    ]
    told = ", ".join(
        f"{k.name} {no or (f'{s * 1e3:.3g} ms' if timed else 'can be used')}" for k, s, no in zip(candidates, seconds, refusals)
    )
    if all(refusals):
        raise UsageError(
            f"no attention kernel can be used for {heads.query} heads of {heads.width} in {str(dtype).removeprefix('torch.')} on "
            f"{device.type}: {told}; another train.precision or device may have one"
        )
    if timed:
        why = f"{TIMED_TOKENS} queries and keys, forward and backward: {told}"
    else:
        why = "the only one here" if len(candidates) == 1 else f"the first that is deterministic: {told}"
    best = seconds.index(min(seconds))
    chosen = candidates[best]
    if chosen.packed is None:
        return chosen, why
    usable = None if agreed[best] < 0 else replace(chosen.packed, windows=agreed[best] > 0)
    return replace(chosen, packed=usable), why if usable else f"{why}; its packed form cannot be used: a call for each document"


def _refusal(kernel: Kernel, verdict: Backend, most: Sequence[float], device: torch.device) -> str:
    """Why a kernel is not used: it does not run, is not legal for pieces, has errors above `most`, or is not deterministic where that is
    asked. Empty where it can be."""
    if verdict.why_not:
        return verdict.why_not
    if not verdict.legal or any(error > limit for error, limit in zip(_errors(verdict), most)):
        return "not for pieces, or not exact enough"
    if _asked() and not kernel.deterministic(device):
        return "not deterministic"
    return ""


def _windows(kernel: Kernel, heads: Heads, dtype: torch.dtype, device: torch.device) -> int:
    """Whether a kernel's packed form takes windows, 1 or 0; -1 where it cannot be used. Some documents against their definition, one by
    one; with a window, its own over documents that a window does not reach beyond."""
    given = _inputs(sum(PACK), sum(PACK), heads, dtype, device)
    if not _right(kernel, given, PACK, None):
        return -1
    return int(_right(kernel, given, PACK, BAND))


def _right(kernel: Kernel, given: Sequence[Tensor], lengths: Sequence[int], window: int | None) -> bool:
    """Whether the packed form is right on these documents."""
    assert kernel.packed
    grad, q, k, v = given
    scale, ends = q.shape[-1] ** -0.5, ends_of(lengths, q.device)
    exact = [_one([x.double() for x in run], scale, window) for run in zip(*(x.split(list(lengths)) for x in given))]
    try:
        out, lse = kernel.packed.forward(q, k, v, ends, lengths, window, scale)
        found = out, lse, *kernel.packed.backward(grad, q, k, v, out, lse, ends, lengths, window, scale)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        return False
    return _error(found, [torch.cat(parts) for parts in zip(*exact)]) < WRONG


def _one(document: Sequence[Tensor], scale: float, window: int | None) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of one document, of which are given gradient, q, k and v."""
    grad, q, k, v = document
    out, lse = reference(q, k, v, True, scale, window=window)
    return out, lse, *reference_backward(grad, q, k, v, out, lse, True, scale, window=window)


def _seconds(kernel: Kernel, heads: Heads, dtype: torch.dtype, device: torch.device) -> float:
    """Of a piece's forward and backward; infinite where it fails."""
    grad, q, k, v = _inputs(TIMED_TOKENS, TIMED_TOKENS, heads, dtype, device)
    scale = heads.width**-0.5
    try:
        there = partial(kernel.forward, q, k, v, False, scale)
        back = gradients(kernel, grad, q, k, v, False, scale)
        return sum(Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=SECONDS).median for run in (there, back))
    except RuntimeError:
        return float("inf")


def _inputs(queries: int, keys: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Gradient, q, k and v."""
    make = torch.Generator().manual_seed(0)
    shapes = ((queries, heads.query), (queries, heads.query), (keys, heads.key), (keys, heads.key))
    return [torch.randn(*shape, heads.width, generator=make).to(device, dtype) for shape in shapes]


def _errors(verdict: Backend) -> list[float]:
    """Forward and backward; infinite where it does not run."""
    return [float("inf") if error is None else error for error in (verdict.forward_error, verdict.backward_error)]


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative difference; infinite where it is not a number."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected)]
    return max(error if error == error else float("inf") for error in errors)


def batched(*tensors: Tensor) -> Any:
    """[T, N, H] -> [1, N, T, H]; [T, N] -> [1, N, T]"""
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]


def flat(t: Tensor) -> Tensor:
    return t.squeeze(0).transpose(0, 1)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """On a GPU 16-bit numbers only have a fused kernel; others go by the definition, which is slow."""
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*batched(q, k, v), 0.0, causal, scale=scale)
    elif q.dtype in (torch.float16, torch.bfloat16):
        out, lse = aten._scaled_dot_product_flash_attention(*batched(q, k, v), 0.0, causal, False, scale=scale)[:2]
    else:
        return reference(q, k, v, causal, scale)
    return flat(out), flat(lse)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> list[Tensor]:
    if q.device.type != "cpu" and q.dtype not in (torch.float16, torch.bfloat16):
        return reference_backward(grad, q, k, v, out, lse, causal, scale)
    *given, lse = batched(grad, q, k, v, out, lse)
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse, 0.0, causal, scale=scale)
    else:
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        none = (None, None, q.shape[0], k.shape[0], 0.0)  # no lengths
        grads = aten._scaled_dot_product_flash_attention_backward(*given, lse.contiguous(), *none, causal, seed, seed, scale=scale)
    return [flat(g) for g in grads[:3]]


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, cap: float | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, some rows at a time. `cap`: scores are cap * tanh(score / cap). `window`: of a causal one, the last
    tokens that a token sees."""
    q, k, v = batched(q, k, v)
    keys, values, outs, lses = _per_query_head(k, q), _per_query_head(v, q), [], []
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
    keys, values, dqs, dk, dv = _per_query_head(k, q), _per_query_head(v, q), [], torch.zeros_like(k), torch.zeros_like(v)
    groups = (1, k.shape[1], q.shape[1] // k.shape[1], k.shape[2], k.shape[3])
    for first, rows in _rows(q, k):
        own, given = q[:, :, rows], grad[:, :, rows]
        scores = _scores(own, keys, causal, scale, first, cap, window)
        p = (scores - lse[:, :, rows].unsqueeze(-1)).exp()
        slope = scores.div_(cap).clamp_(min=-1).square_().neg_().add_(1) if cap else None  # of tanh; 0 where hidden
        del scores
        ds = p * (given @ values.mT - (given * out[:, :, rows]).sum(-1, keepdim=True)) * scale
        if slope is not None:
            ds *= slope
        dqs.append(ds @ keys)
        dk += (ds.mT @ own).view(groups).sum(2)
        dv += (p.mT @ given).view(groups).sum(2)
    return [flat(t) for t in (torch.cat(dqs, 2), dk, dv)]


def _rows(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice]]:
    """Their first, and them all, so that no more than MOST_SCORES are there at one time."""
    count = max(1, MOST_SCORES // (q.shape[1] * k.shape[2]))
    return ((first, slice(first, first + count)) for first in range(0, q.shape[2], count))


def _scores(q: Tensor, keys: Tensor, causal: bool, scale: float, first: int, cap: float | None, window: int | None) -> Tensor:
    """Of rows from number `first` on, with a key for every query head."""
    scores = q @ keys.mT * scale
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    if causal:
        scores = scores.masked_fill(_hidden(scores[0, 0], first, window), float("-inf"))
    return scores


def _hidden(scores: Tensor, first: int, window: int | None) -> Tensor:
    """Which keys these rows do not see."""
    every = torch.ones_like(scores, dtype=torch.bool)
    return every.triu(1 + first) if window is None else ~every.tril(first).triu(1 + first - window)


def _per_query_head(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_cudnn_attention(*batched(q, k, v), None, True, 0.0, causal, False, scale=scale)[:2]
    return flat(out), flat(lse.reshape(1, q.shape[1], q.shape[0]))


def _cudnn_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Sequence[Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = lse.transpose(0, 1).unsqueeze(0).unsqueeze(-1).contiguous()
    none = (None, None, None, q.shape[0], k.shape[0], 0.0)  # no bias, no lengths
    grads = aten._scaled_dot_product_cudnn_attention_backward(*batched(grad, q, k, v, out), lse, seed, seed, *none, causal, scale=scale)
    return [flat(t) for t in grads]


def _varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    ends = (_ends(q), _ends(k), q.shape[0], k.shape[0])
    out, lse = aten._flash_attention_forward(q, k, v, *ends, 0.0, causal, False, scale=scale)[:2]
    return out, lse.reshape(q.shape[1], q.shape[0]).t()


def _varlen_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Sequence[Tensor]:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    ends = (_ends(q), _ends(k), q.shape[0], k.shape[0])
    lse = lse.t().contiguous()
    return aten._flash_attention_backward(grad, q, k, v, out, lse, *ends, 0.0, causal, seed, seed, scale=scale)


def _ends(t: Tensor) -> Tensor:
    """[0, T], made there: a copy would wait for the device."""
    return torch.arange(2, dtype=torch.int32, device=t.device) * t.shape[0]


def _large(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Large matmuls round to bf16, and are worth their number of operations from TILED_TOKENS on."""
    return q.dtype == torch.bfloat16 and q.shape[0] * k.shape[0] >= TILED_TOKENS[causal] ** 2


def _recurring(q: Tensor, k: Tensor, causal: bool) -> bool:
    """cuDNN plans anew for every length, in a tenth of a second, and does not take one key."""
    return q.shape[0] % EVEN == k.shape[0] % EVEN == 0


FLASH = Kernel("flash", flash, flash_backward, repeats="asked")  # atomic additions to dq, one order where asked
TILED = Kernel("tiled", tiled.forward, tiled.backward, tiled.fold, tiled.add)
BY_SIZE = replace(TILED, name="tiled or flash", rest=FLASH, takes=_large)
CUDNN = Kernel("cudnn", _cudnn, _cudnn_backward, rest=FLASH, takes=_recurring, repeats="never")  # torch asks it for nothing
VARLEN = Kernel("varlen", _varlen, _varlen_backward, repeats="asked")  # as flash
MATH = Kernel("math", reference, reference_backward, most_scores=MOST_SCORES, repeats="asked")  # cuBLAS, a workspace a stream


def capped(cap: float) -> Kernel:
    """Attention whose scores are soft-capped, as no kernel of torch has it: by its definition, in at least float32."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = reference(q.to(wide), k.to(wide), v.to(wide), causal, scale, cap)
        return out.to(q.dtype), lse

    def backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Sequence[Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        grad, q_wide, k_wide, v_wide, out = (t.to(wide) for t in (grad, q, k, v, out))
        return [g.to(q.dtype) for g in reference_backward(grad, q_wide, k_wide, v_wide, out, lse, causal, scale, cap)]

    return Kernel(f"math, scores capped at {cap:g}", forward, backward, most_scores=MOST_SCORES, repeats="asked")


def kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What a run chooses from. On a CPU nothing, for the same bits in every run: where vectors multiply bf16, large pieces by tiles are 1.4
    times as fast as torch's kernel; where AMX does, torch's is 1.2 to 3 times as fast as they. `MATH` is slow, and in bf16 too
    far from the truth."""
    if device.type != "cpu":
        whole = packed.FLASH if dtype in (torch.float16, torch.bfloat16) else None
        return tuple(replace(kernel, packed=whole) for kernel in (FLASH, CUDNN, VARLEN))
    able = getattr(torch.cpu, "get_capabilities", dict)()
    return (BY_SIZE if dtype == torch.bfloat16 and able.get("avx512_bf16") and not able.get("amx_bf16") else FLASH,)
