"""Document lengths: how they are spread, what a cap would lose, and what becomes of the documents longer than it.

Lengths are tokens, int64 [documents], and count the end-of-text token: a document of m tokens has m - 1 targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Overlong = Literal["split", "truncate", "drop"]


@dataclass(frozen=True)
class Bin:
    """Documents whose length lies in (low, high]."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class CapLoss:
    """What a cap costs: how many documents are longer, the pieces that `split` makes of them, and the tokens that `truncate` and
    `drop` lose. `split` loses none, but a piece does not see the one before it."""

    cap: int
    documents: int
    split_pieces: int
    truncate_tokens: int
    drop_tokens: int


@dataclass(frozen=True, eq=False)
class Spans:
    """What is trained on: tokens `start` to `stop` of `document`, each int64 [spans], in the documents' order."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def of(self, chosen: np.ndarray) -> "Spans":
        """Those that a mask chooses."""
        return Spans(self.document[chosen], self.start[chosen], self.stop[chosen])


def histogram(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Documents and tokens between powers of two, from the shortest document's bin to the longest's."""
    if not len(lengths):
        return ()
    highs = 1 << np.arange(int(lengths.max() - 1).bit_length() + 1)
    which = np.searchsorted(highs, lengths)
    documents = np.bincount(which, minlength=len(highs))
    tokens = np.bincount(which, weights=lengths, minlength=len(highs)).astype(np.int64)
    return tuple(Bin(int(highs[i]) // 2, int(highs[i]), int(documents[i]), int(tokens[i])) for i in range(int(which.min()), len(highs)))


def quantiles(lengths: np.ndarray, shares: Sequence[float]) -> tuple[int, ...]:
    """For each share in [0, 1], the smallest length that at least this share of the documents does not exceed."""
    return tuple(int(n) for n in np.quantile(lengths, shares, method="inverted_cdf"))


def cap_loss(lengths: np.ndarray, cap: int) -> CapLoss:
    """What capping documents at `cap` tokens would cost under each over-length policy."""
    longer = lengths[lengths > cap]
    pieces, kept = int(_pieces(longer, cap).sum()), len(longer) * cap
    return CapLoss(cap, len(longer), pieces, int(longer.sum()) - kept, int(longer.sum()))


def spans(lengths: np.ndarray, max_len: int, overlong: Overlong) -> Spans:
    """The documents, those longer than `max_len` cut by the policy:

        split      pieces of max_len tokens and a shorter last one: every target once. An end-of-text token that would be a piece
                   of its own is left out, for it has no target; it is the last target of the piece before
        truncate   the first max_len tokens
        drop       nothing

    `max_len` is at least 2: a shorter piece may have no target.
    """
    pieces = np.where(lengths > max_len, {"split": _pieces(lengths, max_len), "truncate": 1, "drop": 0}[overlong], 1)
    document = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = nth * max_len
    return Spans(document, start, np.minimum(start + max_len, lengths[document]))


def _pieces(lengths: np.ndarray, max_len: int) -> np.ndarray:
    return -(-(lengths - 1) // max_len)
