"""What a block keeps for its backward, from what fits and what is fastest: `recompute-auto` becomes
one of

    nothing again        all is kept
    recompute-selective, recompute-full      less and less is
    recompute-full.keepN of each stage the last N blocks keep all, as many as fit
    ... .host, .disk     what recompute-full keeps waits there, where the layout names it

Which tensors are dropped matters as much as how many (Coop, arXiv 2311.00591). One number says
which blocks keep all, as if all were alike: windows, rotary embedding or frozen weights of some are
not looked at. Where everything fits, nothing is recomputed and nothing is offloaded. The caller
brings bytes and seconds: those of the ledger and the clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from longshift.layout.layout import Layout


@dataclass(frozen=True)
class Activations:
    """A layout that says what blocks keep.

    `bytes`: that a rank needs on its device.
    `seconds`: of a step.
    """

    layout: Layout
    bytes: int
    seconds: float


def choose_activations(
    layout: Layout,
    num_blocks: int,
    free_bytes: float,
    bytes_of: Callable[[Layout], int],
    seconds_of: Callable[[Layout], float],
) -> tuple[Activations, tuple[Activations, ...]]:
    """Choose the fastest recomputation of a layout that leaves it open. Returns it, and the
    ranking, fastest first.

    If nothing fits into `free_bytes` of a device, returns the smallest, and no ranking.

    `num_blocks`: of a virtual stage, at most.
    """
    sizes = {policy: bytes_of(policy) for policy in _policies(layout)}

    ranking = []
    for policy, size in sizes.items():
        if size <= free_bytes:
            filled = _fill_memory(policy, num_blocks, free_bytes, bytes_of)
            ranking.append(Activations(filled, bytes_of(filled), seconds_of(filled)))

    if not ranking:
        smallest = min(sizes, key=lambda policy: sizes[policy])
        return Activations(smallest, sizes[smallest], seconds_of(smallest)), ()

    ranking.sort(key=lambda activations: (activations.seconds, activations.bytes))
    return ranking[0], tuple(ranking)


def _policies(layout: Layout) -> Iterator[Layout]:
    """What all blocks may do alike. Activations are offloaded only if the layout names a tier."""
    on_device = replace(layout, offload="device")
    yield replace(on_device, recompute="none")
    yield replace(on_device, recompute="selective")
    for tier in dict.fromkeys(("device", layout.offload)):
        yield replace(on_device, recompute="full", offload=tier)


def _fill_memory(
    policy: Layout,
    num_blocks: int,
    free_bytes: float,
    bytes_of: Callable[[Layout], int],
) -> Layout:
    """The policy with as many blocks that keep all as fit."""
    if policy.recompute in ("none", "selective"):
        return policy
    # Bisection: `fitting` blocks fit, `too_many` do not. All blocks are another policy.
    fitting = 0
    too_many = num_blocks
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if bytes_of(replace(policy, kept_blocks=middle)) <= free_bytes:
            fitting = middle
        else:
            too_many = middle
    return replace(policy, kept_blocks=fitting)
