"""The arithmetic of `model.functions`, compiled by torch: a kernel or two for each function, in place of several passes over memory.

Kernels are made for any number of tokens, once for each width, in the first step that uses them: seconds on a GPU, half a minute on a CPU.
What is saved for the backward is what `model.functions` saves; of the loss it is logits, and not their exponentials in float32. What a
kernel holds meanwhile is not known to the ledger. In bf16 what one kernel does is rounded once, at its end; in float32 and float64 sums are
formed in another order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.errors import UsageError
from longshift.model.compiling import compiled_for, why
from longshift.model.functions import Elementwise


def compiled(device: torch.device) -> Elementwise:
    """Kernels for tensors of this device. Raises UsageError where torch finds no compiler."""
    both = torch.ones(2, 2, device=device)
    functions = (_normed, 1), (_normed_grad, 3), (_gated, 2), (_gated_grad, 3), (_turned, 3), (_weights, 3), (_weights_grad, 5)
    found = Elementwise(*(compiled_for(function, tokens, fullgraph=True) for function, tokens in functions))
    try:
        found.gated(both, both, "silu")
    except Exception as fault:
        told = f"train.compile: torch cannot compile on this machine: {why(fault)}; install a C++ compiler, or leave it out"
        raise UsageError(told) from fault
    return found


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(_wide(x).square().mean(-1, keepdim=True) + eps)
    return ((_wide(x) * rstd).to(x.dtype) * weight).to(x.dtype), rstd


def _normed_grad(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, learns: bool) -> tuple[Tensor, Tensor | None]:
    g, x_, w = _wide(grad), _wide(x), _wide(weight)
    dw = (g * x_ * rstd).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if learns else None
    dx = rstd * (g * w - x_ * rstd.square() * (g * w * x_).mean(-1, keepdim=True))
    return dx.to(grad.dtype), dw


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    act = F.gelu(_wide(gate), approximate="tanh") if activation == "gelu_tanh" else F.silu(_wide(gate))
    return (act * _wide(up)).to(gate.dtype)


def _gated_grad(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    g, x = _wide(grad), _wide(gate)
    if activation == "gelu_tanh":
        d_gate, act = torch.ops.aten.gelu_backward(g * _wide(up), x, approximate="tanh"), F.gelu(x, approximate="tanh")
    else:
        d_gate, act = torch.ops.aten.silu_backward(g * _wide(up), x), F.silu(x)
    return d_gate.to(gate.dtype), (act * g).to(up.dtype)


def _weights(logits: Tensor, highest: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = (_wide(logits) - highest.unsqueeze(-1)).exp().sum(-1)
    return logits, total, _wide(logits.gather(-1, column).squeeze(-1)) - highest


def _weights_grad(logits: Tensor, highest: Tensor, share: Tensor, column: Tensor, less: Tensor, dtype: torch.dtype) -> Tensor:
    weight = (_wide(logits) - highest.unsqueeze(-1)).exp() * share.unsqueeze(-1)
    at = torch.arange(logits.shape[-1], device=logits.device) == column
    return (weight - torch.where(at, less.unsqueeze(-1), 0.0)).to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    width = cos.shape[-1]
    turning = x[..., :width]
    first, second = turning.chunk(2, -1)
    turned = turning * cos + torch.cat((-second, first), -1) * (sin * way)
    return torch.cat((turned, x[..., width:]), -1) if width < x.shape[-1] else turned
