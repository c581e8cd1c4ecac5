"""What a rank does with one pack under a layout that offloads, or cuts it in chunks: the event lists of its units, and from them how much
lies where and how much moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from longshift.layout.heads import own_heads, tensor_heads
from longshift.layout.layout import Coord, Layout
from longshift.schedule import chunks
from longshift.schedule.chunks import Buffer, Event, Policy, Sizes
from longshift.schedule.sequence import Run, TokenOrder, token_order
from longshift.spec.model import ModelSpec

LEAST_ROWS = 1024  # fewer make small matmuls, and the head's weight gradient is added to its sum once for each


@dataclass(frozen=True)
class Lists:
    """Event lists of a pack, the same for every block, with the order of the tokens in each chunk and the bytes of each buffer."""

    orders: list[TokenOrder]
    sizes: Sizes
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    embed: tuple[Event, ...]
    embed_back: tuple[Event, ...]
    loss: tuple[Event, ...]


def lists(
    spec: ModelSpec, layout: Layout, cut: Sequence[Sequence[Run]], heads: int, own: tuple[int, int], compute_bytes: int, ahead: int
) -> Lists:
    """Of chunks `cut`, on a rank with `heads` query heads of tensor parallelism that attends with `own` query and key/value heads."""
    orders, sees, count = chunks.orders(cut, layout), chunks.reach(cut), len(cut)
    policy = Policy(layout.schedule, layout.keep, layout.kv, ahead, sent=(layout.ulysses - 1) / layout.ulysses)
    sizes = chunks.sizes(spec, layout, orders, heads, own, compute_bytes)
    return Lists(
        orders,
        sizes,
        chunks.forward(sees, policy, sizes),
        chunks.backward(sees, policy, sizes),
        chunks.alone("embed", None, "y", count, ahead, sizes),
        chunks.alone("embed_back", "dy", None, count, ahead, sizes),
        chunks.alone("loss", "x", "dx", count, ahead, sizes),
    )


def lists_of(spec: ModelSpec, layout: Layout, at: Coord, lengths: Sequence[int], compute_bytes: int, ahead: int = 1) -> Lists:
    """Of a pack of documents of these lengths, on the rank that stands at `at`."""
    heads, own = len(tensor_heads(spec, layout, at)[0]), own_heads(spec, layout, at)
    return lists(spec, layout, chunks.cut(lengths, layout.chunk), heads, own, compute_bytes, ahead)


def loss_rows(spec: ModelSpec, chunk_rows: int) -> int:
    """Rows of a chunk whose logits are there at one time: as many as make them no larger than the chunk's residual stream, but no fewer
    than LEAST_ROWS."""
    return max(LEAST_ROWS, chunk_rows * spec.width // spec.vocab)


@dataclass(frozen=True)
class Footprint:
    """Of one pack on a rank, in bytes. `buffers`: on the device at one time, without what operations need inside; `tier`: what waits there
    at the most; `put`, `fetched`: in all of forward and backward."""

    chunks: int
    buffers: int
    tier: int
    put: int
    fetched: int


def footprint(spec: ModelSpec, layout: Layout, lengths: Sequence[int], compute_bytes: int, ahead: int) -> Footprint:
    """Of a pack of documents of these lengths, each number that of the rank where it is largest.

    With B blocks on a rank, a residual stream of H bytes, and K that a block's forward leaves besides (o and kv, keep="output"), the tier
    holds most in the backward of the last block, the head's, or the forward of the last one:

        (B - 1) (H + K) + max(backward from x, dy, K; H + K + loss from x; forward from x)

    each of the three played event by event. Recompute-full without chunks: B H. Other packs of a pipeline that are under way come on top.
    """
    found = [_of(*parts, spec, layout, lengths, compute_bytes, ahead) for parts in sorted(_kinds(spec, layout))]
    return Footprint(*(max(getattr(one, field.name) for one in found) for field in fields(Footprint)))


def _kinds(spec: ModelSpec, layout: Layout) -> set[tuple[int, tuple[int, int], int, bool, bool]]:
    """Ranks by what they have: heads, own heads, blocks, whether the embedding and whether the head."""
    found = set()
    for rank in range(layout.world):
        at = layout.coord(rank)
        units = [unit for chunk in layout.units_of(spec.layers, at.pp) for unit in chunk]
        first, last = 0 in units, spec.layers + 1 in units
        found.add((len(tensor_heads(spec, layout, at)[0]), own_heads(spec, layout, at), len(units) - first - last, first, last))
    return found


def _of(
    heads: int,
    own: tuple[int, int],
    blocks: int,
    first: bool,
    last: bool,
    spec: ModelSpec,
    layout: Layout,
    lengths: Sequence[int],
    compute_bytes: int,
    ahead: int,
) -> Footprint:
    """Of a rank of one of `_kinds`."""
    if not layout.chunk:
        shared = layout.ulysses * layout.tp
        stream = token_order(lengths, layout.ring, shared).local_tokens // shared * spec.width * compute_bytes
        return Footprint(1, stream, blocks * stream, blocks * stream, blocks * stream)
    made = lists(spec, layout, chunks.cut(lengths, layout.chunk), heads, own, compute_bytes, ahead)
    stream = sum(made.sizes["x"])
    before = {("x", c): size for c, size in enumerate(made.sizes["x"])}
    forward, after = _held(made.forward, before)
    kept = {item: size for item, size in after.items() if item[0] not in ("x", "y")}
    dy = {("dy", c): size for c, size in enumerate(made.sizes["dy"])}
    backward, _ = _held(made.backward, {**before, **dy, **kept})
    waiting = stream + sum(kept.values())
    loss = waiting + (_held(made.loss, before)[0] if last else stream)
    ends = [*([made.embed, made.embed_back] if first else []), *([made.loss] if last else [])]
    boundaries = 2 * (not first) + 2 * (not last)  # residual streams and gradients from and to other stages
    return Footprint(
        chunks=len(made.orders),
        buffers=max(chunks.peak_bytes(events, made.sizes) for events in (made.forward, made.backward, *ends)),
        tier=(blocks - 1) * waiting + max(backward, loss, forward),
        put=_moved("store", made, blocks, ends) + boundaries // 2 * stream,
        fetched=_moved("fetch", made, blocks, ends) + boundaries // 2 * stream,
    )


def _moved(kind: str, made: Lists, blocks: int, ends: Sequence[Sequence[Event]]) -> int:
    of_block, of_ends = (
        sum(e.bytes for events in all_ for e in events if e.kind == kind) for all_ in ((made.forward, made.backward), ends)
    )
    return blocks * of_block + of_ends


def _held(events: Sequence[Event], before: Mapping[Buffer, int]) -> tuple[int, dict[Buffer, int]]:
    """The most bytes that a tier holds while a list is played, from the objects that are there before; and those after it."""
    held = dict(before)
    now = most = sum(held.values())
    for event in events:
        if event.kind in ("store", "drop"):
            now -= held.pop(event.object, 0)
        if event.kind == "store":
            held[event.object] = event.bytes
            now += event.bytes
        most = max(most, now)
    return most, held
