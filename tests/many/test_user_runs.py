"""Runs with code of the user's own: a tracker, a callback and documents, in one process and in switched and streamed layouts of two."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import longshift as ls
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import CheckpointError, UsageError
from longshift.trainer import loop
from longshift.trainer.build_run import stages_of
from longshift.trainer.metrics import StepMetrics, read_rows
from longshift.trainer.run_folder import prepare, read_config
from longshift.trainer.step_trace import StepTrace

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{train}]
  tokenizer: {place}/tokenizer.json
  max_len: 48
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 96, steps: 6, lr: 1e-3, precision: float64}}
layout: {layout}
save: {{dir: {run}, every: 100}}
"""
SWITCHED = "[{upto: 24, use: dp2}, {upto: 48, use: u2}]"
STREAMED = "[{upto: 24, use: dp2.z3}, {upto: 48, use: u2.chunk16.host}]"
LAYOUTS = ("dp1", SWITCHED, STREAMED)
TEXTS = "{path: PLACE/*.txt}"
SAME = ("loss", "grad_norm", "tokens", "cursor")
HOOKS = '''
"""What the tests' runs call."""
import json, os, pathlib, random, time
import numpy, torch

HERE = pathlib.Path(__file__).parent
print("imported")


def watch(metrics, control):
    print("after", metrics.step)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # nothing that training draws from
    control.log(twice=2 * metrics.loss, rank=os.environ.get("RANK", "0"))
    control.log(tensor=torch.tensor(metrics.step))
    if metrics.step == 2:
        control.save()
    if metrics.step == 4:
        control.stop("four are\\nenough")


def fails_at_3(metrics, control):
    control.log(seen=metrics.step)
    if metrics.step == 3 and not (HERE / "mended").exists():
        raise KeyError("no such thing")


def ends(metrics, control):
    raise SystemExit(0)


def logs(metrics, control):
    control.log(**json.loads((HERE / "numbers.json").read_text()))


def slow(metrics, control):
    if metrics.step == 2:
        time.sleep(12)


def stops_at_3(metrics, control):
    if metrics.step == 3:
        control.stop("three")


def documents():
    """The texts of the folder, as texts and as records."""
    with open(HERE / "calls", "a") as file:
        file.write("x")
    for number, path in enumerate(sorted(HERE.glob("*.txt"))):
        print("document", number)
        yield {"text": path.read_text()} if number % 2 else path.read_text()


def ids():
    """Tokens, of which every third is not learned."""
    for number in range(12):
        ids = [(7 * number + 3 * n) % 300 for n in range(8 + 5 * number)]
        yield {"ids": ids, "labels": [-100 if n % 3 == 0 else token for n, token in enumerate(ids)]}


def loud_loss(logits, labels):
    print("lost")
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


class LoudRule:
    moments = ()

    def update(self, weight, gradient, moments, step, lr, weight_decay):
        print("ruled")
        weight.sub_(lr * gradient)


class Mine:
    def __init__(self, folder, project):
        self.file = folder / f"{project}.jsonl"

    def write(self, **row):
        print(f"row {row}\\n", end="")  # in one write, as other threads tell things too
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\\n")

    def start(self, config, first):
        self.write(first=first, lr=config["train"]["lr"], rank=os.environ.get("RANK", "0"))

    def log(self, step, row):
        self.write(step=step, **row)

    def finish(self, ok):
        self.write(ok=ok)


class Broken(Mine):
    def __init__(self, folder, project):
        raise OSError("no server")


class Forgets(Mine):
    def log(self, step, row):
        if step == 2:
            raise ValueError("forgot")


class NoFinish:
    def start(self, config, first): ...
    def log(self, step, row): ...
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A working directory with a module, and twelve documents of all lengths."""
    place, text = tmp_path_factory.mktemp("place"), Path(json.__file__).read_text()
    (place / "hooks.py").write_text(HOOKS)
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    for number, length in enumerate(np.random.default_rng(0).integers(8, 150, 24)):
        (place / f"{number:02}.txt").write_text(text[100 * number : 100 * number + length])
    return place


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("hooks", None)


def config_of(place: Path, run: Path, layout: str = "dp1", *overrides: str, train: str = TEXTS) -> Config:
    return parse_config(CONFIG.format(place=place, run=run, layout=layout, train=train.replace("PLACE", str(place))), overrides)


def command(config: Config, *words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    """`longshift train` in a process of its own."""
    (cwd / "run.yaml").write_text(config.to_yaml())
    start = [sys.executable, "-c", "import sys; sys.path[0] = '/nowhere'; from longshift.cli import main; main()"]  # as the command starts
    ran = subprocess.run([*start, "train", "run.yaml", *words], capture_output=True, text=True, check=False, cwd=cwd, timeout=300)
    assert ran.returncode == code, ran.stderr
    return ran


def expect_same(steps: list[dict], straight: list[dict]) -> None:
    for mine, plain in zip(steps, straight, strict=True):
        for key in SAME:
            assert mine[key] == pytest.approx(plain[key], rel=1e-12), (mine["step"], key)


@pytest.fixture(scope="module")
def straight(place) -> list[dict]:
    """A run in one process without code of anyone's own."""
    for _ in ls.train(config_of(place, place / "straight")):
        pass
    return read_rows(place / "straight/metrics.jsonl")


# Callback


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_callback_logs_saves_and_stops_and_changes_no_number(place, straight, tmp_path, layout, capfd):
    run = tmp_path / "run"
    steps = list(ls.train(config_of(place, run, layout), on_step="hooks:watch"))
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.stopped for step in steps] == [None, None, None, "four are\nenough"]
    assert all(step.logged == {"twice": 2 * step.loss, "rank": 0, "tensor": step.step} for step in steps)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-4"]
    out, err = capfd.readouterr()
    assert "after 4" not in out
    assert err.count("after 4") == 1  # on one rank

    # The run keeps its callback when it goes on, in numbers as if it had never been stopped.
    rest = list(ls.train(read_config(run), resume=True))
    assert [step.step for step in rest] == [5, 6]
    rows = read_rows(run / "metrics.jsonl")
    expect_same(rows, straight)
    assert [row["twice"] for row in rows] == [2 * row["loss"] for row in rows]
    assert "logged" not in rows[0]


def test_what_a_loss_and_a_rule_print_is_not_on_standard_output(place, tmp_path):
    own = ("train.loss=hooks:loud_loss", "train.optimizer=hooks:LoudRule", "train.steps=2")
    config = config_of(place, tmp_path / "run", "dp2", *own)
    ran = command(config, "--json", cwd=place)
    assert [json.loads(line).get("step") for line in ran.stdout.splitlines()][:2] == [1, 2]
    assert {"lost", "ruled"} <= set(ran.stderr.splitlines())


def test_a_run_that_a_callback_stops_has_ended_well_and_says_why(place, tmp_path):
    config = config_of(place, tmp_path / "run", "dp2", "train.on_step=hooks:watch")
    ran = command(config, cwd=place)
    assert "ended by train.on_step ('four are\\nenough') at step 4 of 6" in ran.stdout
    assert "imported" not in ran.stdout
    ran = command(config, "--resume", "--json", cwd=place)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line.get("step") for line in lines] == [5, 6, None]
    assert lines[0]["twice"] == 2 * lines[0]["loss"]
    assert lines[-1]["finished"]
    assert "stopped" not in lines[-1]


@pytest.mark.parametrize("layout", ["dp1", SWITCHED])
def test_an_error_of_a_callback_names_it_and_loses_nothing(place, straight, tmp_path, layout):
    run = tmp_path / "run"
    config = config_of(place, run, layout, "train.on_step=hooks:fails_at_3")
    ran = command(config, cwd=place, code=2)
    line = next(n for n, text in enumerate(HOOKS.splitlines(), 1) if "no such thing" in text)
    (told,) = (text for text in ran.stderr.splitlines() if "on_step" in text)
    assert told == (
        f"longshift: train.on_step: hooks:fails_at_3 raised after step 3: KeyError: 'no such thing' ({place}/hooks.py, line {line}). "
        "The step is saved: mend the function and go on with --resume"
    )
    assert "Traceback" not in ran.stderr
    assert (run / "LATEST").read_text() == "step-3\n"
    (place / "mended").touch()
    try:
        command(config, "--resume", cwd=place)
    finally:
        (place / "mended").unlink()
    rows = read_rows(run / "metrics.jsonl")
    expect_same(rows, straight)
    assert [row["seen"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_an_error_of_a_function_that_was_given_is_kept(place, tmp_path):
    def mine(metrics, control):
        raise ValueError("of mine")

    config = config_of(place, tmp_path / "run")
    with pytest.raises(UsageError, match=r"test_user_runs:.*mine raised after step 1: ValueError: of mine \(.*test_user_runs.py") as told:
        list(ls.train(config, on_step=mine))
    assert isinstance(told.value.__cause__, ValueError)
    steps = list(ls.train(config, resume=True, on_step=lambda metrics, control: control.stop("two") if metrics.step == 2 else None))
    assert [(step.step, step.stopped) for step in steps] == [(2, "two")]


def test_system_exit_in_a_callback_is_an_error(place, tmp_path):
    with pytest.raises(UsageError, match="hooks:ends raised after step 1: SystemExit: 0"):
        list(ls.train(config_of(place, tmp_path / "run"), on_step="hooks:ends"))


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"loss": 1.0}, "ValueError: control.log: loss is a name of the step's own metrics; take another"),
        ({"name": "high"}, "TypeError: control.log: name is 'high', where a number is needed"),
    ],
)
def test_what_cannot_be_logged_is_refused(place, tmp_path, numbers, why):
    (place / "numbers.json").write_text(json.dumps(numbers))
    with pytest.raises(UsageError, match=why):
        list(ls.train(config_of(place, tmp_path / "run"), on_step="hooks:logs"))


def test_numbers_that_are_not_finite_are_null_in_the_row(place, tmp_path):
    (place / "numbers.json").write_text('{"odd": NaN, "even": Infinity}')
    (step,) = ls.train(config_of(place, tmp_path / "run", "dp1", "train.steps=1"), on_step="hooks:logs")
    (row,) = read_rows(tmp_path / "run/metrics.jsonl")
    assert (row["odd"], row["even"], step.logged["even"]) == (None, None, float("inf"))
    assert set(StepMetrics.from_json(row).logged) == {"odd", "even"}


def test_a_callback_may_take_longer_than_a_collective(place, tmp_path):
    config = config_of(place, tmp_path / "run", "dp2", "train.timeout=8", "train.steps=3")
    assert len(list(ls.train(config, on_step="hooks:slow"))) == 3


def test_a_stop_at_the_end_of_a_stage_ends_the_run(place, tmp_path, capfd):
    config = config_of(place, tmp_path / "run", "dp1", "train.stages=[{steps: 3}, {steps: 3}]")
    assert [step.step for step in ls.train(config, on_step="hooks:stops_at_3")] == [1, 2, 3]
    assert "stage 2 of 2" not in capfd.readouterr().err
    assert [step.step for step in ls.train(read_config(tmp_path / "run"), resume=True)] == [4, 5, 6]


def test_a_stop_at_the_last_step_of_a_trial_ends_the_run(place, tmp_path):
    """Of `layout: auto`: the next trial has no step."""
    config = config_of(place, tmp_path / "run")
    context = loop.RunContext(tmp_path / "run", World.alone(), StepTrace(None, World.alone()), is_ending=True)
    (stage,) = stages_of(config)
    assert list(loop._train_with(context, stage, True, config, False, 4)) == []


def test_a_save_that_fails_when_the_loop_is_left_is_an_error(place, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(loop.StageRun, "save", full)
    steps = ls.train(config_of(place, tmp_path / "run"))
    next(steps)
    with pytest.raises(CheckpointError, match="the disk is full"):
        steps.close()


LOOP = """
import longshift as ls, sys
for step in ls.train(sys.argv[1]):
    print(step.step, flush=True)
"""


def test_control_c_of_a_loop_saves_though_every_process_of_the_terminal_gets_it(place, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(config_of(place, tmp_path / "run", "dp2", "train.steps=1000").to_yaml())
    child = subprocess.Popen([sys.executable, "-c", LOOP, file], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert (tmp_path / "run/LATEST").read_text() == f"step-{rows[-1]['step']}\n"


SIGNALLED = """
import longshift as ls, os, signal, sys
def on_step(metrics, control):
    if metrics.step == 3:
        os.kill(os.getpid(), signal.SIGINT)
seen = []
try:
    for step in ls.train(sys.argv[1], on_step=on_step):
        seen.append(step.step)
except KeyboardInterrupt:
    print(seen, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_control_c_during_a_step_of_one_process_saves_it(place, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(config_of(place, tmp_path / "run").to_yaml())
    ran = subprocess.run([sys.executable, "-c", SIGNALLED, file], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout == "[1, 2] True\n"
    assert (tmp_path / "run/LATEST").read_text() == "step-3\n"


def test_a_newer_run_closes_a_loop_that_was_left(place, tmp_path, capfd):
    config = config_of(place, tmp_path / "run", "dp1", "save.every=2")
    for step in (older := ls.train(config)):
        if step.step == 3:
            break
    newer = ls.train(config, resume=True)
    assert next(newer).step == 4
    assert "is still open: it saves and is closed" in capfd.readouterr().err
    next(newer)
    newer.close()
    assert list(older) == []
    del older
    assert (tmp_path / "run/LATEST").read_text() == "step-5\n"


def test_a_loop_whose_folder_was_removed_saves_nothing(place, tmp_path):
    config = config_of(place, tmp_path / "run")
    older = ls.train(config)
    next(older)
    shutil.rmtree(tmp_path / "run")
    assert [step.step for step in ls.train(config)] == [1, 2, 3, 4, 5, 6]
    assert list(older) == []
    assert (tmp_path / "run/LATEST").read_text() == "step-6\n"


def test_a_function_cannot_go_to_other_processes(place, tmp_path):
    with pytest.raises(UsageError, match=r"on_step is a function of this process, and others train: .* on_step='my_module:watch'"):
        list(ls.train(config_of(place, tmp_path / "run", "dp2"), on_step=print))
    assert not (tmp_path / "run").exists()


def test_a_file_and_an_override_take_a_callback(place, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(config_of(place, tmp_path / "run").to_yaml())
    assert len(list(ls.train(file, on_step="hooks:stops_at_3"))) == 3
    # On resume, what the file says of it is told, and the run's stays.
    assert [step.step for step in ls.train(file, "train.steps=4", resume=True)] == [4]
    assert read_config(tmp_path / "run").train.on_step == "hooks:stops_at_3"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.on_step=hooks:wach", "train.on_step: hooks:wach: hooks has no wach; did you mean 'watch'?"),
        ("train.on_step=hooks:HERE", "train.on_step: hooks:HERE is PosixPath("),
        ("train.on_step=nowhere:watch", "start longshift in the folder that holds nowhere, or install its package"),
        ("save.trackers=hooks:Other", "save.trackers: hooks:Other: hooks has no Other"),
        (
            "save.trackers=hooks:NoFinish",
            "without finish, where a class with start(config, first), log(step, row) and finish(ok)",
        ),
        ("save.trackers=hooks:watch", "without start and log and finish, where a class"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_before_the_run_begins(place, tmp_path, override, why):
    with pytest.raises(UsageError, match=re.escape(why)):
        prepare(config_of(place, tmp_path / "run", "dp2", override), resume=False)
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_from_another_folder_says_what_to_do(place, tmp_path):
    run = tmp_path / "run"
    list(ls.train(config_of(place, run), on_step="hooks:stops_at_3"))
    words = [sys.executable, "-m", "longshift.cli", "train", str(run / "config.yaml"), "--resume"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert ran.returncode == 2
    assert f"there is no module hooks in {tmp_path}, where longshift was started" in ran.stderr
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=place, timeout=300)
    assert ran.returncode == 0, ran.stderr


def test_ranks_of_torchrun_have_the_callback_and_the_documents(place, straight, tmp_path):
    config = config_of(place, tmp_path / "run", "dp2", "train.on_step=hooks:watch", train="{python: hooks:documents}")
    (place / "run.yaml").write_text(config.to_yaml())
    words = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={29000 + os.getpid() % 1000}", "-m", "longshift.cli"]
    run = [sys.executable, "-m", *words, "train", "run.yaml"]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, cwd=place, timeout=300)
    assert ran.returncode == 0, ran.stderr
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    expect_same(rows, straight[:4])
    assert rows[-1]["stopped"] == "four are\nenough"


# Documents


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_a_function_train_as_those_of_files(place, straight, tmp_path, layout):
    """Under a cache of its own, so that the function is called; twice, as data.train and data.valid."""
    (place / "calls").unlink(missing_ok=True)
    overrides = (f"data.cache={tmp_path}", "data.valid=[{python: hooks:documents}]", "validation={every: 6}")
    config = config_of(place, tmp_path / "run", layout, *overrides, train="{python: hooks:documents}")
    steps = list(ls.train(config))
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    expect_same(rows, straight)
    assert steps[-1].valid_loss is not None
    assert (place / "calls").read_text() == "x"  # both are the same tokens
    more = parse_config(read_config(tmp_path / "run").to_yaml(), ["train.steps=7"])
    assert [step.step for step in ls.train(more, resume=True)] == [7]
    assert (place / "calls").read_text() == "x"


@pytest.fixture(scope="module")
def of_ids(place, tmp_path_factory) -> list[dict]:
    """The tokens of a function in one process, from a file of records that says the same."""
    run = tmp_path_factory.mktemp("ids") / "run"
    os.chdir(place)
    for _ in ls.train(config_of(place, run, train="{python: hooks:ids}")):
        pass
    return read_rows(run / "metrics.jsonl")


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_tokens_of_which_some_are_learned_train_alike_under_every_layout(place, of_ids, tmp_path, layout):
    list(ls.train(config_of(place, tmp_path / "run", layout, train="{python: hooks:ids}")))
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    expect_same(rows, of_ids)
    assert all(0.5 < row["target_tokens"] / row["tokens"] < 0.7 for row in rows)


# Trackers


def test_a_tracker_has_the_rows_of_a_run_that_goes_on(place, tmp_path):
    run = tmp_path / "run"
    trackers = ["save.trackers=[hooks:Mine, hooks:Broken, hooks:Forgets]", "save.project=mine"]
    ran = command(config_of(place, run, "dp2", *trackers, "train.on_step=hooks:stops_at_3"), "--json", cwd=place)
    assert all(json.loads(line) for line in ran.stdout.splitlines())
    said = [line for line in ran.stderr.splitlines() if "goes on without it" in line]
    assert len(said) == 2
    assert "longshift: hooks:Broken failed when it was made, and the run goes on without it: OSError: no server (" in said[0]
    assert said[1] == "longshift: hooks:Forgets failed at step 2, and the run goes on without it: ValueError: forgot"
    command(config_of(place, run, "dp2", *trackers), "--resume", cwd=place)
    tracked = [json.loads(line) for line in (run / "mine.jsonl").read_text().splitlines()]
    starts = [row["first"] for row in tracked if "first" in row and "lr" in row and "rank" in row]
    assert starts == [1, 1, 4, 4]  # Forgets begins as Mine does
    rows = {row["step"]: row for row in tracked if "step" in row}
    for row in read_rows(run / "metrics.jsonl"):
        assert rows[row["step"]]["loss"] == row["loss"]
    assert [row for row in tracked if "ok" in row] == [{"ok": True}] * 3  # Forgets does so at step 2


def test_a_home_on_disk_is_tracked(place, tmp_path):
    config = config_of(place, tmp_path / "run", "dp1", "home=disk", "save.trackers=[hooks:Mine]", "train.steps=2")
    list(ls.train(config))
    tracked = [json.loads(line) for line in (tmp_path / "run/longshift.jsonl").read_text().splitlines()]
    assert tracked[2]["home/read_bytes"] > 0
