"""Slices: the common refinement of what is held and what is wanted of one weight. Each has one set
of holders and one of wanters.

held                 wanted                slices
┌───────┐            ┌───┬───┐             ┌───┬───┐
│   a   │            │   │   │             │ a │ a │
├───────┤     and    │ x │ y │    gives    ├───┼───┤      the letters: the ranks
│   b   │            │   │   │             │ b │ b │      that have, or want, each
└───────┘            └───┴───┘             └───┴───┘
                                             x   y

What one rank sends another at one time is often cut finer than the move needs, because other ranks
hold or want the parts: `merge_boxes` makes few boxes of such slices again.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from longshift.errors import UsageError
from longshift.layout.box import Box
from longshift.switch.spread import Spread, take_turns

Numbered = tuple[int, Box]  # a box, and the number of the first slice in it


@dataclass(frozen=True, eq=False)
class Slices:
    """The wanted slices of a weight. `has`, `wants`: bool [slices, world]; `size_bytes`: int64
    [slices]; `held`, `wanted`: what they refine."""

    boxes: tuple[Box, ...]
    size_bytes: np.ndarray
    has: np.ndarray
    wants: np.ndarray
    held: Spread
    wanted: Spread

    def __len__(self) -> int:
        return len(self.boxes)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the boxes, and of who has one already that it wants."""
        text = "".join(map(str, self.boxes)).encode()
        return hashlib.sha256(text + np.packbits(self.has & self.wants).tobytes()).digest()

    @cached_property
    def needs(self) -> np.ndarray:
        """Who wants a slice and does not have it: bool [slices, world]."""
        return self.wants & ~self.has

    @cached_property
    def waves(self) -> tuple[np.ndarray, ...]:
        """Indices of the slices somebody needs, in runs that can be dealt at one time: no two of a
        run share a holder, and of two that do, the earlier one is in an earlier run."""
        last_wave = np.full(self.has.shape[1], -1)
        waves: list[list[int]] = []
        for index in np.flatnonzero(self.needs.any(1)):
            # Slices without a common holder add to different loads: their order does not matter.
            holders = self.has[index]
            number = last_wave[holders].max() + 1
            last_wave[holders] = number
            if number == len(waves):
                waves.append([])
            waves[number].append(int(index))
        return tuple(np.array(wave) for wave in waves)


def refine(
    held: Spread, wanted: Spread, world: int, itemsize: int, bucket_bytes: int | None
) -> Slices:
    """The slices that somebody wants. With `bucket_bytes`, small enough that all who need one can
    get it from one rank within a bucket. Raises ValueError for a wanted slice that nobody holds,
    UsageError for a bucket too small for one element."""
    # 1. Cut the weight into a grid, at every edge of every box.
    num_dims = len(wanted.boxes[0][0].start) if wanted.boxes else 0
    all_boxes = [box for box, _ in (*held.boxes, *wanted.boxes)]
    cuts = [
        sorted({edge for box in all_boxes for edge in (box.start[dim], box.stop[dim])})
        for dim in range(num_dims)
    ]
    has = _members(held, cuts, world)
    wants = _members(wanted, cuts, world)
    cells = [_box(cell) for cell in product(*map(pairwise, cuts))]

    # 2. Keep the cells that somebody wants.
    is_wanted = wants.any(1)
    for missing in np.flatnonzero(is_wanted & ~has.any(1)):
        rank = int(wants[missing].argmax())
        raise ValueError(f"{cells[missing]} is wanted on rank {rank}, and no rank holds it")
    boxes = [cells[i] for i in np.flatnonzero(is_wanted)]
    has = has[is_wanted]
    wants = wants[is_wanted]

    # 3. Cut those that are too large for a bucket.
    if bucket_bytes is not None:
        num_needing = (wants & ~has).sum(1)
        max_elements = bucket_bytes // itemsize // np.maximum(1, num_needing)
        if boxes and max_elements.min() < 1:
            min_bytes = itemsize * int(num_needing.max())
            raise UsageError(
                f"a bucket of {bucket_bytes} bytes cannot hold one element for each rank that needs"
                f" it: at least {min_bytes}"
            )
        parts = [list(_cut(box, int(limit))) for box, limit in zip(boxes, max_elements)]
        counts = [len(part) for part in parts]
        boxes = [box for part in parts for box in part]
        has = has.repeat(counts, 0)
        wants = wants.repeat(counts, 0)

    # 4. Order them so that any run of slices keeps all ranks busy.
    order = take_turns(range(len(boxes)), lambda index: has[index].tobytes())
    order = take_turns(order, lambda index: wants[index].tobytes())
    boxes = [boxes[i] for i in order]
    size_bytes = np.array([box.elements * itemsize for box in boxes], np.int64)
    return Slices(tuple(boxes), size_bytes, has[order], wants[order], held, wanted)


def _members(spread: Spread, cuts: list[list[int]], world: int) -> np.ndarray:
    """Which rank has which cell of the grid that `cuts` make: bool [cells, world]."""
    grid_shape = [len(edges) - 1 for edges in cuts]
    grid = np.zeros((*grid_shape, world), bool)
    for box, ranks in spread.boxes:
        # Every edge of a box is a cut of the grid.
        cells = []
        for edges, start, stop in zip(cuts, box.start, box.stop):
            cells.append(slice(bisect_left(edges, start), bisect_left(edges, stop)))
        grid[(*cells, np.array(ranks))] = True
    return grid.reshape(-1, world)


def _box(cell: tuple[tuple[int, int], ...]) -> Box:
    return Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))


def _cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Halves of halves along the longest dim, until none has more than `max_elements`."""
    if box.elements <= max_elements:
        yield box
        return
    dim = box.shape.index(max(box.shape))
    start = box.start[dim]
    stop = box.stop[dim]
    middle = (start + stop) // 2
    yield from _cut(box.cut(dim, start, middle), max_elements)
    yield from _cut(box.cut(dim, middle, stop), max_elements)


def merge_boxes(slices: Iterable[Numbered]) -> list[Numbered]:
    """Boxes that tile these slices, which share nothing."""
    # Boxes that are merged along one dim may then fit together along another.
    boxes = list(slices)
    previous_count = -1
    while len(boxes) not in (1, previous_count):
        previous_count = len(boxes)
        for dim in reversed(range(len(boxes[0][1].start))):
            boxes = _merge_along(dim, boxes)
    return boxes


def _merge_along(dim: int, boxes: list[Numbered]) -> list[Numbered]:
    """Boxes that follow one another along `dim`, and are alike in the other dims, become one."""
    rows: dict[tuple, list[Numbered]] = {}
    for number, box in boxes:
        across = *box.start[:dim], *box.start[dim + 1 :], *box.stop[:dim], *box.stop[dim + 1 :]
        rows.setdefault(across, []).append((number, box))

    merged: list[Numbered] = []
    for row in rows.values():
        row.sort(key=lambda numbered: numbered[1].start[dim])
        first, box = row[0]
        for number, neighbor in row[1:]:
            if neighbor.start[dim] == box.stop[dim]:
                first = min(first, number)
                box = box.cut(dim, box.start[dim], neighbor.stop[dim])
            else:
                merged.append((first, box))
                first = number
                box = neighbor
        merged.append((first, box))
    return merged
