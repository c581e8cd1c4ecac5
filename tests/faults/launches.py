"""Runs of `longshift train` in children of a process that has imported all that they need: a run of one rank takes a second.

The process is this file's own main: it reads cases, a JSON line each, from standard input, forks a child for each and answers with a line.
"""

import contextlib
import ctypes
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
SUBREAPER = 36  # of prctl: orphans below a process become its children


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

    def processes(self) -> list[psutil.Process]:
        """Those of the command that runs now, and what is left of those before."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in below if _runs(process)]

    def run(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        deadline_s: float = DEADLINE_S,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Ended:
        """`longshift` with these arguments and, beside this process's, these variables of the environment. `meanwhile` is called in a
        thread once it runs."""
        assert self._process.stdin
        assert self._process.stdout
        streams = [str(self.place / name) for name in ("out", "err")]
        case = {"arguments": list(arguments), "variables": dict(variables), "streams": streams, "deadline_s": deadline_s}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()  # it runs
        beside = threading.Thread(target=meanwhile)
        self.runs = True
        beside.start()
        code = json.loads(self._process.stdout.readline())
        self.runs = False
        beside.join()
        left = ended(self.processes)
        out, err = (Path(name).read_text() for name in streams)
        return Ended(code, out, err, left)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def ended(processes: Callable[[], list[psutil.Process]], within_s: float = 5.0) -> tuple[str, ...]:
    """Command lines of processes that are there after so many seconds, which are then killed."""
    until = time.monotonic() + within_s
    while (left := processes()) and time.monotonic() < until:
        time.sleep(0.05)
    told = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            told.append(f"{process.pid}, {process.name()}: {' '.join(process.cmdline())}")
            process.kill()
    return tuple(told)


def _child(case: Mapping) -> int:
    os.setsid()
    for number, name in enumerate(case["streams"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.update(case["variables"])
    ctypes.CDLL(None).faults_begin()
    sys.argv = ["longshift", *case["arguments"]]
    from longshift.cli import main
    from longshift.trainer import admission

    if "FAULTS_AT_ONCE" in os.environ:  # no memory has room for a copy, from which checkpoints would be written in the background
        admission.COPY_ROOM = 1e9
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
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    for line in cases:
        with contextlib.suppress(ChildProcessError):  # there are no orphans
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
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
