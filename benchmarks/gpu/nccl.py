"""Is NCCL's code right? Several ranks on one GPU against one process there: `python benchmarks/gpu/nccl.py --out nccl.json`.

    collectives   numbers that each collective brings to two ranks: empty parts, both ways at once, two groups at once
    two           layouts of two ranks, switches, adapters, a checkpoint that another layout goes on from: two steps each
    four          layouts of four ranks
    ends          a rank that is killed, and one that is stopped, under `longshift train`: when all are gone, and the cause that is told

A row is written as it comes and has a deadline of its own; one that fails does not end the others. Exit code 1 where a row is not right.
A GPU for each rank is used where there are so many; else ranks share one (LONGSHIFT_RANKS_PER_GPU), which says nothing of speed.
`--backend gloo` tries all of it on a CPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
from common import commit, machine, versions
from first_day import write
from torch.cuda import nccl
from trial import Later, Trial

from longshift.dist.fork import ForkedWorld, SpawnedWorld
from longshift.dist.world import RANKS_PER_GPU
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import LongshiftError
from longshift.layout.layout import Layout
from longshift.spec.adapters import Lora
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule

HERE = Path(__file__).parent
PARTS = ("collectives", "two", "four", "ends")
ROW_S = 60.0  # of a row at the most, the start of its ranks included
STACK_S = 5.0  # before that, each rank writes down where it stands
LEAST_S = 10.0  # that a row is begun with
LIMIT_S = 345.0
FLOAT32 = 1e-5  # relative, of the loss, and of the worst weight, its gradient and its moments
BF16 = 2.0  # times as far from float32 as one process in bf16
GONE_S = 10.0  # after a rank has died, until all processes of the run are gone
STALL_S = 5.0  # that a rank may be stopped
ENDED = 6  # the exit code of a run that has lost a rank
ENDS = {
    signal.SIGKILL: ("rank 1 was ended by SIGKILL", GONE_S),
    signal.SIGSTOP: (r"rank 1 \(process \d+\) has been stopped for", STALL_S + GONE_S),
}  # the cause that is told, and when all are gone

ALONE = "one process"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "send_both_ways", "uneven_exchanges", "two_groups")
TRIAL = Trial(
    ModelSpec("llama", 61, 64, 4, 4, 2, 16, 96, 128, rope=Rope(), init_std=0.05),
    lengths=((40, 21, 5, 7, 3), (53, 6, 30, 2)),
    precision="float32",
    capacity=61,
    rule=Rule(eps=1e-5),  # the usual 1e-8 makes differences of 1e-5 from float32's rounding of small gradients
    edges=(8, 24),
)
LORA = replace(TRIAL, spec=replace(TRIAL.spec, lora=Lora(4, 8.0)))
LATER = replace(TRIAL, stages=(Later(1, TRIAL.spec.rope, TRIAL.capacity),))
TWO = (
    *(("dp2.z0", TRIAL), ("dp2.z1", TRIAL), ("dp2.z2", TRIAL), ("dp2.z3", TRIAL), ("tp2", TRIAL), ("u2", TRIAL), ("ring2", TRIAL)),
    *(("pp2", TRIAL), ("pp2.v2", TRIAL), ("pp2.gpipe", TRIAL), ("u2.chunk16.host.kv-offload", TRIAL), ("dp2 > u2 > tp2", TRIAL)),
    *(("dp2.z3 > tp2", LORA), ("dp2.z2 | tp2", LATER), ("dp2.z3", replace(TRIAL, home="host"))),
    *((layout, replace(TRIAL, precision="bf16")) for layout in ("dp2.z1", "tp2")),
)
FOUR = (("tp2.pp2", TRIAL), ("u2.ring2", TRIAL), ("dp2.pp2.z2", TRIAL), ("dp4 > dp2.tp2 > u4.chunk16.host", TRIAL))
RUN = """
model: {{preset: tiny-llama}}
data: {{train: [{{path: {place}/text.txt}}], tokenizer: {place}/tokenizer.json, max_len: 64, overlong: split, cache: {place}/cache}}
train: {{tokens_per_step: 128, steps: 100000, lr: 1e-3, precision: float32, stall_timeout: {stall_s}}}
layout: dp2.z2
save: {{dir: {place}/{name}, every: 100000}}
"""


class Fault(Exception):
    """Why a row is not right, beside its figures."""


class Outcome(NamedTuple):
    """Figures of a row, and why it is wrong, empty where it is right."""

    figures: Mapping[str, object]
    wrong: str


Row = tuple[Mapping[str, object], Callable[[float], Outcome]]  # its names, and what plays it within so many seconds


@dataclass
class Played:
    """The rows of a run. Mutable: what has been written; `until_s`: on the monotonic clock;
    `row_s`: seconds of a row at the most."""

    path: Path | None
    report: dict
    until_s: float
    row_s: float

    def play(self, names: Mapping[str, object], row: Callable[[float], Outcome]) -> None:
        """Play a row, print it as a line of JSON and write the report anew."""
        begin_s = time.monotonic()
        left_s = self.until_s - begin_s
        if left_s < LEAST_S:
            told = {"state": "no time"}
        else:
            try:
                figures, wrong = row(min(self.row_s, left_s))
                told = {"state": "wrong" if wrong else "right", **figures} | ({"why": wrong} if wrong else {})
            except Exception as fault:  # rows after this one have answers of their own
                told = {"state": "fault", "why": f"{type(fault).__name__}: {fault}"}
        told = {**names, **told, "seconds": round(time.monotonic() - begin_s, 2)}
        self.report["rows"].append(told)
        print(json.dumps(told), flush=True)
        if self.path is not None:
            write(self.path, self.report)


class Worlds:
    """Ranks on this machine, of several sizes beside each other. A context manager. Mutable: the ranks that there are, by their number."""

    def __init__(self, start: Callable[[int], ForkedWorld], place: Path):
        """`start`: ranks of this number; `place`: a folder for what they write."""
        self.start, self.place = start, place
        self._worlds: dict[int, ForkedWorld] = {}

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.close()

    def call(self, size: int, deadline_s: float, name: str, **arguments: object) -> list:
        """Answers, by rank, of a function of `nccl_ranks`. Raises Fault with the cause, and where ranks stood that did not answer."""
        until_s = time.monotonic() + deadline_s
        for file in self.place.glob("*.stack"):
            file.unlink()
        try:
            world = self._worlds.pop(size, None)
            if world is None:
                world = self.start(size)
                world.call("nccl_ranks:join", deadline_s)
            left_s = until_s - time.monotonic()
            watch = {"stacks": str(self.place), "stack_s": max(1.0, left_s - STACK_S)}
            answers = world.call("nccl_ranks:watched", left_s, name=name, **watch, **arguments)
            self._worlds[size] = world
            return answers
        except LongshiftError as fault:  # which has ended the ranks
            stood = [f"rank {file.stem} stood in {where}" for file in sorted(self.place.glob("*.stack")) if (where := _frames(file))]
            raise Fault("; ".join([*str(fault).strip().splitlines()[-3:], *stood])) from fault


def _frames(file: Path) -> str:
    """The innermost functions of the main thread, from what a rank wrote when it was late."""
    main = file.read_text().split("most recent call first")[-1]
    frames = [line.rsplit("/", 1)[-1].replace('",', "") for line in main.splitlines() if line.strip().startswith("File ")]
    return " < ".join(frames[:6])


def worst_of(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest figure of each kind, of all ranks; one that is no number is larger than any."""
    return {kind: max((answer[kind] for answer in answers), key=lambda value: (value != value, value)) for kind in answers[0]}


