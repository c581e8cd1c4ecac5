"""`longshift check`: on which processes and devices it runs, and what becomes of layouts that are not numbers yet."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutants
import numpy as np
import pytest
import torch
from forked import Worlds

from longshift import cli
from longshift.config_file import parse_config
from longshift.dist import fork
from longshift.dist.fork import SpawnedWorld
from longshift.dist.world import World
from longshift.documents.batch import Document
from longshift.errors import OutOfMemoryError, UsageError
from longshift.layout.layout import Layout
from longshift.model.loss import IGNORE
from longshift.spec.families import preset, to_hugging_face
from longshift.trainer import check as trainer_check
from longshift.trainer import check_run, step_trace
from longshift.trainer.check import leaks
from longshift.trainer.check_run import (
    CHUNKS,
    LEAST,
    LONGEST,
    SmallRun,
    _in_proportion,
    check,
    not_exercised,
    write_reference,
)
from longshift.trainer.step_trace import timeline
from longshift.workload.groups import length_groups

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/text.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: {max_len}
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 256, steps: 1, lr: 1e-3, precision: float32}}
save: {{dir: {place}/run}}
"""


@pytest.fixture
def place(worlds: Worlds, tmp_path: Path) -> Path:
    """A text, a tokenizer for it and a config."""
    worlds(1).call("checkpoints:make_data", place=str(tmp_path))
    (tmp_path / "run.yaml").write_text(CONFIG.format(place=tmp_path, max_len=512))
    return tmp_path


