"""Model families: a Hugging Face `config.json` to a ModelSpec and back, and the presets.

Every key of a config is read, or known to leave the function of the weights alone, or refused: nothing is skipped silently. Keys
that are absent mean what transformers takes them to mean.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from longshift.errors import UsageError, did_you_mean
from longshift.spec.model import ModelSpec, Rope

ARCHITECTURE: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_ACTIVATION = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_LLAMA_NAME = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_GPT2_NAME = {"silu": "silu", "gelu_tanh": "gelu_new"}

# Bookkeeping, text generation and classification: nothing that a forward pass to logits reads.
# fmt: off
_NOT_THE_FUNCTION = frozenset((
    "_name_or_path", "_commit_hash", "_attn_implementation", "attn_implementation", "transformers_version", "torch_dtype", "dtype",
    "use_cache", "use_bfloat16", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "tokenizer_class",
    "decoder_start_token_id", "prefix", "pretraining_tp", "n_ctx", "reorder_and_upcast_attn", "gradient_checkpointing",
    "torchscript", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "finetuning_task",
    "problem_type", "task_specific_params", "id2label", "label2id", "num_labels", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
))
# fmt: on


def read_spec(folder: Path) -> ModelSpec:
    """The model of a Hugging Face folder, from its `config.json`. Raises UsageError."""
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text("utf-8"))
    except OSError:
        raise UsageError(f"{folder} holds no config.json; a model path is a Hugging Face folder on this machine") from None
    except ValueError as fault:
        raise UsageError(f"{file} is not JSON: {fault}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file} must hold a JSON object")
    return from_hugging_face(found, str(file))


def from_hugging_face(config: Mapping[str, Any], file: str = "config.json") -> ModelSpec:
    """Read the contents of a `config.json`. Raises UsageError that lists every key that is missing, wrong or not understood.

    Dropout that a config asks for is not applied here; a UserWarning says so.
    """
    family = str(config.get("model_type"))
    if family not in ARCHITECTURE:
        hint = did_you_mean(family, ARCHITECTURE, otherwise="supported")
        raise UsageError(f"{file}: model_type {family!r} is not a supported model family{hint}")
    reader = _Reader(config)
    reader.known |= {"model_type", "architectures"}
    expected = (ARCHITECTURE[family], ARCHITECTURE[family].replace("ForCausalLM", "Model").replace("LMHeadModel", "Model"))
    for name in config.get("architectures") or ():
        if name not in expected:
            reader.fault("architectures", name, f"supported for {family}: {' and '.join(expected)}")
    values = _gpt2(reader) if family == "gpt2" else _llama_like(reader, family)
    reader.refuse_the_rest()
    if reader.faults:
        raise UsageError(f"{file}:\n  " + "\n  ".join(reader.faults))
    if reader.dropout:
        asked = ", ".join(f"{key} {value}" for key, value in reader.dropout.items())
        warnings.warn(f"{file} asks for dropout ({asked}); training here applies none", stacklevel=2)
    return ModelSpec(family=family, **values)


def to_hugging_face(spec: ModelSpec) -> dict[str, Any]:
    """The contents of a `config.json` that `from_hugging_face` reads back as `spec`. Raises UsageError where the family has no
    words for one of the spec's fields.

    Rotary fields use the keys of transformers 4, which version 5 and other readers of such folders understand too.
    """
    config = {
        "architectures": [ARCHITECTURE[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        **(_gpt2_keys(spec) if spec.family == "gpt2" else _llama_like_keys(spec)),
    }
    back = from_hugging_face(config)
    lost = [f.name for f in fields(spec) if getattr(spec, f.name) != getattr(back, f.name)]
    if lost:
        what = ", ".join(f"{name}={getattr(spec, name)!r} (would become {getattr(back, name)!r})" for name in lost)
        raise UsageError(f"a {spec.family} config.json cannot say {what}")
    return config


def preset(name: str) -> ModelSpec:
    """A model by name. Raises UsageError with the nearest name."""
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} does not exist{did_you_mean(name, PRESETS)}")
    return PRESETS[name]


class _Reader:
    """Takes typed values out of a config (mutable: it gathers what was asked for and what is wrong). A value that is refused is
    replaced by a harmless one, so that all faults are found and raised together."""

    def __init__(self, config: Mapping[str, Any], where: str = ""):
        self.config, self.where = config, where
        self.known: set[str] = set()
        self.faults: list[str] = []
        self.dropout: dict[str, float] = {}

    def fault(self, key: str, value: object, why: str) -> None:
        self.faults.append(f"{self.where}{key} = {value!r}: {why}")

    def value(self, key: str, default: Any, good: Any, why: str) -> Any:
        """`config[key]` if `good(value)`; absent or null means `default`."""
        self.known.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if not good(value):
            self.fault(key, value, why)
            return default
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return self._positive(key, default, (int,), "must be a positive whole number")

    def number(self, key: str, default: float | None = None) -> float:
        return self._positive(key, default, (int, float), "must be a positive number")

    def _positive(self, key: str, default: Any, kinds: tuple[type, ...], why: str) -> Any:
        """Required where there is no default."""
        if default is None and self.config.get(key) is None:
            self.fault(key, None, "is required")
        return self.value(key, default or 1, lambda v: type(v) in kinds and v > 0, why)

    def flag(self, key: str, default: bool) -> bool:
        return self.value(key, default, lambda v: isinstance(v, bool), "must be true or false")

    def only(self, key: str, supported: Any) -> None:
        """A key of which one value is supported, which is also what its absence means."""
        self.value(key, supported, lambda v: v == supported, f"supported: {supported!r}")

    def activation(self, key: str, default: str) -> str:
        return _ACTIVATION[self.value(key, default, lambda v: v in _ACTIVATION, f"supported: {', '.join(_ACTIVATION)}")]

    def no_dropout(self, key: str, default: float = 0.0) -> None:
        rate = self.value(key, default, lambda v: type(v) in (int, float), "must be a number")
        if rate:
            self.dropout[key] = rate

    def refuse_the_rest(self) -> None:
        for key in sorted(self.config.keys() - self.known - _NOT_THE_FUNCTION):
            if self.config[key] is not None:
                why = "is not understood; if it does not change what the model computes, delete it from config.json"
                self.fault(key, self.config[key], why)


def _llama_like(read: _Reader, family: str) -> dict[str, Any]:
    width, layers, heads = read.size("hidden_size"), read.size("num_hidden_layers"), read.size("num_attention_heads")
    head_width = read.size("head_dim", 128 if family == "qwen3" else width // heads or 1)
    absent = heads if "num_key_value_heads" in read.config else {"llama": heads, "mistral": 8}.get(family, 32)
    kv_heads = read.size("num_key_value_heads", absent)
    if read.config.get("head_dim") is None and family != "qwen3" and width % heads:
        read.fault("hidden_size", width, f"does not divide into {heads} heads")
    if heads % kv_heads:
        read.fault("num_attention_heads", heads, f"does not divide into {kv_heads} key/value heads")
    if head_width % 2:
        read.fault("head_dim", head_width, "rotary embeddings need an even head width")
    bias = read.flag("attention_bias", False) if family in ("llama", "qwen3") else False
    read.no_dropout("attention_dropout")
    return {
        "vocab": read.size("vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": head_width,
        "ffn": read.size("intermediate_size"),
        "max_positions": read.size("max_position_embeddings"),
        "tied": read.flag("tie_word_embeddings", False),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "activation": read.activation("hidden_act", "silu"),
        "qkv_bias": bias or family == "qwen2",
        "out_bias": bias,
        "mlp_bias": read.flag("mlp_bias", False) if family == "llama" else False,
        "qk_norm": family == "qwen3",
        "rope": _rope(read),
        "sliding_window": _window(read, family, layers),
        "init_std": read.number("initializer_range", 0.02),
    }


def _rope(read: _Reader) -> Rope:
    """Keys of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)."""
    read.known |= {"rope_parameters", "rope_scaling"}
    given = {key: read.config[key] for key in ("rope_parameters", "rope_scaling") if read.config.get(key)}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            read.fault(key, value, "must be a mapping")
            return Rope()
    if len(given) == 2:
        read.fault("rope_scaling", given["rope_scaling"], "given twice: rope_parameters says it too; keep one")
    key, found = next(iter(given.items()), ("rope_parameters", {}))
    inner = _Reader(found, f"{key}.")
    kinds = ("default", "linear", "llama3")
    names = [name for name in ("rope_type", "type") if found.get(name) is not None] or ["rope_type"]
    asked = [inner.value(name, "default", lambda v: v in kinds, f"supported: {', '.join(kinds)}") for name in names]
    if inner.faults:
        read.faults += inner.faults
        return Rope()
    if len(set(asked)) > 1:
        inner.fault("type", asked[1], f"but rope_type says {asked[0]!r}")
    outer = read.number("rope_theta", 10000.0)
    theta = inner.number("rope_theta", outer)
    if theta != outer and read.config.get("rope_theta") is not None:
        inner.fault("rope_theta", theta, f"but rope_theta says {outer!r}")
    scaling = _scaling(inner, asked[0])
    inner.only("partial_rotary_factor", 1.0)
    read.only("partial_rotary_factor", 1.0)
    inner.refuse_the_rest()
    read.faults += inner.faults
    return Rope(theta=float(theta), **scaling)


def _scaling(inner: _Reader, kind: str) -> dict[str, Any]:
    if kind == "default":
        return {}
    if kind == "linear":
        return {"scaling": kind, "factor": float(inner.number("factor"))}
    names = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {name: float(inner.number(name)) for name in names}
    positions = inner.size("original_max_position_embeddings")
    if not inner.faults and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        inner.fault("high_freq_factor", numbers["high_freq_factor"], f"must exceed low_freq_factor {numbers['low_freq_factor']}")
    return {"scaling": kind, **numbers, "original_positions": positions}


def _window(read: _Reader, family: str, layers: int) -> int | None:
    """The sliding window of all blocks, or None. Qwen may mix blocks with and without one: refused."""
    if family == "llama":
        return None
    window = read.size("sliding_window", 4096) if read.config.get("sliding_window", 4096) is not None else None
    if family == "mistral":
        return window
    use = read.flag("use_sliding_window", False) and window is not None
    first = read.value("max_window_layers", 28, lambda v: type(v) is int and v >= 0, "must be a whole number")
    implied = ["sliding_attention" if use and block >= first else "full_attention" for block in range(layers)]
    kinds = read.value("layer_types", implied, lambda v: isinstance(v, list) and len(v) == layers, f"must name {layers} layers")
    if set(kinds) - {"sliding_attention", "full_attention"}:
        read.fault("layer_types", kinds, "supported: all sliding_attention, or all full_attention")
    elif len(set(kinds)) > 1:
        windowed = kinds.count("sliding_attention")
        read.fault("max_window_layers", first, f"{windowed} of {layers} layers get a sliding window; supported: all or none")
    elif kinds[0] == "sliding_attention" and not use:
        read.fault("use_sliding_window", use, "but layer_types says sliding_attention")
    return window if "sliding_attention" in kinds else None


def _gpt2(read: _Reader) -> dict[str, Any]:
    width, heads = read.size("n_embd"), read.size("n_head")
    if width % heads:
        read.fault("n_embd", width, f"does not divide into {heads} heads")
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        read.no_dropout(key, 0.1)
    read.only("scale_attn_weights", True)
    read.only("scale_attn_by_inverse_layer_idx", False)
    read.only("add_cross_attention", False)
    return {
        "vocab": read.size("vocab_size"),
        "width": width,
        "layers": read.size("n_layer"),
        "heads": heads,
        "kv_heads": heads,
        "head_width": width // heads,
        "ffn": read.size("n_inner", 4 * width),
        "max_positions": read.size("n_positions"),
        "tied": read.flag("tie_word_embeddings", True),
        "norm": "layer",
        "norm_eps": read.number("layer_norm_epsilon", 1e-5),
        "activation": read.activation("activation_function", "gelu_new"),
        **_GPT2_SHAPE,
        "init_std": read.number("initializer_range", 0.02),
    }


_GPT2_SHAPE: Mapping[str, Any] = {
    "gated": False,
    "fused_qkv": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rope": None,
    "learned_positions": True,
}


def _llama_like_keys(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.rope or Rope()
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor} if rope.scaling else {}
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling["original_max_position_embeddings"] = rope.original_positions
    config = {
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_width,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": _LLAMA_NAME[spec.activation],
        "attention_dropout": 0.0,
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
    }
    if spec.family in ("llama", "qwen3"):
        config["attention_bias"] = spec.qkv_bias
    if spec.family == "llama":
        config["mlp_bias"] = spec.mlp_bias
    if spec.family == "mistral":
        config["sliding_window"] = spec.sliding_window
    if spec.family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = spec.sliding_window is not None
        config |= {"sliding_window": spec.sliding_window, "max_window_layers": 0} if spec.sliding_window else {}
    return config


def _gpt2_keys(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_embd": spec.width,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _GPT2_NAME[spec.activation],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _decoder(family: str, vocab: int, width: int, layers: int, heads: int, kv: int, ffn: int, positions: int, **more: Any) -> ModelSpec:
    head_width = more.pop("head_width", width // heads)
    return ModelSpec(family, vocab, width, layers, heads, kv, head_width, ffn, positions, **more)


_LLAMA3: Mapping[str, Any] = {"norm_eps": 1e-5, "rope": Rope(theta=500000.0)}
_LLAMA32: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "rope": Rope(500000.0, "llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192),
}
_QWEN3: Mapping[str, Any] = {"qk_norm": True, "rope": Rope(theta=1000000.0)}
_GPT2: Mapping[str, Any] = {**_GPT2_SHAPE, "tied": True, "norm": "layer", "norm_eps": 1e-5, "activation": "gelu_tanh"}

PRESETS: Mapping[str, ModelSpec] = {
    # family, vocabulary, width, blocks, query heads, key/value heads, feed-forward width, positions
    "tiny-llama": _decoder("llama", 4096, 128, 4, 4, 2, 352, 32768),
    "tiny-qwen3": _decoder("qwen3", 4096, 128, 4, 4, 2, 352, 32768, tied=True, **_QWEN3),
    "tiny-gpt2": _decoder("gpt2", 4096, 128, 4, 4, 4, 512, 4096, **_GPT2),
    "small-llama": _decoder("llama", 4096, 512, 8, 8, 4, 1408, 131072, **_LLAMA3),
    "gpt2": _decoder("gpt2", 50257, 768, 12, 12, 12, 3072, 1024, **_GPT2),
    "llama-2-7b": _decoder("llama", 32000, 4096, 32, 32, 32, 11008, 4096, norm_eps=1e-5),
    "llama-2-13b": _decoder("llama", 32000, 5120, 40, 40, 40, 13824, 4096, norm_eps=1e-5),
    "llama-3-8b": _decoder("llama", 128256, 4096, 32, 32, 8, 14336, 8192, **_LLAMA3),
    "llama-3-70b": _decoder("llama", 128256, 8192, 80, 64, 8, 28672, 8192, **_LLAMA3),
    "llama-3.2-1b": _decoder("llama", 128256, 2048, 16, 32, 8, 8192, 131072, tied=True, **_LLAMA32),
    "mistral-7b-v0.3": _decoder("mistral", 32768, 4096, 32, 32, 8, 14336, 32768, norm_eps=1e-5, rope=Rope(theta=1000000.0)),
    "qwen2.5-7b": _decoder("qwen2", 152064, 3584, 28, 28, 4, 18944, 131072, qkv_bias=True, rope=Rope(theta=1000000.0)),
    "qwen3-0.6b": _decoder("qwen3", 151936, 1024, 28, 16, 8, 3072, 40960, tied=True, head_width=128, **_QWEN3),
    "qwen3-8b": _decoder("qwen3", 151936, 4096, 36, 32, 8, 12288, 40960, **_QWEN3),
}
