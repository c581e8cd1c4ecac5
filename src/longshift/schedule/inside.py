"""What happens inside one compute operation of a rank: its peak of memory, what it leaves, what it sends, its FLOPs.

The operation is played with tensors without numbers (`schedule.abstract`). A block's composition is `schedule.seams`, the same that the
model runs; primitives, collectives and attention mirror, line by line, `model.functions`, `model.decoder`, `model.attention`,
`model.kernels`, `model.loss`, `dist.collectives`, `parallel.*` and `step.runner`: who changes a tensor's life there changes it here, and
tests/many/test_inside.py compares the two. Not counted, as nothing outside sees it: what a kernel needs inside.

    pass       forward that keeps nothing                          begins with x                     leaves y
               or, of "block with output", attention's result      begins with x                     leaves y, o and log-sum-exp
    again      of "block with output", as forward                  begins with x, o, log-sum-exp     leaves y, graph
    forward    forward that keeps its graph, the first or again    begins with x                     leaves y, graph
    backward   of a kept graph                                     begins with x, y, dy, graph       leaves dx, grads; graph is gone
    loss       head and cross-entropy of some rows, both ways      begins with x, dx                 leaves grads

What an operation begins with stays for as long as it runs, but the output of attention, which goes with the graph where no tier has it.
"""

# ruff: noqa: F841, RUF059  (variables hold tensors for as long as the model's do)

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from longshift.layout.heads import heads_of, matched_heads, own_heads, tensor_heads
from longshift.layout.layout import Coord, Layout
from longshift.layout.memory import loss_rows
from longshift.layout.placement import local_boxes
from longshift.schedule.abstract import Memory, Shape, Tensor, backward, recorded, recorded_all
from longshift.schedule.seams import BlockSeams
from longshift.schedule.sequence import Pair, TokenOrder, pairs
from longshift.spec.model import ModelSpec, share

Transport = Literal["gloo", "nccl"]
Part = Literal["embed", "block", "block with output", "attention half", "mlp half"]
Turn = Literal["pass", "forward", "backward"]

INDEX_BYTES = 8  # of a token's or a position's number
MOST_SCORES = 2**26  # that the definition of attention holds at one time (`model.kernels`)


@dataclass(frozen=True)
class Inside:
    """Bytes and work of one operation on one rank. `peak`: the most above what was there when it began, its results included; `output`: of
    the tensors that it returns; `graph`: that a forward keeps for its backward, or a pass for another forward, besides input and output;
    `grads`: of the weights' gradients that it leaves, or at most leaves at one time; `sent`: out of this rank to others, by axis; `buffers`:
    of a chunk's event, see `schedule.inside_chunk`."""

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
    """A rank, and how it computes: `itemsize` of the compute format; `transport`: gloo with CPUs, NCCL with GPUs."""

    spec: ModelSpec
    layout: Layout
    at: Coord
    itemsize: int
    transport: Transport = "gloo"

    @property
    def wide(self) -> int:
        """Bytes of a number of at least float32."""
        return max(4, self.itemsize)

    @property
    def by_definition(self) -> bool:
        """Whether attention has no fused kernel: GPUs have them for 16-bit numbers only."""
        return self.transport == "nccl" and self.itemsize > 2


@lru_cache(maxsize=4096)
def inside(place: Place, order: TokenOrder, part: Part, turn: Turn) -> Inside:
    """Of a unit, or one half of it, on a pack in this order."""
    rank = Rank(place, order)
    module: Any = Embed(rank, 0) if part == "embed" else Block(rank, 1)
    micro = Micro(rank)
    function = getattr(module, {"attention half": "attention_half", "mlp half": "mlp_half"}.get(part, "forward"))
    x = None if part == "embed" else rank.stream().leaf()
    rank.memory.recording = turn != "pass"
    if part == "block with output":
        rank.kept = []
        if turn != "pass":
            rank.kept += rank.attended()
    kept = rank.kept if place.layout.offload != "device" else None  # by a tier
    seen = rank.begin()
    y = function(x, micro, rank.ops)
    if turn != "backward":
        return rank.seen(seen, output=y.storage.size, graph=rank.memory.now - seen - y.storage.size)
    dy, rank.kept = rank.stream(), None
    seen = rank.begin()
    backward([y], [dy])
    return rank.seen(seen, output=x.grad.storage.size if x and x.grad else 0, grads=module.grads())


