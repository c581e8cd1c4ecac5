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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Param, share


@dataclass(frozen=True)
class Piece:
    """A box of weight `name` and the ranks that compute with it, ascending."""

    name: str
    box: Box
    holders: tuple[int, ...]

    def rows(self, rank: int) -> Box:
        """The part of the piece whose home is `rank` when home is sharded; empty when there are fewer rows than holders."""
        start, stop = share(self.box.shape[0], len(self.holders), self.holders.index(rank))
        return self.box.cut(0, self.box.start[0] + start, self.box.start[0] + stop)


@dataclass(frozen=True)
class Bucket:
    """The pieces of one moving unit that have the same holders: what one fused collective carries."""

    unit: int
    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]
    sharded: bool

    @property
    def elements(self) -> int:
        return sum(piece.box.elements for piece in self.pieces)

    def home(self, rank: int) -> tuple[tuple[str, Box], ...]:
        """What a holder keeps at home, in the order of the fused buffer."""
        return tuple((p.name, p.rows(rank) if self.sharded else p.box) for p in self.pieces)

    def owns(self, rank: int) -> bool:
        """Whether `rank` speaks for its home boxes where every element counts once (norms, checkpoints)."""
        return self.sharded or rank == self.holders[0]


def moving_unit(spec: ModelSpec, param: Param) -> int:
    """The unit that a weight is gathered and reduced with. A tied embedding is used by two units, maybe on two stages, and moves alone,
    as unit `spec.units`: gathered before a step's first micro-batch and reduced after its last."""
    return spec.units if param.also_unit is not None else param.unit


def stages_of(spec: ModelSpec, layout: Layout, param: Param) -> tuple[int, ...]:
    """Pipeline coordinates that compute with a weight."""
    users = {param.unit, param.also_unit}
    chunks = (layout.units_of(spec.layers, pp) for pp in range(layout.pp))
    return tuple(pp for pp, units in enumerate(chunks) if any(users & set(chunk) for chunk in units))


def local_boxes(param: Param, layout: Layout, tp: int) -> tuple[Box, ...]:
    """Boxes of a weight on tensor-parallel coordinate `tp`. The rank's tensor is their concatenation along `param.dim`."""
    whole = Box.whole(param.shape)
    if param.dim is None:
        return (whole,)
    return tuple(whole.cut(param.dim, start + a, start + b) for start, a, b in _cuts(param, layout.tp, tp))


def pieces_of(spec: ModelSpec, layout: Layout, param: Param) -> tuple[Piece, ...]:
    """The pieces of a weight. Neighbouring tensor-parallel coordinates that share a key/value head share its piece."""
    pps = stages_of(spec, layout, param)
    whole = Box.whole(param.shape)
    if param.dim is None:
        return (Piece(param.name, whole, _holders(layout, pps, tuple(range(layout.tp)))),)
    spans = [(tp, start + a, start + b) for tp in range(layout.tp) for start, a, b in _cuts(param, layout.tp, tp)]
    edges = sorted({edge for _, a, b in spans for edge in (a, b)})
    found = []
    for a, b in pairwise(edges):
        tps = tuple(sorted({tp for tp, first, last in spans if first <= a and b <= last}))
        if tps:
            found.append(Piece(param.name, whole.cut(param.dim, a, b), _holders(layout, pps, tps)))
    return tuple(found)


@cache
def buckets(spec: ModelSpec, layout: Layout) -> tuple[Bucket, ...]:
    """Every bucket of the model, the same tuple on every rank. Within one, weights that decay come first."""
    grouped: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
    for param in sorted(spec.params, key=lambda p: not p.decay):
        for piece in pieces_of(spec, layout, param):
            grouped.setdefault((moving_unit(spec, param), piece.holders), []).append(piece)
    found = (Bucket(unit, holders, tuple(p), layout.zero > 0 and len(holders) > 1) for (unit, holders), p in grouped.items())
    return tuple(sorted(found, key=lambda b: (b.unit, b.holders)))


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


def _cuts(param: Param, tp_degree: int, tp: int) -> Iterator[tuple[int, int, int]]:
    start = 0
    for part in param.parts:
        a, b = part.rows(tp_degree, tp)
        yield start, a, b
        start += part.units * part.size


@cache
def _holders(layout: Layout, pps: tuple[int, ...], tps: tuple[int, ...]) -> tuple[int, ...]:
    inner = layout.ulysses * layout.ring * layout.dp
    return tuple(sorted(tp + layout.tp * (i + inner * pp) for pp in pps for i in range(inner) for tp in tps))
