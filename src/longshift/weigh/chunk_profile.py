"""Profiles of the events of a chunked pack (`schedule.block_events`): `step.chunk_runner` plays
each on tensors without storage.

`TurnProfile.buffers` has the bytes of each buffer that an event wrote, or left otherwise than it
found it, as they are after it. A storage that two buffers share is counted in the one that is
freed last, which is the graph. `peak` counts from what the event began with, the buffers that it
reads included. Chunks that are alike share a profile: their numbers do not matter, only the order
of their tokens, how far apart they are in a document, and what the event reads and writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshift.documents.micro import ChunkedPack
from longshift.layout.placement import rank_heads
from longshift.schedule.event import Event
from longshift.schedule.sequence import Run, TokenOrder
from longshift.schedule.unit_events import EventLists
from longshift.step.chunk_runner import ChunkPlayer, Segment
from longshift.weigh.recorder import TurnProfile
from longshift.weigh.turn_profile import RankPlayer, RankSetup, gradient_bytes, loss_turn

# The event that writes a buffer with a graph, and the buffer that it is made from.
WRITERS = {
    "o_tokens": ("to_tokens", "o"),
    "qkv": ("qkv", "x"),
    "graph": ("qkv", "x"),
    "exchange": ("to_heads", "qkv"),
}


class EventShape(NamedTuple):
    """What decides what an event does. `order`: of the chunk; `keys_order`: of the chunk whose keys
    it takes, None for its own; `distance`: tokens from the start of the earlier piece of a document
    to that of the later one, where a window asks; `is_last`: whether no further keys follow."""

    name: str
    order: TokenOrder
    keys_order: TokenOrder | None
    distance: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_last: bool
    block: int


def event_turn(
    setup: RankSetup,
    lists: EventLists,
    chunks: Sequence[Sequence[Run]],
    event: Event,
    block: int = 1,
) -> TurnProfile:
    """Profile of one compute or send event of a pack in these chunks.

    `lists`: those that the event is of. `block`: the unit of a block that computes so.
    """
    c = event.chunk
    j = event.keys
    orders = lists.orders
    if event.name == "loss":
        return _loss_event(setup, orders[c], j)

    # Chunks differ in what their events do by their order, and by the distance to their keys where
    # there is a window. Keys of earlier chunks come in turn after the chunk's own.
    has_own_keys = j in (-1, c)
    distance = 0
    if not has_own_keys and setup.spec.window(block) is not None:
        distance = chunks[c][0].start - chunks[j][-1].start
    last_keys = c - 1 if lists.first_keys[c] < c else c
    shape = EventShape(
        name=event.name,
        order=orders[c],
        keys_order=None if has_own_keys else orders[j],
        distance=distance,
        reads=tuple(name for name, _ in event.reads),
        writes=tuple(name for name, _ in event.writes),
        is_last=j == last_keys,
        block=block,
    )
    return _event_turn(setup, shape)


@lru_cache(maxsize=1024)
def _loss_event(setup: RankSetup, order: TokenOrder, number: int) -> TurnProfile:
    """Of the loss on a block of rows of a chunk. The gradient of x is made with the first block."""
    profile = loss_turn(setup, order, number)
    dx = setup.rows(order) * setup.spec.width * setup.compute_bytes
    return replace(profile, peak=profile.peak + (0 if number else dx), buffers={"dx": dx})


@lru_cache(maxsize=65536)
def _event_turn(setup: RankSetup, shape: EventShape) -> TurnProfile:
    return _EventPlayer(setup, shape).play()


class _MetaPack(ChunkedPack):
    """A pack of which one chunk has tensors."""

    def __init__(self, player: RankPlayer, chunk: int, chunks: dict[int, tuple[Run, ...]]):
        self.spec = player.setup.spec
        self.layout = player.setup.layout
        self.dtype = player.setup.dtype
        self.micros = {chunk: player.micro}  # pyright: ignore[reportAttributeAccessIssue]
        self.chunks = chunks  # pyright: ignore[reportAttributeAccessIssue]


class _EventPlayer:
    """One event on buffers that are made for it. Mutable."""

    def __init__(self, setup: RankSetup, shape: EventShape):
        self.setup = setup
        self.shape = shape
        self.rank = RankPlayer(setup, shape.order, has_angles=False)
        self.recorder = self.rank.recorder
        unit = 0 if shape.name in ("embed", "embed_back") else shape.block
        self.module = self.rank.unit(unit)

        # Chunk numbers with which the player does the same: its own keys, those just before, or
        # earlier ones.
        self.keys = 0
        if shape.keys_order is None:
            self.chunk = 0
        else:
            self.chunk = 1 if shape.is_last else 2
        first_keys = 0 if shape.keys_order is not None or shape.is_last else -1
        self._graph_bytes = 0
        orders = {self.keys: shape.keys_order or shape.order, self.chunk: shape.order}
        chunks = {self.keys: (Run(0, 0, 1),), self.chunk: (Run(0, shape.distance, 1),)}
        pack = _MetaPack(self.rank, self.chunk, chunks)
        lists = SimpleNamespace(orders=orders, first_keys={self.chunk: first_keys})
        runner: Any = SimpleNamespace(
            spec=setup.spec,
            ops=self.rank.ops,
            modules={unit: self.module},
            loaded={0: pack},
            tier=None,
            lists=lambda pack, unit: lists,
            copies=SimpleNamespace(expect=lambda unit: None),
        )
        self.player = ChunkPlayer(runner, unit, micro=0)

    def play(self) -> TurnProfile:
        """Make the buffers that the event reads, play it, and say what it has left of each."""
        shape = self.shape
        live = self.player.live
        with torch.no_grad():
            for name in shape.reads:
                self._make(name)
            if shape.name == "to_tokens_back":
                self._make("o_tokens")  # whose graph it goes back through
            graph_bytes = self._graph_bytes
            with self.recorder.recording(), torch.no_grad():
                self._call(shape.name, shape.reads, shape.writes)
        grads = gradient_bytes(self.module)
        buffers = {name: _storage_bytes(live[name, self._number(name)]) for name in shape.writes}
        match shape.name:
            case "qkv" | "to_heads":
                self._attribute(buffers, self.recorder.left_bytes)
            case "to_tokens":
                buffers["o_tokens"] = self.recorder.left_bytes
            case "to_heads_back":
                buffers["dqkv"] = self.recorder.left_bytes
            case "qkv_back":
                buffers["graph"] = graph_bytes + self.recorder.left_bytes - grads - buffers["dx"]
        return self.recorder.profile(output=sum(buffers.values()), grads=grads, buffers=buffers)

    def _attribute(self, buffers: dict[str, int], left_bytes: int) -> None:
        """Say which of the buffers that share storages has the bytes."""
        # Without a graph, q, k and v before their exchange are all there is.
        if "graph" not in buffers and "exchange" not in buffers:
            if "qkv" in buffers:
                buffers["qkv"] = left_bytes
            return
        # A graph has all but the keys and values, which are a copy.
        for name in ("q", "qkv"):
            if name in buffers:
                buffers[name] = 0
        graph = "graph" if "graph" in buffers else "exchange"
        buffers[graph] = left_bytes - buffers.get("kv", 0)

    def _number(self, name: str) -> int:
        """The chunk that a buffer of the event belongs to."""
        is_attention = self.shape.name in ("attend", "attend_back")
        return self.keys if is_attention and name in ("kv", "dkv") else self.chunk

    def _call(self, name: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        event = Event(
            "compute",
            name,
            self.chunk,
            reads=tuple((buffer, self._number(buffer)) for buffer in reads),
            writes=tuple((buffer, self._number(buffer)) for buffer in writes),
            keys=self.keys,
        )
        getattr(self.player, name)(event)

    def _make(self, name: str) -> None:
        """Put a buffer where the event finds it."""
        order = self.shape.order
        keys_order = self.shape.keys_order or order
        if name in WRITERS:
            self._play_writer(name)
            return
        match name:
            case "q" | "do":
                tensors = (self._heads(order)[0],)
            case "kv":
                tensors = (self._heads(keys_order)[1],)
            case "dq":
                tensors = (self._heads(order, accumulates=True)[0],)
            case "dkv":
                tensors = (self._heads(keys_order, accumulates=True)[1],)
            case "o":
                o = self._heads(order, accumulates=self.shape.name == "attend")[0]
                tokens, heads, _ = o.shape
                tensors = o, self.rank.empty(tokens, heads, dtype=self._accum_dtype)
            case "do_tokens":
                tensors = (self._tokens_output(),)
            case "dqkv":
                with self.recorder:
                    tensors = tuple(
                        torch.empty_like(t) for t in self.player.live["graph", self.chunk].outputs
                    )
            case _:
                tensors = (self.rank.stream(),)
        self.player.live[name, self._number(name)] = tensors

    def _play_writer(self, name: str) -> None:
        """Make a buffer that has a graph: by the event that writes it, from one that it reads."""
        event, source = WRITERS[name]
        self._make(source)
        begin_bytes = self.recorder.now
        # Where heads are exchanged, the event leaves what the exchange will read, too.
        has_exchange = name == "graph" and self.setup.layout.ulysses > 1
        with self.recorder:
            self._call(event, (), (name, "qkv") if has_exchange else (name,))
        del self.player.live[source, self.chunk]
        if has_exchange:
            del self.player.live["qkv", self.chunk]
        if name == "graph":
            self._graph_bytes = self.recorder.now - begin_bytes

    @property
    def _accum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.setup.dtype, torch.float32)

    def _heads(self, order: TokenOrder, accumulates: bool = False) -> tuple[Tensor, Tensor]:
        """q [L, N, H] and kv [2, L, K, H] of the heads that this rank attends with."""
        setup = self.setup
        spec = setup.spec
        tokens = order.local_tokens
        queries, keys = rank_heads(spec, setup.layout, setup.coord)
        dtype = self._accum_dtype if accumulates else setup.dtype
        q = self.rank.empty(tokens, queries, spec.head_width, dtype=dtype)
        kv = self.rank.empty(2, tokens, keys, spec.head_width, dtype=dtype)
        return q, kv

    def _tokens_output(self) -> Tensor:
        """The output of attention as the rest of the block takes it, [T, N, H]."""
        tokens = len(self.rank.micro.tokens_T)
        heads = len(self.rank.ops.heads)
        return self.rank.empty(tokens, heads, self.setup.spec.head_width)


def _storage_bytes(buffer: Any) -> int:
    """Bytes of a buffer's tensors; of a graph's outputs."""
    tensors = buffer.outputs if isinstance(buffer, Segment) else buffer
    return sum(t.untyped_storage().nbytes() for t in tensors)
