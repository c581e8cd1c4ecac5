"""Where what a backward needs waits: device, host or disk memory.

    put      start to take tensors, in place of what was put under that key; they must not change afterwards
    fetch    start to bring them; `wait` on what it returns gives tensors that may be read and written
    recycle  what was fetched is no longer used, and later fetches may fill its memory
    drop     forget an object

`put` and `fetch` return at once: the disk has threads for reading and for writing, CUDA a stream for each direction, and a
fetch of what is still on its way out follows it. No fetch may be under way when its object is dropped or replaced.

[Note: what waits on what] A put reads tensors that nobody changes, so it only has to begin after they were computed. A fetch fills memory
whose last reader must have ended: what computed with it (on the CPU that has ended when it is recycled), and a put that still takes it out.
"""

import mmap
import os
import tempfile
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError

Key = Hashable
Tensors = tuple[Tensor, ...]

THREADS = 2  # for each direction
ALIGN = 4096  # bytes: a page
WRITES, UNDER_WAY = 2, 4  # puts of a disk tier, and of a GPU's host tier, that keep what they send
IN_FLIGHT_BYTES, UNDER_WAY_BYTES = 256 << 20, 512 << 20  # that these puts may have together, but for one alone
BOUNCES, BOUNCE_BYTES = 4, 8 << 20  # pinned pieces that a GPU's disk tier copies through


@dataclass
class Moved:
    """What a tier has done. Mutable. `waited_s`: computing waited for a copy; `copying_s`: at least one copy was under way."""

    put_bytes: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0
    copying_s: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, count: int) -> None:
        self.held_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def restart(self) -> None:
        """Count from here; what is held stays. No copy may be under way."""
        self.put_bytes = self.fetched_bytes = 0
        self.waited_s = self.copying_s = 0.0
        self.peak_bytes = self.held_bytes


class _Clock:
    """`with` it, in any number of threads: adds to `copying_s` the time for which at least one is inside. Mutable."""

    def __init__(self, moved: Moved):
        self.moved, self.inside, self.since, self.lock = moved, 0, 0.0, threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.since = time.perf_counter()
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.moved.copying_s += time.perf_counter() - self.since


class Tier(ABC):
    """Objects are tuples of tensors. Mutable; `close` it. `timed`: seconds in `moved` are known; where copies are a GPU's they are not.
    `watch` sees each copy of a thread when it is asked for."""

    timed = True

    def __init__(self) -> None:
        self.moved = Moved()
        self.watch: Callable[[Future], object] | None = None

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

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[Key, Tensors] = {}

    def put(self, key: Key, *tensors: Tensor) -> None:
        if key in self.objects:
            self.drop(key)
        self.objects[key] = tensors
        self.moved.hold(_bytes(tensors))

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        found = self.objects[key]
        return lambda: found

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        """They are still the object's."""

    def drop(self, key: Key) -> None:
        self.moved.hold(-_bytes(self.objects.pop(key)))

    def close(self) -> None:
        self.objects.clear()


@dataclass
class _Stored:
    """An object on disk. Mutable: `reading` is its last fetch. `written` gives the CRC."""

    start: int
    size: int
    shapes: list[tuple[torch.Size, torch.dtype]]
    written: Future
    reading: Future | None = None


