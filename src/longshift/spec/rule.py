"""How an update changes weights: the rule of an optimizer, its numbers, and which moments it keeps.

    adamw    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g²;
             w -= lr (m̂ / (sqrt(v̂) + eps) + decay w)         arXiv 1711.05101
    sgd      m = momentum m + g + decay w;  w -= lr m        torch.optim.SGD

Both are torch's own. A moment is a vector of home's format that is kept for every trained weight,
under torch's name for it. Any other name, "package.module:Rule", is that of a rule of the user's
own (`state.user_rule`).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from longshift.errors import UsageError
from longshift.user_code import load_object

KEY = "train.optimizer"
OPTIMIZERS = ("adamw", "sgd")
# Vectors that home has beside moments, and the count of updates.
RESERVED_NAMES = ("master", "grad", "step")


@dataclass(frozen=True)
class Rule:
    """`betas`, `eps`: of adamw; `momentum`: of sgd; `moment_names`: of a rule of the user's own.
    Weight decay is of matrices alone, not of norms and biases."""

    name: str = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    moment_names: tuple[str, ...] = ()

    @property
    def is_user_rule(self) -> bool:
        """Whether it is a rule of the user's own."""
        return self.name not in OPTIMIZERS

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments; none of sgd without momentum."""
        if self.is_user_rule:
            return self.moment_names
        if self.name == "adamw":
            return "exp_avg", "exp_avg_sq"
        return ("momentum_buffer",) if self.momentum else ()

    def __str__(self) -> str:
        if self.is_user_rule:
            return self.name
        return "AdamW" if self.name == "adamw" else "SGD with momentum" if self.momentum else "SGD"


@lru_cache(maxsize=16)
def load_rule(text: str) -> Any:
    """The rule of the user's own that a config names: an object, or one of the class, with
    `moments` and `update`. Raises UsageError."""
    loaded = load_object(text, KEY)
    try:
        rule = loaded() if isinstance(loaded, type) else loaded
    except Exception as fault:
        raise UsageError(
            f"{KEY}: {text} is a class that cannot be made without arguments: {fault}; name an"
            " object of it"
        ) from fault
    moments: Any = getattr(rule, "moments", None)
    # The names are kinds in the keys of a checkpoint, which bars part.
    is_named = isinstance(moments, tuple) and all(
        isinstance(name, str) and name.isidentifier() for name in moments
    )
    if not is_named or len({*moments, *RESERVED_NAMES}) < len(moments) + len(RESERVED_NAMES):
        raise UsageError(
            f"{KEY}: {text} needs moments: a tuple of the names of the vectors that it keeps for"
            " each weight, such as ('momentum',), each once and none of them"
            f" {' or '.join(RESERVED_NAMES)}; it has {moments!r}"
        )
    if not callable(getattr(rule, "update", None)):
        raise UsageError(
            f"{KEY}: {text} has no method update(weight, gradient, moments, step, lr, weight_decay)"
        )
    return rule
