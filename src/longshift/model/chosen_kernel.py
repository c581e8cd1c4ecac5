"""Which attention kernel a run takes: those that its device has are tried, against their definition
and on the clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from longshift.cluster.cluster import Backend, Heads
from longshift.errors import UsageError
from longshift.model import packed_attention
from longshift.model.cut import cut
from longshift.model.kernels import (
    BY_SIZE,
    CUDNN,
    FLASH,
    Kernel,
    asked,
    reference,
    reference_backward,
)
from longshift.model.packed_attention import EVEN, LONG, ends_of

HEADS = Heads(8, 2, 64)
TOKENS = 256
TIMED_TOKENS = 4096
# What a packed kernel is tried with: lengths of documents, and a window.
PACK = (60, 1, 130, 65)
BAND = 48
WRONG = 0.05  # a relative error above this is no rounding
SECONDS = 0.05  # of timing, a kernel and direction
# Of a kernel that is not here, or not for these inputs.
FAULTS = (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError)
# It plans anew for every shape, in a tenth of a second.
LONG_BY_CUDNN = cut(CUDNN, FLASH, EVEN, LONG)


def probe(
    kernel: Kernel, dtype: torch.dtype, name: str, device: torch.device, heads: Heads = HEADS
) -> Backend:
    """Run a kernel on small inputs, of one that is cut the `uncut` one, against its definition in
    float64. `name` of the dtype."""
    kernel = kernel.uncut or kernel
    scale = heads.width**-0.5

    # 1. By definition: the attention of some queries to their own keys, and a larger one that these
    # keys are a part of.
    grad, q, all_k, all_v = _inputs(TOKENS, 2 * TOKENS, heads, dtype, device)
    k = all_k[:TOKENS]
    v = all_v[:TOKENS]
    exact_grad, exact_q, exact_k, exact_v = (t.double() for t in (grad, q, k, v))
    exact_out, exact_lse = reference(exact_q, exact_k, exact_v, True, scale)
    large_out, large_lse = reference(exact_q, all_k.double(), all_v.double(), False, scale)

    # 2. By the kernel: the first, and the share of these keys in the gradients of the second.
    try:
        out, lse = kernel.forward(q, k, v, True, scale)
        forward_error = _error([out], [exact_out])
        has_lse = lse.shape == exact_lse.shape and _error([lse], [exact_lse]) < WRONG
        grads = kernel.backward(grad, q, k, v, out, lse, True, scale)
        exact_grads = reference_backward(
            exact_grad, exact_q, exact_k, exact_v, exact_out, exact_lse, True, scale
        )
        backward_error = _error(grads, exact_grads)
        global_lse = False
        if has_lse:
            grads = kernel.backward(
                grad, q, k, v, large_out.to(dtype), large_lse.to(lse.dtype), False, scale
            )
            exact_grads = reference_backward(
                exact_grad, exact_q, exact_k, exact_v, large_out, large_lse, False, scale
            )
            global_lse = _error(grads, exact_grads) < WRONG
    except FAULTS as fault:
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        return Backend(kernel.name, name, why_not=reason.split(". ")[0].rstrip("."))
    if not (forward_error < WRONG and backward_error < WRONG):
        return Backend(
            kernel.name, name, f"wrong: {forward_error:.1e} forward, {backward_error:.1e} backward"
        )
    return Backend(kernel.name, name, "", has_lse, global_lse, forward_error, backward_error)


def gradients(
    kernel: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> Callable[[], Sequence[Tensor]]:
    """What computes (dq, dk, dv), forward done."""
    return partial(
        kernel.backward, grad, q, k, v, *kernel.forward(q, k, v, causal, scale), causal, scale
    )


def choose(
    candidates: Sequence[Kernel],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    slowest: Callable[[Tensor], Tensor],
) -> tuple[Kernel, str]:
    """The fastest of those that can be used here, with its packed form if that can be, and the
    reason in words. Where torch is asked for deterministic algorithms, the first that is
    deterministic: timing may choose another one in every run. `slowest`: the largest of every
    number over all ranks, for one choice on all. Raises UsageError, on every rank, where none can
    be used on all."""
    # 1. What this rank can use, and how fast it is.
    refusals = _refusals(candidates, heads, dtype, device)
    is_timed = len(candidates) > 1 and not asked()
    rank_seconds = []
    wrong_packs = []
    for number, kernel in enumerate(candidates):
        if refusals[number]:
            rank_seconds.append(float("inf"))
        else:
            rank_seconds.append(
                _seconds(kernel, heads, dtype, device) if is_timed else float(number)
            )
        wrong_packs.append(float(not _packs_are_right(kernel, heads, dtype, device)))

    # 2. What all ranks can use, and how fast the slowest is.
    rank_rows = torch.tensor([rank_seconds, wrong_packs], dtype=torch.float64, device=device)
    seconds, wrong_packs = slowest(rank_rows).tolist()
    verdict_texts = []
    for number, kernel in enumerate(candidates):
        if seconds[number] == float("inf") and not refusals[number]:
            fails_on_rank = rank_seconds[number] == seconds[number]
            refusals[number] = (
                f"fails at {TIMED_TOKENS} tokens" if fails_on_rank else "not on every rank"
            )
        success = f"{seconds[number] * 1e3:.3g} ms" if is_timed else "can be used"
        verdict_texts.append(f"{kernel.name} {refusals[number] or success}")
    comparison = ", ".join(verdict_texts)
    if all(refusals):
        raise UsageError(
            f"no attention kernel can be used for {heads.query} heads of {heads.width} in"
            f" {str(dtype).removeprefix('torch.')} on {device.type}: {comparison}; another"
            " train.precision or device may have one"
        )

    # 3. The fastest.
    reason = f"{TIMED_TOKENS} queries and keys, forward and backward: {comparison}"
    if len(candidates) == 1:
        reason = "the only one here"
    elif not is_timed:
        reason = f"the first that is deterministic: {comparison}"
    best = seconds.index(min(seconds))
    kernel = candidates[best]
    if wrong_packs[best]:
        kernel = replace(kernel, packed=None)
        reason += "; its packed form cannot be used: a call for each document"
    return kernel, reason


def _refusals(
    candidates: Sequence[Kernel], heads: Heads, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Why each kernel is not used on this rank: it does not run, is not legal for pieces, has
    errors twice as large as another one's, or is not deterministic where that is asked. Empty texts
    for those that can be."""
    verdicts = [probe(kernel, dtype, str(dtype), device, heads) for kernel in candidates]
    max_errors = [2 * min(errors) for errors in zip(*map(_errors, verdicts))]
    refusals = []
    for kernel, verdict in zip(candidates, verdicts):
        is_rough = any(error > limit for error, limit in zip(_errors(verdict), max_errors))
        if verdict.why_not:
            refusals.append(verdict.why_not)
        # A piece is a part of a larger attention, so a kernel must take the log-sum-exp of that.
        elif not verdict.legal or is_rough:
            refusals.append("not for pieces, or not exact enough")
        elif asked() and not kernel.deterministic(device):
            refusals.append("not deterministic")
        else:
            refusals.append("")
    return refusals


