r"""Chat templates: the messages of a conversation to the text that a model reads, and which
characters of it the assistant says.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                         ^^^^^^^^^^^^^^^ targets

A template is a Jinja program that comes with a tokenizer: `chat_template.jinja`, or `chat_template`
in `tokenizer_config.json`. It runs in Jinja's sandbox. What the assistant says is found in one of
two ways:

markers    The template marks it: `{% generation %} ... {% endgeneration %}`, as in `transformers`.
prefixes   The conversation up to a turn of the assistant, with the prompt that asks for it, begins
           the conversation with that turn; what comes after it is the turn, to the special token
           that ends it, such as <|im_end|>. Where it does not, the turn begins with its content. A
           template that writes a turn otherwise once others follow (it drops earlier thoughts, say)
           is refused: what would be learned is not what is said.
"""

import json
import time
from collections.abc import Mapping, Sequence
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

FILE = "chat_template.jinja"
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# Code points that Unicode keeps free for a program's own use: no text has them.
_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"
_PLACEHOLDER = "\ufdd2"


class Chat(NamedTuple):
    """A conversation for a template. `tools`: functions that the model may call; `variables`: more
    that the template may read, by name; `day`, in seconds since 1970, is what it takes for now, as
    tokens must not depend on the day that they are made; `learned`: of each message, whether the
    record says to learn it, or not, or neither (None)."""

    messages: Sequence[Message]
    tools: Any = None
    variables: Mapping[str, Any] = {}
    day: float = 0.0
    learned: Sequence[bool | None] = ()


class RenderedConversation(NamedTuple):
    """A conversation as text; `learned`: the characters that are targets, ascending."""

    text: str
    learned: tuple[Span, ...]


