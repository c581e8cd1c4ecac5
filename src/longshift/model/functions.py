"""Norm, gated activation and rotary embedding as autograd functions that save their inputs and
nothing wider.

Composed of torch's operations, each of these saves several float32 copies of its input, a different
number on every kind of device. Here the operations are written out, few and in place where nothing
else sees the tensor, so that memory is the same on every device and known before.

    rms_norm   y = x r w,  r = 1 / sqrt(mean(x^2) + eps)      saves x, r
               dx = r (g w - x r^2 mean(g w x)),  dw = sum_t g x r
               means over x, or over the slices of several ranks: [T] numbers travel
               dw is not formed where w is not trained
    gated      y = act(gate) up                               saves gate, up
    linear     y = x W^T + b                                  saves x, W
               dW = dy^T x goes into its sum as it is formed
    adapted    y = x W^T + b + s (x A^T) B^T,  u = x A^T      saves x, W, A, B, u
               dB = s dy^T u,  dA = (s dy B)^T x
    rotate     y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin    saves nothing of x
               backward turns the other way
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.errors import UsageError
from longshift.model.float8 import linear, linear_back
from longshift.model.torch_compile import compiled_for, why

aten = torch.ops.aten
AllSum = Callable[[Tensor], Tensor]


def accum_dtype(x: Tensor) -> torch.dtype:
    """The format of sums of x's numbers: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def alone(x: Tensor) -> Tensor:
    """Reduction over one holder."""
    return x


class RmsNorm(torch.autograd.Function):
    """apply(x [..., D], weight [D], eps, arithmetic) -> [..., D] of x's dtype; the mean and all
    sums in at least float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, by: "Elementwise") -> Tensor:  # pyright: ignore
        y, rstd = by.normed(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.by = by
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, rstd = ctx.saved_tensors
        dx, dw = ctx.by.normed_grad(grad, x, rstd, weight, ctx.needs_input_grad[1])
        return dx, dw, None, None


def _normed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    total_width: int | None = None,
    all_sum: AllSum = alone,
) -> tuple[Tensor, Tensor]:
    """y and r of the module's docstring. `total_width`: of all ranks' slices, where x is one of
    them; `all_sum` adds up what they have."""
    # The norm squared reads x once, and makes no tensor of its squares.
    squares = torch.linalg.vector_norm(
        x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
    ).square_()

    rstd = all_sum(squares).div_(total_width or x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, rstd, out=x.new_empty(x.shape)).mul_(weight), rstd


def _normed_grad(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    learns: bool,
    total_width: int | None = None,
    all_sum: AllSum = alone,
) -> tuple[Tensor, Tensor | None]:
    """dx and dw of the module's docstring. `total_width`, `all_sum`: as in `_normed`."""
    shape = x.shape
    width = shape[-1]
    g = grad.reshape(-1, width).to(rstd.dtype)
    x = x.reshape(-1, width)
    r = rstd.view(-1)
    w = weight.to(rstd.dtype)

    # 1. dw = sum_t g x r.
    gx = g * x
    dw = torch.mv(gx.mT, r).to(weight.dtype) if learns else None

    # 2. dx = r (g w - x r^2 mean(g w x)), in the memory of g x, which is not needed again.
    minus = all_sum(torch.mv(gx, w)).mul_(r).mul_(r).div_(-(total_width or width)).unsqueeze(-1)
    dx = torch.mul(g, w, out=gx).addcmul_(x, minus).mul_(r.unsqueeze(-1))
    return dx.to(grad.dtype).view(shape), dw


# (left [T, O], right [T, I]) adds left^T right to a sum of gradients.
Add = Callable[[Tensor, Tensor], None]


