"""How much memory the machine of this rank gives, and how many files a process may open."""

import errno
import resource
from contextlib import suppress
from pathlib import Path

import psutil

from longshift.errors import UsageError

FILES = 48  # that a rank has open by itself
FILES_A_RANK = 12  # and with each other rank; four ranks had 70 each under a switched layout
_REFUSED = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "failed to map segment",
    "can't start new thread",
)


def lacks_memory(fault: BaseException) -> bool:
    """Whether a process was refused memory: by Python, an allocator, or what loads a library; or
    while it looked after such a fault."""
    cause: BaseException | None = fault
    visited: set[int] = set()
    while cause is not None and id(cause) not in visited:
        text = str(cause).lower()
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return True
        # A lack of static TLS is of another thing.
        if any(words in text for words in _REFUSED) and "static tls" not in text:
            return True
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def address_space() -> str:
    """The end of a sentence about memory that was refused: what `ulimit -v` allows; nothing where
    it allows all."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f"; ulimit -v allows {limit / 2**30:.3g} GiB"


def allow_files(ranks: int) -> None:
    """Let a rank among so many open the files that it needs, as far as `ulimit -Hn` allows. Raises
    UsageError where it does not."""
    # Ranks speak to each other in pairs: each has sockets for every other.
    need = FILES + FILES_A_RANK * (ranks - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UsageError(
            f"{ranks} ranks have up to {need} files and sockets open each, and {hard} are allowed"
            f" here: write ulimit -n {need} in a new shell; where that is refused, whoever runs the"
            " machine can raise ulimit -Hn"
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def host_memory(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Bytes of this machine's memory, and how many of them are free.

    Both are no more than the process's control groups allow, of either version.
    """
    total = psutil.virtual_memory().total
    free = psutil.virtual_memory().available
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top = root / "memory"
            limit_file = "memory.limit_in_bytes"
            used_file = "memory.usage_in_bytes"
            cache_row = "total_inactive_file"
        elif controllers == "":
            top = root
            limit_file = "memory.max"
            used_file = "memory.current"
            cache_row = "inactive_file"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max" is no number
                limit = int((folder / limit_file).read_text())
                used = int((folder / used_file).read_text())
                rows = (folder / "memory.stat").read_text().splitlines()
                stat = dict(row.split() for row in rows)
                # The kernel gives cached file pages back when it needs memory.
                group_free = limit - used + int(stat.get(cache_row, 0))
                total = min(total, limit)
                free = min(free, group_free)
            if folder == top:
                break
    return total, max(0, free)
