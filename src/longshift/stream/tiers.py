"""Where what a backward needs waits: device, host or disk memory.

    put      start to take tensors, in place of what was put under that key; they must
             not change afterwards
    fetch    start to bring them; `wait` on what it returns gives tensors that may be
             read and written
    recycle  what was fetched is no longer used, and later fetches may fill its memory
    drop     forget an object

`put` and `fetch` return at once: the disk has threads for reading and for writing, CUDA a stream
for each direction, and a fetch of what is still on its way out follows it. No fetch may be under
way when its object is dropped or replaced.

[Note: what waits on what] A put reads tensors that nobody changes, so it only has to begin after
they were computed. A fetch fills memory whose last reader must have ended: what computed with it
(on the CPU that has ended when it is recycled), and a put that still takes it out.
"""

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError
from longshift.stream.disk_file import BytesMoved, CopyClock, DiskFile, whole_pages

CPU = torch.device("cpu")
Key = Hashable
Tensors = tuple[Tensor, ...]

# Puts of a disk tier that are under way, and the bytes that these may have together.
WRITES = 2
IN_FLIGHT_BYTES = 256 << 20


class Tier(ABC):
    """Objects are tuples of tensors. Mutable; `close` it. `timed`: seconds in `moved` are known;
    where copies are a GPU's they are not. `watch` sees each copy of a thread when
    it is asked for."""

    timed = True

    def __init__(self) -> None:
        self.moved = BytesMoved()
        self.watch: Callable[[Future], object] | None = None
        self.objects: dict[Key, Any] = {}

    @abstractmethod
    def put(self, key: Key, *tensors: Tensor) -> None: ...

    @abstractmethod
    def fetch(self, key: Key) -> Callable[[], Tensors]: ...

    @abstractmethod
    def recycle(self, tensors: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def drop(self, key: Key) -> None: ...

    def close(self) -> None:
        self.objects.clear()


class DeviceTier(Tier):
    """Nothing moves: the device keeps the tensors. Fetched ones are those that were put."""

    def put(self, key: Key, *tensors: Tensor) -> None:
        # Dropped first, so that the peak does not count both.
        if key in self.objects:
            self.drop(key)
        self.objects[key] = tensors
        self.moved.hold(size_of(tensors))

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        tensors = self.objects[key]
        return lambda: tensors

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        """They are still the object's."""

    def drop(self, key: Key) -> None:
        self.moved.hold(-size_of(self.objects.pop(key)))


@dataclass(frozen=True)
class StoredObject:
    """An object elsewhere. `place`: where it lies there; `left`: the future or event with which its
    copy out ends."""

    size: int
    shapes: list[tuple[torch.Size, torch.dtype]]
    place: Any
    left: Any


class CopyTier(Tier):
    """Objects are copied to another memory and back: a subclass says how. That of a GPU has a
    stream out and a stream back. `keeps_sent`: whether tensors that are sent stay as long as their
    puts count as under way."""

    keeps_sent = False
    out: Any = None
    back: Any = None

    def __init__(self, device: torch.device, max_puts: int, max_put_bytes: int):
        """`max_puts`, `max_put_bytes`: of puts that are under way, but for one alone."""
        super().__init__()
        self.device = device
        self.max_puts = max_puts
        self.max_put_bytes = max_put_bytes
        # What ends each, its bytes, and the tensors that it keeps.
        self.under_way: deque[tuple[Any, int, Tensors]] = deque()
        self.leaving: dict[int, Any] = {}  # by address, what the last copy out ends with
        # With what must end before they are filled.
        self.spare: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, list[Any]]]] = {}

    def make_streams(self) -> None:
        self.out = torch.cuda.Stream(self.device)
        self.back = torch.cuda.Stream(self.device)

    def put(self, key: Key, *tensors: Tensor) -> None:
        if key in self.objects:
            self.drop(key)
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        size = size_of(tensors)
        while self.under_way and not self._has_room(size):
            self.wait_sent(self.under_way.popleft()[0])
        # [Note: what waits on what] The copy begins when the tensors are computed.
        if self.out is not None:
            self.out.wait_stream(torch.cuda.current_stream(self.device))
        place, copy_end = self.send(tensors, size)
        if copy_end is not None:
            self.under_way.append((copy_end, size, tensors if self.keeps_sent else ()))
            self.leaving |= {tensor.data_ptr(): copy_end for tensor in tensors}
        self.objects[key] = StoredObject(size, shapes, place, copy_end)
        self.moved.put_bytes += size
        self.moved.hold(size)

    def _has_room(self, size: int) -> bool:
        """Whether another put may be under way."""
        put_bytes = sum(put_size for _, put_size, _ in self.under_way)
        return len(self.under_way) < self.max_puts and size + put_bytes <= self.max_put_bytes

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        stored = self.objects[key]
        self.moved.fetched_bytes += stored.size
        return self.bring(stored)

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        # [Note: what waits on what]
        readers = []
        if self.out is not None:
            readers.append(torch.cuda.current_stream(self.device).record_event())
        for tensor in tensors:
            copy_end = self.leaving.get(tensor.data_ptr())
            copies = readers if copy_end is None else [*readers, copy_end]
            self.spare.setdefault((tensor.shape, tensor.dtype), []).append((tensor, copies))

    def drop(self, key: Key) -> None:
        stored = self.objects.pop(key)
        self.forget(stored)
        self.moved.hold(-stored.size)
        # Sizes of the next pack are others. What it fetches is put first, and so comes after all
        # that read these.
        if not self.objects:
            self.spare = {}
            self.leaving = {}

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor to bring something into. [Note: what waits on what] New memory of a GPU is that
        of earlier packs, whose objects had left before this one."""
        spare = self.spare.get((shape, dtype))
        if not spare:
            return self.empty(shape, dtype)
        tensor, copies = spare.pop(0)
        for copy in copies:
            self.fill_after(copy)
        return tensor

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @abstractmethod
    def send(self, tensors: Tensors, size: int) -> tuple[Any, Any]:
        """Start to take contiguous tensors. Returns `place` and `left` of `StoredObject`."""

    @abstractmethod
    def wait_sent(self, copy: Any) -> None:
        """Have the host wait for the end of a copy out."""

    @abstractmethod
    def bring(self, stored: StoredObject) -> Callable[[], Tensors]:
        """Start to copy an object into tensors of `memory`. Returns what waits for them."""

    @abstractmethod
    def fill_after(self, copy: Any) -> None:
        """Have what is brought next begin when this copy out, or this event, has ended."""

    @abstractmethod
    def forget(self, stored: StoredObject) -> None:
        """Give back an object's place."""


