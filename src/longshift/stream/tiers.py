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

import mmap
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError
from longshift.stream.disk_file import BytesMoved, DiskFile, whole_pages

Key = Hashable
Tensors = tuple[Tensor, ...]

# Puts that keep what they send, and the bytes that these may have together, but for one alone.
WRITES = 2  # of a disk tier
IN_FLIGHT_BYTES = 256 << 20
UNDER_WAY = 4  # of a GPU's host tier
UNDER_WAY_BYTES = 512 << 20
# Pinned pieces that a GPU's disk tier copies through.
BOUNCES = 4
BOUNCE_BYTES = 8 << 20


class _Clock:
    """`with` it, in any number of threads: adds to `copying_s` the time for which at least one is
    inside. Mutable."""

    def __init__(self, moved: BytesMoved):
        self.moved = moved
        self.num_inside = 0
        self.begin_s = 0.0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            if not self.num_inside:
                self.begin_s = time.perf_counter()
            self.num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.num_inside -= 1
            if not self.num_inside:
                self.moved.copying_s += time.perf_counter() - self.begin_s


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

    @abstractmethod
    def close(self) -> None: ...


class DeviceTier(Tier):
    """Nothing moves: the device keeps the tensors. Fetched ones are those that were put."""

    def put(self, key: Key, *tensors: Tensor) -> None:
        if key in self.objects:
            self.drop(key)
        self.objects[key] = tensors
        self.moved.hold(_bytes(tensors))

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        tensors = self.objects[key]
        return lambda: tensors

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        """They are still the object's."""

    def drop(self, key: Key) -> None:
        self.moved.hold(-_bytes(self.objects.pop(key)))

    def close(self) -> None:
        self.objects.clear()


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
    stream out and a stream back."""

    out: Any = None
    back: Any = None

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
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
        size = _bytes(tensors)
        if self.out is not None:
            self.out.wait_stream(torch.cuda.current_stream(self.device))
        place, copy_end = self.send(tensors, size)
        if copy_end is not None:
            self.leaving |= {tensor.data_ptr(): copy_end for tensor in tensors}
        self.objects[key] = StoredObject(size, shapes, place, copy_end)
        self.moved.put_bytes += size
        self.moved.hold(size)

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        stored = self.objects[key]
        self.moved.fetched_bytes += stored.size
        return self.bring(stored)

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        # [Note: what waits on what]
        readers = (
            [] if self.out is None else [torch.cuda.current_stream(self.device).record_event()]
        )
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
            return torch.empty(shape, dtype=dtype, device=self.device)
        tensor, copies = spare.pop(0)
        for copy in copies:
            self.fill_after(copy)
        return tensor

    @abstractmethod
    def send(self, tensors: Tensors, size: int) -> tuple[Any, Any]:
        """Start to take contiguous tensors. Returns `place` and `left` of `StoredObject`."""

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

    At most WRITES objects, of at most `in_flight_bytes` (and always one), are on their way out, and
    their tensors are kept until the next that is too many, however fast the disk: memory is the
    same in every run. `checked`: each object's CRC is kept and compared. Raises OutOfMemoryError
    where the disk is full, LongshiftError for what comes back changed or cannot be read.
    """

    def __init__(self, folder: Path, in_flight_bytes: int = IN_FLIGHT_BYTES, checked: bool = False):
        super().__init__(torch.device("cpu"))
        self.in_flight_bytes = in_flight_bytes
        self.checked = checked
        self.file = DiskFile(folder, "offload", self.moved)
        self.copying = _Clock(self.moved)
        self.end = 0
        self.holes: dict[int, list[int]] = {}  # starts of free extents, by size
        self.writing: deque[tuple[Future, int, Tensors]] = deque()

    def send(self, tensors: Tensors, size: int) -> tuple[int, Future]:
        while self._is_too_much(size):
            self.file.wait(self.writing.popleft()[0])
        start = self._extent(size)
        copy = self._start(self.file.writers, partial(self._write, start, [*tensors]))
        self.writing.append((copy, size, tensors))
        return start, copy

    def _is_too_much(self, size: int) -> bool:
        """Whether `size` bytes have to wait for puts that are on their way out;
        one alone never has to."""
        if not self.writing:
            return False
        in_flight_bytes = sum(written_bytes for _, written_bytes, _ in self.writing)
        return len(self.writing) >= WRITES or size + in_flight_bytes > self.in_flight_bytes

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
            self.writing.clear()

    def close(self) -> None:
        self.file.close()

    def _extent(self, size: int) -> int:
        room = whole_pages(size)
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
        yield _bytes_of(tensor)

    def _bytes_in(self, tensor: Tensor) -> Iterator[memoryview]:
        """In a thread: where the bytes of a tensor are to be put, piece by piece; it has a piece
        when the next is asked for."""
        yield _bytes_of(tensor)


