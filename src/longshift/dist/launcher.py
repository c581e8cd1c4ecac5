"""This process and the one that started it: its place among ranks, which a launcher gives it in the
environment (torchrun, a job of a scheduler, or `longshift train`), and its end with its parent
(Linux).

Needs no torch: it holds before torch is imported.
"""

import ctypes
import os
import signal
import sys

from longshift.errors import UsageError


def place() -> tuple[int, int | None]:
    """The rank of this process, and how many there are; (0, None) without a launcher. Raises
    UsageError."""
    rank = os.environ.get("RANK")
    world = os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return 0, None
    is_place = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    if not is_place:
        raise UsageError(
            f"RANK is {rank!r} and WORLD_SIZE {world!r} in the environment: a rank is a number"
            " below the number of ranks"
        )
    return int(rank), int(world)


def launched() -> bool:
    """Whether a launcher started this process as a rank."""
    return place()[1] is not None


def own_rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return place()[0]


def launcher_pid() -> int:
    """The process that started this rank: `longshift train`, where it says so, else the parent."""
    return int(os.environ.get("LONGSHIFT_PARENT", os.getppid()))


def describe_place() -> str:
    """Which variables say how many ranks there are."""
    return (
        f"The environment says so: RANK is {os.environ['RANK']} and WORLD_SIZE"
        f" {os.environ['WORLD_SIZE']}, as a launcher sets them, and a job of one pod too. To start"
        " all ranks from here, leave them out: env -u RANK -u WORLD_SIZE longshift ..."
    )


def ranks_per_node(ranks: int) -> int:
    """Ranks on each machine: what a launcher says, else all of them. Raises UsageError for what is
    no number of ranks."""
    text = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"LOCAL_WORLD_SIZE is {text!r}: it is the number of ranks on each machine, at least 1"
        )
    return int(text)


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
