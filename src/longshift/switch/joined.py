"""Slices that travel together as few boxes: what one rank sends another at one time is often cut finer than the move needs, because
other ranks hold or want the parts.

    slices of one weight from rank 0 to rank 3       ┌───┬───┐      ┌───────┐
                                                     │ a │ b │      │       │
                                                     ├───┼───┤  ->  │   e   │
                                                     │ c │ d │      │       │
                                                     └───┴───┘      └───────┘

A box is joined only where it lies in one box that its sender has and in one that its receiver wants, as each is a view of one tensor there.
"""

from dataclasses import dataclass

import numpy as np

from longshift.layout.box import Box
from longshift.switch.slices import Slices

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # start, stop, group, row, first


@dataclass(frozen=True, eq=False)
class Joined:
    """Boxes and what they have in common: int64 [boxes, columns]. `first`: the first slice of each; boxes ascend by it."""

    boxes: tuple[Box, ...]
    common: np.ndarray
    first: np.ndarray


def joined(slices: Slices, index: np.ndarray, common: np.ndarray, source: np.ndarray, target: np.ndarray) -> Joined:
    """The slices `index` as few boxes that tile them: slices of equal rows of `common`, int64 [slices, columns], may be joined.

    `source`, `target`: the ranks that a slice goes from and to, as a copy plan moves it. What lies in no box of a rank's, but passes
    through it, is left as it is.
    """
    row, group = np.arange(len(index)), _numbered(common)
    some = np.flatnonzero(np.bincount(group)[group] > 1) if len(index) else index
    alone = np.delete(row, some)
    start, stop, first = slices.start[index], slices.stop[index], index
    if len(some):
        group = _numbered(np.column_stack((group[some], *_places(slices, index[some], source[some], target[some]))))
        parts, before = (start[some], stop[some], group, some, index[some]), -1
        while len(parts[0]) != before:
            before = len(parts[0])
            for dim in reversed(range(start.shape[1])):
                parts = _join(dim, *parts)
        start, stop, row, first = (
            np.concatenate((whole[alone], part)) for whole, part in zip((start, stop, row, index), (*parts[:2], *parts[3:]))
        )
    order = np.lexsort((*common[row].T, first))
    boxes = tuple(Box(tuple(a), tuple(b)) for a, b in zip(start[order].tolist(), stop[order].tolist()))
    return Joined(boxes, common[row[order]], first[order])


def _numbered(rows: np.ndarray) -> np.ndarray:
    """A number for every row, equal for equal rows: int64 [rows]."""
    found = np.zeros(len(rows), np.int64)
    for column in rows.T:
        values, place = np.unique(column, return_inverse=True)
        found = np.unique(found * len(values) + place, return_inverse=True)[1]
    return found


def _places(slices: Slices, index: np.ndarray, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, ...]:
    """Three columns: slices that are alike in them are parts of one tensor on their source, and of one on their target."""
    held, relayed, wanted = (
        slices.place("held", index, source),
        slices.place("wanted", index, source),
        slices.place("wanted", index, target),
    )
    source_place = np.where(held >= 0, held, -2 - relayed)  # -1: passes through
    return source_place, wanted, np.where((source_place == -1) | (wanted == -1), index, -1)


def _join(dim: int, start: np.ndarray, stop: np.ndarray, group: np.ndarray, row: np.ndarray, first: np.ndarray) -> Parts:
    """Boxes of a group that follow one another along `dim`, and are alike in the other dims, become one."""
    others = [d for d in range(start.shape[1]) if d != dim]
    sides = [side[:, d] for d in others for side in (start, stop)]
    order = np.lexsort((start[:, dim], *sides, group))
    same = (group[order][1:] == group[order][:-1]) & (start[order, dim][1:] == stop[order, dim][:-1])
    for side in sides:
        same &= side[order][1:] == side[order][:-1]
    heads = np.flatnonzero(np.concatenate((np.ones(min(1, len(order)), bool), ~same)))
    if len(heads) == len(order):
        return start, stop, group, row, first
    tails = np.append(heads[1:], len(order)) - 1
    ends = stop[order[heads]]
    ends[:, dim] = stop[order[tails], dim]
    return start[order[heads]], ends, group[order[heads]], row[order[heads]], np.minimum.reduceat(first[order], heads)
