"""Launchers that are ended while their ranks start, and what is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from disks import CONFIG
from launches import ended

MARK = "FAULTS_CASE"  # in the environment of every process of a launcher
ENDED_S = 5.0  # for all processes of a launcher that was killed
STOPPED_S = 30.0  # of one that was asked to stop: ranks come up first, then train a step and save


@dataclass(frozen=True)
class Ended:
    """How a launcher ended. `ranks`: how many it had, when it was told; `seconds`: until all were gone; `left`: those that
    were not."""

    code: int | None
    ranks: int
    seconds: float
    left: tuple[str, ...]
    err: str


def launched(place: Path, name: str, after_s: float, number: int, layout: str = "dp2") -> Ended:
    """`longshift train` in a run folder of this name, sent signal `number` after so many seconds."""
    config, mark = place / f"{name}.yaml", f"{os.getpid()}-{name}"
    config.write_text(CONFIG.format(place=place, layout=layout, name=name, steps=10**6))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell has started this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with (place / f"{name}.err").open("w+") as err:
        command = [sys.executable, "-m", "longshift.cli", "train", str(config)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=os.environ | {MARK: mark}, start_new_session=True)
        time.sleep(after_s)
        ranks = _ranks(mark)
        child.send_signal(number)
        began = time.monotonic()
        allowed_s = ENDED_S if number == signal.SIGKILL else STOPPED_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(allowed_s)
        left = ended(lambda: processes(mark), max(0.0, allowed_s - (time.monotonic() - began)))
        seconds = time.monotonic() - began
        err.seek(0)
        return Ended(child.wait(), ranks, seconds, left, err.read())


def processes(mark: str) -> list[psutil.Process]:
    """Those that carry a mark in the environment that they, or what they were forked from, began with."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def _ranks(mark: str) -> int:
    return sum(process.name().startswith("longshift-r") for process in processes(mark))


def wrong(found: Ended, number: int) -> str:
    """What is wrong with an end; empty where nothing is."""
    if found.left:
        return f"left after {found.seconds:.1f} s: {found.left}"
    if number == signal.SIGKILL or (found.code == -number and not found.ranks):  # Python's own end, while it imports the command
        return ""
    if "Traceback" in found.err:
        return f"traceback: {found.err[-1500:]}"
    return "" if found.code in (130, -number) else f"code {found.code}: {found.err[-500:]}"


def frozen(place: Path, rank: int, allowed_s: float) -> tuple[Ended, int]:
    """`longshift train` whose rank `rank` is stopped (SIGSTOP) after two steps; and that rank's process id."""
    name = f"frozen-{rank}"
    config, mark, metrics = place / f"{name}.yaml", f"{os.getpid()}-{name}", place / "run" / name / "metrics.jsonl"
    config.write_text(CONFIG.format(place=place, layout="dp2", name=name, steps=10**6))
    command = [sys.executable, "-m", "longshift.cli", "train", str(config), f"train.stall_timeout={allowed_s}"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {MARK: mark}, start_new_session=True
    ) as child:
        until = time.monotonic() + 90
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            assert child.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        victim = next(process for process in processes(mark) if process.name() == f"longshift-r{rank}")
        ranks = _ranks(mark)
        victim.suspend()
        began = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(allowed_s + ENDED_S)
        left = ended(lambda: processes(mark), max(0.0, allowed_s + ENDED_S - (time.monotonic() - began)))
        assert child.stderr
        return Ended(child.wait(), ranks, time.monotonic() - began, left, child.stderr.read()), victim.pid
