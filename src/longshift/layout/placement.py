"""Placement: which boxes of each weight every rank computes with under a layout, and where their home is.

A *piece* is a box of one weight together with its holders: all the ranks that compute with it. The pieces of a weight are disjoint and
cover it. Everything that moves weights or gradients follows from them:

    gather   every holder of a piece gets it from the piece's home
    reduce   the sum over the holders' gradients goes to the piece's home (each holder's gradient is a partial sum, always)
    home     ZeRO-0: every holder keeps the whole piece; ZeRO-1..3: its rows (dim 0) are dealt over the holders, nearly equally

    A[I, J] on tp2 x dp2, ZeRO-3:      columns cut over tp      rows of each half dealt over the two replicas
                                       ┌────┬────┐              ┌────┬────┐
                                       │tp0 │tp1 │              │r0  │r1  │
                                       │r0r2│r1r3│              ├────┼────┤
                                       └────┴────┘              │r2  │r3  │
                                                                └────┴────┘
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise

from longshift.layout import axes
from longshift.layout.box import Box
from longshift.layout.layout import Coord, Layout
from longshift.spec.model import ModelSpec, Param, Part, share


@dataclass(frozen=True)
class Piece:
    """A box of weight `name` and the ranks that compute with it, ascending."""

    name: str
    box: Box
    holders: tuple[int, ...]

    def rows(self, rank: int) -> Box:
        """The part of the piece whose home is `rank` when home is sharded; empty when there are fewer rows than holders."""
        return self.share(bisect_left(self.holders, rank))

    def share(self, index: int) -> Box:
        """The rows whose home is the `index`-th holder when home is sharded."""
        start, stop = share(self.box.shape[0], len(self.holders), index)
        return self.box.cut(0, self.box.start[0] + start, self.box.start[0] + stop)


@dataclass(frozen=True)
class Bucket:
    """The pieces of one moving unit that have the same holders, all of them trained or none: what one fused collective carries."""

    unit: int
    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]
    sharded: bool
    frozen: bool = False

    @cached_property
    def elements(self) -> int:
        return sum(piece.box.elements for piece in self.pieces)

    @cached_property
    def width(self) -> int:
        """Elements of the largest share: one slot of the fused buffer."""
        return self._kept(0)

    def home(self, rank: int) -> tuple[tuple[str, Box], ...]:
        """What a holder keeps at home, in the order of the fused buffer."""
        index = bisect_left(self.holders, rank)
        return tuple((p.name, p.share(index) if self.sharded else p.box) for p in self.pieces)

    @cached_property
    def _known(self) -> dict[int, int]:
        """What `kept` has said, by place of the holder."""
        return {}

    def kept(self, rank: int) -> int:
        """How many elements a holder keeps at home."""
        index = bisect_left(self.holders, rank)
        if index not in self._known:
            self._known[index] = self._kept(index)
        return self._known[index]

    def _kept(self, index: int) -> int:
        if not self.sharded:
            return self.elements
        total = 0
        for piece in self.pieces:
            rows = piece.box.shape[0]
            start, stop = share(rows, len(self.holders), index)
            total += (stop - start) * (piece.box.elements // max(1, rows))
        return total

    def owns(self, rank: int) -> bool:
        """Whether `rank` speaks for its home boxes where every element counts once (norms, checkpoints)."""
        return self.sharded or rank == self.holders[0]


def moving_unit(spec: ModelSpec, param: Param) -> int:
    """The unit that a weight is gathered and reduced with. A tied embedding is used by two units, maybe on two stages, and moves alone,
    as unit `spec.units`: gathered before a step's first micro-batch and reduced after its last."""
    return spec.units if param.also_unit is not None else param.unit


def place_of(spec: ModelSpec, unit: int) -> int:
    """Where a moving unit comes in the forward: the tied embedding first."""
    return -1 if unit == spec.units else unit


def stages_of(spec: ModelSpec, layout: Layout, param: Param) -> tuple[int, ...]:
    """Pipeline coordinates that compute with a weight."""
    stages = _stages(layout, spec.layers)
    first = stages[param.unit]
    return first if param.also_unit is None else tuple(sorted({*first, *stages[param.also_unit]}))


@cache
def _stages(layout: Layout, layers: int) -> tuple[tuple[int, ...], ...]:
    """By unit, the pipeline coordinates that compute with it."""
    found: list[set[int]] = [set() for _ in range(layers + 2)]
    for pp in range(layout.pp):
        for chunk in layout.units_of(layers, pp):
            for unit in chunk:
                found[unit].add(pp)
    return tuple(tuple(sorted(pps)) for pps in found)


