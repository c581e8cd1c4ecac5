"""Slices: the common refinement of what is held and what is wanted of one weight. Each has one set of holders and one of wanters.

held                 wanted                slices
┌───────┐            ┌───┬───┐             ┌───┬───┐
│   a   │            │   │   │             │ a │ a │
├───────┤     and    │ x │ y │    gives    ├───┼───┤      (the letters: the ranks that have, or want, each)
│   b   │            │   │   │             │ b │ b │
└───────┘            └───┴───┘             └───┴───┘
                                             x   y
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from longshift.errors import UsageError
from longshift.layout.box import Box
from longshift.switch.placed import Spread


@dataclass(frozen=True, eq=False)
class Slices:
    """The wanted slices of a weight. `has`, `wants`: bool [slices, world]; `size_bytes`: int64 [slices]; `held`, `wanted`: what they
    refine."""

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
        """Indices of the slices somebody needs, in runs that can be dealt at one time: no two of a run share a holder, and of two that
        do, the earlier one is in an earlier run."""
        last = np.full(self.has.shape[1], -1)
        found: list[list[int]] = []
        for index in np.flatnonzero(self.needs.any(1)):
            holders = self.has[index]
            wave = last[holders].max() + 1
            last[holders] = wave
            if wave == len(found):
                found.append([])
            found[wave].append(int(index))
        return tuple(np.array(wave) for wave in found)


def refine(held: Spread, wanted: Spread, world: int, itemsize: int, bucket_bytes: int | None) -> Slices:
    """The slices that somebody wants. With `bucket_bytes`, small enough that all who need one can get it from one rank within a bucket.
    Raises ValueError for a wanted slice that nobody holds, UsageError for a bucket too small for one element."""
    dims = range(len(wanted.boxes[0][0].start)) if wanted.boxes else range(0)
    cuts = [sorted({edge for spread in (held, wanted) for box, _ in spread.boxes for edge in (box.start[d], box.stop[d])}) for d in dims]
    spans = [list(pairwise(edges)) for edges in cuts]
    has, wants = (_members(spread, cuts, world) for spread in (held, wanted))
    cells = [_box(cell) for cell in product(*spans)]
    used = wants.any(1)
    for missing in np.flatnonzero(used & ~has.any(1)):
        raise ValueError(f"{cells[missing]} is wanted on rank {int(wants[missing].argmax())}, and no rank holds it")
    boxes = [cells[i] for i in np.flatnonzero(used)]
    has, wants = has[used], wants[used]
    if bucket_bytes is not None:
        most = bucket_bytes // itemsize // np.maximum(1, (wants & ~has).sum(1))
        if boxes and most.min() < 1:
            least = itemsize * int((wants & ~has).sum(1).max())
            raise UsageError(f"a bucket of {bucket_bytes} bytes cannot hold one element for each rank that needs it: at least {least}")
        parts = [list(_cut(box, int(limit))) for box, limit in zip(boxes, most)]
        counts = [len(part) for part in parts]
        has, wants, boxes = has.repeat(counts, 0), wants.repeat(counts, 0), [box for part in parts for box in part]
    order = _spread_out(wants, _spread_out(has, range(len(boxes))))
    has, wants, boxes = has[order], wants[order], [boxes[i] for i in order]
    return Slices(tuple(boxes), np.array([box.elements * itemsize for box in boxes], np.int64), has, wants, held, wanted)


def _members(spread: Spread, cuts: list[list[int]], world: int) -> np.ndarray:
    """Which rank has which cell of the grid that `cuts` make: bool [cells, world]."""
    at = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]
    grid = np.zeros((*(len(edges) - 1 for edges in cuts), world), bool)
    for box, ranks in spread.boxes:
        cells = tuple(slice(index[a], index[b]) for index, a, b in zip(at, box.start, box.stop))
        grid[(*cells, np.array(ranks))] = True
    return grid.reshape(-1, world)


def _spread_out(ranks: np.ndarray, order: Iterable[int]) -> list[int]:
    """The order with the slices of equal `ranks` turn about with the others, so that any run of slices keeps all ranks busy."""
    turns: Counter[bytes] = Counter()
    keys = []
    for place, index in enumerate(order):
        key = ranks[index].tobytes()
        keys.append((turns[key], place, index))
        turns[key] += 1
    return [index for _, _, index in sorted(keys)]


def _box(cell: tuple[tuple[int, int], ...]) -> Box:
    return Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Halves of halves along the longest dim, until none has more than `most` elements."""
    if box.elements <= most:
        yield box
        return
    dim = max(range(len(box.start)), key=lambda d: box.shape[d])
    middle = (box.start[dim] + box.stop[dim]) // 2
    yield from _cut(box.cut(dim, box.start[dim], middle), most)
    yield from _cut(box.cut(dim, middle, box.stop[dim]), most)
