"""Stages: a run whose documents, lengths, positions, layout and learning rate change is one training, wherever it is interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import longshift as ls
from longshift.config_file import parse_config
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import CheckpointError, UsageError
from longshift.trainer.build_run import stages_of
from longshift.trainer.metrics import read_rows

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/a.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 32
  overlong: split
  cache: {place}/cache
train:
  tokens_per_step: 96
  lr: 1e-3
  precision: float64
  warmup: 2
  stages:
    - {{steps: 3}}
    - {{steps: 2, train.tokens_per_step: 64, layout: {second}}}
    - {{steps: 3, data.max_len: 64, model.rope: {{type: theta, theta: 5e5}}, train.lr: 5e-4, train.warmup: 1, layout: {third}}}
    - {{steps: 2, data.max_len: 64, data.train: [{{path: {place}/b.txt}}], train.lr: 2e-4, train.schedule: constant}}
layout: {first}
save: {{dir: {run}, every: 2}}
"""
ALONE = {"first": "dp1", "second": "dp1", "third": "dp1"}
TWO = {"first": "dp2.z2", "second": "tp2", "third": "[{upto: 32, use: dp2.z3}, {upto: 64, use: u2.chunk16.disk}]"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("corpus")
    text = Path(json.__file__).read_text()
    for name, part in (("a", text[:3000]), ("b", text[3000:5000])):
        (place / f"{name}.txt").write_text(part)
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    return place


def config_of(place: Path, run: Path, **layouts: str) -> str:
    return CONFIG.format(place=place, run=run, **(ALONE | layouts))


def rows_of(run: Path) -> list[dict]:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "cursor")
    return [{key: row[key] for key in keys} for row in read_rows(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def straight(place) -> list[dict]:
    """Every step of the run in one process, without a stop."""
    run = place / "straight"
    for _ in ls.train(parse_config(config_of(place, run))):
        pass
    return rows_of(run)


def test_stages_change_what_they_say_and_nothing_else(straight):
    assert [row["step"] for row in straight] == list(range(1, 11))
    assert [row["tokens"] >= 96 for row in straight] == [True] * 3 + [False] * 2 + [True] * 5
    cursors = [row["cursor"] for row in straight]
    assert cursors[:5] == sorted(cursors[:5])  # the second stage goes on with the documents of the first
    assert cursors[5] < cursors[4]  # the third cuts them otherwise and begins anew, as the fourth does with others
    assert cursors[8] < cursors[7]
    rates = [row["lr"] for row in straight]
    assert rates[:2] == [5e-4, 1e-3]  # the run's warmup
    assert rates[2:5] == sorted(rates[2:5], reverse=True)  # the run's schedule goes on in the second stage
    assert rates[5] == 5e-4  # the third has its own, after a warmup of one step
    assert rates[8:] == [2e-4, 2e-4]


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_left_and_resumed_anywhere_is_the_same(place, straight, tmp_path, every):
    config = parse_config(config_of(place, tmp_path / "run"))
    resume = False
    while True:
        for seen, _ in enumerate(ls.train(config, resume=resume), 1):
            if seen == every:
                break
        else:
            break
        resume = True
    assert rows_of(tmp_path / "run") == straight


def test_two_ranks_train_as_one_process_does(place, straight, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(config_of(place, tmp_path / "run", **TWO))
    done = subprocess.run([sys.executable, "-m", "longshift.cli", "train", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "longshift: stage 3 of 4, steps 6 to 8: documents to 64, 96 tokens a step, dp2.z3 to 32 > u2.chunk16.disk to 64" in done.stderr
    for one, two in zip(straight, rows_of(tmp_path / "run"), strict=True):
        assert two == {key: pytest.approx(value, rel=1e-11) for key, value in one.items()}


def test_each_stage_is_a_run_that_goes_on_from_the_one_before(place, straight, tmp_path):
    """The first two stages are a plain run, of which tokens_per_step changes on resume."""
    stages = list(stages_of(parse_config(config_of(place, tmp_path / "run"))))
    assert [(stage.begin, stage.end) for stage in stages] == [(0, 3), (3, 5), (5, 8), (8, 10)]
    plain = "\n".join(line for line in config_of(place, tmp_path / "run").splitlines() if "- {" not in line)
    plain = plain.replace("  stages:", "  steps: 10")
    for step in ls.train(parse_config(plain)):
        if step.step == 3:
            break
    for step in ls.train(parse_config(plain, ["train.tokens_per_step=64"]), resume=True):
        if step.step == 5:
            break
    assert rows_of(tmp_path / "run") == straight[:5]


def test_an_export_has_the_positions_of_the_stage_that_it_reached(place, tmp_path):
    config = parse_config(config_of(place, tmp_path / "run"))
    found = []
    for last in (5, 6):
        for step in ls.train(config, resume=last > 5):
            if step.step == last:
                break
        done = subprocess.run(
            [sys.executable, "-m", "longshift.cli", "export", str(tmp_path / "run"), "--to", str(tmp_path / f"{last}")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        exported = json.loads((tmp_path / f"{last}/config.json").read_text())
        found.append(exported.get("rope_theta") or exported["rope_parameters"]["rope_theta"])
    assert found == [10000.0, 5e5]


def test_a_stage_that_is_under_way_keeps_its_data(place, tmp_path):
    for step in ls.train(parse_config(config_of(place, tmp_path / "run"))):
        if step.step == 9:
            break
    with pytest.raises(CheckpointError, match="the data changed"):
        list(ls.train(parse_config(config_of(place, tmp_path / "run").replace("b.txt", "a.txt")), resume=True))
    longer = parse_config(config_of(place, tmp_path / "run").replace("{steps: 2, data.max_len", "{steps: 3, data.max_len"))
    assert [step.step for step in ls.train(longer, resume=True)] == [10, 11]


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ("[{steps: 3, layout: dp4}]", r"train.stages.0: its layout has 4 ranks and the run's has 1; all need the same number"),
        ("[{steps: 3}, {steps: 3, train.warmup: 2}]", "train.stages.1: train.min_lr, warmup and schedule are of a stage that has train.lr"),
        (
            "[{steps: 3, data.max_len: 64, layout: [{upto: 64, use: dp1, pack: 32}]}]",
            r"train.stages.0.layout: pack 32 of upto 64 \(dp1\) does not hold the group's longest document",
        ),
        ("[{steps: 3, layout: auto}]", "layout: auto is chosen for a whole run"),
        ("[{steps: 3, layout: chunk-auto}]", "chunk-auto and recompute-auto are chosen for runs without stages"),
        (
            "[{steps: 3, train.seed: 1}]",
            "train.stages.0.train.seed: no such key; a stage has steps, data.max_len, .* and all else is the run's",
        ),
        ("[{steps: 3, train: {lr: 1e-3}}]", "train.stages.0.train: no such key; a stage has steps, data.max_len"),
        ("[{steps: 3, max_len: 64}]", "train.stages.0.max_len: no such key; it is data.max_len now"),
        ("[{steps: 3, data.max_len: many}]", "train.stages.0.data.max_len: .*'many'"),
        ("[{steps: 3, data.train: [{pth: a.txt}]}]", r"train.stages.0.data.train.0.pth: no such key; did you mean 'path'\?"),
        ("[5]", "train.stages.0: must be a section with the keys steps, data.max_len"),
        ("[{step: 3}]", r"train.stages.0.step: no such key; did you mean 'steps'\?"),
        ("[{steps: 3, data.max_len: 64, layout: [{upto: 32, use: dp1}]}]", "the last group, dp1, ends at 32 tokens"),
        ("[{steps: 3, model.rope: {type: theta}}]", "type: theta needs theta"),
        ("[]", "train: steps must be given"),
    ],
)
def test_stages_that_cannot_be(place, tmp_path, stages, why):
    lines = [line for line in config_of(place, tmp_path / "run").splitlines() if "- {" not in line]
    text = "\n".join(lines).replace("  stages:", f"  stages: {stages}")
    with pytest.raises(UsageError, match=why):
        parse_config(text)
    with pytest.raises(UsageError, match="leave steps out, or change a stage's"):
        parse_config(config_of(place, tmp_path / "run"), ["train.steps=7"])