class Linear(torch.autograd.Function):
    """apply(x [T, I], weight [O, I], bias [O] or None, add or None, float8) -> [T, O]: a linear
    layer. `add` is called with dy and x in place of a gradient of the weight, so that no tensor
    holds dW (as gradient accumulation fusion of Megatron-LM); `float8`: whether x W^T and dy W take
    factors of eight bits."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, add: Add | None, float8: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, x if add or ctx.needs_input_grad[1] else None)
        ctx.add = add
        ctx.float8 = float8
        return linear(x, weight, bias, float8)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, x = ctx.saved_tensors
        dx = linear_back(grad, weight, ctx.float8)

        dw = None
        if ctx.add:
            ctx.add(grad, x)
        elif ctx.needs_input_grad[1]:
            # As the weight is stored.
            dw = torch.mm(grad.mT, x) if weight.is_contiguous() else torch.mm(x.mT, grad).mT

        db = grad.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add left^T right to a sum, in place, inside the matmul; the `first` does not read what was
    there. `total` [S, R, I], of at least the factors' format; left [T, S * R]; right [T, I]. Sums
    wider than the factors are for GPUs alone."""
    left_ST = left.mT
    beta = 0.0 if first else 1.0
    # An argument that CPUs do not take.
    wider: Any = () if total.dtype == left.dtype else (total.dtype,)

    # One strip needs no batch of matmuls.
    if len(total) == 1:
        torch.addmm(total[0], left_ST, right, *wider, beta=beta, out=total[0])
    else:
        left_SRT = left_ST.unflatten(0, total.shape[:2])
        right_STI = right.expand(len(total), -1, -1)
        torch.baddbmm(total, left_SRT, right_STI, *wider, beta=beta, out=total)


class AdaptedLinear(torch.autograd.Function):
    """apply(x [T, I], weight [O, I], bias [O] or None, a [R, I], b [O, R], scale, float8) -> [T,
    O]: a linear layer that is not trained, with an adapter that is (`spec.adapters`). `float8`:
    whether x W^T and dy W take factors of eight bits."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        float8: bool,
    ) -> Tensor:
        y = linear(x, weight, bias, float8)
        u = F.linear(x, a)
        ctx.save_for_backward(x, weight, a, b, u)
        ctx.scale = scale
        ctx.float8 = float8
        return y.addmm_(u, b.mT, alpha=scale)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, a, b, u = ctx.saved_tensors
        du = torch.mm(grad, b).mul_(ctx.scale)
        db = torch.mm(grad.mT, u).mul_(ctx.scale)
        da = torch.mm(du.mT, x)
        dx = linear_back(grad, weight, ctx.float8).addmm_(du, a)
        return dx, None, None, da, db, None, None


class SoftCap(torch.autograd.Function):
    """apply(x, cap) -> cap * tanh(x / cap), in place: saves its output alone."""

    @staticmethod
    def forward(ctx, x: Tensor, cap: float) -> Tensor:  # pyright: ignore
        ctx.mark_dirty(x)
        ctx.cap = cap
        x.div_(cap).tanh_().mul_(cap)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return (y / ctx.cap).square_().neg_().add_(1).mul_(grad), None


class GatedActivation(torch.autograd.Function):
    """apply(gate, up, activation, arithmetic) -> activation(gate) * up."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: str, by: "Elementwise") -> Tensor:  # pyright: ignore
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        ctx.by = by
        return by.gated(gate, up, activation)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        return *ctx.by.gated_grad(grad, gate, up, ctx.activation), None, None


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return activate(gate, activation).mul_(up)


