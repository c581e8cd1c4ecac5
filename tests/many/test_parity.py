"""Every layout is the same training as one process: loss, every gradient on every rank, weights after many steps, moments, in float64.

The cases below reach every technique, every ZeRO stage, every family and every pair of axes; the whole matrix of benchmarks/parity.py
takes minutes and is marked `long`, with fewer steps than the benchmark.
"""

import json
from dataclasses import replace
from itertools import product

import pytest
from forked import DEADLINE_S, Truth, Worlds
from parity import EDGES, FAMILIES, KINDS, LIMIT, STAGED, STEPS, eight, largest, layouts_of, main, staged, trial_of
from trial import Trial

from longshift.layout.layout import Layout
from longshift.layout.legal import faults

FEWER, FEWEST = 4, 2
CASES = (
    ("llama", "dp2.z2", STEPS),
    ("gpt2", "tp2", STEPS),
    ("llama-tied", "pp2.dp2.z1", FEWER),
    ("qwen3", "u2.z3", FEWER),
    ("llama-6-heads", "ring2.z1", FEWER),
    ("llama", "dp3.z1", FEWER),
    ("llama", "dp4.z3", FEWER),
    ("llama", "dp8", FEWER),
    ("llama", "pp2.gpipe.recompute-full", FEWER),
    ("llama", "pp2.v2.z2", FEWER),
    ("llama", "pp4", FEWER),
    ("llama", "pp2:4-1.z3.recompute-full", FEWER),
    ("llama-tied", "pp2:1-2-1-1.v2.z1", FEWER),
    ("llama", "ring4.z2", FEWER),
    ("llama", "u4.z1", FEWER),
    ("llama", "pp2.dp2.tp2.z3", FEWER),
    ("llama", "pp2.u2.recompute-full", FEWER),
    ("llama-tied", "dp2.recompute-full.z3", FEWER),
    ("llama-tied", "pp2.v2", FEWER),
    ("llama-tied", "pp2.tp2.z3", FEWER),
    ("llama-tied", "dp2.u2.z1", FEWER),
    ("llama-6-heads", "tp4.z2", FEWER),
    ("llama-6-heads", "u4", FEWER),
    ("llama-6-heads", "u2.tp2.z1", FEWER),
    ("gpt2", "pp2.ring2.z2", FEWER),
    ("gpt2", "dp2.tp2.z3", FEWER),
    ("gpt2", "pp3.gpipe.z1", FEWER),
    ("qwen3", "tp4", FEWER),
    ("qwen3", "ring2.u2.z2", FEWER),
    ("qwen3", "ring2.tp2", FEWER),
    ("qwen3", "dp2.ring2.recompute-full.z1", FEWER),
    ("qwen3", "ring2.u2.recompute-selective", FEWER),
    ("llama-6-heads", "pp2.u2.recompute-selective.z2", FEWER),
    ("gpt2", "tp2.recompute-selective", FEWER),
    ("qwen3", "ring2.u2.recompute-full.z3", FEWER),
    ("llama-6-heads", "u2.tp2.recompute-full.disk", FEWER),
    ("granite", "tp2.z1", FEWER),
    ("granite", "ring2.u2.recompute-full.z2", FEWER),
    ("granite", "pp2.chunk13.disk", FEWER),
    ("smollm3", "pp2.dp2.z2", FEWER),
    ("smollm3", "u2.tp2.recompute-full", FEWER),
    ("smollm3", "ring2.chunk13.disk", FEWER),
    ("phi3", "tp2.z2", FEWER),
    ("phi3", "ring2.u2.z3", FEWER),
    ("phi3", "pp2.tp2.chunk13.every1", FEWER),
    ("olmo2", "tp2.z1", FEWER),
    ("olmo2", "u2.tp2.recompute-full", FEWER),
    ("olmo2", "pp2.ring2.z3", FEWER),
    ("olmo2", "tp2.chunk13.disk.fpdt", FEWER),
    ("mistral", "ring2.u2.z1", FEWER),
    ("mistral", "ring2.chunk7.disk.kv-offload.fpdt", FEWER),
    ("qwen2", "pp2.tp2", FEWER),
    ("qwen2", "u2.chunk13.every2", FEWER),
    ("gemma2", "tp2.z3.recompute-selective", FEWER),
    ("gemma2", "ring2.chunk16.disk", FEWER),
    ("gemma3", "dp2.ring2.recompute-full", FEWER),
    ("gemma3", "pp2.chunk13.disk.kv-offload", FEWER),
    ("mixtral", "tp2.z1", FEWER),
    ("mixtral", "dp2.u2.z3", FEWER),
    ("mixtral", "ring2.chunk13.disk.kv-offload", FEWER),
    ("mixtral", "pp2.tp2.chunk16.fpdt", FEWER),
    ("qwen3-moe", "dp3.z2", FEWER),
    ("qwen3-moe", "u2.tp2.recompute-full.disk", FEWER),
    ("qwen3-moe", "pp2.ring2.recompute-selective.z3", FEWER),
    ("qwen3-moe", "dp2.z3.vertical.recompute-full", FEWER),
    ("masked", "dp2.z2", FEWER),
    ("masked", "pp2.u2.recompute-full", FEWER),
    ("masked", "ring2.tp2.z3", FEWER),
    ("masked", "u2.chunk13.disk.fpdt", FEWER),
    ("lora", "dp2.z3", FEWER),
    ("lora", "pp2.tp2.recompute-full", FEWER),
    ("lora", "tp4.z1", FEWER),
    ("lora", "u2.chunk13.disk", FEWER),
    ("lora", "ring2.tp2.chunk16.fpdt", FEWER),
    ("lora-gpt2", "tp2.z2", FEWER),
    ("lora-gpt2", "pp2.u2.z3", FEWER),
    ("lora-gpt2", "ring2.chunk13.host.kv-offload", FEWER),
    ("lora-phi3", "dp2.tp2.z3", FEWER),
    ("lora-phi3", "pp2.v2.recompute-selective", FEWER),
    ("frozen", "dp2.tp2.z2", FEWER),
    ("frozen", "pp2.ring2.z3", FEWER),
    ("frozen", "pp2.chunk13.disk.kv-offload", FEWER),
    ("frozen", "u4.recompute-full.disk", FEWER),
    ("sgd", "dp2.z2", FEWER),
    ("sgd", "pp2.tp2.z1", FEWER),
    ("sgd", "u2.chunk13.disk", FEWER),
    ("float8", "tp2.z2", FEWER),
    ("float8", "dp2.z3", FEWER),
    ("float8", "u2.recompute-full", FEWER),
    ("float8", "ring2.tp2.z1", FEWER),
    ("float8", "pp2.dp2", FEWER),
    ("float8", "u2.chunk13.disk", FEWER),
    ("float8", "tp2.chunk16.fpdt", FEWER),
    ("float8-gpt2", "tp2.z3.recompute-full", FEWER),
    ("float8-gpt2", "pp2.ring2.recompute-selective", FEWER),
    ("llama", "chunk13.disk.kv-offload", FEWER),
    ("llama", "chunk16.fpdt", FEWER),
    ("llama", "pp2.recompute-full.disk", FEWER),
    ("llama", "pp2.recompute-full.keep1.disk", FEWER),
    ("llama-tied", "dp2.z3.vertical", FEWER),
    ("rows", "dp2.tp2.z2", FEWER),
    ("rows", "u2.chunk16.disk", FEWER),
    ("qwen3", "u2.tp2.vertical.recompute-full.disk", FEWER),
    ("lora", "ring2.z2.vertical.recompute-full", FEWER),
    ("qwen3", "u2.recompute-full.keep2.disk", FEWER),
    ("gemma3", "pp2.gpipe.recompute-full.keep1", FEWER),
    ("llama", "pp2.z2.chunk13.disk.fpdt", FEWER),
    ("llama-tied", "dp2.z3.chunk24", FEWER),
    ("llama-6-heads", "u2.z1.chunk24.disk.kv-offload.fpdt", FEWER),
    ("gpt2", "ring2.chunk24.host.kv-offload", FEWER),
    ("qwen3", "tp2.chunk24.disk.every1", FEWER),
    ("llama-tied", "u2.z3.chunk16.every2.disk", FEWER),
    ("gpt2", "pp2.chunk13.every2.kv-offload.host", FEWER),
)
AXES = ("tp", "ulysses", "ring", "dp", "pp")

