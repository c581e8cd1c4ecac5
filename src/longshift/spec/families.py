"""Model families: a Hugging Face `config.json` to a ModelSpec and back, and the presets.

A family is an entry of FAMILIES. Keys that are absent from a config mean what transformers takes
them to mean."""

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from longshift.errors import UsageError, did_you_mean, nearest, shown
from longshift.files import read_small
from longshift.other_tools import family_hint, preset_hint
from longshift.spec.config_json import MAX_BLOCKS, Reader
from longshift.spec.model import ModelSpec, Rope


@dataclass(frozen=True)
class Family:
    """A model family in the words of transformers: its class, fields of ModelSpec that all its
    models have, and its keys.

    What absent keys mean: `kv_heads` (None: as many as query heads), `head_width` (None: heads fill
    the model's width), `tied`, `norm_eps`, `theta`, `window_size`, `nope_every`.
    Which keys it has: `biases`, of `attention_bias` and `mlp_bias`; `window`, whether
    `sliding_window` is of all blocks or of those that `layer_types`, `max_window_layers` ("some")
    or `sliding_window_pattern` ("pattern") name; `scales`, those of _SCALES; `partial_rotary`,
    `partial_rotary_factor`. With `nope_every` it may have blocks without rotary embedding. `gemma`:
    the activation's key is `hidden_activation`, embeddings are scaled by the root of the width,
    scores by that of `query_pre_attn_scalar`, and blocks with a window turn by
    `rope_local_base_freq`. `window_every`: of so many blocks the last has no window; `caps`: what
    absent soft caps of scores and
    of logits mean, for a family that has them.
    """

    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: int | None = None
    head_width: int | None = None
    tied: bool = False
    norm_eps: float = 1e-6
    theta: float = 10000.0
    biases: tuple[str, ...] = ()
    window: Literal["all", "some", "pattern"] | None = None
    window_size: int | None = 4096
    scales: bool = False
    partial_rotary: bool = False
    nope_every: int = 0
    gemma: bool = False
    window_every: int = 6
    caps: tuple[float, float] | None = None


MAX_BYTES = 1 << 20  # of a config.json: labels of a classifier are the longest that there is

