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
    """A layout that is chosen before the ranks start. `ranks`: how many; all devices where None. `fixed`: by word of a layout, the numbers
    that it may have; words that are not there are free."""

    ranks: int | None = None
    fixed: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def parse(cls, value: object) -> "AutoLayout":
        """Reads `auto`, or `{auto: {ranks: 8, tp: [1, 2, 4], pp: 1}}`. Raises UsageError."""
        if value == "auto":
            return cls()
        if not isinstance(value, Mapping) or list(value) != ["auto"]:
            raise UsageError("write layout: auto, or layout: {auto: {ranks: 8, tp: [1, 2, 4]}}")
        asked = value["auto"] or {}
        if not isinstance(asked, Mapping):
            raise UsageError(f"auto: {shown(asked)}: write what is fixed, as in {{auto: {{ranks: 8, tp: [1, 2, 4]}}}}")
        known = ("ranks", *DEGREES)
        for word in asked:
            if word not in known:
                raise UsageError(f"auto: {str(word)[:80]}: nothing that can be fixed{did_you_mean(str(word), known)}")
        fixed = tuple((word, _numbers(word, asked[word])) for word in DEGREES if word in asked)
        ranks = _numbers("ranks", asked["ranks"]) if "ranks" in asked else ()
        if len(ranks) > 1:
            raise UsageError(f"auto: ranks: one number, not {shown(asked['ranks'])}")
        return cls(next(iter(ranks), None), fixed)

    def to_json(self) -> Any:
        """What `parse` reads."""
        if self == AutoLayout():
            return "auto"
        return {"auto": ({"ranks": self.ranks} if self.ranks else {}) | {word: list(numbers) for word, numbers in self.fixed}}


def _numbers(word: str, value: object) -> tuple[int, ...]:
    given = value if isinstance(value, list | tuple) else [value]
    least = 0 if word == "z" else 1
    found = [one for one in given if isinstance(one, int) and not isinstance(one, bool) and least <= one <= MOST_RANKS]
    if not found or len(found) < len(given):
        raise UsageError(
            f"auto: {word}: {shown(value)}: write a number or a list of numbers from {least} to {MOST_RANKS}, as in {word}: [1, 2, 4]"
        )
    return tuple(sorted(set(found)))
