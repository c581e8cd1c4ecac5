"""Experts against a loop over tokens: routes of every kind, ties, gradients, and memory that does not depend on routes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longshift.dist.live_bytes import HeldBytes
from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.model import experts as module
from longshift.model.decoder import Block, Ops, build_unit
from longshift.model.experts import Experts, plan_routes, route
from longshift.model.functions import WRITTEN_OUT
from longshift.spec.adapters import Lora, partly_trained
from longshift.spec.families import from_hugging_face, preset, to_hugging_face

TOKENS, WIDTH, NUMBER, BEST, FFN = 23, 6, 5, 2, 4
EXACT = 1e-13


def weights(seed: int = 0) -> tuple[Tensor, ...]:
    """gate, up and down of all experts."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (NUMBER * FFN, WIDTH), (NUMBER * FFN, WIDTH), (NUMBER * WIDTH, FFN)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)


def token_by_token(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for x, chosen, shares in zip(x_TD, experts_TK.tolist(), weights_TK):
        total = torch.zeros_like(x)
        for expert, share in zip(chosen, shares):
            part = slice(expert * FFN, (expert + 1) * FFN)
            hidden = torch.nn.functional.silu(gate[part] @ x) * (up[part] @ x)
            total = total + share * (down[expert * WIDTH : (expert + 1) * WIDTH] @ hidden)
        rows.append(total)
    return torch.stack(rows)


def routes_of(kind: str) -> Tensor:
    """Experts [T, K] of each token."""
    generator = torch.Generator().manual_seed(1)
    match kind:
        case "random":
            return torch.rand(TOKENS, NUMBER, generator=generator).argsort(-1)[:, :BEST].contiguous()
        case "all to two":
            return torch.tensor([[4, 0]] * TOKENS)
        case "none to the first and the last":
            return torch.tensor([[1 + number % 3, 1 + (number + 1) % 3] for number in range(TOKENS)])
        case "in runs":
            return torch.tensor([[number * NUMBER // TOKENS, (number * NUMBER // TOKENS + 1) % NUMBER] for number in range(TOKENS)])
    raise AssertionError(kind)


KINDS = ("random", "all to two", "none to the first and the last", "in runs")


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_a_loop_over_tokens(kind: str):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(TOKENS, BEST, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    chosen = routes_of(kind)
    inputs = (x, shares, *weights())
    y = Experts.apply(x, shares, plan_routes(chosen, NUMBER), *inputs[2:], "silu", WRITTEN_OUT)
    mine = torch.autograd.grad(y, inputs, grad)
    expected = token_by_token(x, chosen, shares, *inputs[2:])
    theirs = torch.autograd.grad(expected, inputs, grad)
    for found, truth in zip((y.detach(), *mine), (expected.detach(), *theirs)):
        assert float((found - truth).abs().max()) <= EXACT * max(1.0, float(truth.abs().max()))


def test_experts_without_tokens_have_gradients_of_zero():
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    gate, up, down = weights()
    shares = torch.ones(TOKENS, BEST, dtype=torch.float64)
    Experts.apply(x, shares, plan_routes(routes_of("all to two"), NUMBER), gate, up, down, "silu", WRITTEN_OUT).sum().backward()
    for weight in (gate, up, down):
        by_expert = weight.grad.unflatten(0, (NUMBER, -1)).abs().sum((1, 2))
        assert (by_expert > 0).tolist() == [True, False, False, False, True]


def test_equal_scores_go_to_the_first_experts():
    chosen, shares = route(torch.zeros(7, NUMBER), 3, normalize=True)
    assert chosen.tolist() == [[0, 1, 2]] * 7
    assert torch.allclose(shares, torch.full((7, 3), 1 / 3))
    chosen, _ = route(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), 2, normalize=True)
    assert chosen.tolist() == [[1, 2]]


@pytest.mark.parametrize("normalize", [True, False])
def test_a_router_is_a_softmax_over_all(normalize: bool):
    logits = torch.randn(TOKENS, NUMBER, dtype=torch.bfloat16)
    chosen, shares = route(logits, BEST, normalize)
    scores = logits.float().softmax(-1)
    expected, numbers = scores.topk(BEST, -1)
    assert shares.dtype == torch.float32
    assert torch.equal(scores.gather(-1, chosen), scores.gather(-1, numbers))
    assert torch.allclose(shares, expected / expected.sum(-1, keepdim=True) if normalize else expected)


def peak_of(kind: str) -> tuple[int, int]:
    """Bytes at the peak of a forward and backward, and after the forward."""
    held = HeldBytes()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(TOKENS, BEST, dtype=torch.float64, requires_grad=True)
    gate, up, down = weights()
    routes = plan_routes(routes_of(kind), NUMBER)
    with held:
        y = Experts.apply(x, shares, routes, gate, up, down, "silu", WRITTEN_OUT)
        kept = held.now["cpu"]
        y.backward(torch.ones_like(y))
    return held.most["cpu"], kept


def test_memory_does_not_depend_on_routes():
    assert len({peak_of(kind) for kind in KINDS}) == 1


def test_a_block_of_experts_neither_enters_nor_leaves(monkeypatch: pytest.MonkeyPatch):
    """Ranks that share tokens send theirs to nobody: the seams of tensor parallelism are not used."""
    spec = preset("tiny-qwen3-moe")
    block = build_unit(spec, 1)
    assert isinstance(block, Block)
    ops = Ops(spec)
    monkeypatch.setattr(ops, "enter", None)
    monkeypatch.setattr(ops, "leave", None)
    for param in block.table:
        setattr(block, param.role, torch.nn.Parameter(torch.randn(param.shape) * 0.02))
    assert block.mlp(torch.randn(9, spec.width), ops).shape == (9, spec.width)


def test_the_table_counts_what_a_token_passes():
    spec = preset("qwen3-30b-a3b")
    assert round(spec.parameters / 1e9, 1) == 30.5
    assert round(spec.active / 1e9, 2) == 3.35
    assert spec.flops_per_token(0) == pytest.approx(6 * (spec.active - spec.vocab * spec.width), rel=1e-12)
    assert preset("llama-3-8b").active == preset("llama-3-8b").parameters


def test_adapters_are_for_attention():
    """A router and experts are no linear layers to PEFT."""
    spec = partly_trained(preset("tiny-qwen3-moe"), Lora(4, 8.0), ())
    adapted = {param.role.removesuffix("_lora_a") for param in spec.params if param.role.endswith("_lora_a")}
    assert adapted == {"q", "k", "v", "o"}
    with pytest.raises(UsageError, match="no linear layer of this model is called 'gate'"):
        partly_trained(preset("tiny-qwen3-moe"), Lora(4, 8.0, ("gate",)), ())


def test_float8_is_refused():
    spec = preset("tiny-qwen3-moe")
    assert not faults(spec, Layout.parse("tp2"), 2)
    assert any("does not know experts" in fault for fault in faults(spec, Layout.parse("tp2"), 2, float8=True))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("decoder_sparse_step", 2, "needs blocks without experts"),
        ("mlp_only_layers", [0], "needs blocks without experts"),
        ("num_experts_per_tok", 9, "there are 8 experts"),
        ("num_experts", 1 << 20, "must be a positive whole number, at most 4096"),
        ("use_sliding_window", True, "needs a sliding window"),
    ],
)
def test_what_a_config_cannot_say_is_refused(key: str, value: object, reason: str):
    config = {**to_hugging_face(preset("tiny-qwen3-moe")), "sliding_window": 9, key: value}
    with pytest.raises(UsageError, match=reason):
        from_hugging_face(config)


def test_either_name_of_the_number_of_experts_is_read():
    config = to_hugging_face(preset("tiny-qwen3-moe"))
    config["num_local_experts"] = config.pop("num_experts")
    assert from_hugging_face(config) == preset("tiny-qwen3-moe")
    mixtral = replace(preset("tiny-llama"), family="mixtral", experts=4, top_k=2, norm_eps=1e-5)
    assert to_hugging_face(mixtral)["num_local_experts"] == 4


@pytest.mark.parametrize("mutant", ["ties by chance", "last rows forgotten", "weights twice"])
def test_a_wrong_expert_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch):
    if mutant == "last rows forgotten":
        native = module.row_ends
        monkeypatch.setattr(module, "row_ends", lambda rows, number: (*native(rows, number)[:-1], native(rows, number)[-2]))
    elif mutant == "weights twice":
        native_rows = module._of_rows
        monkeypatch.setattr(module, "_of_rows", lambda shares, routes: native_rows(shares, routes) ** 2)
    else:
        monkeypatch.setattr(torch.Tensor, "sort", lambda x, **how: torch.return_types.sort((x, torch.rand(x.shape).argsort(-1))))
        with pytest.raises(AssertionError):
            test_equal_scores_go_to_the_first_experts()
        return
    with pytest.raises(AssertionError):
        test_experts_are_a_loop_over_tokens("in runs")
