"""Who has which boxes: the two sides of a move.

A `Spread` is one weight's boxes with the ranks that have each of them; boxes may overlap (home's
rows and a rank's copy), as long as equal elements have equal values. Weights that lie alike share
one `Spread` object, and are then refined and planned once.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, TypeVar

from longshift.layout import axes
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import Piece, pieces_of, stages_of
from longshift.spec.model import ModelSpec
from longshift.spec.param import Param

T = TypeVar("T")
Side = Literal["copies", "home", "rows"]


@dataclass(frozen=True, eq=False)
class Spread:
    """Boxes of one weight and the ranks, ascending, that have each. Compared by identity."""

    boxes: tuple[tuple[Box, tuple[int, ...]], ...]

    @cached_property
    def by_rank(self) -> dict[int, list[Box]]:
        """The boxes of each rank, the largest first."""
        boxes: dict[int, list[Box]] = {}
        for box, ranks in sorted(self.boxes, key=lambda pair: -pair[0].elements):
            for rank in ranks:
                boxes.setdefault(rank, []).append(box)
        return boxes

    def around(self, part: Box, rank: int) -> Box | None:
        """The largest box with this part that a rank has; None where it has none."""
        return next((box for box in self.by_rank.get(rank, ()) if part in box), None)


BoxesByWeight = Mapping[str, Spread]  # by weight, in the order in which the weights move


def spread_weights(spec: ModelSpec, layout: Layout, side: Side) -> dict[str, Spread]:
    """Every weight under a layout.

    copies   what the ranks compute with
    home     what they keep: whole pieces (ZeRO-0), or their rows of each
    rows     each piece's rows dealt over its holders, as under ZeRO-1..3: every element once,
             whatever home is
    """
    # Weights of equal shape and place share one `Spread`, which is refined and planned once.
    alike: dict[tuple, Spread] = {}

    def spread(param: Param) -> Spread:
        key = param.shape, param.dim, param.parts, stages_of(spec, layout, param)
        if key not in alike:
            pieces = pieces_of(spec, layout, param)
            parts = [part for piece in pieces for part in _piece_boxes(piece, layout, side)]
            alike[key] = Spread(tuple(parts))
        return alike[key]

    return {param.name: spread(param) for param in spec.params}


def plainest(layout: Layout) -> Layout:
    """The plainest layout that places copies, and their rows, as this one does: by stages and cuts
    of the weights, over so many ranks."""
    degrees = {axis.name: 1 for axis in axes.holder_axes()} | {"dp": layout.holders}
    degrees |= {axis.name: layout.degree(axis.name) for axis in axes.cut_axes()}
    return Layout(virtual=layout.virtual, stages=layout.stages).with_degrees(degrees)


def together(*sides: BoxesByWeight) -> dict[str, Spread]:
    """All that any of them has: home and the working copies of the layout before, for one."""
    # Weights that lie alike share their union, as they share their parts.
    alike: dict[tuple[Spread, ...], Spread] = {}
    union = {}
    for name in dict.fromkeys(chain(*sides)):
        parts = tuple(side[name] for side in sides if name in side)
        boxes = chain.from_iterable(part.boxes for part in parts)
        union[name] = alike.setdefault(parts, Spread(tuple(boxes)))
    return union


def _piece_boxes(piece: Piece, layout: Layout, side: Side) -> list[tuple[Box, tuple[int, ...]]]:
    if side == "copies" or (side == "home" and not layout.zero):
        return [(piece.box, piece.holders)]
    shares = ((piece.share(index), (rank,)) for index, rank in enumerate(piece.holders))
    return [(rows, holders) for rows, holders in shares if rows]


def turn_about(held: BoxesByWeight, wanted: BoxesByWeight) -> dict[str, Spread]:
    """`wanted` in an order in which weights of different pipeline stages, first of those that hold
    them, come turn about: a switch then keeps all ranks busy all the time, where the model's own
    order would take one stage after the other."""
    names: Iterable[str] = wanted
    # The last order counts first: that of those that hold them.
    for side in (wanted, held):
        ranks = {spread: frozenset(spread.by_rank) for spread in set(side.values())}
        names = take_turns(names, lambda name, side=side, ranks=ranks: ranks[side[name]])
    return {name: wanted[name] for name in names}


def take_turns(items: Iterable[T], key: Callable[[T], Hashable]) -> list[T]:
    """Items in an order in which those of different keys come turn about, those of one key in the
    order that they had."""
    turns = Counter[Hashable]()
    turn_of = []
    items = list(items)
    for item in items:
        kind = key(item)
        turn_of.append(turns[kind])
        turns[kind] += 1
    return [items[place] for place in sorted(range(len(items)), key=turn_of.__getitem__)]
