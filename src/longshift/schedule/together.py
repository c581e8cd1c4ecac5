"""Which documents of a pack a call of an attention kernel takes."""

from collections.abc import Sequence


def together(lengths: Sequence[int], long: int) -> list[tuple[int, ...]]:
    """Lengths of documents by call, in their order: one of at least `long` tokens alone, those between long ones together."""
    found: list[tuple[int, ...]] = []
    for length in lengths:
        if found and max(length, found[-1][-1]) < long:
            found[-1] = (*found[-1], length)
        else:
            found.append((length,))
    return found
