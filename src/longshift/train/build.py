"""A layout composed: the one ordered list of what it inserts into the model, and a rank's worker for it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longshift.data.batch import Document
from longshift.data.micro import ChunkedPack, micro_batch
from longshift.dist.world import World
from longshift.layout.heads import heads_of, own_heads, tensor_heads
from longshift.layout.layout import Layout
from longshift.layout.memory import loss_rows
from longshift.layout.placement import buckets
from longshift.model.attention import match_heads
from longshift.model.decoder import Head, MicroBatch, Ops, build_unit
from longshift.model.kernels import Kernel
from longshift.parallel import pipeline, tensor, ulysses
from longshift.parallel.ring import RingAttention
from longshift.schedule.chunks import StreamOptions
from longshift.schedule.streamed import backward_turns, forward_turns
from longshift.spec.model import ModelSpec, share
from longshift.state.copies import Copies
from longshift.state.precision import Precision
from longshift.stream import recompute
from longshift.stream.block import Streamed
from longshift.stream.loss import loss_and_gradient
from longshift.stream.recompute import Segment
from longshift.stream.tiers import tier_of
from longshift.stream.trace import Recorder


def prepare(world: World, spec: ModelSpec, layout: Layout) -> None:
    """Make every process group that the layout needs, in one order on all ranks."""
    everyone = tuple(range(layout.world))
    axes = [group for axis in ("tp", "ulysses", "ring") for group in layout.groups(axis)]
    holders = sorted({bucket.holders for bucket in buckets(spec, layout)})
    world.prepare([everyone, *axes, *holders])
    for direction in ("rising", "falling"):
        world.prepare(layout.groups("pp"), direction)
        world.group(layout.ranks("pp", of=world.rank), direction).meet(world.device)


class LayoutOps(Ops):
    """The seams under a layout. Outermost first: tensor parallel around whole halves of a block, then Ulysses, then the ring."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, kernel: Kernel):
        super().__init__(spec, kernel)
        at = layout.coord(world.rank)
        self.tp, self.ulysses, self.ring = (world.group(layout.ranks(axis, of=world.rank)) for axis in ("tp", "ulysses", "ring"))
        self.heads, self.kv_heads = tensor_heads(spec, layout, at)
        self.vocab_first = share(spec.vocab, layout.tp, at.tp)[0]

    def enter(self, x: Tensor) -> Tensor:
        return tensor.enter(x, self.tp) if self.tp.size > 1 else x

    def leave(self, x: Tensor) -> Tensor:
        return tensor.leave(x, self.tp) if self.tp.size > 1 else x

    def embed(self, weight_VD: Tensor, tokens_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().embed(weight_VD, tokens_T)
        return tensor.embed(weight_VD, tokens_T, self.vocab_first, self.tp)

    def loss(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().loss(logits_TV, labels_T)
        return tensor.loss(logits_TV, labels_T, self.vocab_first, self.tp)

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch) -> Tensor:
        if self.ring.size == 1:
            return super().attend(q_TNH, k_TKH, v_TKH, micro)
        qkv = self.to_heads(q_TNH, k_TKH, v_TKH)
        return self.to_tokens(RingAttention.apply(*qkv, micro.order, self.attention, self.ring))  # pyright: ignore

    def to_heads(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.ulysses.size == 1:
            return super().to_heads(q_TNH, k_TKH, v_TKH)
        group_size = self.spec.heads // self.spec.kv_heads
        q, k, v = ulysses.to_heads(q_TNH, k_TKH, v_TKH, self.heads, self.kv_heads, group_size, self.ulysses)
        queries, keys = heads_of(self.heads, group_size, self.ulysses.size, self.ulysses.index)
        return q, *match_heads(k, v, queries, keys, group_size)

    def to_tokens(self, o_TNH: Tensor) -> Tensor:
        return ulysses.to_tokens(o_TNH, self.heads, self.ulysses) if self.ulysses.size > 1 else o_TNH


class Worker:
    """One rank of a layout, after `prepare`: forward and backward of packs with `copies`, their gradients to home. Mutable: graphs that
    wait for their backward."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World, copies: Copies, precision: Precision, options: StreamOptions, kernel: Kernel
    ):
        self.spec, self.layout, self.world, self.copies, self.precision = spec, layout, world, copies, precision
        self.at = layout.coord(world.rank)
        self.ops = LayoutOps(spec, layout, world, kernel)
        self.chunks = layout.units_of(spec.layers, self.at.pp)
        self.modules = {unit: build_unit(spec, unit) for chunk in self.chunks for unit in chunk}
        for module in self.modules.values():
            self.copies.fill(module)
        self.tied = [spec.units] if spec.units in self.copies.units else []
        self.held: dict[tuple[int, int], list[list[Segment]]] = {}
        self.before_head: dict[int, Tensor | None] = {}  # the head's forward is part of its backward
        moves = layout.chunk or layout.offload != "device"
        self.tier = tier_of(layout.offload, world.device, Path(options.folder), options.checked) if moves else None
        self.stream = None
        if self.tier is not None and layout.chunk:
            own = own_heads(spec, layout, self.at)
            self.stream = Streamed(spec, layout, self.ops, self.ops.ring, own, precision.compute.itemsize, self.tier, options.ahead)
        self.loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self.seed = 0.0

    def run(
        self,
        packs: Sequence[Sequence[Document]],
        seed_gradient: float,
        closing: bool = True,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """Forward and backward of this replica's packs (the same number on every replica; an empty one is padding only), and their
        gradients, times `seed_gradient`, to home; not before a later call where this one is not `closing`. `meanwhile` is called before
        every unit of the last backward, when all weights that stay are here. Returns this rank's part of the loss sum, float64: zero where
        a peer holds it."""
        kind = ChunkedPack if self.stream else micro_batch
        how = (self.layout, self.world.rank, self.precision.compute, self.world.device)
        micros = [kind(self.spec, pack, *how) for pack in packs]
        self.seed = seed_gradient
        self.loss = torch.zeros_like(self.loss)
        self._begin()

        def forward(micro: int, chunk: int, x: Tensor | None) -> Tensor | None:
            return self._forward(micros[micro], micro, chunk, x)

        def backward(micro: int, chunk: int, grad: Tensor | None) -> Tensor | None:
            final = micro == len(micros) - 1
            return self._backward(micros[micro], micro, chunk, grad, final and closing, meanwhile if final else None)

        ranks = self.layout.ranks("pp", of=self.world.rank)
        rising, falling = (self.world.group(ranks, direction) for direction in ("rising", "falling"))
        shapes = [(m.tokens_here, self.spec.width) for m in micros]
        like = torch.empty(0, dtype=self.precision.compute, device=self.world.device)
        pipeline.play(self.layout, self.at.pp, rising, falling, shapes, like, forward, backward)
        for unit in self.tied if closing else ():
            self.copies.reduce(unit)
        self.copies.finish()
        return self.loss

    def record(self, recorder: Recorder | None) -> None:
        """Have a recorder see the events of streams; None: no longer."""
        if self.stream is not None:
            self.stream.recorder = recorder
            self.stream.tier.watch = recorder.copying if recorder else None

    def _begin(self) -> None:
        """Stages 0..2 start all gathers now, in the order of use; stage 3 only those that stay for the step."""
        used = [unit for chunk in self.chunks for unit in chunk] if self.layout.zero < 3 else []
        for unit in (*self.tied, *(u for u in used if u in self.copies.units)):
            self.copies.gather(unit)
        for unit in self.tied:
            self.copies.ready(unit)

    def _forward(self, micro: MicroBatch | ChunkedPack, number: int, chunk: int, x: Tensor | None) -> Tensor | None:
        units, last = self.chunks[chunk], self.spec.layers + 1
        held = []
        if isinstance(micro, ChunkedPack) and x is not None:
            self._streamed.arrive(x, units[0], "h", number, micro)
        for i, (unit, turn) in enumerate(forward_turns(units, self.spec.layers, self.layout.every)):
            if turn == "later":  # what the unit before it began to gather stays for the loss
                if self.stream is None:
                    self.before_head[number] = x
                break
            self._need(unit, following=units[i + 1 : i + 2])
            if isinstance(micro, ChunkedPack):
                self._streamed.play(self.modules[unit], unit, turn, number, micro)
            else:
                x, segments = recompute.forward(self.modules[unit], x, micro, self.ops, self.layout.recompute, self.tier, (number, unit))
                held.append(segments)
            self._done(unit)
        self.held[number, chunk] = held
        if units[-1] == last:
            return None
        return self._streamed.leave(units[-1], "h", number, micro) if isinstance(micro, ChunkedPack) else x

    def _backward(
        self,
        micro: MicroBatch | ChunkedPack,
        number: int,
        chunk: int,
        grad: Tensor | None,
        last: bool,
        between: Callable[[], object] | None,
    ) -> Tensor | None:
        units, held = self.chunks[chunk], self.held.pop((number, chunk))
        if isinstance(micro, ChunkedPack) and grad is not None:
            self._streamed.arrive(grad, units[-1], "g", number, micro)
        turns = list(backward_turns(units, self.spec.layers, self.layout.every))
        for i, (unit, turn) in enumerate(turns):
            self._need(unit, following=[after for after, _ in turns[i + 1 : i + 2]])
            if between is not None:
                between()
            added, loss = partial(self._collect, unit, self.copies.accumulate), None
            if isinstance(micro, ChunkedPack):
                loss = self._streamed.play(self.modules[unit], unit, turn, number, micro, self.seed, added)
            else:
                ahead = held if turn == "loss" else held[:-1]
                if self.tier is not None and ahead:
                    recompute.fetch(ahead[-1], self.tier)
                if turn == "loss":
                    x, head = self.before_head.pop(number), self.modules[unit]
                    assert x is not None
                    assert isinstance(head, Head)
                    loss, grad = loss_and_gradient(head, x, micro, self.ops, loss_rows(self.spec, len(x)), self.seed, added)
                else:
                    assert grad is not None
                    grad = recompute.backward(held.pop(), grad, micro, self.ops, self.tier)
            if loss is not None and self.at.tp == 0:
                self.loss += loss
            if turn != "forward":
                self._collect(unit, self.copies.reduce if last or self.layout.zero >= 2 else self.copies.accumulate)
            self._done(unit)
        if isinstance(micro, ChunkedPack):
            return self._streamed.leave(units[0], "g", number, micro) if units[0] else None
        return grad

    def _collect(self, unit: int, take: Callable[[int], None]) -> None:
        """Gradients that a backward of `unit` left on weights: shared ones to their sums, its own wherever `take` brings them."""
        for tied in self.tied if unit in (0, self.spec.layers + 1) else ():
            self.copies.accumulate(tied)
        if unit in self.copies.units:
            take(unit)

    @property
    def _streamed(self) -> Streamed:
        assert self.stream is not None
        return self.stream

    def _need(self, unit: int, following: Sequence[int]) -> None:
        """Wait for a unit's weights and start bringing the next one's. A unit may have none: Llama's embedding, when it is tied."""
        if unit in self.copies.units:
            self.copies.ready(unit)
        for after in following:
            if after in self.copies.units:
                self.copies.gather(after)

    def _done(self, unit: int) -> None:
        """Stage 3 drops a unit's weights after each use."""
        if self.layout.zero == 3 and unit in self.copies.units:
            self.copies.release(unit)
