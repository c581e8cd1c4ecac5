"""What a person writes in YAML: plain scalars, lists and mappings, with the line of every key.
Nothing else of YAML is known here, so that no text makes the reader fail, wait or grow: no anchors,
no tags, no dates, and limits on size, depth and numbers.

The parser's events are read, not its nodes: values are made by recursion, which the limit on depth
ends."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.events import (
    CollectionEndEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from longshift.errors import UsageError

MAX_BYTES = 1 << 18  # 256 KiB: a config is a page or two, and the parser takes a second for so much
MAX_VALUES = 10_000
MAX_DEPTH = 32
MAX_DIGITS = 300  # more are no float either

_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?")
_ENDLESS = re.compile(r"([-+]?)\.(inf|nan)", re.IGNORECASE)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class YamlDocument:
    """A value, and where its parts stand: the line of each key path, and the key paths that a
    mapping gives again."""

    value: Any
    lines: dict[tuple, int]
    twice: list[tuple[tuple, int]]


def read_yaml(text: str, name: str) -> YamlDocument:
    """The one document of a text. Raises UsageError that names the line; `name` stands for the file
    in it."""
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"{name} has {len(text)} characters, and a config has at most {MAX_BYTES}; is this the"
            " right file?"
        )
    reader = _YamlParser(text, name)
    try:
        value = reader.document()
    except yaml.YAMLError as fault:
        raise UsageError(f"{name} is not YAML: {' '.join(str(fault).split())[:300]}") from None
    except (ValueError, OverflowError) as fault:  # an escape or a directive that is no number
        raise UsageError(f"{name}:{reader.line}: is not YAML: {str(fault)[:100]}") from None
    return YamlDocument(value, reader.lines, reader.twice)


def not_text(text: str) -> str | None:
    """Why a text is none that a file or a path can hold; None where it is."""
    match = _NO_TEXT.search(text)
    return match and (
        "a null byte" if match[0] == "\0" else "half of a surrogate pair, which is no Unicode"
    )


class _YamlParser:
    """Events to values (mutable: the line that was read last, and what `YamlDocument` says beside
    the value)."""

    def __init__(self, text: str, name: str):
        self.name = name
        self.line = 1
        self.lines: dict[tuple, int] = {(): 1}
        self.twice: list[tuple[tuple, int]] = []
        self._events = self._read(text)

    def document(self) -> object:
        """The value of the only document. Raises UsageError where there are more."""
        value = None
        has_document = False
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                if has_document:
                    raise self._fault("a second document (---); a config is one")
                has_document = True
            elif isinstance(event, NodeEvent):
                value = self._value(event, ())
        return value

    def _fault(self, reason: str) -> UsageError:
        """An error that names the line."""
        return UsageError(f"{self.name}:{self.line}: {reason}")

    def _value(self, event: Event, path: tuple) -> object:
        """The value that begins with an event."""
        self.lines.setdefault(path, self.line)
        # What is quoted stays text.
        if isinstance(event, ScalarEvent):
            return self._scalar(event.value) if event.implicit[0] else event.value
        if len(path) == MAX_DEPTH:
            raise self._fault(f"more than {MAX_DEPTH} lists and mappings inside each other")
        if isinstance(event, MappingStartEvent):
            return self._mapping(path)
        values = list[object]()
        while not isinstance(event := next(self._events), CollectionEndEvent):
            values.append(self._value(event, (*path, len(values))))
        return values

    def _mapping(self, path: tuple) -> dict[str, object]:
        """A mapping, whose start was read."""
        values = dict[str, object]()
        while not isinstance(event := next(self._events), CollectionEndEvent):
            if not isinstance(event, ScalarEvent):
                raise self._fault("a list or a mapping stands where a key is needed")
            key_path = (*path, event.value)
            # Not an error yet: it is told together with all other faults of the config.
            if key_path in self.lines:
                self.twice.append((key_path, self.line))
            self.lines[key_path] = self.line
            values[event.value] = self._value(next(self._events), key_path)
        return values

    def _read(self, text: str) -> Iterator[Event]:
        """The events of a text. Raises UsageError for what is no plain key or value, and for one
        too many."""
        num_values = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            self.line = event.start_mark.line + 1
            if isinstance(event, NodeEvent):
                num_values += 1
                self._check_plain(event, num_values)
            yield event

    def _check_plain(self, event: NodeEvent, num_values: int) -> None:
        # Aliases can make a text of a hundred bytes a value of gigabytes.
        if event.anchor is not None:
            raise self._fault(
                f"{event.anchor!r} is an anchor or an alias (& or *), which is not read here: write"
                " the value out"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self._fault(f"{tag!r} is a tag (!), which is not read here: leave it out")
        if num_values > MAX_VALUES:
            raise self._fault(f"more than {MAX_VALUES} keys and values; is this the right file?")
        if isinstance(event, ScalarEvent) and (reason := not_text(event.value)):
            raise self._fault(f"{event.value[:80]!r} holds {reason}")

    def _scalar(self, text: str) -> object:
        """As YAML 1.1 has it, of decimal numbers, truth and null."""
        if text in _WORDS or (text.lower() in _WORDS and text in (text.upper(), text.capitalize())):
            return _WORDS[text.lower()]
        if endless := _ENDLESS.fullmatch(text):
            return float(endless[1] + endless[2])
        # What YAML 1.1 reads otherwise than people do, such as 017 and 1:30, stays text.
        number = int if _INT.fullmatch(text) else float if _FLOAT.fullmatch(text) else None
        if number is None:
            return text
        if len(text) > MAX_DIGITS:
            raise self._fault(f"a number of {len(text)} digits; at most {MAX_DIGITS} are read")
        return number(text.replace("_", ""))
