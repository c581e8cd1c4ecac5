"""Lengths by which calls of attention kernels are cut, and whether a window hides anything."""

from collections.abc import Sequence

# cuDNN's attention takes multiples of this many tokens. Chunks and their cuts are such; most
# documents are not (`model.cut`).
EVEN = 1024
# Of pieces above this many tokens it takes what it can; such documents have a call of their own.
LONG = 6144


def banded(lengths: Sequence[int], window: int | None) -> bool:
    """Whether a window hides keys of a document."""
    return window is not None and window < max(lengths)
