"""Sliding windows: which pieces of queries and keys attention computes where a token sees only the last `window` tokens, its own included.

Papers: Longformer (arXiv 2004.05150), the causal sliding window as in Mistral 7B (arXiv 2310.06825).

A band is cut, at multiples of the window, into pieces that any causal kernel computes without waste. Where queries and keys lie in the same
block of the document, a query sees the keys up to its own place. Where the keys lie in the block before, it sees those after its own place:
a causal piece, once queries and keys are taken in the opposite order. No other block is seen.

    window 4       keys 0 1 2 3 | 4 5 6 7         c  "causal": keys up to the query's place in its block
    query 3             c c c c |                 l  "later": keys after the query's place, in the block before
    query 4               l l l | c
    query 5                 l l | c c
    query 7                     | c c c c

Ring pieces and chunks end anywhere: two stretches of one document are cut at each other's ends first, so that what is left are whole
triangles and whole rectangles.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

# Which keys a query sees: all of them; those up to its own number; those from its own number on. The last two have as many keys as queries.
Mask = Literal["all", "causal", "later"]
Span = tuple[int, int]  # half-open


def pieces(queries: Span, keys: Span, window: int | None) -> Iterator[tuple[Span, Span, Mask]]:
    """What queries of a document do with keys of it: pieces in positions of the document, those with mask "causal" first. The two spans are
    equal or have no position in common. Every pair of a query and a key that it sees is in exactly one piece."""
    if window is None:
        if queries == keys:
            yield queries, keys, "causal"
        elif keys[0] < queries[0]:
            yield queries, keys, "all"
        return
    own = list(_blocks(queries, window))
    others = dict(_blocks(keys, window))
    if queries == keys:
        for _, span in own:
            yield span, span, "causal"
    else:
        for at, span in own:
            if at in others and others[at][0] < span[0]:
                yield span, others[at], "all"
    for at, span in own:
        if at - 1 in others:
            yield from _after(span, others[at - 1], window)


def _blocks(span: Span, window: int) -> Iterator[tuple[int, Span]]:
    """Number and extent of each block of `window` positions that a span touches."""
    first, last = span
    for at in range(first // window, -(-last // window)):
        yield at, (max(first, at * window), min(last, (at + 1) * window))


def _after(queries: Span, keys: Span, window: int) -> Iterator[tuple[Span, Span, Mask]]:
    """Keys of the block before that are further on in their block than the query in its own."""
    ends = sorted({queries[0], queries[1], keys[0] + window, keys[1] + window})
    cuts = list(pairwise(ends))
    own = [(a, b) for a, b in cuts if queries[0] <= a and b <= queries[1]]
    theirs = [(a, b) for a, b in cuts if keys[0] + window <= a and b <= keys[1] + window]
    for span in own:
        a, b = span
        if span in theirs and b - a > 1:
            yield (a, b - 1), (a + 1 - window, b - window), "later"
        later = [other for other in theirs if other[0] >= b]
        if later:
            yield span, (later[0][0] - window, later[-1][1] - window), "all"
