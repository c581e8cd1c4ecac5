"""Tiers of a GPU: pinned memory of its host, and a file of its host, with a stream for each
direction."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from longshift.errors import OutOfMemoryError
from longshift.stream.disk_file import whole_pages
from longshift.stream.tiers import (
    CopyTier,
    DeviceTier,
    DiskTier,
    StoredObject,
    Tensors,
    Tier,
    bytes_of,
    size_of,
)

# Puts of a host tier that are under way, and the bytes that these may have together.
UNDER_WAY = 4
UNDER_WAY_BYTES = 512 << 20
# Pinned pieces that a disk tier copies through.
BOUNCES = 4
BOUNCE_BYTES = 8 << 20


class Arena:
    """Host memory of exactly `size` bytes, pinned for CUDA until `release`: torch's own allocator
    rounds up to powers of two. No other has a part of its pages, which may not be pinned twice."""

    def __init__(self, size: int):
        self._pinned = False
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
    for meanwhile is new memory. So it is only some puts ahead of the device, which has work for as
    long.
    """

    timed = False

    def __init__(self, device: torch.device):
        super().__init__(device, UNDER_WAY, UNDER_WAY_BYTES)
        self.make_streams()
        # Arenas that were dropped, each with the event after its last use; by size, in order.
        self.arenas: dict[int, list[tuple[Arena, Any]]] = {}
        # Bytes in whole pages: of objects, the most ever, of all arenas.
        self.held_room = self.most_room = self.pinned_room = 0

    def send(self, tensors: Tensors, size: int) -> tuple[Arena, Any]:
        arena = self._arena(whole_pages(size))
        with torch.cuda.stream(self.out):
            for tensor, place in zip(tensors, _slices(arena.bytes, tensors)):
                place.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                tensor.record_stream(self.out)
            return arena, self.out.record_event()

    def wait_sent(self, copy: Any) -> None:
        copy.synchronize()  # [Note: pace]

    def bring(self, stored: StoredObject) -> Callable[[], Tensors]:
        with torch.cuda.stream(self.back):
            # An object that is still on its way out is fetched after it.
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
        # The current stream has waited for fetches of the object: a put into its arena follows.
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        # The size that was dropped last comes last, so that others are given back before it.
        dropped = self.arenas[room] = self.arenas.pop(room, [])
        dropped.append((stored.place, self.out.record_event()))
        self.held_room -= room

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._release(self.pinned_room)

    def _arena(self, room: int) -> Arena:
        """Pinned memory of a dropped object of this size, else new. [Note: arenas]"""
        self.held_room += room
        self.most_room = max(self.most_room, self.held_room)
        dropped = self.arenas.get(room)
        if dropped:
            return dropped.pop()[0]
        excess = self.pinned_room + room - self.most_room
        self._release(excess)
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

    def __init__(self, device: torch.device, folder: Path, checked: bool = False):
        super().__init__(folder, checked, device)
        self.make_streams()
        self.slots = SimpleQueue[Arena]()
        for _ in range(BOUNCES):
            self.slots.put(Arena(BOUNCE_BYTES))

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        # New memory belongs to the stream that fills it.
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
            yield bytes_of(slot)

    def _bytes_in(self, tensor: Tensor) -> Iterator[memoryview]:
        for piece, slot in self._bounced(tensor):
            # The reader fills the slot before it asks for the next piece.
            yield bytes_of(slot)
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
    # Only what a GPU copies has to pass through pinned memory.
    if device.type == "cpu":
        return DiskTier(folder, checked)
    return BouncedTier(device, folder, checked)


def _pages(size: int) -> Tensor:
    """uint8 [size], from the begin of a page on."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _slices(memory: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pieces of `memory`, bytes, one after another, as large as the tensors."""
    return memory[: size_of(tensors)].split([tensor.nbytes for tensor in tensors])
