"""Home on disk: masters, moments and gradient sums of a rank in a file, of which only what is in use is in memory. ZeRO-Infinity
(arXiv 2104.07857) for training states.

    file     | bucket 0: master  moments  grad | bucket 1: ... |                      a record a bucket, at page boundaries
    memory              storage that comes with `hold` or `read` and goes with `evict`, or when `written` says that the file has it

    read ─── await read ─── in use ─── evict            not changed
                                  └─── write ─── await write      changed

When is the program's (`program.step`). The file is as large as it will ever be before the first step, has no name, and is gone with the
process. Bytes an element: a home format for the master, each moment and the gradient sum; of a bucket that is not trained, the master in
the compute format.
"""

import ctypes
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError
from longshift.files import NO_ROOM
from longshift.state.resized import Resized

THREADS = 2  # for each direction
ALIGN = 4096  # bytes: a page
PIECE = 8 << 20  # bytes that a thread reads or writes at one time


@dataclass
class Vector:
    """A vector of a bucket: `flat`, whose storage comes and goes, and where it lies in the file. Mutable. `users`: how many hold it."""

    flat: Tensor
    start: int
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
    def bytes(self) -> memoryview:
        """The memory itself: torch never resizes again what it has given to numpy."""
        return memoryview((ctypes.c_char * self.flat.nbytes).from_address(self.flat.data_ptr())).cast("B")


class Records:
    """The file of one rank. Mutable; `close` it. `read_bytes`, `written_bytes`, `waited_s`: since `restart`. Raises OutOfMemoryError where
    the disk is full, LongshiftError where it cannot be read."""

    def __init__(self, folder: Path):
        self.folder, self.end = folder, 0
        try:
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as fault:
            raise LongshiftError(f"home: no file can be made in {folder}: {fault.strerror}") from None
        self.readers, self.writers = (ThreadPoolExecutor(THREADS, f"longshift-home-{way}") for way in ("read", "write"))
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self.read_bytes = self.written_bytes = 0
        self.waited_s = 0.0

    def vector(self, elements: int, dtype: torch.dtype) -> Vector:
        """A vector of zeros in the file, without memory."""
        flat = torch.empty(elements, dtype=dtype)
        room = -(-flat.nbytes // ALIGN) * ALIGN
        try:
            if room:
                os.posix_fallocate(self.file.fileno(), self.end, room)
        except OSError as fault:
            if fault.errno not in NO_ROOM:
                raise LongshiftError(f"home: {self.folder}: {fault.strerror}") from None
            raise OutOfMemoryError(
                f"home: {self.folder} has no room for byte {self.end + room} of this rank's training state: choose another stream.folder, "
                "more ranks under ZeRO, or home: host"
            ) from None
        made = Vector(flat, self.end)
        made.memory.drop()
        self.end += room
        return made

    def read(self, vector: Vector) -> None:
        """Start to bring a vector, where it is not in memory."""
        self._wait(vector)
        if not vector.users:
            vector.memory.hold()
            vector.moving = [self.readers.submit(self._read, piece, start) for piece, start in _pieces(vector)]
            self.read_bytes += vector.flat.nbytes
        vector.users += 1

    def ready(self, vector: Vector) -> None:
        """Return when a vector is in memory."""
        self._wait(vector)

    def write(self, vector: Vector) -> None:
        """Start to write a vector, which nobody changes until it is `written`."""
        self._wait(vector)
        vector.moving = [self.writers.submit(self._write, piece, start) for piece, start in _pieces(vector)]
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

    def _read(self, view: memoryview, start: int) -> None:
        """In a thread."""
        while view:
            done = os.preadv(self.file.fileno(), [view], start)
            if not done:
                raise LongshiftError(f"home: the file in {self.folder} ends before byte {start}")
            view, start = view[done:], start + done

    def _write(self, view: memoryview, start: int) -> None:
        """In a thread."""
        while view:
            try:
                done = os.pwrite(self.file.fileno(), view, start)
            except OSError as fault:
                raise LongshiftError(f"home: {self.folder}: {fault.strerror}") from None
            view, start = view[done:], start + done


def _pieces(vector: Vector) -> Iterable[tuple[memoryview, int]]:
    """Parts of a vector's memory, and where they lie in the file."""
    whole = vector.bytes
    return [(whole[first : first + PIECE], vector.start + first) for first in range(0, len(whole), PIECE)]


def _taken(futures: list[Future]) -> Iterator[Future]:
    """All of them, which the list has no longer."""
    while futures:
        yield futures.pop(0)
