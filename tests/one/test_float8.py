"""Matmuls with factors of eight bits: what factors are rounded to, products beside a definition in float64, what is not finite, a loss."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trial import Trial, build

from longshift.dist.world import World
from longshift.layout.blocks import BLOCK
from longshift.layout.layout import Layout
from longshift.model import float8
from longshift.model.decoder import Block, Head, build_unit
from longshift.model.float8 import FILLED, blocks_coded, multiplies_codes, rounded, rows_coded
from longshift.model.functions import AdaptedLinear, Linear
from longshift.model.torch_compile import compiled_for
from longshift.spec.families import preset
from longshift.spec.formats import LARGEST
from longshift.step.update import train_step

STEP = 2.0**-4  # of e4m3: half of the distance of two codes over the lower one


def defined(x: Tensor, rows: int) -> Tensor:
    """Each block of x by itself: to the nearest of all codes, the even one of two, times the scale."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    y = torch.empty_like(x, dtype=torch.float64)
    for row in range(0, x.shape[0], rows):
        for column in range(0, x.shape[1], BLOCK):
            at = slice(row, row + rows), slice(column, column + BLOCK)
            part = x[at].double()
            scale = 2.0 ** math.ceil(math.log2(float(part.abs().max()) / LARGEST))
            away = (part.abs().unsqueeze(-1) / scale - codes).abs()
            odd = torch.arange(len(codes)) % 2 * 1e-12
            y[at] = codes[(away + odd).argmin(-1)] * scale * part.sign()
    return y


@pytest.mark.parametrize("rows", [1, BLOCK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 40), (2, 256), (200, 300)])
def test_a_factor_is_rounded_block_by_block(shape: tuple[int, int], dtype: torch.dtype, rows: int):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 5).to(dtype)
    y = rounded(x, rows)
    assert y.dtype == dtype
    assert torch.equal(y.double(), defined(x, rows))
    assert 0.01 < float((y.double() - x).norm() / x.double().norm()) < STEP
    assert torch.equal(rounded(y, rows), y)


