"""What a record holds and neither tokens nor mask show, counted, to be said once a source.

A template is a program: whether it writes a field is found by asking it. A text of some length must stand in what is written. Anything
else, such as a name or a number, is changed, and the template is run again: what then writes the same has not read it. The
answer is kept for each role and field, of so many fields as a person might have named.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from longshift.documents.template import Chat, UnsoundTemplate
from longshift.documents.template_process import TemplateProcess

UNREAD, UNWRITTEN = "not read", "not written by the chat template"
UNKNOWN = "not known to be written by the chat template, as there are too many names to ask it of each"
_MOST_FIELDS = 200  # of which a template is asked, a rendering each
_LONG = 12  # characters without blanks: a text of so many does not stand elsewhere by chance
_CUT = ("arguments", "parameters")  # what is in them has no names that a template knows
_OTHER = "longshift0sentinel"


class Leaf(NamedTuple):
    """A text, number or truth of a message. `field`: its name without indices; `path`: keys and indices that lead to it."""

    field: str
    path: tuple[str | int, ...]
    value: Any


class RecordNotes:
    """Counts for one source, and what is known of its template. Mutable."""

    def __init__(self, template: TemplateProcess | None):
        self.template = template
        self.counts: Counter[tuple[str, str]] = Counter()
        self._is_written: dict[str, bool] = {}
        self._seen_tools: set[str] = set()

    def add_unread(self, fields: Iterable[str]) -> None:
        self.counts.update((UNREAD, field) for field in fields)

    def add_text_of_records(self, name: str) -> None:
        self.counts["read as one text, though its first line is a JSON object (name a field to read records)", name] += 1

    def add_unlearned(self) -> None:
        self.counts["nothing is learned of", "conversations whose turns are all marked as not to learn"] += 1

    def add_unwritten(self, chat: Chat, text: str) -> None:
        """Count the fields of a conversation that do not show in its text."""
        squeezed = _squeeze(text)
        for number, message in enumerate(chat.messages):
            unshown = set[tuple[str, str]]()
            for leaf in _leaves({key: value for key, value in message.items() if key != "role"}):
                kind = self._fault(chat, squeezed, text, ("messages", number), leaf, message["role"])
                if kind == UNKNOWN:
                    unshown.add((kind, f"fields of {message['role']} messages"))
                elif kind:
                    unshown.add((kind, f"{leaf.field} of {message['role']} messages"))
            self.counts.update(unshown)
        if chat.tools is not None and (key := json.dumps(chat.tools, sort_keys=True, default=str)) not in self._seen_tools:
            self._seen_tools.add(key)
            leaves = _leaves(chat.tools) if isinstance(chat.tools, list | dict) else ()
            faults = {(self._fault(chat, squeezed, text, ("tools",), leaf, "tools"), leaf.field) for leaf in leaves}
            unshown = {(kind, "fields" if kind == UNKNOWN else field) for kind, field in faults if kind}
            self.counts.update((kind, f"{field} of tools".strip()) for kind, field in unshown)
        if self.template is not None:
            self.counts.update((UNWRITTEN, name) for name in chat.variables if name not in self.template.variables)

    def sentences(self) -> list[str]:
        """What happened to which fields, of how many records or messages."""
        by_kind: dict[str, list[str]] = {}
        for (kind, field), count in sorted(self.counts.items()):
            by_kind.setdefault(kind, []).append(f"{field} ({count:,})")
        return [f"{kind}: {', '.join(fields)}" for kind, fields in by_kind.items()]

    def _fault(self, chat: Chat, squeezed: str, text: str, place: tuple[str | int, ...], leaf: Leaf, role: str) -> str:
        """UNWRITTEN or UNKNOWN; empty where the value shows in the text."""
        if isinstance(leaf.value, str):
            wanted = _squeeze(leaf.value)
            if not wanted:
                return ""
            if len(wanted) >= _LONG:
                return "" if any(_squeeze(form) in squeezed for form in _forms(leaf.value)) else UNWRITTEN
        key = f"{role} {leaf.field}"
        if key not in self._is_written:
            if len(self._is_written) >= _MOST_FIELDS:
                return UNKNOWN
            self._is_written[key] = self._changes(chat, text, (*place, *leaf.path))
        return "" if self._is_written[key] else UNWRITTEN

    def _changes(self, chat: Chat, text: str, path: tuple[str | int, ...]) -> bool:
        """Whether another value at a place of the conversation gives another text."""
        assert self.template is not None
        changed = _replaced({"messages": list(chat.messages), "tools": chat.tools}, path, _OTHER)
        try:
            return self.template.write(chat._replace(messages=changed["messages"], tools=changed["tools"])) != text
        except UnsoundTemplate:  # it has read the value
            return True


def _leaves(value: Any, field: str = "", path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    if isinstance(value, dict):
        for key, entry in value.items():
            named = field if field.endswith(_CUT) else f"{field}.{key}".lstrip(".")
            yield from _leaves(entry, named, (*path, key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _leaves(entry, field, (*path, number))
    elif value is not None:
        yield Leaf(field, path, value)


def _replaced(value: Any, path: tuple[str | int, ...], leaf: Any) -> Any:
    """A copy, as far as it must be one, with another leaf at a path."""
    if not path:
        return leaf
    copied: Any = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = _replaced(value[path[0]], path[1:], leaf)
    return copied


def _squeeze(text: str) -> str:
    """Without blanks, which templates trim and add."""
    return "".join(text.split())


def _forms(text: str) -> Iterator[str]:
    """A text as it is, and as JSON writes it, which templates do with arguments of calls."""
    yield text
    for ensure_ascii in (False, True):
        yield json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
