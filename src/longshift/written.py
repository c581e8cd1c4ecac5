"""What a person writes in YAML: plain scalars, lists and mappings, with the line of every key. Nothing else of YAML is known here, so that
no text makes the reader fail, wait or grow: no anchors, no tags, no dates, and limits on size, depth and numbers.

The parser's events are read, not its nodes, which it makes by recursion.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from longshift.errors import UsageError

MOST_BYTES = 1 << 18  # 256 KiB: a config is a page or two, and the parser takes a second for so much
MOST_VALUES = 10_000
MOST_DEPTH = 32
MOST_DIGITS = 300  # more are no float either

_WORDS = {"": None, "~": None, "null": None, "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?")
_ENDLESS = re.compile(r"([-+]?)\.(inf|nan)", re.IGNORECASE)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Written:
    """A value, and where its parts stand: the line of each key path, and the key paths that a mapping gives again."""

    value: Any
    lines: dict[tuple, int]
    twice: list[tuple[tuple, int]]


@dataclass
class _Open:
    """A mapping or a list that is being read (mutable); `key` waits for its value."""

    at: tuple
    values: dict[str, Any] | list[Any]
    key: str | None = field(default=None)

    def here(self) -> tuple:
        return (*self.at, self.key if isinstance(self.values, dict) else len(self.values))

    def put(self, value: object) -> None:
        if isinstance(self.values, dict):
            self.values[self.key or ""] = value
            self.key = None
        else:
            self.values.append(value)


def read_yaml(text: str, name: str) -> Written:
    """The one document of a text. Raises UsageError that names the line; `name` stands for the file in it."""
    if len(text) > MOST_BYTES:
        raise UsageError(f"{name} has {len(text)} characters, and a config has at most {MOST_BYTES}; is this the right file?")
    reader = _Reader(name)
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            reader.take(event)
    except yaml.YAMLError as fault:
        raise UsageError(f"{name} is not YAML: {' '.join(str(fault).split())[:300]}") from None
    except (ValueError, OverflowError) as fault:  # an escape or a directive that is no number
        raise UsageError(f"{name}:{reader.line}: is not YAML: {str(fault)[:100]}") from None
    return Written(reader.value, reader.lines, reader.twice)


def not_text(text: str) -> str | None:
    """Why a text is none that a file or a path can hold; None where it is."""
    found = _NO_TEXT.search(text)
    return found and ("a null byte" if found[0] == "\0" else "half of a surrogate pair, which is no Unicode")


class _Reader:
    """Events to values (mutable: it holds what is open)."""

    def __init__(self, name: str):
        self.name, self.line = name, 1
        self.value: Any = None
        self.lines: dict[tuple, int] = {(): 1}
        self.twice: list[tuple[tuple, int]] = []
        self._open: list[_Open] = []
        self._documents = self._values = 0

    def take(self, event: Event) -> None:
        self.line = event.start_mark.line + 1
        if isinstance(event, DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise self._fault("a second document (---); a config is one")
        elif isinstance(event, CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, NodeEvent):
            self._node(event)

    def _fault(self, why: str) -> UsageError:
        return UsageError(f"{self.name}:{self.line}: {why}")

    def _node(self, event: NodeEvent) -> None:
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise self._fault(f"{event.anchor!r} is an anchor or an alias (& or *), which is not read here: write the value out")
        if event.tag is not None:  # pyright: ignore[reportAttributeAccessIssue]
            raise self._fault(f"{event.tag!r} is a tag (!), which is not read here: leave it out")  # pyright: ignore[reportAttributeAccessIssue]
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._fault(f"more than {MOST_VALUES} keys and values; is this the right file?")
        inside = self._open[-1] if self._open else None
        if inside is not None and isinstance(inside.values, dict) and inside.key is None:
            self._key(inside, event)
            return
        at = inside.here() if inside is not None else ()
        self.lines.setdefault(at, self.line)
        value = self._begin(event, at)
        if inside is None:
            self.value = value
        else:
            inside.put(value)

    def _key(self, inside: _Open, event: NodeEvent) -> None:
        if not isinstance(event, ScalarEvent):
            raise self._fault("a list or a mapping stands where a key is needed")
        at = (*inside.at, self._text(event))
        if at in self.lines:
            self.twice.append((at, self.line))
        self.lines[at], inside.key = self.line, at[-1]

    def _begin(self, event: NodeEvent, at: tuple) -> Any:
        """The value of a scalar, or an empty collection that is open from here on."""
        if isinstance(event, ScalarEvent):
            text = self._text(event)
            return self._scalar(text) if event.implicit[0] else text
        values: Any = {} if isinstance(event, MappingStartEvent) else []
        assert isinstance(event, MappingStartEvent | SequenceStartEvent)
        if len(self._open) == MOST_DEPTH:
            raise self._fault(f"more than {MOST_DEPTH} lists and mappings inside each other")
        self._open.append(_Open(at, values))
        return values

    def _text(self, event: ScalarEvent) -> str:
        if why := not_text(event.value):
            raise self._fault(f"{event.value[:80]!r} holds {why}")
        return event.value

    def _scalar(self, text: str) -> object:
        """As YAML 1.1 has it, of decimal numbers, truth and null."""
        if text in _WORDS or (text.lower() in _WORDS and text in (text.upper(), text.capitalize())):
            return _WORDS[text.lower()]
        if endless := _ENDLESS.fullmatch(text):
            return float(endless[1] + endless[2])
        number = int if _INT.fullmatch(text) else float if _FLOAT.fullmatch(text) else None
        if number is None:
            return text
        if len(text) > MOST_DIGITS:
            raise self._fault(f"a number of {len(text)} digits; at most {MOST_DIGITS} are read")
        return number(text.replace("_", ""))
