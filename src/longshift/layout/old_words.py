"""Words that layouts had once, in what a run folder holds: its config and its plan are read as if
written today.

In a new config these words are errors, with a hint (`other_tools.LAYOUT_WORDS`).
"""

import re
from typing import Any

LAYOUT_KEYS = ("layout", "use", "choices")  # under which a config or a plan has layouts as text
WITHOUT_EFFECT = r"keep-input|keep-output|rows(-auto|\d+[KMG]?)"


def current_words(text: str) -> str:
    """A layout's text in today's words, which computes the same numbers."""
    words = text.split(".")
    # A chunked layout that kept the inputs of blocks is every1 today, unless a word says otherwise.
    if "keep-input" in words and "fpdt" not in words and not re.search(r"\bevery\d", text):
        text = re.sub(r"\b(chunk[^.]+)", r"\1.every1", text)
    text = text.replace("recompute-attention", "recompute-full")
    words = [word for word in text.split(".") if not re.fullmatch(WITHOUT_EFFECT, word)]
    return ".".join(words) or "dp1"


def with_current_words(value: Any, key: str = "") -> Any:
    """A config or a plan with today's words in all its layouts. `key`: under which the value
    stands."""
    if isinstance(value, dict):
        return {name: with_current_words(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_current_words(inner, key) for inner in value]
    return current_words(value) if isinstance(value, str) and key in LAYOUT_KEYS else value
