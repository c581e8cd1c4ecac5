"""What a layout inserts into the model, in order, and the process groups that it needs."""

from torch import Tensor

from longshift.dist.world import World
from longshift.layout.heads import heads_of, tensor_heads
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets
from longshift.model.attention import match_heads
from longshift.model.decoder import MicroBatch, Ops
from longshift.model.functions import Elementwise
from longshift.model.kernels import Kernel
from longshift.parallel import tensor, ulysses
from longshift.parallel.ring import RingAttention
from longshift.spec.model import ModelSpec, share

TOKEN_AXES = ("tp", "ulysses", "ring")


def prepare(world: World, spec: ModelSpec, layout: Layout) -> None:
    """Make every communicator that the layout needs, in one order on all ranks. [Note: communicators] Each purpose has its own: on NCCL one
    communicator is one queue, in which tokens of attention would wait behind the next unit's weights."""
    holders = sorted({bucket.holders for bucket in buckets(spec, layout)})
    for axis in TOKEN_AXES:
        world.prepare(layout.groups(axis), axis)
    world.prepare(holders, "gather")
    world.prepare(holders, "reduce")
    for direction in ("rising", "falling"):
        world.prepare(layout.groups("pp"), direction)
        world.group(layout.ranks("pp", of=world.rank), direction).meet(world.device)


class LayoutOps(Ops):
    """The seams under a layout. Outermost first: tensor parallel around whole halves of a block, then Ulysses, then the ring."""

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, kernel: Kernel):
        super().__init__(spec, kernel, again=layout.recompute == "selective")
        self.layout, at = layout, layout.coord(world.rank)
        self.tp, self.ulysses, self.ring = (world.group(layout.ranks(axis, of=world.rank), axis) for axis in TOKEN_AXES)
        self.heads, self.kv_heads = tensor_heads(spec, layout, at)
        self.vocab_first = share(spec.vocab, layout.tp, at.tp)[0]

    def enter(self, x: Tensor) -> Tensor:
        return tensor.enter(x, self.tp) if self.tp.size > 1 else x

    def leave(self, x: Tensor) -> Tensor:
        return tensor.leave(x, self.tp) if self.tp.size > 1 else x

    def all_sum(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(x) if self.tp.size > 1 else x

    def embed(self, weight_VD: Tensor, tokens_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().embed(weight_VD, tokens_T)
        return tensor.embed(weight_VD, tokens_T, self.vocab_first, self.tp)

    def loss(self, logits_TV: Tensor, labels_T: Tensor, by: Elementwise) -> Tensor:
        if self.tp.size == 1:
            return super().loss(logits_TV, labels_T, by)
        return tensor.loss(logits_TV, labels_T, self.vocab_first, self.tp, by)

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch, window: int | None = None) -> Tensor:
        if self.ring.size == 1:
            return super().attend(q_TNH, k_TKH, v_TKH, micro, window)
        qkv = self.to_heads(q_TNH, k_TKH, v_TKH)
        return self.to_tokens(RingAttention.apply(*qkv, micro.order, window, self.attention, self.ring))  # pyright: ignore

    def to_heads(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.ulysses.size == 1:
            return super().to_heads(q_TNH, k_TKH, v_TKH)
        group_size = self.spec.heads // self.spec.kv_heads
        q, k, v = ulysses.to_heads(q_TNH, k_TKH, v_TKH, self.heads, self.kv_heads, group_size, self.ulysses)
        queries, keys = heads_of(self.heads, group_size, self.ulysses.size, self.ulysses.index)
        return q, *match_heads(k, v, queries, keys, group_size)

    def to_tokens(self, o_TNH: Tensor) -> Tensor:
        return ulysses.to_tokens(o_TNH, self.heads, self.ulysses) if self.ulysses.size > 1 else o_TNH