class DiskTier(Tier):
    """A private file in `folder` that is unlinked at once: only this process can open it, and nothing is left behind however it ends.

    At most WRITES objects, of at most `in_flight_bytes` (and always one), are on their way out, and their tensors are kept until the next
    that is too many, however fast the disk: memory is the same in every run. `checked`: each object's CRC is kept
    and compared. Raises OutOfMemoryError where the disk is full, LongshiftError for what comes back changed or cannot be read.
    """

    def __init__(self, folder: Path, in_flight_bytes: int = IN_FLIGHT_BYTES, checked: bool = False):
        super().__init__()
        self.folder, self.in_flight_bytes, self.checked = folder, in_flight_bytes, checked
        try:
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as fault:
            raise LongshiftError(f"offload: no file can be made in {folder}: {fault.strerror}") from None
        self.copying = _Clock(self.moved)
        self.readers, self.writers = (ThreadPoolExecutor(THREADS, f"longshift-{way}") for way in ("read", "write"))
        self.objects: dict[Key, _Stored] = {}
        self.end = 0
        self.holes: dict[int, list[int]] = {}  # starts of free extents, by size
        self.writing: deque[tuple[Future, int, Tensors]] = deque()
        self.leaving: dict[int, Future] = {}  # by address
        self.spare: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, Future | None]]] = {}

    def put(self, key: Key, *tensors: Tensor) -> None:
        if key in self.objects:
            self.drop(key)
        tensors = tuple(t.contiguous() for t in tensors)
        size = _bytes(tensors)
        self._room_for(size)
        start = self._extent(size)
        written = self.writers.submit(self._copy, self._write, start, [*tensors])
        if self.watch:
            self.watch(written)
        self.leaving |= {tensor.data_ptr(): written for tensor in tensors}
        self.objects[key] = _Stored(start, size, [(t.shape, t.dtype) for t in tensors], written)
        self.writing.append((written, size, tensors))
        self.moved.put_bytes += size
        self.moved.hold(size)

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        stored = self.objects[key]
        tensors = tuple(self._memory(shape, dtype) for shape, dtype in stored.shapes)
        stored.reading = reading = self.readers.submit(self._copy, self._read, stored, tensors)
        if self.watch:
            self.watch(reading)
        self.moved.fetched_bytes += stored.size

        def wait() -> Tensors:
            self._wait(reading)
            return tensors

        return wait

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.spare.setdefault((tensor.shape, tensor.dtype), []).append((tensor, self.leaving.get(tensor.data_ptr())))

    def drop(self, key: Key) -> None:
        stored = self.objects.pop(key)
        self._wait(stored.written)
        self.holes.setdefault(_aligned(stored.size), []).append(stored.start)
        self.moved.hold(-stored.size)
        if not self.objects:  # sizes of the next pack are others
            self.end, self.holes, self.spare, self.leaving = 0, {}, {}, {}
            self.writing.clear()

    def close(self) -> None:
        for pool in (self.readers, self.writers):
            pool.shutdown(cancel_futures=True)
        self.file.close()

    def _extent(self, size: int) -> int:
        room = _aligned(size)
        if self.holes.get(room):
            return self.holes[room].pop()
        self.end += room
        return self.end - room

    def _memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """[Note: what waits on what]"""
        spare = self.spare.get((shape, dtype))
        if not spare:
            return torch.empty(shape, dtype=dtype)
        tensor, leaving = spare.pop(0)
        if leaving is not None:
            self._wait(leaving)
        return tensor

    def _room_for(self, size: int) -> None:
        while len(self.writing) >= WRITES or (self.writing and size + sum(s for _, s, _ in self.writing) > self.in_flight_bytes):
            self._wait(self.writing.popleft()[0])

    def _wait(self, future: Future) -> Any:
        began = time.perf_counter()
        try:
            return future.result()
        finally:
            self.moved.waited_s += time.perf_counter() - began

    def _copy(self, way: Callable[..., Any], *arguments: object) -> Any:
        """In a thread."""
        with self.copying:
            return way(*arguments)

    def _write(self, start: int, tensors: list[Tensor]) -> int:
        """In a thread. Returns the CRC, or 0. The list is empty then: a pool keeps its arguments for a moment after a future has ended."""
        crc = 0
        while tensors:
            for view in self._bytes_out(tensors.pop(0)):
                crc = zlib.crc32(view, crc) if self.checked else 0
                while view:
                    try:
                        done = os.pwrite(self.file.fileno(), view, start)
                    except OSError as fault:
                        took, held = os.fstat(self.file.fileno()).st_blocks * 512 / 2**30, self.moved.held_bytes / 2**30
                        raise OutOfMemoryError(
                            f"offload: {self.folder} took {took:.2f} of {held:.2f} GiB and no more: {fault.strerror}; choose another "
                            "stream.folder, every1 or shorter documents"
                        ) from None
                    view, start = view[done:], start + done
        return crc

    def _read(self, stored: _Stored, tensors: Tensors) -> None:
        """In a thread."""
        written, crc, start = stored.written.result(), 0, stored.start
        for tensor in tensors:
            for view in self._bytes_in(tensor):
                rest = view
                while rest:
                    done = os.preadv(self.file.fileno(), [rest], start)
                    if not done:
                        raise LongshiftError(f"offload: the file in {self.folder} ends before byte {start}")
                    rest, start = rest[done:], start + done
                crc = zlib.crc32(view, crc) if self.checked else 0
        if crc != written:
            raise LongshiftError(f"offload: {stored.size} bytes came back from {self.folder} changed (CRC {crc:#x}, was {written:#x})")

    def _bytes_out(self, tensor: Tensor) -> Iterator[memoryview]:
        """In a thread: the bytes of a tensor, piece by piece."""
        yield _bytes_of(tensor)

    def _bytes_in(self, tensor: Tensor) -> Iterator[memoryview]:
        """In a thread: where the bytes of a tensor are to be put, piece by piece; it has a piece when the next is asked for."""
        yield _bytes_of(tensor)


