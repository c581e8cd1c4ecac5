"""Which token of a pack lies where when the sequence axes (ring x Ulysses x tensor parallel) share one pack.

A pack is whole documents end to end; a token's global index runs over them in order. Tokens are cut as `x[T_{ring.ulysses.tp}, D]`:

1. Ring, zigzag (Striped Attention, arXiv 2311.09431, names the imbalance; the two-ended cut is Llama 3's, arXiv 2407.21783): every
   document is cut into 2R consecutive, nearly equal pieces and ring coordinate i takes pieces i and 2R-1-i, so that each coordinate
   attends to as many earlier tokens as any other, document by document.

       R = 2, documents of 8 and 4:    0 0 1 1 1 1 0 0 | 0 1 1 0

2. A coordinate keeps its tokens in the documents' order, low piece before high piece, padded at the end up to a length that is
   equal on all coordinates and a multiple of ulysses * tp. Padding is an isolated document of its own, index -1, label -100.
3. Ulysses coordinate u holds the u-th contiguous 1/ulysses of that, and tensor-parallel coordinate t the t-th contiguous 1/tp of
   Ulysses' share (Megatron sequence parallelism).

No bytes move here: the data room gives every rank its tokens in this order from the start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from operator import attrgetter

import numpy as np

from longshift.layout.layout import Layout
from longshift.schedule.windows import Mask, pieces

PADDING = -1

Pair = tuple[slice, slice, Mask]  # local queries, the sender's local keys


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one document, positions `start` to `start + length`; `document` PADDING has no tokens. Never empty."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class TokenOrder:
    """Where each token of one pack lies. `runs[i]`: ring coordinate i's, maximal, in local order, padding last, `local_tokens` in all.

    Two runs of one document never overlap: the keys of one lie wholly before or wholly after the queries of the other, so that only
    a run with itself needs a causal mask.
    """

    lengths: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    local_tokens: int

    def index(self, rank: int) -> np.ndarray:
        """int64 [local_tokens]: the global index of each local token, PADDING (-1) where there is none."""
        starts = (0, *accumulate(self.lengths))
        return _concatenate(
            np.full(run.length, PADDING, np.int64)
            if run.document == PADDING
            else np.arange(starts[run.document] + run.start, starts[run.document] + run.start + run.length, dtype=np.int64)
            for run in self.runs[rank]
        )

    def positions(self, rank: int) -> np.ndarray:
        """int64 [local_tokens]: each local token's position in its document, counting from 0 in the padding too."""
        return _concatenate(np.arange(run.start, run.start + run.length, dtype=np.int64) for run in self.runs[rank])


def pack_order(layout: Layout, lengths: Sequence[int]) -> TokenOrder:
    """The order of a pack's tokens over the ranks that share it. A pack without documents is one token."""
    return token_order(list(lengths) or [1], layout.two_ended_ranks, layout.contiguous_ranks)


