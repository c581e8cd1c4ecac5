"""`layout: auto`, as a person writes it: what the planner may choose from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longshift.errors import UsageError, did_you_mean, shown
from longshift.layout.axes import AXES
from longshift.layout.layout import MOST_RANKS

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
