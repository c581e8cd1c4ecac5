"""Streaming: plays the events of `schedule.block_events` over the seams of a unit.

Papers: FPDT (arXiv 2408.16978); the exact backward of a part of attention from its global output
and log-sum-exp is FlashAttention's (arXiv 2205.14135).

Sharding as without chunks, chunk by chunk: x[T_u.t, D] of a chunk's T tokens, q[T, N_u, H] inside
attention, each document piece cut for the ring. The residual stream and its gradient lie in a tier
between units, by (unit, chunk).

    tier    x_c ......... kv_j ......... o_c, y_c          bytes: `schedule.chunks.buffer_bytes`
             │             │               │
    device   qkv ─ heads ─ attend, j <= c ─ tokens ─ out, mlp

Segments are autograd graphs of their own, from detached inputs: qkv, the exchange of tokens for
heads, the one back, out and mlp. Attention is differentiated by hand: dq_c and dkv_j grow in at
least float32 from pair to pair; the weights' gradients from chunk to chunk.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshift.dist.collectives import Group
from longshift.documents.micro import ChunkedPack, HostPack
from longshift.model.decoder import Head
from longshift.model.functions import accum_dtype
from longshift.model.kernels import empty_output
from longshift.parallel import ring
from longshift.program.operations import Op
from longshift.schedule.event import MULTIPLYING_BACK, Buffer, Event
from longshift.schedule.unit_events import EventLists, event_lists, tier_key
from longshift.step.runner import Runner, loss_of_rows, score_of_rows
from longshift.stream.tiers import Tier
from longshift.stream.trace import Recorder


class ChunkedPacks(Runner):
    """A layout that computes packs in chunks. Mutable: what it has put into `tier`. `accumulate`
    adds the gradients on a unit's weights to their sums."""

    def __init__(self, *arguments: Any, tier: Tier, accumulate: Callable[[int], object]):
        super().__init__(*arguments)
        self.tier: Tier = tier
        self.accumulate = accumulate
        self.loaded: dict[int, ChunkedPack] = {}
        self.recorder: Recorder | None = None
        # What stages send, by micro-batch, model chunk, and forward or backward.
        self.crossing: dict[tuple[int, int, str], Tensor] = {}

        # Steps repeat the cuts of their packs, so the lists of the last few are kept.
        compute_bytes = self.precision.compute.itemsize
        self._lists = lru_cache(maxsize=8)(
            partial(event_lists, self.spec, self.layout, self.at, compute_bytes)
        )

    def lists(self, pack: ChunkedPack, unit: int) -> EventLists:
        """The events of a unit's turns on a pack."""
        return self._lists(pack.chunks, self.spec.window(unit), self.learns)

    def load(self, micro: int, pack: HostPack) -> None:
        self.loaded[micro] = ChunkedPack(
            self.spec, pack, self.layout, self.world.rank, self.precision.compute, self.world.device
        )

    def received(self, op: Op, x: Tensor) -> None:
        self.crossing[op.micro, op.chunk, op.turn] = x

    def to_send(self, op: Op) -> Tensor:
        return self.crossing.pop((op.micro, op.chunk, op.turn))

    def compute(self, op: Op) -> None:
        """Play one turn of a unit: from what is in the tier on one side of it to what is on the
        other."""
        player = ChunkPlayer(self, op.unit, op.micro)
        with torch.no_grad():  # what has gradients says so
            player.run(player.lists.by_turn[op.turn])  # pyright: ignore[reportArgumentType]

    def arrive(self, op: Op) -> None:
        """Take what another stage computed, [T', D], the chunks end to end: x before the unit, its
        gradient after the unit."""
        x = self.crossing.pop((op.micro, op.chunk, op.turn))
        name = "dy" if op.turn == "backward" else "x"
        orders = self.lists(self.loaded[op.micro], op.unit).orders
        tokens = [order.local_tokens // self.layout.contiguous_ranks for order in orders]
        for chunk, part in enumerate(self.split(x, tokens)):
            self.tier.put(tier_key(op.micro, op.unit, (name, chunk)), part)

    def depart(self, op: Op) -> None:
        """Give what another stage needs: x after the unit, its gradient before it. [Note: stage
        boundaries] All of it is on the device."""
        name = "dx" if op.turn == "backward" else "y"
        count = len(self.loaded[op.micro])
        keys = [tier_key(op.micro, op.unit, (name, chunk)) for chunk in range(count)]
        parts = [self.tier.fetch(key)()[0] for key in keys]
        self.crossing[op.micro, op.chunk, op.turn] = self.join(op.micro, parts)
        self.tier.recycle(parts)
        for key in keys:
            self.tier.drop(key)

    def split(self, x: Tensor, tokens: Sequence[int]) -> Sequence[Tensor]:
        """The chunks of x [T', D], with so many tokens each."""
        return x.split(list(tokens))

    def join(self, micro: int, parts: list[Tensor]) -> Tensor:
        """All chunks of a micro-batch end to end, [T', D]."""
        return torch.cat(parts)


class Segment(NamedTuple):
    """An autograd graph from detached inputs."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def back(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the inputs, which leaves those of the weights on them."""
        # Sums of attention's gradients are wider than the outputs, and autograd takes their format.
        torch.autograd.backward(
            list(self.outputs), [g.to(y.dtype) for g, y in zip(grads, self.outputs)]
        )
        return [x.grad for x in self.inputs if x.grad is not None]


def _segment(function: Callable[..., Any], *inputs: Tensor) -> Segment:
    """Call a function on detached inputs, with a graph."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = function(*leaves)
    return Segment(leaves, outputs if isinstance(outputs, tuple) else (outputs,))


class ChunkPlayer:
    """A list of events, played on one unit. Mutable. `live`: buffers by (name, chunk), as tuples of
    tensors or a Segment."""

    def __init__(self, runner: ChunkedPacks, unit: int, micro: int):
        self.runner = runner
        self.unit = unit
        self.number = micro
        self.module = runner.modules[unit]
        self.pack = runner.loaded[micro]
        self.ops = runner.ops
        self.tier = runner.tier
        self.lists = runner.lists(self.pack, unit)
        self.orders = self.lists.orders
        self.window = runner.spec.window(unit)

        # What is on the device while events are played.
        self.live: dict[Buffer, Any] = {}
        self.fetched: dict[Buffer, bool] = {}  # whether it has been waited for

    def run(self, events: Sequence[Event]) -> None:
        """Play events in their order."""
        recorder = self.runner.recorder
        for event in events:
            with recorder.playing(event, self.unit, self.number) if recorder else nullcontext():
                self._play(event)

    def _play(self, event: Event) -> None:
        """Play one event. What it reads is waited for."""
        # Only these read buffers; a store or a free takes what is there.
        if event.kind in ("compute", "send"):
            for buffer in event.reads:
                self._here(buffer)
            # Sums of gradients need memory before a matmul adds to them.
            if event.name in MULTIPLYING_BACK:
                self.runner.copies.expect(self.unit)
            self.compute(event)
        elif event.kind == "accumulate":
            self.runner.accumulate(self.unit)
        elif event.kind == "fetch":
            self.live[event.object] = self.tier.fetch(self.key(event.object))
            self.fetched[event.object] = False
        elif event.kind == "store":
            self.tier.put(self.key(event.object), *self.live[event.object])
        elif event.kind == "free":
            tensors = self.live.pop(event.object)
            if self.fetched.pop(event.object, False):
                self.tier.recycle(tensors)
        else:
            self.tier.drop(self.key(event.object))

    def compute(self, event: Event) -> None:
        getattr(self, event.name)(event)  # one of the methods below

    def key(self, buffer: Buffer) -> tuple:
        """The key of a buffer in the tier."""
        return tier_key(self.number, self.unit, buffer)

    def _here(self, buffer: Buffer) -> None:
        """Wait for a buffer that is being fetched."""
        if self.fetched.get(buffer) is False:
            wait = self.live[buffer]
            recorder = self.runner.recorder
            self.live[buffer] = recorder.waiting(buffer, wait) if recorder else wait()
            self.fetched[buffer] = True

    def _one(self, name: str, chunk: int) -> Tensor:
        """The only tensor of a buffer."""
        return self.live[name, chunk][0]

    @property
    def ring_group(self) -> Group:
        return self.ops.groups["ring"]

    def _pairs(self, c: int, j: int) -> Callable[[int], Sequence[ring.Pair]]:
        """What queries of chunk c do with the keys of chunk j that a ring rank holds. [Note: pairs,
        in schedule.chunks]"""
        index = self.ring_group.index
        if c == j:
            return partial(ring.pairs, self.orders[c], index, window=self.window)
        # The document that both chunks have is the first of c and the last of j.
        later = self.orders[c]
        earlier = self.orders[j]
        distance = self.pack.chunks[c][0].start - self.pack.chunks[j][-1].start
        return lambda sender: ring.pairs_across(
            later, index, earlier, sender, distance, self.window
        )

    # Operations of a block

    def qkv(self, event: Event) -> None:
        """Queries, keys and values of chunk c, with their graph where a backward follows."""
        c = event.chunk
        micro = self.pack.rotated(c, self.unit)
        # Where this event does not exchange tokens for heads, `to_heads` does after it.
        is_exchanged_later = ("qkv", c) in event.writes

        def project(x: Tensor) -> tuple[Tensor, ...]:
            q, k, v = self.module.qkv(x, micro, self.ops)
            return (q, k, v) if is_exchanged_later else self.ops.to_heads(q, k, v)

        qkv = self._graph("graph", event, project, self._one("x", c))
        # The exchange begins a graph of its own.
        if is_exchanged_later:
            self.live["qkv", c] = tuple(t.detach() for t in qkv)
        else:
            self._heads(event, qkv)

    def to_heads(self, event: Event) -> None:
        """Exchange the chunk's tokens for heads."""
        qkv = self.live["qkv", event.chunk]
        self._heads(event, self._graph("exchange", event, self.ops.to_heads, *qkv))

    def _graph(
        self, name: str, event: Event, function: Callable[..., Any], *inputs: Tensor
    ) -> Sequence[Tensor]:
        """The function's outputs; with their graph as a buffer, where the event is to write it."""
        if (name, event.chunk) not in event.writes:
            return function(*inputs)
        segment = self.live[name, event.chunk] = _segment(function, *inputs)
        return segment.outputs

    def _heads(self, event: Event, qkv: Sequence[Tensor]) -> None:
        """Keep what attention works on, as buffers of the event."""
        q, k, v = (t.detach() for t in qkv)
        if ("q", event.chunk) in event.writes:
            self.live["kv", event.chunk] = (torch.stack((k, v)),)
            # A view would keep all that arrived.
            self.live["q", event.chunk] = (q if qkv[0].requires_grad else q.contiguous(),)

    def attend(self, event: Event) -> None:
        """Fold the attention of chunk c to the keys of chunk j into its output."""
        c = event.chunk
        j = event.keys
        q = self._one("q", c)
        kv = self._one("kv", j)
        is_first = c == j
        if is_first:
            self.live["o", c] = empty_output(q, accum_dtype(q))
        out, lse = self.live["o", c]
        ring.forward_into(
            out, lse, q, kv, self._pairs(c, j), self.ops.attention, self.ring_group, is_first
        )
        # A chunk attends to itself first, then to earlier chunks in their order.
        last_keys = c - 1 if self.lists.first_keys[c] < c else c
        if j == last_keys:
            self.live["o", c] = (out.to(q.dtype), lse)

    def to_tokens(self, event: Event) -> None:
        """Exchange heads for tokens, with the graph."""
        self.live["o_tokens", event.chunk] = _segment(
            self.ops.to_tokens, self._one("o", event.chunk)
        )

    def _tail(self, x: Tensor, o: Tensor) -> Tensor:
        """Attention's output projection and the MLP."""
        return self.module.mlp(self.module.out(x, o, self.ops), self.ops)

    def _o(self, c: int) -> Tensor:
        """The output of attention as the rest of the block takes it."""
        if ("o_tokens", c) in self.live:
            return self.live["o_tokens", c].outputs[0]
        return self._one("o", c)

    def tail(self, event: Event) -> None:
        """What follows attention in a block, without a graph."""
        c = event.chunk
        self.live["y", c] = (self._tail(self._one("x", c), self._o(c)),)

    def tail_back(self, event: Event) -> None:
        """Its gradients, from a graph that is made again."""
        c = event.chunk
        grads = _segment(self._tail, self._one("x", c), self._o(c)).back([self._one("dy", c)])
        for buffer, grad in zip(event.writes, grads):  # dx, do
            self.live[buffer] = (grad,)

    def to_tokens_back(self, event: Event) -> None:
        c = event.chunk
        grads = [self._one("do_tokens", c)]
        self.live["do", c] = tuple(self.live["o_tokens", c].back(grads))

    def attend_back(self, event: Event) -> None:
        """Add the gradients of a pair of chunks to dq of chunk c and dk, dv of chunk j."""
        c = event.chunk
        j = event.keys
        q = self._one("q", c)
        kv = self._one("kv", j)
        dq = self._sums(("dq", c), q)
        dkv = self._sums(("dkv", j), kv)
        do = self._one("do", c)
        o, lse = self.live["o", c]
        ring.backward_into(
            dq, dkv, do, q, kv, o, lse, self._pairs(c, j), self.ops.attention, self.ring_group
        )

    def _sums(self, buffer: Buffer, like: Tensor) -> Tensor:
        """Sums of gradients that grow in place, zeros where there are none."""
        if buffer not in self.live:
            self.live[buffer] = (torch.zeros_like(like, dtype=accum_dtype(like)),)
        return self._one(*buffer)

    def to_heads_back(self, event: Event) -> None:
        c = event.chunk
        grads = [self._one("dq", c), *self._one("dkv", c)]
        self.live["dqkv", c] = tuple(self.live["exchange", c].back(grads))

    def qkv_back(self, event: Event) -> None:
        """The gradient of the residual stream before the block."""
        c = event.chunk
        if ("dqkv", c) in self.live:
            grads = self.live["dqkv", c]
        else:
            grads = (self._one("dq", c), *self._one("dkv", c))
        (dx,) = self.live["graph", c].back(grads)
        self.live["dx", c] = (dx.add_(self._one("dr", c)),)  # the graph keeps it too

    # Operations of the model's ends

    def embed(self, event: Event) -> None:
        self.live["y", event.chunk] = (self.module(None, self.pack.micros[event.chunk], self.ops),)

    def embed_back(self, event: Event) -> None:
        with torch.enable_grad():
            y = self.module(None, self.pack.micros[event.chunk], self.ops)
        # An embedding that is not trained has no graph.
        if y.requires_grad:
            torch.autograd.backward(y, self._one("dy", event.chunk))

    def loss(self, event: Event) -> None:
        """Loss and gradient of a block of rows of a chunk."""
        c = event.chunk
        x = self._one("x", c)
        assert isinstance(self.module, Head)
        # Blocks of rows fill one gradient, each its own rows.
        if event.keys == 0:
            self.live["dx", c] = (torch.empty_like(x),)
        dx = self._one("dx", c)
        micro = self.pack.micros[c]
        loss = loss_of_rows(self.module, x, dx, micro, self.ops, event.keys, self.runner.seed)
        self.runner.counts(loss)

    def score(self, event: Event) -> None:
        """Loss of a block of rows of a chunk."""
        assert isinstance(self.module, Head)
        x = self._one("x", event.chunk)
        micro = self.pack.micros[event.chunk]
        self.runner.counts(score_of_rows(self.module, x, micro, self.ops, event.keys))
