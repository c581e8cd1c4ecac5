"""A run that an earlier version began goes on: its config is read in today's keys. old_run.yaml was written at commit b15afd6."""

import json
from pathlib import Path

import pytest

import longshift as ls
from longshift.config_file import load_config, parse_config
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.trainer.metrics import read_rows

OLD = Path(__file__).with_name("old_run.yaml")
TODAY = """
model: {preset: tiny-llama}
data:
  train: [{path: PLACE/a.txt}, {path: PLACE/pairs.jsonl, format: {prompt: question, completion: answer}}]
  tokenizer: PLACE/tokenizer.json
  max_len: 32
  overlong: split
  cache: PLACE/cache
train:
  tokens_per_step: 96
  lr: 1e-3
  precision: float64
  warmup: 2
  stall_timeout: 45
  stages:
    - {steps: 3}
    - {steps: 2, train.tokens_per_step: 64, data.max_len: 64, data.train: [{path: PLACE/body.jsonl, format: {text: body}}],
       model.rope: {type: theta, theta: 5e5}, train.lr: 5e-4, train.schedule: constant}
save: {dir: PLACE/run, every: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("old")
    text = Path(json.__file__).read_text()
    (place / "a.txt").write_text(text[:3000])
    pairs = [{"question": text[at : at + 40], "answer": text[at + 40 : at + 90]} for at in range(0, 3000, 90)]
    bodies = [{"body": text[at : at + 200]} for at in range(0, 3000, 200)]
    for name, records in (("pairs", pairs), ("body", bodies)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    return place


def losses(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["lr"], row["tokens"]) for row in read_rows(run / "metrics.jsonl")]


def test_a_run_of_an_earlier_version_goes_on(place: Path, capsys: pytest.CaptureFixture):
    config = parse_config(TODAY.replace("PLACE", str(place)))
    for _ in ls.train(parse_config(TODAY.replace("PLACE", str(place)), [f"save.dir={place}/straight"])):
        pass
    for step in ls.train(config):
        if step.step == 3:
            break
    file = place / "run/config.yaml"
    file.write_text(OLD.read_text().replace("PLACE", str(place)))
    assert load_config(file) == config
    assert [step.step for step in ls.train(file, resume=True)] == [4, 5]
    assert losses(place / "run") == losses(place / "straight")
    said = capsys.readouterr().err
    assert said.count("longshift: stream.ahead was 2 in the run: an object is always fetched one operation ahead: leave it out") == 1
    assert "the run's settings stay" not in said
    assert parse_config(file.read_text()) == config  # in today's keys from now on
