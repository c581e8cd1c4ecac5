"""Slices that travel together as few boxes: what one rank sends another at one time is often cut finer than the move needs, because
other ranks hold or want the parts.

    slices of one weight from rank 0 to rank 3       ┌───┬───┐      ┌───────┐
                                                     │ a │ b │      │       │
                                                     ├───┼───┤  ->  │   e   │
                                                     │ c │ d │      │       │
                                                     └───┴───┘      └───────┘
"""

from collections.abc import Iterable

from longshift.layout.box import Box

Numbered = tuple[int, Box]  # a box, and the number of the first slice in it


def merge_boxes(slices: Iterable[Numbered]) -> list[Numbered]:
    """Boxes that tile these slices, which share nothing."""
    boxes, previous_count = list(slices), -1
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
        for number, after in row[1:]:
            if after.start[dim] == box.stop[dim]:
                first, box = min(first, number), box.cut(dim, box.start[dim], after.stop[dim])
            else:
                merged.append((first, box))
                first, box = number, after
        merged.append((first, box))
    return merged
