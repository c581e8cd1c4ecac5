"""Runs of `longshift train` in children of a process that has imported all that they need: a run of one rank takes a second.

The process is this file's own main: it reads cases, a JSON line each, from standard input, forks a child for each and answers with a line.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

DEADLINE_S = 120.0
MARK = "FAULTS_CASE"  # in the environment of every process of a case


@dataclass(frozen=True)
class Ended:
    """How a command ended: `code` negative for a signal, None where it was late; `left`: processes of it that were there afterwards."""

    code: int | None
    out: str
    err: str
    left: tuple[str, ...]


class Launches:
    """Runs `longshift ARGUMENTS`, one at a time. A context manager. Mutable: whether one `runs`. `library`: loaded before all others."""

    def __init__(self, library: Path, place: Path):
        self.place = place
        environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)
        self._cases = 0
        self.runs = False  # a command

    def __enter__(self) -> "Launches":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)

    def launcher(self) -> psutil.Process | None:
        """The process of the command that runs now."""
        return next(iter(psutil.Process(self._process.pid).children()), None)

    def run(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        deadline_s: float = DEADLINE_S,
        meanwhile: Callable[[str], object] = lambda mark: None,
    ) -> Ended:
        """`longshift` with these arguments and, beside this process's, these variables of the environment. `meanwhile` is called in a
        thread once it runs, with the mark of its processes."""
        assert self._process.stdin
        assert self._process.stdout
        self._cases += 1
        mark, streams = f"{os.getpid()}-{self._cases}", [str(self.place / name) for name in ("out", "err")]
        case = {"arguments": list(arguments), "variables": {**variables, MARK: mark}, "streams": streams, "deadline_s": deadline_s}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()  # it runs
        beside = threading.Thread(target=meanwhile, args=(mark,))
        self.runs = True
        beside.start()
        code = json.loads(self._process.stdout.readline())
        self.runs = False
        beside.join()
        left = ended(mark)
        out, err = (Path(name).read_text() for name in streams)
        return Ended(code, out, err, left)


def ended(mark: str, within_s: float = 5.0) -> tuple[str, ...]:
    """Command lines of processes of a case that are there after so many seconds, which are then killed."""
    until = time.monotonic() + within_s
    while (left := processes(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    told = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            told.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    return tuple(told)


def processes(mark: str) -> list[psutil.Process]:
    """Those that carry a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def _child(case: Mapping) -> int:
    import ctypes

    os.setsid()
    for number, name in enumerate(case["streams"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.update(case["variables"])
    ctypes.CDLL(None).faults_begin()
    sys.argv = ["longshift", *case["arguments"]]
    from longshift.cli import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _serve(cases: IO[str]) -> None:
    import torch
    import torch._dynamo

    import longshift.api
    import longshift.cli
    import longshift.trainer.launch
    import longshift.trainer.loop  # noqa: F401

    torch.set_num_threads(1)
    for line in cases:
        case = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _child(case)
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        print(flush=True)
        until = time.monotonic() + case["deadline_s"]
        done, status = 0, 0
        while not done and time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status) if done else None), flush=True)


if __name__ == "__main__":
    _serve(sys.stdin)
