"""The text of a config to plain values, with the line of every key.

The subset of YAML that configs need: mappings, lists and scalars. A scalar without quotes is null, true, false, an integer or a number
where it is written as one (YAML 1.2, core schema), else text: a date or a hexadecimal number is text. Tags, anchors and references are
refused: what they stand for cannot be seen where they are read, and may be without end. Size and depth are bounded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from longshift.errors import UsageError

MOST_BYTES, MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 1 << 20, 20_000, 16, 30

_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: value for value, words in ((True, "true True TRUE"), (False, "false False FALSE")) for word in words.split()
}

Key = tuple[str | int, ...]


@dataclass
class Parsed:
    """The values of a text, the line (from 1) of each key, and the keys that a mapping gives twice, with the line of the second."""

    values: Any = None
    lines: dict[Key, int] = field(default_factory=dict)
    twice: list[tuple[Key, int]] = field(default_factory=list)


def parse(text: str, name: str) -> Parsed:
    """Raises UsageError with `name`, the line and what is wrong."""
    if len(text) > MOST_BYTES:
        raise UsageError(f"{name} has {len(text)} characters, and a config has at most {MOST_BYTES}")
    found = Parsed()
    try:
        events = _bounded(yaml.parse(text, yaml.SafeLoader), name)
        first = next((event for event in events if not isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent)), None)
        if first is not None and not isinstance(first, yaml.StreamEndEvent):
            found.values = _value(first, events, (), found, name)
            if more := next((event for event in events if isinstance(event, yaml.DocumentStartEvent)), None):
                raise UsageError(f"{name}:{more.start_mark.line + 1}: a second document begins; a config is one")
    except yaml.YAMLError as fault:
        raise UsageError(f"{name} is not YAML: {' '.join(str(fault).split())}") from None
    return found


def scalar(text: str) -> object:
    """What a word without quotes stands for. Raises ValueError for an integer of too many digits."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > MOST_DIGITS:
            raise ValueError(f"a number of {len(text)} digits, and {MOST_DIGITS} are the most")
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


class Dumper(yaml.SafeDumper):
    """Writes values so that `parse` reads the same."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = not _NUMBER.fullmatch(text) and text not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


Dumper.add_representer(str, _represent)


def _bounded(events: Iterator[yaml.Event], name: str) -> Iterator[yaml.Event]:
    """The events, as long as there are not too many."""
    depth = values = 0
    for event in events:
        line = f"{name}:{event.start_mark.line + 1}" if event.start_mark else name
        opens = isinstance(event, yaml.CollectionStartEvent)
        depth += opens - isinstance(event, yaml.CollectionEndEvent)
        values += opens or isinstance(event, yaml.ScalarEvent)
        if depth > MOST_DEPTH:
            raise UsageError(f"{line}: lists and mappings are nested more than {MOST_DEPTH} deep")
        if values > MOST_VALUES:
            raise UsageError(f"{line}: a config has at most {MOST_VALUES} values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UsageError(f"{line}: anchors (&) and references (*) are not read in a config; write the value itself")
        if getattr(event, "tag", None) not in (None, "!"):  # pyright: ignore
            raise UsageError(f"{line}: tags such as {event.tag} are not read in a config; write the value without it")  # pyright: ignore
        yield event


def _value(event: yaml.Event, events: Iterator[yaml.Event], at: Key, found: Parsed, name: str) -> Any:
    line = event.start_mark.line + 1
    found.lines.setdefault(at, line)
    if isinstance(event, yaml.ScalarEvent):
        try:
            return scalar(event.value) if event.implicit[0] else event.value
        except ValueError as fault:
            key = ".".join(map(str, at))
            raise UsageError(f"{name}:{line}: {key}{': ' if key else ''}{fault}") from None
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(entry := next(events), yaml.SequenceEndEvent):
            items.append(_value(entry, events, (*at, len(items)), found, name))
        return items
    values: dict[str, Any] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarEvent):
            raise UsageError(f"{name}:{line}: a key is a word, not a list or a mapping")
        here = (*at, key.value)
        if key.value in values:
            found.twice.append((here, line))
        found.lines[here] = line
        values[key.value] = _value(next(events), events, here, found, name)
    return values
