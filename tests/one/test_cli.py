"""The command line as a person meets it: real commands, on a corpus small enough that a whole run takes a second."""

import errno
import hashlib
import io
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import longshift as ls
from longshift import api, cli
from longshift.config_file import load_config, parse_config
from longshift.dist.memory import lacks_memory
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import LongshiftError, PeerError, UsageError
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.model import attention
from longshift.spec.families import PRESETS, to_hugging_face
from longshift.state.manifest import render, sealed
from longshift.state.moments import DTYPES
from longshift.step_report import shape_of
from longshift.trainer import loop
from longshift.trainer.display import Display
from longshift.trainer.interrupt import ENDING, Interrupt
from longshift.trainer.launch import Interrupts
from longshift.trainer.metrics import MetricsLog, StepMetrics, read_rows
from longshift.trainer.run_folder import Cause

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
PACKAGE = Path(ls.__file__).parent

CONFIG = """\
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/*.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 64, steps: 3, lr: 1e-3, precision: float32}}
save: {{dir: {place}/run, every: 2}}
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Four documents and a tokenizer of 300 tokens."""
    place = tmp_path_factory.mktemp("corpus")
    text = Path(re.__file__).read_text()
    for n in range(4):
        (place / f"{n}.txt").write_text(text[500 * n : 500 * n + 400])
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    return place


