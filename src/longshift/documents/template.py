r"""Chat templates: the messages of a conversation to the text that a model reads, and which characters of it the assistant says.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                         ^^^^^^^^^^^^^^^ targets

A template is a Jinja program that comes with a tokenizer: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. It runs in
Jinja's sandbox. What the assistant says is found in one of two ways:

markers    The template marks it: `{% generation %} ... {% endgeneration %}`, as in `transformers`.
prefixes   The conversation up to a turn of the assistant, with the prompt that asks for it, begins the conversation with that turn;
           what comes after it is the turn, to the special token that ends it, such as <|im_end|>. Where it does not, the turn begins
           with its content. A template that writes a turn otherwise once others follow (it drops earlier thoughts, say) is refused:
           what would be learned is not what is said.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longshift.errors import DataError

if TYPE_CHECKING:  # the process of a template starts quickly
    from longshift.config_parts import Learn

Span = tuple[int, int]  # characters, the end excluded
Message = Mapping[str, Any]

FILE, CONFIGS = "chat_template.jinja", ("tokenizer_config.json", "special_tokens_map.json")
_OPEN, _CLOSE, _OTHER = "\ufdd0", "\ufdd1", "\ufdd2"  # code points that Unicode keeps free for a program's own use


class Chat(NamedTuple):
    """A conversation for a template. `tools`: functions that the model may call; `variables`: more that the template may read, by name;
    `day`, in seconds since 1970, is what it takes for now, as tokens must not depend on the day that they are made; `learned`: of each
    message, whether the record says to learn it, or not, or neither (None)."""

    messages: Sequence[Message]
    tools: Any = None
    variables: Mapping[str, Any] = {}
    day: float = 0.0
    learned: Sequence[bool | None] = ()


class Rendered(NamedTuple):
    """A conversation as text; `learned`: the characters that are targets, ascending."""

    text: str
    learned: tuple[Span, ...]


class UnsoundTemplate(Exception):
    """What the assistant says cannot be found in what a template writes; the message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `source`: the program; `where`: its file; `names`: special tokens by name, such as `bos_token`; `special`: all
    special tokens of the tokenizer."""

    source: str
    where: str
    names: tuple[tuple[str, str], ...]
    special: tuple[str, ...]

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        return environment

    @cached_property
    def _program(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as fault:
            raise DataError(f"{self.where}, line {fault.lineno}: not a chat template that can be read: {fault.message}") from None

    def list_variables(self) -> list[str]:
        """Names that the program reads and does not set itself."""
        return sorted(meta.find_undeclared_variables(self._environment.parse(self.source)))

    def write(self, chat: Chat) -> str:
        """The text of a conversation. Raises UnsoundTemplate for what the template refuses."""
        return _unmarked(self._write(chat))[0]

    def render(self, chat: Chat, learn: "Learn") -> Rendered:
        """The conversation, and what of it is learned: all that the assistant says, its last turn, or everything; without the turns that
        the record says not to learn. Raises UnsoundTemplate, also for what the template itself refuses."""
        turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        excluded = {number for number in turns if chat.learned and chat.learned[number] is False}
        text, marked = _unmarked(self._write(chat))
        if learn == "all" and not excluded:
            return Rendered(text, ((0, len(text)),))
        if learn == "assistant" and not excluded and marked:
            return Rendered(text, tuple(marked))

        # 1. The spans of each turn that counts.
        selected = turns[-1:] if learn == "last" else sorted(excluded) if learn == "all" else turns
        if marked:
            spans = self._marked_spans(chat, turns, marked)
        else:
            spans = {number: [self._turn(text, chat, number)] for number in selected}

        # 2. What is learned: these, or the rest of the text.
        if learn == "all":
            return Rendered(text, _between(sorted(span for number in excluded for span in spans[number]), len(text)))
        for number in selected:
            if not spans[number] and number not in excluded:
                raise UnsoundTemplate(f"the chat template ({self.where}) marks nothing in turn {number + 1}, of the assistant")
        return Rendered(text, tuple(span for number in selected if number not in excluded for span in spans[number]))

    def turn_end(self) -> str | None:
        """The special token that ends what is learned of a turn; None where none does, or the template refuses a short conversation."""
        try:
            rendered = self.render(Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]), "last")
        except UnsoundTemplate:
            return None
        said = rendered.text[slice(*rendered.learned[-1])].rstrip() if rendered.learned else ""
        return next((token for token in self.special if said.endswith(token)), None)

    def _write(self, chat: Chat, first: int | None = None, prompt: bool = False) -> str:
        """The text of the `first` messages, all without it, with marks; with `prompt`, and what asks for the assistant's turn."""

        def now(form: str) -> str:
            return time.strftime(form, time.gmtime(chat.day))

        variables = dict(self.names) | {"documents": None} | dict(chat.variables)
        variables |= {"messages": chat.messages[:first], "tools": chat.tools, "add_generation_prompt": prompt, "strftime_now": now}
        try:
            return self._program.render(**variables)
        except (DataError, MemoryError):
            raise
        except Exception as fault:  # a template is a program: it may fail in any way
            raise UnsoundTemplate(f"the chat template ({self.where}) refuses it: {fault}") from None

    def _marked_spans(self, chat: Chat, turns: Sequence[int], marked: Sequence[Span]) -> dict[int, list[Span]]:
        """The marked spans of each turn: those that come with it when the conversation is written turn by turn."""
        spans, begin = {}, 0
        for number in turns:
            end = len(_unmarked(self._write(chat, number + 1))[1])
            spans[number] = list(marked[begin:end])
            if end < begin:
                break
            begin = end
        if begin != len(marked) or len(spans) < len(turns):
            raise UnsoundTemplate(f"the chat template ({self.where}) marks earlier turns otherwise once others follow; mark each turn once")
        return spans

    def _turn(self, text: str, chat: Chat, number: int) -> Span:
        """Where one turn of the assistant stands in the text."""
        asked, told = _unmarked(self._write(chat, number, prompt=True))[0], _unmarked(self._write(chat, number + 1))[0]
        if told.startswith(asked):
            said = self._to_its_end(told[len(asked) :])
        elif content := self._content(told, chat, number):
            asked, said = told[: content[0]], told[content[0] : content[1]]
        else:
            raise UnsoundTemplate(
                f"the chat template ({self.where}) writes messages before turn {number + 1} otherwise once the assistant has answered, so "
                "what is said cannot be found; use a template that marks it with {% generation %} and {% endgeneration %}"
            )
        if not said:
            raise UnsoundTemplate(f"the chat template ({self.where}) writes nothing for turn {number + 1}, of the assistant")
        if not text.startswith(asked + said):
            raise UnsoundTemplate(
                f"the chat template ({self.where}) writes turn {number + 1}, of the assistant, otherwise once others follow (it may drop "
                "thoughts), so it cannot be learned as it is said; write learn: last beside messages, or use a template that marks what is "
                "learned with {% generation %} and {% endgeneration %}"
            )
        return len(asked), len(asked) + len(said)

    def _content(self, told: str, chat: Chat, number: int) -> Span | None:
        """Where the content of a turn stands in the conversation up to it, with the special token that follows it: where another content
        gives another text. None if nothing of it is written."""
        if not chat.messages[number]["content"]:
            return None
        other = [*chat.messages[:number], {**chat.messages[number], "content": _OTHER}]
        before, found, after = _unmarked(self._write(chat._replace(messages=other)))[0].partition(_OTHER)
        if not found or not told.startswith(before) or not told.endswith(after) or len(told) < len(before) + len(after):
            return None
        end = next((token for token in self.special if after.lstrip().startswith(token)), "")
        return len(before), len(told) - len(after) + (after.index(end) + len(end) if end else 0)

    def _to_its_end(self, said: str) -> str:
        """A turn to the special token that ends it, the first after which there are only blanks and special tokens; all without one."""
        end, cut = len(said), said.rstrip()
        while self.special and cut.endswith(self.special):
            end = len(cut)
            cut = cut.removesuffix(next(token for token in self.special if cut.endswith(token))).rstrip()
        return said[:end]


