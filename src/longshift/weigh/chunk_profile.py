"""Profiles of the events of a chunked pack (`schedule.chunks`): `step.chunked` plays each on tensors without storage.

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
from longshift.layout.heads import own_heads
from longshift.schedule.chunks import Event
from longshift.schedule.sequence import Run, TokenOrder
from longshift.schedule.streamed import Lists
from longshift.step.chunked import ChunkPlayer, Segment
from longshift.weigh.recorder import TurnProfile
from longshift.weigh.turn_profile import RankPlayer, RankSetup, gradient_bytes, loss_turn

# The event that writes a buffer with a graph, and the buffer that it is made from.
WRITERS = {"o_tokens": ("to_tokens", "o"), "qkv": ("qkv", "x"), "graph": ("qkv", "x"), "exchange": ("to_heads", "qkv")}


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


def event_turn(setup: RankSetup, made: Lists, cut: Sequence[Sequence[Run]], event: Event, block: int = 1) -> TurnProfile:
    """Profile of one compute or send event of a pack in chunks `cut`, of the lists of a block with this window. `block`: the unit of
    one that computes so."""
    c, j, orders, sees = event.chunk, event.keys, made.orders, made.sees
    if event.name == "loss":
        return _loss_event(setup, orders[c], j)
    is_own = j in (-1, c)
    distance = 0 if is_own or setup.spec.window(block) is None else cut[c][0].start - cut[j][-1].start
    reads, writes = (tuple(name for name, _ in buffers) for buffers in (event.reads, event.writes))
    is_last = j == (c - 1 if sees[c] < c else c)
    return _event_turn(setup, EventShape(event.name, orders[c], None if is_own else orders[j], distance, reads, writes, is_last, block))


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
        self.spec, self.layout, self.dtype = player.setup.spec, player.setup.layout, player.setup.dtype
        self.micros, self.chunks = {chunk: player.micro}, chunks  # pyright: ignore[reportAttributeAccessIssue]


class _EventPlayer:
    """One event on buffers that are made for it. Mutable."""

    def __init__(self, setup: RankSetup, shape: EventShape):
        self.setup, self.shape = setup, shape
        self.rank = RankPlayer(setup, shape.order, ropes=())
        self.recorder = self.rank.recorder
        unit = 0 if shape.name in ("embed", "embed_back") else shape.block
        self.module = self.rank.unit(unit)

        # Chunk numbers for which the player finds the same: its own keys, those just before, or earlier ones.
        self.chunk = 0 if shape.keys_order is None else 1 if shape.is_last else 2
        self.keys = 0
        self._graph_bytes = 0
        sees = 0 if shape.keys_order is not None or shape.is_last else -1
        orders = {self.keys: shape.keys_order or shape.order, self.chunk: shape.order}
        chunks = {self.keys: (Run(0, 0, 1),), self.chunk: (Run(0, shape.distance, 1),)}
        pack = _MetaPack(self.rank, self.chunk, chunks)
        lists = SimpleNamespace(orders=orders, sees={self.chunk: sees})
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
        shape, live = self.shape, self.player.live
        needs = ("o_tokens",) if shape.name == "to_tokens_back" else ()  # whose graph it goes back through
        with torch.no_grad():
            for name in (*shape.reads, *needs):
                self._make(name)
            graph_bytes = self._graph_bytes
            with self.recorder.recording() as turn, torch.no_grad():
                self._call(shape.name, shape.reads, shape.writes)
        grads = gradient_bytes(self.module)
        buffers = {name: _storage_bytes(live[name, self._number(name)]) for name in shape.writes}
        match shape.name:
            case "qkv" | "to_heads":
                self._share(buffers, turn.left)
            case "to_tokens":
                buffers["o_tokens"] = turn.left
            case "to_heads_back":
                buffers["dqkv"] = turn.left
            case "qkv_back":
                buffers["graph"] = graph_bytes + turn.left - grads - buffers["dx"]
        return turn.profile(output=sum(buffers.values()), grads=grads, buffers=buffers)

    def _share(self, buffers: dict[str, int], left: int) -> None:
        """A graph has all but the keys and values, which are a copy; without one, q, k and v before their exchange are all there is."""
        graph = next((name for name in ("graph", "exchange") if name in buffers), None)
        if graph:
            buffers |= {name: 0 for name in ("q", "qkv") if name in buffers}
            buffers[graph] = left - buffers.get("kv", 0)
        elif "qkv" in buffers:
            buffers["qkv"] = left

    def _number(self, name: str) -> int:
        """The chunk that a buffer of the event belongs to."""
        of_keys = name in ("kv", "dkv") and self.shape.name in ("attend", "attend_back")
        return self.keys if of_keys else self.chunk

    def _call(self, name: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        read, written = (tuple((buffer, self._number(buffer)) for buffer in buffers) for buffers in (reads, writes))
        getattr(self.player, name)(Event("compute", name, self.chunk, read, written, self.keys))

    def _make(self, name: str) -> None:
        """Put a buffer where the event finds it."""
        order, keys_order = self.shape.order, self.shape.keys_order or self.shape.order
        if name in WRITERS:
            self._play_writer(name)
            return
        match name:
            case "q" | "do":
                tensors = (self._heads(order)[0],)
            case "kv":
                tensors = (self._heads(keys_order)[1],)
            case "dq":
                tensors = (self._heads(order, wide=True)[0],)
            case "dkv":
                tensors = (self._heads(keys_order, wide=True)[1],)
            case "o":
                q = self._heads(order, wide=self.shape.name == "attend")[0]
                tensors = q, self.rank.empty(*q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
            case "do_tokens":
                tensors = (self._tokens_output(),)
            case "dqkv":
                with self.recorder:
                    tensors = tuple(torch.empty_like(t) for t in self.player.live["graph", self.chunk].outputs)
            case _:
                tensors = (self.rank.stream(),)
        self.player.live[name, self._number(name)] = tensors

    def _play_writer(self, name: str) -> None:
        """Make a buffer that has a graph: by the event that writes it, from one that it reads."""
        event, read = WRITERS[name]
        self._make(read)
        before = self.recorder.now
        writes = (name, "qkv") if name == "graph" and self.setup.layout.ulysses > 1 else (name,)
        with self.recorder:
            self._call(event, (), writes)
        for buffer in (read, *writes[1:]):
            del self.player.live[buffer, self.chunk]
        if name == "graph":
            self._graph_bytes = self.recorder.now - before

    def _heads(self, order: TokenOrder, wide: bool = False) -> tuple[Tensor, Tensor]:
        """q [L, N, H] and kv [2, L, K, H] of the heads that this rank attends with."""
        setup, tokens = self.setup, order.local_tokens
        queries, keys = own_heads(setup.spec, setup.layout, setup.coord)
        dtype = torch.promote_types(setup.dtype, torch.float32) if wide else setup.dtype
        width = setup.spec.head_width
        return self.rank.empty(tokens, queries, width, dtype=dtype), self.rank.empty(2, tokens, keys, width, dtype=dtype)

    def _tokens_output(self) -> Tensor:
        """The output of attention as the rest of the block takes it, [T, N, H]."""
        micro, ops = self.rank.micro, self.rank.ops
        return self.rank.empty(len(micro.tokens_T), len(ops.heads), self.setup.spec.head_width)


def _storage_bytes(buffer: Any) -> int:
    """Bytes of a buffer's tensors; of a graph's outputs."""
    tensors = buffer.outputs if isinstance(buffer, Segment) else buffer
    return sum(t.untyped_storage().nbytes() for t in tensors)