@pytest.fixture
def place(corpus, tmp_path, monkeypatch) -> Path:
    """A working directory with the corpus and a config `run.yaml`."""
    for file in corpus.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "run.yaml").write_text(CONFIG.format(place=tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def longshift(monkeypatch, capsys):
    """Run a command line in this process: exit code, standard output, standard error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["longshift", *shlex.split(line)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def without_torch(line: str) -> subprocess.CompletedProcess:
    """Run a command line in a process of its own, which fails if it imported torch."""
    script = (
        "import atexit, sys; atexit.register(lambda: 'torch' in sys.modules and print('TORCH')); from longshift.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-c", script, *shlex.split(line)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("--help", 0, "Write a commented starter config"),
        ("train --help", 0, "continue from the newest checkpoint"),
        ("train {place}/run.yaml train.lrr=1", 2, "train.lrr: no such key; did you mean 'lr'?"),
        ("train {place}/run.yaml layout=pp9", 2, "at most pp4"),
        ("train none.yaml", 2, "longshift init --to none.yaml"),
        ("init tiny-qwen", 2, "did you mean 'tiny-qwen3'"),
        ("check {place}/run.yaml --against zz4", 2, "is not a layout word"),
        ("check {place}/run.yaml", 2, "check needs --against LAYOUT or --timeline"),
        ("check {place}/run.yaml --timeline --against dp2", 2, "check needs --against LAYOUT or --timeline"),
        ("export {place} --to x", 4, "is not a run folder"),
    ],
)
def test_help_and_errors_do_not_wait_for_torch(place, line, code, says):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = without_torch(line.format(place=place))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
    assert "TORCH" not in done.stdout
    assert "Traceback" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5  # of the processor, whatever else the machine does


def test_help_has_the_order_of_work_with_examples_and_exit_codes(monkeypatch):
    """At 80 columns, and nothing about defaults that say nothing. Examples are commands that the parser takes."""
    monkeypatch.setenv("COLUMNS", "80")
    helps = {name: without_torch(f"{name} --help").stdout for name in ("", *cli.EXAMPLES)}
    assert re.findall(r"^│ (\w+)  ", helps[""], re.MULTILINE) == list(cli.EXAMPLES)
    for error in (UsageError, *LongshiftError.__subclasses__()):
        assert re.search(rf"^ +{error.exit_code}  \w", helps[""], re.MULTILINE)
    for name, text in helps.items():
        assert max(map(len, text.splitlines())) <= 80
        assert "--no-" not in text
        assert "[default: ()]" not in text
        assert "[default: False]" not in text
        for line in cli.EXAMPLES.get(name, ()):
            assert f"  longshift {line}\n" in text
            cli.app.parse_args(line, exit_on_error=False, print_error=False)


def test_a_run_from_start_to_export(place, longshift):
    code, out, _ = longshift("train run.yaml")
    assert code == 0
    steps, farewell = out.splitlines()[:3], out.splitlines()[3:]
    assert [line.split("  ")[0] for line in steps] == ["step 1/3", "step 2/3", "step 3/3"]
    assert farewell[0].startswith("run     run: finished at step 3 of 3, loss ")
    assert farewell[1] == "export  longshift export run --to run/export"
    assert farewell[2] == "resume  longshift train run/config.yaml --resume train.steps=6"

    rows = read_rows(place / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert load_config("run/config.yaml") == load_config("run.yaml")
    assert json.loads((place / "run/env.json").read_text())["packages"]["torch"]

    code, _, err = longshift("train run.yaml")
    assert (code, err) == (2, "longshift: run already holds a run; continue it with --resume, or start another with save.dir=...\n")

    code, out, _ = longshift("train run/config.yaml --resume train.steps=5 --json")
    assert code == 0
    *steps, farewell = (json.loads(line) for line in out.splitlines())
    assert [step["step"] for step in steps] == [4, 5]
    assert farewell["finished"]
    assert [row["step"] for row in read_rows(place / "run/metrics.jsonl")] == [1, 2, 3, 4, 5]

    code, _, err = longshift("export run --to run")
    assert (code, err) == (4, "longshift: run exists and is not empty; choose another folder\n")
    code, out, _ = longshift("export run --to run/export --json")
    assert code == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(json.loads(out)["files"])


def test_a_run_that_cannot_start_says_so_before_step_1(place, longshift, monkeypatch):
    (place / "file").touch()
    code, _, err = longshift("train run.yaml save.dir=file/run")
    assert code == 4
    assert "run folder" in err
    assert "cannot be written" in err
    code, _, err = longshift("train run.yaml --resume")
    assert code == 2
    assert "holds no checkpoint to resume from; leave out --resume" in err
    code, out, err = longshift("train run.yaml data.overlong=null")
    assert code == 3
    assert "overlong: split " in err
    assert not out
    code, out, err = longshift("train run.yaml data.max_len=64M")
    assert code == 7
    assert "rank 0 needs" in err
    assert "GiB for tensors, in compute backward block" in err
    assert not out
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    code, out, err = longshift("train run.yaml layout=chunk16.disk data.max_len=4K train.tokens_per_step=4K")
    assert code == 7
    assert re.search(
        r"needs \S+ \(chunk16.disk\) = \S+ GiB of each of 1 ranks.* and \S+/run has 0.00 GiB free: try another stream.folder", err
    )
    assert not out
    assert longshift("train run.yaml")[0] == 0  # a start that failed is no run


def test_ten_files_lead_from_the_command_to_attention(place, longshift, monkeypatch):
    """Each calls the next."""
    files: dict[str, None] = {}
    attend = attention._forward

    def forward(q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # The ledger plays the same code before the first step, on tensors without storage.
        if q.device.type == "cpu":
            frames = [Path(frame.filename) for frame in traceback.extract_stack()]
            files.update(dict.fromkeys(str(file.relative_to(PACKAGE)) for file in frames if file.is_relative_to(PACKAGE)))
        return attend(q, *others)

    monkeypatch.setattr(attention, "_forward", forward)
    assert longshift("train run.yaml layout=dp1 train.steps=1")[0] == 0
    assert list(files) == [
        *("cli.py", "train_command.py", "api.py", "trainer/loop.py"),
        *("step/update.py", "step/player.py", "step/operation_player.py", "step/runner.py"),
        *("model/decoder.py", "model/attention.py"),
    ]


def test_a_streamed_run_tells_what_moved_step_by_step(place, longshift):
    code, out, _ = longshift("train run.yaml layout=chunk16.disk save.every=9 train.tokens_per_step=128 --trace t.json")
    assert code == 0
    assert "attend_back 1, keys 0" in [event["name"] for event in json.loads((place / "t.json").read_text())["traceEvents"]]
    assert len(re.findall(r"  offload \d+ MiB out, \d+ MiB in, \d+\.\d\d s waited  ETA", out)) == 3
    assert "switch" not in out
    rows = read_rows(place / "run/metrics.jsonl")
    groups = [row["groups"][0] for row in rows]
    run = load_config(place / "run/config.yaml")
    of_pack = shape_of(run).pack_estimate(run.edges[0], 0, "gloo")
    tier, put = of_pack.peaks["disk"].total, of_pack.moved["put"]
    for row, group in zip(rows, groups):
        assert group["tier_peak_bytes"] <= tier
        assert 0.5 * put < group["put_bytes"] * 64 / row["tokens"] < 1.1 * put
        assert group["put_bytes"] <= group["fetched_bytes"]
        assert 0 <= group["hidden_share"] <= 1
        assert 0 < group["waited_s"] < group["seconds"]
    assert max(group["tier_peak_bytes"] for group in groups) > 0.9 * tier
    assert StepMetrics.from_json(rows[0]).groups[0].put_bytes == groups[0]["put_bytes"]


def test_a_trace_is_of_every_layout_and_never_replaces_another_file(place, longshift):
    before = (place / "run.yaml").read_bytes()
    code, _, err = longshift("train run.yaml layout=chunk16.disk --trace run.yaml")
    assert (code, err) == (2, "longshift: --trace run.yaml is there already; only files that end in .json are written over\n")
    assert (place / "run.yaml").read_bytes() == before
    groups = "layout='[{upto: 512, use: dp1}, {upto: 1K, use: chunk64.disk}]' data.max_len=1K"
    code, _, err = longshift(f"train run.yaml {groups} --trace t.json")
    assert (code, err) == (0, "")
    names = [event["name"] for event in json.loads((place / "t.json").read_text())["traceEvents"]]
    assert names.count("update") == names.count("process_name") == 2


def test_a_chunk_is_chosen_and_the_run_keeps_it(place, longshift, monkeypatch):
    monkeypatch.setattr("longshift.profile.choose.CACHE", place / "none")
    told = "longshift: chunk-auto.disk: chunk256.disk: a default, because this machine was not measured; longshift profile does"
    code, out, err = longshift("train run.yaml --explain layout=chunk-auto.disk")
    assert (code, err.strip()) == (0, told)
    assert "chunk256.disk" in out
    code, _, err = longshift("train run.yaml layout=chunk-auto.disk train.steps=1")
    assert code == 0
    assert told in err
    assert load_config(place / "run/config.yaml").layout == Layout.parse("chunk256.disk")


def test_what_blocks_keep_is_chosen_and_the_run_keeps_it(place, longshift, monkeypatch):
    monkeypatch.setattr("longshift.profile.choose.CACHE", place / "none")
    code, out, err = longshift("train run.yaml --explain layout=recompute-auto.disk")
    assert code == 0
    assert err.startswith("longshift: recompute-auto.disk: dp1: the fastest that fits, ")
    assert "1. documents of up to" in out
    monkeypatch.setattr("longshift.profile.choose.FREE_SHARE", 1e-9)
    code, _, err = longshift(f"train run.yaml 'layout={packs('recompute-auto.disk')}' train.steps=1")
    assert code == 0
    assert "recompute-auto.disk: recompute-full: the smallest, and more than is free: " in err
    assert load_config(place / "run/config.yaml").edges[0].use == Layout.parse("recompute-full")
    monkeypatch.setattr("longshift.profile.choose.FREE_SHARE", 0.8)
    assert resumed_with(place, longshift, "recompute-auto.disk") == Layout.parse("recompute-full")


def packs(layout: str) -> str:
    return f"[{{upto: 64, use: {layout}, pack: 16K}}]"


def resumed_with(place, longshift, layout: str) -> Layout:
    """The layout of the run when it has been resumed from a file that says this one, which is no difference."""
    (place / "run.yaml").write_text(CONFIG.format(place=place) + f"layout: {packs(layout)}\n")
    code, _, err = longshift("train run.yaml --resume train.steps=2")
    assert code == 0
    assert "  layout: " not in err
    return load_config(place / "run/config.yaml").edges[0].use


@pytest.mark.parametrize(
    ("layout", "word", "what"),
    [("chunk-auto.disk", "chunk-auto", "chunk"), ("recompute-auto", "recompute-auto", "layout")],
)
def test_nothing_is_chosen_in_a_rank(place, longshift, monkeypatch, layout, word, what):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, err = longshift(f"train run.yaml layout={layout} save.dir=other")
    assert code == 2
    assert f"{word} is chosen before ranks start: write the {what} that" in err


def test_explain_begins_nothing(place, longshift):
    """No Ray, no run folder; and what is resumed is not asked."""
    code, out, err = longshift("train run.yaml --explain --resume=auto --on ray:2 layout=dp2")
    assert (code, err) == (0, "")
    assert "home is cut as dp2" in out
    assert not (place / "run").exists()


def test_explain_counts_ranks_on_a_node_as_the_launcher_says(place, longshift, monkeypatch):
    """The nodes that the switch is planned for, and what goes between them."""
    groups = "layout='[{upto: 32, use: dp4}, {upto: 64, use: tp4}]'"
    found = {}
    for ranks in (None, 2):
        if ranks:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        code, out, _ = longshift(f"train run.yaml --explain --json {groups}")
        assert code == 0
        found[ranks] = json.loads(out)
        code, out, _ = longshift(f"train run.yaml --explain {groups}")
        assert f"nodes of {ranks or 4} ranks" in out
    assert (found[None]["links"]["per_node"], found[2]["links"]["per_node"]) == (4, 2)
    moved = {
        ranks: sum(g["gradients_traffic"]["inter_node_bytes"] for g in f["groups"] if g["gradients_traffic"]) for ranks, f in found.items()
    }
    assert moved[None] == 0 < moved[2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    code, _, err = longshift("train run.yaml --explain layout=dp2")
    assert (code, err) == (2, "longshift: LOCAL_WORLD_SIZE is 'none': it is the number of ranks on each machine, at least 1\n")


def test_a_deterministic_run_asks_torch_for_it(place, longshift, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        code, _, err = longshift("train run.yaml train.deterministic=true")
        assert (code, err) == (0, "")
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    facts = json.loads((place / "run/checkpoints/step-3/manifest.json").read_text())["facts"]
    assert facts["attention"] == {"kernel": "flash", "deterministic": True}


def test_under_a_launcher_the_world_must_fit_the_layout(place, longshift, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, _, err = longshift("train run.yaml layout=dp2")
    assert code == 2
    assert "dp2 needs 2 ranks, 3 are here: try dp3" in err
    assert "RANK is 0 and WORLD_SIZE 3, as a launcher sets them, and a job of one pod too" in err


@pytest.mark.parametrize(("layout", "why"), [("dp2", "dp2 needs 2 ranks, 1 is here"), ("auto", "chosen before ranks start")])
def test_variables_of_a_job_of_one_pod_are_named_where_they_decide(place, longshift, monkeypatch, layout, why):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, err = longshift(f"train run.yaml layout={layout}")
    assert code == 2
    assert why in err
    assert "WORLD_SIZE 1" in err
    assert "env -u RANK -u WORLD_SIZE longshift" in err


@pytest.mark.parametrize(("rank", "world"), [("1", "1"), ("x", "2"), ("0", "two"), ("-1", "2")])
def test_variables_that_are_no_place_are_refused(place, longshift, monkeypatch, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    code, _, err = longshift("train run.yaml")
    assert code == 2
    assert f"RANK is {rank!r} and WORLD_SIZE {world!r} in the environment" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("kib", [200_000, 450_000, 600_000])
def test_a_process_that_gets_no_more_memory_says_so(place, kib):
    """Where libraries are loaded, where they begin, where a step computes."""
    command = f"ulimit -v {kib}; exec {sys.executable} -m longshift.cli train run.yaml"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=place, check=False)
    assert done.returncode == 7, done.stderr
    assert "gets no more memory" in done.stderr
    assert "ulimit -v allows" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "lacks"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (ImportError("libgomp.so.1: cannot allocate memory in static TLS block"), False),
        (ValueError("x"), False),
    ],
    ids=str,
)
def test_what_is_a_lack_of_memory(fault, lacks):
    assert lacks_memory(fault) == lacks
    fault.__cause__ = fault
    assert lacks_memory(fault) == lacks
    consequence = SystemError("compile returned NULL")
    consequence.__context__ = fault
    assert lacks_memory(consequence) == lacks


def test_too_few_open_files_are_refused_before_ranks_start(place):
    command = f"ulimit -n 40; exec {sys.executable} -m longshift.cli train run.yaml layout=dp4 --crowded"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=place, check=False)
    assert done.returncode == 2, done.stderr
    assert "4 ranks have up to 84 files and sockets open each, and 40 are allowed here: write ulimit -n 84 in a new shell" in done.stderr
    command = command.replace("ulimit -n 40", "ulimit -Sn 40").replace("layout=dp4", "layout=dp2")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=place, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["longshift.errors", "longshift.config", "longshift.api"])
def test_ctrl_c_before_imports_end_leaves_no_traceback(place, module):
    """As soon as a module is imported, of which the interpreter writes a line."""
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell in the background ignores it
    command = [sys.executable, "-X", "importtime", "-c", f"{heeds}; from longshift.cli import main; main()", "data", "run.yaml"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=place) as child:
        assert child.stderr
        assert any(line.split("|")[-1].strip() == module for line in child.stderr)
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in rest


def test_errors_in_json_are_json(place, longshift):
    code, out, err = longshift("train run.yaml train.lr=-1 --json")
    assert (code, err) == (2, "")
    fault = json.loads(out)
    assert (fault["exit_code"], fault["kind"]) == (2, "UsageError")
    assert "train.lr" in fault["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_ctrl_c_or_a_scheduler_finishes_the_step_and_saves(place, longshift, monkeypatch, number):
    from longshift.trainer import display

    describe = display.describe

    def interrupt_first(step, steps):
        if step.step == 1:
            signal.raise_signal(number)
        return describe(step, steps)

    monkeypatch.setattr(display, "describe", interrupt_first)
    code, out, err = longshift("train run.yaml train.steps=50 save.every=50")
    assert code == 130
    assert "stopped at step 2 of 50" in out
    again = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"longshift: finishing this step, then saving; {again} again stops at once\n" in err
    assert "resume  longshift train run/config.yaml --resume\n" in out
    assert (place / "run/checkpoints/step-2").is_dir()


def test_more_ranks_than_the_machine_is_made_for_are_refused(place, longshift):
    code, _, err = longshift("train run.yaml layout=dp4096")
    assert code == 2
    assert re.search(r"4096 ranks on \d+ cores, and at most \d+ are started here: take a layout of fewer ranks", err)
    assert not (place / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("how", ["/dev/full", "closed"])
def test_training_goes_on_without_standard_output(place, how):
    command = f"{shlex.quote(sys.executable)} -m longshift.cli train run.yaml " + (">&-" if how == "closed" else "> /dev/full")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert (place / "run/LATEST").read_text() == "step-3\n"


def test_a_run_folder_is_its_owners(place, longshift):
    before = os.umask(0)
    try:
        assert longshift("train run.yaml")[0] == 0
    finally:
        os.umask(before)
    assert (place / "run").stat().st_mode & 0o777 == 0o700


def test_a_script_that_is_queued_again_says_resume_auto(place, longshift):
    for steps, first in ((3, 1), (5, 4)):
        code, out, err = longshift(f"train run.yaml --resume=auto train.steps={steps}")
        assert (code, err) == (0, "")
        assert out.startswith(f"step {first}/{steps}")
    (place / "run/LATEST").unlink()  # as if it had ended before its first checkpoint
    assert longshift("train run.yaml --resume=auto")[0] == 0
    assert [row["step"] for row in read_rows(place / "run/metrics.jsonl")] == [1, 2, 3]
    (aside,) = (place / "run").glob("metrics.*.jsonl")
    assert len(read_rows(aside)) == 5
    assert longshift("train run.yaml --resume=never")[0] == 2


def test_a_second_ctrl_c_says_that_it_stopped(place, longshift, monkeypatch):
    from longshift.trainer import loop

    def interrupted(*how):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupted)
    assert longshift("train run.yaml") == (130, "", "longshift: stopped\n")


def test_a_file_is_trained_from_python(place):
    found = list(ls.train("run.yaml", "train.steps=2"))
    assert [step.step for step in found] == [1, 2]
    with pytest.raises(UsageError, match="overrides are of a config file"):
        next(ls.train(load_config("run.yaml"), "train.steps=2"))


def test_leaving_the_loop_saves_the_step(place):
    for step in ls.train(load_config(place / "run.yaml", ["train.steps=50", "save.every=50"])):
        if step.step == 2:
            break
    assert (place / "run/checkpoints/step-2").is_dir()
    assert [row["step"] for row in read_rows(place / "run/metrics.jsonl")] == [1, 2]


def test_a_refused_resume_changes_nothing(place, longshift):
    """What --resume may change is in the run's config once it goes on."""
    assert longshift("train run.yaml")[0] == 0
    before = {name: (place / "run" / name).read_bytes() for name in ("config.yaml", "env.json")}
    for change in ("data.max_len=32", "model.preset=tiny-qwen3", "train.seed=7"):
        assert longshift(f"train run/config.yaml --resume train.steps=4 {change}")[0] == 4
        assert {name: (place / "run" / name).read_bytes() for name in before} == before
    assert longshift("train run/config.yaml --resume train.steps=4")[0] == 0
    assert "steps: 4" in (place / "run/config.yaml").read_text()


@pytest.mark.parametrize(("given", "kept"), [("", {"momentum_buffer"}), ("train.momentum=0", set())])
def test_sgd_is_trained_and_resumed_with_its_own_moments(place, longshift, given, kept):
    sgd = f"train.optimizer=sgd {given} save.every=1".strip()
    assert longshift(f"train run.yaml train.lr=0.1 train.min_lr=0.01 save.dir=whole {sgd}")[0] == 0
    (file,) = (place / "whole/checkpoints/step-3").glob("*.safetensors")
    whole = load_file(file)
    assert {key.split("|")[0] for key in whole} == {"master"} | kept
    assert longshift(f"train run.yaml train.lr=0.1 train.min_lr=0.01 {sgd}")[0] == 0
    (place / "run/LATEST").write_text("step-1\n")
    code, _, err = longshift("train run/config.yaml --resume train.optimizer=adamw train.momentum=null")
    assert code == 4
    assert "has the moments of SGD" in err
    assert "write train.optimizer=sgd train.momentum=" in err
    assert longshift("train run/config.yaml --resume")[0] == 0
    (file,) = (place / "run/checkpoints/step-3").glob("*.safetensors")
    again = load_file(file)
    assert all(torch.equal(again[key], value) for key, value in whole.items())


@pytest.mark.parametrize("format", ["bf16", "float8"])
def test_packed_moments_are_saved_resumed_and_converted_with_a_word(place, longshift, format):
    packed = f"home.moments={format} save.every=1"
    assert longshift(f"train run.yaml save.dir=whole {packed}")[0] == 0
    (file,) = (place / "whole/checkpoints/step-3").glob("*.safetensors")
    whole = load_file(file)
    kinds = {"master", "exp_avg", "exp_avg_sq"} | ({"exp_avg.scale", "exp_avg_sq.scale"} if format == "float8" else set())
    assert {key.split("|")[0] for key in whole} == kinds
    assert {value.dtype for key, value in whole.items() if key.startswith("exp_avg|")} == {DTYPES[format]}
    assert longshift(f"train run.yaml {packed}")[0] == 0
    (place / "run/LATEST").write_text("step-1\n")
    code, _, err = longshift("train run/config.yaml --resume")
    assert (code, "moments were" in err) == (0, False)
    (file,) = (place / "run/checkpoints/step-3").glob("*.safetensors")
    again = load_file(file)
    assert all(torch.equal(again[key].view(torch.uint8), value.view(torch.uint8)) for key, value in whole.items())
    (place / "run/LATEST").write_text("step-1\n")
    code, _, err = longshift("train run/config.yaml --resume home.moments=float32")
    assert code == 0
    assert f"moments were {format} and go on as float32" in err
    (file,) = (place / "run/checkpoints/step-3").glob("*.safetensors")
    assert {value.dtype for value in load_file(file).values()} == {torch.float32}


def test_resume_keeps_the_runs_settings_and_tells_what_the_file_has_otherwise(place, longshift):
    assert longshift("train run.yaml")[0] == 0
    changed = CONFIG.format(place=place).replace("steps: 3, lr: 1e-3", "steps: 30, lr: 2e-3").replace("every: 2", "every: 7")
    (place / "run.yaml").write_text(changed)
    code, out, err = longshift("train run.yaml --resume train.steps=5")
    assert code == 0
    assert "finished at step 5 of 5" in out
    assert err.splitlines() == [
        "longshift: run.yaml is not what the run in run has; the run's settings stay, where the command line names no other:",
        "longshift:   train.lr: 0.001 in the run, 0.002 in run.yaml; to change it, write train.lr=0.002",
        "longshift:   save.every: 2 in the run, 7 in run.yaml; to change it, write save.every=7",
    ]
    kept = load_config("run/config.yaml")
    assert (kept.train.steps, kept.train.lr, kept.save.every) == (5, 1e-3, 2)
    code, _, err = longshift("train run.yaml --resume=auto train.steps=6 train.lr=2e-3 save.every=7")
    assert (code, err) == (0, "")
    kept = load_config("run/config.yaml")
    assert (kept.train.steps, kept.train.lr, kept.save.every) == (6, 2e-3, 7)
    assert longshift("train run/config.yaml --resume train.steps=7")[::2] == (0, "")


@pytest.mark.parametrize("written", ["null", "0.001"])
def test_a_derived_min_lr_follows_lr_when_a_run_goes_on(place, longshift, written):
    """A tenth of 1e-2 first, then of 5e-4. An earlier version wrote the number down: 0.001."""
    assert longshift("train run.yaml train.lr=1e-2")[0] == 0
    file = place / "run/config.yaml"
    text = file.read_text()
    assert text.count("min_lr: null") == 1
    file.write_text(text.replace("min_lr: null", f"min_lr: {written}"))
    assert longshift("train run/config.yaml --resume train.steps=5 train.lr=5e-4")[::2] == (0, "")
    kept = load_config(file)
    assert kept.train.min_lr == 5e-5
    # Of step 5 of 5, whose count s is 4: min_lr + (lr - min_lr) (1 + cos(0.8 pi)) / 2.
    assert read_rows(place / "run/metrics.jsonl")[-1]["lr"] == pytest.approx(5e-5 + 4.5e-4 * (1 + math.cos(0.8 * math.pi)) / 2)
    assert longshift("train run/config.yaml --resume train.steps=6 train.min_lr=1e-4")[::2] == (0, "")
    assert longshift("train run/config.yaml --resume train.steps=7 train.lr=6e-4")[::2] == (0, "")
    assert load_config(file).train.min_lr == 1e-4


def test_a_folder_without_a_checkpoint_is_none_to_resume_whatever_its_config(place, longshift):
    (place / "mine").mkdir()
    (place / "mine/config.yaml").write_text("[mine]")
    code, _, err = longshift("train run.yaml --resume save.dir=mine")
    assert (code, err) == (2, "longshift: mine holds no checkpoint to resume from; leave out --resume to start at step 1\n")


def test_a_run_that_was_moved_goes_on_where_it_is(place, longshift):
    assert longshift("train run.yaml")[0] == 0
    (place / "run").rename(place / "moved")
    code, out, err = longshift("train moved/config.yaml --resume=auto train.steps=4")
    line = f"{place}/moved/config.yaml says save.dir {place}/run: the folder was moved or copied; the run goes on in {place}/moved"
    assert (code, err) == (0, f"longshift: {line}\n")
    assert "finished at step 4 of 4" in out
    assert not (place / "run").exists()
    assert longshift("train moved/config.yaml --resume train.steps=5 save.dir=run")[::2] == (
        2,
        "longshift: run holds no checkpoint to resume from; leave out --resume to start at step 1\n",
    )
    (place / "run").rmdir()
    (place / "moved/config.yaml").unlink()
    code, out, err = longshift("train run.yaml --resume save.dir=moved train.steps=5")
    assert (code, err) == (0, "longshift: moved holds no config.yaml: the run goes on as run.yaml says\n")


def test_a_failed_run_that_goes_on_in_one_rank_is_no_longer_told_as_failed(place, longshift, monkeypatch):
    """Rank 0 kills rank 1 in step 3, and says that it has lost it."""
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.syspath_prepend(place)
    (place / "killer.py").write_text(
        "import os, signal\nimport psutil\n\n\ndef watch(step, *_):\n    if step.step == 3:\n"
        "        ranks = psutil.Process(os.getppid()).children()\n"
        "        [rank.send_signal(signal.SIGTERM) for rank in ranks if rank.pid != os.getpid()]\n"
    )
    with pytest.raises(PeerError, match=r"^rank 1 was ended by SIGTERM$"):
        list(ls.train("run.yaml", "layout=dp2", "train.steps=5", "save.every=1", on_step="killer:watch"))
    (place / "run/errors").mkdir(exist_ok=True)
    (place / "run/errors/rank-0.json").write_text(Cause(rank=0, kind="PeerError", message="rank 0 lost its peers").to_json())
    assert ls.report("run")[0].facts["ended"].startswith("failed after step")
    assert longshift("train run/config.yaml --resume layout=dp1 train.on_step=null")[::2] == (0, "")
    assert not (place / "run/errors").exists()
    assert ls.report("run")[0].facts["ended"] == "finished"


def test_a_copied_run_goes_on_beside_its_original(place, capsys):
    """Workers go on in the copy, too, and the line about it comes once."""
    assert len(list(ls.train("run.yaml", "layout=dp2", "train.steps=2"))) == 2
    shutil.copytree(place / "run", place / "copy")
    capsys.readouterr()
    assert [step.step for step in ls.train("copy/config.yaml", "train.steps=3", resume=True)] == [3]
    assert capsys.readouterr().err.count("the folder was moved or copied") == 1
    assert [len(read_rows(place / name / "metrics.jsonl")) for name in ("run", "copy")] == [2, 3]
    assert load_config("copy/config.yaml").save.dir == str(place / "copy")
    assert load_config("run/config.yaml").train.steps == 2


def test_a_config_beside_a_strangers_env_json_keeps_its_folder(place):
    (place / "mine").mkdir()
    (place / "mine/env.json").write_text("{}")
    (place / "run.yaml").rename(place / "mine/config.yaml")
    assert load_config("mine/config.yaml").save.dir == str(place / "run")


def test_resume_from_python_tells_what_it_changes(place, capsys):
    """Of a file the run's settings stay; a Config is meant. Workers of another process train as this one would."""
    assert len(list(ls.train("run.yaml", "train.steps=2"))) == 2
    assert [step.step for step in ls.train("run.yaml", "layout=dp2", "train.steps=3", resume=True)] == [3]
    assert capsys.readouterr().err == ""
    assert load_config("run/config.yaml").layout == Layout(dp=2)
    seen = [step.lr for step in ls.train("run.yaml", "train.steps=4", "train.schedule=constant", resume=True)]
    assert seen == [1e-3]
    assert "layout: dp2 in the run, dp1 in run.yaml; to change it, write layout=dp1" in capsys.readouterr().err
    config = load_config("run/config.yaml", ["train.steps=5", "train.lr=2e-3"])
    assert [step.lr for step in ls.train(config, resume=True)] == [2e-3]
    told = capsys.readouterr().err.splitlines()
    assert "longshift: train.steps was 4 in run, and is 5 now" in told
    assert "longshift: train.lr was 0.001 in run, and is 0.002 now" in told
    assert len(told) == 2


def test_a_layout_that_was_chosen_is_no_difference(place, longshift, monkeypatch):
    monkeypatch.setattr("longshift.profile.choose.CACHE", place / "none")
    assert longshift("train run.yaml layout=chunk-auto.disk")[0] == 0
    (place / "run.yaml").write_text(CONFIG.format(place=place) + "layout: chunk-auto.disk\n")
    assert longshift("train run.yaml --resume train.steps=4")[::2] == (0, "")
    (place / "run.yaml").write_text(CONFIG.format(place=place) + "layout: chunk-auto.host\n")
    code, _, err = longshift("train run.yaml --resume train.steps=5")
    assert code == 0
    assert "layout: chunk256.disk in the run, chunk-auto.host in run.yaml; to change it, write layout=chunk-auto.host" in err


@pytest.mark.parametrize("name", ["config.yaml", "env.json"])
def test_files_that_no_run_has_written_stay_as_they_are(place, longshift, name):
    (place / "mine").mkdir()
    (place / "mine" / name).write_text("[mine]")
    code, _, err = longshift("train run.yaml save.dir=mine")
    assert (code, err) == (
        2,
        "longshift: mine holds a config.yaml or env.json that no run has written; choose another folder with save.dir=...\n",
    )
    assert (place / "mine" / name).read_text() == "[mine]"


def test_a_folder_in_which_a_process_trains_is_refused(place, longshift):
    (place / "run").mkdir()
    hold = (
        "import fcntl, os, sys; f = open('run/.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(os.getpid(), file=f, flush=True); print()"
    )
    with subprocess.Popen([sys.executable, "-uc", hold + "; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        code, _, err = longshift("train run.yaml")
        assert (code, err) == (2, f"longshift: process {other.pid} trains in run now; wait, end it, or choose another with save.dir=...\n")
        other.communicate()
    assert longshift("train run.yaml")[0] == 0


def test_a_stream_folder_is_a_path_that_must_be_writable(place, longshift):
    code, _, err = longshift("train run.yaml layout=chunk32.disk stream.folder=nothere")
    assert code == 2
    assert re.search(r"the folder /.*/nothere cannot be written: No such file or directory; choose another with stream\.folder=", err)
    (place / "scratch").mkdir()
    assert longshift("train run.yaml layout=chunk32.disk stream.folder=scratch")[0] == 0
    assert f"folder: {place}/scratch" in (place / "run/config.yaml").read_text()


def test_memory_that_runs_out_has_its_exit_code_in_one_process_too(place, longshift, monkeypatch):
    from longshift.trainer import loop

    def full(*given, **how):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(loop, "train_step", full)
    code, _, err = longshift("train run.yaml")
    assert code == 7
    assert err.startswith("longshift: rank 0: DefaultCPUAllocator")


def test_a_rank_that_is_killed_ends_the_command_with_its_exit_code(place, longshift):
    """The rank is killed when the first step is written."""

    def kill() -> None:
        while not (place / "run/metrics.jsonl").exists():
            time.sleep(0.02)
        (rank,) = (child for child in psutil.Process().children(recursive=True) if child.name().startswith("longshift-r1"))
        rank.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    code, _, err = longshift("train run.yaml layout=dp2 train.steps=100000")
    assert code == PeerError.exit_code == 6
    assert err.startswith("longshift: rank 1 was ended by SIGKILL")


def test_a_run_is_calibrated_by_steps_of_one_config(place, longshift):
    assert longshift("train run.yaml")[0] == 0
    code, _, err = longshift("calibrate run --on 1xcpu")
    assert code == 2
    assert "has 2 steps to calibrate by, without those that allocate memory, and 4 are needed" in err
    assert longshift("calibrate . --on 1xcpu")[0] == 4
    assert longshift("train run.yaml save.dir=longer train.steps=6")[0] == 0
    code, out, _ = longshift("calibrate longer --on 1xcpu --json")
    assert code == 0
    assert [row["step"] for row in json.loads(out)["rows"]] == [2, 3, 4, 5, 6]
    assert (place / "longer/cluster.json").exists()


def test_a_run_goes_on_when_nobody_reads_what_it_prints(place):
    """As with `| head -1`."""
    command = [sys.executable, "-m", "longshift.cli", "train", "run.yaml", "train.steps=6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr
        assert (child.stderr.read(), child.wait()) == ("", 0)
    assert (place / "run/checkpoints/step-6").is_dir()


def test_data_shows_documents_lengths_and_what_caps_lose(place, longshift):
    code, out, _ = longshift("data run.yaml --json")
    found = json.loads(out)
    assert code == 0
    assert found["documents"] == 4 == sum(bin["documents"] for bin in found["histogram"])
    assert found["tokens"] == sum(bin["tokens"] for bin in found["histogram"])
    assert {row["cap"] for row in found["caps"]} >= {16, 32, 64, 128}
    code, out, _ = longshift("data run.yaml")
    assert code == 0
    assert out.startswith(f"4 documents, {found['tokens']:,} tokens; length p50 ")
    assert "64 (this config)" in out


def test_init_writes_a_config_that_trains_and_never_over_one(place, longshift):
    code, out, err = longshift("init --to new.yaml --data '*.txt'")
    assert (code, out) == (0, "wrote new.yaml; start it with: longshift train new.yaml\n")
    assert err.startswith("longshift: the weights of tiny-llama are random")
    changes = f"data.tokenizer={place}/tokenizer.json data.max_len=64 data.cache={place}/cache train.steps=1 train.warmup=0"
    assert longshift(f"train new.yaml {changes} layout=dp1 save.dir=other")[0] == 0
    code, _, err = longshift("init --to new.yaml")
    assert (code, "exists already" in err) == (2, True)
    (place / "books").mkdir()
    assert '- {path: "books/**/*"}' in longshift("init --data books")[1]
    assert parse_config(json.loads(longshift("init gpt2 --json")[1])["config"]).spec == PRESETS["gpt2"]


def test_init_says_where_weights_and_tokenizer_come_from(place, longshift):
    code, text, err = longshift("init qwen3-0.6b")
    assert code == 0
    weights, tokenizer = err.splitlines()
    assert weights.startswith("longshift: the weights of qwen3-0.6b are random: a preset is a model's shape")
    assert "has 4,096 tokens and is trained on the standard library's Python sources, since a preset has none" in tokenizer
    assert "the other 147,840 rows of the embedding are not trained" in tokenizer
    found = [note.removeprefix("longshift: ") for note in (weights, tokenizer)]
    assert all(note[1:] in text.replace("\n# ", " ") for note in found)  # the file says it too
    assert parse_config(text).data.tokenizer is None
    assert json.loads(longshift("init qwen3-0.6b --json")[1])["notes"] == found
    assert "rows" not in longshift("init tiny-llama")[2]

    assert longshift("train run.yaml model.preset=tiny-qwen3 train.steps=1")[0] == 0
    assert longshift("export run --to 'my model'")[0] == 0
    code, text, err = longshift("init './my model'")
    assert code == 0
    assert err.splitlines() == [
        "longshift: training begins with the weights of ./my model",
        "longshift: the tokenizer is that of ./my model, by which its weights were trained",
    ]
    config = parse_config(text)
    assert (config.model.init, config.data.tokenizer) == ("pretrained", f"{place}/my model")
    for file in ("tokenizer.json", "model.safetensors"):
        (place / "my model" / file).unlink()
    err = longshift("init './my model'")[2]
    assert "./my model holds no weights in *.safetensors: add them, or write init: scratch" in err
    assert "./my model holds no tokenizer.json: name one of at most 4,096 tokens in data.tokenizer" in err


def test_a_wrong_command_names_the_right_one(longshift):
    code, _, err = longshift("trian x")
    assert code == 2
    assert 'Did you mean "train"?' in err
    assert len(err.splitlines()) == 1


# Examples


def folder_of(model: str, place: Path) -> None:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(to_hugging_face(PRESETS[model])))


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_configs_are_valid(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of("qwen3-0.6b", tmp_path / "Qwen3-0.6B")
    folder_of("llama-3-8b", tmp_path / "Llama-3.1-8B")
    config = load_config(example)
    assert isinstance(config.layout, AutoLayout) or config.world == {"continue.yaml": 8, "chat-lora.yaml": 1, "largest.yaml": 1}.get(
        example.name, 4
    )


@pytest.mark.parametrize(
    ("example", "preset", "folder", "more"),
    [("continue", "tiny-qwen3", "Qwen3-0.6B", "layout=dp1"), ("largest", "tiny-llama", "Llama-3.1-8B", "")],
    ids=["continue", "largest"],
)
def test_an_example_trains_a_model_folder(place, longshift, example, preset, folder, more):
    """As it stands but for sizes: a tiny model with weights, its own tokenizer, JSON lines."""
    assert longshift(f"train run.yaml model.preset={preset} train.steps=1")[0] == 0
    assert longshift(f"export run --to {folder}")[0] == 0
    (place / "documents").mkdir()
    (place / "documents/a.jsonl").write_text("".join(json.dumps({"text": "hello " * n}) + "\n" for n in range(20, 40)))
    small = f"data.cache={place}/cache data.max_len=64 train.tokens_per_step=64 train.steps=2 train.warmup=1 {more}".strip()
    code, out, err = longshift(f"train {EXAMPLES}/{example}.yaml {small}")
    assert (code, err) == (0, "")
    assert "finished at step 2 of 2" in out


def test_a_chat_model_is_trained_exported_and_trained_again(place, longshift):
    """The template and the end of text come from files of their own; the export has them, and the format of the folder it began with."""
    tokenizer = train_tokenizer(iter([Path(re.__file__).read_text()]), 300)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    turns = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
    (place / "chat.jinja").write_text(turns + "{% if add_generation_prompt %}assistant: {% endif %}")
    chat = [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    given = f"'data.train=[{{path: {place}/chats.jsonl, format: messages}}]'"
    code, out, _ = longshift(f"data run.yaml {given} data.template=chat.jinja")
    assert code == 0
    assert "user: Ping<|end|>assistant: [[Pong<|end|>]]" in out
    code, out, _ = longshift(f"train run.yaml {given} data.template=chat.jinja train.steps=1")
    assert code == 0
    assert longshift("export run --to first")[0] == 0
    config = json.loads((place / "first/config.json").read_text())
    assert (config["torch_dtype"], config["eos_token_id"]) == ("float32", 300)
    (place / "first/config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    (place / "run.yaml").write_text(CONFIG.format(place=place).replace("preset: tiny-llama", "path: first").replace("tokenizer: ", "# "))
    assert longshift(f"train run.yaml {given} train.steps=1 save.dir=again")[0] == 0
    assert longshift("export again --to second")[0] == 0
    assert json.loads((place / "second/config.json").read_text())["torch_dtype"] == "bfloat16"
    peer = AutoTokenizer.from_pretrained(place / "second")
    assert peer.eos_token == "<|end|>"
    assert peer.apply_chat_template(chat, tokenize=False) == "user: Ping<|end|>assistant: Pong<|end|>"


def test_weights_that_are_not_finite_are_not_saved(place, longshift, monkeypatch):
    """A device that computes wrong leaves one infinite number after the second update."""
    right = loop.train_step

    def wrong(state, batch, player, ready, leave):
        outcome = right(state, batch, player, ready, leave)
        if state.optimizer.steps == 2:
            state.home.shards[0].master[0] = math.inf
        return outcome

    monkeypatch.setattr(loop, "train_step", wrong)
    code, _, err = longshift("train run.yaml save.every=1")
    assert code == 5
    assert "step 2: the master of model.embed_tokens.weight is not finite after an update with lr" in err
    assert (place / "run/LATEST").read_text() == "step-1\n"
    monkeypatch.setattr(loop, "train_step", right)
    assert longshift("train run.yaml --resume")[0] == 0


def test_checkpoints_that_were_moved_or_hold_other_numbers_are_refused(place, longshift):
    assert longshift("train run.yaml save.every=1")[0] == 0
    steps = place / "run/checkpoints"
    for old, new in (("step-2", "aside"), ("step-3", "step-2"), ("aside", "step-3")):
        (steps / old).rename(steps / new)
    code, _, err = longshift("train run.yaml train.steps=4 --resume")
    assert code == 4
    assert "step-3 holds step 2: it was moved; give each folder its own name. An older checkpoint may serve: echo step-2" in err
    shutil.rmtree(place / "run")
    assert longshift("train run.yaml save.every=1")[0] == 0
    (file,) = (place / "run/checkpoints/step-3").glob("*.safetensors")
    tensors = load_file(file)
    manifest = file.parent / "manifest.json"

    def forge(changed: dict[str, torch.Tensor], dtype: str = "F32") -> None:
        """By a program that has the identity of the run."""
        save_file(changed, file, metadata={"format": "pt"})
        body = json.loads(manifest.read_text())
        del body["sha256"], body["seal"]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        types = dict.fromkeys(body["files"][0]["types"], dtype)
        body["files"][0] |= {"bytes": file.stat().st_size, "sha256": digest, "types": types}
        manifest.write_text(render(sealed(place / "run", body)))

    def spoiled(kind: str, by: float) -> dict[str, torch.Tensor]:
        return {key: torch.full_like(value, by) if key.startswith(kind) else value for key, value in tensors.items()}

    wide = {key: value.double() for key, value in tensors.items()}
    for changed, dtype, why in (
        ({key: value.half() for key, value in tensors.items()}, "F32", " as F16, F32 was written. An older checkpoint may serve"),
        (wide, "F32", " as F64, F32 was written. An older checkpoint may serve"),
        (wide, "F64", " as F64, which train.precision=float32 and home.moments=float32 do not keep. An older"),
        (spoiled("exp_avg|", math.nan), "F32", "the exp_avg of model.embed_tokens.weight is not finite. An older checkpoint may serve"),
        (spoiled("master|", math.inf), "F32", "the master of model.embed_tokens.weight is not finite. An older checkpoint may serve"),
    ):
        forge(changed, dtype)
        code, _, err = longshift("train run.yaml train.steps=4 --resume")
        assert (code, why in err) == (4, True), err
        if "exp_avg" not in why:  # an export takes no moments
            code, _, err = longshift("export run --to exported")
            assert (code, why in err) == (4, True), err
    (place / "run/LATEST").write_text("step-2\n")
    code, _, err = longshift("train run.yaml train.steps=4 --resume")
    assert code == 0
    assert "run/LATEST names step-2, and newer checkpoints are there, up to step-3: the run goes on from step 2" in err
    assert longshift("export run --to exported")[0] == 0
    code, _, err = longshift("train run.yaml train.steps=5 --resume")
    assert (code, "newer checkpoints" in err) == (0, False)


def blocks(page: str, kind: str) -> list[str]:
    """Code blocks of a page; shell commands have no kind."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", (REPOSITORY / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == kind]


def commands_of(page: str) -> list[str]:
    """Lines of a page's shell blocks, without comments; output has none that begin with a command."""
    return [line.split(" #")[0].strip() for block in blocks(page, "") for line in block.splitlines()]


def pages() -> list[str]:
    return ["README.md", *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))]


def test_the_commands_of_the_docs_are_valid():
    found = {page: [shlex.split(line) for line in commands_of(page) if re.match(r"(\$ )?longshift [a-z]", line)] for page in pages()}
    for words in (words for lines in found.values() for words in lines):
        cli.app.parse_args(cli.words(words[words.index("longshift") + 1 :]), exit_on_error=False, print_error=False)
    assert {words[1] for words in found["README.md"]} == {"init", "data", "train", "check", "plan", "export", "report"}
    assert {words[1] for words in found["docs/first-run.md"]} >= {"init", "data", "train", "check", "plan", "calibrate", "export", "report"}


def test_the_make_targets_of_the_docs_exist():
    lines = [line.split() for page in pages() for line in commands_of(page) if line.startswith("make ")]
    assert [words for words in commands_of("README.md") if words.startswith("make ")] == ["make quickstart", "make test"]
    assert ["make", "test-faults", "JSON=out.json"] in lines
    for target in {words[1] for words in lines} | {"setup", "test-all", "lint", "docs", "bench"}:
        done = subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_readme_is_short_and_says_first_what_has_not_run():
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    first_screen = "\n".join(lines[:40])
    for words in ("**Has not run:** no two GPUs", "**Is refused", "longshift train run.yaml", "longshift export"):
        assert words in first_screen


def test_the_configs_and_the_layouts_of_the_docs_are_valid():
    text, groups, streamed = blocks("docs/layouts.md", "yaml")
    (of_readme,) = blocks("README.md", "yaml")
    words = re.findall(r"^\| `([^`]+)` \|", (REPOSITORY / "docs/reference/layout.md").read_text(), re.MULTILINE)
    config = parse_config(text)
    assert parse_config(blocks("docs/first-run.md", "yaml")[0]) == config
    static = text[: text.index("layout:")] + text[text.index("save:") :]
    switched = parse_config(static + groups, ["data.max_len=32K"])
    assert len(switched.edges) == 2
    for part in (of_readme, streamed):
        assert parse_config(static + part, ["data.max_len=1M"]).edges[-1].use.chunk == 64 << 10
    assert len(words) >= 20
    needs = {"kv-offload": "chunk64K.host.", "keep8": "recompute-full."}
    needs |= dict.fromkeys(("host", "disk", "fpdt", "every4"), "chunk64K.") | dict.fromkeys(("v2", "gpipe", "1f1b"), "pp2.")
    for word in words:
        assert faults(replace(config.spec, layers=5), Layout.parse(needs.get(word, "") + word), None) == ()
    for cell in re.findall(r"^\| [^|]+ \| `([\w.]+)` \|", (REPOSITORY / "docs/layouts.md").read_text(), re.MULTILINE):
        assert faults(config.spec, Layout.parse(cell), None) == ()


def test_the_plan_of_the_python_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(blocks("docs/layouts.md", "yaml")[0])
    block = blocks("docs/reference/python.md", "python")[2].replace("tp16.pp2", "tp4.pp4.dp2").replace("dp4.tp2.pp4", "dp16.tp2")
    exec(block, {"ls": ls})
    out = capsys.readouterr().out
    assert "GB inside nodes" in out
    assert len(out.splitlines()) == 5  # and a line for each of four nodes


def test_metrics_hold_every_step_once_also_after_a_crash(tmp_path):
    def row(step: int, loss: float) -> StepMetrics:
        return StepMetrics(step, loss, 1.0, 1e-3, 10, 9, 1, 0.1, 100.0, 1e9, 2**20, step)

    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    for step in (1, 2, 3):
        first.write(row(step, float(step)))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    again = MetricsLog(path)
    again.write(row(3, float("nan")))
    assert [(r["step"], r["loss"]) for r in read_rows(path)] == [(1, 1.0), (2, 2.0), (3, None)]
    assert StepMetrics.from_json(read_rows(path)[0]) == row(1, 1.0)


def test_a_damaged_row_of_the_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n{"cut sho')
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2 is damaged: remove that line$"):
        read_rows(tmp_path / "metrics.jsonl")


def test_a_terminal_shows_one_live_line(tmp_path):
    screen = io.StringIO()
    with Display(20, console=Console(file=screen, force_terminal=True, width=160)) as display:
        for step in (1, 2):
            display.show(StepMetrics(step, 2.5, 1.0, 1e-3, 10, 9, 1, 60.0, 12345.0, 1e9, 2**30, step, skipped=step == 2))
    shown = screen.getvalue()
    assert "\x1b[2K" in shown  # the first line was erased
    assert "step 2/20  loss 2.5000  norm 1  lr 1.00e-03  12,345 tokens/s  1 GFLOP/s  1024 MiB  ETA 18:00  update skipped" in shown


@pytest.mark.parametrize("script", [*sorted((EXAMPLES / "launch").glob("*.s*")), REPOSITORY / ".ci/run"], ids=lambda path: path.name)
def test_the_scripts_are_valid_shell(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0


def test_signals_that_are_ignored_stay_ignored():
    """As after `nohup`, which ignores SIGHUP: the run goes on when the terminal closes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    try:
        for ignored in ({signal.SIGHUP}, {signal.SIGHUP, signal.SIGTERM}, set()):
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            with Interrupts(lambda line: None):
                assert {number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN} == ignored
            asked = Interrupt(*ENDING)
            assert {number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN} == ignored
            signal.raise_signal(signal.SIGHUP)
            assert asked() == (signal.SIGHUP not in ignored)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning, RuntimeWarning])
def test_a_warning_that_is_made_an_error_is_one_line(longshift, monkeypatch, kind):
    monkeypatch.setattr(api, "load_config", lambda *given: warnings.warn("it is old", kind, stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, _, err = longshift("data run.yaml")
    assert (code, err) == (2, "longshift: it is old (a warning that PYTHONWARNINGS, or python -W, makes an error)\n")


@pytest.mark.parametrize("command", ["data run.yaml --json", "data run.yaml", "init"])
def test_a_command_whose_output_has_no_room_fails(place, longshift, command):
    assert longshift("data run.yaml")[0] == 0  # tokens are there
    line = f"{shlex.quote(sys.executable)} -m longshift.cli {command} > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    hint = "make room, then run the command again (a run goes on with --resume=auto)"
    assert done.stderr.endswith(f"longshift: a file cannot be written: No space left on device; {hint}\n")
    assert "Traceback" not in done.stderr
    line = f"set -o pipefail; {shlex.quote(sys.executable)} -m longshift.cli {command} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_of_another_encoding_is_written_to(place, longshift, encoding):
    assert longshift("data run.yaml")[0] == 0
    command = [sys.executable, "-m", "longshift.cli", "data", "run.yaml"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"4 documents" in done.stdout


@pytest.mark.parametrize("name", ["\x1b[2Jx.yaml", "a\x07b.yaml", "\u202ex.yaml"])
def test_names_of_files_do_not_control_the_terminal(place, longshift, name):
    code, _, err = longshift(f"data {shlex.quote(name)}")
    assert code == 2
    assert repr(name)[1:-1] in err
    assert name not in err


@pytest.mark.parametrize(
    ("file", "text", "code", "why"),
    [
        ("metrics.jsonl", b'{"step": 1}\n{"step\xff": 2}\n{"step": 3}\n', 2, r"metrics\.jsonl:2 is damaged: remove that line"),
        ("metrics.jsonl", b'{"step": 1}\n[2]\n', 2, r"metrics\.jsonl:2 is damaged: remove that line"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", 2, r"metrics\.jsonl:1 is damaged: remove that line"),
        ("LATEST", b"step-\xff\n", 4, "LATEST cannot be read: 'utf-8' codec can't decode"),
        ("plan.json", b"null", 4, r"plan\.json cannot be read: it holds NoneType, where an object is needed; remove it"),
        ("plan.json", b"[" * 100_000, 4, r"plan\.json cannot be read: it is nested too deeply; remove it"),
        ("plan.json", b"\xff", 4, r"plan\.json cannot be read: 'utf-8' codec can't decode"),
        ("config.yaml", b"model: \xff", 2, r"config\.yaml cannot be read: 'utf-8' codec can't decode"),
    ],
    ids=["metrics bytes", "metrics list", "metrics nesting", "LATEST bytes", "plan null", "plan nesting", "plan bytes", "config bytes"],
)
def test_a_damaged_file_of_a_run_is_one_line(trained, longshift, file, text, code, why):
    (trained / "run" / file).write_bytes(text)
    line = (
        "export run --to out"
        if file == "config.yaml"
        else "train run.yaml layout=auto --resume train.steps=4"
        if file == "plan.json"
        else ""
    )
    found, _, err = longshift(line or "train run.yaml --resume train.steps=4")
    assert (found, err.count("\n")) == (code, 1)
    assert re.search(why, err)


@pytest.mark.parametrize(
    ("rows", "missing"),
    [([], "the rows of 3 of the steps 1 to 3"), ([1, 2], "the row of step 3"), ([2], "the rows of 2 of the steps 1 to 3")],
)
def test_metrics_that_lack_steps_are_named(trained, longshift, rows, missing):
    kept = [line for number, line in enumerate((trained / "run/metrics.jsonl").read_text().splitlines(keepends=True), 1) if number in rows]
    (trained / "run/metrics.jsonl").write_text("".join(kept))
    code, _, err = longshift("train run.yaml --resume train.steps=4")
    assert code == 0
    assert f"run/metrics.jsonl lacks {missing}: it was cut, or is of another run" in err


@pytest.mark.parametrize("change", ["train.seed=1", "train.lr=5e-4", "data.max_len=48"])
def test_metrics_of_another_run_are_named(trained, longshift, change):
    assert longshift(f"train run.yaml save.dir=other {change}")[0] == 0
    shutil.copy(trained / "other/metrics.jsonl", trained / "run/metrics.jsonl")
    code, _, err = longshift("train run.yaml --resume train.steps=4")
    assert code == 0
    assert re.search(r"run/metrics\.jsonl is of another run: it has loss \S+ for step 3, and the checkpoint has ", err)


@pytest.fixture
def trained(place, longshift) -> Path:
    """The working directory after a run of three steps."""
    assert longshift("train run.yaml")[0] == 0
    return place


def test_a_pipe_is_no_folder(place, longshift):
    os.mkfifo(place / "pipe.txt")
    code, _, err = longshift("data run.yaml 'data.train=[pipe.txt]'")
    assert code == 3
    assert "pipe.txt is no file that can be read: it is a link to nothing, a pipe or a device" in err
