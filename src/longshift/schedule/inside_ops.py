"""Primitives of the model, and what a layout changes, on tensors without numbers: as `model.functions`, `model.loss`, `parallel.tensor` and
`parallel.ulysses` hold and drop theirs."""

# ruff: noqa: F841  (variables hold tensors for as long as the model's do)

from collections.abc import Callable
from typing import Any

from longshift.layout.blocks import BLOCK, runs
from longshift.layout.heads import heads_of, matched_heads, tensor_heads
from longshift.schedule.abstract import Shape, Tensor, recorded, recorded_all
from longshift.schedule.inside_attention import packed_attention, ring_attention
from longshift.schedule.inside_rank import INDEX_BYTES, Micro, Rank, SizedGroup, cast
from longshift.spec.model import share


def rounded(x: Tensor, rows: int = 1) -> Tensor:
    """`model.float8.rounded`"""
    y = x.new()
    for at_rows, high in runs(x.shape[0], rows):
        for at_columns, wide in runs(x.shape[1], BLOCK):
            shape = at_rows.stop - at_rows.start, at_columns.stop - at_columns.start
            largest = x.new((shape[0] // high, shape[1] // wide))
            share = largest.new(itemsize=4)
            scale = cast(share, x.itemsize)
            del largest, share
            codes = x.new(shape, 1)
            del codes
    return y


def factors(x: Tensor, weight: Tensor, float8: bool) -> tuple[Tensor, Tensor]:
    """`model.float8.factors`"""
    return (rounded(x), rounded(weight, BLOCK)) if float8 else (x, weight)


def linear(rank: Rank, x: Tensor, weight: Tensor, bias: Tensor | None, width: int, float8: bool) -> Tensor:
    """A linear layer, `model.functions.SummedLinear` or `model.float8.Float8Linear`."""
    work = 2 * x.shape[0] * weight.shape[0] * weight.shape[1]
    rank.flops["matmul"] += work
    shape, learns = x.shape, weight.needs
    biased = bias is not None and bias.needs
    leaves = learns and not rank.place.adds_inside  # a gradient of its own

    def back(grad: Tensor, weight: Tensor, x: Tensor | None = None) -> list[Tensor | None]:
        rank.flops["matmul"] += work * (1 + learns)
        taken = factors(grad, weight, float8)
        dx = grad.new(shape)
        del taken
        return [dx, *(weight.new() for _ in range(leaves)), *(grad.new((width,)) for _ in range(biased))]

    inputs = [x, *([weight] if leaves else []), *([bias] if bias is not None and biased else [])]
    taken = factors(x, weight, float8)
    y = x.new((x.shape[0], width))
    del taken
    return recorded(y, inputs, back, (weight, x) if learns else (weight,))


def adapted(rank: Rank, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, width: int, float8: bool) -> Tensor:
    """`model.functions.Adapted`"""
    work, more = 2 * x.shape[0] * weight.shape[0] * weight.shape[1], 2 * x.shape[0] * a.shape[0] * (a.shape[1] + b.shape[0])
    rank.flops["matmul"] += work + more

    def back(grad: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, u: Tensor) -> list[Tensor]:
        rank.flops["matmul"] += work + 2 * more
        du, db, da = u.new(), b.new(), a.new()
        taken = factors(grad, weight, float8)
        dx = x.new()
        del taken
        return [dx, da, db]

    taken = factors(x, weight, float8)
    y = x.new((x.shape[0], width))
    del taken
    u = x.new((x.shape[0], a.shape[0]))
    return recorded(y, (x, a, b), back, (x, weight, a, b, u))


def alone(x: Tensor) -> Tensor:
    """`model.loss.alone`"""
    return x


def rms_norm(rank: Rank, x: Tensor, weight: Tensor, all_sum: Callable[[Tensor], Tensor] = alone) -> Tensor:
    wide, width = rank.place.wide, x.shape[-1]
    rstd, learns = all_sum(x.new((*x.shape[:-1], 1), wide)), weight.needs or weight.node is not None

    def back(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> list[Tensor | None]:
        g, w = cast(grad.shaped(*grad.shape), wide), cast(weight, wide)
        product = g.new()
        dw = cast(w.new(), weight.itemsize) if learns else None
        minus = all_sum(rstd.new())
        return [cast(product, grad.itemsize), dw]

    return recorded(x.new(), (x, weight), back, (x, weight, rstd))


def layer_norm(rank: Rank, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = x.new()
    one = rank.place.itemsize if rank.place.transport == "gloo" else rank.place.wide
    mean, rstd = (x.new((*x.shape[:-1], 1), one) for _ in range(2))
    learns = weight.needs, bias.needs

    def back(grad: Tensor, x: Tensor, *others: Tensor) -> list[Tensor | None]:
        return [x.new(), *(t.new() if wanted else None for t, wanted in zip(others, learns))]

    return recorded(y, (x, weight, bias), back, (x, weight, bias, mean, rstd))


def look_up(weight: Tensor, tokens: int, micro: Micro) -> Tensor:
    """weight[positions]"""

    def back(grad: Tensor, weight: Tensor, positions: Tensor) -> list[Tensor]:
        zeros = weight.new()
        return [weight.new()]

    return recorded(weight.new((tokens, weight.shape[1])), (weight,), back, (weight, micro.numbers[2]))


class SizedOps:
    """`step.compose.LayoutOps`."""

    def __init__(self, rank: Rank):
        place = rank.place
        spec, layout, at = place.spec, place.layout, place.at
        self.rank, self.spec, self.group_size = rank, spec, spec.heads // spec.kv_heads
        self.tp = SizedGroup(rank, "tp", layout.tp, at.tp)
        self.ulysses = SizedGroup(rank, "ulysses", layout.ulysses, at.ulysses)
        self.ring = SizedGroup(rank, "ring", layout.ring, at.ring)
        self.heads, self.kv_heads = tensor_heads(spec, layout, at)

    def enter(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        return recorded(self.tp.gather_tokens(x), (x,), lambda grad: [self.tp.scatter_tokens(grad)])

    def leave(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        return recorded(self.tp.scatter_tokens(x), (x,), lambda grad: [self.tp.gather_tokens(grad)])

    def all_sum(self, x: Tensor) -> Tensor:
        return self.tp.all_reduced(x)

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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, micro: Micro, window: int | None) -> Tensor:
        if self.ring.size == 1:
            q, k, v = self.to_heads(q, k, v)
            return self.to_tokens(packed_attention(self.rank, q, k, v, [run.length for run in micro.order.runs[0]], window))
        qkv = self.to_heads(q, k, v)
        return self.to_tokens(ring_attention(self.rank, *qkv, micro.order, window, self.ring))

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


def _to_heads(q: Tensor, k: Tensor, v: Tensor, heads: range, kv_heads: range, group_size: int, group: "SizedGroup") -> Any:
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


def _to_tokens(o: Tensor, heads: int, group: "SizedGroup") -> Tensor:
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


def _cross_entropy(rank: Rank, logits: Tensor, group: "SizedGroup") -> Tensor:
    """`model.loss.CrossEntropySum`."""
    (tokens, _), wide = logits.shape, rank.place.wide

    def row(itemsize: int) -> Tensor:
        return logits.memory.tensor((tokens,), itemsize)

    def back(grad: Tensor, weight: Tensor, highest: Tensor, total: Tensor, column: Tensor, here: Tensor, counted: Tensor) -> list[Tensor]:
        grad_T = column.new((tokens,), grad.itemsize)
        share_T = grad_T.new()
        masked = grad_T.new()
        minus = grad_T.new()
        del minus
        return [cast(weight, itemsize)]

    itemsize = logits.itemsize
    highest = group.all_reduced(cast(row(itemsize), wide))
    low, high = row(1), row(1)
    here = row(1)
    del low, high
    moved, zero = row(INDEX_BYTES), rank.new((), INDEX_BYTES)
    column = row(INDEX_BYTES)
    del moved, zero
    weight = logits.new(itemsize=wide)
    gathered, summed = row(wide), row(wide)
    zero, target = rank.new((), wide), row(wide)
    del zero
    stacked = logits.memory.tensor((2, tokens), wide)
    del target
    both = group.all_reduced(stacked)
    del stacked, gathered, summed
    counted = row(1)
    logarithm = row(wide)
    difference = row(wide)
    del logarithm
    zero, chosen = rank.new((), wide), row(wide)
    del difference, zero
    found = recorded(logits.memory.tensor((), wide), (logits,), back, (weight, highest, both, column, here, counted))
    del chosen
    return found
