"""Placement: which boxes of each weight every rank computes with under a layout, and where their
home is.

A *piece* is a box of one weight together with its holders: all the ranks that compute with it. The
pieces of a weight are disjoint and cover it. Everything that moves weights or gradients follows
from them:

    gather   every holder of a piece gets it from the piece's home
    reduce   the sum over the holders' gradients goes to the piece's home (each holder's gradient
             is a partial sum, always)
    home     ZeRO-0: every holder keeps the whole piece; ZeRO-1..3: its rows (dim 0) are dealt over
             the holders, nearly equally

    A[I, J] on tp2 x dp2, ZeRO-3:      columns cut over tp      rows of each half dealt
                                                                over the two replicas
                                       ┌────┬────┐              ┌────┬────┐
                                       │tp0 │tp1 │              │r0  │r1  │
                                       │r0r2│r1r3│              ├────┼────┤
                                       └────┴────┘              │r2  │r3  │
                                                                └────┴────┘

The heads of attention that a rank has follow from the same cuts.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise

from longshift.layout import axes
from longshift.layout.box import Box
from longshift.layout.layout import Coord, Layout
from longshift.spec.model import ModelSpec
from longshift.spec.param import Param, Part, share


@dataclass(frozen=True)
class Piece:
    """A box of weight `name` and the ranks that compute with it, ascending."""

    name: str
    box: Box
    holders: tuple[int, ...]

    def share(self, index: int) -> Box:
        """The rows whose home is the `index`-th holder when home is sharded; empty when there are
        fewer rows than holders."""
        start, stop = share(self.box.shape[0], len(self.holders), index)
        return self.box.cut(0, self.box.start[0] + start, self.box.start[0] + stop)


@dataclass(frozen=True)
class Bucket:
    """The pieces of one moving unit that have the same holders, all of them trained or none: what
    one fused collective carries."""

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
        return self._share_elements(0)

    def home(self, rank: int) -> tuple[tuple[str, Box], ...]:
        """What a holder keeps at home, in the order of the fused buffer."""
        index = bisect_left(self.holders, rank)
        return tuple(
            (piece.name, piece.share(index) if self.sharded else piece.box) for piece in self.pieces
        )

    def kept(self, rank: int) -> int:
        """How many elements a holder keeps at home."""
        return self._share_elements(bisect_left(self.holders, rank))

    def _share_elements(self, index: int) -> int:
        if not self.sharded:
            return self.elements
        # Counted without boxes, which take longer to make.
        total = 0
        for piece in self.pieces:
            rows = piece.box.shape[0]
            start, stop = share(rows, len(self.holders), index)
            total += (stop - start) * (piece.box.elements // max(1, rows))
        return total

    def owns(self, rank: int) -> bool:
        """Whether `rank` speaks for its home boxes where every element counts
        once (norms, checkpoints)."""
        return self.sharded or rank == self.holders[0]


def moving_unit(spec: ModelSpec, param: Param) -> int:
    """The unit that a weight is gathered and reduced with."""
    # A tied embedding is used by two units, maybe on two stages, and moves alone: gathered before a
    # step's first micro-batch and reduced after its last.
    return spec.units if param.also_unit is not None else param.unit


def place_of(spec: ModelSpec, unit: int) -> int:
    """Where a moving unit comes in the forward: the tied embedding first."""
    return -1 if unit == spec.units else unit


def stages_of(spec: ModelSpec, layout: Layout, param: Param) -> tuple[int, ...]:
    """Pipeline coordinates that compute with a weight."""
    stages = _stages_by_unit(layout, spec.layers)
    unit_stages = stages[param.unit]
    if param.also_unit is None:
        return unit_stages
    return tuple(sorted({*unit_stages, *stages[param.also_unit]}))


@cache
def _stages_by_unit(layout: Layout, layers: int) -> tuple[tuple[int, ...], ...]:
    """The pipeline coordinates that compute with each unit."""
    stages: list[list[int]] = [[] for _ in range(layers + 2)]
    for pp in range(layout.pp):
        for chunk in layout.units_of(layers, pp):
            for unit in chunk:
                stages[unit].append(pp)  # a unit is in one chunk of a coordinate
    return tuple(map(tuple, stages))


def holders_of(layout: Layout, pps: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks of these stages, ascending."""
    return _holders(layout, pps, tuple(range(layout.weight_ranks)))


def local_boxes(param: Param, layout: Layout, coord: Coord) -> tuple[Box, ...]:
    """Boxes of a weight on a rank. Its tensor is their concatenation along `param.dim`."""
    weight_box = Box.whole(param.shape)
    if param.dim is None:
        return (weight_box,)
    index = layout.place(coord, axes.weight_axes())
    spans = _cut_spans(param.parts, layout.weight_ranks, index)
    return tuple(weight_box.cut(param.dim, start, stop) for start, stop in spans)


def pieces_of(spec: ModelSpec, layout: Layout, param: Param) -> tuple[Piece, ...]:
    """The pieces of a weight. Neighboring ranks that share a key/value head share its piece."""
    stages = stages_of(spec, layout, param)
    boxes = _boxes_with_holders(layout, stages, param.shape, param.dim, param.parts)
    return tuple(Piece(param.name, box, holders) for box, holders in boxes)


@cache
def _boxes_with_holders(
    layout: Layout,
    pps: tuple[int, ...],
    shape: tuple[int, ...],
    dim: int | None,
    parts: tuple[Part, ...],
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The pieces of every weight of these sizes on these stages:
    those of all blocks of a stage are alike."""
    weight_box = Box.whole(shape)
    if dim is None:
        return ((weight_box, holders_of(layout, pps)),)

    # 1. What each cut of the weights has of the cut dim.
    ranks = layout.weight_ranks
    spans_by_cut = [list(_cut_spans(parts, ranks, index)) for index in range(ranks)]

    # 2. Between neighboring edges all elements have the same holders.
    edges = {edge for spans in spans_by_cut for span in spans for edge in span}
    boxes = []
    for begin, end in pairwise(sorted(edges)):
        cuts = tuple(
            cut
            for cut, spans in enumerate(spans_by_cut)
            if any(start <= begin and end <= stop for start, stop in spans)
        )
        if cuts:
            boxes.append((weight_box.cut(dim, begin, end), _holders(layout, pps, cuts)))
    return tuple(boxes)


@cache
def buckets(spec: ModelSpec, layout: Layout) -> tuple[Bucket, ...]:
    """Every bucket of the model, the same tuple on every rank.
    Within one, weights that decay come first."""
    pieces = [(param, piece) for param in spec.params for piece in pieces_of(spec, layout, param)]
    return _group_pieces(spec, layout, pieces)


@lru_cache(maxsize=32)  # a step asks for those of its layouts several times
def buckets_of(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Bucket, ...]:
    """The buckets that one rank is a holder of: those of `buckets`, in their order, made without
    the others."""
    pp = layout.coord(rank).pp
    pieces = []
    # Stages are asked first: most weights are on others, and pieces of all take long to make.
    for param in spec.params:
        if pp in stages_of(spec, layout, param):
            for piece in pieces_of(spec, layout, param):
                if _has_rank(piece.holders, rank):
                    pieces.append((param, piece))

    return _group_pieces(spec, layout, pieces)


def _group_pieces(
    spec: ModelSpec,
    layout: Layout,
    pieces: Iterable[tuple[Param, Piece]],
) -> tuple[Bucket, ...]:
    """Buckets of pieces, by unit, holders, and whether they are trained."""
    # Equal holders are one object of `_holders`: hashing thousands of ranks for every piece takes
    # longer than all else.
    groups: dict[tuple[int, int, bool], list[Piece]] = {}
    for param, piece in sorted(pieces, key=lambda pair: not pair[0].decay):
        group = moving_unit(spec, param), id(piece.holders), param.frozen
        groups.setdefault(group, []).append(piece)

    buckets = []
    for (unit, _, frozen), group_pieces in groups.items():
        holders = group_pieces[0].holders
        is_sharded = layout.zero > 0 and len(holders) > 1
        buckets.append(Bucket(unit, holders, tuple(group_pieces), is_sharded, frozen))
    buckets.sort(key=lambda bucket: (bucket.unit, bucket.holders, bucket.frozen))
    return tuple(buckets)


@lru_cache(maxsize=32)
def boxes_on(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
) -> Mapping[int, Mapping[str, tuple[Box, ...]]]:
    """By moving unit, ascending, the boxes of each weight that one rank computes with. The time it
    takes does not depend on the number of ranks."""
    coord = layout.coord(rank)
    units: dict[int, dict[str, tuple[Box, ...]]] = {}
    for param in spec.params:
        if coord.pp in stages_of(spec, layout, param):
            boxes = local_boxes(param, layout, coord)
            units.setdefault(moving_unit(spec, param), {})[param.name] = boxes
    return dict(sorted(units.items()))


def assemble(box: Box, local: Iterable[Box], dim: int | None) -> tuple[slice, ...]:
    """Where `box` lies in a rank's tensor, which concatenates its `local` boxes along `dim`.

    Raises ValueError if it is in none of them.
    """
    offset = 0
    for part in local:
        if box in part:
            slices = list(box.within(part))
            # Boxes before this one lie before it in the tensor, whatever their coordinates.
            if dim is not None:
                span = slices[dim]
                slices[dim] = slice(span.start + offset, span.stop + offset)
            return tuple(slices)
        offset += part.shape[dim] if dim is not None else 0

    raise ValueError(f"{box} is in none of the rank's boxes")


def local_shape(param: Param, local: tuple[Box, ...]) -> tuple[int, ...]:
    """Shape of the concatenation of `local` along the weight's cut dim."""
    if param.dim is None:
        return param.shape
    shape = list(param.shape)
    shape[param.dim] = sum(box.shape[param.dim] for box in local)
    return tuple(shape)


def _has_rank(holders: tuple[int, ...], rank: int) -> bool:
    """Whether `holders`, ascending, name the rank."""
    index = bisect_left(holders, rank)
    return index < len(holders) and holders[index] == rank


def _cut_spans(parts: tuple[Part, ...], ranks: int, index: int) -> Iterator[tuple[int, int]]:
    """The rows of each part, half-open, that the `index`-th of so many ranks has."""
    part_start = 0
    for part in parts:
        first, last = part.rows(ranks, index)
        yield part_start + first, part_start + last
        part_start += part.units * part.size


@cache
def _holders(layout: Layout, pps: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of these stages that have these cuts of the weights, ascending."""
    # Cuts vary fastest over ranks, stages slowest.
    weight_ranks = layout.weight_ranks
    num_copies = layout.world // layout.pp // weight_ranks

    ranks = []
    for pp in pps:
        for copy in range(num_copies):
            first = weight_ranks * (copy + num_copies * pp)
            ranks += [first + cut for cut in cuts]

    return tuple(sorted(ranks))


def tensor_heads(spec: ModelSpec, layout: Layout, coord: Coord) -> tuple[range, range]:
    """Query and key/value heads of a rank's cut of the weights."""
    ranks = layout.weight_ranks
    index = layout.place(coord, axes.weight_axes())
    first, last = share(spec.heads, ranks, index)
    first_kv, last_kv = Part(spec.kv_heads, heads=spec.heads).rows(ranks, index)
    return range(first, last), range(first_kv, last_kv)


def heads_of(heads: range, group_size: int, ranks: int, index: int) -> tuple[range, range]:
    """Query heads, of `heads`, that the `index`-th of `ranks` attends with, and the key/value heads
    that those need."""
    first, last = share(len(heads), ranks, index)
    queries = heads[first:last]
    return queries, range(queries.start // group_size, -(-queries.stop // group_size))


def kernel_kv_heads(queries: range, keys: range, group_size: int) -> int:
    """How many key/value heads a kernel gets: those of `keys`, or one per query head if `queries`
    are not divided evenly over them."""
    queries_per_key, remainder = divmod(len(queries), len(keys))
    is_even = not remainder and all(
        head // group_size - keys.start == index // queries_per_key
        for index, head in enumerate(queries)
    )
    return len(keys) if is_even else len(queries)


def rank_heads(spec: ModelSpec, layout: Layout, coord: Coord) -> tuple[int, int]:
    """How many query and key/value heads a rank attends with, after Ulysses' exchange."""
    queries, keys = tensor_heads(spec, layout, coord)
    group_size = spec.heads // spec.kv_heads
    if layout.ulysses > 1:
        queries, keys = heads_of(queries, group_size, layout.ulysses, coord.ulysses)
    return len(queries), kernel_kv_heads(queries, keys, group_size)
