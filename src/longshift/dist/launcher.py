"""The place among ranks that a launcher gives this process in the environment: torchrun, a job of a
scheduler, or `longshift train`.

Needs no torch.
"""

import os

from longshift.errors import UsageError


def place() -> tuple[int, int | None]:
    """The rank of this process, and how many there are; (0, None) without a launcher. Raises
    UsageError."""
    rank = os.environ.get("RANK")
    world = os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return 0, None
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
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
