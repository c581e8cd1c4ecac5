"""How switches are planned."""

from dataclasses import dataclass
from typing import Literal

Planner = Literal["fan_out", "algorithm1"]


@dataclass(frozen=True)
class SwitchOptions:
    """How switches are planned. `bucket_bytes`: the most that a rank sends, or receives, in one
    exchange. `ahead_bytes`: how much of the next layout's weights may arrive while the one before
    still computes."""

    planner: Planner = "fan_out"
    bucket_bytes: int = 32 << 20
    ahead_bytes: int = 256 << 20
