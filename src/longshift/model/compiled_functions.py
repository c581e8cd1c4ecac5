"""The arithmetic of `model.functions`, compiled by torch: a kernel or two for each function, in
place of several passes over memory.

Kernels are made for any number of tokens, once for each width, in the first step that uses them:
seconds on a GPU, half a minute on a CPU. What is saved for the backward is what `model.functions`
saves; of the loss it is logits, and not their exponentials in float32. What a kernel holds
meanwhile is not known to the ledger. In bf16 what one kernel does is rounded once, at its end; in
float32 and float64 sums are formed in another order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.errors import UsageError
from longshift.model.functions import Elementwise
from longshift.model.torch_compile import compiled_for, why


def compiled(device: torch.device) -> Elementwise:
    """Kernels for tensors of this device. Raises UsageError where torch finds no compiler."""
    num_token_arguments = {
        _normed: 1,
        _normed_grad: 3,
        _gated: 2,
        _gated_grad: 3,
        _turned: 3,
        _weights: 3,
        _weights_grad: 5,
    }
    kernels = Elementwise(
        *(
            compiled_for(function, count, fullgraph=True)
            for function, count in num_token_arguments.items()
        )
    )

    # torch compiles at the first call, so a missing compiler is not known before.
    try:
        x = torch.ones(2, 2, device=device)
        kernels.gated(x, x, "silu")
    except Exception as fault:
        raise UsageError(
            f"train.compile: torch cannot compile on this machine: {why(fault)}; install a C++"
            " compiler, or leave it out"
        ) from fault
    return kernels


def _wide(x: Tensor) -> Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(_wide(x).square().mean(-1, keepdim=True) + eps)
    return ((_wide(x) * rstd).to(x.dtype) * weight).to(x.dtype), rstd


def _normed_grad(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    g = _wide(grad)
    x_ = _wide(x)
    w = _wide(weight)
    dw = (g * x_ * rstd).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if learns else None
    dx = rstd * (g * w - x_ * rstd.square() * (g * w * x_).mean(-1, keepdim=True))
    return dx.to(grad.dtype), dw


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    act = (
        F.gelu(_wide(gate), approximate="tanh")
        if activation == "gelu_tanh"
        else F.silu(_wide(gate))
    )
    return (act * _wide(up)).to(gate.dtype)


def _gated_grad(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    g = _wide(grad)
    x = _wide(gate)
    # One kernel does all of this, so each intermediate stays in registers.
    d_act = g * _wide(up)
    if activation == "gelu_tanh":
        act = F.gelu(x, approximate="tanh")
        d_gate = torch.ops.aten.gelu_backward(d_act, x, approximate="tanh")
    else:
        act = F.silu(x)
        d_gate = torch.ops.aten.silu_backward(d_act, x)
    return d_gate.to(gate.dtype), (act * g).to(up.dtype)


def _weights(logits: Tensor, highest: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = (_wide(logits) - highest.unsqueeze(-1)).exp().sum(-1)
    return logits, total, _wide(logits.gather(-1, column).squeeze(-1)) - highest


def _weights_grad(
    logits: Tensor,
    highest: Tensor,
    factor: Tensor,
    column: Tensor,
    deduction: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    weights = (_wide(logits) - highest.unsqueeze(-1)).exp() * factor.unsqueeze(-1)
    is_column = torch.arange(logits.shape[-1], device=logits.device) == column
    return (weights - torch.where(is_column, deduction.unsqueeze(-1), 0.0)).to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    width = cos.shape[-1]
    x_R = x[..., :width]
    x1, x2 = x_R.chunk(2, -1)
    y_R = x_R * cos + torch.cat((-x2, x1), -1) * (sin * direction)
    return torch.cat((y_R, x[..., width:]), -1) if width < x.shape[-1] else y_R
