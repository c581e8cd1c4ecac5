"""What a record holds and neither tokens nor mask show, counted, to be said once a source.

A template is a program: whether it writes a field is found by asking it. A text of some length must
stand in what is written. Anything else, such as a name or a number, is changed, and the template is
run again: what then writes the same has not read it. The
answer is kept for each role and field, of so many fields as a person might have named.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from longshift.documents.template import Chat, UnsoundTemplate
from longshift.documents.template_process import TemplateProcess

UNREAD = "not read"
ONE_TEXT = "read as one text, though its first line is a JSON object (name a field to read records)"
UNLEARNED = "nothing is learned of"
UNWRITTEN = "not written by the chat template"
UNKNOWN = (
    "not known to be written by the chat template, as there are too many names to ask it of each"
)
_MAX_FIELDS = 200  # of which a template is asked, a rendering each
_LONG_CHARACTERS = 12  # without blanks: a text of so many does not stand elsewhere by chance
_OPAQUE_FIELDS = ("arguments", "parameters")  # what is in them has no names that a template knows
_SENTINEL = "longshift0sentinel"


class Leaf(NamedTuple):
    """A text, number or truth of a message. `field`: its name without indices; `path`: keys and
    indices that lead to it."""

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

    def add(self, kind: str, fields: Iterable[str]) -> None:
        """Count fields, or what else there is a note of this kind on."""
        self.counts.update((kind, field) for field in fields)

    def add_unwritten(self, chat: Chat, text: str) -> None:
        """Count the fields of a conversation that do not show in its text."""
        squeezed = _squeeze(text)

        # 1. Fields of messages, each once a message.
        for number, message in enumerate(chat.messages):
            fields = {key: value for key, value in message.items() if key != "role"}
            place = "messages", number
            self._count_faults(chat, squeezed, text, place, fields, f"{message['role']} messages")

        # 2. Fields of tools, once for all conversations with the same tools.
        key = json.dumps(chat.tools, sort_keys=True, default=str)
        if key not in self._seen_tools:
            self._seen_tools.add(key)
            self._count_faults(chat, squeezed, text, ("tools",), chat.tools, "tools")

        # 3. Variables that the template does not read.
        if self.template is not None and chat.variables:
            self.add(UNWRITTEN, chat.variables.keys() - self.template.variables)

    def _count_faults(
        self,
        chat: Chat,
        squeezed: str,
        text: str,
        place: tuple[str | int, ...],
        value: Any,
        noun: str,
    ) -> None:
        """Count, each once, the fields of a message or of the tools that do not show in the text.

        `squeezed`: the text without blanks; `place`: keys and indices that lead to the value;
        `noun`: what it is, for sentences."""
        faults = set[tuple[str, str]]()
        for leaf in _leaves(value):
            path = *place, *leaf.path
            if kind := self._fault(chat, squeezed, text, path, leaf.value, f"{noun} {leaf.field}"):
                field = "fields" if kind == UNKNOWN else leaf.field
                faults.add((kind, f"{field} of {noun}".strip()))
        self.counts.update(faults)

    def sentences(self) -> list[str]:
        """What happened to which fields, of how many records or messages."""
        by_kind: dict[str, list[str]] = {}
        for (kind, field), count in sorted(self.counts.items()):
            by_kind.setdefault(kind, []).append(f"{field} ({count:,})")
        return [f"{kind}: {', '.join(fields)}" for kind, fields in by_kind.items()]

    def _fault(
        self,
        chat: Chat,
        squeezed: str,
        text: str,
        path: tuple[str | int, ...],
        value: Any,
        key: str,
    ) -> str:
        """UNWRITTEN or UNKNOWN; empty where the value at a path of the conversation shows in the
        text. `key`: the field, and whose it is."""
        if isinstance(value, str):
            squeezed_value = _squeeze(value)
            if not squeezed_value:
                return ""
            if len(squeezed_value) >= _LONG_CHARACTERS:
                is_written = any(_squeeze(form) in squeezed for form in _forms(value))
                return "" if is_written else UNWRITTEN

        # A short value may stand elsewhere by chance, so the template is asked, once for each
        # field.
        if key not in self._is_written:
            if len(self._is_written) >= _MAX_FIELDS:
                return UNKNOWN
            self._is_written[key] = self._changes(chat, text, path)
        return "" if self._is_written[key] else UNWRITTEN

    def _changes(self, chat: Chat, text: str, path: tuple[str | int, ...]) -> bool:
        """Whether another value at a place of the conversation gives another text."""
        assert self.template is not None
        fields = _replace_leaf(
            {"messages": list(chat.messages), "tools": chat.tools}, path, _SENTINEL
        )
        changed_chat = chat._replace(messages=fields["messages"], tools=fields["tools"])
        try:
            return self.template.write(changed_chat) != text
        except UnsoundTemplate:  # it has read the value
            return True


def _leaves(value: Any, field: str = "", path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    if isinstance(value, dict):
        for key, entry in value.items():
            entry_field = field if field.endswith(_OPAQUE_FIELDS) else f"{field}.{key}".lstrip(".")
            yield from _leaves(entry, entry_field, (*path, key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _leaves(entry, field, (*path, number))
    elif value is not None:
        yield Leaf(field, path, value)


def _replace_leaf(value: Any, path: tuple[str | int, ...], leaf: Any) -> Any:
    """A value with another leaf at a path. Only what holds the leaf is copied."""
    if not path:
        return leaf
    key, *rest = path
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = _replace_leaf(value[key], tuple(rest), leaf)
    return copy


def _squeeze(text: str) -> str:
    """Without blanks, which templates trim and add."""
    return "".join(text.split())


def _forms(text: str) -> Iterator[str]:
    """A text as it is, and as JSON writes it, which templates do with arguments of calls."""
    yield text
    for ensure_ascii in (False, True):
        yield json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
