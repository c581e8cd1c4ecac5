"""Norm, gated activation and rotary embedding against what autograd makes of their definitions."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.errors import UsageError
from longshift.model.functions import (
    WRITTEN_OUT,
    Elementwise,
    GatedActivation,
    Linear,
    RmsNorm,
    Rotate,
    add_product,
    alone,
    compiled,
    sliced_norm,
)
from longshift.model.rotary import rotary_table
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


# name -> (ours by an arithmetic, its definition, shapes of the inputs that have gradients, other inputs by dtype)
CASES = {
    "norm": (lambda by: lambda x, w: RmsNorm.apply(x, w, EPS, by), defined_norm, ((37, 48), (48,)), lambda dtype: ()),
    "norm of heads": (lambda by: lambda x, w: RmsNorm.apply(x, w, EPS, by), defined_norm, ((37, 3, 16), (16,)), lambda dtype: ()),
    "silu": (
        lambda by: lambda g, u: GatedActivation.apply(g, u, "silu", by),
        lambda g, u: F.silu(g) * u,
        ((37, 48), (37, 48)),
        lambda dtype: (),
    ),
    "gelu": (lambda by: lambda g, u: GatedActivation.apply(g, u, "gelu_tanh", by), defined_gelu, ((37, 48), (37, 48)), lambda dtype: ()),
    "rotate": (lambda by: lambda x, *t: Rotate.apply(x, *t, by), defined_rotation, ((37, 3, 16),), lambda dtype: tables(37, dtype)),
}


@pytest.fixture(scope="module")
def by(request: pytest.FixtureRequest) -> Elementwise:
    return WRITTEN_OUT if request.param == "written out" else compiled(torch.device("cpu"))


BOTH = [(by, name) for by in ("written out", "compiled") for name in CASES]
both = pytest.mark.parametrize(("by", "name"), BOTH, indirect=["by"])


def outcome(function, inputs: list[Tensor], others: tuple, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves, *others)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth)]


@both
def test_values_and_gradients_are_autograds(name: str, by: Elementwise):
    ours, defined, shapes, others = CASES[name]
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]
    grad = torch.randn(shapes[0], generator=make, dtype=torch.float64)
    how = others(torch.float64), grad
    assert max(errors(outcome(ours(by), inputs, *how), outcome(defined, inputs, *how))) < 1e-14


@both
def test_in_bf16_they_are_no_further_from_the_truth_than_the_definition(name: str, by: Elementwise):
    ours, defined, shapes, others = CASES[name]
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=make).bfloat16() for shape in shapes]
    grad = torch.randn(shapes[0], generator=make).bfloat16()
    tables = others(torch.bfloat16)
    truth = outcome(defined, [x.double() for x in inputs], tuple(t.double() for t in tables), grad.double())
    found, usual = (errors(outcome(f, inputs, tables, grad), truth) for f in (ours(by), defined))
    assert all(a <= 1.02 * b for a, b in zip(found, usual)), (found, usual)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weights_gradient_is_added_to_its_sum(dtype: torch.dtype, slots: int):
    """Whatever was in the sum before its first gradient, and though it lies in a wider buffer; the graph has none for the weight."""
    make = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=make, dtype=dtype).requires_grad_() for shape in ((12, 7), (12,)))
    packs = [tuple(torch.randn(tokens, width, generator=make, dtype=dtype) for width in (7, 12)) for tokens in (37, 5)]
    buffer = torch.full((slots, 12 // slots * 7 + 5), math.nan, dtype=dtype)
    total, rows = buffer[:, 3:-2].view(slots, 12 // slots, 7), []
    for x, dy in packs:
        add = partial(add_product, total, first=not rows)
        for function, learned in ((Linear.apply, (weight.detach(), bias, add, False)), (F.linear, (weight, bias))):
            leaf = x.clone().requires_grad_()
            y = function(leaf, *learned)
            y.backward(dy)
            rows.append((y.detach(), leaf.grad, bias.grad.clone()))
            bias.grad = None
    assert all(torch.equal(a, b) for mine, truth in (rows[:2], rows[2:]) for a, b in zip(mine, truth))
    assert torch.allclose(
        total.flatten(0, 1), weight.grad, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=1e-5 * (dtype == torch.float32)
    )
    assert buffer[:, :3].isnan().all() and buffer[:, -2:].isnan().all()  # noqa: PT018


def test_one_kernel_serves_all_lengths():
    """And none is made again for a new one: that would take seconds of each step."""
    by, w = compiled(torch.device("cpu")), torch.ones(48)
    by.normed(torch.ones(37, 48), w, EPS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 2, 64, 999):
            y, _ = by.normed(torch.full((tokens, 48), 2.0), w, EPS)
            assert y.shape == (tokens, 48)
            assert float((y - 1).abs().max()) < 1e-6


def test_a_norm_of_slices_is_the_norm_of_the_whole():
    make = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(shape, generator=make, dtype=torch.float64) for shape in ((37, 48), (48,), (37, 48)))
    truth = outcome(lambda x, w: RmsNorm.apply(x, w, EPS, WRITTEN_OUT), [x, w], (), grad)
    found = outcome(lambda x, w: RmsNorm.apply(x, w, EPS, sliced_norm(48, alone)), [x, w], (), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, truth))


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object):
        def call(*_: object) -> None:
            raise RuntimeError("No working C++ compiler found")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(
        UsageError, match=r"^train.compile: torch cannot compile on this machine: No working C\+\+ compiler found; install "
    ):
        compiled(torch.device("cpu"))


def test_angles_are_right_at_position_4_million():
    """Float32 cannot tell neighbours apart there by more than a quarter, times the frequency."""
    rope, width, position = Rope(theta=500000.0), 64, (1 << 22) - 1
    cos, sin = rotary_table(rope, width, torch.tensor([position]), torch.float32)
    for i in range(width // 2):
        angle = math.fmod(position * rope.theta ** (-2 * i / width), 2 * math.pi)
        assert abs(float(cos[0, 0, i]) - math.cos(angle)) < 1e-6
        assert abs(float(sin[0, 0, width // 2 + i]) - math.sin(angle)) < 1e-6
