"""How positions count: rotary embeddings and sliding windows as a `config.json` says them, and
rotary embeddings stretched to documents longer than a model was trained on. Nothing is trained by
this alone.

theta     the base of the angles is set to `theta`: what long-context models were trained on with
          (Llama 3, arXiv 2407.21783); the scaling that the model has stays
dynamic   the base is multiplied so that the slowest channel turns as far over `max_len` as it did
          over the trained positions (NTK-aware, arXiv 2309.00071, section 3.1); the base of one
          length, the run's, and written as such
linear, llama3, yarn    as of `spec.model.Rope`, by `factor`

All but theta take the place of a scaling that the model has, which `replaced_scaling` says.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from longshift.errors import UsageError
from longshift.spec.config_json import Reader
from longshift.spec.model import ModelSpec, Rope

Stretch = Literal["theta", "dynamic", "linear", "llama3", "yarn"]
# Whether `sliding_window` is of all blocks, or of those that `layer_types` and either
# `max_window_layers` ("some") or `sliding_window_pattern` ("pattern") name.
WindowKind = Literal["all", "some", "pattern"]

_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_KINDS_OF_BLOCKS = ("full_attention", "sliding_attention")
# By kind of scaling, the keys of its section and the fields of Rope that they give. Each kind has
# keys of its own: others are refused as unknown.
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        _ORIGINAL: "original_positions",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "magnitude",
        "truncate": "truncate",
        _ORIGINAL: "original_positions",
    },
}


def read_rotary_width(read: Reader, head_width: int, may_be_partial: bool) -> int:
    """Channels of a head that turn. `may_be_partial`: whether the family turns a part of each
    head."""
    # Versions of transformers have it in three places; the first one that is there counts.
    sections = [read.config.get("rope_parameters"), read.config.get("rope_scaling"), read.config]
    factors = [section.get(_PARTIAL) for section in sections if isinstance(section, Mapping)]
    factor = next((factor for factor in factors if factor is not None), 1.0)
    read.known.add(_PARTIAL)
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        read.fault(_PARTIAL, factor, "must be a number above 0, at most 1")
        return head_width
    if factor < 1 and not may_be_partial:
        reason = "needs rotary embedding of a part of each head, which this family has not"
        read.fault(_PARTIAL, factor, reason)
    width = int(head_width * factor)
    if width % 2:
        read.fault(
            "head_dim",
            head_width,
            f"rotary embeddings need an even head width, and {width} channels are to turn",
        )
    return width


def read_window_rope(read: Reader) -> Rope:
    """Gemma 3's rotary embedding of blocks with a window."""
    # Transformers 5 has it in rope_parameters, by kind of block.
    theta = float(read.number("rope_local_base_freq", 10000.0))
    parameters = read.config.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters.get("sliding_attention"):
        return read_rope(read, theta, "sliding_attention")
    return Rope(theta)


def read_rope(read: Reader, theta: float, blocks: str | None = None) -> Rope:
    """Keys of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).

    `blocks`: in a family whose blocks differ, the kind of the blocks. `rope_parameters` has a
    mapping for each kind there, and transformers reads no other mapping."""
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
        reason = "given twice: rope_parameters says it too; keep one"
        read.fault("rope_scaling", sections["rope_scaling"], reason)
    key, section = next(iter(sections.items()), ("rope_parameters", {}))
    if blocks and key == "rope_parameters":
        outer = Reader(section, f"{key}.")
        outer.known |= set(_KINDS_OF_BLOCKS)
        section = outer.value(blocks, {}, lambda v: isinstance(v, Mapping), "must be a mapping")
        outer.refuse_the_rest()
        read.faults += outer.faults
        key = f"{key}.{blocks}"
    inner = Reader(section, f"{key}.")
    for name in () if blocks else _KINDS_OF_BLOCKS:
        reason = f"this family has one rotary embedding for all blocks: its keys belong in {key}"
        inner.only(name, None, reason)

    # 2. Its kind, under one of two names or both.
    reason = f"supported: {', '.join(_SCALING_KEYS)}"
    if "dynamic" in (section.get("rope_type"), section.get("type")):
        positions = read.config.get("max_position_embeddings")
        reason += (
            f"; documents of at most {positions} tokens have the same angles without it: for these,"
            f" set {key} to null"
        )
    old_kind, kind = (
        inner.value(name, None, lambda v: isinstance(v, str) and v in _SCALING_KEYS, reason)
        for name in ("type", "rope_type")
    )
    model_theta = read.number("rope_theta", theta)  # it is read whatever the kind is
    if inner.faults:
        read.faults += inner.faults
        return Rope()
    if kind and old_kind and kind != old_kind:
        inner.fault("type", old_kind, f"but rope_type says {kind!r}")

    # 3. Its numbers.
    section_theta = inner.number("rope_theta", model_theta)
    if section_theta != model_theta and read.config.get("rope_theta") is not None:
        inner.fault("rope_theta", section_theta, f"but rope_theta says {model_theta!r}")
    scaling = _read_scaling(inner, kind or old_kind or "default", read, blocks is not None)
    inner.known.add(_PARTIAL)
    inner.refuse_the_rest()
    read.faults += inner.faults
    return Rope(theta=float(section_theta), **scaling)