def _gated_grad(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    d_gate = grad * up
    if activation == "gelu_tanh":
        aten.gelu_backward.grad_input(d_gate, gate, approximate="tanh", grad_input=d_gate)
    else:
        aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
    return d_gate, activate(gate, activation).mul_(grad)


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of that name, of a config's `activation`."""
    return F.gelu(x, approximate="tanh") if activation == "gelu_tanh" else F.silu(x)


class Rotate(torch.autograd.Function):
    """apply(x [T, N, H], cos [T, 1, R], sin [T, 1, R], arithmetic) -> [T, N, H], in the half-split
    convention of the Hugging Face checkpoints. The first R channels of a head turn."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, by: "Elementwise") -> Tensor:  # pyright: ignore
        ctx.save_for_backward(cos, sin)
        ctx.by = by
        return by.turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return ctx.by.turned(grad, cos, sin, -1), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    width = cos.shape[-1]
    y = x.new_empty(x.shape)

    # Channels from R on do not turn.
    y[..., width:] = x[..., width:]

    torch.mul(x[..., :width], cos, out=y[..., :width])
    x1, x2 = x[..., :width].chunk(2, -1)
    y1, y2 = y[..., :width].chunk(2, -1)

    sin1, sin2 = sin.chunk(2, -1)
    y1.addcmul_(x2, sin1, value=-direction)
    y2.addcmul_(x1, sin2, value=direction)
    return y


def _weights(logits: Tensor, highest: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    relative = logits - highest.unsqueeze(-1)
    target = relative.gather(-1, column).squeeze(-1)
    weights = relative.exp_()
    return weights, weights.sum(-1), target


def _weights_grad(
    saved: Tensor,
    highest: Tensor,
    factor: Tensor,
    column: Tensor,
    deduction: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    d = saved.mul_(factor.unsqueeze(-1))  # in place: [T, V] is the largest activation there is
    return d.scatter_add_(-1, column, -deduction.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True)
class Elementwise:
    """The arithmetic of these functions: torch's operations as they are written out above, or other
    callables that take and give the same (`compiled`). Tensors of tokens come first
    among arguments, tokens are their first dim.

    normed        x, weight, eps -> y, rstd [..., 1]
    normed_grad   grad, x, rstd, weight, whether dw is wanted -> dx, dw
    gated         gate, up, activation -> y
    gated_grad    grad, gate, up, activation -> dgate, dup
    turned        x, cos, sin, 1 or -1 -> y
    weights       logits, highest of each row, column [T, 1] -> what the backward takes,
                  sums of exp(logit - highest) over rows, logit - highest in the column
    weights_grad  what `weights` saved, highest, factor of each row, column, deduction of each row,
                  dtype -> factor * exp(logit - highest), in the column less the deduction;
                  may overwrite what was saved"""

    normed: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = _normed
    normed_grad: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]] = (
        _normed_grad
    )
    gated: Callable[[Tensor, Tensor, str], Tensor] = _gated
    gated_grad: Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, Tensor]] = _gated_grad
    turned: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _turned
    weights: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _weights
    weights_grad: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor] = (
        _weights_grad
    )


WRITTEN_OUT = Elementwise()


def sliced_norm(total_width: int, all_sum: AllSum) -> Elementwise:
    """The arithmetic of norms over slices that several ranks hold, of `total_width` together."""
    return Elementwise(
        normed=partial(_normed, total_width=total_width, all_sum=all_sum),
        normed_grad=partial(_normed_grad, total_width=total_width, all_sum=all_sum),
    )


def compiled(device: torch.device) -> Elementwise:
    """The arithmetic compiled by torch for tensors of this device: a kernel or two for each
    function, in place of several passes over memory.

    Kernels are made for any number of tokens, once for each width, in the first step that uses
    them: seconds on a GPU, half a minute on a CPU. What is saved for the backward is what is saved
    without; of the loss it is logits, and not their exponentials in float32. What a kernel holds
    meanwhile is not known to the ledger. In bf16 what one kernel does is rounded once, at its end;
    in float32 and float64 sums are formed in another order. Raises UsageError where torch finds no
    compiler."""
    functions = replace(WRITTEN_OUT, weights=_weights_of_logits, weights_grad=_weights_grad_again)
    num_token_arguments = {
        "normed": 1,
        "normed_grad": 3,
        "gated": 2,
        "gated_grad": 3,
        "turned": 3,
        "weights": 3,
        "weights_grad": 5,
    }
    kernels = Elementwise(
        **{
            name: compiled_for(getattr(functions, name), count, fullgraph=True)
            for name, count in num_token_arguments.items()
        }
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


def _weights_of_logits(
    logits: Tensor, highest: Tensor, column: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total = (logits.to(highest.dtype) - highest.unsqueeze(-1)).exp().sum(-1)
    target = logits.gather(-1, column).squeeze(-1).to(highest.dtype) - highest
    return logits, total, target


def _weights_grad_again(
    logits: Tensor,
    highest: Tensor,
    factor: Tensor,
    column: Tensor,
    deduction: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    weights = (logits.to(highest.dtype) - highest.unsqueeze(-1)).exp() * factor.unsqueeze(-1)
    # A scatter would be a pass of its own.
    is_column = torch.arange(logits.shape[-1], device=logits.device) == column
    return (weights - torch.where(is_column, deduction.unsqueeze(-1), 0.0)).to(dtype)
