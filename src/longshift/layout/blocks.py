"""Blocks: BLOCK elements along a row of a weight, counted from the row's first element, that share
a scale where moments have eight bits. A row is what lies along the last dim.

    row of 300  │ block 0: 0..127 │ block 1: 128..255 │ 2: 256..299 │
    two owners  │     ours: 0..149    │    theirs: 150..299         │   both have a part of block 1

[Note: blocks of the logical tensor] Blocks belong to the weight in global coordinates, never to a
rank's part of it, so that codes and scales are the same bits however home is cut. Home is cut where
layouts compute, which may be anywhere: columns of a head of 64, a feed-forward width of 11008 over
8 ranks, a norm of 896 over 4. Cuts at block edges alone would refuse such layouts, or have a
gather send what another rank computes with. So a block may have several owners: its scale is of the
largest value among them, which is exact, for a maximum does not depend on an order. What they tell
each other is 4 bytes a moment for each such block; where a model's widths are multiples of 128 a
rank, there are none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import holders_of, moving_unit, pieces_of, stages_of
from longshift.spec.formats import SCALE_EVERY as BLOCK
from longshift.spec.model import ModelSpec
from longshift.spec.param import Param

MAX_PACKED = 1 << 18  # elements that are packed at one time


def runs(size: int, every: int) -> list[tuple[slice, int]]:
    """Whole blocks of `every` elements along a dim of this size, and the shorter last one: where
    they lie, and how long each is."""
    end = size // every * every
    spans = [(slice(0, end), every), (slice(end, size), size - end)]
    return [(span, length) for span, length in spans if span.start < span.stop]


def scales_of(box: Box) -> Box:
    """The blocks that a box has a part of, each one element of a tensor of scales."""
    first = box.start[-1] // BLOCK
    stop = _ceil_block(box.stop[-1]) if box else first
    return box.cut(len(box.start) - 1, first, stop)


def blocks_starting_in(box: Box) -> Box:
    """The blocks whose first element is in a box: of all boxes of a weight each block is in one."""
    if not box:
        return scales_of(box)
    first = _ceil_block(box.start[-1])
    stop = max(first, _ceil_block(box.stop[-1]))
    return box.cut(len(box.start) - 1, first, stop)


def _ceil_block(element: int) -> int:
    """Number of blocks that begin before an element of a row."""
    return -(-element // BLOCK)


def rows_at_once(box: Box) -> int:
    """How many rows of a box are packed at one time."""
    return max(1, MAX_PACKED // (BLOCK * max(1, scales_of(box).shape[-1])))


def elements_at_once(box: Box) -> int:
    """How many elements are packed at one time, those of whole blocks."""
    shape = scales_of(box).shape
    return min(prod(shape[:-1]), rows_at_once(box)) * shape[-1] * BLOCK


def widen_to_blocks(box: Box, shape: tuple[int, ...]) -> Box:
    """A box, and the rest of the blocks that it has a part of, of a weight of this shape."""
    scales = scales_of(box)
    start = scales.start[-1] * BLOCK
    stop = min(scales.stop[-1] * BLOCK, shape[-1])
    return box.cut(len(box.start) - 1, start, max(start, stop))


@dataclass(frozen=True)
class CutBlocks:
    """The blocks of a moving unit's trained weights that home cuts.

    `ranks`: all that have a part of the unit at home.
    `places`: by weight, where its cut blocks begin in a vector of all of them, row by row, and
    which blocks of each row they are. `count`: of all.
    """

    ranks: tuple[int, ...]
    places: Mapping[str, tuple[int, tuple[int, ...]]]
    count: int


def cut_blocks(spec: ModelSpec, home: Layout) -> dict[int, CutBlocks]:
    """The blocks that a home which is cut by this layout cuts, by moving unit; units without any
    are left out."""
    params_by_unit: dict[int, list[Param]] = {}
    for param in spec.params:
        if not param.frozen:
            params_by_unit.setdefault(moving_unit(spec, param), []).append(param)

    columns: dict[tuple, tuple[int, ...]] = {}  # weights that are cut alike have the same
    units = {}
    for unit, params in sorted(params_by_unit.items()):
        places = {}
        count = 0
        stages: set[int] = set()
        for param in params:
            param_stages = stages_of(spec, home, param)
            stages |= set(param_stages)
            key = param.shape, param.dim, param.parts, len(param_stages)
            if key not in columns:
                columns[key] = _cut_columns(spec, home, param)
            if columns[key]:
                places[param.name] = count, columns[key]
                count += prod(param.shape[:-1]) * len(columns[key])
        if count:
            ranks = holders_of(home, tuple(sorted(stages)))
            units[unit] = CutBlocks(ranks, places, count)
    return units


def _cut_columns(spec: ModelSpec, home: Layout, param: Param) -> tuple[int, ...]:
    """Numbers of the blocks of a row that are cut."""
    edges: set[int] = set()
    for piece in pieces_of(spec, home, param):
        boxes = [piece.box]
        if home.zero > 0 and len(param.shape) == 1:  # ZeRO deals rows, which are elements then
            boxes = [piece.share(index) for index in range(len(piece.holders))]
        for box in filter(None, boxes):
            edges |= {box.start[-1], box.stop[-1]}
    inside = [edge for edge in edges if edge % BLOCK and edge < param.shape[-1]]
    return tuple(sorted({edge // BLOCK for edge in inside}))
