"""What a rank does with one pack under a layout that offloads, or cuts it in chunks: the event lists of its units, and from them how much
lies where and how much moves.

Between forward and backward an input of every block waits, and with keep="output" more. Where that is too much, `every` k goes past it as
recomputation in groups does (Chen et al., arXiv 1604.06174): of k blocks in a row only the first one's input waits, and the forward of the
others is played again when the backward comes to them; the last group's backward comes at once, so it is kept as it is.

    every2, blocks 1 to 5     pass 1, pass on 2, pass 3, pass on 4, forward 5 │ backward 5, forward 3, backward from x 4, backward 3, ...
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from longshift.layout.heads import own_heads, tensor_heads
from longshift.layout.layout import Coord, Layout
from longshift.layout.memory import loss_blocks
from longshift.schedule import chunks
from longshift.schedule.chunks import Buffer, Event, Policy, Sizes
from longshift.schedule.sequence import Run, TokenOrder, token_order
from longshift.spec.model import ModelSpec

# What is played on a unit. Of a block: `forward` leaves what `backward` takes; `pass` its input alone, from which the other backward goes;
# `pass on` not even that. The head waits for its backward, which is the loss.
Turn = Literal["embed", "forward", "pass", "pass on", "later", "loss", "backward", "backward from x", "embed_back"]


STREAMS = {"x": (0, "h"), "y": (1, "h"), "dx": (0, "g"), "dy": (1, "g")}  # between units: which side of the unit, and what


def tier_key(micro: int, unit: int, buffer: Buffer) -> tuple[int, int, str, int]:
    """Under what a buffer of a unit's list lies in the tier: a unit's y is the x of the unit after it."""
    name, chunk = buffer
    after, what = STREAMS.get(name, (0, name))
    return micro, unit + after, what, chunk


@dataclass(frozen=True)
class Lists:
    """Event lists of a pack, those of a block the same for every one, with the order of the tokens in each chunk and the bytes of each
    buffer."""

    orders: list[TokenOrder]
    sizes: Sizes
    of: Mapping[Turn, tuple[Event, ...]]


def lists(
    spec: ModelSpec, layout: Layout, cut: Sequence[Sequence[Run]], heads: int, own: tuple[int, int], compute_bytes: int, ahead: int
) -> Lists:
    """Of chunks `cut`, on a rank with `heads` query heads of tensor parallelism that attends with `own` query and key/value heads."""
    orders, sees, count = chunks.orders(cut, layout), chunks.reach(cut), len(cut)
    policy = Policy(layout.schedule, layout.keep, layout.kv, ahead, sent=(layout.ulysses - 1) / layout.ulysses)
    from_x = replace(policy, keep="input")
    sizes = chunks.sizes(spec, layout, orders, heads, own, compute_bytes)
    blocks = [loss_blocks(spec, order.local_tokens // (layout.ulysses * layout.tp)) for order in orders]
    found: dict[Turn, tuple[Event, ...]] = {
        "embed": chunks.alone("embed", None, "y", count, ahead, sizes),
        "forward": chunks.forward(sees, policy, sizes),
        "later": (),
        "loss": chunks.alone("loss", "x", "dx", count, ahead, sizes, blocks),
        "backward": chunks.backward(sees, policy, sizes),
        "embed_back": chunks.alone("embed_back", "dy", None, count, ahead, sizes),
    }
    if layout.every > 1:
        found |= {
            "pass": chunks.forward(sees, from_x, sizes),
            "pass on": chunks.forward(sees, from_x, sizes, drop_x=True),
            "backward from x": chunks.backward(sees, from_x, sizes),
        }
    return Lists(orders, sizes, found)


def lists_of(spec: ModelSpec, layout: Layout, at: Coord, lengths: Sequence[int], compute_bytes: int, ahead: int = 1) -> Lists:
    """Of a pack of documents of these lengths, on the rank that stands at `at`."""
    heads, own = len(tensor_heads(spec, layout, at)[0]), own_heads(spec, layout, at)
    return lists(spec, layout, chunks.cut(lengths, layout.chunk), heads, own, compute_bytes, ahead)


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
    return [blocks[at : at + every] for at in range(0, len(blocks), every)] if blocks and every > 1 else [blocks]


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
    """Of a pack of documents of these lengths, each number that of the rank where it is largest: forward of all units, then backward, turn
    by turn. Other packs of a pipeline that are under way come on top."""
    found = [_of(*parts, spec, layout, lengths, compute_bytes, ahead) for parts in sorted(_kinds(spec, layout))]
    return Footprint(*(max(getattr(one, field.name) for one in found) for field in fields(Footprint)))


def _kinds(spec: ModelSpec, layout: Layout) -> set[tuple[int, tuple[int, int], tuple[str, ...]]]:
    """Ranks by what they have and do: heads, own heads, turns."""
    found = set()
    for rank in range(layout.world):
        at = layout.coord(rank)
        turns = tuple(_turns(layout.units_of(spec.layers, at.pp), spec.layers, layout.every))
        found.add((len(tensor_heads(spec, layout, at)[0]), own_heads(spec, layout, at), turns))
    return found


def _turns(model_chunks: Sequence[Sequence[int]], layers: int, every: int) -> Iterator[str]:
    """All that a rank does with a pack, by the names of `_effects`."""
    for units in model_chunks:
        turns = [turn for _, turn in forward_turns(units, layers, every)]
        yield from [*(["arrive"] if turns[0] != "embed" else []), *turns, *(["leave"] if turns[-1] != "later" else [])]
    for units in reversed(model_chunks):
        turns = [turn for _, turn in backward_turns(units, layers, every)]
        yield from [*(["arrive"] if turns[0] != "loss" else []), *turns, *(["leave"] if turns[-1] != "embed_back" else [])]


class _Effect(NamedTuple):
    """Of a turn on a tier, in bytes: the most that it holds meanwhile and after it, beyond what it held before; what is put and fetched."""

    most: int
    after: int
    put: int
    fetched: int


def _of(
    heads: int,
    own: tuple[int, int],
    turns: Sequence[str],
    spec: ModelSpec,
    layout: Layout,
    lengths: Sequence[int],
    compute_bytes: int,
    ahead: int,
) -> Footprint:
    """Of a rank of one of `_kinds`."""
    if not layout.chunk:
        shared = layout.ulysses * layout.tp
        tokens = token_order(lengths, layout.ring, shared).local_tokens
        stream = tokens // shared * spec.width * compute_bytes
        output = tokens * own[0] * (spec.head_width * compute_bytes + max(4, compute_bytes)) * layout.keep_output
        waiting = turns.count("forward") * (stream + output)
        return Footprint(1, stream, waiting, waiting, waiting)
    made = lists(spec, layout, chunks.cut(lengths, layout.chunk), heads, own, compute_bytes, ahead)
    by_name = _effects(made)
    effects = [by_name[turn] for turn in turns]
    held = accumulate((effect.after for effect in effects), initial=0)
    return Footprint(
        chunks=len(made.orders),
        buffers=max(chunks.peak_bytes(made.of[turn], made.sizes) for turn in made.of.keys() & set(turns)),
        tier=max(now + effect.most for now, effect in zip(held, effects)),
        put=sum(effect.put for effect in effects),
        fetched=sum(effect.fetched for effect in effects),
    )


def _effects(made: Lists) -> dict[str, _Effect]:
    """Of every list; `arrive` and `leave`: what crosses the boundary of two stages, which a rank has as a whole."""
    x, dy = ({(name, c): size for c, size in enumerate(made.sizes[name])} for name in ("x", "dy"))
    kept = {item: size for item, size in _played(made.of["forward"], x)[1].items() if item[0] != "y"}
    before = {"embed": {}, "embed_back": dy, "backward": kept | dy, "backward from x": x | dy}
    stream = sum(x.values())
    found = {"arrive": _Effect(stream, stream, stream, 0), "leave": _Effect(0, -stream, 0, stream)}
    return found | {turn: _played(events, before.get(turn, x))[0] for turn, events in made.of.items()}


def _played(events: Sequence[Event], before: Mapping[Buffer, int]) -> tuple[_Effect, dict[Buffer, int]]:
    """A list from the objects that are there before, and those after it."""
    held = dict(before)
    begin = now = most = sum(held.values())
    for event in events:
        if event.kind in ("store", "drop"):
            now -= held.pop(event.object, 0)
        if event.kind == "store":
            held[event.object] = event.bytes
            now += event.bytes
        most = max(most, now)
    put, fetched = (sum(event.bytes for event in events if event.kind == kind) for kind in ("store", "fetch"))
    return _Effect(most - begin, now - begin, put, fetched), held
