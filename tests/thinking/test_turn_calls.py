"""Kernels and collectives of a turn as functions of tokens and mesh, beside recordings of other lengths and of the mesh itself."""

from dataclasses import replace

import numpy as np
import pytest

from longshift.layout.layout import Layout
from longshift.model.packed_attention import EVEN
from longshift.schedule.sequence import token_order
from longshift.simulate import turn_calls as module
from longshift.simulate.turn_calls import DEGREES, TurnCalls, TurnKind, exact_calls, turn_calls
from longshift.spec.families import preset
from longshift.spec.model import ModelSpec, Rope
from longshift.weigh.recorder import Matmul, TurnProfile
from longshift.weigh.turn_profile import RankSetup, loss_turn, unit_turn

WINDOWED = ModelSpec(
    "gemma2", 1009, 64, 4, 8, 4, 16, 176, 1 << 18, rope=Rope(), sliding_window=512, full_blocks=(2, 4), norm_place="both", qk_norm=True
)
MODELS = {"llama": preset("llama-3-8b"), "qwen3": preset("qwen3-0.6b"), "windowed": WINDOWED}
PHASES = ("pass", "forward", "backward")


def kind_of(spec: ModelSpec, mesh: tuple[int, int, int], phase: str, transport: str = "nccl") -> TurnKind:
    element_bytes = 2 if transport == "nccl" else 4
    return TurnKind(spec, mesh, "block", "block", phase, False, element_bytes, transport, False, False)  # pyright: ignore[reportArgumentType]


def at(coefficients: np.ndarray, tokens: int) -> np.ndarray:
    return (coefficients * float(tokens) ** DEGREES).sum(-1)


def total_flops(calls: TurnCalls, tokens: int) -> float:
    batch, rows, inner, columns, _ = np.moveaxis(at(calls.matmuls, tokens), -1, 0)
    return float((calls.counts * 2 * batch * rows * inner * columns).sum())


def recorded_flops(profile: TurnProfile) -> int:
    """FLOPs of matmuls."""
    return sum(2 * call.batch * call.rows * call.inner * call.columns for call in profile.calls if isinstance(call, Matmul))


def compare_with_recorded(kind: TurnKind, tokens: int) -> tuple[TurnCalls, TurnCalls]:
    """A kind's calls, and those of a recording of so many tokens, after matmuls, bytes and kernels have been compared."""
    tp, ulysses, ring = kind.mesh
    layout = Layout(tp=tp, ulysses=ulysses, ring=ring)
    setup = RankSetup(kind.spec, layout, layout.coord(0), kind.compute_bytes, kind.transport)
    profile = unit_turn(setup, token_order([tokens], ring, ulysses * tp), "block", kind.phase)
    calls, recorded = turn_calls(kind), exact_calls(kind.mesh, profile.calls)
    assert total_flops(calls, tokens) == recorded_flops(profile)
    assert float(at(calls.pass_bytes, tokens)) == pytest.approx(float(at(recorded.pass_bytes, 0)), rel=1e-9)
    assert calls.kernels == recorded.kernels
    return calls, recorded


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_calls_at_another_length_are_those_recorded_there(model: str, mesh: tuple[int, int, int], transport: str):
    spec, (tp, ulysses, ring) = MODELS[model], mesh
    tokens = 3 * 1024 * tp * ulysses * ring
    for phase in PHASES:
        calls, recorded = compare_with_recorded(kind_of(spec, mesh, phase, transport), tokens)
        assert calls.collectives.keys() == recorded.collectives.keys()
        for key, row in calls.collectives.items():
            assert row[0] == recorded.collectives[key][0]
            assert float(at(row[1:], tokens)) == float(at(recorded.collectives[key][1:], 0))


def with_experts(experts: int, top_k: int) -> ModelSpec:
    return replace(preset("tiny-qwen3-moe"), experts=experts, top_k=top_k)


@pytest.mark.parametrize(("experts", "top_k"), [(7, 3), (20, 8)])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_calls_of_experts_in_float32_are_those_recorded_at_another_length(experts: int, top_k: int, mesh: tuple[int, int, int]):
    """A multiple of 7 and 5 tokens on each rank, so that all experts have as many rows."""
    spec, (_, ulysses, ring) = with_experts(experts, top_k), mesh
    tokens = 1400 * ulysses * ring
    for phase in PHASES:
        compare_with_recorded(kind_of(spec, mesh, phase)._replace(compute_bytes=4), tokens)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (7, 3), (160, 8), (128, 8), (63, 6), (4095, 2)])