def collective_row(worlds: Worlds, kind: str, deadline_s: float) -> Outcome:
    """What a collective brings to two ranks."""
    worst = worst_of(worlds.call(2, deadline_s, "collective", kind=kind))
    return Outcome(worst, "" if worst["difference"] == 0 else "numbers are others")


class LayoutRows:
    """Rows of layouts. Mutable: the files of truths, by trial, and how wrong one process is in bf16."""

    def __init__(self, worlds: Worlds, place: Path):
        self.worlds, self.place = worlds, place
        self.truths: dict[Trial, str] = {}
        self.alone: dict[Trial, dict[str, float]] = {}

    def rows(self, cases: Sequence[tuple[str, Trial]]) -> Iterator[Row]:
        for trial in dict.fromkeys(trial for _, trial in cases):
            truth = self._truth(trial)
            if truth not in self.truths:
                yield {"row": ALONE, "trains": _named(truth)}, partial(self._write, truth)
            if trial.precision == "bf16":
                yield {"row": ALONE, "trains": _named(trial)}, partial(self._alone, trial)
        for layout, trial in cases:
            yield {"row": layout, "trains": _named(trial)}, partial(self._compare, layout, trial)

    @staticmethod
    def _truth(trial: Trial) -> Trial:
        return replace(trial, precision="float32", stages=(), home="device")

    def _write(self, truth: Trial, deadline_s: float) -> Outcome:
        path = str(self.place / f"truth{len(self.truths)}.safetensors")
        (loss,) = self.worlds.call(1, deadline_s, "write_truth", trial=truth.to_json(), path=path)
        self.truths[truth] = path
        return Outcome({"loss": loss}, "" if 0 < loss < 10 else "no loss of a model that has begun to learn")

    def _differences(self, size: int, layout: str, trial: Trial, deadline_s: float) -> dict[str, float]:
        path = self.truths.get(self._truth(trial))
        if path is None:
            raise Fault("there is no truth of one process")
        return worst_of(self.worlds.call(size, deadline_s, "layout", trial=trial.to_json(), layout=layout, path=path))

    def _alone(self, trial: Trial, deadline_s: float) -> Outcome:
        self.alone[trial] = self._differences(1, "dp1", trial, deadline_s)
        return Outcome(self.alone[trial], "" if 1e-4 < self.alone[trial]["grad"] < 0.1 else "not the rounding of bf16")

    def _compare(self, layout: str, trial: Trial, deadline_s: float) -> Outcome:
        size = Layout.parse(layout.replace(" | ", " > ").split(" > ")[0]).world
        worst = self._differences(size, layout, trial, deadline_s)
        limits = dict.fromkeys(worst, FLOAT32)
        if trial.precision == "bf16":
            if trial not in self.alone:
                raise Fault("there are no figures of one process in bf16")
            limits = {kind: BF16 * self.alone[trial][kind] for kind in ("grad", "weight")}
        over = [f"{kind} {worst[kind]:.2g} > {limit:.2g}" for kind, limit in limits.items() if not worst[kind] <= limit]
        return Outcome(worst, ", ".join(over))


