"""Streams and their attention kernels on the device that is there: one rank on a GPU, and the same on the CPU.

The truth is one process on the CPU, in float64. In bf16 a streamed step may be off by twice as much as a plain one on the same device is.
"""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from trial import Trial, compare, write_reference

from longshift.cluster.cluster import Heads
from longshift.dist.world import World
from longshift.layout.blocks import BLOCK
from longshift.model.attention import Attention, PackedAttention
from longshift.model.chosen_kernel import LONG_BY_CUDNN, choose, kernels, probe
from longshift.model.float8 import linear, linear_back, multiplies_codes, rounded
from longshift.model.functions import add_product
from longshift.model.kernels import FLASH, Kernel, reference, reference_backward
from longshift.spec.model import ModelSpec, Rope
from longshift.stream.gpu_tiers import tier_of
from longshift.trainer.admission import _room

SPEC = ModelSpec("llama", 61, 64, 2, 4, 2, 16, 96, 128, rope=Rope())
STEPS = 6
LAYOUTS = (
    *("chunk13.host", "chunk16.host.kv-offload", "chunk24.host.every1", "chunk13.host.kv-offload.fpdt", "recompute-full.host"),
    *("chunk16.disk.kv-offload", "recompute-full.disk"),
)


@cache
def trial(precision: str) -> Trial:
    return Trial(SPEC, ((40, 21), (61,), (5, 50)) * (STEPS // 3), precision, capacity=61)  # pyright: ignore[reportArgumentType]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("truth") / "truth.safetensors")
    write_reference(World.alone(), trial("float64").to_json(), path)
    return path


def errors(device: torch.device, precision: str, layout: str, truth: str) -> dict[str, float]:
    return compare(World(0, 1, device), trial(precision).to_json(), layout, truth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_is_one_process(device: torch.device, truth: str, layout: str):
    found = errors(device, "float64", layout, truth)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("home", ["host", "disk", "device 40K, host rest"])
@pytest.mark.parametrize("layout", ["dp1.z2", "dp1.vertical.recompute-full"])
def test_a_home_outside_the_device_is_one_process(device: torch.device, truth: str, layout: str, home: str):
    found = compare(World(0, 1, device), replace(trial("float64"), home=home).to_json(), layout, truth)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_is_at_most_twice_as_wrong_as_a_plain_step(device: torch.device, truth: str, layout: str):
    alone, found = (errors(device, "bf16", words, truth) for words in ("dp1", layout))
    assert all(1e-4 < found[kind] <= 2 * alone[kind] for kind in ("grad", "weight")), (found, alone)


def test_the_attention_kernel_is_one_that_is_legal_here(device: torch.device):
    candidates = kernels(device, torch.bfloat16)
    kernel, reason = choose(candidates, Heads(8, 2, 64), torch.bfloat16, device, lambda seconds: seconds)
    verdict = probe(kernel, torch.bfloat16, "bf16", device)
    assert verdict.legal, (verdict, reason)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("window", [None, 48])
def test_a_pack_in_one_call_is_as_exact_as_a_call_for_each_document(device: torch.device, window: int | None, again: bool):
    if device.type == "cpu":
        pytest.skip("kernels of CPUs take a document at a time")
    heads, lengths = Heads(8, 2, 64), (300, 1, 1024, 77)
    kernel, reason = choose(kernels(device, torch.bfloat16), heads, torch.bfloat16, device, lambda seconds: seconds)
    assert kernel.packed is not None, reason
    make = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, heads.width) for count in (heads.query, heads.key, heads.key, heads.query)]
    given = [torch.randn(*shape, generator=make, dtype=torch.float64).bfloat16() for shape in shapes]

    def computed(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, grad = (t.to(device, dtype) for t in given)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = PackedAttention.apply(*leaves, lengths, window, Attention(kernel, heads.width**-0.5, again))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]  # pyright: ignore

    truth = computed(FLASH, torch.device("cpu"), torch.float64)
    packed, alone = (computed(one, device, torch.bfloat16) for one in (kernel, replace(kernel, packed=None)))
    for mine, other, exact in zip(packed, alone, truth):
        errors = [float((x.double().cpu() - exact).norm() / exact.norm()) for x in (mine, other)]
        assert 1e-5 < errors[0] <= 2 * errors[1], errors


@pytest.mark.parametrize(("queries", "keys", "causal"), [(6145, 6145, True), (7000, 7000, True), (6200, 7000, False), (5120, 4096, False)])
def test_attention_to_long_pieces_of_any_length_is_as_exact_as_flash(device: torch.device, queries: int, keys: int, causal: bool):
    if device.type == "cpu":
        pytest.skip("cuDNN runs on GPUs")
    heads = Heads(4, 2, 64)
    make, scale = torch.Generator().manual_seed(0), heads.width**-0.5
    shapes = [(queries, heads.query), (queries, heads.query), (keys, heads.key), (keys, heads.key)]
    grad, q, k, v = (torch.randn(*shape, heads.width, generator=make).to(device, torch.bfloat16) for shape in shapes)
    exact = [x.double() for x in (q, k, v)]
    out, lse = reference(*exact, causal, scale)
    truth = out, lse, *reference_backward(grad.double(), *exact, out, lse, causal, scale)
    piece = LONG_BY_CUDNN.of(q, k, causal)
    assert piece is LONG_BY_CUDNN
    errors = []
    for kernel in (piece, FLASH):
        out, lse = kernel.forward(q, k, v, causal, scale)
        found = out, lse, *kernel.backward(grad, q, k, v, out, lse, causal, scale)
        errors.append([float((x.double() - y).norm() / y.norm()) for x, y in zip(found, truth)])
    assert all(mine <= 2 * other for mine, other in zip(*errors)), errors


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matmul_adds_to_a_sum_in_float32(device: torch.device, dtype: torch.dtype, slots: int):
    if device.type == "cpu" and dtype != torch.float32:
        pytest.skip("matmuls of CPUs add to sums of their own format")
    make = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, width, generator=make).to(device, dtype) for width in (96, 40))
    buffer = torch.full((slots, 96 // slots * 40 + 8), math.nan, device=device)  # a fused one, which holds other sums too
    total = buffer[:, 4:-4].view(slots, 96 // slots, 40)
    truth = left.double().mT @ right.double()
    for times in (1, 2):
        add_product(total, left, right, first=times == 1)
        assert float((total.flatten(0, 1) - times * truth).norm() / truth.norm()) < 1e-5 * times


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_are_rounded_to_the_bits_of_float64_on_the_cpu(device: torch.device, dtype: torch.dtype, rows: int):
    x = (torch.randn(300, 700, generator=torch.Generator().manual_seed(0)) ** 5).to(dtype)
    x[7, 300], x[200, 3] = math.inf, math.nan
    found, truth = rounded(x.to(device), rows).cpu(), rounded(x.double(), rows)
    assert torch.equal(found.double().nan_to_num(nan=-1.0), truth.nan_to_num(nan=-1.0))
    assert int(truth.isnan().sum()) == 2 * 128 * rows


@pytest.mark.parametrize("stored", ["outputs first", "inputs first"])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 128, 256), (61, 256, 384), (64, 384, 128), (302, 1024, 4096)])
def test_codes_multiply_as_what_they_stand_for(device: torch.device, tokens: int, outputs: int, inputs: int, stored: str):
    make = torch.Generator().manual_seed(0)
    shapes = (tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs)
    x, weight, bias, dy = (torch.randn(*shape, generator=make).pow(3).to(device, torch.bfloat16) for shape in shapes)
    given = weight if stored == "outputs first" else weight.mT.contiguous().mT
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        assert multiplies_codes(x, given)
        assert multiplies_codes(dy, given)
    codes = rounded(weight.double(), BLOCK)
    exact = rounded(x.double()) @ codes.mT + bias.double(), rounded(dy.double()) @ codes
    for found, truth in zip((linear(x, given, bias), linear_back(dy, given)), exact):
        assert found.shape == truth.shape
        assert float((found.double() - truth).norm() / truth.norm()) < 4e-3
    if tokens > 1:
        x[tokens // 2, 3] = math.inf
        assert linear(x, given, bias).isfinite().all(1).tolist() == [token != tokens // 2 for token in range(tokens)]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_was_put_comes_back_while_the_device_is_busy(device: torch.device, tmp_path: Path, kind: str):
    """The device falls behind the host before each put, so what nothing orders comes too late."""
    tier = tier_of(kind, device, tmp_path, checked=True)
    make = torch.Generator().manual_seed(0)
    for number in range(200):
        if device.type == "cuda":
            torch.cuda._sleep(int(torch.randint(1, 3_000_000, (), generator=make)))
        x = torch.full((1000 + number % 7, 3), float(number), device=device)
        tier.put(number, x * 1)
        arrived = tier.fetch(number - number % 3)()
        assert bool((arrived[0] == number - number % 3).all())
        tier.recycle(arrived)
        if number % 3 == 2:
            for key in range(number - 2, number + 1):
                tier.drop(key)
    tier.close()


def test_admission_counts_no_memory_of_what_is_gone(device: torch.device):
    """Such as a trial that has ended: its parts refer to each other. It is larger than what other processes on this GPU take or leave
    meanwhile, and than the memory that this one has kept."""
    world, size = World(0, 1, device), 2**32 if device.type == "cuda" else 2**28
    _, before = _room(world)
    gone: list[object] = [torch.ones(size, dtype=torch.uint8, device=device)]
    gone.append(gone)
    _, with_it = _room(world)
    del gone
    _, after = _room(world)
    assert with_it - before > size // 2 > abs(after - before)
