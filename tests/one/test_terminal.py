"""What a terminal shows: a header at once, a line that fits, and above it steps at a sane rate. Screens are those of a small terminal."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from rich.console import Console

from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import OutOfMemoryError
from longshift.spec.formats import EIGHT_BITS
from longshift.step_report import shape_of
from longshift.trainer import admission
from longshift.trainer.admission import admit
from longshift.trainer.build_run import build_state
from longshift.trainer.display import Display, describe, fitted
from longshift.trainer.header import Header, data_told, layout_told, length_rows, model_told
from longshift.trainer.metrics import GroupMetrics, StepMetrics
from longshift.trainer.plan_file import PlanFile, TrialResult
from longshift.trainer.run_folder import RunFolder
from longshift.weigh.needs import largest_need, memory_needs
from longshift.weigh.state_memory import saved_bytes

CONFIG = """\
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/*.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 64, steps: 14, lr: 1e-3, precision: float32}}
layout: {layout}
save: {{dir: {place}/run, every: 12}}
"""

GROUP = GroupMetrics("dp2.tp2", 1024, 3, 2, 1000, 0.9, 1.12, 1000.0, 0.1, 0.2, 10, 0)
STEP = StepMetrics(78, 4.9877, 0.785, 6.24e-4, 8000, 7900, 12, 1.25, 6935.0, 73.2e9, 562 << 20, 78, groups=(GROUP, GROUP))
LONG = replace(STEP, step=100_000, loss=12.34567, seconds=1.2, tokens_per_s=1.23456e6, model_flops_per_s=3.2e15, memory_bytes=120 << 30)
EXTRA = {"valid_loss": 5.1, "skipped": True, "predicted_seconds": 1.3, "band": 0.1}


def screen(shown: str, width: int) -> list[str]:
    """The lines of a terminal of so many columns after it was sent this text, those that scrolled away too."""
    rows, row, column = [[]], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", shown, re.DOTALL):
        if piece == "\n":
            row, column = row + 1, 0
            rows += [] if row < len(rows) else [[]]
        elif piece == "\r":
            column = 0
        elif piece.endswith("A") and len(piece) > 1:
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            rows[row] = []
        elif len(piece) == 1:
            if column == width:
                rows.insert(row + 1, [])
                row, column = row + 1, 0
            rows[row] += [" "] * (column + 1 - len(rows[row]))
            rows[row][column] = piece
            column += 1
    return ["".join(row).rstrip() for row in rows]


def test_the_screen_of_these_tests_is_a_terminals():
    assert screen("one\ntwo\r\x1b[2Kthree\x1b[1m!\r\n\x1b[1A\x1b[2Kfour\nfive", 80) == ["one", "four", "five"]
    assert screen("abcdef\nx", 4) == ["abcd", "ef", "x"]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("step", "steps"), [(STEP, 80), (replace(STEP, **EXTRA), 80), (LONG, 1_000_000), (replace(LONG, **EXTRA), 200_000)]
)
def test_a_line_fits_and_keeps_what_counts(step, steps, width):
    line = fitted(step, steps, width)
    assert len(line) <= width
    rate = r"([\d,]+ tokens/s|[\d.]+[kMG]? tok/s)"
    found = re.match(rf"(?:step )?{step.step}/{steps} +loss ([\d.]+) .*{rate} .*ETA \d+(:\d\d|d)", line)
    assert found, line
    assert float(found[1]) == pytest.approx(step.loss, abs=5e-3)


def test_a_wide_line_has_all_and_a_narrow_one_loses_the_least_first():
    step = replace(STEP, groups=(replace(GROUP, layout="dp4"), GROUP), **EXTRA)
    assert fitted(step, 80, 400) == describe(step, 80)
    at = {width: fitted(step, 80, width) for width in (60, 80, 100, 120)}
    assert "switch" in at[120]
    assert "switch" not in at[80]
    assert "valid 5.1000" in at[80]
    no_flops = fitted(step, 80, len(describe(step, 80)) - 1)
    assert all(word in no_flops for word in ("norm 0.785", "lr 6.24e-04", "switch"))
    assert "FLOP/s" not in no_flops


def test_a_line_of_80_columns_keeps_the_time_of_each_layout_and_of_the_switch():
    """0.10 s and 1.12 s of two layouts, of which 0.1 s were exposed in each; memory has room where steps have few digits."""
    step = replace(STEP, groups=(replace(GROUP, layout="dp4", seconds=0.1), GROUP))
    assert fitted(step, 80, 80) == "step 78/80 loss 4.9877 6.93k tok/s dp4 0.10 dp2.tp2 1.12 switch 0.20 s ETA 0:02"
    assert fitted(step, 80, 90) == "step 78/80 loss 4.9877 6.93k tok/s 562 MiB dp4 0.10 dp2.tp2 1.12 switch 0.20 s ETA 0:02"
    lengths = (replace(GROUP, upto=512, seconds=0.1), GROUP)
    assert fitted(replace(STEP, groups=lengths), 80, 80) == "step 78/80 loss 4.9877 6.93k tok/s 562 MiB <=512 0.10 <=1K 1.12 s ETA 0:02"


def test_steps_stay_on_the_screen_at_a_sane_rate(tmp_path):
    """A run of 2000 steps of half a second: the first ten, then fewer; what is validated, skipped or saved, always."""
    latest, now, sent = tmp_path / "LATEST", [0.0], io.StringIO()
    console = Console(file=sent, force_terminal=True, width=80, highlight=False)
    with Display(2000, console=console, latest=latest, clock=lambda: now[0]) as display:
        for number in range(1, 2001):
            now[0] += 0.5
            display.show(replace(STEP, step=number, groups=(), valid_loss=5.0 if number == 333 else None, skipped=number == 777))
            if number % 1000 == 0:
                latest.write_text(f"step-{number}\n")
    lines = [line for line in screen(sent.getvalue(), 80) if line]
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step ")]
    assert steps[:11] == [*range(1, 11), steps[10]]
    assert {333, 777, 1000, 2000} <= set(steps)
    assert steps == sorted(set(steps))
    assert all(late - early >= 9 for early, late in pairwise(steps[10:]) if not {early, late} & {333, 777, 1000, 2000})
    assert 100 < len(steps) < 220
    assert lines[-2:] == [fitted(replace(STEP, step=2000, groups=()), 2000, 80), "saved   checkpoints/step-2000"]
    assert lines[lines.index("saved   checkpoints/step-1000") - 1].startswith("step 1000/")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("terminal")
    text = Path(re.__file__).read_text()
    for n in range(4):
        (place / f"{n}.txt").write_text(text[500 * n : 500 * n + 100 + 100 * n])
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    return place


def in_terminal(line: list[str], place: Path, columns: int) -> tuple[str, int, float, str]:
    """What a command sends to a terminal, its exit code, the processor's seconds until its first byte, and the libraries it had then."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(place)
        os.execv(sys.executable, [sys.executable, "-m", "longshift.cli", *line])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    sent = os.read(terminal, 1)
    times = psutil.Process(child).cpu_times()
    libraries = Path(f"/proc/{child}/maps").read_text()
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the end of a terminal, on Linux
            break
        if not piece:
            break
        sent += piece
    os.close(terminal)
    return sent.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), times.user + times.system, libraries


def test_a_terminal_has_a_header_at_once_and_lines_that_fit(place):
    (place / "run.yaml").write_text(CONFIG.format(place=place, layout="dp2"))
    began = time.monotonic()
    sent, code, busy_s, libraries = in_terminal(["train", "run.yaml"], place, 80)
    assert code == 0, sent
    assert busy_s < 2  # of this process alone, whatever else the machine does; torch by itself takes longer
    assert "libtorch" not in libraries
    assert time.monotonic() - began < 120
    lines = screen(sent, 80)
    names = [line.split("  ")[0] for line in lines if re.match(r"[a-z]", line)]
    head = ["longshift 0.1.0", "config", "model", "data", "layout", "run", "resume", "memory"]
    assert names[:8] == head
    assert names[8:21] == [*(f"step {n}/14" for n in range(1, 11)), *[name for name in names[18:21] if name.startswith(("step", "saved"))]]
    assert {"saved   checkpoints/step-12", "saved   checkpoints/step-14"} <= set(lines)
    text = "\n".join(lines)
    assert "model   tiny-llama: 1.79M parameters" in text
    assert "random weights, from seed 0; tokenizer of tokenizer.json" in re.sub(r"\s+", " ", text)
    assert re.search(r"data    4 documents, \d+ tokens; the longest has \d+", text)
    assert "layout  dp2, 2 ranks" in text
    assert "run     run: 14 steps of 64 tokens" in text
    assert "resume  longshift train run/config.yaml --resume" in text
    memory = r"memory  at most (0\.\d+) GiB of tensors, on rank \d, and (0\.\d+) GiB of the process; a rank may have ([\d.]+) GiB"
    found = re.search(memory, re.sub(r"\s+", " ", text).replace("memory ", "memory  "))
    assert found
    tensors, process, room = map(float, found.groups())
    assert tensors + process < room <= psutil.virtual_memory().total / 2**30
    assert all(re.search(r"  ETA \d:\d\d$", line) for line in lines if line.startswith("step "))  # none goes on in a second line


def test_what_the_header_says(place):
    run = parse_config(CONFIG.format(place=place, layout="[{upto: 32, use: dp4}, {upto: 64, use: dp2.tp2}]"))
    lengths = np.asarray([20] * 60 + [100] * 30 + [5000] * 10 + [2**n for n in range(1, 14)])
    assert model_told(run).startswith("tiny-llama: 1.79M parameters, 4 blocks of width 128")
    assert model_told(run).endswith(f"random weights, from seed 0; tokenizer of {place}/tokenizer.json")
    assert "the longest has 8,192, and documents of more than 64 are split" in data_told(run, lengths)
    rows = list(length_rows(lengths))
    assert len(rows) == 8
    assert sum(float(re.search(r"([\d.]+)%", row)[1]) for row in rows) == pytest.approx(100, abs=0.5)  # pyright: ignore
    assert rows[-1].split()[1] == "8K"
    assert max(rows, key=lambda row: row.count("█")).split()[1] == "32"
    assert layout_told(run, None) == "documents to 32: dp4; documents to 64: dp2.tp2, 4 ranks"
    facts = {"candidates": 1234, "tried": [{"seconds": 0.3}, {"seconds": 0.363}]}
    plan = PlanFile("auto", ("dp2", "tp2"), facts)
    told = "layout: auto compared 1,234 and predicts {} s a step, and {} to {} s with the others that are tried; 2 choices are trained"
    assert told.format(0.3, 0.363, 0.363) in layout_told(run, plan)
    assert told.format(0.363, 0.3, 0.3) in layout_told(run, replace(plan, trials=(TrialResult(0.3, (), ()),)))
    assert "trained 2 choices a few steps each, and goes on with this one" in layout_told(run, replace(plan, chosen=1))


@pytest.mark.parametrize("precision", ["bf16", "float8"])
def test_matmuls_of_eight_bits_are_told_before_the_first_step(place, precision):
    shown = io.StringIO()
    run = parse_config(CONFIG.format(place=place, layout="dp2"), [f"train.precision={precision}"])
    Header(Console(file=shown, width=300), shown=True).run(run, None, RunFolder(place / "run"), resume=False)
    assert (f"float8  {EIGHT_BITS}" in shown.getvalue()) == (precision == "float8")


def test_the_memory_that_waits_elsewhere_is_told(place):
    run = parse_config(CONFIG.format(place=place, layout="chunk64.disk"), ["data.max_len=16K", "train.tokens_per_step=16K"])
    told = admit(run, World.alone(), place).told
    assert re.fullmatch(
        r"at most .* GiB of tensors, on rank 0, and .* of the process; a rank may have .* GiB; (0\.\d+) GiB lie on disk", told
    )


def test_where_memory_is_short_no_unit_is_updated_before_the_norm(place):
    """Room for the largest step as it is, for one without updates before the norm alone, and for neither."""
    run = parse_config(CONFIG.format(place=place, layout="dp1"), ["home=disk"])
    shape, world = shape_of(run), World.alone()
    early, late = (largest_need(memory_needs(replace(shape, early=early), run.edges, "gloo")).of("device") for early in (True, False))
    assert early > late
    found = []
    for room in (early, early - 1, late):
        with patch.object(admission, "_room", return_value=(room, 0)):
            found.append(admit(run, world, place))
    assert [one.early for one in found] == [True, False, False]
    assert ["updates before the norm have no room" in one.told for one in found] == [False, True, True]
    with patch.object(admission, "_room", return_value=(late - 1, 0)), pytest.raises(OutOfMemoryError, match="needs"):
        admit(run, world, place)
    homes = [build_state(run, world, place, early=one.early).home for one in found[:2]]
    assert [(home.doubled, home.no_room) for home in homes] == [(True, False), (False, False)]
    for home in homes:
        home.close()


def test_checkpoints_are_written_in_the_background_where_memory_has_room_for_two_copies(place):
    """Both in what a rank may have and in what is free; a run without that room is admitted all the same."""
    run, world = parse_config(CONFIG.format(place=place, layout="dp1")), World.alone()
    shape = shape_of(run)
    need, copy = largest_need(memory_needs(shape, run.edges, "gloo")).of("device"), saved_bytes(shape.steps(0))
    assert copy == 12 * run.spec.parameters
    enough, large = need + 2 * copy, 1 << 60
    for room, free, background in ((enough, enough, True), (enough - 1, large, False), (large, enough - 1, False), (need, large, False)):
        with patch.object(admission, "_room", return_value=(room, 0)), patch.object(admission, "host_memory", return_value=(large, free)):
            admitted = admit(run, world, place)
        assert admitted.background == background
        assert ("has no room, so training waits while a checkpoint is written" in admitted.told) != background
    on_disk = admit(parse_config(CONFIG.format(place=place, layout="dp1"), ["home=disk"]), world, place)
    assert (on_disk.background, "no room" in on_disk.told) == (False, False)


def test_no_terminal_has_lines_and_json_alone(place, capsys):
    with Display(80) as display:
        display.memory("at most")
        display.show(STEP)
    with Display(80, as_json=True) as display:
        display.memory("at most")
        display.show(STEP)
    plain, row = capsys.readouterr().out.splitlines()
    assert plain == describe(STEP, 80)
    assert StepMetrics.from_json(json.loads(row)) == STEP
