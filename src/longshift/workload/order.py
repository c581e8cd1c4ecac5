"""The order of documents: a shuffle that is computed, not stored.

A global cursor counts documents since training began. Epoch `cursor // n` has its own permutation
of the n documents: a balanced Feistel network over the smallest power of four that holds n, walked
until it lands below n (cycle walking; on average fewer than four steps). So a seek to any cursor
costs O(1), nothing has to be saved but the cursor, and every machine finds the same order."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm
from typing import Any

import numpy as np

_ROUNDS = 8
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Order:
    """Endless shuffled order of documents 0 to n-1, at least one; `order[cursor]` is the document
    at a global cursor >= 0.

    Each epoch is another permutation, keyed by (seed, epoch).
    """

    n: int
    seed: int

    def __getitem__(self, cursor: int) -> int:
        epoch, index = divmod(cursor, self.n)

        keys = _keys(self.seed, epoch)
        # The network works on halves of equal size, together the smallest power of four.
        bits = max(1, ((self.n - 1).bit_length() + 1) // 2)
        index = _feistel(index, bits, keys)
        while index >= self.n:  # no document
            index = _feistel(index, bits, keys)
        return index


@dataclass(frozen=True)
class Mixture:
    """Endless shuffled order of several sources, whose documents are numbered one source after the
    other.

    `sizes`: documents of each source, at least 1; `shares`: whole numbers, at least 1, in the
    proportion in which their documents are read. The sources alternate as evenly as their shares
    allow, from a place that the seed chooses. Each source has its own endless `Order`, which goes
    on as its documents are read. So every document of a source is read before one is read again.

        shares 3, 1    a a b a  a a b a  ...    documents of a: 2 0 1 | 1 2 0 | ...

    `mixture[cursor]` costs O(log sources): a tree of pairs of sources, and in each pair an even
    rounding (Bresenham's line)."""

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    seed: int

    @cached_property
    def _orders(self) -> tuple[Order, ...]:
        # Negative, as the key of number 0 gives the offset.
        seeds = [_keys(self.seed, -1 - source)[0] for source in range(len(self.sizes))]
        return tuple(Order(n, seed) for n, seed in zip(self.sizes, seeds))

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Documents and shares of the sources before each, and of all."""
        return [0, *accumulate(self.sizes)], [0, *accumulate(self.shares)]

    @cached_property
    def _offset(self) -> int:
        """Where in their pattern the sources begin, in parts of 2^64 of it."""
        return _keys(self.seed, 0)[0]

    def __getitem__(self, cursor: int) -> int:
        document_ends, share_ends = self._ends
        first = 0
        last = len(self.sizes)
        while last - first > 1:
            middle = (first + last) // 2
            low_share = share_ends[middle] - share_ends[first]
            total_share = share_ends[last] - share_ends[first]
            offset = self._offset * total_share >> 64

            # Of the first `cursor` documents of sources first to last, sources up to middle give
            # low_reads. The cursor is theirs if the next document raises the number.
            low_reads = (cursor * low_share + offset) // total_share
            next_low_reads = ((cursor + 1) * low_share + offset) // total_share
            if next_low_reads > low_reads:
                last = middle
                cursor = low_reads
            else:
                first = middle
                cursor -= low_reads
        return document_ends[first] + self._orders[first][cursor]


def held_out(documents: np.ndarray, share: float) -> np.ndarray:
    """Which documents, by number, belong to a share that is held out of training: bool, the same
    for every seed."""
    # SplitMix64 of each number. Plus one, as zero would stay zero.
    words = (documents.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(words) < share * 2.0**64


def shares_of(
    tokens: Sequence[int],
    documents: Sequence[int],
    epochs: Sequence[float | None],
    weights: Sequence[float | None],
) -> tuple[int, ...]:
    """Whole numbers in the proportion in which documents of the sources are read. Nothing is
    rounded.

    `epochs`: how often a source is read while others are read once; None: 1.
    `weights`: where all sources have one, the proportion of their tokens, which counts instead.
    """
    # Text gives the decimal that a person wrote: 0.1 is 1/10, not the nearest float.
    passes = [Fraction(1) if count is None else Fraction(str(count)) for count in epochs]
    if all(weight is not None for weight in weights):
        passes = [
            Fraction(str(weight)) / source_tokens for weight, source_tokens in zip(weights, tokens)
        ]

    # The smallest whole numbers in the proportion of these fractions.
    reads = [source_passes * n for source_passes, n in zip(passes, documents)]
    denominator = lcm(*(read.denominator for read in reads))
    numerators = [int(read * denominator) for read in reads]

    divisor = gcd(*numerators)
    return tuple(numerator // divisor for numerator in numerators)


def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One 64-bit key a round."""
    digest = hashlib.blake2b(
        f"longshift order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS
    ).digest()
    return struct.unpack(f"<{_ROUNDS}Q", digest)


def _feistel(index: int, bits: int, keys: tuple[int, ...]) -> int:
    """A permutation of 0 to 4**bits - 1, whatever the keys."""
    mask = (1 << bits) - 1
    high = index >> bits
    low = index & mask

    for key in keys:
        mixed = high ^ (_mix(low ^ key) & mask)
        high = low
        low = mixed
    return high << bits | low


def _mix(word: Any) -> Any:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014) of a number or of an array of uint64: every
    input bit reaches every output bit."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
