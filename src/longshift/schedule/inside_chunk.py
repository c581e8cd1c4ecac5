"""What happens inside one event of a chunked pack (`schedule.chunks`), as `step.chunked` plays it: see `schedule.inside`.

`Inside.buffers` has the bytes of each buffer that the event wrote, or left otherwise than it found it, as they are after it. A storage that
two buffers share is counted in the one that is freed last:

    graph, exchange   with a graph, q and k, v are its outputs: q has none of its own, kv is a copy; before the exchange qkv has none
    o                 in at least float32 until its last pair, then also in the compute format
    graph             after qkv_back shares the gradient of x with dx
    do                shared with o_tokens, whose graph it came from; dqkv likewise with exchange

`peak` counts from what the event began with, buffers that it reads included, with what it writes; angles of a chunk are made anew in every
event that wants them.
"""

# ruff: noqa: F841, RUF059  (variables hold tensors for as long as the runtime's do)

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from longshift.layout.heads import own_heads
from longshift.schedule.abstract import Tensor, backward
from longshift.schedule.chunks import Event
from longshift.schedule.inside import SizedBlock, SizedEmbed, loss_of_rows, rank_of
from longshift.schedule.inside_attention import ring_backward, ring_forward
from longshift.schedule.inside_rank import Inside, Micro, Place
from longshift.schedule.sequence import Pair, Run, TokenOrder, pairs, pairs_across
from longshift.schedule.streamed import Lists


def of_event(place: Place, made: Lists, cut: Sequence[Sequence[Run]], event: Event, block: int = 1) -> Inside:
    """Bytes and work of one compute or send event of a pack in chunks `cut`, of the lists of a block with this window. `block`: the unit of
    one that computes so."""
    c, keys, orders, sees = event.chunk, event.keys, made.orders, made.sees
    if event.name == "loss":
        return _loss(place, orders[c], keys)
    names = tuple(tuple(name for name, _ in buffers) for buffers in (event.reads, event.writes))
    last = keys == (c - 1 if sees[c] < c else c)
    other, between = (None, 0) if keys in (-1, c) else (orders[keys], cut[c][0].start - cut[keys][-1].start)
    between = 0 if place.spec.window(block) is None else between
    return _of_event(place, event.name, orders[c], other, between, *names, last, block)


@lru_cache(maxsize=1024)
def _loss(place: Place, order: TokenOrder, number: int) -> Inside:
    """Bytes and work of the loss on a block of rows of a chunk. The gradient of x is made with the first block."""
    found = loss_of_rows(place, order, number)
    dx = place.rows(order) * place.spec.width * place.itemsize
    return replace(found, peak=found.peak + (0 if number else dx), buffers={"dx": dx})


@lru_cache(maxsize=65536)
def _of_event(
    place: Place,
    name: str,
    order: TokenOrder,
    other: TokenOrder | None,
    between: int,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    last: bool,
    block: int,
) -> Inside:
    return getattr(_Event(place, order, other, between, reads, writes, last, block), name)()


class SizedSegment:
    """`step.chunked.Segment`: a graph from detached inputs."""

    def __init__(self, function: Callable[..., Any], *inputs: Tensor):
        memory = inputs[0].memory
        self.inputs = [x.leaf() for x in inputs]
        memory.recording = True
        found = function(*self.inputs)
        memory.recording = False
        self.outputs = found if isinstance(found, tuple) else (found,)

    def back(self, grads: Sequence[Tensor]) -> list[Tensor]:
        backward(self.outputs, [g if g.itemsize == y.itemsize else g.new(itemsize=y.itemsize) for g, y in zip(grads, self.outputs)])
        return [x.grad for x in self.inputs if x.grad]


