"""Layouts as configs have them: `layout: auto`, which says what the planner may choose from, and
words that layouts had once, in what a run folder holds.

A run's config and plan are read as if written today. In a new config these words are errors, with a
hint (`other_tools.LAYOUT_WORDS`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longshift.errors import UsageError, did_you_mean, shown
from longshift.layout.axes import AXES
from longshift.layout.layout import MOST_RANKS

LAYOUT_KEYS = ("layout", "use", "choices")  # under which a config or a plan has layouts as text
WITHOUT_EFFECT = r"keep-input|keep-output|rows(-auto|\d+[KMG]?)"
DEGREES = (*(axis.word for axis in AXES), "v", "z")  # words of a layout whose numbers can be fixed


@dataclass(frozen=True)
class AutoLayout:
    """A layout that is chosen before the ranks start.

    `ranks`: how many; all devices if None.
    `fixed`: by word of a layout, the numbers that it may have; the other words are free.
    """

    ranks: int | None = None
    fixed: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def parse(cls, value: object) -> "AutoLayout":
        """Reads `auto`, or `{auto: {ranks: 8, tp: [1, 2, 4], pp: 1}}`. Raises UsageError."""
        if value == "auto":
            return cls()
        if not isinstance(value, Mapping) or list(value) != ["auto"]:
            raise UsageError("write layout: auto, or layout: {auto: {ranks: 8, tp: [1, 2, 4]}}")
        settings = value["auto"] or {}
        if not isinstance(settings, Mapping):
            raise UsageError(
                f"auto: {shown(settings)}: write what is fixed, as in {{auto: {{ranks: 8, tp: [1,"
                " 2, 4]}}",
            )

        words = ("ranks", *DEGREES)
        for word in settings:
            if word not in words:
                hint = did_you_mean(str(word), words)
                raise UsageError(f"auto: {str(word)[:80]}: nothing that can be fixed{hint}")

        numbers = {word: _numbers(word, settings[word]) for word in DEGREES if word in settings}
        ranks = _numbers("ranks", settings["ranks"]) if "ranks" in settings else ()
        if len(ranks) > 1:
            raise UsageError(f"auto: ranks: one number, not {shown(settings['ranks'])}")

        return cls(next(iter(ranks), None), tuple(numbers.items()))

    def to_json(self) -> Any:
        """What `parse` reads."""
        if self == AutoLayout():
            return "auto"
        ranks = {"ranks": self.ranks} if self.ranks else {}
        return {"auto": ranks | {word: list(numbers) for word, numbers in self.fixed}}


def _numbers(word: str, value: object) -> tuple[int, ...]:
    """The numbers of a word, ascending. Raises UsageError for anything else."""
    numbers = value if isinstance(value, list | tuple) else [value]
    # A bool is an int, and no number of ranks.
    smallest = 0 if word == "z" else 1
    allowed = [n for n in numbers if type(n) is int and smallest <= n <= MOST_RANKS]
    if allowed and len(allowed) == len(numbers):
        return tuple(sorted(set(allowed)))
    raise UsageError(
        f"auto: {word}: {shown(value)}: write a number or a list of numbers from {smallest} to"
        f" {MOST_RANKS}, as in {word}: [1, 2, 4]",
    )


def current_words(text: str) -> str:
    """A layout's text in today's words, which computes the same numbers."""
    words = text.split(".")
    # A chunked layout that kept the inputs of blocks is every1 today, unless a word says otherwise.
    if "keep-input" in words and "fpdt" not in words and not re.search(r"\bevery\d", text):
        text = re.sub(r"\b(chunk[^.]+)", r"\1.every1", text)
    text = text.replace("recompute-attention", "recompute-full")

    # What these words asked for changes no number, and is no choice today.
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