# Tokens of the documents of each step. Of the three length groups between EDGES, the second and the third are empty once.
SWITCHED_LENGTHS = ((1, 2, 5, 9, 14, 30, 40), (1, 2, 33, 25), (1, 2, 8, 17), (1, 2, 12, 38, 21))
SWITCHED = (
    # groups, ranks a node, bytes a bucket, bytes that may go ahead, planner
    ("llama", "dp4 > dp2.tp2 > tp4", 2, 20_000, 1 << 30, "fan_out"),
    ("llama-tied", "dp4.z2 > u4 > pp2.tp2", 2, 1 << 20, 0, "fan_out"),
    ("llama-tied", "pp4 > ring2.tp2.z3 > dp2.pp2", 4, 20_000, 30_000, "algorithm1"),
    ("llama", "dp2.tp2.z3 > pp2.dp2.z2 > dp4.z3", 2, 5_000, 1 << 30, "algorithm1"),
    ("gpt2", "dp2.u2 > tp2.ring2.recompute-full > pp2.v2.tp2", 2, 20_000, 1 << 30, "fan_out"),
    ("qwen3", "dp8 > pp2.dp2.tp2 > dp2.tp4", 4, 50_000, 1 << 30, "fan_out"),
    ("llama", "dp2 > pp2.chunk7.fpdt > u2.chunk24.disk", 1, 1 << 20, 1 << 30, "fan_out"),
    ("olmo2", "dp4 > dp2.tp2.z3 > pp2.u2", 2, 20_000, 1 << 30, "fan_out"),
    ("gemma3", "dp4 > ring2.tp2.z1 > u4.chunk13.disk", 2, 20_000, 1 << 30, "fan_out"),
    ("phi3", "tp4 > dp4.z2 > ring2.tp2", 2, 20_000, 0, "fan_out"),
    ("qwen3-moe", "dp4 > dp2.tp2.z3 > u4.chunk13.disk", 2, 20_000, 1 << 30, "fan_out"),
    ("lora", "dp4 > dp2.tp2.z3 > u4.chunk13.disk", 2, 20_000, 1 << 30, "fan_out"),
    ("lora-gpt2", "dp4.z3 > tp4 > pp2.u2", 2, 5_000, 1 << 30, "algorithm1"),
    ("frozen", "pp4 > dp4.z2 > ring2.tp2", 2, 20_000, 0, "fan_out"),
    ("sgd", "dp4 > dp2.tp2.z3 > u4.chunk13.disk", 2, 20_000, 1 << 30, "fan_out"),
    ("float8", "dp4 > dp2.tp2.z3 > ring2.u2.chunk13.disk", 2, 20_000, 1 << 30, "fan_out"),
)


