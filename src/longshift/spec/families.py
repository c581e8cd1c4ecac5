"""Model families: a Hugging Face `config.json` to a ModelSpec and back, and the presets.

A family is an entry of `spec.family_table`. Keys that are absent from a config mean what
transformers takes them to mean. A preset is the config of `presets.json` under its name."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from longshift.errors import UsageError, did_you_mean, nearest, shown
from longshift.files import read_small
from longshift.other_tools import family_hint, preset_hint
from longshift.spec.config_json import MAX_BLOCKS, MAX_EXPERTS, ROUTER_LOSS, Reader
from longshift.spec.family_table import EXPERT_KEYS, FAMILIES, GPT2_KEYS, Family
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.positions import (
    read_nope_every,
    read_rope,
    read_rotary_width,
    read_window,
    read_window_rope,
    scaling_keys,
    window_keys,
)

MAX_BYTES = 1 << 20  # of a config.json: labels of a classifier are the longest that there is

_SCALES: Mapping[str, str] = {
    "embedding_multiplier": "embed_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def read_spec(folder: Path) -> ModelSpec:
    """The model of a Hugging Face folder, from its `config.json`. Raises UsageError."""
    file = folder / "config.json"
    try:
        config = json.loads(read_small(file, MAX_BYTES))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} holds no config.json; a model path is a Hugging Face folder on this machine"
        ) from None
    except OSError as fault:
        raise UsageError(f"{str(file)[:300]} cannot be read: {fault.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"{file} is not JSON that can be read: {fault}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} must hold a JSON object")
    return from_hugging_face(config, str(file))


def from_hugging_face(config: Mapping[str, Any], file: str = "config.json") -> ModelSpec:
    """Read the contents of a `config.json`. Raises UsageError that lists every key that is missing,
    wrong or not understood.

    Dropout and auxiliary losses of routers that a config asks for are not applied here; a
    UserWarning says so.
    """
    name = config.get("model_type")
    # What is no text may not even be looked up: a list has no hash.
    if not isinstance(name, str) or name not in FAMILIES:
        hint = _text_hint(config) or family_hint(str(name)) or _typing_hint(str(name))
        raise UsageError(f"{file}: model_type {shown(name)} is not a supported model family{hint}")
    family = FAMILIES[name]
    reader = Reader(config)
    reader.known.add("model_type")
    body = family.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    for architecture in reader.value(
        "architectures", [], lambda v: isinstance(v, list), "must be a list of one name"
    ):
        if architecture not in (family.architecture, body):
            reader.fault(
                "architectures",
                architecture,
                f"supported for {name}: {family.architecture} and {body}",
            )
    values = _read_fields(reader, family)
    if family.keys is GPT2_KEYS:
        for key in _GPT2_DROPOUT:
            reader.no_dropout(key, 0.1)
    else:
        values |= _read_llama_like(reader, family, values)
    has_router_loss = family.experts and reader.flag(ROUTER_LOSS[0], False)
    reader.refuse_the_rest()
    if reader.faults:
        raise UsageError(f"{file}:\n  " + "\n  ".join(reader.faults))
    if reader.dropout:
        rates = ", ".join(f"{key} {rate}" for key, rate in reader.dropout.items())
        warnings.warn(
            f"{file} asks for dropout ({rates}); training here applies none", stacklevel=2
        )
    if has_router_loss:
        warnings.warn(
            f"{file} asks for the auxiliary loss of routers ({ROUTER_LOSS[0]}: true); training here"
            " adds none",
            stacklevel=2,
        )
    return ModelSpec(family=name, **{**family.always, **values})


def _text_hint(config: Mapping[str, Any]) -> str:
    """Of a model of text and images: which text model is in it."""
    text = config.get("text_config")
    name = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(name, str) or name not in FAMILIES:
        return ""
    return (
        f"; the text model in it, text_config, is of the family {name}, which is supported: save it"
        " as a folder of its own"
    )


def _typing_hint(name: str) -> str:
    """A family of which the name may be a typing error. Another number is another model: qwen4 is
    no qwen3."""
    numbers = re.findall(r"[0-9]+", name)
    alike = [family for family in FAMILIES if re.findall(r"[0-9]+", family) == numbers]
    close = nearest(name, alike, least_alike=0.8)
    return f"; did you mean {close[0]!r}?" if close else f"; supported: {', '.join(FAMILIES)}"


def to_hugging_face(spec: ModelSpec) -> dict[str, Any]:
    """The contents of a `config.json` that `from_hugging_face` reads back as `spec`. Raises
    UsageError where the family has no words for one of the spec's fields.

    Rotary fields use the keys of transformers 4, which version 5 and other readers of such folders
    understand too."""
    family = FAMILIES[spec.family]
    is_gpt2 = family.keys is GPT2_KEYS
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **{key: getattr(spec, name) for name, key in family.keys.items()},
    }
    config |= dict.fromkeys(_GPT2_DROPOUT, 0.0) if is_gpt2 else _llama_like_keys(spec, family)
    if spec.activation == "gelu_tanh":
        config[family.keys["activation"]] = "gelu_new" if is_gpt2 else "gelu_pytorch_tanh"
    # Read back, because a key that a family lacks would be lost without a word. How it was trained
    # is not of the model.
    back = replace(from_hugging_face(config), loss=spec.loss)
    lost = [f.name for f in fields(spec) if getattr(spec, f.name) != getattr(back, f.name)]
    if lost:
        changes = ", ".join(
            f"{name}={getattr(spec, name)!r} (would become {getattr(back, name)!r})"
            for name in lost
        )
        raise UsageError(f"a {spec.family} config.json cannot say {changes}")
    return config


def _read_fields(read: Reader, family: Family) -> dict[str, Any]:
    """Fields of ModelSpec that every family has."""
    keys = family.keys
    width = read.size(keys["width"])
    heads = read.size(keys["heads"])
    if width % heads and read.config.get("head_dim") is None and family.head_width is None:
        read.fault(keys["width"], width, f"does not divide into {heads} heads")
    return {
        "vocab": read.size(keys["vocab"]),
        "width": width,
        "layers": read.size(keys["layers"], limit=MAX_BLOCKS),
        "heads": heads,
        "kv_heads": heads,
        "head_width": width // heads,
        "ffn": read.size(keys["ffn"], 4 * width if keys is GPT2_KEYS else None),
        "max_positions": read.size(keys["max_positions"]),
        "tied": read.flag(keys["tied"], family.tied),
        "norm_eps": read.number(keys["norm_eps"], family.norm_eps),
        "activation": read.activation(keys["activation"], family.activation),
        "init_std": read.number(keys["init_std"], 0.02),
    }


def _read_llama_like(read: Reader, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """More fields of ModelSpec, of a family with Llama's keys."""
    # 1. Heads. A family's default of key/value heads is for an absent key; null means as many as
    # query heads.
    heads = values["heads"]
    head_width = read.size("head_dim", family.head_width or values["head_width"] or 1)
    default_kv_heads = heads if "num_key_value_heads" in read.config else family.kv_heads or heads
    kv_heads = read.size("num_key_value_heads", default_kv_heads)
    if heads % kv_heads:
        read.fault("num_attention_heads", heads, f"does not divide into {kv_heads} key/value heads")
    rotary = read_rotary_width(read, head_width, family.partial_rotary)

    # 2. What families differ in.
    biases = {key: read.flag(key, False) for key in family.biases}
    attention_bias = biases.get("attention_bias", False)
    extras: dict[str, Any] = {}
    if family.scales:
        extras = {name: float(read.number(key, 1.0)) for key, name in _SCALES.items()}
    if family.gemma:
        extras = {
            "embed_scale": values["width"] ** 0.5,
            "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        }
        extras |= (
            _caps(read, family.caps) if family.caps else {"window_rope": read_window_rope(read)}
        )
        read.known.add("hidden_act")  # `hidden_activation` counts
    if family.experts:
        extras |= _read_experts(read, *family.experts)
    _check_scale(read, head_width)
    has_kinds = "window_rope" in extras
    window, full_blocks = read_window(
        read, values["layers"], family.window, family.window_size, family.window_every
    )
    return {
        "kv_heads": kv_heads,
        "head_width": head_width,
        "qkv_bias": attention_bias or family.always.get("qkv_bias", False),
        "out_bias": attention_bias,
        "mlp_bias": biases.get("mlp_bias", False),
        "rotary": rotary if rotary < head_width else None,
        "rope": read_rope(read, family.theta, "full_attention" if has_kinds else None),
        "nope_every": read_nope_every(read, family.nope_every, values["layers"]),
        "sliding_window": window,
        "full_blocks": full_blocks,
        **extras,
    }


def _read_experts(read: Reader, key: str, experts: int, top_k: int) -> dict[str, Any]:
    """Experts and those of a token; `experts`, `top_k`: of absent keys."""
    # transformers 5 saves either name.
    other_name = "num_experts" if key == "num_local_experts" else "num_local_experts"
    num_experts = read.size(key, read.size(other_name, experts, MAX_EXPERTS), MAX_EXPERTS)
    chosen = read.size("num_experts_per_tok", top_k)
    if chosen > num_experts:
        read.fault("num_experts_per_tok", chosen, f"there are {num_experts} experts")
        chosen = num_experts
    read.only("decoder_sparse_step", 1, "needs blocks without experts, which are not there yet")
    read.only("mlp_only_layers", [], "needs blocks without experts, which are not there yet")
    read.only("router_jitter_noise", 0.0, "needs noise at the router, which is not implemented")
    read.known |= {*ROUTER_LOSS, "intermediate_size"}  # the width of blocks without experts
    values = {"experts": num_experts, "top_k": chosen}
    if key == "num_experts":  # the weights of Mixtral's experts always add up to 1
        values["norm_top_k"] = read.flag("norm_topk_prob", False)
    return values


def _caps(read: Reader, defaults: tuple[float, float]) -> dict[str, Any]:
    """Gemma 2's soft caps of scores and of logits; null: none. `defaults`: of absent keys."""
    keys = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"}
    caps: dict[str, Any] = {}
    for (key, name), default in zip(keys.items(), defaults):
        cap = float(read.number(key, default))
        # `number` takes null for an absent key, and here it is none.
        is_null = read.config.get(key, default) is None
        caps[name] = None if is_null else cap
    return caps


def _check_scale(read: Reader, head_width: int) -> None:
    """Keys of other families for the scale of attention, whose harmless value depends on this
    model."""
    # Some folders have them with the value that changes nothing.
    for key, neutral, meaning in (
        ("query_pre_attn_scalar", head_width, "the head width"),
        ("attention_multiplier", head_width**-0.5, "of the head width"),
    ):
        if key not in read.known:
            reason = f"supported: {neutral}, {meaning}; this family has no other scale of attention"
            read.only(key, neutral, reason)


def _llama_like_keys(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """Keys that GPT-2 has not."""
    rope = spec.rope or Rope()
    config = {
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_width,
        "attention_dropout": 0.0,
        "rope_theta": rope.theta,
        **scaling_keys(rope),
    }
    if "attention_bias" in family.biases:
        config["attention_bias"] = spec.out_bias
    if "mlp_bias" in family.biases:
        config["mlp_bias"] = spec.mlp_bias
    if family.partial_rotary:
        config["partial_rotary_factor"] = spec.rotary_width / spec.head_width
    if family.nope_every:
        config["no_rope_layers"] = [
            int(spec.rope_of(block) is not None) for block in range(1, spec.layers + 1)
        ]
        config["no_rope_layer_interval"] = spec.nope_every
    if family.scales:
        config |= {key: getattr(spec, name) for key, name in _SCALES.items()}
    config |= window_keys(spec, family.window)
    if family.experts:
        config |= {family.experts[0]: spec.experts, "num_experts_per_tok": spec.top_k}
        if family.keys is EXPERT_KEYS:
            config["intermediate_size"] = spec.ffn
        if family.experts[0] == "num_experts":
            config["norm_topk_prob"] = spec.norm_top_k
    if family.gemma:
        scalar = round(spec.score_scale**-2, 6)
        config["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
        if spec.window_rope:
            config["rope_local_base_freq"] = spec.window_rope.theta
        if family.caps:
            config |= {
                "attn_logit_softcapping": spec.score_cap,
                "final_logit_softcapping": spec.logit_cap,
            }
    return config


def _read_presets() -> Iterator[tuple[str, ModelSpec]]:
    file = Path(__file__).with_name("presets.json")
    for name, config in json.loads(file.read_text("utf-8")).items():
        yield name, from_hugging_face(config, f"preset {name}")


PRESETS: Mapping[str, ModelSpec] = dict(_read_presets())


def preset(name: str) -> ModelSpec:
    """A model by name. Raises UsageError with the nearest name."""
    if name not in PRESETS:
        raise UsageError(
            f"preset {name!r} does not exist{preset_hint(name) or did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name]
