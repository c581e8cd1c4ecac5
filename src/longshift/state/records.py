"""Vectors of the training state, in memory or in a file of the rank of which only what is in use is
in memory. ZeRO-Infinity (arXiv 2104.07857) for training states.

    file     | bucket 0: master  moments  grad | bucket 1: ... | second places
             a record a bucket, at page boundaries
    memory   storage that comes with `hold` or `read` and goes with `evict`, or when `written` says
             that the file has it

    read ─── await read ─── in use ─── evict            not changed
                                  └─── write ─── await write      changed

When is the program's (`program.step`). Bytes pass through a few buffers at page boundaries, so that
the file system's cache is left out where it can be (O_DIRECT): it would keep a second copy of a
state that does not fit into memory, and stop writers when it is full. The file is as large as it
will ever be before the first step. Bytes an element: a home format for the master, each moment and
the gradient sum; of a bucket that is not trained, the master in the compute format. Masters and
moments have two places each where the disk has room ([Note: early updates] in `program.step`).
"""

import ctypes
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError
from longshift.files import NO_ROOM
from longshift.layout.blocks import scales_of
from longshift.layout.box import Box
from longshift.state.resizable import ResizableStorage
from longshift.stream.disk_file import ALIGN, THREADS, BytesMoved, DiskFile, whole_pages

PIECE = 8 << 20  # bytes that a thread reads or writes at one time


@dataclass(frozen=True)
class PlacedBox:
    """A box of weight `name`, and where it lies in the vectors of a shard: its elements from
    `start` on, the scales of its `blocks` from `first_scale` on."""

    name: str
    box: Box
    start: int
    blocks: Box
    first_scale: int

    def values(self, flat: Tensor) -> Tensor:
        """The box in a vector of elements, as a view."""
        return flat[self.start :][: self.box.elements].view(self.box.shape)

    def scales(self, flat: Tensor) -> Tensor:
        """Its blocks in a vector of scales, as a view."""
        return flat[self.first_scale :][: self.blocks.elements].view(self.blocks.shape)


def place_boxes(boxes: Iterable[tuple[str, Box]]) -> tuple[PlacedBox, ...]:
    """Boxes of weights, one after another."""
    placed = []
    start = 0
    first_scale = 0
    for name, box in boxes:
        blocks = scales_of(box)
        placed.append(PlacedBox(name, box, start, blocks, first_scale))
        start += box.elements
        first_scale += blocks.elements
    return tuple(placed)


class Vector:
    """A vector of a bucket that stays in memory: nothing has to be read, written or evicted."""

    def __init__(self, flat: Tensor):
        self.flat = flat

    def hold(self) -> None:
        """Have memory, with what was in it or, where there was none, anything."""

    def evict(self) -> None:
        """Give back the memory of what has not changed, where nobody else holds it."""

    def read(self) -> None:
        """Start to bring it, where it is not in memory."""

    def ready(self) -> None:
        """Return when it is in memory."""

    def write(self, second: bool = False) -> None:
        """Start to write it, to its second place where that is said.
        Nobody changes it until it is `written`."""

    def written(self) -> None:
        """Return when the file has it, and give back its memory where nobody else holds it."""


class DiskVector(Vector):
    """A vector whose storage comes and goes, and where it lies in the file. Mutable. `users`: how
    many hold it; `second`: a place where another state of it can lie meanwhile."""

    def __init__(self, records: "Records", flat: Tensor, start: int):
        super().__init__(flat)
        self.records = records
        self.start = start
        self.second: int | None = None
        self.memory = ResizableStorage(flat)
        self.memory.drop()
        self.users = 0
        self.moving: list[Future] = []

    def hold(self) -> None:
        self.users += 1
        self.memory.hold()

    def evict(self) -> None:
        self.users -= 1
        if not self.users:
            self.memory.drop()

    def read(self) -> None:
        if not self.users:
            # A copy that is still under way uses this memory.
            self.ready()
            self.memory.hold()
            self.moving = self.records.start(
                self.records.readers, self.records.read_piece, self.flat, self.start
            )
            self.records.moved.fetched_bytes += self.flat.nbytes
        self.users += 1

    def ready(self) -> None:
        while self.moving:
            self.records.wait(self.moving.pop(0))

    def write(self, second: bool = False) -> None:
        # A read fills the memory that is written.
        self.ready()
        start = self.second if second else self.start
        assert start is not None
        self.moving = self.records.start(
            self.records.writers, self.records.write_piece, self.flat, start
        )
        self.records.moved.put_bytes += self.flat.nbytes

    def written(self) -> None:
        self.ready()
        self.evict()

    @property
    def room(self) -> int:
        """Bytes in the file, whole pages."""
        return whole_pages(self.flat.nbytes)


