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

# ruff: noqa: F841  (variables hold tensors for as long as the model's do)

from functools import lru_cache
from typing import Any

from longshift.layout.loss_rows import loss_rows
from longshift.layout.placement import local_boxes, local_shape
from longshift.schedule.abstract import Tensor, backward, recorded
from longshift.schedule.inside_ops import SizedOps, adapted, layer_norm, linear, look_up, rms_norm
from longshift.schedule.inside_rank import Inside, Micro, Part, Place, Rank, Turn
from longshift.schedule.seams import BlockSeams, scaled
from longshift.schedule.sequence import TokenOrder


def rank_of(place: Place, order: TokenOrder) -> Rank:
    """A rank at work on a pack in this order."""
    rank = Rank(place, order)
    rank.ops = SizedOps(rank)
    return rank


@lru_cache(maxsize=4096)
def inside(place: Place, order: TokenOrder, part: Part, turn: Turn, block: int = 1) -> Inside:
    """Bytes and work of one turn of a unit, or of half a block, on a pack in this order. `block`: the unit of one that computes so."""
    rank = rank_of(place, order)
    module: Any = SizedEmbed(rank, 0) if part == "embed" else SizedBlock(rank, block)
    micro = Micro(rank, place.spec.ropes)
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
    if y.node:
        backward([y], [dy])
    return rank.seen(seen, output=x.grad.storage.size if x and x.grad else 0, grads=module.grads())


@lru_cache(maxsize=1024)
def loaded(place: Place, order: TokenOrder) -> Inside:
    """Bytes of making a pack's tokens, labels, positions and tables of angles."""
    rank = rank_of(place, order)
    seen = rank.begin()
    micro = Micro(rank, place.spec.ropes)
    return rank.seen(seen, output=rank.memory.now - seen)


def loss_of_rows(place: Place, order: TokenOrder, number: int) -> Inside:
    """Bytes and work of the head and loss on the `number`-th block of rows of a pack or a chunk in this order."""
    whole = place.rows(order)
    rows = loss_rows(place.spec, place.layout, whole)
    return _loss_of(place, order, min(rows, whole - number * rows))


@lru_cache(maxsize=1024)
def _loss_of(place: Place, order: TokenOrder, count: int) -> Inside:
    """Bytes and work of the head and loss on `count` rows of a pack, wherever they lie."""
    rank = rank_of(place, order)
    head = SizedHead(rank, place.spec.layers + 1)
    rank.memory.recording = True
    x_TD = rank.stream()
    seen = rank.begin()
    x = Tensor(x_TD.storage, (count, *x_TD.shape[1:]), place.itemsize).leaf()
    loss = rank.ops.loss(head.logits(x, rank.ops), rank.labels(count))
    seed = loss.new()
    backward([loss], [seed])
    return rank.seen(seen, grads=head.grads())


class SizedUnit:
    """`model.decoder.Unit`: weights by role, as leaves."""

    def __init__(self, rank: Rank, unit: int):
        self.rank, self.spec, self.unit = rank, rank.spec, unit
        layout, tp = rank.place.layout, rank.place.at.tp
        self.float8 = rank.place.float8 and 0 < unit <= rank.spec.layers
        self.weights: dict[str, Tensor] = {}
        for p in rank.spec.of_unit(unit):
            weight = rank.new(local_shape(p, local_boxes(p, layout, tp)))
            self.weights[p.role] = weight if p.frozen else weight.leaf()

    def grads(self) -> int:
        return sum(w.grad.storage.size for w in self.weights.values() if w.grad)

    def linear(self, x: Tensor, role: str, bias: bool = True) -> Tensor:
        weight, added = self.weights[role], self.weights.get(role + "_bias") if bias else None
        wide = weight.shape[0 if not self.spec.fused_qkv or role in ("embed", "head") else 1]
        if a := self.weights.get(role + "_lora_a"):
            return adapted(self.rank, x, weight, a, self.weights[role + "_lora_b"], wide, self.float8)
        return linear(self.rank, x, weight, added, wide, self.float8)

    def plus_bias(self, x: Tensor, role: str) -> Tensor:
        bias = self.weights.get(role + "_bias")
        return x if bias is None else x + bias

    def norm_of(self, x: Tensor, role: str) -> Tensor:
        if self.spec.norm == "layer":
            return layer_norm(self.rank, x, self.weights[role], self.weights[role + "_bias"])
        return rms_norm(self.rank, x, self.norm_weight(role))

    def norm_weight(self, role: str) -> Tensor:
        weight, wide = self.weights[role], self.rank.place.wide
        if not self.spec.norm_less_one:
            return weight
        if weight.itemsize < wide:
            weight = recorded(weight.new(itemsize=wide), (weight,), lambda grad: [grad.new(itemsize=self.rank.place.itemsize)])
        return recorded(weight.new(), (weight,), lambda grad: [grad])


class SizedEmbed(SizedUnit):
    def forward(self, x: None, micro: Micro, ops: "SizedOps") -> Tensor:
        x_TD = scaled(ops.embed(self.weights["embed"], micro), self.spec.embed_scale)
        return x_TD + look_up(self.weights["positions"], x_TD.shape[0], micro) if self.spec.learned_positions else x_TD


class SizedBlock(BlockSeams, SizedUnit):
    def rotate(self, x: Tensor, micro: Micro) -> Tensor:
        rope = self.spec.rope_of(self.unit)
        return recorded(x.new(), (x,), lambda grad, *_: [grad.new()], micro.rotary[rope] if rope else ())

    def norm_of_heads(self, x: Tensor, role: str, heads: int, ops: "SizedOps") -> Tensor:
        return rms_norm(self.rank, x, self.weights[role], ops.all_sum)

    def activation(self, x: Tensor) -> Tensor:
        return recorded(x.new(), (x,), lambda grad, x: [grad.new()], (x,))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return recorded(gate.new(), (gate, up), lambda grad, gate, up: [grad.new(), grad.new()], (gate, up))


class SizedHead(SizedUnit):
    def logits(self, x_TD: Tensor, ops: "SizedOps") -> Tensor:
        h_TD = ops.enter(scaled(self.norm_of(x_TD, "norm"), 1.0 / self.spec.logit_divisor))
        logits = self.linear(h_TD, "embed" if self.spec.tied else "head")
        if not self.spec.logit_cap:
            return logits
        return recorded(logits.detach(), (logits,), lambda grad, y: [y.new()], (logits.detach(),))