def switched_trial(family: str, **options: object) -> Trial:
    return replace(trial_of(family, len(SWITCHED_LENGTHS), **options), lengths=SWITCHED_LENGTHS)


def differences(worlds: Worlds, truth: Truth, family: str, layout: str, steps: int, home_cut: str | None = None) -> dict[str, float]:
    trial = trial_of(family, steps)
    size = max(Layout.parse(text).world for text in (layout, home_cut) if text)
    arguments = {"trial": trial.to_json(), "layout": layout, "path": truth(trial), "home_cut": home_cut}
    found = worlds(size).call("trial:compare", DEADLINE_S, **arguments)
    return {kind: largest(answer[kind] for answer in found) for kind in KINDS}


@pytest.mark.parametrize(("family", "groups", "per_node", "bucket_bytes", "ahead_bytes", "planner"), SWITCHED)
def test_a_step_that_switches_is_one_process(
    worlds: Worlds, truth: Truth, family: str, groups: str, per_node: int, bucket_bytes: int, ahead_bytes: int, planner: str
):
    path = truth(switched_trial(family))
    trial = switched_trial(family, edges=EDGES, bucket_bytes=bucket_bytes, ahead_bytes=ahead_bytes, planner=planner)
    world = worlds(Layout.parse(groups.split(" > ")[0]).world)
    arguments = {"trial": trial.to_json(), "layout": groups, "path": path, "per_node": per_node}
    found = world.call("trial:compare", DEADLINE_S, **arguments)
    assert all(largest(answer[kind] for answer in found) <= LIMIT for kind in KINDS), found


