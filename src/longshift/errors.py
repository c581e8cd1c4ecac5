"""Every failure that a person can cause or cure, one class per exit code. No traceback is shown for
these: the message says what, where, why, and the line that mends it."""

import difflib
from collections.abc import Iterable

MAX_SHOWN = 120  # letters of a value in a message


class LongshiftError(Exception):
    """Base class; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(LongshiftError):
    """A wrong command line, config or layout."""

    exit_code = 2


class DataError(LongshiftError):
    """A bad document, token or tokenizer; the message names the file and, in it, line and byte, row
    or entry."""

    exit_code = 3


class CheckpointError(LongshiftError):
    """A checkpoint, model folder or run folder that is missing, damaged, foreign or cannot be
    written."""

    exit_code = 4


class NonFiniteError(LongshiftError):
    """A loss or gradient that is not finite."""

    exit_code = 5


class PeerError(LongshiftError):
    """A rank died or did not answer in time."""

    exit_code = 6


class OutOfMemoryError(LongshiftError):
    """Device, host or disk memory is not enough."""

    exit_code = 7


def printable(text: str) -> str:
    """A text for a terminal: control characters, which a name of a file may hold, are written as
    escapes."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1]
        for letter in text
    )


def nearest(word: str, vocabulary: Iterable[str], least_alike: float = 0.6) -> list[str]:
    """The word of a vocabulary that is most like one that is not in it; none where all differ too
    much."""
    return difflib.get_close_matches(word, list(vocabulary), 1, least_alike)


def sort_by_likeness(word: str, names: Iterable[str]) -> list[str]:
    """Dotted names, the most alike first: by the run of a name's parts that is most like a word."""

    def likeness(name: str) -> float:
        parts = name.split(".")
        runs = [
            ".".join(parts[start:stop])
            for start in range(len(parts))
            for stop in range(start + 1, len(parts) + 1)
        ]
        return max(difflib.SequenceMatcher(None, word, run).ratio() for run in runs)

    return sorted(names, key=likeness, reverse=True)


def did_you_mean(word: str, vocabulary: Iterable[str], otherwise: str = "known") -> str:
    """The end of a sentence about a word that is not in a vocabulary: the nearest one; where none
    is near, all of them after `otherwise`, or nothing where that is empty."""
    vocabulary = list(vocabulary)
    if close := nearest(word, vocabulary):
        return f"; did you mean {close[0]!r}?"
    return f"; {otherwise}: {', '.join(vocabulary)}" if otherwise else ""


def shown(value: object) -> str:
    """A value as it is told in a message: its repr, whose middle is left out where it is long."""
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return f"a number of more than {MAX_SHOWN} digits"
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 4 :]}"
