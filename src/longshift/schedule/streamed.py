"""What a rank does with one pack under a layout that cuts it in chunks: the event lists of its units.

Between forward and backward input and output of attention, keys and values of every block wait; in the FPDT paper's order its input alone.
Where that is too much, `every` k goes past it as recomputation in groups does (Chen et al., arXiv 1604.06174): of k blocks in a row only
the first one's input waits, and the forward of the others is played again when the backward comes to them; the last group's backward comes
at once, so it is kept as it is. With k = 1 no forward is played again, but that of attention.

    every2, blocks 1 to 5     pass 1, pass on 2, pass 3, pass on 4, forward 5 │ backward 5, forward 3, backward from x 4, backward 3, ...
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longshift.layout.layout import Coord, Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.schedule import chunks
from longshift.schedule.chunks import Buffer, Event, Policy
from longshift.schedule.sequence import Run, TokenOrder
from longshift.spec.model import ModelSpec

# What is played on a unit. Of a block: `forward` leaves what `backward` takes; `pass` its input alone, from which the other backward goes;
# `pass on` not even that. The head waits for its backward, which is the loss; `score` is the loss where nothing is learned.
Turn = Literal["embed", "forward", "pass", "pass on", "later", "loss", "score", "backward", "backward from x", "embed_back"]


STREAMS = {"x": (0, "h"), "y": (1, "h"), "dx": (0, "g"), "dy": (1, "g")}  # between units: which side of the unit, and what


def tier_key(micro: int, unit: int, buffer: Buffer) -> tuple[int, int, str, int]:
    """Under what a buffer of a unit's list lies in the tier: a unit's y is the x of the unit after it."""
    name, chunk = buffer
    after, what = STREAMS.get(name, (0, name))
    return micro, unit + after, what, chunk


@dataclass(frozen=True)
class Lists:
    """Event lists of a pack, those of a block the same for every one with the same window, with the order of the tokens in each chunk, the
    first chunk that each one sees."""

    orders: list[TokenOrder]
    sees: tuple[int, ...]
    of: Mapping[Turn, tuple[Event, ...]]


def lists(
    spec: ModelSpec,
    layout: Layout,
    at: Coord,
    cut: Sequence[Sequence[Run]],
    compute_bytes: int,
    ahead: int,
    window: int | None,
    learns: bool = True,
) -> Lists:
    """Of chunks `cut`, on the rank that stands at `at`, for blocks with this sliding window; where nothing is learned, of that alone."""
    orders, sees, count = chunks.orders(cut, layout), chunks.reach(cut, window), len(cut)
    keep = "input" if layout.schedule == "fpdt" else "output"
    policy = Policy(layout.schedule, keep, layout.kv, ahead, sent=(layout.neighbor_ranks - 1) / layout.neighbor_ranks)
    from_x = replace(policy, keep="input")
    sizes = chunks.sizes(spec, layout, at, orders, compute_bytes)
    blocks = [loss_blocks(spec, order.local_tokens // layout.contiguous_ranks) for order in orders]
    found: dict[Turn, tuple[Event, ...]] = {"embed": chunks.alone("embed", None, "y", count, ahead, sizes)}
    if layout.every or not learns:
        found["pass on"] = chunks.forward(sees, from_x, sizes, drop_x=True)
    if not learns:
        found["score"] = chunks.alone("score", "x", None, count, ahead, sizes, blocks)
        return Lists(orders, sees, found)
    found |= {
        "forward": chunks.forward(sees, policy, sizes),
        "later": (),
        "loss": chunks.alone("loss", "x", "dx", count, ahead, sizes, blocks),
        "backward": chunks.backward(sees, policy, sizes),
        "embed_back": chunks.alone("embed_back", "dy", None, count, ahead, sizes),
    }
    if layout.every:
        found |= {
            "pass": chunks.forward(sees, from_x, sizes),
            "backward from x": chunks.backward(sees, from_x, sizes),
        }
    return Lists(orders, sees, found)


def forward_turns(units: Sequence[int], layers: int, every: int) -> Iterator[tuple[int, Turn]]:
    """What is played on consecutive units before their backward, in order."""
    *passed, last = _groups(units, layers, every)
    if units[0] == 0:
        yield 0, "embed"
    for first, *others in passed:
        yield first, "pass"
        for unit in others:
            yield unit, "pass on"
    for unit in last:
        yield unit, "forward"
    if units[-1] > layers:
        yield units[-1], "later"


def backward_turns(units: Sequence[int], layers: int, every: int) -> Iterator[tuple[int, Turn]]:
    """And in their backward."""
    *passed, last = _groups(units, layers, every)
    if units[-1] > layers:
        yield units[-1], "loss"
    for unit in reversed(last):
        yield unit, "backward"
    for *others, end in reversed(passed):
        for unit in others:
            yield unit, "forward"
        yield end, "backward from x"
        for unit in reversed(others):
            yield unit, "backward"
    if units[0] == 0:
        yield 0, "embed_back"


def _groups(units: Sequence[int], layers: int, every: int) -> list[list[int]]:
    """Of blocks; the last one is kept."""
    blocks = [unit for unit in units if 0 < unit <= layers]
    return [blocks[at : at + every] for at in range(0, len(blocks), every)] if blocks and every else [blocks]
