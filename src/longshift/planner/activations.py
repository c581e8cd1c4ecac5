"""What a block keeps for its backward, from what fits and what is fastest: `recompute-auto` becomes one of

    nothing again        all is kept
    recompute-selective, recompute-full      less and less is
    recompute-full.keepN of each stage the last N blocks keep all, as many as fit
    ... .host, .disk     what recompute-full keeps waits there, where the layout names it

Which tensors are dropped matters as much as how many (Coop, arXiv 2311.00591). All blocks are alike, so one number says which of them keep
all. Where everything fits nothing is computed again and nothing is moved. The caller brings bytes and seconds: those of the ledger and the
clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from longshift.layout.layout import Layout


@dataclass(frozen=True)
class Activations:
    """A layout that says what blocks keep, with the `bytes` that a rank needs on its device, and `seconds` of a step."""

    layout: Layout
    bytes: int
    seconds: float


def choose(
    layout: Layout, blocks: int, free_bytes: float, bytes_of: Callable[[Layout], int], seconds_of: Callable[[Layout], float]
) -> tuple[Activations, tuple[Activations, ...]]:
    """The fastest way of `layout`, whose recomputation is left open, that fits into `free_bytes` of a device, or the smallest, where none
    does; and all that were compared, fastest first. `blocks`: of a virtual stage, at the most."""
    small = {way: bytes_of(way) for way in _ways(layout)}
    fitting = [way for way, size in small.items() if size <= free_bytes]
    if not fitting:
        least = min(small, key=lambda way: small[way])
        return Activations(least, small[least], seconds_of(least)), ()
    found = []
    for way in fitting:
        most = _most_kept(way, blocks, free_bytes, bytes_of)
        found.append(Activations(most, bytes_of(most), seconds_of(most)))
    found.sort(key=lambda one: (one.seconds, one.bytes))
    return found[0], tuple(found)


def _ways(layout: Layout) -> Iterator[Layout]:
    """What all blocks may do alike; what moves, where the layout names a tier."""
    here = replace(layout, offload="device")
    yield replace(here, recompute="none")
    yield replace(here, recompute="selective")
    for tier in dict.fromkeys(("device", layout.offload)):
        yield replace(here, recompute="full", offload=tier)


def _most_kept(way: Layout, blocks: int, free_bytes: float, bytes_of: Callable[[Layout], int]) -> Layout:
    """The way with as many blocks that keep all as fit, found by halving."""
    if way.recompute in ("none", "selective"):
        return way
    fits, not_ = 0, blocks
    while not_ - fits > 1:
        middle = (fits + not_) // 2
        if bytes_of(replace(way, kept_blocks=middle)) <= free_bytes:
            fits = middle
        else:
            not_ = middle
    return replace(way, kept_blocks=fits)