class UnsoundTemplate(Exception):
    """What the assistant says cannot be found in what a template writes; the message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `source`: the program; `where`: its file; `names`: special tokens by name,
    such as `bos_token`; `special`: all special tokens of the tokenizer."""

    source: str
    where: str
    names: tuple[tuple[str, str], ...]
    special: tuple[str, ...]

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_MarkedExtension, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        return environment

    @cached_property
    def _program(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as fault:
            raise DataError(
                f"{self.where}, line {fault.lineno}: not a chat template that can be read:"
                f" {fault.message}"
            ) from None

    def list_variables(self) -> list[str]:
        """Names that the program reads and does not set itself."""
        return sorted(meta.find_undeclared_variables(self._environment.parse(self.source)))

    def write(self, chat: Chat) -> str:
        """The text of a conversation. Raises UnsoundTemplate for what the template refuses."""
        return _unmarked(self._write(chat))[0]

    def render(self, chat: Chat, learn: "Learn") -> RenderedConversation:
        """The conversation, and what of it is learned, without the turns that the record excludes.

        `learn`: all that the assistant says, its last turn, or everything.
        Raises UnsoundTemplate, also for what the template itself refuses.
        """
        turns = [
            number for number, message in enumerate(chat.messages) if message["role"] == "assistant"
        ]
        excluded = {number for number in turns if chat.learned and chat.learned[number] is False}
        text, marks = _unmarked(self._write(chat))
        if learn == "assistant" and not excluded and marks:
            return RenderedConversation(text, tuple(marks))

        # 1. The turns that are learned or, where everything is, those that are not.
        if learn == "all":
            selected = sorted(excluded)
        else:
            candidates = turns[-1:] if learn == "last" else turns
            selected = [number for number in candidates if number not in excluded]

        # 2. Their spans.
        if marks and selected:
            spans_by_turn = self._marked_spans(chat, turns, marks)
        else:
            spans_by_turn = {number: [self._turn(text, chat, number)] for number in selected}
        spans = list[Span]()
        for number in selected:
            if not spans_by_turn[number]:
                raise UnsoundTemplate(
                    f"the chat template ({self.where}) marks nothing in turn {number + 1}, of the"
                    " assistant"
                )
            spans += spans_by_turn[number]
        return RenderedConversation(
            text, _between(spans, len(text)) if learn == "all" else tuple(spans)
        )

    def turn_end(self) -> str | None:
        """The special token that ends what is learned of a turn; None where none does, or the
        template refuses a short conversation."""
        chat = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        try:
            rendered = self.render(chat, "last")
        except UnsoundTemplate:
            return None
        turn = ""
        if rendered.learned:
            begin, end = rendered.learned[-1]
            turn = rendered.text[begin:end].rstrip()
        return next((token for token in self.special if turn.endswith(token)), None)

    def _write(self, chat: Chat, first: int | None = None, prompt: bool = False) -> str:
        """The text of the `first` messages, with marks. `first`: None for all; `prompt`: add what
        asks for the assistant's turn."""

        def now(form: str) -> str:
            return time.strftime(form, time.gmtime(chat.day))

        # A record may set `documents`, and none of the last four.
        variables = dict(self.names) | {"documents": None} | dict(chat.variables)
        variables |= {
            "messages": chat.messages[:first],
            "tools": chat.tools,
            "add_generation_prompt": prompt,
            "strftime_now": now,
        }
        try:
            return self._program.render(**variables)
        except (DataError, MemoryError):
            raise
        except Exception as fault:  # a template is a program: it may fail in any way
            raise UnsoundTemplate(f"the chat template ({self.where}) refuses it: {fault}") from None

    def _marked_spans(
        self, chat: Chat, turns: Sequence[int], marks: Sequence[Span]
    ) -> dict[int, list[Span]]:
        """The marked spans of each turn: those that come with it when the conversation is written
        turn by turn."""
        counts = [len(_unmarked(self._write(chat, number + 1))[1]) for number in turns]
        begins = [0, *counts[:-1]]
        if counts != sorted(counts) or counts[-1] != len(marks):
            raise UnsoundTemplate(
                f"the chat template ({self.where}) marks earlier turns otherwise once others"
                " follow; mark each turn once"
            )
        return {number: list(marks[begin:end]) for number, begin, end in zip(turns, begins, counts)}

    def _turn(self, text: str, chat: Chat, number: int) -> Span:
        """Where one turn of the assistant stands in the text."""
        prompt, _ = _unmarked(self._write(chat, number, prompt=True))
        answered, _ = _unmarked(self._write(chat, number + 1))
        if answered.startswith(prompt):
            turn = self._cut_after_end(answered[len(prompt) :])
        elif content := self._content(answered, chat, number):
            begin, end = content
            prompt = answered[:begin]
            turn = answered[begin:end]
        else:
            raise UnsoundTemplate(
                f"the chat template ({self.where}) writes messages before turn"
                f" {number + 1} otherwise once the assistant has answered, so what is said cannot"
                " be found; use a template that marks it with {% generation %} and {%"
                " endgeneration %}"
            )
        if not turn:
            raise UnsoundTemplate(
                f"the chat template ({self.where}) writes nothing for turn {number + 1}, of the"
                " assistant"
            )
        if not text.startswith(prompt + turn):
            raise UnsoundTemplate(
                f"the chat template ({self.where}) writes turn {number + 1}, of the assistant,"
                " otherwise once others follow (it may drop thoughts), so it cannot be learned as"
                " it is said; write learn: last beside messages, or use a template that marks what"
                " is learned with {% generation %} and {% endgeneration %}"
            )
        return len(prompt), len(prompt) + len(turn)

    def _content(self, answered: str, chat: Chat, number: int) -> Span | None:
        """The span of a turn's content in the conversation up to it, with the special token that
        ends it.

        None if nothing of the content is written. `answered`: the conversation up to the turn.
        """
        if not chat.messages[number]["content"]:
            return None

        # The template writes a placeholder where it writes the content.
        messages = [*chat.messages[:number], {**chat.messages[number], "content": _PLACEHOLDER}]
        text, _ = _unmarked(self._write(chat._replace(messages=messages)))
        head, placeholder, tail = text.partition(_PLACEHOLDER)
        if not placeholder or not answered.startswith(head) or not answered.endswith(tail):
            return None
        if len(answered) < len(head) + len(tail):
            return None

        end = len(answered) - len(tail)
        end_token = next((token for token in self.special if tail.lstrip().startswith(token)), "")
        if end_token:
            end += tail.index(end_token) + len(end_token)
        return len(head), end

    def _cut_after_end(self, turn: str) -> str:
        """A turn up to the first special token after which only blanks and special tokens follow;
        all of it without one."""
        end = len(turn)
        rest = turn.rstrip()
        while self.special and rest.endswith(self.special):
            end = len(rest)
            end_token = next(token for token in self.special if rest.endswith(token))
            rest = rest.removesuffix(end_token).rstrip()
        return turn[:end]


def read_template(file: Path | None, tokenizer: Path, special: Sequence[str]) -> ChatTemplate:
    """The template in `file`, else the one beside a `tokenizer.json` with these special tokens.

    Raises DataError where there is none.
    """
    configs = read_configs(tokenizer)
    names = dict[str, str]()
    for config in configs.values():
        for name, entry in config.items():
            token = token_content(entry)
            if name.endswith("_token") and isinstance(token, str):
                names.setdefault(name, token)
    source, where = _read_source(file, tokenizer, configs)
    return ChatTemplate(source, where, tuple(sorted(names.items())), tuple(special))


def _read_source(
    file: Path | None, tokenizer: Path, configs: Mapping[str, dict[str, Any]]
) -> tuple[str, str]:
    """The template that counts, and where it is."""
    path = file or tokenizer.parent / FILE
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError:
        if file:
            raise DataError(
                f"data.template: {file} does not exist; it is a file with a chat template"
            ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{path}: cannot be read as a chat template: {fault}") from None

    for name, config in configs.items():
        path = tokenizer.parent / name
        template = config.get("chat_template")
        if isinstance(template, list):  # several of them, by name
            templates = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, dict)
            }
            template = templates.get("default") or next(iter(templates.values()), None)
        if isinstance(template, str):
            return template, str(path)
        if template is not None:
            raise DataError(
                f"{path}: chat_template holds {type(template).__name__}, where a template is needed"
            )
    raise DataError(
        f"{tokenizer.parent}: no chat template comes with the tokenizer ({FILE}, or chat_template"
        f" in {CONFIGS[0]}); write data.template: FILE with the template of the model's chat"
        " variant"
    )


