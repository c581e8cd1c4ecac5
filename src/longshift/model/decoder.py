"""The decoder: Llama, Mistral, Qwen and GPT-2 as one readable model that knows no rank.

A block has four seams, each callable on any run of tokens: `qkv`, `attend`, `out`, `mlp`. What a parallel layout changes goes through
`Ops`, whose methods here are those of one process:

    x ─ norm ─ enter ─ q,k,v ─ attend ─ o ─ leave ─ + ─ norm ─ enter ─ up ─ act ─ down ─ leave ─ + ─
        token shard │     all tokens        │ token shard     │        all tokens      │

Letters: T tokens, D model width, N query heads, K key/value heads, H head width, F feed-forward width, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longshift.model.attention import Attention, PackedAttention, match_heads
from longshift.model.kernels import FLASH, Kernel
from longshift.model.loss import CrossEntropySum, alone
from longshift.schedule.sequence import TokenOrder
from longshift.spec.model import ModelSpec, Rope


@dataclass(frozen=True)
class MicroBatch:
    """One pack as one rank sees it. T tokens are those between `enter` and `leave`; T' is this rank's share of the residual stream."""

    tokens_T: Tensor
    labels_T: Tensor
    positions: Tensor  # [T'] position of each token in its document
    rotary: tuple[Tensor, Tensor] | None  # cos, sin [T, 1, H]
    order: TokenOrder

    @property
    def tokens_here(self) -> int:
        """T'."""
        return len(self.positions)