class DiskTier(CopyTier):
    """A private file in `folder`.

    Tensors of puts are kept until the next that is too many, however fast the disk: memory is the
    same in every run. `checked`: each object's CRC is kept and compared. Raises OutOfMemoryError
    where the disk is full, LongshiftError for what comes back changed or cannot be read.
    """

    keeps_sent = True

    def __init__(self, folder: Path, checked: bool = False, device: torch.device = CPU):
        super().__init__(device, WRITES, IN_FLIGHT_BYTES)
        self.checked = checked
        self.file = DiskFile(folder, "offload", self.moved)
        self.copying = CopyClock(self.moved)
        self.end = 0
        self.holes: dict[int, list[int]] = {}  # starts of free extents, by size

    def send(self, tensors: Tensors, size: int) -> tuple[int, Future]:
        start = self._extent(size)
        return start, self._start(self.file.writers, partial(self._write, start, [*tensors]))

    def wait_sent(self, copy: Future) -> None:
        self.file.wait(copy)

    def bring(self, stored: StoredObject) -> Callable[[], Tensors]:
        tensors = tuple(self.memory(shape, dtype) for shape, dtype in stored.shapes)
        reading = self._start(self.file.readers, partial(self._read, stored, tensors))

        def wait() -> Tensors:
            self.file.wait(reading)
            return tensors

        return wait

    def fill_after(self, copy: Any) -> None:
        self.file.wait(copy)

    def forget(self, stored: StoredObject) -> None:
        self.file.wait(stored.left)
        self.holes.setdefault(whole_pages(stored.size), []).append(stored.place)
        if not self.objects:
            self.end = 0
            self.holes = {}
            self.under_way.clear()

    def close(self) -> None:
        self.file.close()

    def _extent(self, size: int) -> int:
        room = whole_pages(size)
        # Chunks have few sizes, so a hole of the same size is enough.
        if self.holes.get(room):
            return self.holes[room].pop()
        self.end += room
        return self.end - room

    def _start(self, threads: ThreadPoolExecutor, copy: Callable[[], object]) -> Future:
        """Start a copy in a thread, where `watch` sees it."""
        future = threads.submit(self._timed, copy)
        if self.watch:
            self.watch(future)
        return future

    def _timed(self, copy: Callable[[], object]) -> object:
        """In a thread."""
        with self.copying:
            return copy()

    def _write(self, start: int, tensors: list[Tensor]) -> int:
        """In a thread. Returns the CRC, or 0. The list is empty then: a pool keeps its arguments
        for a moment after a future has ended."""
        crc = 0
        while tensors:
            for view in self._bytes_out(tensors.pop(0)):
                crc = zlib.crc32(view, crc) if self.checked else 0
                try:
                    self.file.write(start, view)
                except OSError as fault:
                    file_gib = self.file.taken_bytes / 2**30
                    needed_gib = self.moved.held_bytes / 2**30
                    raise OutOfMemoryError(
                        f"offload: {self.file.folder} took {file_gib:.2f} of {needed_gib:.2f} GiB"
                        f" and no more: {fault.strerror}; choose another stream.folder, every1 or"
                        " shorter documents"
                    ) from None
                start += len(view)
        return crc

    def _read(self, stored: StoredObject, tensors: Tensors) -> None:
        """In a thread."""
        # A read may begin while its object is still written.
        written_crc = stored.left.result()
        crc = 0
        start = stored.place
        for tensor in tensors:
            for view in self._bytes_in(tensor):
                self.file.read(start, view, len(view))
                start += len(view)
                crc = zlib.crc32(view, crc) if self.checked else 0
        if crc != written_crc:
            raise LongshiftError(
                f"offload: {stored.size} bytes came back from {self.file.folder} changed (CRC"
                f" {crc:#x}, was {written_crc:#x})"
            )

    def _bytes_out(self, tensor: Tensor) -> Iterator[memoryview]:
        """In a thread: the bytes of a tensor, piece by piece."""
        yield bytes_of(tensor)

    def _bytes_in(self, tensor: Tensor) -> Iterator[memoryview]:
        """In a thread: where the bytes of a tensor are to be put, piece by piece; it has a piece
        when the next is asked for."""
        yield bytes_of(tensor)


def size_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore
