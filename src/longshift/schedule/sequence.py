"""Which token of a pack lies where when the sequence axes (ring x Ulysses x tensor parallel) share
one pack.

A pack is whole documents end to end; a token's global index runs over them in order. Tokens are cut
as `x[T_{ring.ulysses.tp}, D]`:

1. Ring, zigzag (Striped Attention, arXiv 2311.09431, names the imbalance; the two-ended cut is
   Llama 3's, arXiv 2407.21783): every document is cut into 2R consecutive, nearly equal pieces and
   ring coordinate i takes pieces i and 2R-1-i, so that each coordinate attends to as many earlier
   tokens as any other, document by document.

       R = 2, documents of 8 and 4:    0 0 1 1 1 1 0 0 | 0 1 1 0

2. A coordinate keeps its tokens in the documents' order, low piece before high piece, padded at the
   end up to a length that is equal on all coordinates and a multiple of ulysses * tp. Padding is an
   isolated document of its own, index -1, label -100.
3. Ulysses coordinate u holds the u-th contiguous 1/ulysses of that, and tensor-parallel coordinate
   t the t-th contiguous 1/tp of Ulysses' share (Megatron sequence parallelism).

No bytes move here: the data room gives every rank its tokens in this order from the start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from longshift.layout.layout import Layout
from longshift.schedule.windows import Mask, Span, pieces

PADDING = -1


class Pair(NamedTuple):
    """Queries and keys that attention computes together: local tokens of this rank, and of the rank
    that holds the keys."""

    queries: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one document, positions `start` to `start + length`. Never empty.

    `document`: PADDING for what has no tokens.
    """

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class TokenOrder:
    """Where each token of one pack lies.

    `lengths`: of the pack's documents.
    `runs[i]`: those of ring coordinate i, maximal, in local order, padding last.
    `local_tokens`: tokens of a coordinate, padding included.

    Two runs of one document never overlap: the keys of one lie wholly before or wholly after the
    queries of the other, so that only a run with itself needs a causal mask.
    """

    lengths: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    local_tokens: int

    def index(self, rank: int) -> np.ndarray:
        """int64 [local_tokens]: the global index of each local token, PADDING (-1) where there is
        none."""
        document_starts = (0, *accumulate(self.lengths))

        parts = []
        for run in self.runs[rank]:
            # Padding is no token of the pack, and its runs have no place in it.
            if run.document == PADDING:
                parts.append(np.full(run.length, PADDING, np.int64))
            else:
                start = document_starts[run.document] + run.start
                stop = start + run.length
                parts.append(np.arange(start, stop, dtype=np.int64))
        return _concatenate(parts)

    def positions(self, rank: int) -> np.ndarray:
        """int64 [local_tokens]: each local token's position in its document, counting from 0 in the
        padding too."""
        parts = []
        for run in self.runs[rank]:
            parts.append(np.arange(run.start, run.start + run.length, dtype=np.int64))
        return _concatenate(parts)


def pack_order(layout: Layout, lengths: Sequence[int]) -> TokenOrder:
    """The order of a pack's tokens over the ranks that share it. A pack without documents is one
    token."""
    return token_order(list(lengths) or [1], layout.two_ended_ranks, layout.contiguous_ranks)