def read_configs(tokenizer: Path) -> dict[str, dict[str, Any]]:
    """The JSON objects beside a `tokenizer.json`, by name of their file. Raises DataError."""
    configs = {}
    for name in CONFIGS:
        path = tokenizer.parent / name
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (ValueError, OSError, RecursionError) as fault:
            raise DataError(f"{path}: cannot be read: {fault}") from None
        if not isinstance(config, dict):
            raise DataError(f"{path}: holds {type(config).__name__}, where an object is needed")
        configs[name] = config
    return configs


def token_content(entry: object) -> object:
    """The text of a token, which may be given as an object with its flags."""
    return entry.get("content") if isinstance(entry, dict) else entry


def check_unmarked(value: object) -> None:
    """Raises UnsoundTemplate where a text has one of the two characters that mark
    what is learned."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if _OPEN in text or _CLOSE in text:
        raise UnsoundTemplate("it holds U+FDD0 or U+FDD1, which are no characters of a text")


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """A text without its marks, and the spans that were between them."""
    head, *pieces = text.split(_OPEN)
    plain = [head]
    spans = list[Span]()
    begin = len(head)
    for piece in pieces:
        marked, _, rest = piece.partition(_CLOSE)
        if marked:
            spans.append((begin, begin + len(marked)))
        plain += [marked, rest]
        begin += len(marked) + len(rest)
    return "".join(plain), spans


class _MarkedExtension(Extension):
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
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((first, last) for first, last in gaps if first < last)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter;
    arguments in the order of `transformers`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(why: str) -> None:
    raise jinja2.TemplateError(why)
