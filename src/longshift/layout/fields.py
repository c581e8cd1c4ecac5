"""Values that the fields of a layout may have. Needs no torch."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, get_args

from longshift.errors import UsageError
from longshift.layout import axes

# A chunk that is chosen before the ranks start, from what the machine can do, as the
# recomputation "auto" is.
AUTO = -1
ZERO_MEANING = "z0 replicated state, z1 sharded optimizer, z2 and gradients, z3 and weights"

Order = Literal["gpipe", "1f1b", "vertical"]
Recompute = Literal["none", "selective", "full", "auto"]
Tier = Literal["device", "host", "disk"]
Where = Literal["device", "offload"]
Schedule = Literal["stream", "fpdt"]

_LEAST = {
    **dict.fromkeys((*axes.names(), "virtual"), 1),
    **dict.fromkeys(("kept_blocks", "zero", "every"), 0),
    "chunk": AUTO,
}
_WORDS = {
    "order": get_args(Order),
    "recompute": get_args(Recompute),
    "offload": get_args(Tier),
    "kv": get_args(Where),
    "schedule": get_args(Schedule),
}


def check_fields(values: Mapping[str, Any]) -> None:
    """Raises UsageError for a value that its field cannot have."""
    for name, degree in values["extra"]:
        if not isinstance(degree, int) or degree < 1:
            raise UsageError(f"Layout(extra={name}: {degree!r}): a degree is at least 1")
    for name, least in _LEAST.items():
        value = values[name]
        # Layouts are built often, and nearly all of ints.
        if (not isinstance(value, int) and not isinstance(value, Integral)) or value < least:
            raise UsageError(
                f"Layout({name}={value!r}): {name} is a whole number of at least {max(least, 0)}"
            )
    if values["zero"] > 3:
        raise UsageError(f"Layout(zero={values['zero']}) does not exist; {ZERO_MEANING}")
    for name, words in _WORDS.items():
        value = values[name]
        if value not in words:
            raise UsageError(f"Layout({name}={value!r}): {name} is one of {', '.join(words)}")
