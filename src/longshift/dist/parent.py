"""A process that does not outlive the one that started it, and has a name (Linux). Needs no torch:
it holds before torch is imported."""

import ctypes
import os
import signal
import sys


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Send this process a signal when the one that started it dies, rather than run on unwatched;
    at once where that was process `parent` and is gone already. It holds for a parent's thread: the
    one that starts processes has to live as long as they do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)


def call_this_process(name: str) -> None:
    """Show this process under a name of at most 15 letters, in `ps -e` and `top`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
