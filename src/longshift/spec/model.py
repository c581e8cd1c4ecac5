"""ModelSpec: one decoder-only transformer in numbers, and its parameter table.

The table is the single description of the weights: canonical (Hugging Face) name, shape, the unit
of the model that uses it, and how tensor parallelism cuts it. Placement, the runtime model,
checkpoints and the simulator all read it.

    unit 0          embeddings
    unit 1 .. L     the blocks
    unit L+1        final norm and output head

Letters: T tokens, D model width, N query heads, K key/value heads, H head width, F feed-forward
width (of one expert where there are any), V vocabulary, E experts."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from longshift.spec.adapters import Lora, with_adapters
from longshift.spec.param import Param, Part


def attended(length: Any, window: int | None) -> Any:
    """Pairs of a token of a document and one of the last `window` tokens that it attends to; half
    of the length's square for None."""
    # The first tokens see all before them, a triangle; the others a whole window each.
    reach = length if window is None else np.minimum(length, window)
    return reach * reach / 2.0 + (length - reach) * reach


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angles position * theta^(-2i/R) of channel pair i. What stretches it to
    longer sequences, by `factor` over `original_positions` where it says so:

    linear    all angles divided by the factor (arXiv 2306.15595)
    llama3    slow channels divided by the factor, fast ones kept, a blend of the two between (arXiv
              2407.21783); `low_freq_factor`, `high_freq_factor`: turns over the original positions
              that bound the blend
    yarn      as llama3, bounded by channels that turn `beta_slow` and `beta_fast` times, at whole
              numbers of channels where `truncate`; cos and sin times `magnitude`, which makes up
              for the entropy of more scores (arXiv 2309.00071)
    """

    theta: float = 10000.0
    scaling: Literal["linear", "llama3", "yarn"] | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True


CROSS_ENTROPY = "cross-entropy"
# Fewer make small matmuls, and the head's weights and the sum of their gradients are read once for
# each block.
LOSS_ROWS = 1024


@dataclass(frozen=True)
class ModelSpec:
    """A decoder in numbers. Two specs are the same function exactly when they are equal."""

    family: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    max_positions: int
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu_tanh"] = "silu"
    gated: bool = True
    experts: int = 0  # feed-forward networks of a block that a router chooses among; 0: no router
    top_k: int = 0  # experts of a token
    norm_top_k: bool = True  # whether the weights of a token's experts add up to 1
    fused_qkv: bool = False  # GPT-2: one matrix, stored input-major
    fused: bool = False  # Phi-3: queries, keys and values in one matrix, gate and up in another
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of each head, before the rotation
    qk_norm_whole: bool = False  # OLMo 2: of all heads together
    # Attention and MLP; OLMo 2 normalizes what they give, Gemma both.
    norm_place: Literal["before", "after", "both"] = "before"
    norm_less_one: bool = False  # Gemma: weights of norms are stored less one
    rope: Rope | None = Rope()
    window_rope: Rope | None = None  # of blocks with a sliding window, where it is another
    # Channels of a head that turn with the position, the first ones; all where None.
    rotary: int | None = None
    nope_every: int = 0  # SmolLM3: block n, 2n, ... has no rotary embedding
    learned_positions: bool = False
    sliding_window: int | None = None  # tokens that a token attends to, its own included
    # Blocks, by unit, that have no window although the others do.
    full_blocks: tuple[int, ...] = ()
    # What scores are multiplied with; 1 / sqrt(head width) where None.
    attention_scale: float | None = None
    score_cap: float | None = None  # Gemma 2: scores are cap * tanh(score / cap)
    logit_cap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    logit_divisor: float = 1.0
    init_std: float = 0.02
    lora: Lora | None = None
    freeze: tuple[str, ...] = ()  # patterns of names of weights that are not trained
    # Rows of a rank that have logits at one time, at the least; not part of the function.
    loss_rows: int = LOSS_ROWS
    loss: str = CROSS_ENTROPY  # or "package.module:name" of a function that gives each token's loss

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads do not divide into {self.kv_heads} key/value heads"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"a token has {self.top_k} of {self.experts} experts")

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The parameter table in canonical order."""
        table = _parameter_table(self)
        return tuple(with_adapters(table, self.layers, self.lora, self.freeze, self.fused_qkv))

    @property
    def base(self) -> "ModelSpec":
        """The model without adapters, all of it trained."""
        return replace(self, lora=None, freeze=())

    @cached_property
    def by_name(self) -> dict[str, Param]:
        return {p.name: p for p in self.params}

    @property
    def units(self) -> int:
        return self.layers + 2

    @cached_property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        return sum(p.elements for p in self.params)

    @cached_property
    def learned(self) -> int:
        """Number of weights that are trained."""
        return sum(p.elements for p in self.params if not p.frozen)

    @property
    def rotary_width(self) -> int:
        """Channels of a head that turn with the position."""
        return self.rotary or self.head_width

    @property
    def score_scale(self) -> float:
        """What scores of attention are multiplied with."""
        return self.head_width**-0.5 if self.attention_scale is None else self.attention_scale

    def rope_of(self, block: int) -> Rope | None:
        """The rotary embedding of the block of this unit."""
        if self.nope_every and block % self.nope_every == 0:
            return None
        return self.window_rope if self.window_rope and self.window(block) else self.rope

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings that its blocks have."""
        ropes = (self.rope_of(block) for block in range(1, self.layers + 1))
        return tuple(dict.fromkeys(rope for rope in ropes if rope))

    def window(self, block: int) -> int | None:
        """How many tokens a token of this block attends to, its own included;
        None: all of its document."""
        return None if block in self.full_blocks else self.sliding_window

    def like(self, block: int) -> int:
        """The first block that computes as this one does, so that one is told for all."""
        return self._alike[block - 1] if 0 < block <= self.layers else block

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """By block, from the first on, the first one that computes as it does."""
        # What is frozen changes which gradients a block has, so it makes another kind of block.
        first_of_kind: dict[tuple, int] = {}
        alike = []
        for block in range(1, self.layers + 1):
            params = self.of_unit(block) if self.freeze else ()
            frozen_roles = tuple(p.role for p in params if p.frozen)
            kind = self.rope_of(block), self.window(block), frozen_roles
            alike.append(first_of_kind.setdefault(kind, block))
        return tuple(alike)

    @cached_property
    def windows(self) -> Mapping[int | None, float]:
        """The windows of its blocks, and the share of the blocks that has each."""
        counts = Counter(self.window(block) for block in range(1, self.layers + 1))
        return {window: count / self.layers for window, count in counts.items()}

    def attended(self, length: Any) -> Any:
        """Pairs of a token of a document and one that it attends to, half of them on the diagonal,
        the mean of all blocks: for a number or an array of lengths. Half the square of the length
        where there is no window."""
        return sum(share * attended(length, window) for window, share in self.windows.items())

    @property
    def keys_stay_whole(self) -> bool:
        """Whether no two tensor-parallel ranks may hold the same key/value head: a norm over all of
        them would count it twice."""
        return self.qk_norm_whole and self.kv_heads < self.heads

    def of_unit(self, unit: int) -> tuple[Param, ...]:
        """The weights that a unit computes with: its own and, for a tied head, the embedding."""
        return tuple(p for p in self.params if unit in (p.unit, p.also_unit))

    @cached_property
    def multiplied(self) -> tuple[frozenset[str], ...]:
        """By unit, the names of the trained weights that it multiplies with. Embeddings are looked
        up; adapters have gradients of their own."""
        names: list[set[str]] = [set() for _ in range(self.units)]
        for p in self.params:
            is_adapter = p.role.endswith(("_lora_a", "_lora_b"))
            # Gradients of experts are formed for all of them at once.
            if len(p.shape) != 2 or p.frozen or is_adapter or p.experts:
                continue
            for unit in (p.unit, p.also_unit):
                if unit:  # unit 0 looks up
                    names[unit].add(p.name)
        return tuple(map(frozenset, names))

    def flops_per_token(self, context: float) -> float:
        """Model FLOP of forward and backward for a token that attends to `context` others on
        average (causal: half its document). 6 per matmul weight that is trained, 4 per one that is
        not, of experts those of a token; 12 * N * H per attended token and layer. Look-ups and
        recomputation are not counted."""
        return self._matmul_flops + 12.0 * self.layers * self.heads * self.head_width * context

    @cached_property
    def _matmul_flops(self) -> float:
        """FLOP of forward and backward for a token through the weights."""
        flops = 0.0
        for p in self.params:
            # A tied embedding is multiplied with by the head.
            if p.also_unit is not None or p.role not in ("embed", "positions"):
                flops += self.token_elements(p) * (4.0 if p.frozen else 6.0)
        return flops

    @cached_property
    def active(self) -> int:
        """Number of weights that a token passes through."""
        return sum(map(self.token_elements, self.params))

    def token_elements(self, p: Param) -> int:
        """Elements of a weight that a token passes through: of experts those of its own."""
        return p.elements // p.experts * self.top_k if p.experts else p.elements


# By role, the names of modules as published checkpoints have them.
_LLAMA_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "block": "model.layers",
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "fused": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "norm": "model.norm",
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.gate_proj",
    "expert_up": "mlp.experts.up_proj",
    "expert_down": "mlp.experts.down_proj",
}
_MIXTRAL_NAMES: Mapping[str, str] = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.w1",
    "expert_up": "block_sparse_moe.experts.w3",
    "expert_down": "block_sparse_moe.experts.w2",
}
_GPT2_NAMES: Mapping[str, str] = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "block": "transformer.h",
    "norm1": "ln_1",
    "fused": "attn.c_attn",
    "o": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "norm": "transformer.ln_f",
}
_NORM_NAMES: Mapping[str, Mapping[str, str]] = {  # of blocks, by `norm_place`
    "before": {"norm2": "post_attention_layernorm"},
    "after": {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"},
    "both": {
        "post1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "post2": "post_feedforward_layernorm",
    },
}


def _parameter_table(spec: ModelSpec) -> Iterator[Param]:
    """All weights in canonical order, without adapters."""
    names = _GPT2_NAMES if spec.fused_qkv else {**_LLAMA_NAMES, **_NORM_NAMES[spec.norm_place]}
    if spec.family == "mixtral":
        names = {**names, **_MIXTRAL_NAMES}
    head_unit = spec.layers + 1
    shape = spec.vocab, spec.width
    rows = (Part(spec.vocab),)

    # 1. Embeddings.
    yield Param(
        f"{names['embed']}.weight",
        "embed",
        shape,
        unit=0,
        dim=0,
        parts=rows,
        also_unit=head_unit if spec.tied else None,
    )
    if spec.learned_positions:
        yield Param(
            f"{names['positions']}.weight", "positions", (spec.max_positions, spec.width), unit=0
        )

    # 2. Blocks, which have the same weights under other names.
    block_params = tuple(_block_table(spec, names))
    for unit in range(1, spec.layers + 1):
        for param in block_params:
            yield replace(param, name=f"{names['block']}.{unit - 1}.{param.name}", unit=unit)

    # 3. Final norm and output head.
    for param in _norm(spec, names, "norm", spec.width):
        yield replace(param, unit=head_unit)
    if not spec.tied:
        yield Param("lm_head.weight", "head", shape, head_unit, dim=0, parts=rows)


def _block_table(spec: ModelSpec, names: Mapping[str, str]) -> Iterator[Param]:
    """The weights of a block, by their names in it."""
    query = (Part(spec.heads, spec.head_width),)
    keys = (Part(spec.kv_heads, spec.head_width, heads=spec.heads),)
    ffn = (Part(spec.ffn),)

    # 1. Attention.
    if spec.norm_place != "after":
        yield from _norm(spec, names, "norm1", spec.width)
    if spec.fused_qkv or spec.fused:
        yield from _linear(spec, names, "fused", query + keys + keys, spec.qkv_bias)
    else:
        for role, parts in (("q", query), ("k", keys), ("v", keys)):
            yield from _linear(spec, names, role, parts, spec.qkv_bias)
    for role, parts in (("q_norm", query), ("k_norm", keys)):
        if spec.qk_norm:
            yield from _norm(spec, names, role, spec.head_width)
        if spec.qk_norm_whole:
            for param in _norm(spec, names, role, parts[0].units * spec.head_width):
                yield replace(param, dim=0, parts=parts)
    yield from _linear(spec, names, "o", query, spec.out_bias, from_parts=True)
    if spec.norm_place != "before":
        yield from _norm(spec, names, "post1", spec.width)

    # 2. MLP.
    if spec.norm_place != "after":
        yield from _norm(spec, names, "norm2", spec.width)
    if spec.experts:
        yield from _experts(spec, names)
    else:
        if spec.fused:
            yield from _linear(spec, names, "gate_up", ffn + ffn, spec.mlp_bias)
        else:
            for role in ("gate", "up") if spec.gated else ("up",):
                yield from _linear(spec, names, role, ffn, spec.mlp_bias)
        yield from _linear(spec, names, "down", ffn, spec.mlp_bias, from_parts=True)
    if spec.norm_place != "before":
        yield from _norm(spec, names, "post2", spec.width)


def _experts(spec: ModelSpec, names: Mapping[str, str]) -> Iterator[Param]:
    """The router and the experts of a block. Tensor parallelism does not cut them: each rank sends
    its own tokens through them."""
    yield Param(f"{names['router']}.weight", "router", (spec.experts, spec.width), unit=0)
    for role in ("expert_gate", "expert_up", "expert_down"):
        is_down = role == "expert_down"
        rows, columns = (spec.width, spec.ffn) if is_down else (spec.ffn, spec.width)
        yield Param(
            f"{names[role]}.weight",
            role,
            (spec.experts * rows, columns),
            unit=0,
            init="normal_out" if is_down else "normal",
            experts=spec.experts,
        )


def _norm(spec: ModelSpec, names: Mapping[str, str], role: str, size: int) -> Iterator[Param]:
    """The weights of a norm; `size`: of its weight."""
    init = "zeros" if spec.norm_less_one else "ones"
    yield Param(f"{names[role]}.weight", role, (size,), 0, decay=False, init=init)
    if spec.norm == "layer":
        yield Param(f"{names[role]}.bias", f"{role}_bias", (size,), 0, decay=False, init="zeros")


def _linear(
    spec: ModelSpec,
    names: Mapping[str, str],
    role: str,
    parts: tuple[Part, ...],
    has_bias: bool,
    from_parts: bool = False,
) -> Iterator[Param]:
    """A linear layer from the model's width to `parts`, which tensor parallelism cuts, or back
    `from_parts`. GPT-2 stores weights input-major ("Conv1D")."""
    size = sum(part.units * part.size for part in parts)
    # Whether the dim of `parts` is the first as it is stored.
    is_cut_first = from_parts == spec.fused_qkv
    shape = (size, spec.width) if is_cut_first else (spec.width, size)
    yield Param(
        f"{names[role]}.weight",
        role,
        shape,
        unit=0,
        dim=0 if is_cut_first else 1,
        parts=parts,
        init="normal_out" if from_parts else "normal",
    )
    if has_bias:
        bias = Param(
            f"{names[role]}.bias", f"{role}_bias", (spec.width,), unit=0, decay=False, init="zeros"
        )
        yield bias if from_parts else replace(bias, shape=(size,), dim=0, parts=parts)
