"""How much memory the machine of this rank gives, and how many files a process may open."""

import errno
import resource
from contextlib import suppress
from pathlib import Path

import psutil

from longshift.errors import UsageError

FILES = 48  # that a rank has open by itself
FILES_A_RANK = 12  # and with each other rank; four ranks had 70 each under a switched layout
_REFUSED = ("can't allocate memory", "cannot allocate memory", "out of memory", "failed to map segment", "can't start new thread")


def lacks_memory(fault: BaseException) -> bool:
    """Whether a process was refused memory: by Python, an allocator, or what loads a library; or while it looked after such a fault."""
    known, seen = fault, set[int]()
    while known is not None and id(known) not in seen:
        text = str(known).lower()
        if isinstance(known, MemoryError) or getattr(known, "errno", None) == errno.ENOMEM:
            return True
        if any(words in text for words in _REFUSED) and "static tls" not in text:  # that is short of another thing
            return True
        seen.add(id(known))
        known = known.__cause__ or known.__context__
    return False


def address_space() -> str:
    """The end of a sentence about memory that was refused: what `ulimit -v` allows; nothing where it allows all."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if most == resource.RLIM_INFINITY else f"; ulimit -v allows {most / 2**30:.3g} GiB"


def allow_files(ranks: int) -> None:
    """Let a rank among so many open the files that it needs, as far as `ulimit -Hn` allows. Raises UsageError where it does not."""
    need, (soft, hard) = FILES + FILES_A_RANK * (ranks - 1), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UsageError(
            f"{ranks} ranks have up to {need} files and sockets open each, and {hard} are allowed here: write ulimit -n {need} in a new "
            f"shell; where that is refused, whoever runs the machine can raise ulimit -Hn"
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def host_memory(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes of this machine's memory, and of that what can still be taken; both no more than the process's control groups allow, of either
    version."""
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, limit_file, used_file, cache = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        elif controllers == "":
            top, limit_file, used_file, cache = root, "memory.max", "memory.current", "inactive_file"
        else:
            continue
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):  # "max" is no number
                limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                total, free = min(total, limit), min(free, limit - used + int(stat.get(cache, 0)))
            if folder == top:
                break
    return total, max(0, free)
