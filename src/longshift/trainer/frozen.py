"""Ranks that stand still: stopped by SIGSTOP, by a debugger or by a batch system that suspends single processes.

Their peers wait in a collective until it fails, which may be many minutes, and then name each other. The launcher looks at the state of its
ranks every second. A rank that stays stopped for longer than the run allows is named as the cause and ended, and with it the run.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from longshift.errors import PeerError
from longshift.trainer.run_folder import Cause, RunFolder, write_cause

POLL_S = 1.0
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@contextmanager
def watched(ranks: Mapping[int, int], folder: RunFolder, allowed_s: float, tell: Callable[[Cause], None]) -> Iterator[None]:
    """Watch ranks meanwhile. `ranks`: the process of each; `tell`: called with why one was ended."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(ranks, folder, allowed_s, tell, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(ranks: Mapping[int, int], folder: RunFolder, allowed_s: float, tell: Callable[[Cause], None], over: threading.Event) -> None:
    since: dict[int, float] = {}
    while not over.wait(min(POLL_S, allowed_s / 4)):
        now = time.monotonic()
        for rank, pid in ranks.items():
            if not _stopped(pid):
                since.pop(rank, None)
            elif now - since.setdefault(rank, now) >= allowed_s:
                told = f"rank {rank} (process {pid}) has been stopped for {now - since.pop(rank):.0f} s, and was ended"
                tell(write_cause(folder, rank, PeerError(f"{told}; a run that may be suspended needs a larger train.stall_timeout")))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in STOPPED
    except psutil.Error:  # it has ended
        return False
