"""How much memory the machine of this rank gives."""

from contextlib import suppress
from pathlib import Path

import psutil


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
