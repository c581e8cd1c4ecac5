"""How an update changes weights: the rule of an optimizer, its numbers, and which moments it keeps.

    adamw    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g²;  w -= lr (m̂ / (sqrt(v̂) + eps) + decay w)     arXiv 1711.05101
    sgd      m = momentum m + g + decay w;  w -= lr m                                                    torch.optim.SGD

Both are torch's own. A moment is a vector of home's format that is kept for every trained weight, under torch's name for it.
"""

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class Rule:
    """`betas`, `eps`: of adamw; `momentum`: of sgd. Weight decay is of matrices alone, not of norms and biases."""

    name: OptimizerName = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments; none of sgd without momentum."""
        if self.name == "adamw":
            return "exp_avg", "exp_avg_sq"
        return ("momentum_buffer",) if self.momentum else ()

    def __str__(self) -> str:
        return "AdamW" if self.name == "adamw" else "SGD with momentum" if self.momentum else "SGD"