def _named(trial: Trial) -> str:
    """What sets a trial apart."""
    kinds = ("adapters" * bool(trial.spec.lora), "a checkpoint between steps" * bool(trial.stages))
    return ", ".join(filter(None, (trial.precision, *kinds, f"home: {trial.home}" * (trial.home != "device"))))


def end_row(number: signal.Signals, backend: str, place: Path, deadline_s: float) -> Outcome:
    """A run whose rank 1 is sent a signal in a step."""
    cause, allowed_s = ENDS[number]
    gone_s, code, error = run_and_signal(number, backend, place, deadline_s)
    wrong = [f"gone after {gone_s:.1f} s, not {allowed_s:.0f}"] * (gone_s > allowed_s)
    wrong += [f"exit code {code}"] * (code != ENDED) + ["another cause"] * (not re.match(cause, error))
    return Outcome({"gone_s": round(gone_s, 2), "code": code, "cause": error}, ", ".join(wrong))


def run_and_signal(number: signal.Signals, backend: str, place: Path, deadline_s: float) -> tuple[float, int, str]:
    """Train, send a signal to rank 1 after two steps; seconds until all processes are gone, the exit code, and the error that is told."""
    until_s = time.monotonic() + deadline_s
    text = Path(json.__file__).read_text(encoding="utf-8")
    (place / "text.txt").write_text(text, encoding="utf-8")
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    (place / "run.yaml").write_text(RUN.format(place=place, name=number.name, stall_s=STALL_S), encoding="utf-8")
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {})
    command = [sys.executable, "-m", "longshift.cli", "train", str(place / "run.yaml"), "--json"]
    out, err = place / "out", place / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        launcher = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)
    processes = [psutil.Process(launcher.pid)]
    try:
        # 1. Wait for two steps.
        while len(steps := [line for line in out.read_text().splitlines() if '"step"' in line]) < 2:
            if launcher.poll() is not None or time.monotonic() > until_s:
                raise Fault(f"{len(steps)} steps, exit code {launcher.poll()}: {(out.read_text() + err.read_text())[-500:]}")
            time.sleep(0.05)

        # 2. Send the signal, and wait until all are gone.
        processes += processes[0].children(recursive=True)
        victim = next(process for process in processes if process.name() == "longshift-r1")
        signal_s = time.monotonic()
        victim.send_signal(number)
        while any(_is_alive(process) for process in processes[1:]) or launcher.poll() is None:
            if time.monotonic() > until_s:
                raise Fault(f"processes are there {time.monotonic() - signal_s:.0f} s after the signal")
            time.sleep(0.02)
        gone_s = time.monotonic() - signal_s
        last = out.read_text().splitlines()[-1]
        return gone_s, launcher.returncode, json.loads(last).get("error", last)
    finally:
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        launcher.wait()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="*", help="names of rows, as in u2 'dp2 > u2 > tp2'; all where none is named")
    parser.add_argument("--out", type=Path, help="a file for the report, written anew with each row")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no row is begun")
    parser.add_argument("--deadline", type=float, default=ROW_S, help="seconds of a row at the most")
    parser.add_argument("--json", action="store_true", help="print the report at the end, too, as one line")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gpus = torch.cuda.device_count() if options.backend == "nccl" else 0
    if options.backend == "nccl" and not gpus:
        parser.error("NCCL needs a GPU; --backend gloo tries this on a CPU")
    report = {"benchmark": "gpu/nccl", "backend": options.backend, "machine": machine(), "versions": versions(), "commit": commit()}
    if options.backend == "nccl":
        report["versions"]["nccl"] = ".".join(map(str, nccl.version()))
        os.environ.setdefault(RANKS_PER_GPU, str(-(-4 // gpus)))
        report["ranks_per_gpu"] = int(os.environ[RANKS_PER_GPU])
    begin_s = time.monotonic()
    played = Played(options.out, {**report, "rows": []}, begin_s + options.limit, options.deadline)
    start = partial(SpawnedWorld, device="cuda") if gpus else ForkedWorld
    with tempfile.TemporaryDirectory() as folder, Worlds(start, Path(folder)) as worlds:
        layouts = LayoutRows(worlds, Path(folder))
        parts = {
            "collectives": [({"row": kind}, partial(collective_row, worlds, kind)) for kind in COLLECTIVES],
            "two": layouts.rows(TWO),
            "four": layouts.rows(FOUR),
            "ends": [({"row": number.name}, partial(end_row, number, options.backend, Path(folder))) for number in ENDS],
        }
        for part in options.parts:
            for names, row in parts[part]:
                if not options.rows or names["row"] in (*options.rows, ALONE):
                    played.play({"part": part, **names}, row)
    rows = played.report["rows"]
    right = sum(row["state"] == "right" for row in rows)
    played.report["summary"] = {"rows": len(rows), "right": right, "seconds": round(time.monotonic() - begin_s, 1)}
    if options.out:
        write(options.out, played.report)
    print(json.dumps(played.report if options.json else played.report["summary"]))
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