@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (61, 384), (64, 128)])
def test_codes_and_scales_of_rows_are_what_a_row_is_rounded_to(tokens: int, width: int):
    """And what is not finite stays so: NaN codes, or zeros with an infinite scale."""
    x = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)) ** 5).bfloat16()
    x[0, 3], x[-1, width - 1] = 0.0, math.inf
    codes, scales = rows_coded(x)
    filled = -(-tokens // FILLED) * FILLED
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (codes.shape, scales.shape) == ((filled, width), (width // BLOCK, filled))
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    stands = (codes.float().unflatten(1, (-1, BLOCK)) * scales.mT.unsqueeze(2)).flatten(1)
    assert torch.equal(stands[:tokens].nan_to_num(nan=-1.0), rounded(x).float().nan_to_num(nan=-1.0))
    assert not stands[tokens:].any()
    assert int(stands.isnan().sum()) == BLOCK


@pytest.mark.parametrize("stored", ["outputs first", "inputs first"])
@pytest.mark.parametrize("shape", [(128, 128), (256, 640)])
def test_codes_and_scales_of_blocks_are_what_a_weight_is_rounded_to(shape: tuple[int, int], stored: str):
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 5).bfloat16()
    codes, scales = blocks_coded(weight if stored == "outputs first" else weight.mT.contiguous().mT)
    count = shape[1] // BLOCK
    assert codes.is_contiguous()
    assert scales.shape == (shape[0] // BLOCK, -(-count // FILLED) * FILLED)
    assert not scales[:, count:].any()
    stands = codes.float().view(-1, BLOCK, count, BLOCK) * scales[:, None, :count, None]
    assert torch.equal(stands.view(shape), rounded(weight, BLOCK).float())


@pytest.mark.parametrize("tokens", [1, 61, 64])
@pytest.mark.parametrize("stored", ["outputs first", "inputs first"])
def test_codes_are_multiplied_as_what_they_stand_for(monkeypatch: pytest.MonkeyPatch, tokens: int, stored: str):
    """By a definition of torch's scaled matmul for these blocks; `tests/gpu` has torch's own."""

    def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, a_by: object, b_scale: Tensor, b_by: object, output_dtype: torch.dtype) -> Tensor:
        kinds = torch.nn.functional.ScalingType
        assert (a_by, b_by) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
        assert a.is_contiguous()
        assert b.mT.is_contiguous()
        assert a_scale.mT.is_contiguous()
        assert b_scale.mT.is_contiguous()
        assert a.shape[0] % FILLED == b_scale.shape[0] % FILLED == 0
        inner = a.shape[1] // BLOCK
        x = (a.double().unflatten(1, (-1, BLOCK)) * a_scale.double().unsqueeze(2)).flatten(1)
        w = (b.double().view(inner, BLOCK, -1, BLOCK) * b_scale.double()[:inner, None, :, None]).view(b.shape)
        return (x @ w).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(float8, "multiplies_codes", lambda x, weight: True)
    monkeypatch.setattr(float8, "_coders", lambda device: (rows_coded, blocks_coded))
    make = torch.Generator().manual_seed(0)
    shapes = (tokens, 640), (256, 640), (256,), (256, tokens)
    x, weight, bias, dy_cut = (torch.randn(*shape, generator=make).pow(3).bfloat16() for shape in shapes)
    given, dy = weight if stored == "outputs first" else weight.mT.contiguous().mT, dy_cut.mT  # a gradient may be stored otherwise
    exact = rounded(weight.double(), BLOCK)
    for found, truth in (
        (float8.linear(x, given, bias), rounded(x.double()) @ exact.mT + bias.double()),
        (float8.linear_back(dy, given), rounded(dy.double()) @ exact),
    ):
        assert found.shape == truth.shape
        assert float((found.double() - truth).norm() / truth.norm()) < 4e-3


def test_what_is_compiled_in_a_thread_has_room_for_more_shapes_than_torch_gives_it():
    """A backward on a GPU runs in a thread of autograd's, and torch keeps its settings by thread."""
    torch._dynamo.reset()
    made, failed = compiled_for(lambda x: x * 2, 0, dynamic=False, backend="eager", fullgraph=True), list[Exception]()

    def run() -> None:
        try:
            for width in range(2, 14):
                assert made(torch.ones(3, width)).sum() == 6 * width
        except Exception as fault:
            failed.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    torch._dynamo.reset()


def test_a_cpu_multiplies_no_codes():
    assert not multiplies_codes(torch.ones(4, BLOCK, dtype=torch.bfloat16), torch.ones(BLOCK, BLOCK, dtype=torch.bfloat16))


def test_a_stored_order_changes_no_code():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(x.mT.contiguous().mT, BLOCK), rounded(x, BLOCK))
    assert torch.equal(rounded(x.mT, BLOCK), rounded(x, BLOCK).mT)


def test_blocks_of_zeros_and_of_tiny_numbers_stay_finite():
    x = torch.zeros(2, 256)
    x[0, 3], x[1, 200] = 1e-44, 3e38
    y = rounded(x)
    assert bool(y.isfinite().all())
    assert int(y.count_nonzero()) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_no_code(value: float, dtype: torch.dtype):
    """torch's cast makes 448 of infinity."""
    x, weight = torch.ones(5, 300, dtype=dtype), torch.ones(7, 300, dtype=dtype)
    x[2, 140] = value
    y = rounded(x)
    assert bool(y[2, 128:256].isnan().all())
    assert int(y.isnan().sum()) == 128
    out = Linear.apply(x, weight, None, None, True)
    assert out.isfinite().all(1).tolist() == [True, True, False, True, True]  # pyright: ignore
    weight[3, 0] = value
    assert not Linear.apply(torch.ones_like(x), weight, None, None, True)[:, 3].isfinite().any()  # pyright: ignore
    dy = torch.ones(5, 7, dtype=dtype)
    dy[4, 1] = value
    x = torch.ones(5, 300, dtype=dtype, requires_grad=True)
    (dx,) = torch.autograd.grad(Linear.apply(x, torch.ones_like(weight), None, None, True), x, dy)  # pyright: ignore
    assert dx.isfinite().all(1).tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("stored", ["outputs first", "inputs first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_those_of_rounded_factors(dtype: torch.dtype, stored: str):
    make = torch.Generator().manual_seed(0)
    shapes = (50, 300), (200, 300), (200,), (50, 200)
    x, w, b, dy = (torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes)
    weight = w.clone() if stored == "outputs first" else w.mT.contiguous()
    leaves = [x.clone().requires_grad_(), weight.requires_grad_(), b.clone().requires_grad_()]
    y = Linear.apply(leaves[0], leaves[1] if stored == "outputs first" else leaves[1].mT, leaves[2], None, True)
    dx, dw, db = torch.autograd.grad(y, leaves, dy)  # pyright: ignore
    assert dw.is_contiguous()
    exact = defined(x, 1) @ defined(w, BLOCK).mT + b.double(), defined(dy, 1) @ defined(w, BLOCK), dy.double().mT @ x.double()
    limit = {torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    for mine, truth in zip((y, dx, dw if stored == "outputs first" else dw.mT), exact):
        assert float((mine.detach().double() - truth).norm() / truth.norm()) < limit  # pyright: ignore
    assert torch.allclose(db, dy.sum(0))
    plain = x.double() @ w.double().mT + b.double()
    assert float((exact[0] - plain).norm() / plain.norm()) > 1e-2


def test_a_sum_gets_the_gradient_of_factors_as_they_are():
    make, given = torch.Generator().manual_seed(0), list[tuple[Tensor, Tensor]]()
    x, w, dy = (torch.randn(*shape, generator=make) for shape in ((5, 300), (20, 300), (5, 20)))
    y = Linear.apply(x.requires_grad_(), w, None, lambda *pair: given.append(pair), True)
    (dx,) = torch.autograd.grad(y, x, dy)  # pyright: ignore
    assert torch.equal(dx, rounded(dy) @ rounded(w, BLOCK))
    assert torch.equal(given[0][0], dy)
    assert torch.equal(given[0][1], x)


def test_an_adapter_is_added_as_it_is():
    make = torch.Generator().manual_seed(0)
    shapes = (6, 140), (20, 140), (4, 140), (20, 4), (6, 20)
    x, w, a, b, dy = (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in shapes)
    y = AdaptedLinear.apply(x.requires_grad_(), w, None, a, b, 0.5, True)
    (dx,) = torch.autograd.grad(y, x, dy)  # pyright: ignore
    assert torch.allclose(y, rounded(x.detach()) @ rounded(w, BLOCK).mT + 0.5 * x @ a.mT @ b.mT, rtol=1e-12)  # pyright: ignore
    assert torch.allclose(dx, rounded(dy) @ rounded(w, BLOCK) + 0.5 * dy @ b @ a, rtol=1e-12)


def test_matmuls_of_blocks_alone_have_eight_bits():
    spec = preset("tiny-llama")
    assert [build_unit(spec, unit, float8=True).float8 for unit in (0, 1, spec.layers, spec.layers + 1)] == [False, True, True, False]
    assert isinstance(build_unit(spec, spec.layers, float8=True), Block)
    assert isinstance(build_unit(spec, spec.layers + 1, float8=True), Head)


def losses(precision: str, steps: int = 120) -> list[float]:
    """Of a Llama with two blocks of width 96 that learns that a token is 1 to 8 more than the one before it."""
    spec = replace(preset("tiny-llama"), vocab=64, width=96, layers=2, heads=4, kv_heads=2, head_width=48, ffn=200)
    by = torch.randint(1, 9, (steps, 4, 33), generator=torch.Generator().manual_seed(0))
    ids = (by.cumsum(-1) % 64).tolist()
    given = tuple(tuple((tuple(one[:-1]), tuple(one[1:])) for one in documents) for documents in ids)
    trial = Trial(spec, (), precision, given=given, capacity=128, lr=3e-3, warmup=10)  # pyright: ignore[reportArgumentType]
    state, player = build(trial, [Layout()], World.alone())
    return [train_step(state, batch, player).loss for batch in trial.batches()]


def test_a_llama_learns_as_in_bf16():
    plain, eight = losses("bf16"), losses("float8")
    last = [sum(found[-20:]) / 20 for found in (plain, eight)]
    print(f"loss of the last 20 of 120 steps: bf16 {last[0]:.4f}, float8 {last[1]:.4f}, ratio {last[1] / last[0]:.4f}")
    assert plain != eight
    assert last[0] < 0.7 * plain[0]
    assert abs(last[1] / last[0] - 1) < 0.02
