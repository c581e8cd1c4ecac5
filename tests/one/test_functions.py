"""Norm, gated activation and rotary embedding against what autograd makes of their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.model.decoder import rotary_table
from longshift.model.functions import Gated, RmsNorm, Rotate
from longshift.model.loss import alone
from longshift.spec.model import Rope

EPS = 1e-6


def defined_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def defined_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def defined_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def tables(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rotary_table(Rope(), 16, torch.arange(tokens), dtype)


# name -> (ours, its definition, shapes of the inputs that have gradients, other inputs by dtype)
CASES = {
    "norm": (lambda x, w: RmsNorm.apply(x, w, EPS, x.shape[-1], alone), defined_norm, ((37, 48), (48,)), lambda dtype: ()),
    "norm of heads": (lambda x, w: RmsNorm.apply(x, w, EPS, x.shape[-1], alone), defined_norm, ((37, 3, 16), (16,)), lambda dtype: ()),
    "silu": (lambda g, u: Gated.apply(g, u, "silu"), lambda g, u: F.silu(g) * u, ((37, 48), (37, 48)), lambda dtype: ()),
    "gelu": (lambda g, u: Gated.apply(g, u, "gelu_tanh"), defined_gelu, ((37, 48), (37, 48)), lambda dtype: ()),
    "rotate": (Rotate.apply, defined_rotation, ((37, 3, 16),), lambda dtype: tables(37, dtype)),
}


def outcome(function, inputs: list[Tensor], others: tuple, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves, *others)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_autograds(name: str):
    ours, defined, shapes, others = CASES[name]
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]
    grad = torch.randn(shapes[0], generator=make, dtype=torch.float64)
    how = others(torch.float64), grad
    assert max(errors(outcome(ours, inputs, *how), outcome(defined, inputs, *how))) < 1e-14


@pytest.mark.parametrize("name", CASES)
def test_in_bf16_they_are_no_further_from_the_truth_than_the_definition(name: str):
    ours, defined, shapes, others = CASES[name]
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=make).bfloat16() for shape in shapes]
    grad = torch.randn(shapes[0], generator=make).bfloat16()
    tables = others(torch.bfloat16)
    truth = outcome(defined, [x.double() for x in inputs], tuple(t.double() for t in tables), grad.double())
    found, usual = (errors(outcome(f, inputs, tables, grad), truth) for f in (ours, defined))
    assert all(a <= 1.02 * b for a, b in zip(found, usual)), (found, usual)


def test_angles_are_right_at_position_4_million():
    """Float32 cannot tell neighbours apart there by more than a quarter, times the frequency."""
    rope, width, position = Rope(theta=500000.0), 64, (1 << 22) - 1
    cos, sin = rotary_table(rope, width, torch.tensor([position]), torch.float32)
    for i in range(width // 2):
        angle = math.fmod(position * rope.theta ** (-2 * i / width), 2 * math.pi)
        assert abs(float(cos[0, 0, i]) - math.cos(angle)) < 1e-6
        assert abs(float(sin[0, 0, width // 2 + i]) - math.sin(angle)) < 1e-6
