"""Temporary folders that do not outlive their process for long: what a killed one has left, the next of the same user removes.

The process that made a folder holds a lock on a file in it, and so do processes that it forked. A lock is seen through containers that
share the temporary folder, where a process id says nothing. Needs no torch.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longshift.files import written

PREFIX, OWNER = "longshift-", ".owner"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the temporary one, which is removed at the end. Raises OutOfMemoryError and CheckpointError where none can be made."""
    sweep()
    with written("a temporary folder"):
        made = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    with made:
        place = Path(made.name)
        with written(made.name):
            owner = (place / f"{OWNER}-new").open("w")
        with owner:
            with written(made.name):
                _lock(owner.fileno())
                os.rename(owner.name, place / OWNER)  # under this name it is locked, or nobody's
            yield place


def sweep() -> None:
    """Remove folders of this user whose process is gone."""
    with suppress(OSError):
        for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                found = place.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and _left(place / OWNER):
                    shutil.rmtree(place, ignore_errors=True)


def _left(owner: Path) -> bool:
    """Whether nobody holds the lock on a file; what has no such file is not ours to judge."""
    file = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Take the lock on a file. Whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
