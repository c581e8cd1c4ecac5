"""Temporary folders that do not outlive their process for long: what a killed one has left, the
next that makes such a folder removes.

The process that made a folder holds a lock on a file in it, and so do processes that it forked: a
process id may be used again, a lock is gone with its process. The file names the machine: another
that shares the file system may not see the lock, and leaves the folder alone. Needs no torch.
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

PREFIX = "longshift-"
OWNER = ".owner"
EMPTY_S = 3600.0


@contextmanager
def held_folder(parent: Path, prefix: str = PREFIX, suffix: str = "") -> Iterator[Path]:
    """A new folder in `parent`, for this user only, which is removed at the end; those of such
    names that nobody holds are removed first. Raises OSError."""
    sweep(parent, prefix, suffix)
    with tempfile.TemporaryDirectory(suffix, prefix, parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / f"{OWNER}-new").open("w") as owner:
            _lock(owner.fileno())
            owner.write(os.uname().nodename)
            owner.flush()
            os.rename(owner.name, folder / OWNER)  # under this name it is locked, or nobody's
            yield folder


def sweep(parent: Path, prefix: str = PREFIX, suffix: str = "") -> None:
    """Remove folders of this user in `parent` whose process is gone."""
    with suppress(OSError):
        for folder in list(parent.iterdir()):
            if folder.name.startswith(prefix) and folder.name.endswith(suffix):
                with suppress(OSError):
                    # Not `stat`: a link may lead to a folder of somebody else.
                    status = folder.lstat()
                    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                    if is_own and _is_abandoned(folder, status.st_mtime):
                        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path, changed_s: float) -> bool:
    """Whether nobody on this machine, which made a folder, holds its lock, or it has been empty
    since long ago. Raises OSError for what is not ours to judge."""
    # A process that makes a folder has no lock on it for a moment.
    if {path.name for path in folder.iterdir()} <= {f"{OWNER}-new"}:
        return time.time() - changed_s > EMPTY_S
    file = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
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