class Ops:
    """What a layout changes, as it is for one process: nothing moves."""

    def __init__(self, spec: ModelSpec, kernel: Kernel = FLASH):
        self.spec, self.attention = spec, Attention(kernel, spec.head_width**-0.5)
        self.heads, self.kv_heads = range(spec.heads), range(spec.kv_heads)
        self.vocab_first = 0

    def enter(self, x: Tensor) -> Tensor:
        """From this rank's share of the tokens to all that its weights shall see."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Back to this rank's share, summed over the ranks that hold slices of the weight just used."""
        return x

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch) -> Tensor:
        """Attention of every document to itself: [T, N, H]."""
        q, k, v = self.to_heads(q_TNH, k_TKH, v_TKH)
        lengths = tuple(run.length for run in micro.order.runs(0))
        return self.to_tokens(PackedAttention.apply(q, k, v, lengths, self.attention))  # pyright: ignore[reportArgumentType]

    def to_heads(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention works on: the heads that this rank attends with, key/value heads such that they divide its query heads."""
        return q_TNH, *match_heads(k_TKH, v_TKH, self.heads, self.kv_heads, self.spec.heads // self.spec.kv_heads)

    def to_tokens(self, o_TNH: Tensor) -> Tensor:
        """Back from attention's heads to those of `q`."""
        return o_TNH

    def embed(self, weight_VD: Tensor, tokens_T: Tensor) -> Tensor:
        """Rows of the embedding, this rank's share of the tokens."""
        return F.embedding(tokens_T, weight_VD)

    def loss(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Sum of the cross-entropies of the target tokens."""
        return CrossEntropySum.apply(logits_TV, labels_T, 0, alone, alone)  # pyright: ignore[reportReturnType]


class Unit(nn.Module):
    """A piece of the model whose weights move together. Weights are registered by role; state decides what storage they have."""

    def __init__(self, spec: ModelSpec, unit: int):
        super().__init__()
        self.spec = spec
        self.table = spec.of_unit(unit)
        for p in self.table:
            self.register_parameter(p.role, nn.Parameter(torch.empty(p.shape, device="meta")))

    if TYPE_CHECKING:

        def __getattr__(self, role: str) -> Any: ...

    def linear(self, x: Tensor, role: str) -> Tensor:
        """x W^T + b; GPT-2 stores W input-major."""
        weight, bias = getattr(self, role), getattr(self, role + "_bias", None)
        return F.linear(x, weight.mT if self.spec.fused_qkv else weight, bias)

    def row_linear(self, x: Tensor, role: str, ops: Ops) -> Tensor:
        """As `linear`, for a weight whose input dim may be sliced over ranks: summed by `leave`, the bias added once, after it."""
        weight, bias = getattr(self, role), getattr(self, role + "_bias", None)
        y = ops.leave(F.linear(x, weight.mT if self.spec.fused_qkv else weight))
        return y if bias is None else y + bias

    def norm_of(self, x: Tensor, role: str) -> Tensor:
        if self.spec.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], getattr(self, role), getattr(self, role + "_bias"), self.spec.norm_eps)
        return rms_norm(x, getattr(self, role), self.spec.norm_eps)


class Embed(Unit):
    """Tokens to the residual stream."""

    def forward(self, x: None, micro: MicroBatch, ops: Ops) -> Tensor:
        x_TD = ops.embed(self.embed, micro.tokens_T)
        return x_TD + self.positions[micro.positions] if self.spec.learned_positions else x_TD


class Block(Unit):
    """One transformer block."""

    def qkv(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        h = ops.enter(self.norm_of(x_TD, "norm1"))
        width = self.spec.head_width
        if self.spec.fused_qkv:
            sizes = [len(heads) * width for heads in (ops.heads, ops.kv_heads, ops.kv_heads)]
            flat = self.linear(h, "fused").split(sizes, dim=-1)
        else:
            flat = [self.linear(h, role) for role in "qkv"]
        q, k, v = (t.unflatten(-1, (-1, width)) for t in flat)
        if self.spec.qk_norm:
            q, k = rms_norm(q, self.q_norm, self.spec.norm_eps), rms_norm(k, self.k_norm, self.spec.norm_eps)
        if micro.rotary is not None:
            q, k = rotate(q, *micro.rotary), rotate(k, *micro.rotary)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return ops.attend(q, k, v, micro)

    def out(self, x_TD: Tensor, o_TNH: Tensor, ops: Ops) -> Tensor:
        return x_TD + self.row_linear(o_TNH.flatten(1), "o", ops)

    def mlp(self, x_TD: Tensor, ops: Ops) -> Tensor:
        h = ops.enter(self.norm_of(x_TD, "norm2"))
        up = self.linear(h, "up")
        h = self.activation(self.linear(h, "gate")) * up if self.spec.gated else self.activation(up)
        return x_TD + self.row_linear(h, "down", ops)

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh") if self.spec.activation == "gelu_tanh" else F.silu(x)

    def attention_half(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return self.out(x_TD, self.attend(*self.qkv(x_TD, micro, ops), micro, ops), ops)

    def mlp_half(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return self.mlp(x_TD, ops)

    def forward(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return self.mlp_half(self.attention_half(x_TD, micro, ops), micro, ops)


class Head(Unit):
    """The residual stream to the sum of the target tokens' cross-entropies."""

    def logits(self, x_TD: Tensor, ops: Ops) -> Tensor:
        weight = self.embed if self.spec.tied else self.head
        return F.linear(ops.enter(self.norm_of(x_TD, "norm")), weight)

    def forward(self, x_TD: Tensor, micro: MicroBatch, ops: Ops) -> Tensor:
        return ops.loss(self.logits(x_TD, ops), micro.labels_T)


def build_unit(spec: ModelSpec, unit: int) -> Unit:
    """Unit 0 is the embedding, units 1..L the blocks, unit L+1 the head; weights on the meta device."""
    kind = Embed if unit == 0 else Head if unit == spec.layers + 1 else Block
    return kind(spec, unit)


class Decoder(nn.Module):
    """The whole model in one process: the reference that every layout is compared with."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.units = nn.ModuleList(build_unit(spec, unit) for unit in range(spec.units))

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the order of the parameter table."""
        found = {p.name: getattr(module, p.role) for module in self.units for p in module.table}  # pyright: ignore
        return {p.name: found[p.name] for p in self.spec.params}

    def load(self, tensors: dict[str, Tensor]) -> "Decoder":
        """Take `tensors` (by canonical name) as the weights; a tied head shares the embedding's."""
        shared = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
        for module in self.units:
            for p in module.table:  # pyright: ignore
                setattr(module, p.role, shared[p.name])
        return self

    def forward(self, micro: MicroBatch, ops: Ops) -> Tensor:
        x = None
        for unit in self.units:
            x = unit(x, micro, ops)
        assert x is not None
        return x

    def logits(self, micro: MicroBatch, ops: Ops) -> Tensor:
        x = None
        for unit in self.units[:-1]:
            x = unit(x, micro, ops)
        return self.units[-1].logits(x, ops)  # pyright: ignore


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * F.rms_norm(wide, x.shape[-1:], None, eps).to(x.dtype)


def rotary_table(rope: Rope, head_width: int, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, H]. Angles are formed in float32 whatever `dtype` is, as in the checkpoints this must agree with."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_width, 2, dtype=torch.int64).float() / head_width)
    if rope.scaling == "linear":
        frequency = frequency / rope.factor
    elif rope.scaling == "llama3":
        frequency = _llama3_frequencies(rope, frequency)
    angle = positions_T.float().unsqueeze(-1) * on_device(frequency, positions_T.device)
    angle = angle.cpu() if dtype == torch.float64 else angle  # cosines in float32 are a device's own, which float64 would show
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(1)
    cos, sin = (on_device(x.to(dtype), positions_T.device) for x in (angle.cos(), angle.sin()))
    return cos, sin


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """There. The host goes on meanwhile: memory of its own that is not pinned would make it wait for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.device.type == "cpu" else x.to(device)


def _llama3_frequencies(rope: Rope, frequency: Tensor) -> Tensor:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between."""
    wavelength = 2 * math.pi / frequency
    low, high = rope.original_positions / rope.low_freq_factor, rope.original_positions / rope.high_freq_factor
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - smooth) * frequency / rope.factor + smooth * frequency
    return torch.where(wavelength > low, frequency / rope.factor, torch.where(wavelength < high, frequency, blend))


def rotate(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention of the Hugging Face checkpoints."""
    first, second = x_TNH.chunk(2, dim=-1)
    return x_TNH * cos + torch.cat((-second, first), dim=-1) * sin