@pytest.mark.parametrize(
    ("family", "groups"),
    [("llama", "dp4 > dp2.tp2 > tp4"), ("llama", "dp2 > dp2 > tp2"), ("llama-tied", "dp2 > pp2.chunk7.fpdt > u2.chunk24.disk")],
)
def test_groups_with_packs_of_their_own_are_one_process(worlds: Worlds, truth: Truth, family: str, groups: str):
    trial = switched_trial(family, edges=EDGES, packs=(31, 64))
    world = worlds(Layout.parse(groups.split(" > ")[0]).world)
    arguments = {"trial": trial.to_json(), "layout": groups, "path": truth(switched_trial(family)), "per_node": 2}
    found = world.call("trial:compare", DEADLINE_S, **arguments)
    assert all(largest(answer[kind] for answer in found) <= LIMIT for kind in KINDS), found


@pytest.mark.parametrize(("family", "layouts"), STAGED[:5:2] + STAGED[7:8])
def test_stages_are_one_process(worlds: Worlds, truth: Truth, family: str, layouts: str):
    """Each stage begins with the checkpoint of the one before it, in another layout, with other positions and larger packs."""
    trial = staged(family, 6)
    world = worlds(Layout.parse(layouts.split(" ")[0]).world)
    arguments = {"trial": trial.to_json(), "layout": layouts, "path": truth(trial), "per_node": 2}
    found = world.call("trial:compare", DEADLINE_S, **arguments)
    assert all(largest(answer[kind] for answer in found) <= LIMIT for kind in KINDS), found
    without = replace(trial, stages=())  # positions tell
    found = worlds(1).call("trial:compare", DEADLINE_S, trial=without.to_json(), layout="dp1", path=truth(trial))
    assert family == "gpt2" or found[0]["grad"] > 1e-3


def test_compiled_arithmetic_is_one_process(worlds: Worlds, truth: Truth):
    """`train.compile`: norms of the stream and of heads, with 1 + weight, gelu, rotary embedding, in packs and chunks of many lengths. The
    reference is not compiled."""
    trial, groups = trial_of("gemma3", FEWER, edges=EDGES, compile=True), "dp2 > pp2.recompute-full > u2.chunk13"
    found = worlds(2).call("trial:compare", 3 * DEADLINE_S, trial=trial.to_json(), layout=groups, path=truth(trial))
    assert all(largest(answer[kind] for answer in found) <= LIMIT for kind in KINDS), found


@pytest.mark.parametrize(("family", "layout", "steps"), CASES)
def test_a_layout_is_one_process(worlds: Worlds, truth: Truth, family: str, layout: str, steps: int):
    found = differences(worlds, truth, family, layout, steps)
    assert all(found[kind] <= LIMIT for kind in KINDS), found


@pytest.mark.parametrize(("layout", "home_cut"), [("tp2", "dp2.z1"), ("pp2", "u2.z3"), ("dp2.tp2", "pp2.dp2.z2")])
def test_a_layout_may_visit_a_home_cut_for_another(worlds: Worlds, truth: Truth, layout: str, home_cut: str):
    found = differences(worlds, truth, "llama-tied", layout, FEWER, home_cut)
    assert all(found[kind] <= LIMIT for kind in KINDS), found


def test_a_cut_inside_a_block_rounds_otherwise(worlds: Worlds, truth: Truth):
    """Why `layout.legal` refuses it."""
    trial = trial_of("float8", FEWER)
    trial = replace(trial, spec=replace(trial.spec, ffn=200))
    assert "mlp.gate_proj" in faults(trial.spec, Layout.parse("tp2"), None, float8=True)[0]
    found = worlds(2).call("trial:compare", DEADLINE_S, trial=trial.to_json(), layout="tp2", path=truth(trial))
    assert found[0]["grad"] > 1e3 * LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_matrix(worlds: Worlds, truth: Truth, family: str):
    found = {str(layout): differences(worlds, truth, family, str(layout), FEWEST) for layout in layouts_of(family)}
    wrong = {layout: row for layout, row in found.items() if not all(row[kind] <= LIMIT for kind in KINDS)}
    assert len(found) > 30
    assert not wrong


