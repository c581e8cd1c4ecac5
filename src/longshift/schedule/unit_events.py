"""What a rank does with one pack under a layout that cuts it in chunks: the event lists of its
units.

Between forward and backward, input and output of attention, keys and values of every block wait; in
the FPDT paper's order its input alone. Where that is too much, `every` k goes past it as
recomputation in groups does (Chen et al., arXiv 1604.06174): of k blocks in a row only the first
one's input waits, and the forward of the others is played again when the backward comes to them.
The last group's backward comes at once, so it is kept as it is. With k = 1 no forward is played
again, but that of attention.

    every2, blocks 1 to 5     pass 1, pass on 2, pass 3, pass on 4, forward 5
                              backward 5, forward 3, backward from x 4, backward 3, ...
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longshift.layout.layout import Coord, Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.schedule import chunks
from longshift.schedule.block_events import Policy, backward_events, end_events, forward_events
from longshift.schedule.event import Buffer, Event
from longshift.schedule.sequence import Run, TokenOrder
from longshift.spec.model import ModelSpec

# What is played on a unit. Of a block: `forward` leaves what `backward` takes; `pass` its input
# alone, from which the other backward goes; `pass on` not even that. The head waits for its
# backward, which is the loss; `score` is the loss where nothing is learned.
Turn = Literal[
    "embed",
    "forward",
    "pass",
    "pass on",
    "loss",
    "score",
    "backward",
    "backward from x",
    "embed_back",
]

# Buffers that lie between units: the side of the unit, and the hidden state or its gradient.
STREAMS = {"x": (0, "h"), "y": (1, "h"), "dx": (0, "g"), "dy": (1, "g")}


def tier_key(micro: int, unit: int, buffer: Buffer) -> tuple[int, int, str, int]:
    """The key of a unit's buffer in the tier: a unit's y is the x of the unit after it."""
    name, chunk = buffer
    side, label = STREAMS.get(name, (0, name))
    return micro, unit + side, label, chunk


@dataclass(frozen=True)
class EventLists:
    """Event lists of a pack, those of a block the same for every one with the same window.

    `orders`: of the tokens in each chunk.
    `first_keys`: the first chunk that each one sees.
    """

    orders: list[TokenOrder]
    first_keys: tuple[int, ...]
    by_turn: Mapping[Turn, tuple[Event, ...]]


def event_lists(
    spec: ModelSpec,
    layout: Layout,
    coord: Coord,
    compute_bytes: int,
    pack_chunks: Sequence[Sequence[Run]],
    window: int | None,
    learns: bool = True,
) -> EventLists:
    """Event lists of a pack on the rank at `coord`.

    `window`: of the blocks that they are for.
    `learns`: whether there is a backward, and so what it needs.
    """
    orders = chunks.chunk_orders(pack_chunks, layout)
    first_keys = chunks.first_key_chunks(pack_chunks, window)
    num_chunks = len(pack_chunks)
    sizes = chunks.buffer_bytes(spec, layout, coord, orders, compute_bytes)
    policy = Policy(
        schedule=layout.schedule,
        keep="input" if layout.schedule == "fpdt" else "output",
        kv=layout.kv,
        sent=(layout.neighbor_ranks - 1) / layout.neighbor_ranks,
    )
    input_policy = replace(policy, keep="input")

    def end(operation: str, reads: str | None, writes: str | None) -> tuple[Event, ...]:
        blocks = []
        if operation in ("loss", "score"):
            for order in orders:
                blocks.append(loss_blocks(spec, order.local_tokens // layout.contiguous_ranks))
        return end_events(operation, reads, writes, num_chunks, sizes, blocks)

    by_turn: dict[Turn, tuple[Event, ...]] = {"embed": end("embed", None, "y")}
    if layout.every or not learns:
        by_turn["pass on"] = forward_events(first_keys, input_policy, sizes, drop_x=True)
    if not learns:
        by_turn["score"] = end("score", "x", None)
        return EventLists(orders, first_keys, by_turn)
    by_turn["forward"] = forward_events(first_keys, policy, sizes)
    by_turn["loss"] = end("loss", "x", "dx")
    by_turn["backward"] = backward_events(first_keys, policy, sizes)
    by_turn["embed_back"] = end("embed_back", "dy", None)
    if layout.every:
        by_turn["pass"] = forward_events(first_keys, input_policy, sizes)
        by_turn["backward from x"] = backward_events(first_keys, input_policy, sizes)
    return EventLists(orders, first_keys, by_turn)


def forward_turns(
    units: Sequence[int], layers: int, every: int, learns: bool = True
) -> Iterator[tuple[int, Turn]]:
    """What is played on consecutive units before their backward, in order; all where nothing is
    learned."""
    *recomputed_groups, last_group = _groups(units, layers, every if learns else 0)
    if units[0] == 0:
        yield 0, "embed"

    # Of a recomputed group the input of its first block waits, and nothing of the rest.
    for first, *rest in recomputed_groups:
        yield first, "pass"
        for unit in rest:
            yield unit, "pass on"
    for unit in last_group:
        yield unit, "forward" if learns else "pass on"
    if units[-1] > layers and not learns:
        yield units[-1], "score"


def backward_turns(units: Sequence[int], layers: int, every: int) -> Iterator[tuple[int, Turn]]:
    """What is played on consecutive units in their backward, in order."""
    *recomputed_groups, last_group = _groups(units, layers, every)
    if units[-1] > layers:
        yield units[-1], "loss"
    for unit in reversed(last_group):
        yield unit, "backward"

    # The last block of a recomputed group needs no forward before its backward, which plays both.
    for *rest, end in reversed(recomputed_groups):
        for unit in rest:
            yield unit, "forward"
        yield end, "backward from x"
        for unit in reversed(rest):
            yield unit, "backward"
    if units[0] == 0:
        yield 0, "embed_back"


def _groups(units: Sequence[int], layers: int, every: int) -> list[list[int]]:
    """Groups of blocks. The last one is not recomputed."""
    blocks = [unit for unit in units if 0 < unit <= layers]
    if not blocks or not every:
        return [blocks]
    return [blocks[start : start + every] for start in range(0, len(blocks), every)]