def read_template(given: Path | None, tokenizer: Path, special: Sequence[str]) -> ChatTemplate:
    """The template in file `given`, else the one beside a `tokenizer.json` with these special tokens. Raises DataError where there is
    none."""
    configs = [(path, read_json(path)) for path in (tokenizer.parent / name for name in CONFIGS) if path.exists()]
    names = dict[str, str]()
    for _, config in configs:
        for name, token in config.items():
            token = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(token, str):
                names.setdefault(name, token)
    for source, where in _sources(given, tokenizer, configs):
        return ChatTemplate(source, where, tuple(sorted(names.items())), tuple(special))
    raise DataError(
        f"{tokenizer.parent}: no chat template comes with the tokenizer ({FILE}, or chat_template in {CONFIGS[0]}); "
        "write data.template: FILE with the template of the model's chat variant"
    )


def _sources(given: Path | None, tokenizer: Path, configs: Sequence[tuple[Path, dict]]) -> Iterator[tuple[str, str]]:
    """Templates and where they are, the one that counts first."""
    for path in [given] if given else [tokenizer.parent / FILE]:
        try:
            yield path.read_text(encoding="utf-8"), str(path)
        except FileNotFoundError:
            if given:
                raise DataError(f"data.template: {given} does not exist; it is a file with a chat template") from None
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"{path}: cannot be read as a chat template: {fault}") from None
    for path, config in configs:
        found = config.get("chat_template")
        if isinstance(found, list):  # several of them, by name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default") or next(iter(named.values()), None)
        if isinstance(found, str):
            yield found, str(path)
        elif found is not None:
            raise DataError(f"{path}: chat_template holds {type(found).__name__}, where a template is needed")


def read_json(path: Path) -> dict:
    """The JSON object of a file. Raises DataError."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as fault:
        raise DataError(f"{path}: cannot be read: {fault}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds {type(found).__name__}, where an object is needed")
    return found


def check_unmarked(value: object) -> None:
    """Raises UnsoundTemplate where a text has one of the two characters that mark what is learned."""
    if any(mark in json.dumps(value, ensure_ascii=False, default=str) for mark in (_OPEN, _CLOSE)):
        raise UnsoundTemplate("it holds U+FDD0 or U+FDD1, which are no characters of a text")


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """A text without its marks, and what was between them."""
    pieces, spans, at = text.split(_OPEN), list[Span](), 0
    plain = [pieces[0]]
    at = len(pieces[0])
    for piece in pieces[1:]:
        said, _, rest = piece.partition(_CLOSE)
        spans += [(at, at + len(said))] if said else []
        plain += [said, rest]
        at += len(said) + len(rest)
    return "".join(plain), spans


class _Marked(Extension):
    """`{% generation %} ... {% endgeneration %}`, as in `transformers`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return _OPEN + caller() + _CLOSE


def _between(spans: Sequence[Span], end: int) -> tuple[Span, ...]:
    """What is left of a text of `end` characters without some spans."""
    edges = [0, *(edge for span in spans for edge in span), end]
    return tuple((first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter; arguments in the order of `transformers`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(why: str) -> None:
    raise jinja2.TemplateError(why)
