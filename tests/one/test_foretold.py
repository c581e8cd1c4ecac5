"""Steps that are predicted before they are trained: how much time that takes, which band it says; and which steps of a run calibrate."""

import itertools
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from longshift.cluster import files
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.documents.batch import Batches
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import UsageError
from longshift.trainer import step_measurements as trainer_measured
from longshift.trainer.corpus import open_corpus
from longshift.trainer.metrics import MetricsLog, StepMetrics
from longshift.trainer.step_measurements import LEAST, MOST, StepForecast, read_measurements

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {folder}/*.txt}}]
  tokenizer: {folder}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {folder}/cache
train: {{tokens_per_step: 256, steps: 60, lr: 1e-3, precision: float32}}
layout: dp1
save: {{dir: {folder}/run}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder, text = tmp_path_factory.mktemp("foretold"), Path(json.__file__).read_text()
    for n in range(8):
        (folder / f"{n}.txt").write_text(text[500 * n : 500 * n + 50 * (n + 1)])
    train_tokenizer(iter([text]), 300).save(str(folder / "tokenizer.json"))
    return parse_config(CONFIG.format(folder=folder))


def batches_of(config: Config) -> Batches:
    return Batches(open_corpus(config)[1], config.train.seed, config.train.tokens_per_step, config.data.max_len, config.data.overlong)


def lengths_of(config: Config) -> list[int]:
    """Lengths of the documents of the first step."""
    return [len(document.ids) for document in batches_of(config).at(0).documents]


def metrics(step: int, seconds: float, tokens: int = 256, cursor: int = 0) -> StepMetrics:
    return StepMetrics(step, 1.0, 1.0, 1e-3, tokens, tokens, 1, seconds, 1.0, 1.0, 1, cursor, layout="dp1", first=step == 1)


def test_predicting_takes_no_more_than_its_share_of_the_run(config):
    foretold, lengths = StepForecast(config, files.preset("cpu"), [0.1]), lengths_of(config)
    said = []
    for step, took in enumerate((1e-9, 1e-9, 1e4, 1.0), 1):
        foretold.predict(lengths)
        said.append(foretold.beside(metrics(step, took)).predicted_seconds is not None)
    assert said == [False, True, False, True]  # the first allocates; predicting the second took longer than all steps until then


def test_the_band_is_that_of_the_steps_before(config):
    foretold, lengths = StepForecast(config, files.preset("cpu"), [0.1] * 200), lengths_of(config)
    foretold.beside(metrics(1, 1e6))
    bands = []
    for step in range(2, 30):
        foretold.predict(lengths)
        told = foretold.beside(metrics(step, 1e6 * step))
        assert told.predicted_seconds is not None
        assert told.predicted_seconds < 60
        bands.append(told.band)
    assert bands[0] == pytest.approx(0.1)
    assert bands[1] > 1e3  # one of the last eight was far off
    assert bands[-1] > bands[1]


def run_of(config: Config, folder: Path, steps: int, seconds=lambda step: 0.5) -> list[StepMetrics]:
    """The metrics of a run of `config` that took so many seconds a step."""
    log, batches, cursor, rows = MetricsLog(folder / "metrics.jsonl"), batches_of(config), 0, []
    for step in range(1, steps + 1):
        batch = batches.at(cursor)
        cursor = batch.next_cursor
        rows.append(metrics(step, seconds(step), batch.tokens, cursor))
        log.write(rows[-1])
    return rows


def test_steps_are_evenly_chosen_with_their_documents(config, tmp_path):
    rows = run_of(config, tmp_path, 60, seconds=lambda step: step / 10)
    found = read_measurements(tmp_path, config)
    assert len(found) == MOST
    assert (found[0].step, found[-1].step) == (2, 60)
    assert {after.step - before.step for before, after in pairwise(found)} <= {2, 3}
    assert all(sum(one.lengths) == rows[one.step - 1].tokens and one.seconds == one.step / 10 for one in found)


def test_steps_that_allocate_and_steps_of_another_config_are_left_out(config, tmp_path):
    rows = run_of(config, tmp_path, 8)
    changed = [replace(row, first=row.step in (1, 4), tokens=row.tokens + (row.step == 6)) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in changed))
    assert [one.step for one in read_measurements(tmp_path, config)] == [2, 3, 5, 7, 8]
    (tmp_path / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in changed[:LEAST]))
    with pytest.raises(UsageError, match="has 2 steps to calibrate by, without those that allocate memory, and 4 are needed"):
        read_measurements(tmp_path, config)


def test_calibrating_says_how_long_it_takes_and_plays_fewer_steps_where_all_take_too_long(config, tmp_path, monkeypatch):
    """On a clock that says 5 s whenever it is asked again: one play of 24 steps seems to take that, 20 plays 100 s; of 60 s, 14 steps."""
    run_of(config, tmp_path, 60)
    told, now_s = [], itertools.count(0, 5.0)
    monkeypatch.setattr(trainer_measured, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    found = trainer_measured.fit_measurements(tmp_path, config, files.preset("cpu"), told.append)
    number = len(found.steps)
    assert LEAST <= number < MOST
    assert f"playing {number} steps on the clock takes about 60 s" in told
    assert any(re.fullmatch(r"after \d+ s: played \d+ times, of 20 at the most", line) for line in told)
    monkeypatch.setattr(trainer_measured, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert len(trainer_measured.fit_measurements(tmp_path, config, files.preset("cpu")).steps) == MOST


def test_a_row_keeps_what_was_predicted():
    row = replace(metrics(2, 0.5), predicted_seconds=0.4, band=0.07, loss=math.nan)
    assert json.loads(row.to_json())["loss"] is None
    again = StepMetrics.from_json(json.loads(row.to_json()))
    assert (again.predicted_seconds, again.band, again.layout, again.first) == (0.4, 0.07, "dp1", False)
    assert "predicted_seconds" not in json.loads(metrics(2, 0.5).to_json())