@contextmanager
def in_memory(vectors: Sequence[Vector], changed: bool = False) -> Iterator[None]:
    """Have vectors in memory meanwhile; `changed`: they are written after."""
    for vector in vectors:
        vector.read()
    for vector in vectors:
        vector.ready()
    yield
    for vector in vectors if changed else ():
        vector.write()
    for vector in vectors:
        if changed:
            vector.written()
        else:
            vector.evict()


@dataclass(frozen=True)
class Extent:
    """A part of a vector in memory, and where it lies in the file."""

    address: int
    nbytes: int
    start: int


class Records(DiskFile):
    """The file of one rank. Mutable; `close` it. `direct`: whether the file system's cache is left
    out; `moved`: what was read and written. Raises OutOfMemoryError where the disk is full,
    LongshiftError where it cannot be read."""

    def __init__(self, folder: Path):
        super().__init__(folder, "home", BytesMoved())
        self.end = self._largest = 0
        self._buffers = SimpleQueue[Tensor]()
        self._buffered = 0  # bytes of each
        self.direct = _leaves_cache_out(self.fileno())

    def vector(self, elements: int, dtype: torch.dtype) -> DiskVector:
        """A vector of zeros in the file, without memory. Raises OutOfMemoryError where the disk has
        no room."""
        vector = DiskVector(self, torch.empty(elements, dtype=dtype), self.end)
        if not self._grow(vector.room):
            raise OutOfMemoryError(
                f"home: {self.folder} has no room for byte {self.end + vector.room} of this rank's"
                " training state: choose another stream.folder, more ranks under ZeRO, or home:"
                " host"
            )
        self.end += vector.room
        self._largest = max(self._largest, vector.room)
        return vector

    def double(self, vectors: Sequence[DiskVector], ranks: int = 1) -> bool:
        """Give vectors second places, if the disk has as much room again beside them, for all of
        the `ranks` that share it; whether it has."""
        room = sum(vector.room for vector in vectors)
        disk = os.statvfs(self.fileno())
        free_bytes = disk.f_bavail * disk.f_frsize
        if not room or 2 * ranks * room > free_bytes or not self._grow(room):
            return False
        for vector in vectors:
            vector.second = self.end
            self.end += vector.room
        return True

    def _grow(self, room: int) -> bool:
        """Have so many bytes more in the file, if the disk has them; whether it has."""
        try:
            if room:
                os.posix_fallocate(self.fileno(), self.end, room)
        except OSError as fault:
            if fault.errno not in NO_ROOM:
                raise LongshiftError(f"home: {self.folder}: {fault.strerror}") from None
            # A part of it may have been given.
            os.ftruncate(self.fileno(), self.end)
            return False
        return True

    def start(
        self, threads: ThreadPoolExecutor, copy: Callable[[Extent], None], flat: Tensor, start: int
    ) -> list[Future]:
        """Start to copy a vector from or to a place, piece by piece. There is a buffer for each
        thread, no larger than what is copied at one time."""
        # 1. Buffers, at page boundaries, when they are first needed.
        if self._buffered < min(PIECE, self._largest):
            self._buffered = min(PIECE, self._largest)
            self._buffers = SimpleQueue()
            for _ in range(2 * THREADS):
                room = torch.empty(self._buffered + ALIGN, dtype=torch.uint8)
                self._buffers.put(room[-room.data_ptr() % ALIGN :][: self._buffered])

        # 2. The copies.
        address = flat.data_ptr()
        size = flat.nbytes
        copies = []
        for first in range(0, size, PIECE):
            piece = Extent(address + first, min(PIECE, size - first), start + first)
            copies.append(threads.submit(copy, piece))
        return copies

    @contextmanager
    def _buffer(self, piece: Extent) -> Iterator[tuple[int, memoryview]]:
        """The address of a buffer, and its pages that a piece takes."""
        # `_buffers` may be another queue, of larger ones, when this piece is done.
        buffers = self._buffers
        room = buffers.get()
        try:
            size = whole_pages(piece.nbytes)
            address = room.data_ptr()
            yield address, memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        finally:
            buffers.put(room)

    def read_piece(self, piece: Extent) -> None:
        """In a thread."""
        with self._buffer(piece) as (address, pages):
            self.read(piece.start, pages, piece.nbytes)
            ctypes.memmove(piece.address, address, piece.nbytes)

    def write_piece(self, piece: Extent) -> None:
        """In a thread. Raises LongshiftError where the disk refuses it."""
        with self._buffer(piece) as (address, pages):
            ctypes.memmove(address, piece.address, piece.nbytes)
            try:
                self.write(piece.start, pages)
            except OSError as fault:
                raise LongshiftError(f"home: {self.folder}: {fault.strerror}") from None


def _leaves_cache_out(file: int) -> bool:
    """Have an open file pass the file system's cache by, and whether it does."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):  # tmpfs has no other place; macOS has no such flag
        return False
    return True