class Arena:
    """Host memory of exactly `size` bytes, pinned for CUDA until `release`: torch's own allocator rounds up to powers of two. No other has
    a part of its pages, which may not be pinned twice."""

    def __init__(self, size: int):
        self.bytes = _pages(size).fill_(1)  # they are there
        self._runtime: Any = torch.cuda.cudart()
        self._pinned = int(self._runtime.cudaHostRegister(self.bytes.data_ptr(), size, 0)) == 0
        if not self._pinned:
            raise OutOfMemoryError(f"CUDA did not register {size} bytes of host memory")

    def release(self) -> None:
        if self._pinned:
            self._runtime.cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False

    __del__ = release


@dataclass
class _Pinned:
    """An object in host memory. Mutable. `ready`: recorded when it is there."""

    arena: Arena
    shapes: list[tuple[torch.Size, torch.dtype]]
    size: int
    ready: Any


class HostTier(Tier):
    """Pinned host memory of a CUDA device; a stream for each direction. The host waits for it to give back memory, and [Note: pace].

    [Note: arenas] An object has an arena of its size, taken over from a dropped one: a put comes after whatever has waited for a fetch.
    Packs of other lengths have other sizes, so dropped ones are given back before more is pinned than was ever held.

    [Note: pace] What a put sends is free for others when its copy is done, and what the host asks for meanwhile is new memory. So it is no
    more than UNDER_WAY puts ahead of the device, or UNDER_WAY_BYTES (and always one), which has work for as long.
    """

    timed = False

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.objects: dict[Key, _Pinned] = {}
        self.arenas: dict[int, list[tuple[Arena, Any]]] = {}  # dropped, and the event after the last use; by size, in order
        self.held_room = self.most_room = self.pinned_room = 0  # bytes in whole pages: of objects, the most ever, of all arenas
        self.leaving: dict[int, Any] = {}  # by address
        self.spare: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, list[Any]]]] = {}
        self.under_way: deque[tuple[Any, int]] = deque()

    def put(self, key: Key, *tensors: Tensor) -> None:
        if key in self.objects:
            self.drop(key)
        tensors = tuple(t.contiguous() for t in tensors)
        size = _bytes(tensors)
        arena = self._arena(_aligned(size))
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            for tensor, place in zip(tensors, _slices(arena.bytes, tensors)):
                place.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                tensor.record_stream(self.out)
            ready = self.out.record_event()
        self.leaving |= {tensor.data_ptr(): ready for tensor in tensors}
        self.objects[key] = _Pinned(arena, [(t.shape, t.dtype) for t in tensors], size, ready)
        self.moved.put_bytes += size
        self.moved.hold(size)
        self._pace(ready, size)

    def fetch(self, key: Key) -> Callable[[], Tensors]:
        stored = self.objects[key]
        tensors = []
        with torch.cuda.stream(self.back):
            self.back.wait_event(stored.ready)
            for shape, dtype in stored.shapes:
                spare = self.spare.get((shape, dtype))
                tensor, after = spare.pop(0) if spare else (torch.empty(shape, dtype=dtype, device=self.device), [])
                for event in after:
                    self.back.wait_event(event)
                tensors.append(tensor)
            for tensor, place in zip(tensors, _slices(stored.arena.bytes, tensors)):
                tensor.view(-1).view(torch.uint8).copy_(place, non_blocking=True)
            arrived = self.back.record_event()
        self.moved.fetched_bytes += stored.size

        def wait() -> Tensors:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            return tuple(tensors)

        return wait

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        free = torch.cuda.current_stream(self.device).record_event()
        for tensor in tensors:
            leaving = self.leaving.get(tensor.data_ptr())
            self.spare.setdefault((tensor.shape, tensor.dtype), []).append((tensor, [free] if leaving is None else [free, leaving]))

    def drop(self, key: Key) -> None:
        stored = self.objects.pop(key)
        room = _aligned(stored.size)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        dropped = self.arenas[room] = self.arenas.pop(room, [])
        dropped.append((stored.arena, self.out.record_event()))
        self.held_room -= room
        self.moved.hold(-stored.size)
        if not self.objects:  # sizes of the next pack are others; what it fetches is put first, and so comes after all that read these
            self.spare, self.leaving = {}, {}

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._release(self.pinned_room)

    def _pace(self, ready: Any, size: int) -> None:
        """[Note: pace]"""
        self.under_way.append((ready, size))
        while len(self.under_way) > UNDER_WAY or (len(self.under_way) > 1 and sum(s for _, s in self.under_way) > UNDER_WAY_BYTES):
            self.under_way.popleft()[0].synchronize()

    def _arena(self, room: int) -> Arena:
        """[Note: arenas]"""
        self.held_room += room
        self.most_room = max(self.most_room, self.held_room)
        if self.arenas.get(room):
            return self.arenas[room].pop()[0]
        self._release(self.pinned_room + room - self.most_room)
        self.pinned_room += room
        return Arena(room)

    def _release(self, count: int) -> None:
        """At least so many bytes of dropped arenas, as far as there are any."""
        for room, dropped in self.arenas.items():
            while dropped and count > 0:
                arena, after = dropped.pop(0)
                after.synchronize()
                arena.release()
                self.pinned_room -= room
                count -= room