def holders_of(layout: Layout, pps: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks of these stages, ascending."""
    return _holders(layout, pps, tuple(range(layout.weight_ranks)))


def local_boxes(param: Param, layout: Layout, at: Coord) -> tuple[Box, ...]:
    """Boxes of a weight on the rank that stands at `at`. Its tensor is their concatenation along `param.dim`."""
    whole = Box.whole(param.shape)
    if param.dim is None:
        return (whole,)
    cuts = _cuts(param.parts, layout.weight_ranks, layout.place(at, axes.weight_axes()))
    return tuple(whole.cut(param.dim, start + first, start + last) for start, first, last in cuts)


def pieces_of(spec: ModelSpec, layout: Layout, param: Param) -> tuple[Piece, ...]:
    """The pieces of a weight. Neighboring ranks that share a key/value head share its piece."""
    pieces = _boxes_with_holders(layout, stages_of(spec, layout, param), param.shape, param.dim, param.parts)
    return tuple(Piece(param.name, box, holders) for box, holders in pieces)


@cache
def _boxes_with_holders(
    layout: Layout, pps: tuple[int, ...], shape: tuple[int, ...], dim: int | None, parts: tuple[Part, ...]
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The pieces of every weight of these sizes on these stages: those of all blocks of a stage are alike."""
    whole = Box.whole(shape)
    if dim is None:
        return ((whole, holders_of(layout, pps)),)

    # 1. What each cut of the weights has of the cut dim.
    spans = []
    for cut in range(layout.weight_ranks):
        spans += [(cut, start + first, start + last) for start, first, last in _cuts(parts, layout.weight_ranks, cut)]

    # 2. Between neighboring edges all elements have the same holders.
    edges = sorted({edge for _, first, last in spans for edge in (first, last)})
    pieces = []
    for begin, end in pairwise(edges):
        cuts = tuple(sorted({cut for cut, first, last in spans if first <= begin and end <= last}))
        if cuts:
            pieces.append((whole.cut(dim, begin, end), _holders(layout, pps, cuts)))
    return tuple(pieces)


@cache
def buckets(spec: ModelSpec, layout: Layout) -> tuple[Bucket, ...]:
    """Every bucket of the model, the same tuple on every rank. Within one, weights that decay come first."""
    return _grouped(spec, layout, ((param, piece) for param in spec.params for piece in pieces_of(spec, layout, param)))


@lru_cache(maxsize=32)  # a step asks for those of its layouts several times
def buckets_of(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Bucket, ...]:
    """The buckets that one rank is a holder of: those of `buckets`, in their order, made without the others."""
    pp = layout.coord(rank).pp
    mine = (param for param in spec.params if pp in stages_of(spec, layout, param))
    pieces = ((param, piece) for param in mine for piece in pieces_of(spec, layout, param))
    return _grouped(spec, layout, ((param, piece) for param, piece in pieces if _among(rank, piece.holders)))


def _grouped(spec: ModelSpec, layout: Layout, pieces: Iterable[tuple[Param, Piece]]) -> tuple[Bucket, ...]:
    """By unit, holders, and whether they are trained. Holders are told apart by a number, found once for each object: hashing thousands of
    ranks for every piece takes longer than all else."""
    numbers: dict[tuple[int, ...], int] = {}
    known: dict[int, int] = {}  # by the object's identity; the sorted list keeps it alive
    grouped: dict[tuple[int, int, bool], list[Piece]] = {}
    ordered = sorted(pieces, key=lambda pair: not pair[0].decay)
    for param, piece in ordered:
        if id(piece.holders) not in known:
            known[id(piece.holders)] = numbers.setdefault(piece.holders, len(numbers))
        grouped.setdefault((moving_unit(spec, param), known[id(piece.holders)], param.frozen), []).append(piece)
    found = (
        Bucket(unit, p[0].holders, tuple(p), layout.zero > 0 and len(p[0].holders) > 1, frozen) for (unit, _, frozen), p in grouped.items()
    )
    return tuple(sorted(found, key=lambda b: (b.unit, b.holders, b.frozen)))


@lru_cache(maxsize=32)
def boxes_on(spec: ModelSpec, layout: Layout, rank: int) -> Mapping[int, Mapping[str, tuple[Box, ...]]]:
    """By moving unit, ascending, the boxes of each weight that one rank computes with. The time it takes does not depend on the number of
    ranks."""
    at = layout.coord(rank)
    units: dict[int, dict[str, tuple[Box, ...]]] = {}
    alike: dict[tuple, tuple[Box, ...]] = {}
    for param in spec.params:
        if at.pp in stages_of(spec, layout, param):
            key = param.shape, param.dim, param.parts
            if key not in alike:
                alike[key] = local_boxes(param, layout, at)
            units.setdefault(moving_unit(spec, param), {})[param.name] = alike[key]
    return dict(sorted(units.items()))


def assemble(box: Box, local: Iterable[Box], dim: int | None) -> tuple[slice, ...]:
    """Where `box` lies in a rank's tensor, which concatenates its `local` boxes along `dim`."""
    offset = 0
    for part in local:
        if box in part:
            at = list(box.within(part))
            if dim is not None:
                at[dim] = slice(at[dim].start + offset, at[dim].stop + offset)
            return tuple(at)
        offset += part.shape[dim] if dim is not None else 0
    raise ValueError(f"{box} is in none of the rank's boxes")


def local_shape(param: Param, local: tuple[Box, ...]) -> tuple[int, ...]:
    """Shape of the concatenation of `local` along the weight's cut dim."""
    if param.dim is None:
        return param.shape
    shape = list(param.shape)
    shape[param.dim] = sum(box.shape[param.dim] for box in local)
    return tuple(shape)


def _among(rank: int, holders: tuple[int, ...]) -> bool:
    """Whether `holders`, ascending, name the rank."""
    place = bisect_left(holders, rank)
    return place < len(holders) and holders[place] == rank


def _cuts(parts: tuple[Part, ...], ranks: int, cut: int) -> Iterator[tuple[int, int, int]]:
    """Where each part begins, and which of its rows the `cut`-th of so many ranks has."""
    start = 0
    for part in parts:
        first, last = part.rows(ranks, cut)
        yield start, first, last
        start += part.units * part.size


@cache
def _holders(layout: Layout, pps: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of these stages that have these cuts of the weights, ascending: cuts vary fastest over ranks, stages slowest."""
    weight_ranks = layout.weight_ranks
    sharing = layout.world // layout.pp // weight_ranks
    return tuple(sorted(cut + weight_ranks * (other + sharing * pp) for pp in pps for other in range(sharing) for cut in cuts))
