"""Which attention kernel a run takes: those that its device has are tried, against their definition and on the clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from longshift.cluster.cluster import Backend, Heads
from longshift.errors import UsageError
from longshift.model import packed
from longshift.model.cut import cut
from longshift.model.kernel_calls import EVEN, LONG
from longshift.model.kernels import BY_SIZE, CUDNN, FLASH, Kernel, asked, reference, reference_backward
from longshift.model.packed import ends_of

HEADS = Heads(8, 2, 64)
TOKENS = 256
TIMED_TOKENS = 4096
PACK, BAND = (60, 1, 130, 65), 48  # of a packed kernel that is tried: lengths of documents, and a window
WRONG = 0.05  # a relative error above this is no rounding
SECONDS = 0.05  # of timing, a kernel and direction
LONG_BY_CUDNN = cut(CUDNN, FLASH, EVEN, LONG)  # it plans anew for every shape, in a tenth of a second


def probe(kernel: Kernel, dtype: torch.dtype, name: str, device: torch.device, heads: Heads = HEADS) -> Backend:
    """Run a kernel on small inputs, of one that is cut the `whole` one, against its definition in float64. `name` of the dtype."""
    kernel = kernel.whole or kernel
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
    # 1. What this rank can use, and how fast it is.
    verdicts = [probe(kernel, dtype, str(dtype), device, heads) for kernel in candidates]
    most = [2 * min(errors) for errors in zip(*map(_errors, verdicts))]
    refusals = [_refusal(kernel, verdict, most, device) for kernel, verdict in zip(candidates, verdicts)]
    timed = len(candidates) > 1 and not asked()
    rank_seconds = [float("inf") if refusal else float(number) for number, refusal in enumerate(refusals)]
    if timed:
        rank_seconds = [float("inf") if no else _seconds(kernel, heads, dtype, device) for kernel, no in zip(candidates, refusals)]
    packed_forms = [_packed_form(kernel, heads, dtype, device) for kernel in candidates]

    # 2. What all ranks can use, and how fast the slowest is.
    given = torch.tensor([rank_seconds, [-form for form in packed_forms]], dtype=torch.float64, device=device)
    seconds, packed_forms = slowest(given).tolist()
    for number, kernel_seconds in enumerate(seconds):
        if kernel_seconds == float("inf") and not refusals[number]:
            fails_here = rank_seconds[number] == kernel_seconds
            refusals[number] = f"fails at {TIMED_TOKENS} tokens" if fails_here else "not on every rank"
    told = ", ".join(
        f"{k.name} {no or (f'{s * 1e3:.3g} ms' if timed else 'can be used')}" for k, s, no in zip(candidates, seconds, refusals)
    )
    if all(refusals):
        raise UsageError(
            f"no attention kernel can be used for {heads.query} heads of {heads.width} in {str(dtype).removeprefix('torch.')} on "
            f"{device.type}: {told}; another train.precision or device may have one"
        )

    # 3. The fastest.
    if timed:
        why = f"{TIMED_TOKENS} queries and keys, forward and backward: {told}"
    else:
        why = "the only one here" if len(candidates) == 1 else f"the first that is deterministic: {told}"
    best = seconds.index(min(seconds))
    chosen, packed_form = candidates[best], -packed_forms[best]
    if chosen.packed is None:
        return chosen, why
    if packed_form == 0:
        return replace(chosen, packed=None), f"{why}; its packed form cannot be used: a call for each document"
    return replace(chosen, packed=replace(chosen.packed, windows=packed_form == 2)), why


def _refusal(kernel: Kernel, verdict: Backend, most: Sequence[float], device: torch.device) -> str:
    """Why a kernel is not used: it does not run, is not legal for pieces, has errors above `most`, or is not deterministic where that is
    asked. Empty where it can be."""
    if verdict.why_not:
        return verdict.why_not
    if not verdict.legal or any(error > limit for error, limit in zip(_errors(verdict), most)):
        return "not for pieces, or not exact enough"
    if asked() and not kernel.deterministic(device):
        return "not deterministic"
    return ""


def _packed_form(kernel: Kernel, heads: Heads, dtype: torch.dtype, device: torch.device) -> int:
    """Whether a kernel has a packed form that can be used, 1 or 0; 2 where it takes windows too. Some documents against their definition,
    one by one; with a window, its own over documents that a window does not reach beyond."""
    given = _inputs(sum(PACK), sum(PACK), heads, dtype, device)
    if kernel.packed is None or not _right(kernel, given, PACK, None):
        return 0
    return 2 if _right(kernel, given, PACK, BAND) else 1


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


def kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What a run chooses from. On a CPU nothing, for the same bits in every run: where vectors multiply bf16, large pieces by tiles are 1.4
    times as fast as torch's kernel; where AMX does, torch's is 1.2 to 3 times as fast as they."""
    if device.type != "cpu":
        whole = packed.FLASH if dtype in (torch.float16, torch.bfloat16) else None
        return tuple(replace(kernel, packed=whole) for kernel in (FLASH, LONG_BY_CUDNN))
    able = getattr(torch.cpu, "get_capabilities", dict)()
    return (BY_SIZE if dtype == torch.bfloat16 and able.get("avx512_bf16") and not able.get("amx_bf16") else FLASH,)
