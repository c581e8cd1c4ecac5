"""The decoder: all families of `spec.families` as one readable model that knows no rank.

What a parallel layout changes goes through `Ops`, whose methods here are those of one process.

Letters: T tokens, D model width, N query heads, K key/value heads, H head width, R channels of it
that turn, F feed-forward width, V vocabulary.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longshift.model.attention import Attention, PackedAttention, match_heads
from longshift.model.experts import Experts, plan_routes, route
from longshift.model.functions import (
    WRITTEN_OUT,
    AdaptedLinear,
    Add,
    Elementwise,
    GatedActivation,
    Linear,
    RmsNorm,
    Rotate,
    SoftCap,
    accum_dtype,
    activate,
    alone,
    sliced_norm,
)
from longshift.model.kernels import FLASH, Kernel, capped
from longshift.model.loss import CrossEntropySum, TokenLossSum, token_loss
from longshift.schedule.sequence import TokenOrder
from longshift.spec.model import CROSS_ENTROPY, ModelSpec, Rope


@dataclass(frozen=True)
class MicroBatch:
    """One pack as one rank sees it. T tokens are those between `enter` and `leave`; T' is this
    rank's share of the residual stream."""

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor  # of each token in its document
    positions: Tensor  # [T']
    rotary: Mapping[Rope, tuple[Tensor, Tensor]]  # cos, sin [T, 1, R]
    order: TokenOrder
    ends: Tensor  # of `model.packed_attention`: int32 [runs + 1]

    @property
    def tokens_here(self) -> int:
        """T'."""
        return len(self.positions)


