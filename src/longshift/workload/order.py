"""The order of documents: a shuffle that is computed, not stored.

A global cursor counts documents since training began. Epoch `cursor // n` has its own permutation of the n documents: a balanced
Feistel network over the smallest power of four that holds n, walked until it lands below n (cycle walking; on average fewer than
four steps). So a seek to any cursor costs O(1), nothing has to be saved but the cursor, and every machine finds the same order.
"""

import hashlib
import struct
from dataclasses import dataclass

_ROUNDS = 8
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Order:
    """Endless shuffled order of documents 0 to n-1; `order[cursor]` is the document at a global cursor >= 0.

    Each epoch is another permutation, keyed by (seed, epoch). Raises ValueError for n < 1.
    """

    n: int
    seed: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"an order of {self.n} documents: at least one is needed")

    def __getitem__(self, cursor: int) -> int:
        if cursor < 0:
            raise IndexError(f"cursor {cursor} is negative")
        epoch, index = divmod(cursor, self.n)
        keys = _keys(self.seed, epoch)
        bits = max(1, ((self.n - 1).bit_length() + 1) // 2)
        index = _feistel(index, bits, keys)
        while index >= self.n:
            index = _feistel(index, bits, keys)
        return index


def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One 64-bit key a round."""
    digest = hashlib.blake2b(f"longshift order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return struct.unpack(f"<{_ROUNDS}Q", digest)


def _feistel(index: int, bits: int, keys: tuple[int, ...]) -> int:
    """A permutation of 0 to 4**bits - 1, whatever the keys."""
    mask = (1 << bits) - 1
    left, right = index >> bits, index & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << bits | right


def _mix(word: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