class Arena:
    """Host memory of exactly `size` bytes, pinned for CUDA until `release`: torch's own allocator
    rounds up to powers of two. No other has a part of its pages, which may not be pinned twice."""

    def __init__(self, size: int):
        self.bytes = _pages(size).fill_(1)  # they are there
        self._runtime: Any = torch.cuda.cudart()
        self._pinned = int(self._runtime.cudaHostRegister(self.bytes.data_ptr(), size, 0)) == 0
        if not self._pinned:
            raise OutOfMemoryError(f"CUDA did not register {size} bytes of host memory")

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape and format, from the first byte on."""
        return self.bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def release(self) -> None:
        if self._pinned:
            self._runtime.cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False

    __del__ = release


class HostTier(CopyTier):
    """Pinned host memory of a CUDA device; a stream for each direction. The host waits for it to
    give back memory, and [Note: pace].

    [Note: arenas] An object has an arena of its size, taken over from a dropped one: a put comes
    after whatever has waited for a fetch. Packs of other lengths have other sizes, so dropped ones
    are given back before more is pinned than was ever held.

    [Note: pace] What a put sends is free for others when its copy is done, and what the host asks
    for meanwhile is new memory. So it is no more than UNDER_WAY puts ahead of the device, or
    UNDER_WAY_BYTES (and always one), which has work for as long.
    """

    timed = False

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.make_streams()
        # Arenas that were dropped, each with the event after its last use; by size, in order.
        self.arenas: dict[int, list[tuple[Arena, Any]]] = {}
        # Bytes in whole pages: of objects, the most ever, of all arenas.
        self.held_room = self.most_room = self.pinned_room = 0
        self.under_way: deque[tuple[Any, int]] = deque()

    def send(self, tensors: Tensors, size: int) -> tuple[Arena, Any]:
        arena = self._arena(whole_pages(size))
        with torch.cuda.stream(self.out):
            for tensor, place in zip(tensors, _slices(arena.bytes, tensors)):
                place.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                tensor.record_stream(self.out)
            copy_end = self.out.record_event()
        self._pace(copy_end, size)
        return arena, copy_end

    def bring(self, stored: StoredObject) -> Callable[[], Tensors]:
        with torch.cuda.stream(self.back):
            self.back.wait_event(stored.left)
            tensors = tuple(self.memory(shape, dtype) for shape, dtype in stored.shapes)
            for tensor, place in zip(tensors, _slices(stored.place.bytes, tensors)):
                tensor.view(-1).view(torch.uint8).copy_(place, non_blocking=True)
            arrived = self.back.record_event()

        def wait() -> Tensors:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            return tensors

        return wait

    def fill_after(self, copy: Any) -> None:
        self.back.wait_event(copy)

    def forget(self, stored: StoredObject) -> None:
        room = whole_pages(stored.size)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        dropped = self.arenas[room] = self.arenas.pop(room, [])
        dropped.append((stored.place, self.out.record_event()))
        self.held_room -= room

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._release(self.pinned_room)

    def _pace(self, copy_end: Any, size: int) -> None:
        """Wait for the device, which is too many puts behind. [Note: pace]"""
        self.under_way.append((copy_end, size))
        while len(self.under_way) > 1:
            under_way_bytes = sum(put_bytes for _, put_bytes in self.under_way)
            if len(self.under_way) <= UNDER_WAY and under_way_bytes <= UNDER_WAY_BYTES:
                break
            oldest_end, _ = self.under_way.popleft()
            oldest_end.synchronize()

    def _arena(self, room: int) -> Arena:
        """Pinned memory of a dropped object of this size, else new. [Note: arenas]"""
        self.held_room += room
        self.most_room = max(self.most_room, self.held_room)
        if self.arenas.get(room):
            return self.arenas[room].pop()[0]
        self._release(self.pinned_room + room - self.most_room)
        self.pinned_room += room
        return Arena(room)

    def _release(self, count: int) -> None:
        """Give back at least `count` bytes of dropped arenas, as far as there are any."""
        for room, dropped in self.arenas.items():
            while dropped and count > 0:
                arena, last_use = dropped.pop(0)
                last_use.synchronize()
                arena.release()
                self.pinned_room -= room
                count -= room


class BouncedTier(DiskTier):
    """Disk of a CUDA device. Threads copy piece by piece through pinned memory, on a stream each
    way, and wait for each copy: what is written has left the device, and what is read is on it."""

    def __init__(
        self,
        device: torch.device,
        folder: Path,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        checked: bool = False,
    ):
        super().__init__(folder, in_flight_bytes, checked)
        self.device = device
        self.make_streams()
        self.slots = SimpleQueue[Arena]()
        for _ in range(BOUNCES):
            self.slots.put(Arena(BOUNCE_BYTES))

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self.back):
            return super().memory(shape, dtype)

    def fill_after(self, copy: Any) -> None:
        if isinstance(copy, Future):
            super().fill_after(copy)
        else:
            self.back.wait_event(copy)

    def close(self) -> None:
        super().close()
        while not self.slots.empty():
            self.slots.get().release()

    def _bytes_out(self, tensor: Tensor) -> Iterator[memoryview]:
        for piece, slot in self._bounced(tensor):
            with torch.cuda.stream(self.out):
                slot.copy_(piece, non_blocking=True)
                copy_end = self.out.record_event()
            copy_end.synchronize()
            yield _bytes_of(slot)

    def _bytes_in(self, tensor: Tensor) -> Iterator[memoryview]:
        for piece, slot in self._bounced(tensor):
            yield _bytes_of(slot)
            with torch.cuda.stream(self.back):
                piece.copy_(slot, non_blocking=True)
                arrived = self.back.record_event()
            arrived.synchronize()

    def _bounced(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of a tensor as bytes, each with as much pinned memory."""
        arena = self.slots.get()
        try:
            for piece in tensor.view(-1).view(torch.uint8).split(BOUNCE_BYTES):
                yield piece, arena.bytes[: len(piece)]
        finally:
            self.slots.put(arena)


def tier_of(offload: str, device: torch.device, folder: Path, checked: bool) -> Tier:
    """The memory that a layout names. On a CPU the device is host memory, so that `host` moves
    nothing. Raises LongshiftError."""
    if offload == "device" or (offload == "host" and device.type == "cpu"):
        return DeviceTier()
    if offload == "host":
        return HostTier(device)
    return (
        DiskTier(folder, checked=checked)
        if device.type == "cpu"
        else BouncedTier(device, folder, checked=checked)
    )


def _pages(size: int) -> Tensor:
    """uint8 [size], from the begin of a page on."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore


def _slices(memory: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pieces of `memory`, bytes, one after another, as large as the tensors."""
    return memory[: _bytes(tensors)].split([tensor.nbytes for tensor in tensors])