class _Event:
    """One event on buffers that are made for it. Mutable."""

    def __init__(
        self,
        place: Place,
        order: TokenOrder,
        other: TokenOrder | None,
        between: int,
        reads: Sequence[str],
        writes: Sequence[str],
        last: bool,
        block: int,
    ):
        self.rank = rank_of(place, order)
        self.place, self.order, self.other, self.reads, self.writes, self.last = place, order, other, reads, writes, last
        self.between, self.window, self.rope = between, place.spec.window(block), place.spec.rope_of(block)
        self.exchanged = place.layout.ulysses > 1
        self.unit: Any = SizedBlock(self.rank, block)
        self.micro: Micro | None = None

    # Buffers to begin with

    def heads(self, order: TokenOrder, wide: bool = False) -> tuple[Tensor, Tensor]:
        """q [L, N, H] and kv [2, L, K, H] of the heads that this rank attends with."""
        queries, keys = own_heads(self.place.spec, self.place.layout, self.place.at)
        width, itemsize = self.place.spec.head_width, self.place.wide if wide else self.place.itemsize
        tokens = order.local_tokens
        return self.rank.new((tokens, queries, width), itemsize), self.rank.new((2, tokens, keys, width), itemsize)

    def output(self) -> Tensor:
        """The output of attention, [T, N, H], as `out` takes it."""
        return self.rank.new((self.rank.tokens_T, len(self.rank.ops.heads), self.place.spec.head_width))

    def pairs(self) -> Callable[[int], Sequence[Pair]]:
        """`step.chunked._Play._pairs`"""
        index, order, other = self.place.at.ring, self.order, self.other
        if other is None:
            return lambda sender: pairs(order, index, sender, self.window)
        return lambda sender: pairs_across(order, index, other, sender, self.between, self.window)

    def ended(self, before: int, rest: str = "", **buffers: int) -> Inside:
        """`rest`: the buffer that has all that is left besides the others and the gradients."""
        grads, left = self.unit.grads(), self.rank.memory.now - before
        if rest:
            buffers[rest] = left - grads - sum(buffers.values())
        output = sum(buffers.values())
        return replace(self.rank.seen(before, output=output, grads=grads), buffers=buffers)

    # Operations of a block

    def project(self, micro: Micro) -> Callable[[Tensor], Any]:
        unit, ops = self.unit, self.rank.ops

        def function(x: Tensor) -> Any:
            found = unit.qkv(x, micro, ops)
            return found if self.exchanged else ops.to_heads(*found)

        return function

    def qkv(self) -> Inside:
        x, self.micro = self.rank.stream(), Micro(self.rank, ())
        numbers = self.micro.numbers  # they stay
        before = self.rank.begin()
        self.rotate(self.micro)
        segment = SizedSegment(self.project(self.micro), x) if "graph" in self.writes else None
        made = segment.outputs if segment else self.project(self.micro)(x)
        if self.exchanged:
            made = tuple(t.detach() for t in made)
            self.micro = None
            return self.ended(before, "graph", qkv=0) if segment else self.ended(before, "qkv")
        return self.with_heads(before, made, "graph" if segment else "")

    def rotate(self, micro: Micro) -> None:
        """`data.micro.ChunkedPack.rotated`"""
        if self.rope:
            micro.rotate(self.rank, self.rope)

    def to_heads(self) -> Inside:
        return self.exchange_of(self.qkv_there())

    def qkv_there(self) -> tuple[Tensor, ...]:
        return self.project(Micro(self.rank, [self.rope] if self.rope else ()))(self.rank.stream())

    def exchange_of(self, qkv: tuple[Tensor, ...]) -> Inside:
        before = self.rank.begin()
        segment = SizedSegment(self.rank.ops.to_heads, *qkv) if "exchange" in self.writes else None
        made = segment.outputs if segment else self.rank.ops.to_heads(*qkv)
        return self.with_heads(before, made, "exchange" if segment else "")

    def with_heads(self, before: int, made: Sequence[Tensor], graph: str) -> Inside:
        """`step.chunked._Play._heads`"""
        q, k, v = (t.detach() for t in made)
        del made
        if "q" not in self.writes:
            self.micro = None
            return self.ended(before, graph)
        kv = k.new((2, *k.shape))
        if not graph:
            q = q.shaped(*q.shape)
        self.micro = None
        return self.ended(before, graph, q=0, kv=kv.bytes) if graph else self.ended(before, q=q.bytes, kv=kv.bytes)

    def attend(self) -> Inside:
        q, kv = self.heads(self.order)[0], self.heads(self.other or self.order)[1]
        wide, first = self.place.wide, self.other is None
        o = None if first else self.wide_output(q)
        before = self.rank.begin()
        if first:
            o = self.wide_output(q)
        assert o
        ring_forward(self.rank, q, kv, self.pairs(), self.rank.ops.ring, first=first)
        out, lse = o
        if self.last:
            o = (out if out.itemsize == q.itemsize else out.new(itemsize=q.itemsize), lse)
        del out
        return self.ended(before, o=sum(t.bytes for t in o))

    def wide_output(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q.new(itemsize=self.place.wide), q.new(q.shape[:2], self.place.wide)

    def to_tokens(self) -> Inside:
        o = self.heads(self.order)[0]
        before = self.rank.begin()
        segment = SizedSegment(self.rank.ops.to_tokens, o)
        return self.ended(before, "o_tokens")

    def whole_tail(self, x: Tensor, o: Tensor) -> Tensor:
        return self.unit.mlp(self.unit.out(x, o, self.rank.ops), self.rank.ops)

    def tail(self) -> Inside:
        x, o = self.rank.stream(), self.output()
        before = self.rank.begin()
        y = self.whole_tail(x, o)
        return self.ended(before, y=y.bytes)

    def tail_back(self) -> Inside:
        x, o, dy = self.rank.stream(), self.output(), self.rank.stream()
        before = self.rank.begin()
        dx, do = SizedSegment(self.whole_tail, x, o).back([dy])
        return self.ended(before, "", **dict(zip(self.writes, (dx.storage.size, do.storage.size))))

    def to_tokens_back(self) -> Inside:
        segment, do_tokens = SizedSegment(self.rank.ops.to_tokens, self.heads(self.order)[0]), self.output()
        before = self.rank.begin()
        (do,) = segment.back([do_tokens])
        return self.ended(before, do=do.storage.size)

    def attend_back(self) -> Inside:
        q, kv = self.heads(self.order)[0], self.heads(self.other or self.order)[1]
        wide_q, wide_kv = self.heads(self.order, wide=True)[0], self.heads(self.other or self.order, wide=True)[1]
        before_q, before_kv = wide_q if "dq" in self.reads else None, wide_kv if "dkv" in self.reads else None
        del wide_q, wide_kv
        before = self.rank.begin()
        dq, dkv = (there or like.new(itemsize=self.place.wide) for there, like in ((before_q, q), (before_kv, kv)))
        del before_q, before_kv
        ring_backward(self.rank, dkv, q, kv, self.pairs(), self.rank.ops.ring)
        return self.ended(before, dq=dq.bytes, dkv=dkv.bytes)

    def to_heads_back(self) -> Inside:
        segment = SizedSegment(self.rank.ops.to_heads, *self.qkv_there())
        dq, dkv = self.heads(self.order, wide=True)
        before = self.rank.begin()
        dqkv = segment.back([dq, *self.unbound(dkv)])
        return self.ended(before, "dqkv")

    def qkv_back(self) -> Inside:
        micro = Micro(self.rank, ())
        numbers = micro.numbers
        began, x = self.rank.memory.now, self.rank.stream()
        self.rotate(micro)
        segment = SizedSegment(self.project(micro), x)
        del micro
        graph = self.rank.memory.now - began - x.bytes
        if self.exchanged:
            grads = [t.new() for t in segment.outputs]
        else:
            dq, dkv = self.heads(self.order, wide=True)
            grads = [dq, *self.unbound(dkv)]
        dr = self.rank.stream()
        before = self.rank.begin()
        (dx,) = segment.back(grads)
        graph += self.rank.memory.now - before - dx.bytes - self.unit.grads()
        return self.ended(before, dx=dx.bytes, graph=graph)

    def unbound(self, kv: Tensor) -> list[Tensor]:
        return [Tensor(kv.storage, kv.shape[1:], kv.itemsize) for _ in range(2)]

    # Operations of the model's ends

    def embed(self) -> Inside:
        self.unit, micro = SizedEmbed(self.rank, 0), Micro(self.rank, ())
        before = self.rank.begin()
        y = self.unit.forward(None, micro, self.rank.ops)
        return self.ended(before, y=y.bytes)

    def embed_back(self) -> Inside:
        self.unit, micro = SizedEmbed(self.rank, 0), Micro(self.rank, ())
        dy = self.rank.stream()
        before = self.rank.begin()
        self.rank.memory.recording = True
        y = self.unit.forward(None, micro, self.rank.ops)
        if y.node:
            backward([y], [dy])
        return self.ended(before)