@lru_cache(maxsize=1024)
def loaded(place: Place, order: TokenOrder) -> Inside:
    """Of making a pack's tokens, labels, positions and tables of angles."""
    rank = Rank(place, order)
    seen = rank.begin()
    micro = Micro(rank)
    return rank.seen(seen, output=rank.memory.now - seen)


@lru_cache(maxsize=1024)
def loss_of_rows(place: Place, order: TokenOrder, number: int) -> Inside:
    """Of the head, on the `number`-th block of rows of a pack or a chunk in this order."""
    rank = Rank(place, order)
    head = Head(rank, place.spec.layers + 1)
    rank.memory.recording = True
    x_TD = rank.stream()
    rows = loss_rows(place.spec, x_TD.shape[0])
    count = min(rows, x_TD.shape[0] - number * rows)
    seen = rank.begin()
    x = Tensor(x_TD.storage, (count, *x_TD.shape[1:]), place.itemsize).leaf()
    loss = rank.ops.loss(head.logits(x, rank.ops), rank.labels(count))
    seed = loss.new()
    backward([loss], [seed])
    return rank.seen(seen, grads=head.grads())


class Rank:
    """A rank at work on one pack. Mutable: its memory, what it has sent and computed."""

    def __init__(self, place: Place, order: TokenOrder):
        self.place, self.spec, self.order = place, place.spec, order
        self.memory, self.sent, self.flops = Memory(), Counter(), Counter()
        self.tokens_T = order.local_tokens // place.layout.ulysses
        self.kept: list[Tensor] | None = None  # of `model.attention.Attention`
        self.ops = Ops(self)

    def new(self, shape: Shape, itemsize: int | None = None) -> Tensor:
        return self.memory.tensor(shape, itemsize or self.place.itemsize)

    def stream(self) -> Tensor:
        """This rank's share [T', D] of the residual stream."""
        return self.new((self.tokens_T // self.place.layout.tp, self.spec.width))

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

    def __init__(self, rank: "Rank", rotary: bool = True):
        tokens = rank.tokens_T
        self.order = rank.order
        self.numbers = [rank.new((tokens,), INDEX_BYTES) for _ in range(3)]  # tokens, labels, positions
        self.rotary: tuple[Tensor, ...] = ()
        if rotary:
            self.rotate(rank)

    def rotate(self, rank: "Rank") -> None:
        """`model.decoder.rotary_table`"""
        place, tokens = rank.place, rank.tokens_T
        if place.spec.rope is not None:
            half = (tokens, place.spec.head_width // 2)
            position = rank.new((tokens,), 8)
            angle = rank.new(half, 8)
            del position
            self.rotary = tuple(_both_halves(_cast(angle.new(), place.itemsize)) for _ in range(2))


def _both_halves(half: Tensor) -> Tensor:
    """`model.decoder.rotary_table`: cos or sin [T, 1, H] from [T, H / 2]."""
    return half.new((half.shape[0], 1, 2 * half.shape[1]))


# Primitives of the model


class Unit:
    """`model.decoder.Unit`: weights by role, as leaves."""

    def __init__(self, rank: Rank, unit: int):
        self.rank, self.spec = rank, rank.spec
        self.weights = {p.role: rank.new(_shape(rank.place, p)).leaf() for p in rank.spec.of_unit(unit)}

    def grads(self) -> int:
        return sum(w.grad.storage.size for w in self.weights.values() if w.grad)

    def linear(self, x: Tensor, role: str, bias: bool = True) -> Tensor:
        weight, added = self.weights[role], self.weights.get(role + "_bias") if bias else None
        wide = weight.shape[0 if not self.spec.fused_qkv or role in ("embed", "head") else 1]
        return _linear(self.rank, x, weight, added, wide)

    def plus_bias(self, x: Tensor, role: str) -> Tensor:
        bias = self.weights.get(role + "_bias")
        return x if bias is None else x + bias

    def norm_of(self, x: Tensor, role: str) -> Tensor:
        if self.spec.norm == "layer":
            return _layer_norm(self.rank, x, self.weights[role], self.weights[role + "_bias"])
        return _rms_norm(self.rank, x, self.weights[role])


class Embed(Unit):
    def forward(self, x: None, micro: Micro, ops: "Ops") -> Tensor:
        x_TD = ops.embed(self.weights["embed"], micro)
        return x_TD + _look_up(self.weights["positions"], x_TD.shape[0], micro) if self.spec.learned_positions else x_TD


class Block(BlockSeams, Unit):
    def rotate(self, x: Tensor, micro: Micro) -> Tensor:
        return recorded(x.new(), (x,), lambda grad, *_: [grad.new()], micro.rotary)

    def activation(self, x: Tensor) -> Tensor:
        return recorded(x.new(), (x,), lambda grad, x: [grad.new()], (x,))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return recorded(gate.new(), (gate, up), lambda grad, gate, up: [grad.new(), grad.new()], (gate, up))


class Head(Unit):
    def logits(self, x_TD: Tensor, ops: "Ops") -> Tensor:
        return self.linear(ops.enter(self.norm_of(x_TD, "norm")), "embed" if self.spec.tied else "head")


def _shape(place: Place, param: Any) -> Shape:
    boxes = local_boxes(param, place.layout, place.at.tp)
    shape = list(boxes[0].shape)
    if param.dim is not None:
        shape[param.dim] = sum(box.shape[param.dim] for box in boxes)
    return tuple(shape)


def _linear(rank: Rank, x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    work = 2 * x.shape[0] * weight.shape[0] * weight.shape[1]
    rank.flops["matmul"] += work

    def back(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        rank.flops["matmul"] += 2 * work
        return [x.new(), weight.new(), *([grad.new((width,))] if biased else [])]

    biased = bias is not None
    return recorded(x.new((x.shape[0], width)), (x, weight, bias) if bias else (x, weight), back, (x, weight))


def _rms_norm(rank: Rank, x: Tensor, weight: Tensor) -> Tensor:
    wide, width = rank.place.wide, x.shape[-1]
    rstd = x.new((*x.shape[:-1], 1), wide)

    def back(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> list[Tensor]:
        g, w = _cast(grad.shaped(*grad.shape), wide), _cast(weight, wide)
        product = g.new()
        dw = w.new()
        minus = rstd.new()
        return [_cast(product, grad.itemsize), _cast(dw, weight.itemsize)]

    return recorded(x.new(), (x, weight), back, (x, weight, rstd))


def _layer_norm(rank: Rank, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = x.new()
    one = rank.place.itemsize if rank.place.transport == "gloo" else rank.place.wide
    mean, rstd = (x.new((*x.shape[:-1], 1), one) for _ in range(2))
    return recorded(y, (x, weight, bias), lambda grad, x, w, b, *_: [x.new(), w.new(), b.new()], (x, weight, bias, mean, rstd))


def _look_up(weight: Tensor, tokens: int, micro: Micro) -> Tensor:
    """weight[positions]"""

    def back(grad: Tensor, weight: Tensor, positions: Tensor) -> list[Tensor]:
        zeros = weight.new()
        return [weight.new()]

    return recorded(weight.new((tokens, weight.shape[1])), (weight,), back, (weight, micro.numbers[2]))


def _cast(x: Tensor, itemsize: int) -> Tensor:
    return x if x.itemsize == itemsize else x.new(itemsize=itemsize)


# What a layout changes


class Ops:
    """`train.build.LayoutOps`."""

    def __init__(self, rank: Rank):
        place = rank.place
        spec, layout, at = place.spec, place.layout, place.at
        self.rank, self.spec, self.group_size = rank, spec, spec.heads // spec.kv_heads
        self.tp = Group(rank, "tp", layout.tp, at.tp)
        self.ulysses = Group(rank, "ulysses", layout.ulysses, at.ulysses)
        self.ring = Group(rank, "ring", layout.ring, at.ring)
        self.heads, self.kv_heads = tensor_heads(spec, layout, at)

    def enter(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        return recorded(self.tp.gather_tokens(x), (x,), lambda grad: [self.tp.scatter_tokens(grad)])

    def leave(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        return recorded(self.tp.scatter_tokens(x), (x,), lambda grad: [self.tp.gather_tokens(grad)])

    def embed(self, weight_VD: Tensor, micro: Micro) -> Tensor:
        rank, tokens = self.rank, (self.rank.tokens_T,)
        if self.tp.size == 1:
            rows = rank.new((*tokens, weight_VD.shape[1]))
            return recorded(rows, (weight_VD,), lambda grad, weight, tokens: [weight.new()], (weight_VD, micro.numbers[0]))
        low, high = rank.new(tokens, 1), rank.new(tokens, 1)
        here = rank.new(tokens, 1)
        del low, high
        moved = rank.new(tokens, INDEX_BYTES)
        zero = rank.new((), INDEX_BYTES)
        index = rank.new(tokens, INDEX_BYTES)
        del moved, zero
        rows = rank.new((*tokens, weight_VD.shape[1]))
        rows = recorded(rows, (weight_VD,), lambda grad, weight, index: [weight.new()], (weight_VD, index))
        del index
        return self.leave(recorded(rows.new(), (rows,), lambda grad, here: [grad.new()], (here,)))

    def loss(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        return _cross_entropy(self.rank, logits, self.tp)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, micro: Micro) -> Tensor:
        if self.ring.size == 1:
            q, k, v = self.to_heads(q, k, v)
            return self.to_tokens(_packed_attention(self.rank, q, k, v, [run.length for run in micro.order.runs(0)]))
        qkv = self.to_heads(q, k, v)
        return self.to_tokens(_ring_attention(self.rank, *qkv, micro.order, self.ring))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.ulysses.size == 1:
            return q, *self._matched(k, v, self.heads, self.kv_heads)
        q, k, v = _to_heads(q, k, v, self.heads, self.kv_heads, self.group_size, self.ulysses)
        return q, *self._matched(k, v, *heads_of(self.heads, self.group_size, self.ulysses.size, self.ulysses.index))

    def to_tokens(self, o: Tensor) -> Tensor:
        return _to_tokens(o, len(self.heads), self.ulysses) if self.ulysses.size > 1 else o

    def _matched(self, k: Tensor, v: Tensor, queries: range, keys: range) -> tuple[Tensor, Tensor]:
        count = matched_heads(queries, keys, self.group_size)
        return (k, v) if count == len(keys) else (_repeated(k, count), _repeated(v, count))


def _repeated(t: Tensor, count: int) -> Tensor:
    """Heads, each by a slice, that are put together again: the gradient of each slice is as large as all."""
    shape = t.shape
    slices = [recorded(t.parts([1], 1)[0], (t,), _padded(shape)) for _ in range(count)]
    return recorded(t.new((shape[0], count, shape[2])), slices, lambda grad: grad.parts([1] * count, 1))


def _padded(shape: Shape) -> Callable[[Tensor], list[Tensor]]:
    return lambda grad: [grad.new(shape)]


def _to_heads(q: Tensor, k: Tensor, v: Tensor, heads: range, kv_heads: range, group_size: int, group: "Group") -> Any:
    """`parallel.ulysses.to_heads`."""
    (tokens, _, width), index = q.shape, group.index
    deals = [heads_of(heads, group_size, group.size, i) for i in range(group.size)]
    counts = [(len(mine), len(kv), len(kv)) for mine, kv in deals]
    shapes = [(tokens, sum(some), width) for some in counts]
    q_shape, k_shape = q.shape, k.shape

    def back(dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        whole = dq.new((tokens * group.size, *shapes[index][1:]))
        received = group.traded([Tensor(whole.storage, shapes[index], whole.itemsize)] * group.size, shapes)
        del whole
        grads = [dq.new(q_shape), dk.new(k_shape), dv.new(k_shape)]
        del received
        return grads

    sends = [q.new(shape) for shape in shapes]
    received = group.traded(sends, [shapes[index]] * group.size)
    whole = q.new((tokens * group.size, *shapes[index][1:]))
    del received, sends
    return recorded_all(whole.parts(counts[index], 1), (q, k, v), back)


def _to_tokens(o: Tensor, heads: int, group: "Group") -> Tensor:
    """`parallel.ulysses.to_tokens`."""
    (tokens, own, width), size = o.shape, group.size
    counts = [last - first for first, last in (share(heads, size, i) for i in range(size))]
    few = tokens // size

    def back(grad: Tensor) -> list[Tensor]:
        received = group.traded(grad.parts(counts, 1), [(few, own, width)] * size)
        whole = grad.new((tokens, own, width))
        del received
        return [whole]

    received = group.traded([Tensor(o.storage, (few, own, width), o.itemsize)] * size, [(few, count, width) for count in counts])
    return recorded(o.new((few, heads, width)), (o,), back)


def _cross_entropy(rank: Rank, logits: Tensor, group: "Group") -> Tensor:
    """`model.loss.CrossEntropySum`."""
    (tokens, _), wide = logits.shape, rank.place.wide

    def row(itemsize: int) -> Tensor:
        return logits.memory.tensor((tokens,), itemsize)

    def back(grad: Tensor, weight: Tensor, total: Tensor, column: Tensor, here: Tensor, counted: Tensor) -> list[Tensor]:
        grad_T = column.new((tokens,), grad.itemsize)
        share_T = grad_T.new()
        del share_T
        masked = grad_T.new()
        minus = grad_T.new()
        del masked, minus
        return [_cast(weight, itemsize)]

    itemsize = logits.itemsize
    highest = group.all_reduced(_cast(row(itemsize), wide))
    weight = logits.new(itemsize=wide)
    low, high = row(1), row(1)
    here = row(1)
    del low, high
    moved, zero = row(INDEX_BYTES), rank.new((), INDEX_BYTES)
    column = row(INDEX_BYTES)
    del moved, zero
    gathered, zero = row(wide), rank.new((), wide)
    target = row(wide)
    del gathered, zero
    summed = row(wide)
    stacked = logits.memory.tensor((2, tokens), wide)
    del summed
    both = group.all_reduced(stacked)
    del stacked, target
    counted = row(1)
    logarithm = row(wide)
    difference = row(wide)
    del logarithm
    zero, chosen = rank.new((), wide), row(wide)
    del difference, zero
    found = recorded(logits.memory.tensor((), wide), (logits,), back, (weight, both, column, here, counted))
    del chosen, highest
    return found


# Attention


def _flash(rank: Rank, q: Tensor, k: Tensor, causal: bool, times: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a piece; of each of `times` equal ones."""
    place, scores = rank.place, times * q.shape[0] * k.shape[0] * q.shape[1]
    rank.flops["attention"] += 4 * scores * q.shape[2] // (2 if causal else 1)
    if place.by_definition:
        return _by_definition(q, k, causal)
    found = q.new(), q.new(q.shape[:2], place.wide)
    state = q.new((3,), 8) if place.transport == "nccl" else None  # of random numbers
    return found


def _flash_backward(rank: Rank, q: Tensor, k: Tensor, v: Tensor, causal: bool, times: int) -> tuple[Tensor, Tensor, Tensor]:
    place, scores = rank.place, times * q.shape[0] * k.shape[0] * q.shape[1]
    rank.flops["attention"] += 10 * scores * q.shape[2] // (2 if causal else 1)
    if place.by_definition:
        return _by_definition_backward(q, k, causal)
    lse = q.new(q.shape[:2], place.wide) if place.transport == "nccl" else None  # made contiguous
    return q.new(), k.new(), v.new()


def _by_definition(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`model.kernels.reference`."""
    (tokens, heads, width), outs, lses = q.shape, [], []
    keys, values = (k.new((k.shape[0], heads, width)) for _ in range(2))
    scores = None
    for rows in _score_rows(q, k):
        scores = _scores(q, k, rows, causal)
        lses.append(q.new((rows, heads)))
        weights = _exp_of_difference(scores)
        outs.append(q.new((rows, heads, width)))
        del weights
    out = q.new()
    return out, q.new((tokens, heads))


def _by_definition_backward(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`model.kernels.reference_backward`."""
    (_, heads, width), dqs = q.shape, []
    keys, values = (k.new((k.shape[0], heads, width)) for _ in range(2))
    dk, dv = k.new(), k.new()
    p = ds = None
    for rows in _score_rows(q, k):
        p = _exp_of_difference(_scores(q, k, rows, causal))
        ds = _gradient_of_scores(q, p)
        dqs.append(q.new((rows, heads, width)))
        for total in (dk, dv):
            wide = keys.new()
            part = total.new()
            del wide, part
    return q.new(), dk, dv


def _gradient_of_scores(q: Tensor, p: Tensor) -> Tensor:
    rows, heads, _ = p.shape
    given = p.new()
    product = q.new((rows, *q.shape[1:]))
    delta = q.new((rows, heads))
    del product
    less = p.new()
    del given, delta
    weighed = p.new()
    del less
    return weighed.new()


def _score_rows(q: Tensor, k: Tensor) -> list[int]:
    """How many rows are there at one time."""
    count = max(1, MOST_SCORES // (q.shape[1] * k.shape[0]))
    return [min(count, q.shape[0] - first) for first in range(0, q.shape[0], count)]


def _scores(q: Tensor, k: Tensor, rows: int, causal: bool) -> Tensor:
    scores = q.new((rows, q.shape[1], k.shape[0])).new()
    if causal:
        hidden = q.new((rows, k.shape[0]), 1).new()
        return scores.new()
    return scores


def _merge(part: Tensor, part_lse: Tensor, first: bool) -> None:
    """`model.kernels.merge`."""
    if first:
        return
    total = part_lse.new()
    weight = _exp_of_difference(part_lse)
    del weight
    weight = _exp_of_difference(part_lse)
    product = part.new(itemsize=part_lse.itemsize)
    del weight, product


def _exp_of_difference(x: Tensor) -> Tensor:
    difference = x.new()
    return difference.new()


def _rows(t: Tensor, count: int) -> Tensor:
    """A view of some tokens."""
    return Tensor(t.storage, (count, *t.shape[1:]), t.itemsize, t.whole)


def _packed_attention(rank: Rank, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """`model.attention.PackedAttention`."""

    again = rank.place.layout.recompute == "selective"

    def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *made: Tensor) -> list[Tensor]:
        grads, result = [q.new(), k.new(), v.new()], ()
        for length, times in Counter(lengths).items():
            piece = _rows(q, length), _rows(k, length), _rows(v, length)
            result = _forward(rank, *piece[:2], [length] * times) if again else ()
            _flash_backward(rank, *piece, True, times)
        return grads

    out, lse = rank.whole(lambda: _forward(rank, q, k, lengths))
    return recorded(out, (q, k, v), back, (q, k, v) if again else (q, k, v, out, lse))


def _forward(rank: Rank, q: Tensor, k: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    out, lse = q.new(), q.new(q.shape[:2], rank.place.wide)
    for length, times in Counter(lengths).items():
        _merge(*_flash(rank, _rows(q, length), _rows(k, length), True, times), first=True)
    return out, lse


def _ring_attention(rank: Rank, q: Tensor, k: Tensor, v: Tensor, order: TokenOrder, group: "Group") -> Tensor:
    """`parallel.ring.RingAttention`."""
    wide, index = rank.place.wide, group.index
    again = rank.place.layout.recompute == "selective"

    def forward(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new(itemsize=wide), q.new(q.shape[:2], wide)
        ring_forward(rank, q, kv, lambda i: pairs(order, index, i), group, first=True)
        return _cast(out, q.itemsize), lse

    def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *made: Tensor) -> list[Tensor]:
        kv = k.new((2, *k.shape))
        result = forward(q, kv) if again else ()
        dq, dkv = q.new(itemsize=wide), kv.new(itemsize=wide)
        ring_backward(rank, dkv, q, kv, lambda i: pairs(order, index, i), group)
        dq_cast = _cast(dq, q.itemsize)
        dkv_cast = _cast(dkv, k.itemsize)
        return [dq_cast, *(Tensor(dkv_cast.storage, k.shape, k.itemsize) for _ in range(2))]

    o, lse = rank.whole(lambda: forward(q, k.new((2, *k.shape))))
    return recorded(o, (q, k, v), back, (q, k, v) if again else (q, k, v, o, lse))


def ring_forward(rank: Rank, q: Tensor, kv: Tensor, pairs_of: Callable[[int], Sequence[Pair]], group: "Group", first: bool) -> None:
    """`parallel.ring.forward_into`."""
    for step in range(group.size):
        sending, following = _pass_on(kv, group) if step < group.size - 1 else (None, kv)
        for (queries, keys, causal), times in _equal(pairs_of((group.index - step) % group.size)):
            _merge(*_flash(rank, *_piece(q, kv, queries, keys)[:2], causal, times), first=first and step == 0)
        del sending
        kv = following


def ring_backward(rank: Rank, dkv: Tensor, q: Tensor, kv: Tensor, pairs_of: Callable[[int], Sequence[Pair]], group: "Group") -> None:
    """`parallel.ring.backward_into`."""
    arriving, received = None, dkv
    for step in range(group.size):
        sending, following = _pass_on(kv, group) if step < group.size - 1 else (None, kv)
        here = dkv.new() if group.size > 1 else dkv
        for (queries, keys, causal), times in _equal(pairs_of((group.index - step) % group.size)):
            _flash_backward(rank, *_piece(q, kv, queries, keys), causal, times)
        if group.size == 1:
            return
        arriving = None
        arriving, received = _pass_on(here.new() if step else here, group)
        sending = None
        kv = following


def _equal(found: Sequence[Pair]) -> Iterable[tuple[tuple[int, int, bool], int]]:
    """Pieces by numbers of queries and keys, and how many there are of each."""
    return Counter((queries.stop - queries.start, keys.stop - keys.start, causal) for queries, keys, causal in found).items()


def _piece(q: Tensor, kv: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    piece = Tensor(kv.storage, (keys, *kv.shape[2:]), kv.itemsize)
    return _rows(q, queries), piece, piece


def _pass_on(x: Tensor, group: "Group") -> tuple[Tensor, Tensor]:
    """What is being sent, a copy, and what arrives."""
    sending = x.new()
    group.count(x.bytes)
    return sending, x.new()


# Collectives


class Group:
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
        sizes = [_elements(shape) for i, shape in enumerate(shapes) if i != self.index]
        out = own.new((sum(sizes),))
        return [own if i == self.index else Tensor(out.storage, shape, own.itemsize) for i, shape in enumerate(shapes)]


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
