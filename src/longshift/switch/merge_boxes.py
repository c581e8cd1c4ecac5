"""Slices that travel together as few boxes: what one rank sends another at one time is often cut
finer than the move needs, because other ranks hold or want the parts.

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
