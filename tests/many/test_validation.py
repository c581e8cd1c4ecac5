"""Validation: the loss of documents that are not trained on, under every layout the same, which leaves the training as it is."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import longshift as ls
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents.batch import Batches
from longshift.documents.micro import micro_batch
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.documents.validation_set import ValidSet
from longshift.errors import CheckpointError, UsageError
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.model.decoder import Decoder, Ops
from longshift.state.checkpoint import BEST, Checkpoint
from longshift.trainer.corpus import open_corpus
from longshift.trainer.metrics import StepMetrics, read_rows
from longshift.workload.order import held_out

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/*.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 48
  overlong: split
  held_out: 0.25
  cache: {place}/cache
train: {{tokens_per_step: 96, steps: 6, lr: 1e-3, precision: float64}}
validation: {{every: 2, tokens: 300}}
layout: {layout}
save: {{dir: {run}, every: 100, keep: 2}}
"""
TWO = ("dp2.z3", "pp2.recompute-full", "[{upto: 16, use: dp2}, {upto: 32, use: tp2.z1}, {upto: 48, use: u2.chunk16.disk.kv-offload.fpdt}]")
SAME = ("step", "loss", "grad_norm", "tokens", "cursor")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Forty documents of all lengths."""
    place, text = tmp_path_factory.mktemp("corpus"), Path(json.__file__).read_text()
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    for number, length in enumerate(np.random.default_rng(0).integers(4, 160, 40)):
        (place / f"{number:02}.txt").write_text(text[100 * number : 100 * number + length])
    return place


def config_of(place: Path, run: Path, layout: str = "dp1", *overrides: str) -> Config:
    return parse_config(CONFIG.format(place=place, run=run, layout=layout), overrides)


def trained(config: Config, **how) -> list[StepMetrics]:
    return list(ls.train(config, **how))


def rows_of(run: Path, *keys: str) -> list[list]:
    return [[row.get(key) for key in keys] for row in read_rows(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(place) -> list[StepMetrics]:
    return trained(config_of(place, place / "alone"))


def test_the_loss_is_that_of_the_plain_decoder(place, alone):
    """After the last step, document by document, with the weights of the checkpoint."""
    config = config_of(place, place / "alone")
    saved = Checkpoint.latest(place / "alone", World.alone())
    model = Decoder(config.spec).load({p.name: saved.read("master", p.name, Box.whole(p.shape)) for p in config.spec.params})
    _, cache = open_corpus(config)
    valid, ops, device = ValidSet.of(cache, 48, "split", 300, 96, 0.25), Ops(config.spec), torch.device("cpu")

    def plain(documents) -> float:
        return sum(float(model(micro_batch(config.spec, [d], Layout(), 0, torch.float64, device), ops).detach()) for d in documents)

    expected = valid.losses(plain)
    assert [(part.upto, part.targets) for part in alone[-1].valid] == [(upto, targets) for upto, _, targets in expected]
    assert [part.loss for part in alone[-1].valid] == pytest.approx([loss for _, loss, _ in expected], rel=1e-12)
    total = sum(loss * targets for _, loss, targets in expected) / sum(targets for *_, targets in expected)
    assert alone[-1].valid_loss == pytest.approx(total, rel=1e-12)
    assert len(expected) > 2


def test_when_and_which_checkpoints_stay(place, alone):
    assert [metrics.step for metrics in alone if metrics.valid_loss is not None] == [2, 4, 6]
    losses = {metrics.step: metrics.valid_loss for metrics in alone if metrics.valid_loss is not None}
    best = min(losses, key=losses.__getitem__)
    assert (place / "alone/BEST").read_text() == f"step-{best}\n"
    assert (place / f"alone/checkpoints/step-{best}").is_dir()


def test_training_is_the_same_with_and_without(place, alone, tmp_path):
    without = CONFIG.replace("validation: {{every: 2, tokens: 300}}\n", "").format(place=place, run=tmp_path / "run", layout="dp1")
    rare = parse_config(without, ["validation={every: 100}"])
    assert [[getattr(m, key) for key in SAME] for m in trained(rare)] == [[getattr(m, key) for key in SAME] for m in alone]


@pytest.mark.parametrize("layout", TWO)
def test_layouts_agree(place, alone, tmp_path, layout):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(place=place, run=tmp_path / "run", layout=layout))
    done = subprocess.run([sys.executable, "-m", "longshift.cli", "train", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "valid   loss" in done.stdout
    for one, row in zip(alone, read_rows(tmp_path / "run/metrics.jsonl"), strict=True):
        two = StepMetrics.from_json(row)
        assert [getattr(two, key) for key in SAME] == pytest.approx([getattr(one, key) for key in SAME], rel=1e-11)
        assert [(p.upto, p.targets) for p in two.valid] == [(p.upto, p.targets) for p in one.valid]
        assert [p.loss for p in two.valid] == pytest.approx([p.loss for p in one.valid], rel=1e-11)


def test_what_is_held_out_is_not_trained_on(place, tmp_path):
    config = config_of(place, tmp_path)
    _, cache = open_corpus(config)
    batches = Batches.of(config, cache)
    held = ValidSet.of(cache, 48, "split", 10**9, 96, 0.25)
    valid = {int(held.spans.document[span]) for ranges in held.batches.values() for batch in ranges for span in batch}
    assert valid == set(np.flatnonzero(held_out(np.arange(len(cache)), 0.25)).tolist())
    assert valid.isdisjoint(batches.spans.document.tolist())
    assert valid | set(batches.spans.document.tolist()) == set(range(len(cache)))
    assert batches.fingerprint != Batches(cache, 0, 96, 48, "split").fingerprint
    shares = [held_out(np.arange(100_000), share) for share in (0.01, 0.5)]
    assert [mask.mean() for mask in shares] == pytest.approx([0.01, 0.5], rel=0.05)
    assert not (shares[0] & ~shares[1]).any()  # a larger share holds the smaller one


def test_documents_of_their_own(place, tmp_path):
    config = config_of(place, tmp_path / "run", "dp1", "data.held_out=null", f"data.valid=[{{path: {place}/0*.txt}}]")
    found = trained(config)[-1]
    assert found.valid_loss is not None
    assert sum(part.targets for part in found.valid) > 100


def test_a_run_ends_when_it_becomes_no_better_and_can_go_on(place, tmp_path):
    """With a learning rate that ruins it."""
    overrides = "train.lr=0.3", "train.steps=20", "validation={every: 1, tokens: 300, patience: 3}"
    found = trained(config_of(place, tmp_path / "run", "dp1", *overrides))
    losses = [metrics.valid_loss for metrics in found]
    best = 1 + losses.index(min(losses))
    assert len(found) == best + 3 < 20
    assert [metrics.early for metrics in found] == [False] * (best + 2) + [True]
    kept = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert {f"step-{best}", f"step-{best + 3}"} <= kept
    done = subprocess.run(
        [sys.executable, "-m", "longshift.cli", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--best"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again = trained(config_of(place, tmp_path / "run", "dp1", *overrides), resume=True)
    assert [(metrics.step, metrics.early) for metrics in again] == [(best + 4, True)]  # still no better


def test_a_run_that_is_resumed_remembers_its_best(place, alone, tmp_path):
    config, resume = config_of(place, tmp_path / "run"), False
    while True:
        for _ in ls.train(config, resume=resume):
            break
        else:
            break
        resume = True
    keys = (*SAME, "valid_loss")
    assert rows_of(tmp_path / "run", *keys) == rows_of(place / "alone", *keys)
    assert (tmp_path / "run/BEST").read_text() == (place / "alone/BEST").read_text()


def staged(place: Path, run: Path, *validation: str) -> Config:
    """A run of two stages of three steps, of which the second ruins what the first has learned; validated after each step."""
    stages = "train.stages=[{steps: 3}, {steps: 3, train.lr: 0.5, train.schedule: constant}]"
    return config_of(place, run, "dp1", stages, f"validation={{{', '.join(('every: 1', 'tokens: 300', *validation))}}}")


def test_the_best_checkpoint_is_of_all_stages(place, tmp_path):
    """In a run that goes through, in one that is left after the fourth step, and in one whose second stage ends early."""
    found = trained(staged(place, tmp_path / "run"))
    losses = [metrics.valid_loss for metrics in found]
    best = 1 + losses.index(min(losses))
    assert best <= 3 < min(losses[3:])
    assert (tmp_path / "run/BEST").read_text() == f"step-{best}\n"
    assert (tmp_path / f"run/checkpoints/step-{best}").is_dir()

    for metrics in ls.train(staged(place, tmp_path / "left")):
        if metrics.step == 4:
            break
    trained(staged(place, tmp_path / "left"), resume=True)
    assert (tmp_path / "left/BEST").read_text() == f"step-{best}\n"

    early = trained(staged(place, tmp_path / "early", "patience: 1"))
    second = [metrics.valid_loss for metrics in early[3:]]
    assert all(metrics.step <= 3 or not metrics.early for metrics in early[:-1])
    assert second == losses[3 : 3 + len(second)]
    assert (tmp_path / "early/BEST").read_text() == f"step-{best}\n"


def test_patience_that_ends_with_a_stage_ends_the_run(place, tmp_path):
    overrides = "train.lr=0.3", "train.schedule=constant", "validation={every: 1, tokens: 300, patience: 2}"
    steps = len(trained(config_of(place, tmp_path / "run", "dp1", *overrides, "train.steps=20")))
    assert steps < 20
    stages = f"train.stages=[{{steps: {steps}}}, {{steps: 2}}]"
    found = trained(config_of(place, tmp_path / "staged", "dp1", *overrides, f"train.steps={steps + 2}", stages))
    assert [metrics.early for metrics in found] == [False] * (steps - 1) + [True]


def test_what_cannot_be(place, tmp_path):
    for overrides, why in (
        (("data.held_out=null",), "validation needs documents"),
        ((f"data.valid=[{{path: {place}}}]",), "name one of valid, documents of their own, and held_out"),
        (("data.held_out=0.7",), "less than or equal to 0.5"),
    ):
        with pytest.raises(UsageError, match=why):
            config_of(place, tmp_path / "run", "dp1", *overrides)
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        Checkpoint.latest(tmp_path, World.alone(), BEST)
