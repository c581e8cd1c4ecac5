"""Files that are on the disk when we say so, folders that appear whole or not at all, and what it
means that a disk refuses.

Temporary folders do not outlive their process for long: what a killed one has left, the next that
makes such a folder removes. The process that made a folder holds a lock on a file in it, and so do
processes that it forked: a process id may be used again, a lock is gone with its process. The file
names the machine: another that shares the file system may not see the lock, and leaves the folder
alone.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from longshift.errors import CheckpointError, LongshiftError, OutOfMemoryError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Errors that no program makes alone.
OF_DISKS = (*NO_ROOM, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE)
# Of temporary folders: how their names begin, the file that is locked, and after how many seconds
# one without that file is nobody's.
PREFIX = "longshift-"
OWNER = ".owner"
EMPTY_S = 3600.0


def refused(fault: OSError, name: str = "") -> LongshiftError:
    """The error of a person for what a disk refuses: OutOfMemoryError where it has no room,
    CheckpointError else. `name`: of the file or folder, where the fault does not say it."""
    name = name or fault.filename or "a file"
    reason = fault.strerror or str(fault)
    if fault.errno in NO_ROOM:
        return OutOfMemoryError(
            f"{name} cannot be written: {reason}; make room, then run the command again (a run goes"
            " on with --resume=auto)"
        )
    # A disk that fails may do so when it is read.
    what = "read or written" if fault.errno in (errno.EIO, errno.ESTALE) else "written"
    return CheckpointError(f"{name} cannot be {what}: {reason}")


def is_no_room(fault: Exception) -> bool:
    """Whether a disk had no room. The library of safetensors says so in words alone."""
    if isinstance(fault, OSError) and fault.errno:
        return fault.errno in NO_ROOM
    match = re.search(r"\(os error ([0-9]+)\)", str(fault))
    return match is not None and int(match[1]) in NO_ROOM


@contextmanager
def written(name: str) -> Iterator[None]:
    """Raise what the disk refuses inside as the error of a person, see `refused`."""
    try:
        yield
    except OSError as fault:
        raise refused(fault, name) from None


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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for this process, which is removed at the end. Raises OutOfMemoryError and
    CheckpointError where none can be made."""
    with ExitStack() as stack:
        with written("a temporary folder"):
            folder = stack.enter_context(held_folder(Path(tempfile.gettempdir())))
        yield folder


def publish(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary folder beside `target`, make them durable, and rename
    it to `target`.

    When another process publishes `target` first, its folder stays and ours is dropped: for names
    that determine the content. Raises OSError (disk full, no permission) and what `fill` raises;
    then nothing is left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with held_folder(target.parent, "", ".building") as temporary:
        # It is made inside, as the temporary folder itself is for its owner only.
        building = temporary / target.name
        building.mkdir()
        fill(building)
        for path in [*building.iterdir(), building]:
            sync(path)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    sync(target.parent)


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give a file that is written inside the permissions of any new one: safetensors makes private
    files."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def sync(path: Path) -> None:
    """Make a file's contents, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rewrite(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part. Raises OSError;
    then nothing is left behind."""
    # Processes of other machines may write it too, and have the same number.
    new_file = path.with_name(f".{path.name}-{os.getpid()}{time.time_ns()}")
    try:
        new_file.write_text(text, encoding="utf-8")
        # Atomic within a file system.
        os.replace(new_file, path)
    except BaseException:
        with suppress(OSError):
            new_file.unlink()
        raise


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def absolute(path: str) -> str:
    """A path from the working directory and with `~` filled in, made absolute. Raises ValueError
    where no file can have that name."""
    try:
        absolute_path = str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ValueError(
            f"{path[:80]!r}: there is no such user; write the path out, or ./~... for a name that"
            " begins so"
        ) from None
    # Linux takes names of 255 bytes, and paths of 4096 with the zero at their end.
    has_long_name = any(len(os.fsencode(part)) > 255 for part in absolute_path.split(os.sep))
    if has_long_name or len(os.fsencode(absolute_path)) > 4095:
        raise ValueError(
            f"{path[:80]!r}... has {len(path)} characters: a name has at most 255 bytes, and a path"
            " 4095"
        )
    return absolute_path


def read_small(path: Path, max_bytes: int) -> str:
    """The text of a file that a person or a small program wrote. Raises OSError and ValueError: no
    plain file, too large, or not UTF-8."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no plain file")
    with path.open("rb") as file:
        # One byte more tells a file that is too large, whatever size it claims to have.
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes; is this the right file?")
    return data.decode()


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