def token_order(lengths: Sequence[int], ranks: int, multiple: int) -> TokenOrder:
    """Share documents of these lengths over `ranks` ring coordinates, each padded to a multiple of
    `multiple` (ulysses * tp).

    Before padding, the coordinates hold equally many tokens up to one.
    """
    # 1. Two pieces of each document for each coordinate. The coordinate that takes the first of the
    #    tokens left over by 2R goes on from document to document.
    runs_by_coord: list[list[Run]] = [[] for _ in range(ranks)]
    next_coord = 0
    for document, length in enumerate(lengths):
        bounds = (0, *accumulate(_piece_sizes(length, ranks, next_coord)))
        next_coord = (next_coord + length) % ranks
        for coord, runs in enumerate(runs_by_coord):
            runs.extend(_zigzag(document, bounds, coord))

    # 2. Pad all to the length of the longest.
    totals = [sum(run.length for run in runs) for runs in runs_by_coord]
    local_tokens = -(-max(totals) // multiple) * multiple
    for runs, total in zip(runs_by_coord, totals):
        if total < local_tokens:
            runs.append(Run(PADDING, 0, local_tokens - total))
    return TokenOrder(tuple(lengths), tuple(map(tuple, runs_by_coord)), local_tokens)


@lru_cache(maxsize=256)
def pairs(
    order: TokenOrder, query_coord: int, key_coord: int, window: int | None = None
) -> tuple[Pair, ...]:
    """What ring coordinate `query_coord` computes with the keys of `key_coord`: rectangles of local
    tokens, and with its own keys the causal diagonal.

    With a window they are the pieces of `schedule.windows`, those with the diagonal first.
    """
    if window is not None:
        return _windowed_pairs(order, query_coord, key_coord, window)
    key_stretches = {stretch.document: stretch for stretch in _stretches(order.runs[key_coord])}
    computed: list[Pair] = []
    for stretch in _stretches(order.runs[query_coord]):
        tokens = stretch.tokens
        # Padding attends to itself: a query without keys would have no log-sum-exp.
        if query_coord == key_coord:
            computed.append(Pair(tokens, tokens, "causal"))
        elif stretch.document != PADDING and stretch.document in key_stretches:
            computed += _rectangles(stretch, key_stretches[stretch.document])
    return tuple(computed)


def pairs_across(
    later: TokenOrder,
    query_coord: int,
    earlier: TokenOrder,
    key_coord: int,
    distance: int,
    window: int | None,
) -> tuple[Pair, ...]:
    """What ring coordinate `query_coord` computes, of a chunk in order `later`, with the keys that
    `key_coord` holds of a chunk in order `earlier`: the first document of the one is the last of
    the other.

    `distance`: tokens of the document from the start of its earlier piece to that of its later one.
    """
    queries = _find_stretch(later.runs[query_coord], 0)
    keys = _find_stretch(earlier.runs[key_coord], len(earlier.lengths) - 1)
    if queries is None or keys is None:
        return ()
    if window is None:
        return (Pair(queries.tokens, keys.tokens, "all"),)
    return tuple(_band_pairs(_locate(queries, distance), _locate(keys), window))


class _Stretch(NamedTuple):
    """A document on a ring coordinate: its local tokens, and its runs in local order."""

    document: int
    tokens: slice
    runs: list[Run]


def _stretches(runs: Sequence[Run]) -> Iterator[_Stretch]:
    start = 0
    for document, group in groupby(runs, key=attrgetter("document")):
        document_runs = list(group)
        stop = start + sum(run.length for run in document_runs)
        yield _Stretch(document, slice(start, stop), document_runs)
        start = stop


def _find_stretch(runs: Sequence[Run], document: int) -> _Stretch | None:
    return next((stretch for stretch in _stretches(runs) if stretch.document == document), None)


def _rectangles(queries: _Stretch, keys: _Stretch) -> list[Pair]:
    """What queries of a document compute with keys of it on another coordinate."""
    rectangles: list[Pair] = []
    start = queries.tokens.start
    key_start = keys.tokens.start
    for run in queries.runs:
        stop = start + run.length
        visible = sum(key_run.length for key_run in keys.runs if key_run.start < run.start)
        key_span = slice(key_start, key_start + visible)
        if rectangles and rectangles[-1].keys == key_span:
            # Both runs see the same keys.
            rectangles[-1] = Pair(slice(rectangles[-1].queries.start, stop), key_span, "all")
        elif visible:
            rectangles.append(Pair(slice(start, stop), key_span, "all"))
        start = stop
    return rectangles


class _LocatedRun(NamedTuple):
    """Positions of a run, half-open, and what to add to a position for its local number."""

    positions: Span
    shift: int


def _locate(stretch: _Stretch, offset: int = 0) -> list[_LocatedRun]:
    """Where the runs of a stretch lie. `offset`: what is added to their positions."""
    located = []
    local_start = stretch.tokens.start
    for run in stretch.runs:
        start = run.start + offset
        positions = start, start + run.length
        located.append(_LocatedRun(positions, local_start - start))
        local_start += run.length
    return located


def _windowed_pairs(
    order: TokenOrder, query_coord: int, key_coord: int, window: int
) -> tuple[Pair, ...]:
    key_runs = {stretch.document: _locate(stretch) for stretch in _stretches(order.runs[key_coord])}
    windowed: list[Pair] = []
    for stretch in _stretches(order.runs[query_coord]):
        if query_coord == key_coord or stretch.document != PADDING:
            queries = _locate(stretch)
            keys = key_runs.get(stretch.document, [])
            windowed += _band_pairs(queries, keys, window)

    # The diagonal comes first: it reaches every query, so that no sum begins without keys.
    return tuple(sorted(windowed, key=lambda pair: pair.mask != "causal"))


def _band_pairs(
    queries: Sequence[_LocatedRun], keys: Sequence[_LocatedRun], window: int
) -> Iterator[Pair]:
    for query_run in queries:
        for key_run in keys:
            for piece in pieces(query_run.positions, key_run.positions, window):
                yield Pair(
                    queries=_shift(piece.queries, query_run.shift),
                    keys=_shift(piece.keys, key_run.shift),
                    mask=piece.mask,
                )


def _shift(positions: Span, shift: int) -> slice:
    first, last = positions
    return slice(first + shift, last + shift)


def _piece_sizes(length: int, ranks: int, first_coord: int) -> list[int]:
    """Sizes of the 2R pieces of a document.

    The remainder is dealt one token a coordinate, from `first_coord` on: to low pieces in the first
    round, to high pieces in the second.
    """
    size, remainder = divmod(length, 2 * ranks)
    sizes = [size] * (2 * ranks)

    # Fewer than 2R tokens are left over, so a coordinate gets two at most.
    for number in range(remainder):
        coord = (first_coord + number) % ranks
        is_low = number < ranks
        piece = coord if is_low else 2 * ranks - 1 - coord
        sizes[piece] += 1
    return sizes


def _zigzag(document: int, bounds: Sequence[int], coord: int) -> list[Run]:
    """The pieces `coord` and its mirror image as runs. `bounds`: the 2R+1 piece boundaries."""
    low = coord
    high = len(bounds) - 2 - coord
    low_start, low_stop = bounds[low : low + 2]
    high_start, high_stop = bounds[high : high + 2]
    spans = [(low_start, low_stop), (high_start, high_stop)]
    # Pieces that touch are one run, so that runs are maximal.
    if low_stop == high_start:
        spans = [(low_start, high_stop)]
    return [Run(document, start, stop - start) for start, stop in spans if stop > start]


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])
