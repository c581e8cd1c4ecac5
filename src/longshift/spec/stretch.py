"""A model made ready for documents longer than it was trained on, by another rotary embedding;
nothing is trained by this alone.

theta     the base of the angles is set to `theta`: what long-context models were trained on with
          (Llama 3, arXiv 2407.21783); the scaling that the model has stays
dynamic   the base is multiplied so that the slowest channel turns as far over `max_len` as it did
          over the trained positions (NTK-aware, arXiv 2309.00071, section 3.1); the base of one
          length, the run's, and written as such
linear, llama3, yarn    as of `spec.model.Rope`, by `factor`

All but theta take the place of a scaling that the model has, which `replaced_scaling` says.
"""

from dataclasses import replace
from typing import Literal

from longshift.errors import UsageError
from longshift.spec.families import yarn_magnitude
from longshift.spec.model import ModelSpec, Rope

Stretch = Literal["theta", "dynamic", "linear", "llama3", "yarn"]


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
    positions = trained or (
        rope.original_positions if rope.scaling in ("llama3", "yarn") else spec.max_positions
    )
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
    if kind == "llama3":
        new_rope = replace(new_rope, low_freq_factor=1.0, original_positions=positions)
    elif kind == "yarn":
        new_rope = replace(new_rope, original_positions=positions, magnitude=yarn_magnitude(factor))
    return replace(spec, rope=new_rope)


def replaced_scaling(spec: ModelSpec, stretched_spec: ModelSpec) -> str | None:
    """A sentence where stretching took the scaling of the model's own rotary embedding
    away, else None."""
    old = spec.rope
    new = stretched_spec.rope
    if old is None or new is None or old.scaling is None or replace(old, theta=new.theta) == new:
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
    # These two name the positions that they stretch, which max_positions has grown from.
    reach = (
        rope.factor * rope.original_positions
        if rope.scaling in ("llama3", "yarn")
        else rope.factor * spec.max_positions
    )
    if rope.scaling and reach >= max_len:
        return None
    return (
        f"data.max_len is {max_len} tokens and the model was trained on"
        f" {spec.max_positions} positions: later ones turn by angles that it has never seen."
        f" Stretch them with model.rope={{type: yarn}} (by {max_len / spec.max_positions:.3g}), or"
        " raise their base with model.rope={type: theta, theta: 5e6}"
    )
