"""Between a GPU and a home outside it, through pinned memory: weights cast on the host go in, sums
of gradients come out. ZeRO-Offload (arXiv 2101.06840).

    bring   master ── cast by the host ──> slot ── stream `back` ──> device
    take    sum on the device ── stream `out` ──> its place at home, where that is pinned
                                              ──> slot ── copied, or added, by the host ──> home

Only what a GPU copies is pinned: the gradient sums of a home in host memory, to the byte, and
slots. On the way in there are slots for two units, so that the host casts one while the one before
waits for the device. Masters and moments are read by the host alone. Bytes of a weight that is
gathered: 2 in, in bf16; of a gradient that is reduced: 4 out, in float32.

[Note: crossing] The host uses a slot again when the copy that used it last has ended. A copy in
waits for all that the device was given before, which may still use the memory that it fills; what
is gathered waits for the copy. A copy out waits for the reduction; `settled` waits for all copies
out, before the host reads a sum.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshift.layout.layout import Tier
from longshift.layout.placement import Bucket
from longshift.stream.gpu_tiers import Arena

# Pinned slots each way, at least, between a GPU and a home outside it. A row of a weight fits into
# one.
SLOTS = 4
SLOT_BYTES = 32 << 20


@dataclass
class Slot:
    """Pinned memory. Mutable. `used`: recorded after the last copy that reads it."""

    arena: Arena
    used: Any = None


@dataclass
class Landing:
    """A piece of a sum on its way to the host. `left`: recorded when it is in its slot, `staged`;
    `into`: where the host copies it to, or adds it."""

    left: Any
    staged: Tensor
    into: Tensor
    add: bool


class Crossing:
    """Copies between home and one GPU. Mutable: what is under way."""

    def __init__(self, device: torch.device, slots: int):
        """`slots`: on the way in, see `slots_in`."""
        self.device = device
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)
        self._leaving = deque(Slot(Arena(SLOT_BYTES)) for _ in range(slots))
        self._coming = deque(Slot(Arena(SLOT_BYTES)) for _ in range(SLOTS))
        self._landing: deque[Landing] = deque()
        self._pinned: dict[int, Arena] = {}  # by address
        self._direct: Any = None  # recorded after the last copy to a place of its own

    def pinned(self, like: Tensor) -> Tensor:
        """A tensor in pinned memory of exactly the bytes of another, with any numbers."""
        arena = Arena(max(1, like.nbytes))
        self._pinned[arena.bytes.data_ptr()] = arena
        return arena.like(like)

    def bring(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start to copy pairs of tensors [n, rows, ...] of one shape: the host's into the device's,
        in the format of the latter. The host's have been read when it returns. [Note: crossing]"""
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        for source, target in pairs:
            for rows in runs(target):
                slot = self._leaving.popleft()
                part = target[:, rows]
                if slot.used is not None:
                    slot.used.synchronize()
                staged = slot.arena.like(part).copy_(source[:, rows])
                with torch.cuda.stream(self.back):
                    part.copy_(staged, non_blocking=True)
                    slot.used = self.back.record_event()
                # Slots take turns, so that the oldest copy is waited for.
                self._leaving.append(slot)

    def arrived(self) -> Callable[[], None]:
        """Callback that makes the current stream wait for all that `back` was given until now."""
        event = self.back.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def take(self, total: Tensor, into: Tensor, add: bool) -> None:
        """Start to copy a tensor [elements] of the device into one of the host, or to add it.
        [Note: crossing]"""
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        total.record_stream(self.out)
        if not add and into.data_ptr() in self._pinned:
            with torch.cuda.stream(self.out):
                into.copy_(total, non_blocking=True)
                self._direct = self.out.record_event()
            return
        # `runs` and slots are of tensors [n, rows, ...].
        total = total[None]
        into = into[None]
        for run in runs(total):
            if len(self._landing) == SLOTS:
                self._land()
            slot = self._coming.popleft()
            part = total[:, run]
            with torch.cuda.stream(self.out):
                staged = slot.arena.like(part).copy_(part, non_blocking=True)
                self._landing.append(Landing(self.out.record_event(), staged, into[:, run], add))
            self._coming.append(slot)

    def settled(self) -> None:
        """Return when all that was taken is at home."""
        while self._landing:
            self._land()
        if self._direct is not None:
            self._direct.synchronize()
            self._direct = None

    def _land(self) -> None:
        """Copy, or add, what left first."""
        # Landings are in the order of their slots: the next one taken is free after this.
        oldest = self._landing.popleft()
        oldest.left.synchronize()
        if oldest.add:
            oldest.into.add_(oldest.staged)
        else:
            oldest.into.copy_(oldest.staged)


def runs(x: Tensor) -> Iterator[slice]:
    """Rows of x [n, rows, ...] that fit into a slot together, one after another."""
    n, rows = x.shape[:2]
    rows_of_slot = SLOT_BYTES * rows // max(1, x.nbytes)
    step = max(1, rows_of_slot) if n else rows
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def crossing_of(device: torch.device, slots: int) -> Crossing | None:
    """The crossing of a GPU; a CPU needs none."""
    return Crossing(device, slots) if device.type == "cuda" else None


def slots_in(
    tiers: Mapping[int, Tier], mine: Iterable[Bucket], rank: int, weight_bytes: int
) -> int:
    """Number of pinned slots for weights on their way to a GPU: enough for two units of the size of
    the largest one that lies outside the GPU. 0 where all units lie on it. `mine`: the rank's
    buckets; `weight_bytes`: of a weight in the compute format."""
    outside = {unit: 0 for unit, tier in tiers.items() if tier != "device"}
    for bucket in mine:
        if bucket.unit in outside:
            outside[bucket.unit] += bucket.kept(rank) * weight_bytes
    unit_bytes = max(outside.values(), default=0)
    if not unit_bytes:
        return 0
    # The host casts a unit while the one before waits for the device.
    return max(SLOTS, -(-2 * unit_bytes // SLOT_BYTES))
