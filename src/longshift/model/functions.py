"""Norm, gated activation and rotary embedding as autograd functions that save their inputs and nothing wider.

Composed of torch's operations, each of these saves several float32 copies of its input, a different number on every kind of device. Here
the operations are written out, few and in place where nothing else sees the tensor, so that memory is the same on every device and known
before (`schedule.inside` mirrors them, line by line).

    rms_norm   y = x r w,  r = 1 / sqrt(mean(x^2) + eps)         saves x, r    dx = r (g w - x r^2 mean(g w x))    dw = sum_t g x r
               means over x, or over the slices of several ranks: [T] numbers travel
               dw is not formed where w is not trained
    gated      y = act(gate) up                                  saves gate, up
    adapted    y = x W^T + b + s (x A^T) B^T,  u = x A^T         saves x, W, A, B, u    dB = s dy^T u    dA = (s dy B)^T x
    rotate     y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin       saves nothing of x; backward turns the other way
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class RmsNorm(torch.autograd.Function):
    """apply(x [..., D_i], weight [D_i], eps, width D, all_sum) -> [..., D_i] of x's dtype; the mean and all sums in at least float32.
    `all_sum` adds up what the holders of the slices of x have."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, eps: float, width: int, all_sum: Callable[[Tensor], Tensor]
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        rstd = all_sum(squares).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.width, ctx.all_sum = width, all_sum
        return torch.mul(x, rstd, out=x.new_empty(x.shape)).mul_(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, rstd = ctx.saved_tensors
        shape, width = x.shape, x.shape[-1]
        g, x, r, w = grad.reshape(-1, width).to(rstd.dtype), x.reshape(-1, width), rstd.view(-1), weight.to(rstd.dtype)
        wide = g * x
        dw = torch.mv(wide.mT, r).to(weight.dtype) if ctx.needs_input_grad[1] else None
        minus = ctx.all_sum(torch.mv(wide, w)).mul_(r).mul_(r).div_(-ctx.width).unsqueeze(-1)
        torch.mul(g, w, out=wide).addcmul_(x, minus).mul_(r.unsqueeze(-1))
        return wide.to(grad.dtype).view(shape), dw, None, None, None


class Adapted(torch.autograd.Function):
    """apply(x [T, I], weight [O, I], bias [O] or None, a [R, I], b [O, R], scale) -> [T, O]: a linear layer that is not trained, with an
    adapter that is (`spec.adapters`)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        u = F.linear(x, a)
        ctx.save_for_backward(x, weight, a, b, u)
        ctx.scale = scale
        return y.addmm_(u, b.mT, alpha=scale)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, a, b, u = ctx.saved_tensors
        du = torch.mm(grad, b).mul_(ctx.scale)
        db = torch.mm(grad.mT, u).mul_(ctx.scale)
        da = torch.mm(du.mT, x)
        dx = torch.mm(grad, weight).addmm_(du, a)
        return dx, None, None, da, db, None


class SoftCap(torch.autograd.Function):
    """apply(x, cap) -> cap * tanh(x / cap), in place: saves its output alone."""

    @staticmethod
    def forward(ctx, x: Tensor, cap: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        ctx.cap = cap
        x.div_(cap).tanh_().mul_(cap)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return (y / ctx.cap).square_().neg_().add_(1).mul_(grad), None


class Gated(torch.autograd.Function):
    """apply(gate, up, activation) -> activation(gate) * up."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activate(gate, activation).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate = grad * up
        if ctx.activation == "gelu_tanh":
            aten.gelu_backward.grad_input(d_gate, gate, approximate="tanh", grad_input=d_gate)
        else:
            aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, activate(gate, ctx.activation).mul_(grad), None


def activate(x: Tensor, activation: str) -> Tensor:
    return F.gelu(x, approximate="tanh") if activation == "gelu_tanh" else F.silu(x)


class Rotate(torch.autograd.Function):
    """apply(x [T, N, H], cos [T, 1, R], sin [T, 1, R]) -> [T, N, H], in the half-split convention of the Hugging Face checkpoints. The
    first R channels of a head turn."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    y, width = x.new_empty(x.shape), cos.shape[-1]
    y[..., width:] = x[..., width:]
    turning, x = y[..., :width], x[..., :width]
    torch.mul(x, cos, out=turning)
    (y1, y2), (x1, x2), (sin1, sin2) = (t.chunk(2, -1) for t in (turning, x, sin))
    y1.addcmul_(x2, sin1, value=-way)
    y2.addcmul_(x1, sin2, value=way)
    return y
