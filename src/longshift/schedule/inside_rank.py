"""A rank at work on one pack, on tensors without numbers: what it makes, sends and computes. See `schedule.inside`."""

# ruff: noqa: F841  (variables hold tensors for as long as the model's do)

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from longshift.layout.heads import own_heads
from longshift.layout.layout import Coord, Layout
from longshift.schedule.abstract import Memory, Shape, Tensor
from longshift.schedule.kernel_calls import banded, calls
from longshift.schedule.sequence import TokenOrder
from longshift.spec.formats import adds_inside
from longshift.spec.model import ModelSpec, Rope

Transport = Literal["gloo", "nccl"]
Part = Literal["embed", "block", "block with output", "attention half", "mlp half"]
Turn = Literal["pass", "forward", "backward"]

INDEX_BYTES = 8  # of a token's or a position's number
END_BYTES = 4  # of where a run of tokens ends
EVEN = 1024  # tokens, whose multiples cuDNN's attention takes: chunks and their cuts are, most documents are not (`model.cut`)
LONG = 6144  # tokens: of longer pieces it takes what it can; such documents are computed in a call of their own (`schedule.kernel_calls`)
MOST_SCORES = 2**26  # that the definition of attention holds at one time (`model.kernels`)


@dataclass(frozen=True)
class Inside:
    """Bytes and work of one operation on one rank. `peak`: the most bytes above those alive when the operation began, its results included;
    `output`: of the tensors that it returns; `graph`: that a forward keeps for its backward, or a pass for another forward, besides input
    and output; `grads`: of the weights' gradients that it leaves, or at most leaves at one time; `sent`: out of this rank to others, by
    axis; `buffers`: of a chunk's event, see `schedule.inside_chunk`."""

    peak: int
    output: int
    graph: int
    grads: int
    sent: Mapping[str, int]
    matmul_flops: int
    attention_flops: int
    buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True)
class Place:
    """A rank, and how it computes: `itemsize` of the compute format; `transport`: gloo with CPUs, NCCL with GPUs; `float8`: whether
    matmuls of blocks take factors of eight bits."""

    spec: ModelSpec
    layout: Layout
    at: Coord
    itemsize: int
    transport: Transport = "gloo"
    float8: bool = False

    @property
    def wide(self) -> int:
        """Bytes of a number of at least float32."""
        return max(4, self.itemsize)

    def rows(self, order: TokenOrder) -> int:
        """T': tokens of the residual stream on this rank, of a pack in this order."""
        return order.local_tokens // (self.layout.ulysses * self.layout.tp)

    def packed(self, lengths: Sequence[int], window: int | None) -> bool:
        """Whether attention to documents of these lengths may be one call: on GPUs, in 16-bit numbers (`model.packed`)."""
        there = self.transport == "nccl" and self.itemsize <= 2 and not self.spec.score_cap
        return there and (len(lengths) > 1 or banded(lengths, window))

    def calls(self, lengths: Sequence[int], window: int | None) -> list[tuple[int, ...]]:
        """`model.attention.Attention.calls`."""
        return calls(lengths, window, self.packed(lengths, window), LONG)

    @property
    def adds_inside(self) -> bool:
        """See `spec.formats.adds_inside`."""
        return adds_inside(self.itemsize, self.wide, self.transport == "nccl")

    @property
    def by_definition(self) -> bool:
        """Whether attention has no fused kernel: GPUs have them for 16-bit numbers only."""
        return self.transport == "nccl" and self.itemsize > 2


