"""Which calls of attention kernels compute a pack, and how a piece is cut between two kernels."""

from collections.abc import Sequence

EVEN = 1024  # tokens, whose multiples cuDNN's attention takes: chunks and their cuts are, most documents are not (`model.cut`)
LONG = 6144  # tokens: of longer pieces it takes what it can; such documents are computed in a call of their own


def banded(lengths: Sequence[int], window: int | None) -> bool:
    """Whether a window hides keys of a document."""
    return window is not None and window < max(lengths)


def calls(lengths: Sequence[int], window: int | None, packed: bool, long: int) -> list[tuple[int, ...]]:
    """Lengths of documents by call, in their order. `packed`: whether a call may take several. Then one takes all documents of a pack that
    has a window; without a window a document of at least `long` tokens has a call alone, and those between long ones share a call."""
    if not packed:
        return [(length,) for length in lengths]
    if banded(lengths, window):
        return [tuple(lengths)]
    found: list[tuple[int, ...]] = []
    for length in lengths:
        if found and max(length, found[-1][-1]) < long:
            found[-1] = (*found[-1], length)
        else:
            found.append((length,))
    return found


def cut_parts(queries: int, keys: int, every: int, causal: bool) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """Queries of a piece, and the keys that they see with whether later ones are hidden, where it is cut at whole multiples of `every`."""

    def ends(tokens: int) -> list[slice]:
        whole = tokens - tokens % every
        return [some for some in (slice(0, whole), slice(whole, tokens)) if some.start < some.stop]

    return [
        (rows, [(seen, causal and seen == rows) for seen in ends(keys) if not causal or seen.start <= rows.start]) for rows in ends(queries)
    ]
