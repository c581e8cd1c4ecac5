"""Temporary folders that do not outlive their process for long: what a killed one has left, the next that makes such a folder removes.

The process that made a folder holds a lock on a file in it, and so do processes that it forked: a process id may be used again, a lock is
gone with its process. The file names the machine: another that shares the file system may not see the lock, and leaves the folder alone.
Needs no torch.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, OWNER = "longshift-", ".owner"
EMPTY_S = 3600.0


@contextmanager
def held_folder(parent: Path, prefix: str = PREFIX, suffix: str = "") -> Iterator[Path]:
    """A new folder in `parent`, for this user only, which is removed at the end; those of such names that nobody holds are removed first.
    Raises OSError."""
    sweep(parent, prefix, suffix)
    with tempfile.TemporaryDirectory(suffix, prefix, parent, ignore_cleanup_errors=True) as made:
        place = Path(made)
        with (place / f"{OWNER}-new").open("w") as owner:
            _lock(owner.fileno())
            owner.write(os.uname().nodename)
            owner.flush()
            os.rename(owner.name, place / OWNER)  # under this name it is locked, or nobody's
            yield place


def sweep(parent: Path, prefix: str = PREFIX, suffix: str = "") -> None:
    """Remove folders of this user in `parent` whose process is gone."""
    with suppress(OSError):
        for place in list(parent.iterdir()):
            if place.name.startswith(prefix) and place.name.endswith(suffix):
                with suppress(OSError):
                    found = place.lstat()
                    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and _left(place, found.st_mtime):
                        shutil.rmtree(place, ignore_errors=True)


def _left(place: Path, changed_s: float) -> bool:
    """Whether nobody on this machine, which made a folder, holds its lock, or it has been empty since long ago. Raises OSError for what is
    not ours to judge."""
    if {path.name for path in place.iterdir()} <= {f"{OWNER}-new"}:
        return time.time() - changed_s > EMPTY_S
    file = os.open(place / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(file, 1024) == os.uname().nodename.encode() and _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Take the lock on a file. Whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
