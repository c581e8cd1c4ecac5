"""Lengths by which calls of attention kernels are cut, and whether a window hides anything."""

from collections.abc import Sequence

# tokens, whose multiples cuDNN's attention takes: chunks and their cuts are, most documents are not
# (`model.cut`).
EVEN = 1024
# tokens: of longer pieces it takes what it can; such documents are computed in a call of their own.
LONG = 6144


def banded(lengths: Sequence[int], window: int | None) -> bool:
    """Whether a window hides keys of a document."""
    return window is not None and window < max(lengths)
