r"""Chat templates: the messages of a conversation to the text that a model reads, and which characters of it the assistant says.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                         ^^^^^^^^^^^^^^^ targets

A template is a Jinja program that comes with a tokenizer: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. It runs in
Jinja's sandbox. What the assistant says is found in one of two ways:

markers    The template marks it: `{% generation %} ... {% endgeneration %}`, as in `transformers`.
prefixes   The conversation up to a turn of the assistant, with the prompt that asks for it, must begin the conversation with that turn;
           what comes after it is the turn, to the special token that ends it, such as <|im_end|>. A template that writes a turn otherwise
           once others follow (it drops earlier thoughts, say) is refused: what would be learned is not what is said.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longshift.config_parts import Learn
from longshift.errors import DataError

Span = tuple[int, int]  # characters, the end excluded
Message = Mapping[str, Any]

FILE, CONFIGS = "chat_template.jinja", ("tokenizer_config.json", "special_tokens_map.json")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # code points that Unicode keeps free for a program's own use


@dataclass(frozen=True)
class Rendered:
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
    def _program(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as fault:
            raise DataError(f"{self.where}, line {fault.lineno}: not a chat template that can be read: {fault.message}") from None

    def render(self, messages: Sequence[Message], tools: object, learn: Learn, day: float) -> Rendered:
        """The conversation, and what of it is learned: all that the assistant says, its last turn, or everything. `day`, in seconds since
        1970, is what the template takes for now: tokens must not depend on the day that they are made. Raises UnsoundTemplate, also for
        what the template itself refuses."""

        def text_of(messages: Sequence[Message], prompt: bool = False) -> str:
            return self._text(messages, tools, prompt, day)

        text = text_of(messages)
        if learn == "all":
            return Rendered(_unmarked(text)[0], ((0, len(_unmarked(text)[0])),))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text, found = _unmarked(text)
        if not found:
            found = [self._turn(text, messages, i, text_of) for i in (turns if learn == "assistant" else turns[-1:])]
        return Rendered(text, tuple(found if learn == "assistant" else found[-1:]))

    def _text(self, messages: Sequence[Message], tools: object, prompt: bool, day: float) -> str:
        def now(form: str) -> str:
            return time.strftime(form, time.gmtime(day))

        known = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt, "strftime_now": now}
        try:
            return self._program.render(**known, **dict(self.names))
        except DataError:
            raise
        except Exception as fault:  # a template is a program: it may fail in any way
            raise UnsoundTemplate(f"the chat template ({self.where}) refuses it: {fault}") from None

    def _turn(self, text: str, messages: Sequence[Message], number: int, text_of: Any) -> Span:
        """Where one turn of the assistant stands in the text."""
        asked, told = _unmarked(text_of(messages[:number], True))[0], _unmarked(text_of(messages[: number + 1]))[0]
        said = self._to_its_end(told[len(asked) :])
        if not told.startswith(asked):
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
    configs = [(path, _read_json(path)) for path in (tokenizer.parent / name for name in CONFIGS) if path.exists()]
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


def _read_json(path: Path) -> dict:
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


def _to_json(value: object, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False, **_: Any) -> str:
    """JSON as models were taught it: without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(why: str) -> None:
    raise jinja2.TemplateError(why)
