"""Sliding windows: which pieces of queries and keys attention computes where a token sees only the
last `window` tokens, its own included.

Papers: Longformer (arXiv 2004.05150), the causal sliding window
as in Mistral 7B (arXiv 2310.06825).

A band is cut, at multiples of the window, into pieces that any causal kernel computes without
waste. Where queries and keys lie in the same block of the document, a query sees the keys up to its
own place. Where the keys lie in the block before, it sees those after its own place: a causal
piece, once queries and keys are taken in the opposite order. No other block is seen.

    window 4       keys 0 1 2 3 | 4 5 6 7     c  "causal": keys up to the query's place in its block
    query 3             c c c c |             l  "later": keys after the query's place, in the
    query 4               l l l | c              block before
    query 5                 l l | c c
    query 7                     | c c c c

Ring pieces and chunks end anywhere: two stretches of one document are cut at each other's ends
first, so that what is left are whole triangles and whole rectangles.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

# Which keys a query sees: all of them; those up to its own number; those from its own number on.
# The last two have as many keys as queries.
Mask = Literal["all", "causal", "later"]
Span = tuple[int, int]  # half-open


class BandPiece(NamedTuple):
    """Queries and keys that attention computes together, as positions of a document."""

    queries: Span
    keys: Span
    mask: Mask


def pieces(queries: Span, keys: Span, window: int | None) -> Iterator[BandPiece]:
    """What queries of a document do with keys of it, pieces with mask "causal" first.

    The two spans are equal or have no position in common. Every pair of a query and a key that it
    sees is in exactly one piece.
    """
    if window is None:
        if queries == keys:
            yield BandPiece(queries, keys, "causal")
        elif keys[0] < queries[0]:
            yield BandPiece(queries, keys, "all")
        return

    # 1. Keys in the block of the queries.
    query_blocks = list(_blocks(queries, window))
    key_blocks = dict(_blocks(keys, window))
    for block, block_queries in query_blocks:
        if queries == keys:
            yield BandPiece(block_queries, block_queries, "causal")
        elif block in key_blocks and key_blocks[block][0] < block_queries[0]:
            yield BandPiece(block_queries, key_blocks[block], "all")

    # 2. Keys in the block before.
    for block, block_queries in query_blocks:
        if block - 1 in key_blocks:
            yield from _later_pieces(block_queries, key_blocks[block - 1], window)


def _blocks(span: Span, window: int) -> Iterator[tuple[int, Span]]:
    """Number and extent of each block of `window` positions that a span touches."""
    first, last = span
    for block in range(first // window, -(-last // window)):
        start = block * window
        yield block, (max(first, start), min(last, start + window))


def _later_pieces(queries: Span, keys: Span, window: int) -> Iterator[BandPiece]:
    """Keys of the block before that are further on in their block than the query in its own."""
    # Both spans as places in a block, cut at each other's ends.
    shifted_keys = keys[0] + window, keys[1] + window
    cuts = list(pairwise(sorted({*queries, *shifted_keys})))
    query_spans = [span for span in cuts if _is_inside(span, queries)]
    key_spans = [span for span in cuts if _is_inside(span, shifted_keys)]
    for span in query_spans:
        # 1. The triangle. A query sees the keys after its own place, so the last one sees none.
        first, end = span
        if span in key_spans and end - first > 1:
            keys = first + 1 - window, end - window
            yield BandPiece((first, end - 1), keys, "later")

        # 2. The rectangle of all keys further on, which lie without gaps.
        later_first = max(end, shifted_keys[0])
        if later_first < shifted_keys[1]:
            yield BandPiece(span, (later_first - window, shifted_keys[1] - window), "all")


def _is_inside(span: Span, outer: Span) -> bool:
    return outer[0] <= span[0] and span[1] <= outer[1]