class Ops:
    """What a layout changes, as it is for one process: nothing moves."""

    def __init__(self, spec: ModelSpec, kernel: Kernel = FLASH, again: bool = False):
        """`again`: of `model.attention.Attention`."""
        self.spec = spec
        self.attention = Attention(
            capped(spec.score_cap) if spec.score_cap else kernel, spec.score_scale, again
        )
        self.heads = range(spec.heads)
        self.kv_heads = range(spec.kv_heads)
        self.vocab_first = 0
        self.token_loss = None if spec.loss == CROSS_ENTROPY else token_loss(spec.loss, spec.vocab)

    def keeping(self, kept: list[Tensor] | None) -> Self:
        """The same, with `kept` of `model.attention.Attention`."""
        ops = copy(self)
        ops.attention = replace(self.attention, kept=kept)
        return ops

    def enter(self, x: Tensor) -> Tensor:
        """From this rank's share of the tokens to all that its weights shall see."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Back to this rank's share, summed over the ranks that hold slices
        of the weight just used."""
        return x

    def attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        micro: MicroBatch,
        window: int | None = None,
    ) -> Tensor:
        """Attention of every document to itself, to the last `window` tokens where there is one:
        [T, N, H]."""
        q, k, v = self.to_heads(q_TNH, k_TKH, v_TKH)
        lengths = tuple(run.length for run in micro.order.runs[0])
        return self.to_tokens(
            PackedAttention.apply(q, k, v, lengths, window, self.attention, micro.ends)
        )  # pyright: ignore[reportArgumentType]

    def to_heads(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What attention works on: the heads that this rank attends with, key/value heads such that
        they divide its query heads."""
        return q_TNH, *match_heads(
            k_TKH, v_TKH, self.heads, self.kv_heads, self.spec.heads // self.spec.kv_heads
        )

    def to_tokens(self, o_TNH: Tensor) -> Tensor:
        """Back from attention's heads to those of `q`."""
        return o_TNH

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks that hold the other heads, in place."""
        return x

    def embed(self, weight_VD: Tensor, tokens_T: Tensor) -> Tensor:
        """Rows of the embedding, this rank's share of the tokens."""
        return F.embedding(tokens_T, weight_VD)

    def loss(self, logits_TV: Tensor, labels_T: Tensor, by: Elementwise) -> Tensor:
        """Sum of the losses of the target tokens."""
        if self.token_loss is not None:
            return TokenLossSum.apply(logits_TV, labels_T, self.token_loss, alone, alone)  # pyright: ignore
        return CrossEntropySum.apply(logits_TV, labels_T, 0, alone, alone, by)  # pyright: ignore


def scaled(x: Tensor, scale: float) -> Tensor:
    """x times `scale`, without a copy where that is 1."""
    return x if scale == 1.0 else x * scale


class Unit(nn.Module):
    """A piece of the model whose weights move together. Weights are registered by role; state
    decides what storage they have. `float8`: whether its matmuls take factors of eight bits."""

    def __init__(self, spec: ModelSpec, unit: int, by: Elementwise, float8: bool = False):
        super().__init__()
        self.spec = spec
        self.unit = unit
        self.by = by
        self.float8 = float8
        self.table = spec.of_unit(unit)
        # By role: weights whose gradients go into their sum as they are formed.
        self.adds: dict[str, Add] = {}
        for p in self.table:
            self.register_parameter(
                p.role, nn.Parameter(torch.empty(p.shape, device="meta"), not p.frozen)
            )

    if TYPE_CHECKING:

        def __getattr__(self, role: str) -> Any: ...

    input_major = False  # whether weights of matmuls are stored [I, O]

    def linear(self, x: Tensor, role: str, bias: bool = True) -> Tensor:
        """x W^T + b, with an adapter where the weight has one. `bias`: whether b is added, where
        the weight has one."""
        weight = getattr(self, role)
        b = getattr(self, role + "_bias", None) if bias else None
        if self.input_major:
            weight = weight.mT

        # 1. A gradient that goes into its sum as it is formed.
        if add := self.adds.get(role):
            add_to_stored: Add = (lambda dy, x: add(x, dy)) if self.input_major else add
            return Linear.apply(x, weight.detach(), b, add_to_stored, self.float8)  # pyright: ignore

        # 2. A weight with an adapter.
        if (lora_a := getattr(self, role + "_lora_a", None)) is not None:
            lora_b = getattr(self, role + "_lora_b")
            scale = self.spec.lora.scale  # pyright: ignore
            return AdaptedLinear.apply(x, weight, b, lora_a, lora_b, scale, self.float8)  # pyright: ignore

        # 3. Any other.
        if self.float8:
            return Linear.apply(x, weight, b, None, True)  # pyright: ignore[reportReturnType]
        return F.linear(x, weight, b)

    def norm_of(self, x: Tensor, role: str) -> Tensor:
        """x normalized over its last dim: the residual stream's, or a head's."""
        if self.spec.norm == "layer":
            return F.layer_norm(
                x,
                x.shape[-1:],
                getattr(self, role),
                getattr(self, role + "_bias"),
                self.spec.norm_eps,
            )
        return RmsNorm.apply(x, self.norm_weight(role), self.spec.norm_eps, self.by)  # pyright: ignore

    def norm_weight(self, role: str) -> Tensor:
        """What an RMS norm multiplies with: where it is stored less one,
        the sum in at least float32."""
        weight = getattr(self, role)
        if not self.spec.norm_less_one:
            return weight
        return weight.to(accum_dtype(weight)) + 1.0


class Embed(Unit):
    """Tokens to the residual stream."""

    def forward(self, x: None, micro: MicroBatch, ops: Ops) -> Tensor:
        x_TD = ops.embed(self.embed, micro.tokens_T)
        x_TD = scaled(x_TD, embed_scale(self.spec, x_TD.dtype))
        return x_TD + self.positions[micro.positions] if self.spec.learned_positions else x_TD


def embed_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """What embeddings are multiplied with. Gemma was trained with the root of its width as the
    compute format has it."""
    if not spec.norm_less_one:
        return spec.embed_scale
    mantissa, exponent = math.frexp(spec.embed_scale)
    step = torch.finfo(dtype).eps / 2
    return math.ldexp(round(mantissa / step) * step, exponent)


class Block(Unit):
    """One transformer block. Three seams, each callable on any run of tokens: `qkv`, `out`, `mlp`;
    attention is one of `ops`. What a parallel layout changes goes through `ops`:

        x ─ norm ─ enter ─ qkv ─ attend ─ o ─ leave ─ + ─ norm ─ enter ─ up ─ act ─ down ─ leave ─ +
         token shard │        all tokens        │   token shard    │        all tokens       │

    Where norms stand after attention and MLP, they come after `leave` and before `+`, and so does
    the scale of what is added. Calls are nested where a tensor is not needed again, so that a
    forward without a graph holds few at one time."""

    @property
    def input_major(self) -> bool:
        """GPT-2."""
        return self.spec.fused_qkv

    def qkv(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H], keys and values [T, K, H] of a run of tokens,
        rotated to their positions."""
        # Without a name for the normalized tokens, which nothing needs after the projections.
        q, k, v = self.project_qkv(ops.enter(self.pre_norm(x_TD, "norm1")), ops)

        if self.spec.qk_norm:
            q = self.norm_of(q, "q_norm")
            k = self.norm_of(k, "k_norm")
        if self.spec.rope_of(self.unit):
            q = self.rotate(q, micro)
            k = self.rotate(k, micro)
        return q, k, v

    def out(self, x_TD: Tensor, o_TNH: Tensor, ops: Ops) -> Tensor:
        """The residual stream after attention."""
        return x_TD + self.post_norm(self.row_linear(o_TNH.flatten(1), "o", ops), "post1")

    def mlp(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """The residual stream after the MLP, or after the experts."""
        if self.spec.experts:
            return x_TD + self.post_norm(self.experts(self.pre_norm(x_TD, "norm2")), "post2")
        return x_TD + self.post_norm(
            self.row_linear(self.hidden(ops.enter(self.pre_norm(x_TD, "norm2"))), "down", ops),
            "post2",
        )

    def experts(self, h_TD: Tensor) -> Tensor:
        """What the experts of each token make of it. Ranks that share tokens each have all
        experts, so that none of them enters or leaves."""
        spec = self.spec
        experts_TK, weights_TK = route(self.linear(h_TD, "router"), spec.top_k, spec.norm_top_k)
        routes = plan_routes(experts_TK, spec.experts)
        return Experts.apply(  # pyright: ignore[reportReturnType]
            h_TD,
            weights_TK,
            routes,
            self.expert_gate,
            self.expert_up,
            self.expert_down,
            spec.activation,
            self.by,
        )

    def pre_norm(self, x_TD: Tensor, role: str) -> Tensor:
        """What attention or MLP takes of the residual stream."""
        return x_TD if self.spec.norm_place == "after" else self.norm_of(x_TD, role)

    def post_norm(self, y_TD: Tensor, role: str) -> Tensor:
        """What is added to the residual stream of what attention or MLP gives."""
        if self.spec.norm_place != "before":
            y_TD = self.norm_of(y_TD, role)
        return scaled(y_TD, self.spec.residual_scale)

    def project_qkv(self, h: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H], keys and values [T, K, H] of the normalized residual stream."""
        width = self.spec.head_width
        if self.spec.fused_qkv or self.spec.fused:
            # A fused matrix has the rows of queries, keys and values one after another.
            sizes = [len(heads) * width for heads in (ops.heads, ops.kv_heads, ops.kv_heads)]
            q, k, v = self.linear(h, "fused").split(sizes, -1)
        else:
            q = self.linear(h, "q")
            k = self.linear(h, "k")
            v = self.linear(h, "v")
        if self.spec.qk_norm_whole:
            q = self.norm_of_heads(q, "q_norm", self.spec.heads, ops)
            k = self.norm_of_heads(k, "k_norm", self.spec.kv_heads, ops)
        return (
            q.unflatten(-1, (-1, width)),
            k.unflatten(-1, (-1, width)),
            v.unflatten(-1, (-1, width)),
        )

    def hidden(self, h: Tensor) -> Tensor:
        """The activations [T, F] that `down` takes."""
        activation = self.spec.activation
        if self.spec.fused:
            gate, up = self.linear(h, "gate_up").chunk(2, -1)
        elif self.spec.gated:
            gate, up = self.linear(h, "gate"), self.linear(h, "up")
        else:
            return activate(self.linear(h, "up"), activation)
        return GatedActivation.apply(gate, up, activation, self.by)  # pyright: ignore

    def row_linear(self, x: Tensor, role: str, ops: Ops) -> Tensor:
        """As `linear`, for a weight whose input dim may be sliced over ranks: summed by `leave`,
        the bias added once, after it."""
        y = ops.leave(self.linear(x, role, bias=False))
        bias = getattr(self, role + "_bias", None)
        return y if bias is None else y + bias

    def attention_half(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        """The residual stream after attention to the block's window."""
        window = self.spec.window(self.unit)
        return self.out(x_TD, ops.attend(*self.qkv(x_TD, micro, ops), micro, window), ops)

    def forward(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return self.mlp(self.attention_half(x_TD, micro, ops), ops)

    # Primitives

    def rotate(self, x_TNH: Tensor, micro: MicroBatch) -> Tensor:
        rope = self.spec.rope_of(self.unit)
        assert rope is not None
        cos, sin = micro.rotary[rope]
        return Rotate.apply(x_TNH, cos, sin, self.by)  # pyright: ignore[reportReturnType]

    def norm_of_heads(self, x: Tensor, role: str, heads: int, ops: Ops) -> Tensor:
        """x [T, N H] normalized over all heads together, some of which other ranks hold."""
        by = sliced_norm(heads * self.spec.head_width, ops.all_sum)
        return RmsNorm.apply(x, getattr(self, role), self.spec.norm_eps, by)  # pyright: ignore


class Head(Unit):
    """The residual stream to the sum of the target tokens' losses."""

    def logits(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Logits [T, V_i] of this rank's slice of the vocabulary."""
        h_TD = ops.enter(scaled(self.norm_of(x_TD, "norm"), 1.0 / self.spec.logit_divisor))
        logits = self.linear(h_TD, "embed" if self.spec.tied else "head")
        return SoftCap.apply(logits, self.spec.logit_cap) if self.spec.logit_cap else logits  # pyright: ignore

    def forward(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return self.loss(x_TD, micro.labels_T, ops)

    def loss(self, x_TD: Tensor, labels_T: Tensor, ops: Ops) -> Tensor:
        """Of some of the tokens."""
        return ops.loss(self.logits(x_TD, ops), labels_T, self.by)


def build_unit(
    spec: ModelSpec, unit: int, by: Elementwise = WRITTEN_OUT, float8: bool = False
) -> Unit:
    """Unit 0 is the embedding, units 1..L the blocks, unit L+1 the head; weights on the meta
    device. `float8`: whether matmuls of a block take factors of eight bits."""
    if 0 < unit <= spec.layers:
        return Block(spec, unit, by, float8)
    return (Head if unit else Embed)(spec, unit, by)


class Decoder(nn.Module):
    """The whole model in one process: the reference that every layout is compared with."""

    def __init__(self, spec: ModelSpec, float8: bool = False):
        super().__init__()
        self.spec = spec
        self.units = nn.ModuleList(
            build_unit(spec, unit, float8=float8) for unit in range(spec.units)
        )

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the order of the parameter table."""
        weights = {p.name: getattr(module, p.role) for module in self.units for p in module.table}  # pyright: ignore
        return {p.name: weights[p.name] for p in self.spec.params}

    def load(self, tensors: Mapping[str, Tensor]) -> "Decoder":
        """Take `tensors` (by canonical name) as the weights; a tied head shares the embedding's.
        What is a Parameter is taken itself."""
        parameters = {}
        for name, x in tensors.items():
            if not isinstance(x, nn.Parameter):
                x = nn.Parameter(x, not self.spec.by_name[name].frozen)
            parameters[name] = x
        for module in self.units:
            for p in module.table:  # pyright: ignore
                setattr(module, p.role, parameters[p.name])
        return self

    def forward(self, micro: MicroBatch, ops: Ops) -> Tensor:
        """The sum of the target tokens' losses. Every unit is called: a wrapper such as FSDP hangs
        on its call."""
        x = None
        for unit in self.units:
            x = unit(x, micro, ops)
        assert x is not None
        return x