class BouncedTier(DiskTier):
    """Disk of a CUDA device. Threads copy piece by piece through pinned memory, on a stream each way, and wait for each copy: what is
    written has left the device, and what is read is on it. `free`: by `id` of what was recycled, recorded after its last use."""

    def __init__(self, device: torch.device, folder: Path, in_flight_bytes: int = IN_FLIGHT_BYTES, checked: bool = False):
        super().__init__(folder, in_flight_bytes, checked)
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.slots = SimpleQueue[Arena]()
        for _ in range(BOUNCES):
            self.slots.put(Arena(BOUNCE_BYTES))
        self.free: dict[int, Any] = {}

    def put(self, key: Key, *tensors: Tensor) -> None:
        tensors = tuple(t.contiguous() for t in tensors)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        super().put(key, *tensors)

    def recycle(self, tensors: Sequence[Tensor]) -> None:
        free = torch.cuda.current_stream(self.device).record_event()
        self.free |= {id(tensor): free for tensor in tensors}
        super().recycle(tensors)

    def drop(self, key: Key) -> None:
        super().drop(key)
        if not self.objects:
            self.free = {}

    def close(self) -> None:
        super().close()
        while not self.slots.empty():
            self.slots.get().release()

    def _memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """[Note: what waits on what] New memory is that of earlier packs, whose objects were written before this one."""
        with torch.cuda.stream(self.back):
            if not self.spare.get((shape, dtype)):
                return torch.empty(shape, dtype=dtype, device=self.device)
            tensor = super()._memory(shape, dtype)
            self.back.wait_event(self.free.pop(id(tensor)))
            return tensor

    def _bytes_out(self, tensor: Tensor) -> Iterator[memoryview]:
        for piece, slot in self._bounced(tensor):
            with torch.cuda.stream(self.out):
                slot.copy_(piece, non_blocking=True)
                left = self.out.record_event()
            left.synchronize()
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
    """The memory that a layout names. On a CPU the device is host memory, so that `host` moves nothing. Raises LongshiftError."""
    if offload == "device" or (offload == "host" and device.type == "cpu"):
        return DeviceTier()
    if offload == "host":
        return HostTier(device)
    return DiskTier(folder, checked=checked) if device.type == "cpu" else BouncedTier(device, folder, checked=checked)


def _pages(size: int) -> Tensor:
    """uint8 [size], from the begin of a page on."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _slices(memory: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pieces of `memory`, bytes, one after another, as large as the tensors."""
    return memory[: _bytes(tensors)].split([t.nbytes for t in tensors])
