"""Home on disk: masters, moments and gradient sums of a rank in a file, of which only what is in use is in memory. ZeRO-Infinity
(arXiv 2104.07857) for training states.

    file     | bucket 0: master  moments  grad | bucket 1: ... | second places          a record a bucket, at page boundaries
    memory              storage that comes with `hold` or `read` and goes with `evict`, or when `written` says that the file has it

    read ─── await read ─── in use ─── evict            not changed
                                  └─── write ─── await write      changed

When is the program's (`program.step`). Bytes pass through a few buffers at page boundaries, so that the file system's cache is left out
where it can be (O_DIRECT): it would keep a second copy of a state that does not fit into memory, and stop writers when it is full. The file
is as large as it will ever be before the first step, has no name, and is gone with the process. Bytes an element: a home format for the
master, each moment and the gradient sum; of a bucket that is not trained, the master in the compute format. Masters and moments have two
places each where the disk has room ([Note: early updates] in `program.step`).
"""

import ctypes
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError
from longshift.files import NO_ROOM
from longshift.state.resized import Resized

ALIGN = 4096  # bytes: a page, where vectors of a file begin
THREADS = 2  # that read a file, and that write it
PIECE = 8 << 20  # bytes that a thread reads or writes at one time


@dataclass
class Vector:
    """A vector of a bucket: `flat`, whose storage comes and goes, and where it lies in the file. Mutable. `users`: how many hold it;
    `second`: a place where another state of it can lie meanwhile."""

    flat: Tensor
    start: int
    second: int | None = field(init=False, default=None)
    memory: Resized = field(init=False)
    users: int = 0
    moving: list[Future] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = Resized(self.flat)

    def hold(self) -> None:
        """Have memory, with what was in it or, where there was none, anything."""
        self.users += 1
        self.memory.hold()

    def evict(self) -> None:
        """Give back the memory of what has not changed, where nobody else holds it."""
        self.users -= 1
        if not self.users:
            self.memory.drop()

    @property
    def room(self) -> int:
        """Bytes in the file, whole pages."""
        return -(-self.flat.nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Extent:
    """A part of a vector in memory, and where it lies in the file."""

    address: int
    nbytes: int
    start: int


class Records:
    """The file of one rank. Mutable; `close` it. `direct`: whether the file system's cache is left out; `read_bytes`, `written_bytes`,
    `waited_s`: since `restart`. Raises OutOfMemoryError where the disk is full, LongshiftError where it cannot be read."""

    def __init__(self, folder: Path):
        self.folder, self.end, self._largest = folder, 0, 0
        self._buffers = SimpleQueue[Tensor]()
        self._buffered = 0  # bytes of each
        try:
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as fault:
            raise LongshiftError(f"home: no file can be made in {folder}: {fault.strerror}") from None
        self.direct = _leaves_cache_out(self.file.fileno())
        self.readers, self.writers = (ThreadPoolExecutor(THREADS, f"longshift-home-{way}") for way in ("read", "write"))
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self.read_bytes = self.written_bytes = 0
        self.waited_s = 0.0

    def vector(self, elements: int, dtype: torch.dtype) -> Vector:
        """A vector of zeros in the file, without memory."""
        made = Vector(torch.empty(elements, dtype=dtype), self.end)
        if not self._grown(made.room):
            raise OutOfMemoryError(
                f"home: {self.folder} has no room for byte {self.end + made.room} of this rank's training state: choose another "
                "stream.folder, more ranks under ZeRO, or home: host"
            )
        made.memory.drop()
        self.end += made.room
        self._largest = max(self._largest, made.room)
        return made

    def double(self, vectors: Sequence[Vector], ranks: int = 1) -> bool:
        """Give vectors second places, if the disk has as much room again beside them, for all of the `ranks` that share it; whether it
        has."""
        room, disk = sum(vector.room for vector in vectors), os.statvfs(self.file.fileno())
        if not room or 2 * ranks * room > disk.f_bavail * disk.f_frsize or not self._grown(room):
            return False
        for vector in vectors:
            vector.second, self.end = self.end, self.end + vector.room
        return True

    def _grown(self, room: int) -> bool:
        """Have so many bytes more in the file, if the disk has them; whether it has."""
        try:
            if room:
                os.posix_fallocate(self.file.fileno(), self.end, room)
        except OSError as fault:
            if fault.errno not in NO_ROOM:
                raise LongshiftError(f"home: {self.folder}: {fault.strerror}") from None
            os.ftruncate(self.file.fileno(), self.end)
            return False
        return True

    def read(self, vector: Vector) -> None:
        """Start to bring a vector, where it is not in memory."""
        if not vector.users:
            self._wait(vector)
            vector.memory.hold()
            self._move(vector, vector.start, self.readers, self._read)
            self.read_bytes += vector.flat.nbytes
        vector.users += 1

    def ready(self, vector: Vector) -> None:
        """Return when a vector is in memory."""
        self._wait(vector)

    def write(self, vector: Vector, second: bool = False) -> None:
        """Start to write a vector, to its second place where that is said. Nobody changes it until it is `written`."""
        self._wait(vector)
        start = vector.second if second else vector.start
        assert start is not None
        self._move(vector, start, self.writers, self._write)
        self.written_bytes += vector.flat.nbytes

    def written(self, vector: Vector) -> None:
        """Return when the file has a vector, and give back its memory where nobody else holds it."""
        self._wait(vector)
        vector.evict()

    @contextmanager
    def here(self, vectors: Sequence[Vector], changed: bool = False) -> Iterator[None]:
        """Have vectors in memory meanwhile; `changed`: they are written after."""
        for vector in vectors:
            self.read(vector)
        for vector in vectors:
            self.ready(vector)
        yield
        for vector in vectors if changed else ():
            self.write(vector)
        for vector in vectors:
            if changed:
                self.written(vector)
            else:
                vector.evict()

    def close(self) -> None:
        for pool in (self.readers, self.writers):
            pool.shutdown(cancel_futures=True)
        self.file.close()

    def _wait(self, vector: Vector) -> None:
        began = time.perf_counter()
        try:
            for one in _taken(vector.moving):
                one.result()
        finally:
            self.waited_s += time.perf_counter() - began

    def _move(self, vector: Vector, start: int, threads: ThreadPoolExecutor, move: Callable[[Extent], None]) -> None:
        """Start to move a vector from or to a place, piece by piece. There is a buffer for each thread, no larger than what is moved at one
        time."""
        if self._buffered < min(PIECE, self._largest):
            self._buffered = min(PIECE, self._largest)
            self._buffers = SimpleQueue()
            for _ in range(2 * THREADS):
                room = torch.empty(self._buffered + ALIGN, dtype=torch.uint8)
                self._buffers.put(room[-room.data_ptr() % ALIGN :][: self._buffered])
        at, size = vector.flat.data_ptr(), vector.flat.nbytes
        pieces = [Extent(at + first, min(PIECE, size - first), start + first) for first in range(0, size, PIECE)]
        vector.moving = [threads.submit(move, piece) for piece in pieces]

    @contextmanager
    def _buffer(self, piece: Extent) -> Iterator[tuple[int, memoryview]]:
        """The address of a buffer, and its pages that a piece takes."""
        buffers = self._buffers
        room = buffers.get()
        try:
            size = -(-piece.nbytes // ALIGN) * ALIGN
            yield room.data_ptr(), memoryview((ctypes.c_char * size).from_address(room.data_ptr())).cast("B")
        finally:
            buffers.put(room)

    def _read(self, piece: Extent) -> None:
        """In a thread."""
        with self._buffer(piece) as (address, pages):
            at = 0
            while at < piece.nbytes:
                done = os.preadv(self.file.fileno(), [pages[at:]], piece.start + at)
                if not done:
                    raise LongshiftError(f"home: the file in {self.folder} ends before byte {piece.start + piece.nbytes}")
                at += done
            ctypes.memmove(piece.address, address, piece.nbytes)

    def _write(self, piece: Extent) -> None:
        """In a thread."""
        with self._buffer(piece) as (address, pages):
            ctypes.memmove(address, piece.address, piece.nbytes)
            at = 0
            while at < len(pages):
                try:
                    at += os.pwrite(self.file.fileno(), pages[at:], piece.start + at)
                except OSError as fault:
                    raise LongshiftError(f"home: {self.folder}: {fault.strerror}") from None


def _leaves_cache_out(file: int) -> bool:
    """Have an open file pass the file system's cache by, and whether it does."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):  # tmpfs has no other place; macOS has no such flag
        return False
    return True


def _taken(futures: list[Future]) -> Iterator[Future]:
    """All of them, which the list has no longer."""
    while futures:
        yield futures.pop(0)