def _packs_are_right(
    kernel: Kernel, heads: Heads, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the packed form of a kernel, if it has one, gives what the definition says of each
    document, with a window and without one."""
    if kernel.packed is None:
        return True
    inputs = _inputs(sum(PACK), sum(PACK), heads, dtype, device)
    grad, q, k, v = inputs
    ends = ends_of(PACK, device)
    scale = heads.width**-0.5
    for window in (None, BAND):
        documents = zip(*(t.double().split(PACK) for t in inputs))
        exact = [_exact_results(*document, scale=scale, window=window) for document in documents]
        try:
            out, lse = kernel.packed.forward(q, k, v, ends, PACK, window, scale)
            grads = kernel.packed.backward(grad, q, k, v, out, lse, ends, PACK, window, scale)
        except FAULTS:
            return False
        if not _error([out, lse, *grads], [torch.cat(parts) for parts in zip(*exact)]) < WRONG:
            return False
    return True


def _exact_results(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of a document, by definition."""
    out, lse = reference(q, k, v, True, scale, window=window)
    return out, lse, *reference_backward(grad, q, k, v, out, lse, True, scale, window=window)


def _seconds(kernel: Kernel, heads: Heads, dtype: torch.dtype, device: torch.device) -> float:
    """Of a piece's forward and backward; infinite where it fails."""
    grad, q, k, v = _inputs(TIMED_TOKENS, TIMED_TOKENS, heads, dtype, device)
    scale = heads.width**-0.5
    try:
        forward = partial(kernel.forward, q, k, v, False, scale)
        backward = gradients(kernel, grad, q, k, v, False, scale)
        seconds = 0.0
        for run in (forward, backward):
            timer = Timer("run()", globals={"run": run})
            seconds += timer.blocked_autorange(min_run_time=SECONDS).median
        return seconds
    # Memory may not suffice for so many tokens.
    except RuntimeError:
        return float("inf")


def _inputs(
    queries: int, keys: int, heads: Heads, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Gradient, q, k and v."""
    make = torch.Generator().manual_seed(0)
    shapes = ((queries, heads.query), (queries, heads.query), (keys, heads.key), (keys, heads.key))
    return [torch.randn(*shape, heads.width, generator=make).to(device, dtype) for shape in shapes]


def _errors(verdict: Backend) -> list[float]:
    """Forward and backward; infinite where it does not run."""
    return [
        float("inf") if error is None else error
        for error in (verdict.forward_error, verdict.backward_error)
    ]


def _error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative difference; infinite where it is not a number."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, expected)]
    return max(error if error == error else float("inf") for error in errors)


def kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """What a run chooses from. On a CPU nothing, for the same bits in every run: where vectors
    multiply bf16, large pieces by tiles are 1.4 times as fast as torch's kernel; where AMX does,
    torch's is 1.2 to 3 times as fast as they."""
    # Packed kernels of GPUs have 16-bit numbers only.
    if device.type != "cpu":
        packed_flash = packed_attention.FLASH if dtype in (torch.float16, torch.bfloat16) else None
        return tuple(replace(kernel, packed=packed_flash) for kernel in (FLASH, LONG_BY_CUDNN))
    features = getattr(torch.cpu, "get_capabilities", dict)()
    if dtype == torch.bfloat16 and features.get("avx512_bf16") and not features.get("amx_bf16"):
        return (BY_SIZE,)
    return (FLASH,)
