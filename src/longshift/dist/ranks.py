"""Processes of the ranks of one machine: how they start, and how they end together.

    Started   a process of its own for each rank, from a command: with GPUs, as CUDA does not
              survive a fork
    Seed      a process that imports what ranks need, once, and is forked for each of them

[Note: a seed] Importing torch takes two seconds of a core in each process. The seed is forked
before the launcher has read a corpus or measured a kernel, so that it has none of the threads that
such work leaves (OpenMP's and tokenizers' do not survive a fork), and imports while the launcher
does that work. Ranks are children of the seed: they end with it, and it ends with the launcher.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from longshift.dist.launcher import end_with_parent

ENDING_S = 5.0  # from SIGTERM to SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Ranks(ABC):
    """Processes of ranks. `pids`: by rank."""

    def __init__(self, pids: Mapping[int, int]):
        self.pids = dict(pids)

    @abstractmethod
    def codes(self) -> dict[int, int]:
        """Exit codes of those that are known to have ended, by rank, negative for a signal."""

    @abstractmethod
    def wait(self, within_s: float) -> None:
        """Wait until another has ended, for so long at the most."""

    def send(self, number: signal.Signals, group: bool = False) -> None:
        """A signal for those that are not known to have ended; `group`: for what they have started,
        too. A signal handler may call it."""
        for rank in self.pids.keys() - self.codes().keys():
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)
            with suppress(ProcessLookupError):  # it leads no group yet
                if group:
                    os.killpg(self.pids[rank], number)

    def end(self) -> None:
        """End those that run."""
        self.wait(0.0)
        # With their groups, as what a rank has started would outlive it.
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send(number, group=True)
            until = time.monotonic() + ENDING_S
            while len(self.codes()) < len(self.pids) and (left_s := until - time.monotonic()) > 0:
                self.wait(left_s)


class RankProcesses(Ranks):
    """A process for each rank, started by `command`, in sessions of their own. `environments`: what
    each finds beside this process's; `held`: whether they find SIGINT blocked; `folder`: where they
    start, `stdout` and `stderr`: open files for what they print, if not those of this process."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        held: bool,
        folder: str | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ):
        # A process begins with the signals blocked that are blocked in the thread that starts it.
        with _blocked([signal.SIGINT] if held else []):
            self._children = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    start_new_session=True,
                    cwd=folder,
                    stdout=stdout,
                    stderr=stderr,
                )
                for environment in environments
            ]
        super().__init__({rank: child.pid for rank, child in enumerate(self._children)})

    def codes(self) -> dict[int, int]:
        return {
            rank: child.returncode
            for rank, child in enumerate(self._children)
            if child.returncode is not None
        }

    def wait(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        while not self._poll():
            if (left_s := until - time.monotonic()) <= 0:
                break
            time.sleep(min(left_s, 0.05))

    def _poll(self) -> bool:
        """Ask for the exit codes of all that run. Whether any has ended since the last time."""
        running = [child for child in self._children if child.returncode is None]
        codes = [child.poll() for child in running]
        return any(code is not None for code in codes)


class Seed:
    """A process that is forked for each rank. Make it before this one starts threads; `close` it,
    or use it as a context manager.

    `load`: imports what ranks need; `work`: what a rank does with its arguments, in the environment
    of its place. Mutable: its pipes."""

    def __init__(self, load: Callable[[], object], work: Callable[[Sequence[str]], object]):
        read_orders, self._orders = os.pipe()
        self._events, write_events = os.pipe()
        self._open = True
        launcher = os.getpid()
        # The seed would print what is buffered here, too.
        _flush()
        # A signal waits until the seed does with it what a process of its own does.
        with _blocked(SIGNALS):
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._orders)
                os.close(self._events)
                _grow(launcher, read_orders, write_events, load, work)
        os.close(read_orders)
        os.close(write_events)

    def __enter__(self) -> "Seed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], held: bool
    ) -> Ranks:
        """A process for each rank, of which `RankProcesses` says what it finds. A seed starts ranks
        once."""
        order = {
            "arguments": list(arguments),
            "environments": [dict(environment) for environment in environments],
            "held": held,
        }
        with suppress(BrokenPipeError):  # it has ended: so have its ranks
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        return _ForkedRanks(self._events, len(environments))

    def close(self) -> None:
        """End it, and ranks that it has started."""
        if self._open:
            self._open = False
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            os.close(self._orders)
            os.close(self._events)


class _ForkedRanks(Ranks):
    """Ranks that a seed has started, of which it tells by a pipe. Where it has ended itself, its
    ranks were killed."""

    def __init__(self, events: int, size: int):
        super().__init__({})
        self._pipe = events
        self._size = size
        self._codes: dict[int, int] = {}
        self._rest = b""
        # A seed that ends before it has forked all gives codes, and no more processes.
        while len(self.pids) < size and not self._codes:
            self._read()

    def codes(self) -> dict[int, int]:
        return dict(self._codes)

    def wait(self, within_s: float) -> None:
        if len(self._codes) < self._size and select.select([self._pipe], [], [], within_s)[0]:
            self._read()

    def _read(self) -> None:
        """Take in what the seed tells."""
        data = os.read(self._pipe, 1 << 16)
        if not data:
            killed = dict.fromkeys(range(self._size), -int(signal.SIGKILL))
            self._codes = killed | self._codes
        # The last line may have come in part.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "pid" in event:
                self.pids[event["rank"]] = event["pid"]
            else:
                self._codes[event["rank"]] = event["code"]


def _grow(
    launcher: int,
    orders: int,
    events: int,
    load: Callable[[], object],
    work: Callable[[Sequence[str]], object],
) -> NoReturn:
    """Life of a seed: in a session of its own, where no terminal reaches it."""
    try:
        os.setsid()
        _as_at_first()
        end_with_parent(signal.SIGKILL, launcher)
        load()
        # Ranks share the pages of what was imported as long as no collection writes there.
        gc.freeze()
        with os.fdopen(orders) as lines:
            line = lines.readline()
        if line:
            order = json.loads(line)
            children: dict[int, int] = {}
            with _blocked(SIGNALS):
                for rank, environment in enumerate(order["environments"]):
                    pid = _fork(events, order["arguments"], environment, order["held"], work)
                    children[pid] = rank
            for pid, rank in children.items():
                _tell(events, rank=rank, pid=pid)
            for _ in range(len(children)):
                pid, status = os.wait()
                _tell(events, rank=children[pid], code=os.waitstatus_to_exitcode(status))
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(1)


def _fork(
    events: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    held: bool,
    work: Callable[[Sequence[str]], object],
) -> int:
    """Fork a rank; its process id."""
    seed = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # Only the seed holds the pipe, so that its end tells the launcher that the seed is gone.
        os.close(events)
        os.setsid()
        os.environ.update(environment)
        end_with_parent(signal.SIGKILL, seed)
        _as_at_first([signal.SIGINT] if held else [])
        work(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _tell(events: int, **event: int) -> None:
    os.write(events, json.dumps(event).encode() + b"\n")


def _as_at_first(blocked: Sequence[signal.Signals] = ()) -> None:
    """What a process of its own would do at a signal."""
    for number in SIGNALS:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _flush() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def _blocked(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Signals held back meanwhile, in processes that start meanwhile too."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
