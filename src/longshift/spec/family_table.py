"""The table of model families, in the words of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longshift.spec.positions import WindowKind

# By field of ModelSpec, the key that says it.
LLAMA_KEYS: Mapping[str, str] = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "init_std": "initializer_range",
}
GEMMA_KEYS: Mapping[str, str] = {**LLAMA_KEYS, "activation": "hidden_activation"}
EXPERT_KEYS: Mapping[str, str] = {**LLAMA_KEYS, "ffn": "moe_intermediate_size"}
GPT2_KEYS: Mapping[str, str] = {
    **LLAMA_KEYS,
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "ffn": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
}


@dataclass(frozen=True)
class Family:
    """A model family in the words of transformers: its class, fields of ModelSpec that all its
    models have, and its `keys`, by the field that they say.

    What absent keys mean: `kv_heads` (None: as many as query heads), `head_width` (None: heads fill
    the model's width), `tied`, `norm_eps`, `activation`, `theta`, `window_size`, `nope_every`.
    Which keys it has: `biases`, of `attention_bias` and `mlp_bias`; `window`, those of a sliding
    window; `scales`, those of _SCALES; `partial_rotary`, `partial_rotary_factor`. With `nope_every`
    it may have blocks without rotary embedding. `gemma`: embeddings are scaled by the root of the
    width, scores by that of `query_pre_attn_scalar`, and blocks with a window turn by
    `rope_local_base_freq`. `window_every`: of so many blocks the last has no window; `caps`: what
    absent soft caps of scores and of logits mean, for a family that has them. `experts`: the key
    of their number, and what absent numbers of experts and of those of a token mean.
    """

    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    kv_heads: int | None = None
    head_width: int | None = None
    tied: bool = False
    norm_eps: float = 1e-6
    activation: str = "silu"
    theta: float = 10000.0
    biases: tuple[str, ...] = ()
    window: WindowKind | None = None
    window_size: int | None = 4096
    scales: bool = False
    partial_rotary: bool = False
    nope_every: int = 0
    gemma: bool = False
    window_every: int = 6
    caps: tuple[float, float] | None = None
    experts: tuple[str, int, int] | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", biases=("attention_bias", "mlp_bias")),
    "mistral": Family("MistralForCausalLM", kv_heads=8, window="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, kv_heads=32, window="some"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        kv_heads=32,
        head_width=128,
        biases=("attention_bias",),
        window="some",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"qk_norm_whole": True, "norm_place": "after"},
        norm_eps=1e-5,
        biases=("attention_bias",),
    ),
    "granite": Family("GraniteForCausalLM", biases=("attention_bias", "mlp_bias"), scales=True),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        kv_heads=4,
        tied=True,
        theta=2e6,
        biases=("attention_bias", "mlp_bias"),
        nope_every=4,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"fused": True},
        norm_eps=1e-5,
        window="all",
        window_size=None,
        partial_rotary=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"norm_place": "both", "norm_less_one": True},
        GEMMA_KEYS,
        kv_heads=4,
        head_width=256,
        tied=True,
        biases=("attention_bias",),
        window="pattern",
        window_every=2,
        gemma=True,
        activation="gelu_pytorch_tanh",
        caps=(50.0, 30.0),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"qk_norm": True, "norm_place": "both", "norm_less_one": True},
        GEMMA_KEYS,
        kv_heads=4,
        head_width=256,
        tied=True,
        theta=1e6,
        biases=("attention_bias",),
        window="pattern",
        gemma=True,
        activation="gelu_pytorch_tanh",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        kv_heads=8,
        norm_eps=1e-5,
        theta=1e6,
        window="all",
        window_size=None,
        experts=("num_local_experts", 8, 2),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        EXPERT_KEYS,
        kv_heads=4,
        biases=("attention_bias",),
        experts=("num_experts", 128, 8),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {"qk_norm_whole": True},
        norm_eps=1e-5,
        biases=("attention_bias",),
        experts=("num_experts", 64, 8),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "norm": "layer",
            "gated": False,
            "fused_qkv": True,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "rope": None,
            "learned_positions": True,
        },
        GPT2_KEYS,
        tied=True,
        norm_eps=1e-5,
        activation="gelu_new",
    ),
}