@pytest.fixture
def run_check(place, monkeypatch, capsys) -> Callable[..., tuple[dict, str]]:
    """run_check(*arguments): what the command prints, on a machine that shows no GPU and was not measured."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(check_run, "LONGEST", 32)
    monkeypatch.setattr(trainer_check, "PROBES", 2)

    def run(*arguments: str) -> tuple[dict, str]:
        monkeypatch.setattr(sys, "argv", ["longshift", "check", "run.yaml", "--json", *arguments])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        out, err = capsys.readouterr()
        return json.loads(out), err

    return run


def test_a_chunk_that_is_not_chosen_yet_is_chosen(run_check, place):
    (place / "tier").mkdir()
    found, said = run_check("--against", "chunk-auto.disk", "stream.folder=tier")
    assert [row["layout"] for row in found["rows"]] == ["dp1", "chunk512.disk"]
    assert "chunk-auto.disk: chunk512.disk: " in said
    assert found["loss"] < 1e-12
    assert found["grad"] < 1e-12
    assert found["leaked_positions"] == 0


def ways_of(*ways: str) -> list[list[Layout]]:
    """Ways to compute, with layouts joined by " > "."""
    return [[Layout.parse(word) for word in way.split(" > ")] for way in ways]


def waits_in(world: World, config: str, scratch: str) -> list[str]:
    """The folders of the tiers that are made where a config is checked."""
    small = SmallRun.of(parse_config(config), ways_of("chunk64.disk"))
    write_reference(world, config, [["chunk64.disk"]], scratch)
    _, player = small.build(small.groups([Layout.parse("chunk64.disk")]), world, Path(scratch))
    return [str(runner.tier.file.folder) for runner in player.runners.values() if runner.tier]


def test_a_layout_that_is_checked_waits_in_the_runs_own_folder(worlds, place, tmp_path_factory):
    scratch, tier = str(tmp_path_factory.mktemp("scratch")), f"{place}/tier"
    Path(tier).mkdir()
    text = CONFIG.format(place=place, max_len=512)
    assert worlds(1).call("test_check:waits_in", config=text + f"stream: {{folder: {tier}}}", scratch=scratch) == [[tier]]
    assert worlds(1).call("test_check:waits_in", config=text, scratch=scratch) == [[scratch]]


def test_every_part_of_every_layout_has_work(place):
    """Groups, packs and chunks in the run's own proportion; of every group each replica gets several packs, with its longest document."""
    text = CONFIG.format(place=place, max_len=2048) + "layout: [{upto: 512, use: dp4, pack: 2K}, {upto: 2K, use: dp2.pp2}]"
    run = parse_config(text)
    (way, _) = ways = ways_of("dp4 > dp2.pp2", "chunk2K.disk")
    small = SmallRun.of(run, ways)
    groups = small.groups(way)
    assert [(edge.upto, edge.pack) for edge in groups] == [(LONGEST // 4, LONGEST), (LONGEST, 2 * LONGEST)]
    lengths = small.lengths()
    found = length_groups(lengths, groups, run.spec)
    assert [max(lengths[d] for pack in group.packs for d in pack) for group in found] == [LONGEST // 4, LONGEST]
    for group, micros in zip(found, (2, 3)):
        assert all(len(share) >= micros for share in group.shares)
    (chunked,) = small.groups([Layout.parse("chunk2K.disk")])
    assert chunked.use.chunk == LONGEST // CHUNKS


def test_sequences_that_many_ranks_share_are_long_enough(place):
    run = parse_config(CONFIG.format(place=place, max_len=4096))
    small = SmallRun.of(run, [[Layout.parse("dp8.pp4.u4.ring16")]])
    assert small.longest == LEAST * 64
    assert SmallRun.of(run, [[Layout.parse("dp16.pp4")]]).longest < LONGEST // 2


STAGES = "[{steps: 1}, {steps: 1, data.max_len: 1K, layout: ring2}]"


def test_windows_and_blocks_of_rows_are_in_proportion(place):
    """Documents are longer than the small window where the run's are; a pack has several blocks of rows where the run's has."""
    run = parse_config(CONFIG.format(place=place, max_len=4096), [f"model={window_model(place)}"])
    way = [Layout()]
    small = SmallRun.of(run, [way])
    assert small.spec.sliding_window == 512 * LONGEST // 4096 < LONGEST
    assert small.spec.loss_rows == 2 * LONGEST // CHUNKS, "8,192 rows are in blocks"
    short = parse_config(CONFIG.format(place=place, max_len=512), [f"model={window_model(place)}"])
    assert SmallRun.of(short, [way]).spec.sliding_window == 512
    assert SmallRun.of(short, [way]).spec.loss_rows == short.spec.loss_rows
    assert not_exercised([(run, [way])]) == ["train.precision: float32 (float64 instead)", OWN]
    assert not_exercised([(short, [way])])[2:] == ["windows of 512 tokens (documents have 512 at the most)"]


OWN = "train.lr, train.warmup, train.schedule (a short cosine of its own)"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.precision=bf16", "train.precision: bf16 (float64 instead)"),
        ("home.moments=bf16", "home.moments: bf16 (kept whole)"),
        ("wire.gradients=bf16", "wire.gradients: bf16 (sent whole)"),
        ("wire.weights=float8", "wire.weights: float8 (sent whole)"),
        ("data.held_out=0.1", "validation"),
        ("train.stages=[{steps: 1}, {steps: 1}]", "train.stages: the checkpoint between two stages (each begins with weights of its own)"),
    ],
)
def test_what_is_not_exercised_is_named(place, override, line):
    staged = ["train.steps=2"] if "stages" in override else []
    run = parse_config(CONFIG.format(place=place, max_len=512), ["layout=dp2.z1", "train.precision=float64", *staged, override])
    assert set(not_exercised([(part, [[Layout()]]) for part in run.parts])) == {line, OWN}


def window_model(place: Path) -> str:
    """A model with windows of 512 tokens, as a config has it."""
    folder = place / "window"
    folder.mkdir(exist_ok=True)
    mistral = to_hugging_face(preset("tiny-llama")) | {"model_type": "mistral", "sliding_window": 512}
    del mistral["architectures"]
    (folder / "config.json").write_text(json.dumps(mistral))
    return f"{{path: {folder}, init: scratch}}"


MISTAKES = {  # a mutant of the product; a layout that it is in, or what else the config has
    "stale_fetch": ("chunk512.disk",),
    "average_for_sum": ("dp2",),
    "never_gathered_again": ("dp2.z3",),
    "uniform_attention_to_earlier_chunks": ("chunk512.disk",),
    "ulysses_keys_for_values": ("u2",),
    "window_one_too_wide": ("dp1", "model={path: window, init: scratch}", "data.max_len=4K"),
    "rows_of_the_last_block_lost": ("dp1", "data.max_len=32K"),
    "ring_last_step_dropped": ("dp2", f"train.stages={STAGES}", "train.steps=2", "layout=dp2"),
    "early_updates_kept": ("dp1", "home=disk"),
    "adapter_scaled_by_alpha": ("dp1", "model.lora={rank: 4, alpha: 8}"),
    "label_lost_at_a_cut": ("dp1", "data.max_len=64"),
    "answers_and_prompts_learned": ("dp1", "data.train=[{path: answers.jsonl, format: {prompt: q, completion: a}}]"),
    "clip_by_local_norm": ("dp2.z1",),
}


@pytest.fixture
def checked(place, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """checked(layout, *overrides): the exit code of `longshift check --against` that layout, and what it prints."""
    window_model(place)
    (place / "answers.jsonl").write_text("".join(json.dumps({"q": f"What is {n}?", "a": f"It is {n}."}) + "\n" for n in range(50)))
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(check_run, "LONGEST", 32)
    monkeypatch.setattr(trainer_check, "PROBES", 1)

    def run(against: str, *overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["longshift", "check", "run.yaml", "--against", against, *overrides])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().out

    return run


@pytest.mark.parametrize("mutant", MISTAKES)
def test_a_mistake_of_the_product_fails(checked, mutant):
    with mutants.mistaken(mutant):
        code, said = checked(*MISTAKES[mutant])
    assert code == 1
    assert "FAIL: " in said


@pytest.mark.parametrize("how", dict.fromkeys(MISTAKES.values()), ids=" ".join)
def test_without_a_mistake_it_passes(checked, how):
    code, said = checked(*how)
    assert code == 0
    assert "PASS: " in said


@pytest.mark.parametrize("preset_name", ["tiny-llama", "tiny-qwen3-moe"])
def test_documents_that_see_each_other_leak_with_and_without_experts(checked, preset_name, monkeypatch):
    monkeypatch.setattr(trainer_check, "PROBES", 6)
    with mutants.mistaken("no_document_mask"):
        _, said = checked("dp1", f"model={{preset: {preset_name}}}")
    assert ", 0 leaked positions" not in said
    code, said = checked("dp1", f"model={{preset: {preset_name}}}")
    assert (code, ", 0 leaked positions" in said) == (0, True)


@pytest.mark.parametrize(
    ("preset_name", "change", "has_leaked"),
    [
        ("tiny-llama", 4.5e-16, True),
        ("tiny-qwen3-moe", 4.5e-16, False),
        ("tiny-qwen3-moe", 1e-9, True),
        ("tiny-qwen3-moe", float("nan"), True),
    ],
)
def test_a_leak_is_any_change_without_experts_and_more_than_rounding_with_them(monkeypatch, preset_name, change, has_leaked):
    document = Document(np.arange(4), np.array([1, 2, 3, IGNORE]))
    losses = iter([6.0, 6.0 * (1 + change)] * trainer_check.PROBES)
    monkeypatch.setattr(trainer_check, "_loss", lambda player, documents: next(losses))
    case: Any = SimpleNamespace(spec=preset(preset_name), batches=[SimpleNamespace(documents=[document] * 2)])
    player: Any = None
    assert set(leaks(player, case, 0)) == {has_leaked}


def test_a_model_without_room_is_refused_before_it_starts(place, monkeypatch):
    config = CONFIG.format(place=place, max_len=512).replace("tiny-llama", "llama-3-70b")
    monkeypatch.setattr(fork, "ForkedWorld", None)
    with pytest.raises(OutOfMemoryError, match=r"one process needs \d{4}\.\d GiB for tensors, and "):
        check([(parse_config(config), [[Layout.parse("tp2")]])])


@pytest.mark.parametrize("layout", ["dp2.tp2.z3", "pp2.chunk128.disk"])
def test_a_step_is_recorded_beside_what_was_predicted_of_it(run_check, layout):
    found, _ = run_check("--timeline", f"layout={layout}")
    assert found["within"]
    assert [rank["rank"] for rank in found["ranks"]] == list(range(Layout.parse(layout).world))
    assert all(0.98 <= rank["ratio"] <= 1 and rank["operations"] > 20 for rank in found["ranks"])
    assert all(row["same"] and row["recorded"] <= row["predicted"] for row in found["differences"])


def test_bytes_that_nobody_predicted_are_told(place, monkeypatch):
    """A rank keeps 64 MiB more than its program says."""
    kept, native = [], step_trace.build_player
    monkeypatch.setattr(step_trace, "build_player", lambda *how: kept.append(torch.empty(1 << 26, dtype=torch.uint8)) or native(*how))
    found = timeline(parse_config(CONFIG.format(place=place, max_len=512)))
    assert not found.within
    assert found.ranks[0].ratio > 1
    assert found.differences[0].difference > 1 << 25


def test_documents_are_cut_in_as_many_chunks_as_the_runs():
    for text, max_len, chunk in (("chunk64K", 1 << 20, 16), ("chunk100", 1000, 26), ("u8.chunk8", 4096, 8), ("chunk2K", 2048, 64)):
        assert _in_proportion(Layout.parse(text), 256 / max_len, 256).chunk == chunk
    assert _in_proportion(Layout.parse("dp2"), 256 / (1 << 20), 256) == Layout.parse("dp2")


class OnCpu(SpawnedWorld):
    """Ranks that should have a GPU each have the CPU, as there is none."""

    def __init__(self, size: int, device: str):
        super().__init__(size, "cpu")
        asked.append((size, device))


asked: list[tuple[int, str]] = []


def test_with_a_gpu_ranks_are_spawned_and_the_reference_is_not_on_it(place, monkeypatch):
    asked.clear()
    monkeypatch.setattr(fork, "SpawnedWorld", OnCpu)
    monkeypatch.setattr(fork, "ForkedWorld", None)
    found = check([(parse_config(CONFIG.format(place=place, max_len=32)), [[Layout.parse("dp2")]])], "cuda")
    assert sorted(asked) == [(1, "cpu"), (2, "cuda")]
    assert (found.loss < 1e-12, found.grad < 1e-12, found.leaked_positions, found.passed) == (True, True, 0, True)


def test_a_spawned_rank_tells_its_fault_and_ends_with_its_world():
    with SpawnedWorld(1) as world:
        with pytest.raises(UsageError, match="config is not YAML"):
            world.call("longshift.trainer.check_run:write_reference", 300.0, config="{", ways=[], scratch="")
        assert world._pids == world._children == []


def test_more_ranks_than_gpus_are_refused_before_anything_starts(place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"^2 ranks need a GPU each, and this machine has 1: name a layout of fewer ranks, or "):
        check([(parse_config(CONFIG.format(place=place, max_len=32)), [[Layout()], [Layout.parse("dp2")]])], "cuda")
    assert not (place / "cache").exists()
