"""Attention kernels of torch: which run here, what they return, how exact they are.

Ring attention and streaming need two things of a kernel beside speed: the log-sum-exp of the scores, and a backward that takes the
output and log-sum-exp of a *larger* attention, of which the keys at hand are a part.

Shapes are those of `model/attention.py`: q [T, N, H], k and v [S, K, H], out [T, N, H], lse [T, N].
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from longshift.cluster.cluster import Backend
from longshift.model.attention import aten, flash, flash_backward, reference, reference_backward

TOKENS = 256
WRONG = 0.05  # a relative error above this is no rounding

Forward = Callable[..., tuple[Tensor, Tensor | None]]  # (q, k, v, causal, scale) -> (out, lse)
Backward = Callable[..., Sequence[Tensor]]  # (grad, q, k, v, out, lse, causal, scale) -> (dq, dk, dv)


@dataclass(frozen=True)
class Kernel:
    """`backward(grad, q, k, v, out, lse, causal, scale)`: None where only autograd can go back through `forward`."""

    name: str
    forward: Forward
    backward: Backward | None
    most_scores: int = 2**62  # query heads x queries x keys that fit in memory


def kernels(device: torch.device) -> tuple[Kernel, ...]:
    """All that are tried; `probe` tells which of them run."""
    return (
        Kernel("flash", flash, flash_backward),
        Kernel("cudnn", _cudnn, _cudnn_backward),
        Kernel("varlen", _varlen, _varlen_backward),
        Kernel("flex", _Flex(device), None),
        Kernel("math", _math, _math_backward, most_scores=2**26),
    )


def probe(kernel: Kernel, dtype: torch.dtype, name: str, device: torch.device) -> Backend:
    """Run a kernel on small inputs against its definition in float64. `name` of the dtype."""
    make = torch.Generator().manual_seed(0)
    heads, kv_heads, width = 8, 2, 64
    shapes = ((TOKENS, heads), (2 * TOKENS, kv_heads), (2 * TOKENS, kv_heads), (TOKENS, heads))
    q, k, v, grad = (torch.randn(*shape, width, generator=make).to(device, dtype) for shape in shapes)
    scale, part = width**-0.5, slice(TOKENS)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile", category=UserWarning)
    own, exact = (grad, q, k[part], v[part]), [t.double() for t in (grad, q, k, v)]
    whole = _math(exact[1], exact[2], exact[3], False, scale)
    diagonal = _math(exact[1], exact[2][part], exact[3][part], True, scale)
    try:
        out, lse = kernel.forward(*own[1:], True, scale)
        forward_error = _error([out], [diagonal[0]])
        has_lse = lse is not None and lse.shape == diagonal[1].shape and _error([lse], [diagonal[1]]) < WRONG
        expected = _math_backward(exact[0], exact[1], exact[2][part], exact[3][part], *diagonal, True, scale)
        backward_error = _error(gradients(kernel, *own, True, scale)(), expected)
        global_lse = False
        if kernel.backward and lse is not None and has_lse:
            expected = _math_backward(exact[0], exact[1], exact[2][part], exact[3][part], *whole, False, scale)
            taken = kernel.backward(*own, whole[0].to(dtype), whole[1].to(lse.dtype), False, scale)
            global_lse = _error(taken, expected) < WRONG
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as fault:
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        return Backend(kernel.name, name, why_not=reason.split(". ")[0].rstrip("."))
    if not (forward_error < WRONG and backward_error < WRONG):
        return Backend(kernel.name, name, f"wrong: {forward_error:.1e} forward, {backward_error:.1e} backward")
    return Backend(kernel.name, name, "", has_lse, global_lse, forward_error, backward_error)


def gradients(kernel: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Callable[[], Sequence[Tensor]]:
    """What computes (dq, dk, dv), forward done."""
    if kernel.backward is not None:
        out, lse = kernel.forward(q, k, v, causal, scale)
        assert lse is not None, f"{kernel.name} has a backward of its own, but no log-sum-exp"
        backward = kernel.backward
        return lambda: backward(grad, q, k, v, out, lse, causal, scale)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, _ = kernel.forward(*leaves, causal, scale)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative difference; infinite where it is not a number."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected)]
    return max(error if error == error else float("inf") for error in errors)


def _batched(*tensors: Tensor) -> Any:
    """[T, N, H] -> [1, N, T, H]"""
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]


def _flat(t: Tensor) -> Tensor:
    return t.squeeze(0).transpose(0, 1)


def _math(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _batched(q, k, v)
    out, lse = reference(q, k, v, causal, scale)
    return _flat(out), _flat(lse)


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> list[Tensor]:
    grad, q, k, v, out = _batched(grad, q, k, v, out)
    return [_flat(t) for t in reference_backward(grad, q, k, v, out, lse.transpose(0, 1).unsqueeze(0), causal, scale)]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_cudnn_attention(*_batched(q, k, v), None, True, 0.0, causal, False, scale=scale)[:2]
    return _flat(out), _flat(lse.reshape(1, q.shape[1], q.shape[0]))


def _cudnn_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Sequence[Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = lse.transpose(0, 1).unsqueeze(0).unsqueeze(-1).contiguous()
    none = (None, None, None, q.shape[0], k.shape[0], 0.0)  # no bias, no lengths
    grads = aten._scaled_dot_product_cudnn_attention_backward(*_batched(grad, q, k, v, out), lse, seed, seed, *none, causal, scale=scale)
    return [_flat(t) for t in grads]


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
    return torch.tensor([0, t.shape[0]], dtype=torch.int32, device=t.device)


class _Flex:
    """FlexAttention, compiled where it has a kernel; keeps the masks that it has made."""

    def __init__(self, device: torch.device):
        self.compiled = device.type == "cuda"
        self.attend: Any = torch.compile(flex_attention) if self.compiled else flex_attention
        self.masks: dict[tuple[int, int], Any] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
        size = q.shape[0], k.shape[0]
        if causal and size not in self.masks:
            self.masks[size] = create_block_mask(_earlier, None, None, *size, device=q.device, _compile=self.compiled)
        mask = self.masks[size] if causal else None
        out, more = self.attend(*_batched(q, k, v), block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return _flat(out), None if more.lse is None else _flat(more.lse)


def _earlier(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