_GPT2_ALWAYS: Mapping[str, Any] = {
    "norm": "layer",
    "gated": False,
    "fused_qkv": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rope": None,
    "learned_positions": True,
}

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
        kv_heads=4,
        head_width=256,
        tied=True,
        biases=("attention_bias",),
        window="pattern",
        window_every=2,
        gemma=True,
        caps=(50.0, 30.0),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"qk_norm": True, "norm_place": "both", "norm_less_one": True},
        kv_heads=4,
        head_width=256,
        tied=True,
        theta=1e6,
        biases=("attention_bias",),
        window="pattern",
        gemma=True,
    ),
    "gpt2": Family("GPT2LMHeadModel", _GPT2_ALWAYS, tied=True, norm_eps=1e-5),
}
_SCALES: Mapping[str, str] = {
    "embedding_multiplier": "embed_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
_LLAMA_NAME = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_GPT2_NAME = {"silu": "silu", "gelu_tanh": "gelu_new"}


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

    Dropout that a config asks for is not applied here; a UserWarning says so.
    """
    name = config.get("model_type")
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
    values = _gpt2(reader, family) if name == "gpt2" else _llama_like(reader, family)
    reader.refuse_the_rest()
    if reader.faults:
        raise UsageError(f"{file}:\n  " + "\n  ".join(reader.faults))
    if reader.dropout:
        rates = ", ".join(f"{key} {rate}" for key, rate in reader.dropout.items())
        warnings.warn(
            f"{file} asks for dropout ({rates}); training here applies none", stacklevel=2
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
    config = {
        "architectures": [FAMILIES[spec.family].architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        **(_gpt2_keys(spec) if spec.family == "gpt2" else _llama_like_keys(spec)),
    }
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


def preset(name: str) -> ModelSpec:
    """A model by name. Raises UsageError with the nearest name."""
    if name not in PRESETS:
        raise UsageError(
            f"preset {name!r} does not exist{preset_hint(name) or did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name]


def _llama_like(read: Reader, family: Family) -> dict[str, Any]:
    """Fields of ModelSpec from a config of a family with Llama's keys."""
    # 1. Sizes. A family's default of key/value heads is for an absent key; null means as many as
    # query heads.
    width = read.size("hidden_size")
    layers = read.size("num_hidden_layers", limit=MAX_BLOCKS)
    heads = read.size("num_attention_heads")
    head_width = read.size("head_dim", family.head_width or width // heads or 1)
    default_kv_heads = heads if "num_key_value_heads" in read.config else family.kv_heads or heads
    kv_heads = read.size("num_key_value_heads", default_kv_heads)
    if read.config.get("head_dim") is None and family.head_width is None and width % heads:
        read.fault("hidden_size", width, f"does not divide into {heads} heads")
    if heads % kv_heads:
        read.fault("num_attention_heads", heads, f"does not divide into {kv_heads} key/value heads")
    rotary = _rotary(read, family, head_width)

    # 2. What families differ in.
    biases = {key: read.flag(key, False) for key in family.biases}
    attention_bias = biases.get("attention_bias", False)
    extras: dict[str, Any] = {}
    if family.scales:
        extras = {name: float(read.number(key, 1.0)) for key, name in _SCALES.items()}
    if family.gemma:
        extras = {
            "embed_scale": width**0.5,
            "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        }
        extras |= _caps(read, family.caps) if family.caps else {"window_rope": _window_rope(read)}
        read.known.add("hidden_act")  # `hidden_activation` counts
    _check_scale(read, head_width)
    window, full_blocks = _window(read, family, layers)
    return {
        "vocab": read.size("vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": head_width,
        "ffn": read.size("intermediate_size"),
        "max_positions": read.size("max_position_embeddings"),
        "tied": read.flag("tie_word_embeddings", family.tied),
        "norm_eps": read.number("rms_norm_eps", family.norm_eps),
        "activation": (
            read.activation("hidden_activation", "gelu_pytorch_tanh")
            if family.gemma
            else read.activation("hidden_act", "silu")
        ),
        "qkv_bias": attention_bias or family.always.get("qkv_bias", False),
        "out_bias": attention_bias,
        "mlp_bias": biases.get("mlp_bias", False),
        "rotary": rotary if rotary < head_width else None,
        "rope": _rope(read, family.theta),
        "nope_every": _nope_every(read, family, layers),
        "sliding_window": window,
        "full_blocks": full_blocks,
        "init_std": read.number("initializer_range", 0.02),
        **extras,
    }


def _window_rope(read: Reader) -> Rope:
    """Gemma 3's rotary embedding of blocks with a window."""
    theta = float(read.number("rope_local_base_freq", 10000.0))
    parameters = read.config.get("rope_parameters")
    if isinstance(parameters, Mapping) and "sliding_attention" in parameters:
        return _rope(read, theta, "sliding_attention")
    return Rope(theta)


def _caps(read: Reader, defaults: tuple[float, float]) -> dict[str, Any]:
    """Gemma 2's soft caps of scores and of logits; null: none. `defaults`: of absent keys."""
    keys = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"}
    caps: dict[str, Any] = {}
    for (key, name), default in zip(keys.items(), defaults):
        cap = float(read.number(key, default))
        is_null = key in read.config and read.config[key] is None
        caps[name] = None if is_null else cap
    return caps


def _check_scale(read: Reader, head_width: int) -> None:
    """Keys of other families for the scale of attention, whose harmless value depends on this
    model."""
    # Some folders have these keys of other families, with the value that changes nothing.
    if "query_pre_attn_scalar" not in read.known:
        reason = (
            f"supported: {head_width}, the head width; this family has no other scale of attention"
        )
        read.only("query_pre_attn_scalar", head_width, reason)
    if "attention_multiplier" not in read.known:
        scale = head_width**-0.5
        read.only(
            "attention_multiplier",
            scale,
            f"supported: {scale}, of the head width; this family has no other scale of attention",
        )


def _rotary(read: Reader, family: Family, head_width: int) -> int:
    """Channels of a head that turn."""
    key = "partial_rotary_factor"
    # Versions of transformers have it in three places; the first one that is there counts.
    sections = [read.config.get("rope_parameters"), read.config.get("rope_scaling"), read.config]
    factor = next(
        (
            section[key]
            for section in sections
            if isinstance(section, Mapping) and section.get(key) is not None
        ),
        1.0,
    )
    read.known.add(key)
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        read.fault(key, factor, "must be a number above 0, at most 1")
        return head_width
    if factor < 1 and not family.partial_rotary:
        read.fault(
            key, factor, "needs rotary embedding of a part of each head, which this family has not"
        )
    width = int(head_width * factor)
    if width % 2:
        read.fault(
            "head_dim",
            head_width,
            f"rotary embeddings need an even head width, and {width} channels are to turn",
        )
    return width


def _rope(read: Reader, theta: float, blocks: str = "full_attention") -> Rope:
    """Keys of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`, where blocks
    differ one mapping for each kind)."""
    # 1. The section that says it.
    read.known |= {"rope_parameters", "rope_scaling"}
    sections = {
        key: read.config[key] for key in ("rope_parameters", "rope_scaling") if read.config.get(key)
    }
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            read.fault(key, section, "must be a mapping")
            return Rope()
    if len(sections) == 2:
        read.fault(
            "rope_scaling",
            sections["rope_scaling"],
            "given twice: rope_parameters says it too; keep one",
        )
    key, section = next(iter(sections.items()), ("rope_parameters", {}))
    if isinstance(section.get(blocks), Mapping):
        key = f"{key}.{blocks}"
        section = section[blocks]
    inner = Reader(section, f"{key}.")

    # 2. Its kind, under one of two names or both.
    kinds = ("default", "linear", "llama3", "yarn")
    reason = f"supported: {', '.join(kinds)}"
    if "dynamic" in (section.get("rope_type"), section.get("type")):
        positions = read.config.get("max_position_embeddings")
        reason += (
            f"; documents of at most {positions} tokens have the same angles without it: for these,"
            f" set {key} to null"
        )
    names = [name for name in ("rope_type", "type") if section.get(name) is not None] or [
        "rope_type"
    ]
    section_kinds = [
        inner.value(name, "default", lambda v: isinstance(v, str) and v in kinds, reason)
        for name in names
    ]
    model_theta = read.number("rope_theta", theta)  # it is read whatever the kind is
    if inner.faults:
        read.faults += inner.faults
        return Rope()
    if len(set(section_kinds)) > 1:
        inner.fault("type", section_kinds[1], f"but rope_type says {section_kinds[0]!r}")

    # 3. Its numbers.
    section_theta = inner.number("rope_theta", model_theta)
    if section_theta != model_theta and read.config.get("rope_theta") is not None:
        inner.fault("rope_theta", section_theta, f"but rope_theta says {model_theta!r}")
    scaling = _scaling(inner, section_kinds[0], read)
    inner.known.add("partial_rotary_factor")
    inner.refuse_the_rest()
    read.faults += inner.faults
    return Rope(theta=float(section_theta), **scaling)


def _scaling(inner: Reader, kind: str, outer: Reader) -> dict[str, Any]:
    """Fields of Rope from a section of this kind."""
    # Each kind has keys of its own: others are refused as unknown.
    if kind == "default":
        return {}
    if kind == "linear":
        return {"scaling": kind, "factor": float(inner.number("factor"))}
    if kind == "yarn":
        return _yarn(inner, outer)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {name: float(inner.number(name)) for name in names}
    positions = inner.size("original_max_position_embeddings")
    if not inner.faults and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        inner.fault(
            "high_freq_factor",
            numbers["high_freq_factor"],
            f"must exceed low_freq_factor {numbers['low_freq_factor']}",
        )
    return {"scaling": kind, **numbers, "original_positions": positions}


def _yarn(inner: Reader, outer: Reader) -> dict[str, Any]:
    """`attention_factor` where it is absent: of the factor, or of the two `mscale`. The original
    positions: those of the model."""
    factor = float(inner.number("factor"))
    positions = inner.size(
        "original_max_position_embeddings", outer.size("max_position_embeddings")
    )
    fast = float(inner.number("beta_fast", 32.0))
    slow = float(inner.number("beta_slow", 1.0))
    mscale, mscale_all_dim = (
        inner.number(key, 0.0) if inner.config.get(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    )
    inner.known |= {"mscale", "mscale_all_dim"}
    magnitude = yarn_magnitude(factor)
    if mscale and mscale_all_dim:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    magnitude = float(inner.number("attention_factor", magnitude))
    if fast <= slow:
        inner.fault("beta_fast", fast, f"must exceed beta_slow {slow}")
    return {
        "scaling": "yarn",
        "factor": factor,
        "original_positions": positions,
        "beta_fast": fast,
        "beta_slow": slow,
        "magnitude": magnitude,
        "truncate": inner.flag("truncate", True),
    }


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin with, as transformers derives it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _nope_every(read: Reader, family: Family, layers: int) -> int:
    """`ModelSpec.nope_every`, from a flag for each block that is 0 where it has no rotary
    embedding, or from their interval."""
    every = read.value(
        "no_rope_layer_interval",
        family.nope_every,
        lambda v: type(v) is int and v >= 0,
        "must be a whole number",
    )
    flags = read.value(
        "no_rope_layers",
        None,
        lambda v: isinstance(v, list) and len(v) == layers,
        f"must name {layers} layers",
    )
    key, value = ("no_rope_layers", flags) if flags else ("no_rope_layer_interval", every)
    if flags:
        every = next((block for block, flag in enumerate(flags, 1) if not flag), 0)
        expected = [not every or block % every > 0 for block in range(1, layers + 1)]
        if [bool(flag) for flag in flags] != expected:
            read.fault(key, value, "supported: blocks without rotary embedding at one interval")
    if every and every <= layers and not family.nope_every:
        read.fault(key, value, "needs blocks without rotary embedding, which this family has not")
    return every if every <= layers else 0


def _window(read: Reader, family: Family, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, or None, and the blocks that have none although others do."""
    # 1. What the keys say.
    types = read.value(
        "layer_types",
        None,
        lambda v: isinstance(v, list) and len(v) == layers,
        f"must name {layers} layers",
    )
    if any(kind not in ("sliding_attention", "full_attention") for kind in types or ()):
        read.fault("layer_types", types, "supported: sliding_attention and full_attention")
        types = None
    window = None
    if read.config.get("sliding_window", family.window_size) is not None:
        window = read.size("sliding_window", family.window_size)

    # 2. Families whose window is of all blocks, or of blocks at an interval.
    if family.window == "all":
        if types and set(types) != {"sliding_attention" if window else "full_attention"}:
            read.fault("layer_types", types, f"but sliding_window says {window}")
        return window, ()
    if family.window == "pattern":
        every = read.size("sliding_window_pattern", family.window_every)
        types = types or [
            "sliding_attention" if block % every else "full_attention"
            for block in range(1, layers + 1)
        ]
        return _windowed(types, window)
    is_used = read.flag("use_sliding_window", False)
    first = read.value(
        "max_window_layers", 28, lambda v: type(v) is int and v >= 0, "must be a whole number"
    )

    # 3. Families without one.
    if family.window is None:
        is_off = types or read.config.get("use_sliding_window") is False
        requests = {
            "use_sliding_window": is_used,
            "layer_types": "sliding_attention" in (types or ()),
            "sliding_window": read.config.get("sliding_window") and not is_off,
        }
        for key, is_requested in requests.items():
            if is_requested:
                read.fault(
                    key, read.config[key], "needs a sliding window, which this family has not"
                )
        return None, ()

    # 4. Families whose window is of the blocks from some number on.
    types = types or [
        "sliding_attention" if is_used and window and block >= first else "full_attention"
        for block in range(layers)
    ]
    if "sliding_attention" in types and not (is_used and window):
        read.fault("use_sliding_window", is_used, "but layer_types says sliding_attention")
    return _windowed(types, window)


def _windowed(types: list[str], window: int | None) -> tuple[int | None, tuple[int, ...]]:
    if window is None or "sliding_attention" not in types:
        return None, ()
    return window, tuple(block for block, type_ in enumerate(types, 1) if type_ == "full_attention")


def _gpt2(read: Reader, family: Family) -> dict[str, Any]:
    width = read.size("n_embd")
    heads = read.size("n_head")
    if width % heads:
        read.fault("n_embd", width, f"does not divide into {heads} heads")
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        read.no_dropout(key, 0.1)
    return {
        "vocab": read.size("vocab_size"),
        "width": width,
        "layers": read.size("n_layer", limit=MAX_BLOCKS),
        "heads": heads,
        "kv_heads": heads,
        "head_width": width // heads,
        "ffn": read.size("n_inner", 4 * width),
        "max_positions": read.size("n_positions"),
        "tied": read.flag("tie_word_embeddings", family.tied),
        "norm_eps": read.number("layer_norm_epsilon", family.norm_eps),
        "activation": read.activation("activation_function", "gelu_new"),
        "init_std": read.number("initializer_range", 0.02),
    }


def _rope_scaling_keys(rope: Rope) -> dict[str, Any] | None:
    """The section `rope_scaling` of a config; None where nothing is scaled."""
    if not rope.scaling:
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
        scaling["original_max_position_embeddings"] = rope.original_positions
    if rope.scaling == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.magnitude,
            "truncate": rope.truncate,
        }
        scaling["original_max_position_embeddings"] = rope.original_positions
    return scaling


def _window_keys(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """Keys that say which blocks have a sliding window."""
    if family.window is None:
        return {}
    config: dict[str, Any] = {}
    window = spec.sliding_window
    if family.window == "all" or window:
        config["sliding_window"] = window
    if family.window != "all" and window:
        blocks = range(1, spec.layers + 1)
        config["layer_types"] = [
            "full_attention" if spec.window(block) is None else "sliding_attention"
            for block in blocks
        ]
    if family.window == "some":
        config["use_sliding_window"] = window is not None
        if window:
            config["max_window_layers"] = next(
                (block for block in range(spec.layers) if block + 1 not in spec.full_blocks),
                spec.layers,
            )
    return config


def _llama_like_keys(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.rope or Rope()
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
        "rope_scaling": _rope_scaling_keys(rope),
    }
    family = FAMILIES[spec.family]
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
    config |= _window_keys(spec, family)
    if family.gemma:
        scalar = round(spec.score_scale**-2, 6)
        config["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
        config["hidden_activation"] = config.pop("hidden_act")
        if spec.window_rope:
            config["rope_local_base_freq"] = spec.window_rope.theta
        if family.caps:
            config |= {
                "attn_logit_softcapping": spec.score_cap,
                "final_logit_softcapping": spec.logit_cap,
            }
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


def _decoder(
    family: str,
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    kv: int,
    ffn: int,
    positions: int,
    **switches: Any,
) -> ModelSpec:
    head_width = switches.pop("head_width", width // heads)
    return ModelSpec(
        family, vocab, width, layers, heads, kv, head_width, ffn, positions, **switches
    )


_LLAMA3: Mapping[str, Any] = {"norm_eps": 1e-5, "rope": Rope(theta=500000.0)}
_LLAMA32: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "rope": Rope(
        500000.0,
        "llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_positions=8192,
    ),
}
_QWEN3: Mapping[str, Any] = {"qk_norm": True, "rope": Rope(theta=1000000.0)}
_SMOLLM3: Mapping[str, Any] = {"tied": True, "rope": Rope(theta=5000000.0), "nope_every": 4}
_OLMO2: Mapping[str, Any] = {
    "qk_norm_whole": True,
    "norm_place": "after",
    "rope": Rope(theta=500000.0),
}
_GRANITE: Mapping[str, Any] = {
    "tied": True,
    "norm_eps": 1e-5,
    "rope": Rope(theta=5000000.0),
    "attention_scale": 0.015625,
    "embed_scale": 12.0,
    "residual_scale": 0.22,
    "logit_divisor": 8.0,
}
_GEMMA3: Mapping[str, Any] = {
    "qk_norm": True,
    "norm_place": "both",
    "norm_less_one": True,
    "tied": True,
    "activation": "gelu_tanh",
    "head_width": 256,
    "rope": Rope(theta=1e6),
    "window_rope": Rope(),
    "attention_scale": 0.0625,
}
_GPT2: Mapping[str, Any] = {
    **_GPT2_ALWAYS,
    "tied": True,
    "norm_eps": 1e-5,
    "activation": "gelu_tanh",
}

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
    "mistral-7b-v0.3": _decoder(
        "mistral", 32768, 4096, 32, 32, 8, 14336, 32768, norm_eps=1e-5, rope=Rope(theta=1000000.0)
    ),
    "qwen2.5-7b": _decoder(
        "qwen2", 152064, 3584, 28, 28, 4, 18944, 131072, qkv_bias=True, rope=Rope(theta=1000000.0)
    ),
    "qwen3-0.6b": _decoder(
        "qwen3", 151936, 1024, 28, 16, 8, 3072, 40960, tied=True, head_width=128, **_QWEN3
    ),
    "qwen3-8b": _decoder("qwen3", 151936, 4096, 36, 32, 8, 12288, 40960, **_QWEN3),
    "olmo-2-7b": _decoder("olmo2", 100352, 4096, 32, 32, 32, 11008, 4096, **_OLMO2),
    "granite-3.1-2b": _decoder("granite", 49155, 2048, 40, 32, 8, 8192, 131072, **_GRANITE),
    "smollm3-3b": _decoder("smollm3", 128256, 2048, 36, 16, 4, 11008, 65536, **_SMOLLM3),
    "gemma-3-1b": _decoder(
        *("gemma3_text", 262144, 1152, 26, 4, 1, 6912, 32768),
        **_GEMMA3,
        embed_scale=1152**0.5,
        sliding_window=512,
        full_blocks=(6, 12, 18, 24),
    ),
    "phi-4": _decoder(
        "phi3",
        100352,
        5120,
        40,
        40,
        10,
        17920,
        16384,
        norm_eps=1e-5,
        rope=Rope(theta=250000.0),
        fused=True,
    ),
}