@pytest.mark.parametrize("compute_bytes", [2, 4, 8])
def test_the_pack_to_record_is_short_where_time_goes_with_its_square(experts: int, top_k: int, compute_bytes: int):
    """By definition attention of 7 times the tokens plays 49 times the matmuls."""
    spec = with_experts(experts, top_k)
    kind = kind_of(spec, (1, 1, 1), "pass")._replace(compute_bytes=compute_bytes)
    prime = module._token_prime(spec, kind.mesh)
    rows = module._rows_per_prime(kind, prime)
    assert rows * top_k % experts == 0
    assert rows % 2 == 0
    assert rows % prime
    if compute_bytes == 2:
        assert rows % EVEN == 0
    else:
        assert rows <= max(2 * EVEN, 2 * experts)


@pytest.mark.parametrize("model", ["tiny-llama", "llama-3-8b"])
def test_calls_of_a_loss_of_other_rows_are_those_recorded_there(model: str):
    spec, layout, tokens = replace(preset(model), loss_rows=1024), Layout(tp=2), 2 * 640
    kind = TurnKind(spec, (2, 1, 1), "head", "block", "pass", False, 2, "nccl", False, False)
    profile = loss_turn(RankSetup(spec, layout, layout.coord(0), 2, "nccl"), token_order([tokens], 1, 2), 0)
    calls, recorded = turn_calls(kind), exact_calls((2, 1, 1), profile.calls)
    assert total_flops(calls, tokens) == recorded_flops(profile)
    assert float(at(calls.pass_bytes, tokens)) == pytest.approx(float(at(recorded.pass_bytes, 0)), rel=1e-9)
    assert calls.kernels == recorded.kernels


@pytest.mark.parametrize("ulysses", [3, 5, 6, 7, 11, 12])
def test_traffic_of_ranks_that_share_heads_unevenly_goes_with_tokens(ulysses: int):
    for phase in ("pass", "backward"):
        calls = turn_calls(kind_of(MODELS["llama"], (1, ulysses, 1), phase))
        assert calls.collectives
        for row in calls.collectives.values():
            assert row[1] == row[3] == 0.0
            assert row[2] > 0.0


def differences(spec: ModelSpec, mesh: tuple[int, int, int], phase: str) -> dict[str, float]:
    """Relative ones, of calls that are derived from those of other meshes and of calls that are recorded."""
    kind, tokens = kind_of(spec, mesh, phase), 4096 * mesh[0] * mesh[1] * mesh[2]
    derived, recorded = turn_calls(kind), module._mean_calls(kind)
    values = {
        "flops": [total_flops(calls, tokens) for calls in (derived, recorded)],
        "passes": [float(at(calls.pass_bytes, tokens)) for calls in (derived, recorded)],
        "kernels": [calls.kernels for calls in (derived, recorded)],
        "attention": [float(np.abs(calls.attention).sum()) for calls in (derived, recorded)],
        "traffic": [float(sum(at(row[1:], tokens) for row in calls.collectives.values())) for calls in (derived, recorded)],
    }
    return {name: abs(ours - theirs) / theirs for name, (ours, theirs) in values.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", [(1, 1, 6), (1, 2, 8), (2, 2, 5)], ids=str)
def test_calls_of_a_longer_ring_are_those_recorded_on_it(model: str, mesh: tuple[int, int, int]):
    most = 0.1 if model == "windowed" else 1e-9  # a window ends inside another piece where pieces are shorter
    for phase in ("pass", "backward"):
        assert max(differences(MODELS[model], mesh, phase).values()) <= most


@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 8, 2), (2, 4, 1)], ids=str)
def test_calls_of_more_ulysses_ranks_are_those_recorded_on_them(mesh: tuple[int, int, int]):
    """But for cutting and joining what each rank gets: one more small kernel a rank."""
    for phase in ("pass", "backward"):
        found = differences(MODELS["llama"], mesh, phase)
        assert found.pop("passes") <= 0.04
        assert found.pop("kernels") <= 0.27
        assert max(found.values()) <= 1e-9


def test_a_ring_without_its_further_steps_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_longer_ring", lambda two, four, ring: replace(four, mesh=(*four.mesh[:2], ring)))
    turn_calls.cache_clear()
    found = differences(MODELS["llama"], (1, 1, 8), "backward")
    turn_calls.cache_clear()
    assert found["kernels"] > 0.1
    assert found["flops"] > 0.1
