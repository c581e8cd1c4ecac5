"""The attention kernels against the definition, as the whole and as parts of a larger attention."""

import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.cluster.cluster import Heads
from longshift.errors import UsageError
from longshift.model import attention as attention_module
from longshift.model import chosen_kernel, tiled_attention
from longshift.model import kernels as kernels_module
from longshift.model import packed_attention as packed_module
from longshift.model.attention import Attention, PackedAttention, match_heads
from longshift.model.chosen_kernel import LONG_BY_CUDNN, choose
from longshift.model.cut import cut
from longshift.model.kernels import (
    BY_SIZE,
    CUDNN,
    FLASH,
    TILED,
    Kernel,
    flash,
    flash_backward,
    merge,
    reference,
    reference_backward,
)
from longshift.model.packed_attention import PackedKernel

CPU = torch.device("cpu")
HEAD = 16
SCALE = HEAD**-0.5
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
MATH = Kernel("math", reference, reference_backward)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return tuple(normal(*shape, HEAD, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def definition(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv by softmax and autograd in float64; shares no code with the library."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("tgjh,sgh->tgjs", q.unflatten(1, (-1, group)), k) * scale
    if causal:
        later = torch.arange(len(k))[None] > torch.arange(len(q))[:, None]
        scores = scores.masked_fill(later[:, None, None], float("-inf"))
    out = torch.einsum("tgjs,sgh->tgjh", scores.softmax(-1), v).flatten(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), grad.double())
    return out.detach(), scores.logsumexp(-1).flatten(1).detach(), *grads


def worst(found, expected) -> float:
    """Largest relative difference of one kind of result."""
    differences = []
    for a, b in zip(found, expected, strict=True):
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape
        assert b.norm() > 1e-3
        differences.append(float((a.double() - b.double()).norm() / b.double().norm()))
    return max(differences)


def kernels(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    out, lse = flash(q, k, v, causal, scale)
    return out, lse, *flash_backward(grad, q, k, v, out, lse, causal, scale)


def by_reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    out, lse = reference(q, k, v, causal, scale)
    return out, lse, *reference_backward(grad, q, k, v, out, lse, causal, scale)


SHAPES = [
    (1, 1, 2, 1, True),
    (7, 7, 6, 2, True),
    (131, 131, 5, 5, True),
    (601, 601, 3, 1, True),
    (53, 17, 6, 2, False),
    (5, 700, 4, 4, False),
]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("attention", [kernels, by_reference])
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "causal"), SHAPES)
def test_forward_and_backward_follow_the_definition(attention, queries, keys, heads, kv_heads, causal, dtype):
    given = inputs(queries, keys, heads, kv_heads, dtype)
    found = attention(*given, causal=causal, scale=SCALE)
    assert found[0].dtype == dtype
    expected = definition(*given, causal=causal, scale=SCALE)
    if queries > 1:
        assert worst(found, expected) < BOUND[dtype]
    else:  # one key: the weights are 1 and the gradients of query and key 0
        assert torch.equal(found[0], expected[0].to(dtype))
        assert max(float(g.abs().max()) for g in found[2:4]) < BOUND[dtype]


def test_bf16_is_no_further_from_the_truth_than_the_definition_in_bf16():
    given = inputs(131, 131, 6, 2, torch.bfloat16)
    truth = definition(*given, causal=True, scale=SCALE)
    found, plain = kernels(*given, causal=True, scale=SCALE), by_reference(*given, causal=True, scale=SCALE)
    assert found[1].dtype == torch.float32
    for a, b, exact in zip(found, plain, truth):
        assert worst([a], [exact]) <= 2 * worst([b], [exact])


def split(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, at: int, causal_offset: int = 0, kernel: Kernel = FLASH) -> tuple[Tensor, ...]:
    """Causal attention of the queries from `at` on, in three pieces: their own keys, then those before them, half and half."""
    attention, late, grad = Attention(kernel, SCALE), q[at:], grad[at:]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse, dq, dk, dv = (torch.full(x.shape, 7.0, dtype=wide) for x in (late, late[:, :, 0], late, k, v))
    pieces = (slice(at - causal_offset, len(k) - causal_offset), True), (slice(at // 2), False), (slice(at // 2, at), False)
    for keys, causal in pieces:
        attention.fold(out, lse, late, k[keys], v[keys], "causal" if causal else "all", first=causal)
    for keys, causal in pieces:
        attention.add((dq, dk[keys], dv[keys]), grad, late, k[keys], v[keys], out.to(q.dtype), lse, "causal" if causal else "all")
    return out, lse, dq - 7, dk - 7, dv - 7


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, at: int) -> tuple[Tensor, ...]:
    """The same by the definition; the queries before `at` get no gradient."""
    grad = grad.clone()
    grad[:at] = 0
    out, lse, dq, dk, dv = definition(q, k, v, grad, True, SCALE)
    return out[at:], lse[at:], dq[at:], dk, dv


def test_a_part_of_a_larger_attention_takes_the_global_out_and_lse():
    given = inputs(101, 101, 6, 2)
    assert worst(split(*given, at=40), whole(*given, at=40)) < 1e-12


def test_a_part_with_its_own_out_and_lse_or_a_shifted_diagonal_is_noticed():
    given = inputs(101, 101, 6, 2)
    expected = whole(*given, at=40)
    assert worst(split(*given, at=40, causal_offset=1)[:2], expected[:2]) > 1e-3
    q, k, v, grad = given
    local = flash(q[40:], k[40:], v[40:], True, SCALE)
    own = flash_backward(grad[40:], q[40:], k[40:], v[40:], *local, True, SCALE)
    assert worst([own[1]], [expected[3][40:]]) > 1e-3


def slower(kernel: Kernel, seconds: float) -> Kernel:
    def forward(*arguments) -> tuple[Tensor, Tensor]:
        time.sleep(seconds)
        return kernel.forward(*arguments)

    return replace(kernel, name="slower", forward=forward)


def absent(*arguments) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no such kernel here. And a long story.")


def alone_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """As exact as bf16 inputs, but not as the float32 of the others."""
    out, lse = flash(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal, scale)
    return out.to(q.dtype), lse


@pytest.mark.parametrize("turn", range(3))
def test_the_fastest_kernel_that_is_legal_and_exact_enough_is_chosen(turn, monkeypatch):
    monkeypatch.setattr(chosen_kernel, "TIMED_TOKENS", 256)
    others = [slower(FLASH, 0.2), replace(FLASH, name="absent", forward=absent), replace(FLASH, name="rough", forward=alone_forward)]
    given = [*others[turn:], FLASH, *others[:turn]]
    kernel, why = choose(given, Heads(4, 2, 16), torch.float32, CPU, lambda seconds: seconds)
    assert kernel is FLASH
    assert "absent no such kernel here" in why
    assert "rough not for pieces, or not exact enough" in why
    assert re.search(r"slower [\d.]+ ms", why)


def test_the_slowest_rank_decides_which_kernel_all_take(monkeypatch):
    monkeypatch.setattr(chosen_kernel, "TIMED_TOKENS", 256)
    other = slower(FLASH, 0.2)
    ranks = [9.0, 0.0]
    kernel, _ = choose([FLASH, other], Heads(4, 2, 16), torch.float32, CPU, lambda own: own.maximum(own.new_tensor(ranks)))
    assert kernel is other


@pytest.mark.parametrize("count", [1, 2])
def test_without_a_kernel_that_can_be_used_every_candidate_is_told(count):
    """One alone is tried too. A rank that could use one fails with those that cannot."""
    bad = [
        replace(FLASH, name="absent", forward=absent),
        replace(FLASH, name="broken", backward=lambda *given: [x * 2 for x in given[1:4]]),
    ]
    words = r"^no attention kernel can be used for 4 heads of 16 in float32 on cpu: absent no such kernel here"
    words += [r"; another train\.", r", broken wrong: .* backward; another train\."][count - 1]
    with pytest.raises(UsageError, match=words):
        choose(bad[:count], Heads(4, 2, 16), torch.float32, CPU, lambda seconds: seconds)
    with pytest.raises(UsageError, match="flash not on every rank"):
        choose([FLASH], Heads(4, 2, 16), torch.float32, CPU, lambda own: own + float("inf"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_which_kernels_are_deterministic_where():
    gpu = torch.device("cuda")
    every = {"flash": FLASH, "tiled": TILED, "cudnn": CUDNN}
    assert all(kernel.deterministic(CPU) for kernel in (*every.values(), BY_SIZE))
    assert {name for name, kernel in every.items() if kernel.deterministic(gpu)} == {"tiled"}


@pytest.mark.usefixtures("deterministic")
def test_asked_for_deterministic_algorithms_kernels_are_not_raced(monkeypatch):
    """On a GPU flash adds up in one order then; torch does not ask cuDNN. On a CPU the first is taken, however slow it is."""
    assert [k.name for k in chosen_kernel.kernels(torch.device("cuda"), torch.bfloat16) if k.deterministic(torch.device("cuda"))] == [
        "flash"
    ]
    given = [replace(FLASH, name="random", repeats="never"), slower(FLASH, 0.2), FLASH]
    monkeypatch.setattr(Kernel, "deterministic", lambda kernel, device: kernel.repeats != "never")
    kernel, why = choose(given, Heads(4, 2, 16), torch.float32, CPU, lambda seconds: seconds)
    assert kernel is given[1]
    assert why == "the first that is deterministic: random not deterministic, slower can be used, flash can be used"
    with pytest.raises(UsageError, match="random not deterministic"):
        choose(given[:1], Heads(4, 2, 16), torch.float32, CPU, lambda seconds: seconds)


@pytest.mark.parametrize(
    ("able", "in_bf16"), [((), FLASH), (("avx512_bf16",), BY_SIZE), (("avx512_bf16", "amx_bf16"), FLASH)], ids=["none", "bf16", "amx"]
)
def test_on_a_cpu_the_hardware_decides(monkeypatch, able, in_bf16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(able, True), raising=False)
    for dtype, expected in ((torch.float64, FLASH), (torch.float32, FLASH), (torch.bfloat16, in_bf16)):
        (only,) = given = chosen_kernel.kernels(CPU, dtype)
        assert only is expected
        assert choose(given, Heads(4, 2, 16), dtype, CPU, lambda seconds: seconds)[0] is only


@pytest.mark.parametrize(
    "kernel", [one.uncut or one for one in chosen_kernel.kernels(torch.device("cuda"), torch.bfloat16)], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize(("keys", "kv_heads", "causal"), [(64, 2, True), (128, 2, False), (128, 8, False)])
def test_gpu_kernels_take_and_give_what_they_should(kernel, keys, kv_heads, causal):
    """Without a GPU no more than that arguments bind to torch's operations and results have their shapes."""
    shapes = ((64, 8), (keys, kv_heads), (keys, kv_heads), (64, 8))
    q, k, v, grad = (torch.empty(*shape, HEAD, dtype=torch.bfloat16, device="meta") for shape in shapes)
    out, lse = kernel.forward(q, k, v, causal, SCALE)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    grads = kernel.backward(grad, q, k, v, out, lse, causal, SCALE)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


TILED_SHAPES = [*SHAPES, (64, 64, 2, 2, True), (33, 33, 12, 1, True), (97, 64, 4, 4, False), (64, 200, 6, 1, False)]


@pytest.fixture(params=[(16, 16), (16, 64), (1024, 1024)], ids=str)
def tiles(request, monkeypatch):
    """Tiles of few rows and columns, so that there are many; of those that are used."""
    monkeypatch.setattr(tiled_attention, "ROWS", request.param[0])
    monkeypatch.setattr(tiled_attention, "COLUMNS", request.param[1])


def by_tiles(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    out, lse = tiled_attention.forward(q, k, v, causal, scale)
    return out, lse, *tiled_attention.backward(grad, q, k, v, out, lse, causal, scale)


@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "causal"), TILED_SHAPES)
def test_tiles_follow_the_definition(tiles, monkeypatch, queries, keys, heads, kv_heads, causal):
    """In float32 all the way, which leaves rounding no room to hide a mistake."""
    monkeypatch.setattr(tiled_attention, "_in_bf16", nullcontext)
    given = inputs(queries, keys, heads, kv_heads, torch.float32)
    found, expected = by_tiles(*given, causal=causal, scale=SCALE), definition(*given, causal=causal, scale=SCALE)
    if queries > 1:
        assert worst(found, expected) < 1e-5
    else:
        assert torch.equal(found[0], expected[0].float())


@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "causal"), TILED_SHAPES[1:])
def test_tiles_in_bf16_are_about_as_exact_as_flash(tiles, queries, keys, heads, kv_heads, causal):
    given = inputs(queries, keys, heads, kv_heads, torch.bfloat16)
    truth = definition(*given, causal=causal, scale=SCALE)
    for a, b, exact in zip(by_tiles(*given, causal=causal, scale=SCALE), kernels(*given, causal=causal, scale=SCALE), truth):
        assert a.dtype == b.dtype
        assert worst([a], [exact]) <= 1.5 * worst([b], [exact])


def test_a_part_by_tiles_takes_the_global_out_and_lse(tiles):
    """Keys before the queries, which have keys of their own besides."""
    q, k, v, grad = inputs(101, 101, 6, 2, torch.bfloat16)
    out, lse, _, dk, dv = whole(q, k, v, grad, at=40)
    part = grad[40:], q[40:], k[:40], v[:40], out.bfloat16()
    assert worst(tiled_attention.backward(*part, lse.float(), False, SCALE)[1:], [dk[:40], dv[:40]]) < 1e-2
    assert worst(tiled_attention.backward(*part, lse.float() + 0.05, False, SCALE)[1:], [dk[:40], dv[:40]]) > 3e-2


def test_pieces_by_tiles_add_up(tiles, monkeypatch):
    given = inputs(101, 101, 6, 2, torch.bfloat16)
    expected, by_flash = whole(*given, at=40), split(*given, at=40)
    for a, b, exact in zip(split(*given, at=40, kernel=TILED), by_flash, expected):
        assert worst([a], [exact]) <= 1.2 * worst([b], [exact])
    monkeypatch.setattr(tiled_attention, "_in_bf16", nullcontext)
    given = inputs(101, 101, 6, 2, torch.float32)
    assert worst(split(*given, at=40, kernel=TILED), whole(*given, at=40)) < 1e-5


@pytest.mark.parametrize("large", [True, False])
def test_pieces_by_size_are_those_of_tiles_or_flash(monkeypatch, large):
    monkeypatch.setattr(kernels_module, "TILED_TOKENS", dict.fromkeys((True, False), 10 if large else 1000))
    given = inputs(101, 101, 6, 2, torch.bfloat16)
    found, expected = split(*given, at=40, kernel=BY_SIZE), split(*given, at=40, kernel=TILED if large else FLASH)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    q, k, v, grad = given
    out, lse = flash(q, k, v, True, SCALE)
    back = Attention(BY_SIZE, SCALE).backward(grad, q, k, v, out, lse, "causal")
    whole_back = (tiled_attention.backward if large else flash_backward)(grad, q, k, v, out, lse, True, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(back, whole_back, strict=True))


def test_other_matmuls_keep_their_precision():
    a = normal(64, 64, dtype=torch.float32)
    before = a @ a
    by_tiles(*inputs(64, 64, 2, 2, torch.bfloat16), causal=True, scale=SCALE)
    assert torch.equal(a @ a, before)


def test_short_pieces_and_other_numbers_go_to_flash(monkeypatch):
    monkeypatch.setattr(kernels_module, "TILED_TOKENS", {False: 300, True: 600})
    for tokens, causal, dtype in ((299, False, torch.bfloat16), (599, True, torch.bfloat16), (600, True, torch.float32)):
        assert BY_SIZE.of(*inputs(tokens, tokens, 2, 2, dtype)[:2], causal) is FLASH
    for tokens, causal in ((300, False), (600, True)):
        assert BY_SIZE.of(*inputs(tokens, tokens, 2, 2, torch.bfloat16)[:2], causal) is BY_SIZE
    assert (BY_SIZE.forward, BY_SIZE.fold, BY_SIZE.add) == (TILED.forward, TILED.fold, TILED.add)


@pytest.mark.parametrize(
    ("queries", "keys", "kernel"),
    [
        *((2048, 4096, LONG_BY_CUDNN), (6145, 7000, LONG_BY_CUDNN), (6145, 6000, FLASH)),
        *((2048, 4095, FLASH), (1, 2048, FLASH), (2048, 1, FLASH)),
    ],
)
def test_cudnn_takes_chunks_and_long_pieces_and_leaves_others_to_flash(queries, keys, kernel):
    assert LONG_BY_CUDNN.of(*(torch.empty(tokens, 2, 8, device="meta") for tokens in (queries, keys)), False) is kernel


@pytest.mark.parametrize(("queries", "keys", "causal"), [(48, 48, True), (53, 53, True), (16, 48, False), (53, 33, False), (53, 48, False)])
def test_a_kernel_that_is_cut_gives_what_the_whole_one_does(queries, keys, causal):
    """As a whole, and as a part of a larger attention; the kernel has whole multiples of 16 tokens only."""
    seen = []

    def by_16(of):
        def call(*given):
            q, k = given[-5:-3] if of == "forward" else given[1:3]
            seen.append((len(q), len(k)))
            return getattr(FLASH, of)(*given)

        return call

    kernel = cut(replace(FLASH, forward=by_16("forward"), backward=by_16("backward")), FLASH, 16, 0)
    q, k, v, grad = inputs(queries, keys, 6, 2)
    expected = definition(q, k, v, grad, causal, SCALE)
    out, lse = kernel.forward(q, k, v, causal, SCALE)
    assert worst((out, lse, *kernel.backward(grad, q, k, v, out, lse, causal, SCALE)), expected) < BOUND[torch.float64]
    assert seen == [(queries // 16 * 16, keys // 16 * 16)] * 2
    earlier = inputs(queries, 7, 6, 2)[1:3]
    whole = definition(q, *(torch.cat((x, y)) for x, y in zip((k, v), earlier)), grad, False, SCALE)
    if not causal:
        out, lse = FLASH.forward(q, *earlier, False, SCALE)
        kernel.fold(out, lse, q, k, v, False, SCALE, first=False)
        dq, dk, dv = FLASH.backward(grad, q, *earlier, out, lse, False, SCALE)[0], torch.zeros_like(k), torch.zeros_like(v)
        kernel.add(dq, dk, dv, grad, q, k, v, out, lse, False, SCALE)
        assert worst((out, lse, dq, dk, dv), (*whole[:3], *(x[:keys] for x in whole[3:]))) < BOUND[torch.float64]


def test_a_kernel_that_is_cut_is_tried_as_a_whole():
    """Lengths that are tried are no multiples of what it takes."""

    def wrong(*given):
        out, lse = FLASH.forward(*given)
        return out * 7, lse

    bad = cut(replace(FLASH, name="bad", forward=wrong), FLASH, 1024, 6144)
    assert bad.forward(*inputs(300, 300, 6, 2)[:3], True, SCALE)[0].isfinite().all()
    assert "wrong" in chosen_kernel.probe(bad, torch.float32, "float32", CPU).why_not
    assert choose([bad, FLASH], Heads(4, 2, 16), torch.float32, CPU, lambda seconds: seconds)[0] is FLASH


def test_a_kernel_that_is_cut_sums_in_float32():
    """An output in bf16 that nothing else is folded into is rounded once."""
    q, k, v, grad = inputs(53, 53, 6, 2, torch.bfloat16)
    truth = definition(q, k, v, grad, True, SCALE)[0]
    found = [kernel.forward(q, k, v, True, SCALE)[0] for kernel in (cut(FLASH, FLASH, 16, 0), FLASH)]
    errors = [float((out.double() - truth).norm() / truth.norm()) for out in found]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("lengths", [(3, 30, 5, 6, 31, 2), (30, 31), (4, 9, 30), (30, 7)])
def test_long_documents_of_a_pack_are_calls_of_their_own(monkeypatch, lengths, again):
    monkeypatch.setattr(attention_module, "LONG", 30)
    seen = []

    def packed(of):
        def call(*given):
            seen.append(given[-3])
            return of(*given)

        return call

    whole = replace(ONE_BY_ONE, forward=packed(one_by_one), backward=packed(one_by_one_backward))
    q, k, v, grad = inputs(sum(lengths), sum(lengths), 6, 2)
    found = []
    for kernel in (replace(FLASH, packed=whole, rest=FLASH), FLASH):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = PackedAttention.apply(*leaves, lengths, None, Attention(kernel, SCALE, again))
        found.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    assert worst(*found) < BOUND[torch.float64]
    together = {(3, 30, 5, 6, 31, 2): [(5, 6)], (4, 9, 30): [(4, 9)]}.get(lengths, [])
    assert seen == together * (3 if again else 2)


@pytest.mark.parametrize("scores", [1, 300, 2**26])
def test_the_definition_holds_few_scores_at_a_time(monkeypatch, scores):
    expected = definition(*inputs(45, 45, 6, 2), causal=True, scale=SCALE)
    monkeypatch.setattr(kernels_module, "MOST_SCORES", scores)
    q, k, v, grad = inputs(45, 45, 6, 2)
    out, lse = MATH.forward(q, k, v, True, SCALE)
    found = out, lse, *MATH.backward(grad, q, k, v, out, lse, True, SCALE)
    assert worst(found, expected) < 1e-12


LENGTHS = (5, 1, 37, 64, 2)


def packed(lengths=LENGTHS, scale: float = SCALE, shift: int = 0) -> float:
    """Worst difference of PackedAttention from each document alone; the arguments make mutants."""
    given = inputs(sum(LENGTHS), sum(LENGTHS), 6, 2)
    leaves = [t.requires_grad_() for t in given[:3]]
    out = PackedAttention.apply(*(t.roll(shift, 0) if i else t for i, t in enumerate(leaves)), lengths, None, Attention(FLASH, scale))
    found = (out.detach(), *torch.autograd.grad(out, leaves, given[3]))  # pyright: ignore
    alone = [definition(*pieces, causal=True, scale=SCALE) for pieces in zip(*(t.detach().split(LENGTHS) for t in given))]
    expected = [torch.cat(parts) for parts in zip(*alone)]
    return worst(found, [expected[0], *expected[2:]])


def test_packed_documents_attend_to_themselves_alone():
    assert packed() < 1e-12


@pytest.mark.parametrize(
    "mutant",
    [
        {"lengths": (sum(LENGTHS),)},
        {"lengths": (6, *LENGTHS[2:])},
        {"lengths": (5, 1, 36, 65, 2)},
        {"scale": 1.0},
        {"scale": SCALE * 1.01},
        {"shift": 1},
        {"shift": -1},
    ],
    ids=str,
)
def test_mutants_of_packed_attention_are_noticed(mutant):
    assert packed(**mutant) > 1e-3


@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_passes_gradcheck(window):
    q, k, v, _ = inputs(9, 9, 4, 2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *t: PackedAttention.apply(*t, (4, 1, 4), window, Attention(FLASH, SCALE)), leaves, fast_mode=True
    )


def one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, lengths: tuple[int, ...], window: int | None, scale: float):
    """A packed kernel on a CPU: a call for each document inside."""
    runs = [slice(first, last) for first, last in pairwise(ends.tolist())]
    parts = [attention_module._forward(q[run], k[run], v[run], [len(q[run])], window, Attention(FLASH, scale)) for run in runs]
    out, lse = (torch.cat(some) for some in zip(*parts))
    return out, lse


def one_by_one_backward(grad, q, k, v, out, lse, ends: Tensor, lengths: tuple[int, ...], window: int | None, scale: float):
    runs = [slice(first, last) for first, last in pairwise(ends.tolist())]
    found = []
    for run in runs:
        given = [t[run] for t in (grad, q, k, v, out, lse)]
        if window is not None and len(given[0]) > window:
            found.append([g.to(q.dtype) for g in attention_module._windowed_backward(*given, window, Attention(FLASH, scale))])
        else:
            found.append(flash_backward(*given, True, scale))
    return [torch.cat(parts) for parts in zip(*found)]


ONE_BY_ONE = PackedKernel(one_by_one, one_by_one_backward)
BY_PACKS = replace(FLASH, packed=ONE_BY_ONE)


def attended_packs(kernel: Kernel, window: int | None, again: bool, dtype: torch.dtype, lengths=LENGTHS) -> list[Tensor]:
    """Output and gradients, and what is kept of the first forward for another one."""
    q, k, v, grad = inputs(sum(lengths), sum(lengths), 6, 2, dtype)
    leaves, kept = [t.requires_grad_() for t in (q, k, v)], list[Tensor]()
    with torch.no_grad():
        PackedAttention.apply(*leaves, lengths, window, Attention(kernel, SCALE, again, kept))
    out = PackedAttention.apply(*leaves, lengths, window, Attention(kernel, SCALE, again, kept))
    return [*kept, out.detach(), *torch.autograd.grad(out, leaves, grad)]  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("window", [None, 5, 37, 64])
def test_a_packed_kernel_gives_the_bits_of_a_call_for_each_document(window, again, dtype):
    """A packed kernel that is not used gives them, too: it is counted."""
    calls = []
    told = PackedKernel(
        lambda *given: calls.append("forward") or one_by_one(*given), lambda *given: calls.append("back") or one_by_one_backward(*given)
    )
    found = attended_packs(replace(FLASH, packed=told), window, again, dtype)
    assert calls == ["forward", *["forward"] * again, "back"]
    assert all(torch.equal(a, b) for a, b in zip(found, attended_packs(FLASH, window, again, dtype), strict=True))


def test_a_packed_kernel_takes_several_documents_or_a_band():
    assert BY_PACKS.packed
    assert BY_PACKS.packed.takes((3, 4), None)
    assert BY_PACKS.packed.takes((9,), 4)
    assert not BY_PACKS.packed.takes((9,), None)
    assert not BY_PACKS.packed.takes((9,), 9)


def one_document(q, k, v, ends, lengths, window, scale):
    return one_by_one(q, k, v, ends[[0, -1]], (len(q),), window, scale)


def no_window(q, k, v, ends, lengths, window, scale):
    return one_by_one(q, k, v, ends, lengths, None, scale)


def wider_by_one(grad, q, k, v, out, lse, ends, lengths, window, scale):
    return one_by_one_backward(grad, q, k, v, out, lse, ends, lengths, window and window + 1, scale)


@pytest.mark.parametrize("kernels_of_packs", ["right", "one document", "no window", "wider", "absent", "elsewhere"])
def test_a_packed_kernel_is_used_as_far_as_it_is_right_on_every_rank(monkeypatch, kernels_of_packs):
    forward, backward = one_by_one, one_by_one_backward
    if kernels_of_packs in ("one document", "no window", "absent"):
        forward = {"one document": one_document, "no window": no_window, "absent": absent}[kernels_of_packs]
    if kernels_of_packs == "wider":
        backward = wider_by_one
    given = [replace(FLASH, packed=PackedKernel(forward, backward))]
    others = float(kernels_of_packs == "elsewhere")  # whether it is wrong on another rank
    kernel, why = choose(given, Heads(4, 2, 16), torch.float32, CPU, lambda own: own.maximum(own.new_tensor([[0.0], [others]])))
    usable = kernels_of_packs == "right"
    assert (kernel.packed is not None) == usable
    assert ("packed" in why) != usable


@pytest.mark.parametrize("window", [None, 5])
def test_the_packed_kernel_of_gpus_takes_and_gives_what_it_should(window):
    shapes = ((70, 8), (70, 2), (70, 2), (70, 8))
    q, k, v, grad = (torch.empty(*shape, HEAD, dtype=torch.bfloat16, device="meta") for shape in shapes)
    ends, whole = torch.empty(4, dtype=torch.int32, device="meta"), packed_module.FLASH
    out, lse = whole.forward(q, k, v, ends, (30, 1, 39), window, SCALE)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    grads = whole.backward(grad, q, k, v, out, lse, ends, (30, 1, 39), window, SCALE)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_gpus_have_packed_forms_of_16_bit_numbers(device, dtype):
    found = [kernel.packed is not None for kernel in chosen_kernel.kernels(torch.device(device), dtype)]
    assert set(found) == {device == "cuda" and dtype == torch.bfloat16}


@pytest.mark.parametrize("scores", [300, 2**26])
def test_the_definition_knows_windows(monkeypatch, scores):
    monkeypatch.setattr(kernels_module, "MOST_SCORES", scores)
    q, k, v, grad = inputs(45, 45, 6, 2)
    out, lse = reference(q, k, v, True, SCALE, window=7)
    found = out, *reference_backward(grad, q, k, v, out, lse, True, SCALE, window=7)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wanted = windowed(*leaves, 7)  # pyright: ignore
    assert worst(found, [wanted, *torch.autograd.grad(wanted, leaves, grad)]) < 1e-12


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of one run to the last `window` tokens, by its definition."""
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("tnh,snh->nts", q, keys) * SCALE
    weights = scores.masked_fill((back < 0) | (back >= window), float("-inf")).softmax(-1)
    return torch.einsum("nts,snh->tnh", weights, values)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kernel", [FLASH, MATH], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [2, 5, 16, 37, 63, 64])
def test_a_window_is_the_last_tokens_of_each_document(window, kernel, again):
    q, k, v, grad = inputs(sum(LENGTHS), sum(LENGTHS), 6, 2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = PackedAttention.apply(*leaves, LENGTHS, window, Attention(kernel, SCALE, again))
    wanted = torch.cat([windowed(*run, window) for run in zip(*(t.split(LENGTHS) for t in leaves))])
    found = (out, *torch.autograd.grad(out, leaves, grad))  # pyright: ignore
    assert worst([t.detach() for t in found], [t.detach() for t in (wanted, *torch.autograd.grad(wanted, leaves, grad))]) < 1e-12


@pytest.mark.parametrize("kernel", [FLASH, BY_SIZE], ids=lambda kernel: kernel.name)
def test_a_window_in_bfloat16_is_as_near_as_the_kernel(kernel):
    """Pieces add up in float32; large ones by tiles."""
    length, window = 9000, 4500
    given = [t.bfloat16() for t in inputs(length, length, 2, 1)]
    exact = [t.float() for t in given]
    found = PackedAttention.apply(*given[:3], (length,), window, Attention(kernel, SCALE))
    wanted = PackedAttention.apply(*exact[:3], (length,), window, Attention(FLASH, SCALE))
    assert worst([found.float()], [wanted]) < 0.01  # pyright: ignore


@pytest.mark.parametrize(
    ("queries", "keys"), [(range(2, 5), range(2)), (range(1, 3), range(1)), (range(5, 7), range(1, 3)), (range(3, 9), range(1, 3))]
)
def test_heads_that_do_not_divide_evenly(queries, keys):
    """Nine query heads on three key/value heads, a slice of which this rank has."""
    q, k, v, grad = inputs(23, 23, 9, 3)
    mine = slice(queries.start, queries.stop)
    only = torch.zeros_like(grad)
    only[:, mine] = grad[:, mine]
    expected = definition(q, k, v, only, True, SCALE)
    leaves = [t.detach().requires_grad_() for t in (q[:, mine], k[:, keys.start : keys.stop], v[:, keys.start : keys.stop])]
    out = PackedAttention.apply(leaves[0], *match_heads(leaves[1], leaves[2], queries, keys, 3), (23,), None, Attention(FLASH, SCALE))
    dq, dk, dv = torch.autograd.grad(out, leaves, grad[:, mine])  # pyright: ignore
    held = slice(keys.start, keys.stop)
    found = (out.detach(), dq, dk, dv)  # pyright: ignore
    assert worst(found, (expected[0][:, mine], expected[2][:, mine], expected[3][:, held], expected[4][:, held])) < 1e-12


def test_even_heads_are_not_copied():
    _, k, v, _ = inputs(3, 3, 9, 3)
    assert match_heads(k, v, range(9), range(3), 3) == (k, v)
    assert match_heads(k[:, 1:], v[:, 1:], range(3, 9), range(1, 3), 3)[0].data_ptr() == k[:, 1:].data_ptr()


def test_the_definition_here_is_that_of_torch():
    q, k, v, grad = inputs(31, 31, 6, 2)
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    assert worst([definition(q, k, v, grad, True, SCALE)[0]], [theirs]) < 1e-12


def released_merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """As FPDT's and ring attention's released code has it."""
    if first:
        merge(out, lse, part, part_lse, True)
        return
    out.sub_(torch.sigmoid(part_lse - lse).unsqueeze(-1) * (out - part))
    lse.copy_(lse - torch.log(torch.sigmoid(lse - part_lse)))


def merge_without_maximum(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Weights from sums of exponentials as they are."""
    if first:
        merge(out, lse, part, part_lse, True)
        return
    total = lse.exp() + part_lse.exp()
    out.copy_((out * lse.exp().unsqueeze(-1) + part * part_lse.exp().unsqueeze(-1)) / total.unsqueeze(-1))
    lse.copy_(total.log())


def merged(how, dtype: torch.dtype, gap: float) -> float:
    """Worst difference from the definition when `how` folds three parts whose log-sum-exps differ by about `gap`: up, then down."""
    q, k, v, grad = inputs(4, 21, 6, 2)
    q = q * 0 + 1.0
    k = 0.01 * k
    k[7:14] += gap / (SCALE * HEAD)
    expected = definition(q, k, v, grad, False, SCALE)[:2]
    out, lse = torch.empty(4, 6, HEAD, dtype=dtype), torch.empty(4, 6, dtype=dtype)
    for number in range(3):
        keys = slice(7 * number, 7 * number + 7)
        parts = definition(q, k[keys], v[keys], grad, False, SCALE)[:2]
        how(out, lse, *(part.to(dtype) for part in parts), first=number == 0)
    return max(worst([out.nan_to_num(1e9)], [expected[0]]), worst([lse.nan_to_num(1e9, 1e9, -1e9)], [expected[1]]))


GAPS = (0.0, 3.0, -3.0, 95.0, -95.0, 200.0, -200.0, 800.0, -800.0)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("gap", GAPS)
def test_a_merge_is_right_at_any_gap_of_the_log_sum_exps(dtype: torch.dtype, gap: float):
    assert merged(merge, dtype, gap) < BOUND[dtype]


@pytest.mark.parametrize("how", [released_merge, merge_without_maximum])
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 200.0), (torch.float64, 800.0)])
def test_naive_merges_are_right_at_small_gaps_alone(how, dtype: torch.dtype, gap: float):
    assert merged(how, dtype, 3.0) < BOUND[dtype]
    assert merged(how, dtype, gap) > 1e-3
