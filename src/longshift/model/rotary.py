"""Tables of angles for rotary embedding (RoPE, arXiv 2104.09864), plain or stretched to more
positions than a model was trained on: linear, Llama 3's and YaRN (arXiv 2309.00071)."""

import math

import torch
from torch import Tensor

from longshift.spec.model import Rope


def rotary_table(
    rope: Rope, width: int, positions_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] of the R = `width` channels that turn. Angles are formed in float64: in
    float32 they are 0.1 off at position 4M, where the fastest has turned 4M."""
    frequency = rope.theta ** -(
        torch.arange(0, width, 2, dtype=torch.float64, device=positions_T.device) / width
    )
    if rope.scaling == "linear":
        frequency = frequency / rope.factor
    elif rope.scaling == "llama3":
        frequency = _llama3_frequencies(rope, frequency)
    elif rope.scaling == "yarn":
        frequency = _yarn_frequencies(rope, frequency, width)
    angle = positions_T.double().unsqueeze(-1) * frequency
    cos = angle.cos().mul_(rope.magnitude).to(dtype)
    sin = angle.sin().mul_(rope.magnitude).to(dtype)
    return _both_halves(cos), _both_halves(sin)


def _llama3_frequencies(rope: Rope, frequency: Tensor) -> Tensor:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between."""
    positions = rope.original_positions
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    wavelength = 2 * math.pi / frequency

    # Turns over the original positions say how much of a channel is kept.
    smooth = (positions / wavelength - low) / (high - low)
    blend = (1 - smooth) * frequency / rope.factor + smooth * frequency

    is_low = wavelength > positions / low
    is_high = wavelength < positions / high
    kept_or_blend = torch.where(is_high, frequency, blend)
    return torch.where(is_low, frequency / rope.factor, kept_or_blend)


def _yarn_frequencies(rope: Rope, frequency: Tensor, width: int) -> Tensor:
    """Channels that turn less than `beta_slow` times over the original positions divided by
    `factor`, those that turn more than `beta_fast` times kept,
    a linear ramp over the channels between."""

    def channel(turns: float) -> float:
        return (
            width
            * math.log(rope.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    # 1. Where the ramp begins and ends, in channels.
    first = channel(rope.beta_fast)
    last = channel(rope.beta_slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)

    # 2. How much of each channel is divided: 0 before the ramp, 1 after it.
    number = torch.arange(width // 2, dtype=torch.float64, device=frequency.device)
    ramp = ((number - first) / (last - first if last != first else 0.001)).clamp_(0, 1)
    return frequency * (1 - ramp) + frequency / rope.factor * ramp


def _both_halves(half: Tensor) -> Tensor:
    """[T, R / 2] -> [T, 1, R]"""
    return torch.cat((half, half), dim=-1).unsqueeze(1)