def test_switched_lengths_leave_a_group_empty_in_some_step_and_fill_it_in_another():
    groups = zip((0, *EDGES), (*EDGES, 64))
    filled = [[any(low < length <= high for length in lengths) for lengths in SWITCHED_LENGTHS] for low, high in groups]
    assert [sum(steps) for steps in filled] == [4, 3, 3]


def test_the_cases_reach_everything():
    """Stages of ZeRO, families, recomputation, pipeline orders, every pair of axes, and every way to stream."""
    layouts = [Layout.parse(text) for _, text, _ in CASES]
    assert all(not faults(FAMILIES[family], Layout.parse(text), None, float8=eight(family)) for family, text, _ in CASES)
    assert {family for family, _, _ in CASES} == set(FAMILIES)
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert {(layout.order, layout.virtual) for layout in layouts if layout.pp > 1} == {("1f1b", 1), ("1f1b", 2), ("gpipe", 1)}
    streamed = [layout for layout in layouts if layout.chunk]
    assert {(layout.schedule, layout.kv) for layout in streamed} == {*product(("stream", "fpdt"), ("device", "offload"))}
    assert {layout.every for layout in streamed} >= {0, 1, 2}
    met = {(a, b) for layout in layouts for a in AXES for b in AXES if a < b and min(layout.degree(a), layout.degree(b)) > 1}
    assert met == {(a, b) for a in AXES for b in AXES if a < b}


def test_the_benchmark_prints_its_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """One family and few layouts of it: all of the script but its size."""
    monkeypatch.setattr("parity.FAMILIES", {"llama": FAMILIES["llama"]})
    monkeypatch.setattr("parity.QUICK_STEPS", 2)
    monkeypatch.setattr("parity.LAYOUTS", ("dp2", "pp2"))
    monkeypatch.setattr("parity.MORE", ())
    monkeypatch.setattr("parity.RECOMPUTED", ())
    monkeypatch.setattr("parity.STREAMED", ())
    monkeypatch.setattr("parity.OFFLOADED", ())
    monkeypatch.setattr("parity.STREAMED_GROUPS", ())
    monkeypatch.setattr("parity.SWITCHED", (("dp2", "tp2"),))
    monkeypatch.setattr("parity.STAGED", (("llama", "dp2 | tp2 | pp2"),))
    monkeypatch.setattr("parity.HOMES", ("dp2.z1",))
    monkeypatch.setattr("parity.PACKED", ("dp1", *["dp2.z1"] * 6, "tp2"))
    monkeypatch.setattr("sys.argv", ["parity.py", "--json", "--quick"])
    assert main() == 0
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == "parity"
    assert {"machine", "versions", "commit"} <= set(report)
    rows, packed = report["rows"][:-3], report["rows"][-3:]
    formats = [(row["family"].removeprefix("llama, moments: "), row["layout"], row["identical"]) for row in packed]
    assert formats == [("float8", "dp1", True), ("bf16", "dp2.z1", True), ("float8", "tp2", True)]
    assert [(row["family"], row["layout"]) for row in rows] == [
        ("llama", "dp2"),
        ("llama", "pp2.z3"),
        ("llama", "dp2.z1 > tp2.z2 > tp2.z3"),
        ("llama, 3 stages", "dp2 | tp2 | pp2"),
        ("llama, home: host", "dp2.z1"),
    ]
    assert rows[-1]["bitwise"]
    assert {row["dtype"] for row in rows} == {"float64"}
    worst = max(row[kind] for row in rows for kind in KINDS)
    assert 0 < worst <= LIMIT
    assert report["summary"].items() >= {"worst": worst, "rows": 8, "bitwise": True, "identical": True, "limit": LIMIT}.items()