class Rank:
    """A rank at work on one pack. Mutable: its memory, what it has sent and computed."""

    def __init__(self, place: Place, order: TokenOrder):
        self.place, self.spec, self.order = place, place.spec, order
        self.memory, self.sent, self.flops = Memory(), Counter(), Counter()
        self.tokens_T = order.local_tokens // place.layout.ulysses
        self.kept: list[Tensor] | None = None  # of `model.attention.Attention`
        self.ops: Any = None  # what a layout changes: `schedule.inside_ops`

    def new(self, shape: Shape, itemsize: int | None = None) -> Tensor:
        return self.memory.tensor(shape, itemsize or self.place.itemsize)

    def stream(self) -> Tensor:
        """This rank's share [T', D] of the residual stream."""
        return self.new((self.place.rows(self.order), self.spec.width))

    def attended(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of attention to a pack."""
        shape = self.order.local_tokens, own_heads(self.spec, self.place.layout, self.place.at)[0]
        return self.new((*shape, self.spec.head_width)), self.new(shape, self.place.wide)

    def whole(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """`model.attention.Attention.whole`."""
        if self.kept:
            return self.kept[0].detach(), self.kept[1]
        out, lse = compute()
        if self.kept is not None:
            self.kept.extend((out, lse))
        return out, lse

    def labels(self, rows: int) -> Tensor | None:
        """Of rows of every tensor-parallel rank's share: a copy, where they do not lie end to end."""
        tp = self.place.layout.tp
        return self.new((rows * tp,), INDEX_BYTES) if tp > 1 and rows * tp < self.tokens_T else None

    def begin(self) -> int:
        """Forget what was before; what is there now."""
        self.sent, self.flops = Counter(), Counter()
        self.memory.most = self.memory.now
        return self.memory.now

    def seen(self, before: int, output: int = 0, graph: int = 0, grads: int = 0) -> Inside:
        work = self.flops["matmul"], self.flops["attention"]
        return Inside(self.memory.most - before, output, graph, grads, dict(self.sent), *work)


class Micro:
    """What a micro-batch is to a block: its order, the tensors of its tokens, and its tables of angles, which a chunk gets later."""

    def __init__(self, rank: "Rank", ropes: Sequence[Rope]):
        tokens = rank.tokens_T
        self.order = rank.order
        ends = rank.new((1 + len(rank.order.runs[rank.place.at.ring]),), END_BYTES)
        self.numbers = [*(rank.new((tokens,), INDEX_BYTES) for _ in range(3)), ends]  # tokens, labels, positions
        self.rotary: dict[Rope, tuple[Tensor, ...]] = {}
        for rope in ropes:
            self.rotate(rank, rope)

    def rotate(self, rank: "Rank", rope: Rope) -> None:
        """`model.decoder.rotary_table`"""
        place, tokens = rank.place, rank.tokens_T
        half = (tokens, place.spec.rotary_width // 2)
        position = rank.new((tokens,), 8)
        angle = rank.new(half, 8)
        del position
        self.rotary[rope] = tuple(_both_halves(cast(angle.new(), place.itemsize)) for _ in range(2))


def _both_halves(half: Tensor) -> Tensor:
    """`model.decoder.rotary_table`: cos or sin [T, 1, R] from [T, R / 2]."""
    return half.new((half.shape[0], 1, 2 * half.shape[1]))


def cast(x: Tensor, itemsize: int) -> Tensor:
    return x if x.itemsize == itemsize else x.new(itemsize=itemsize)


class SizedGroup:
    """`dist.collectives.Group`: gloo's collectives are all-to-alls with buffers of their own, a pair's swaps; NCCL's are native."""

    def __init__(self, rank: Rank, axis: str, size: int, index: int):
        self.rank, self.axis, self.size, self.index = rank, axis, size, index
        self.direct = rank.place.transport == "gloo" and size > 1
        self.swaps = self.direct and size == 2

    def count(self, sent: int) -> None:
        self.rank.sent[self.axis] += sent

    def gather_tokens(self, x: Tensor) -> Tensor:
        out = x.new((self.size * x.shape[0], *x.shape[1:]))
        self.all_gather(x.shaped(*x.shape))
        return out

    def all_gather(self, x: Tensor) -> None:
        self.count(x.bytes * (self.size - 1))
        copies = x.new((self.size, *x.shape)) if self.direct and not self.swaps else None

    def scatter_tokens(self, x: Tensor) -> Tensor:
        out = x.new((x.shape[0] // self.size, *x.shape[1:]))
        x = x.shaped(*x.shape)
        self.count(x.bytes // self.size * (self.size - 1))
        if self.swaps:
            theirs = out.new()
        elif self.direct:
            parts = x.new()
            total = out.new(itemsize=self.rank.place.wide)
        return out

    def all_reduced(self, x: Tensor) -> Tensor:
        """In place."""
        if self.direct:
            rows = x.new((self.size, *x.shape))
            self.all_gather(x)
            total = rows.new(x.shape)
        elif self.size > 1:
            self.count(2 * x.bytes * (self.size - 1) // self.size)
        return x

    def traded(self, sends: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """What comes from each rank; its own part is what it would send."""
        own = sends[self.index]
        flat = [t.shaped(t.bytes // t.itemsize) for i, t in enumerate(sends) if i != self.index]
        fused = own.new((sum(t.shape[0] for t in flat),))
        del flat
        self.count(fused.bytes)
        sizes = [prod(shape) for i, shape in enumerate(shapes) if i != self.index]
        out = own.new((sum(sizes),))
        return [own if i == self.index else Tensor(out.storage, shape, own.itemsize) for i, shape in enumerate(shapes)]
