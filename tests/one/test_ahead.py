"""The next step's batch is made while this step computes, and nothing else changes."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import longshift as ls
from longshift.background import in_background
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents.batch import Batches
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.documents.tokens import TokenCache
from longshift.errors import DataError
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.stream.disk_file import DiskFile
from longshift.trainer.build_run import build_player, build_state, open_data
from longshift.trainer.metrics import StepMetrics

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/a.jsonl}}]
  valid: [{{path: {place}/b.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 32
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 96, steps: 6, lr: 1e-3, warmup: 2, precision: {precision}}}
layout: {layout}
validation: {{every: 2, tokens: 64}}
save: {{dir: {run}, every: 2, keep: 9}}
"""
GROUPS = "[{upto: 12, use: dp1}, {upto: 32, use: chunk8.disk}]"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place, text = tmp_path_factory.mktemp("corpus"), Path(json.__file__).read_text()
    lines = [text[start : start + 10 + start % 90] for start in range(0, 4000, 60)]
    (place / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (place / "b.txt").write_text(text[4000:5000])
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    return place


def config_of(place: Path, run: Path, layout: str = "dp1", precision: str = "float64") -> Config:
    return parse_config(CONFIG.format(place=place, run=run, layout=layout, precision=precision))


def one_by_one(config: Config, run: Path) -> Iterator[tuple[float, float, int]]:
    """Loss, gradient norm and cursor of each step, with each batch drawn when its step begins."""
    world = World.alone()
    batches, state = open_data(config, world)[0], build_state(config, world, run)
    player = build_player(config, world, state, run)
    for _ in range(config.train.steps):
        outcome = train_step(state, batches.at(state.cursor), player)
        yield outcome.loss, outcome.grad_norm, state.cursor


def told(step: StepMetrics) -> tuple[float, float, int]:
    return step.loss, step.grad_norm, step.cursor


def until_refused(config: Config, seen: list[tuple[float, float, int]]) -> str:
    """Train, and leave in `seen` what steps say, until the data are refused: why."""
    try:
        for step in ls.train(config):
            seen.append(told(step))
    except DataError as fault:
        return str(fault)
    return ""


def threads() -> list[threading.Thread]:
    """Of work that goes on: a thread ends a moment after its result is there."""
    found = [thread for thread in threading.enumerate() if thread.name == "longshift-background"]
    for thread in found:
        thread.join(1.0)
    return [thread for thread in found if thread.is_alive()]


@pytest.mark.parametrize(("layout", "precision"), [("dp1", "float64"), (GROUPS, "float64"), ("dp1", "fp16")])
def test_steps_and_checkpoints_are_those_of_batches_drawn_one_by_one(place, tmp_path, layout, precision):
    config = config_of(place, tmp_path / "run", layout, precision)
    steps = list(ls.train(config))
    assert [told(step) for step in steps] == list(one_by_one(config, tmp_path))
    assert not threads()
    for step in steps[1::2]:
        manifest = json.loads((tmp_path / f"run/checkpoints/step-{step.step}/manifest.json").read_text())
        assert manifest["facts"]["cursor"] == step.cursor


def test_a_run_leaves_no_thread_or_file_of_its_disk_tier(place, tmp_path, monkeypatch):
    files, make = list[DiskFile](), DiskFile.__init__
    monkeypatch.setattr(DiskFile, "__init__", lambda self, *arguments: (make(self, *arguments), files.append(self))[0])
    list(ls.train(config_of(place, tmp_path / "run", GROUPS)))
    assert [file.subject for file in files] == ["offload"]
    assert all(file._file.closed for file in files)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("longshift-offload")]


def test_a_step_is_drawn_in_another_thread_while_the_one_before_computes(place, tmp_path, monkeypatch):
    drawn, seen = list[tuple[str, int]](), list[str]()
    native, play, begun = Batches.at, Player.play, threading.Event()

    def at(batches: Batches, cursor: int):
        drawn.append((threading.current_thread().name, cursor))
        begun.set()
        return native(batches, cursor)

    def playing(player: Player, *how):
        if not seen:  # validations play too
            seen.append("in time" if begun.wait(60) else "late")
        return play(player, *how)

    monkeypatch.setattr(Batches, "at", at)
    steps = []
    for step in ls.train(config_of(place, tmp_path / "run")):
        steps.append(step)
        if step.step == 1:
            monkeypatch.setattr(Player, "play", playing)
            begun.clear()
        if step.step == 3:
            break
    assert [cursor for _, cursor in drawn] == [0, *(step.cursor for step in steps)]
    assert [name for name, _ in drawn[1:]] == ["longshift-background"] * 3
    assert seen == ["in time"]


def test_an_error_in_a_document_is_raised_at_the_step_that_it_belongs_to(place, tmp_path, monkeypatch):
    straight = list(ls.train(config_of(place, tmp_path / "straight")))
    config = config_of(place, tmp_path / "run")
    batches, native = open_data(config, World.alone())[0], TokenCache.tokens
    span = batches.order[straight[3].cursor]  # the first document of step 5
    bad = int(batches.spans.document[span]), int(batches.spans.start[span])

    def tokens(cache: TokenCache, document: int, start: int = 0, stop: int | None = None):
        if (document, start) == bad:
            raise DataError("this document cannot be read")
        return native(cache, document, start, stop)

    monkeypatch.setattr(TokenCache, "tokens", tokens)
    seen = list[tuple[float, float, int]]()
    assert until_refused(config, seen) == "this document cannot be read"
    assert seen == [told(step) for step in straight[:4]]
    assert (tmp_path / "run/LATEST").read_text() == "step-4\n"
    assert not threads()
    monkeypatch.undo()
    rest = [told(step) for step in ls.train(config, resume=True)]
    assert rest == [told(step) for step in straight[4:]]


def test_a_run_that_is_left_ends_its_thread_and_keeps_the_cursor_of_its_last_step(place, tmp_path):
    config = config_of(place, tmp_path / "run")
    with closing(ls.train(config)) as steps:
        first = next(steps)
    assert not threads()
    facts = json.loads((tmp_path / "run/checkpoints/step-1/manifest.json").read_text())["facts"]
    assert facts["cursor"] == first.cursor
    rest = [told(step) for step in ls.train(config, resume=True)]
    assert [told(first), *rest] == list(one_by_one(config, tmp_path))


def test_work_in_the_background_gives_its_result_or_its_error():
    gate = threading.Event()
    waiting = in_background(lambda: gate.wait(60))
    assert not waiting.done()
    gate.set()
    assert waiting.result() is True
    assert waiting.done()
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 / 0).result()
