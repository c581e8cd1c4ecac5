"""Document lengths: how they are spread, what a cap would lose, and what becomes of the documents
longer than it.

Lengths are tokens, int64 [documents], and count the end-of-text token. A document of m tokens has
m - 1 targets."""

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
    """What a cap costs: how many documents are longer, the pieces that `split` makes of them, and
    the tokens that `truncate` and `drop` lose. `split` loses none, but a piece does not see the one
    before it."""

    cap: int
    documents: int
    split_pieces: int
    truncate_tokens: int
    drop_tokens: int


@dataclass(frozen=True, eq=False)
class Spans:
    """What is trained on: tokens `start` to `stop` of `document`, each int64 [spans], in the
    documents' order."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def of(self, mask: np.ndarray) -> "Spans":
        """The spans that a mask selects."""
        return Spans(self.document[mask], self.start[mask], self.stop[mask])

    def item(self, index: int) -> tuple[int, int, int]:
        """Document, start and stop of one span."""
        return int(self.document[index]), int(self.start[index]), int(self.stop[index])


def histogram(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Documents and tokens between powers of two, from the shortest document's bin
    to the longest's."""
    if not len(lengths):
        return ()
    # A bin has its upper end: a power of two is the last length of its bin.
    highs = 1 << np.arange(int(lengths.max() - 1).bit_length() + 1)
    bin_index = np.searchsorted(highs, lengths)
    documents = np.bincount(bin_index, minlength=len(highs))
    tokens = np.bincount(bin_index, weights=lengths, minlength=len(highs)).astype(np.int64)

    bins = []
    for i in range(int(bin_index.min()), len(highs)):
        high = int(highs[i])
        bins.append(Bin(high // 2, high, int(documents[i]), int(tokens[i])))
    return tuple(bins)


def quantiles(lengths: np.ndarray, shares: Sequence[float]) -> tuple[int, ...]:
    """For each share in [0, 1], the smallest length that at least this share of the documents does
    not exceed."""
    return tuple(int(n) for n in np.quantile(lengths, shares, method="inverted_cdf"))


def cap_loss(lengths: np.ndarray, cap: int) -> CapLoss:
    """What capping documents at `cap` tokens would cost under each over-length policy."""
    longer = lengths[lengths > cap]
    total = int(longer.sum())
    return CapLoss(
        cap=cap,
        documents=len(longer),
        split_pieces=int(_pieces(longer, cap).sum()),
        truncate_tokens=total - len(longer) * cap,
        drop_tokens=total,
    )


def spans(lengths: np.ndarray, max_len: int, overlong: Overlong) -> Spans:
    """The documents, those longer than `max_len` cut by the policy:

        split      pieces of max_len tokens and a shorter last one: every target once. An
                   end-of-text token that would be a piece of its own is left out, for it has no
                   target; it is the last target of the piece before
        truncate   the first max_len tokens
        drop       nothing

    `max_len` is at least 2: a shorter piece may have no target.
    """
    long_pieces = {"split": _pieces(lengths, max_len), "truncate": 1, "drop": 0}[overlong]
    pieces = np.where(lengths > max_len, long_pieces, 1)
    document = np.repeat(np.arange(len(lengths)), pieces)
    first_span = np.cumsum(pieces) - pieces
    piece_index = np.arange(len(document)) - np.repeat(first_span, pieces)
    start = piece_index * max_len
    return Spans(document, start, np.minimum(start + max_len, lengths[document]))


def _pieces(lengths: np.ndarray, max_len: int) -> np.ndarray:
    """Pieces of documents that are split: the last token is only a target,
    so that it needs no piece."""
    return -(-(lengths - 1) // max_len)