def _read_scaling(inner: Reader, kind: str, outer: Reader, has_kinds: bool) -> dict[str, Any]:
    """Fields of Rope from a section of this kind. `has_kinds`: whether the family has a section for
    each kind of block."""
    is_yarn = kind == "yarn"
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if is_yarn else {}
    fields: dict[str, Any] = {}
    for key, name in _SCALING_KEYS[kind].items():
        if name == "original_positions":
            # As in transformers, where the key beside the section counts before that in it.
            is_outside = not has_kinds and outer.config.get(key) is not None
            default = outer.size("max_position_embeddings") if is_yarn or is_outside else None
            fields[name] = inner.size(key, default)
            if is_outside:
                fields[name] = outer.size(key)
        elif name == "truncate":
            fields[name] = inner.flag(key, True)
        elif name == "magnitude":
            default = _magnitude(inner, fields["factor"])
            fields[name] = float(inner.number(key, default))
        else:
            fields[name] = float(inner.number(key, defaults.get(key)))
    # Equal bounds would leave no channel between, and divide by zero.
    for high, low in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        if not inner.faults and high in fields and fields[high] <= fields[low]:
            inner.fault(high, fields[high], f"must exceed {low} {fields[low]}")
    return {"scaling": kind, **fields} if fields else {}


def _magnitude(inner: Reader, factor: float) -> float:
    """YaRN's `attention_factor` where it is absent: of the factor, or of the two `mscale`."""
    mscale, mscale_all_dim = (
        inner.number(key, 0.0) if inner.config.get(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    )
    inner.known |= {"mscale", "mscale_all_dim"}
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin with, as transformers derives it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_nope_every(read: Reader, default: int, layers: int) -> int:
    """`ModelSpec.nope_every`, from a flag for each block that is 0 where it has no rotary
    embedding, or from their interval. `default`: of the family, 0 where it has no such block."""
    every = read.whole("no_rope_layer_interval", default)
    flags = read.value(
        "no_rope_layers",
        None,
        lambda v: isinstance(v, list) and len(v) == layers,
        f"must name {layers} layers",
    )
    key, value = ("no_rope_layers", flags) if flags else ("no_rope_layer_interval", every)
    if flags:
        # The first block without it says the interval; the others must agree.
        every = next((block for block, flag in enumerate(flags, 1) if not flag), 0)
        expected = [not every or block % every > 0 for block in range(1, layers + 1)]
        if [bool(flag) for flag in flags] != expected:
            read.fault(key, value, "supported: blocks without rotary embedding at one interval")
    if every and every <= layers and not default:
        read.fault(key, value, "needs blocks without rotary embedding, which this family has not")
    return every if every <= layers else 0


def scaling_keys(rope: Rope) -> dict[str, Any]:
    """Keys of a config that say how rotary embeddings are scaled; null where nothing is."""
    if not rope.scaling:
        return {"rope_scaling": None}
    names = _SCALING_KEYS[rope.scaling]
    section = {key: getattr(rope, name) for key, name in names.items()}
    keys: dict[str, Any] = {"rope_scaling": {"rope_type": rope.scaling, **section}}
    if _ORIGINAL in section:
        # transformers would prefer another number that the source's config has.
        keys[_ORIGINAL] = section[_ORIGINAL]
    return keys


def read_window(
    read: Reader, layers: int, kind: WindowKind | None, default: int | None, every: int
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, or None, and the blocks that have none although others do.

    `kind`: of the family, None where it has no window; `default`: the window where the key is
    absent; `every`: of so many blocks the last has none, where `kind` is "pattern"."""
    # 1. What the keys say.
    reason = f"must name {layers} layers, each sliding_attention or full_attention"
    types = read.value("layer_types", None, lambda v: _are_types(v, layers), reason)
    window = None
    if read.config.get("sliding_window", default) is not None:
        window = read.size("sliding_window", default)

    # 2. Which blocks have it where `layer_types` does not say.
    blocks = range(1, layers + 1)
    is_used = window is not None
    if kind == "all":
        sliding = [is_used] * layers
    elif kind == "pattern":
        every = read.size("sliding_window_pattern", every)
        sliding = [block % every > 0 for block in blocks]
    else:
        is_asked = kind is None and read.config.get("sliding_window") is not None
        is_used = read.flag("use_sliding_window", is_asked) and is_used
        first = read.whole("max_window_layers", 28)
        sliding = [is_used and (kind is None or block > first) for block in blocks]

    # 3. Which ones it says.
    if types:
        named = [entry == "sliding_attention" for entry in types]
        if kind == "all" and named != sliding:
            read.fault("layer_types", types, f"but sliding_window says {window}")
        if kind == "some" and any(named) and not is_used:
            read.fault("use_sliding_window", False, "but layer_types says sliding_attention")
        sliding = named
    if kind is None and any(sliding):
        keys = ("layer_types", "use_sliding_window", "sliding_window")
        key = next(key for key in keys if read.config.get(key) is not None)
        reason = "needs a sliding window, which this family has not"
        read.fault(key, read.config[key], reason)
    if kind is None or window is None or not any(sliding):
        return None, ()
    return window, tuple(block for block, has_window in zip(blocks, sliding) if not has_window)


def _are_types(value: Any, layers: int) -> bool:
    """Whether a value names what each layer attends to."""
    types = ("sliding_attention", "full_attention")
    return (
        isinstance(value, list) and len(value) == layers and all(entry in types for entry in value)
    )


def window_keys(spec: ModelSpec, kind: WindowKind | None) -> dict[str, Any]:
    """Keys that say which blocks have a sliding window."""
    if kind is None:
        return {}
    config: dict[str, Any] = {}
    window = spec.sliding_window
    if kind == "all" or window:
        config["sliding_window"] = window
    if kind != "all" and window:
        types = []
        for block in range(1, spec.layers + 1):
            types.append("full_attention" if spec.window(block) is None else "sliding_attention")
        config["layer_types"] = types
    if kind == "some":
        config["use_sliding_window"] = window is not None
        if window:
            # To readers without layer_types, all blocks from this one on have the window.
            config["max_window_layers"] = next(
                (block for block in range(spec.layers) if block + 1 not in spec.full_blocks),
                spec.layers,
            )
    return config


def stretched(
    spec: ModelSpec,
    kind: Stretch,
    max_len: int,
    factor: float | None = None,
    theta: float | None = None,
    trained: int | None = None,
) -> ModelSpec:
    """The model with its rotary embedding stretched to documents of `max_len` tokens. `factor`:
    `max_len` over the trained positions where it is not given; `trained`: the positions that the
    model was trained on, where its config does not say them right. Raises UsageError."""
    rope = spec.rope
    if rope is None:
        raise UsageError(
            "the model has learned positions, and rope stretches rotary embeddings: leave rope out"
        )
    if (theta is None) == (kind == "theta"):
        raise UsageError(
            "theta is for type: theta alone; leave it out"
            if theta
            else "type: theta needs theta, as in 5e6"
        )
    if kind == "theta":
        if factor is not None:
            raise UsageError("factor is not for type: theta; leave it out")
        return replace(spec, rope=replace(rope, theta=float(theta or 0)))
    positions = trained or _stretched_positions(spec, rope)
    # Shorter documents need no stretch, and a factor below 1 would squeeze the angles.
    factor = max(1.0, max_len / positions) if factor is None else factor
    if kind == "dynamic":
        width = spec.rotary_width
        if width <= 2:
            raise UsageError(
                "type: dynamic keeps the fastest channel as it is, and this model turns one pair"
                " alone; use type: linear"
            )
        return replace(spec, rope=Rope(rope.theta * factor ** (width / (width - 2))))
    new_rope = Rope(rope.theta, kind, factor)
    if kind in ("llama3", "yarn"):
        new_rope = replace(new_rope, original_positions=positions)
    if kind == "yarn":
        new_rope = replace(new_rope, magnitude=yarn_magnitude(factor))
    return replace(spec, rope=new_rope)


def _stretched_positions(spec: ModelSpec, rope: Rope) -> int:
    """The positions that `rope.factor` stretches."""
    # These two name them: max_positions has grown from there.
    is_named = rope.scaling in ("llama3", "yarn")
    return rope.original_positions if is_named else spec.max_positions


def replaced_scaling(spec: ModelSpec, stretched_spec: ModelSpec) -> str | None:
    """A sentence where stretching took the scaling of the model's own rotary embedding
    away, else None."""
    old = spec.rope
    new = stretched_spec.rope
    if old is None or new is None or old.scaling is None:
        return None
    # Another base leaves the scaling as it is.
    if replace(old, theta=new.theta) == new:
        return None
    scaling = f"{new.scaling} by {new.factor:g}" if new.scaling else f"a base of {new.theta:g}"
    return (
        f"model.rope takes the place of the scaling that the model has ({old.scaling} by"
        f" {old.factor:g}): it is {scaling} now"
    )


def beyond(spec: ModelSpec, max_len: int) -> str | None:
    """A warning where documents are longer than the positions that the model was trained on, and
    nothing stretches it; else None."""
    rope = spec.rope
    if rope is None or max_len <= spec.max_positions:
        return None
    if rope.factor * _stretched_positions(spec, rope) >= max_len:
        return None
    return (
        f"data.max_len is {max_len} tokens and the model was trained on"
        f" {spec.max_positions} positions: later ones turn by angles that it has never seen."
        f" Stretch them with model.rope={{type: yarn}} (by {max_len / spec.max_positions:.3g}), or"
        " raise their base with model.rope={type: theta, theta: 5e6}"
    )