def token_order(lengths: Sequence[int], ranks: int, multiple: int) -> TokenOrder:
    """Share documents of these lengths over `ranks` ranks, each padded to a multiple of `multiple` (ulysses * tp).

    Before padding, the coordinates hold equally many tokens up to one.
    """
    spans: list[list[Run]] = [[] for _ in range(ranks)]
    turn = 0  # the coordinate that takes the next of the tokens left over by 2R; goes on from document to document
    for document, length in enumerate(lengths):
        bounds = (0, *accumulate(_pieces(length, ranks, turn)))
        turn = (turn + length) % ranks
        for i, runs in enumerate(spans):
            runs.extend(_zigzag(document, bounds, i))
    totals = [sum(run.length for run in runs) for runs in spans]
    local = -(-max(totals) // multiple) * multiple
    for runs, total in zip(spans, totals):
        runs.extend([Run(PADDING, 0, local - total)] if total < local else [])
    return TokenOrder(tuple(lengths), tuple(map(tuple, spans)), local)


@lru_cache(maxsize=256)
def pairs(order: TokenOrder, mine: int, theirs: int, window: int | None = None) -> tuple[Pair, ...]:
    """What ring coordinate `mine` computes with the keys of `theirs`: rectangles of local tokens, and the causal diagonal with its own.
    With a window, the pieces of `schedule.windows`; those with the diagonal come first."""
    if window is not None:
        return _windowed(order, mine, theirs, window)
    if mine == theirs:
        return tuple((at, at, "causal") for _, at, _ in _documents(order.runs[mine]))
    keys = {document: (at.start, runs) for document, at, runs in _documents(order.runs[theirs])}
    found = []
    for document, at, runs in _documents(order.runs[mine]):
        if document == PADDING or document not in keys:
            continue
        start = at.start
        key_start, key_runs = keys[document]
        rectangles: list[Pair] = []
        for run in runs:
            seen = sum(other.length for other in key_runs if other.start < run.start)
            if seen:
                span = slice(key_start, key_start + seen)
                if rectangles and rectangles[-1][1] == span:
                    rectangles[-1] = (slice(rectangles[-1][0].start, start + run.length), span, "all")
                else:
                    rectangles.append((slice(start, start + run.length), span, "all"))
            start += run.length
        found.extend(rectangles)
    return tuple(found)


def pairs_across(later: TokenOrder, mine: int, earlier: TokenOrder, theirs: int, between: int, window: int | None) -> tuple[Pair, ...]:
    """What ring coordinate `mine` does, of a chunk in order `later`, with the keys that `theirs` holds of a chunk in order `earlier`: the
    first document of the one is the last of the other. `between`: how many tokens of it lie from the start of its earlier piece to that of
    its later one."""
    mine_at, their_at = (span(later, mine, 0), span(earlier, theirs, len(earlier.lengths) - 1))
    if not mine_at or not their_at:
        return ()
    if window is None:
        return ((mine_at, their_at, "all"),)
    own = _placed(mine_at.start, later.runs[mine], 0, between)
    others = _placed(their_at.start, earlier.runs[theirs], len(earlier.lengths) - 1, 0)
    return tuple(_between(own, others, window))


def span(order: TokenOrder, coord: int, document: int) -> slice | None:
    """A document's local tokens on a ring coordinate; None where there are none."""
    return next((at for found, at, _ in _documents(order.runs[coord]) if found == document), None)


def _windowed(order: TokenOrder, mine: int, theirs: int, window: int) -> tuple[Pair, ...]:
    found: list[Pair] = []
    others = {document: _placed(at.start, runs, document, 0) for document, at, runs in _documents(order.runs[theirs])}
    for document, at, runs in _documents(order.runs[mine]):
        if mine == theirs or document != PADDING:
            found += _between(_placed(at.start, runs, document, 0), others.get(document, []), window)
    return tuple(sorted(found, key=lambda pair: pair[2] != "causal"))


def _placed(at: int, runs: Sequence[Run], document: int, offset: int) -> list[tuple[int, int, int]]:
    """First and last position of each run of a document, plus `offset`, and what to add to a position for its local number."""
    found = []
    for run in runs:
        if run.document == document:
            start = run.start + offset
            found.append((start, start + run.length, at - start))
            at += run.length
    return found


def _between(own: Sequence[tuple[int, int, int]], others: Sequence[tuple[int, int, int]], window: int) -> Iterator[Pair]:
    for first, last, mine in own:
        for begin, end, theirs in others:
            for queries, keys, mask in pieces((first, last), (begin, end), window):
                yield slice(queries[0] + mine, queries[1] + mine), slice(keys[0] + theirs, keys[1] + theirs), mask


def _documents(runs: Sequence[Run]) -> Iterator[tuple[int, slice, list[Run]]]:
    """(document, its local tokens, its runs) in local order."""
    start = 0
    for document, group in groupby(runs, key=attrgetter("document")):
        same = list(group)
        length = sum(run.length for run in same)
        yield document, slice(start, start + length), same
        start += length


def _pieces(length: int, ranks: int, turn: int) -> list[int]:
    """Sizes of the 2R pieces of a document. The remainder is dealt one token a coordinate, from coordinate `turn` on: to low pieces
    in the first round, to high pieces in the second."""
    each, extra = divmod(length, 2 * ranks)
    sizes = [each] * (2 * ranks)
    for dealt in range(extra):
        coord = (turn + dealt) % ranks
        sizes[coord if dealt < ranks else 2 * ranks - 1 - coord] += 1
    return sizes


def _zigzag(document: int, bounds: Sequence[int], coord: int) -> list[Run]:
    """The pieces `coord` and its mirror image as runs; `bounds` are the 2R+1 piece boundaries."""
    low, high = coord, len(bounds) - 2 - coord
    if bounds[low + 1] == bounds[high]:
        pieces = [(bounds[low], bounds[high + 1])]
    else:
        pieces = [(bounds[low], bounds[low + 1]), (bounds[high], bounds[high + 1])]
    return [Run(document, start, stop - start) for start, stop in pieces if stop > start]


def _concatenate(parts) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])
