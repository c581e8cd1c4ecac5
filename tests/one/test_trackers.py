"""Trackers hold what `metrics.jsonl` holds, each where its package is installed; none of them can end or delay a run."""

import importlib
import importlib.util
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from longshift.config_file import parse_config
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import UsageError
from longshift.trainer.metrics import GroupMetrics, StepMetrics, ValidMetrics, read_rows
from longshift.trainer.run_folder import prepare
from longshift.trainer.trackers import TRACKERS, TensorBoardLog, Trackers, flat, numbers

NAMES = ("tensorboard", "wandb", "trackio", "mlflow")
STEP = StepMetrics(1, 8.0, 1.0, 3e-4, 100, 99, 4, 0.5, 200.0, 1e9, 2**20, 4)
KEYS = ("loss", "grad_norm", "lr", "tokens", "seconds", "valid_loss")
CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/*.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  held_out: 0.25
  cache: {place}/cache
train: {{tokens_per_step: 128, steps: 3, lr: 1e-3, precision: float32}}
validation: {{every: 2, tokens: 200}}
layout: {layout}
save: {{dir: {place}/run, every: 2, trackers: [{names}], project: tests}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return made(tmp_path)


def made(tmp_path: Path) -> Path:
    """A folder with documents and a tokenizer."""
    text = Path(re.__file__).read_text()
    train_tokenizer(iter([text]), 300).save(str(tmp_path / "tokenizer.json"))
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(text[300 * number : 300 * number + 60 + 10 * number])
    return tmp_path


def trained(place: Path, *words: str, layout: str = "dp1", names: str, **environment: str) -> subprocess.CompletedProcess:
    """A run in a process of its own, whose home and current folder are `place`."""
    (place / "run.yaml").write_text(CONFIG.format(place=place, layout=layout, names=names))
    known = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    known |= {"HOME": str(place), "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "longshift.cli", "train", str(place / "run.yaml"), "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=known | environment, cwd=place)


def of_tensorboard(place: Path) -> dict[str, dict[int, dict]]:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(place / "run" / "tensorboard"))
    found.Reload()
    rows: dict[int, dict] = {}
    for tag in found.Tags()["scalars"]:
        for event in found.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return {"run": rows}


def of_wandb(place: Path) -> dict[str, dict[int, dict]]:
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: dict[str, dict[int, dict]] = {}
    for file in place.glob("run/wandb/offline-run-*/*.wandb"):
        name, rows = "", dict[int, dict]()
        for data in log_records(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                name = record.run.display_name
                assert (record.run.project, record.run.run_group) == ("tests", "run")
                assert json.loads(next(one.value_json for one in record.run.config.update if one.key == "train"))["steps"] in (3, 5)
            if record.WhichOneof("record_type") == "history":
                row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
                rows[row["_step"]] = row
        found[name] = rows
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after its own header of 7 bytes: blocks of 32 KiB; checksum, length, whether first, middle or last."""
    at, record = 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, last
            yield record
            record = b""


def of_trackio(place: Path) -> dict[str, dict[int, dict]]:
    found: dict[str, dict[int, dict]] = {}
    with sqlite3.connect(place / "trackio" / "tests.db") as base:
        for name, step, row in base.execute("select run_name, step, metrics from metrics"):
            found.setdefault(name, {})[step] = json.loads(row)
        assert {name for (name,) in base.execute("select run_name from configs")} == set(found)
    return found


def of_mlflow(place: Path) -> dict[str, dict[int, dict]]:
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{place}/mlflow.db")
    found: dict[str, dict[int, dict]] = {}
    for run in client.search_runs([client.get_experiment_by_name("tests").experiment_id]):
        assert run.info.status == "FINISHED"
        assert run.data.params["model.preset"] == "tiny-llama"
        assert run.data.tags["longshift.run"] == str(place / "run")
        rows = found.setdefault(run.info.run_name, {})
        for key in run.data.metrics:
            for one in client.get_metric_history(run.info.run_id, key):
                rows.setdefault(one.step, {})[key] = one.value
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a run on two ranks that was resumed, with every tracker whose package is here."""
    place = made(tmp_path_factory.mktemp("resumed"))
    names = ", ".join(name for name in NAMES if importlib.util.find_spec(name))
    for words in ((), ("--resume", "train.steps=5")):
        ran = trained(place, *words, layout="dp2", names=names, TRACKIO_DIR=str(place / "trackio"))
        assert ran.returncode == 0, ran.stderr
        assert all(isinstance(json.loads(line), dict) for line in ran.stdout.splitlines())  # what the trackers say is elsewhere
        assert "the run goes on without it" not in ran.stderr
    return place


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_holds_the_rows_of_a_run_that_was_resumed(resumed: Path, name: str):
    pytest.importorskip(name)
    rows = read_rows(resumed / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    found = {"tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}[name](resumed)
    assert set(found) == ({"run"} if name == "tensorboard" else {"run", "run from step 4"})
    told = {step: row for part in found.values() for step, row in part.items()}
    assert len(told) == sum(map(len, found.values())) == 5
    for row in rows:
        for key in KEYS:
            assert (key in row) == (key in told[row["step"]])
            assert key not in row or told[row["step"]][key] == pytest.approx(row[key], rel=1e-6)
        for part in row.get("valid", ()):
            assert told[row["step"]][f"valid/to {part['upto']}"] == pytest.approx(part["loss"], rel=1e-6)


def test_a_run_that_fails_is_told_as_failed(place):
    pytest.importorskip("mlflow")
    ran = trained(place, "train.lr=1e6", "train.clip=1e6", "train.steps=6", names="mlflow")
    assert ran.returncode == 5, ran.stderr
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{place}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FAILED"


def test_a_tracker_that_cannot_write_is_said_once_and_the_run_goes_on(place):
    """A file stands where TensorBoard makes its folder."""
    pytest.importorskip("tensorboard")
    (place / "run").mkdir()
    (place / "run" / "tensorboard").write_text("")
    ran = trained(place, layout="dp2", names="tensorboard")
    assert ran.returncode == 0, ran.stderr
    (said,) = (line for line in ran.stderr.splitlines() if "tensorboard" in line)
    assert said.startswith("longshift: tensorboard failed before step 1, and the run goes on without it: ")
    assert [row["step"] for row in read_rows(place / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_server_that_is_not_there_is_said_and_the_run_goes_on(place):
    pytest.importorskip("mlflow")
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    ran = trained(place, names="mlflow", **nobody)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("longshift: mlflow failed before step 1, and the run goes on without it: ") == 1
    assert json.loads(ran.stdout.splitlines()[-1])["finished"]


def test_a_package_that_is_missing_is_said_before_the_run_starts(place, monkeypatch):
    config = parse_config(CONFIG.format(place=place, layout="dp1", names="tensorboard, wandb"))
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as Python marks what cannot be imported
    with pytest.raises(UsageError, match=re.escape("save.trackers: tensorboard is not installed: pip install 'longshift[tensorboard]'")):
        prepare(config, resume=False)
    assert not (place / "run").exists()
    prepare(config, resume=False, rank=1)  # rank 0 has the trackers


def test_extras_have_the_names_of_the_trackers():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in NAMES:
        assert re.search(rf'^{name} = \["{name}', text, re.MULTILINE)
    assert tuple(TRACKERS) == NAMES


@pytest.mark.parametrize(
    ("written", "tracked"),
    [
        ("dir: run", ()),
        ("dir: run, trackers: wandb", ("wandb",)),
        ("dir: run, trackers: [mlflow, trackio, mlflow]", ("mlflow", "trackio")),
    ],
)
def test_trackers_are_chosen_in_the_config(written, tracked):
    text = "model: {preset: tiny-llama}\ndata: {train: [{corpus: python}], max_len: 1K}\ntrain: {tokens_per_step: 1K, steps: 1, lr: 1}\n"
    config = parse_config(text + f"save: {{{written}}}\n")
    assert config.save.trackers == tracked
    assert parse_config(config.to_yaml()).save.trackers == tracked


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("trackers: [wand]", "save.trackers.0: 'wand' is not one of tensorboard, wandb, trackio, mlflow; did you mean 'wandb'?"),
        ("project: a/b", "save.project: "),
        ("tensorboard: true", "save.trackers, as in trackers: \\[tensorboard\\]"),
        ("report_to: wandb", "save.trackers, as in trackers: \\[tensorboard\\]"),
    ],
)
def test_what_is_no_tracker_is_refused(written, told):
    text = "model: {preset: tiny-llama}\ndata: {train: [{corpus: python}], max_len: 1K}\ntrain: {tokens_per_step: 1K, steps: 1, lr: 1}\n"
    with pytest.raises(UsageError, match=told):
        parse_config(text + f"save: {{dir: run, {written}}}\n")


class Spoilt:
    """A tracker of the tests' own. Raises, prints or waits where it is told to."""

    def __init__(self, **faults: BaseException | None):
        self.faults, self.rows, self.ended = faults, list[int](), list[bool]()
        self.free = threading.Event()

    def start(self, config, first):
        self._do("start")

    def log(self, step, row):
        self._do(f"log{step}")
        self.rows.append(step)

    def finish(self, ok):
        self._do("finish")
        self.ended.append(ok)

    def _do(self, what: str) -> None:
        if what in self.faults:
            print(f"about to {what}")
            if (fault := self.faults[what]) is None:
                self.free.wait(60)
            else:
                raise fault


def test_each_fault_is_said_once_and_the_others_go_on(capsys):
    bad = {"start": ValueError("no server\nand more"), "log2": SystemExit(3), "finish": OSError(28, "No space left on device")}
    spoilt = {what: Spoilt(**{what: fault}) for what, fault in bad.items()} | {"whole": Spoilt()}
    trackers = Trackers(spoilt, {})
    for step in (1, 2, 3):
        trackers.write(replace(STEP, step=step))
        print(f"step {step}")
    trackers.finish(True)
    print("done")
    out, err = capsys.readouterr()
    assert out == "step 1\nstep 2\nstep 3\ndone\n"
    said = [line for line in err.splitlines() if line.startswith("longshift: ")]
    assert sorted(said) == [
        "longshift: finish failed at the end, and the run goes on without it: OSError: [Errno 28] No space left on device",
        "longshift: log2 failed at step 2, and the run goes on without it: SystemExit: 3",
        "longshift: start failed before step 1, and the run goes on without it: ValueError: no server",
    ]
    assert sorted(line for line in err.splitlines() if line not in said) == ["about to finish", "about to log2", "about to start"]
    assert [one.rows for one in spoilt.values()] == [[], [1], [1, 2, 3], [1, 2, 3]]
    assert spoilt["whole"].ended == [True]
    assert type(sys.stdout).__name__ != "_Aside"


@pytest.mark.parametrize("where", ["start", "log1", "finish"])
def test_a_tracker_that_hangs_is_left(where, capsys):
    stuck, whole = Spoilt(**{where: None}), Spoilt()
    trackers = Trackers({"stuck": stuck, "whole": whole}, {})
    for step in range(1, 200):
        trackers.write(replace(STEP, step=step))  # returns, though nobody takes the rows
    trackers.finish(False, patience_s=0.5)
    stuck.free.set()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("longshift: ")]
    assert said == ["longshift: stuck has not taken all rows 0.5 s after the last step, and is left"]
    assert whole.rows == list(range(1, 200))
    assert whole.ended == [False]


def test_trackers_of_a_run_without_a_step_are_not_started(capsys):
    one = Spoilt(start=ValueError(), finish=ValueError())
    Trackers({"one": one}, {}).finish(False)
    assert capsys.readouterr() == ("", "")


def test_a_row_has_every_number_by_a_name():
    group = GroupMetrics("dp2", 16, 1, 1, 11, 0.5, 0.1, 110.0, 0.0, 0.01, 5, 6)
    groups = (group, replace(group, upto=32, tokens=20, waited_s=0.25))
    valid = (ValidMetrics(8, 7.5, 3), ValidMetrics(16, 7.25, 4))
    row = numbers(replace(STEP, groups=groups, valid=valid, valid_loss=7.4, layout="dp2"))
    assert (row["loss"], row["tokens"], row["valid_loss"]) == (8.0, 100.0, 7.4)
    assert (row["valid/to 8"], row["valid/to 16"]) == (7.5, 7.25)
    assert (row["dp2 to 16/tokens"], row["dp2 to 32/tokens"], row["dp2 to 32/waited_s"]) == (11.0, 20.0, 0.25)
    assert not {"step", "layout", "groups", "valid", "resumed", "predicted_seconds", "dp2 to 16/waited_s"} & set(row)
    assert all(isinstance(value, float) for value in row.values())


def test_names_and_keys():
    pytest.importorskip("tensorboard")
    names = [TensorBoardLog(Path("runs/demo"), "tests").part_names(first) for first in (1, 101)]
    assert [part["name"] for part in names] == ["demo", "demo from step 101"]
    assert names[1] | {"name": ""} == {"project": "tests", "group": "demo", "name": ""}
    assert dict(flat({"a": {"b": 1, "c": {"d": [2]}}, "e": None})) == {"a.b": 1, "a.c.d": [2], "e": None}


def test_tensorboard_hides_the_steps_that_are_computed_again(tmp_path):
    pytest.importorskip("tensorboard")
    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        log = TensorBoardLog(tmp_path / "run", "tests")
        log.start({}, steps[0])
        for step in steps:
            log.log(step, {"loss": step + 10.0 * len(steps)})
        log.finish(True)
    rows = of_tensorboard(tmp_path)["run"]
    assert {step: row["loss"] for step, row in rows.items()} == {1: 41.0, 2: 42.0, 3: 33.0, 4: 34.0, 5: 35.0}
