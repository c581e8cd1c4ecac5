"""The tables of `docs/reference/`, from the code that they describe.

Config keys come from the pydantic models, layout words from the docstring of `layout.layout`,
commands from the command line's parser, Python names from `longshift.__all__`, exit codes from the
classes of `errors`. A key, word, option or name without a description raises ValueError.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from kept import lines
from pydantic import BaseModel, Strict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import longshift
from longshift import cli
from longshift.config import Config
from longshift.config_parts import DocumentFormat
from longshift.errors import LongshiftError
from longshift.layout import axes, layout
from longshift.layout.auto_layout import DEGREES, AutoLayout
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout, format_size
from longshift.train_config import StageConfig
from longshift.workload.groups import Edge

OTHER_CODES = {
    0: ("", "The command did what it was asked for."),
    1: ("", "`longshift check` found a difference; or a mistake of Longshift, with a traceback."),
    cli.INTERRUPTED: ("", "The run was stopped before its last step, and has saved."),
}
VALUE_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}
PLURALS = {"number": "numbers", "text": "texts"}
SPECIAL_TYPES = {  # values with a form of their own
    Layout: "layout",
    Edge: "layout",
    AutoLayout: "layout",
    HomeTiers: "place",
    DocumentFormat: "format",
}
EDGE_KEYS = {
    "upto": "documents of up to this many tokens, and longer than the group before",
    "use": "their layout",
    "pack": "capacity of a pack in tokens; upto where it is not given",
}


class Key(NamedTuple):
    """A key of a config: where a value is written."""

    name: str
    type: str
    default: str
    meaning: str


def config_keys() -> str:
    """Every key of a config by section: type, default, meaning."""
    tables = []
    for section, keys in _sections(Config).items():
        rows = [(f"`{key.name}`", key.type, key.default, key.meaning) for key in keys]
        tables.append(f"### {section}\n\n{lines(('key', 'type', 'default', 'meaning'), rows)}")
    return "\n\n".join(tables)


def all_keys() -> list[str]:
    """Names of all keys of a config, as the reference writes them."""
    return [key.name for keys in _sections(Config).values() for key in keys]


def _sections(config: type[BaseModel]) -> dict[str, list[Key]]:
    """The keys of a config by the first word of their names."""
    sections: dict[str, list[Key]] = {}
    for key in _keys(config):
        sections.setdefault(re.split(r"[.\[]", key.name)[0], []).append(key)
    return sections


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = prefix + name
        parts = [part for part in _walk(field.annotation) if isinstance(part, type)]
        sections = [part for part in parts if issubclass(part, BaseModel)]
        is_list = any(get_origin(part) is tuple for part in _walk(field.annotation))
        if not sections or is_list:
            yield Key(path, _type_words(field), _default_words(field), _described(path, field.description))
        for section in sections:
            yield from _keys(section, f"{path}[]." if is_list else f"{path}.")
        if StageConfig in parts:
            yield from _stage_keys(path)
        if Edge in parts:
            yield from _layout_keys(path)


def _stage_keys(path: str) -> Iterator[Key]:
    """Keys of a stage, which replace the run's."""
    for name in get_type_hints(StageConfig):
        if name == "steps":
            yield Key(f"{path}[].steps", "size", "required", "optimizer updates of the stage")
        else:
            yield Key(f"{path}[].{name}", "as the run's", "the run's", f"replaces {name} in the stage")


def _layout_keys(path: str) -> Iterator[Key]:
    """Keys of a group of lengths, and of what the planner may choose from."""
    types = {"use": "layout"}
    for name in Edge.__dataclass_fields__:
        default = "upto" if name == "pack" else "required"
        yield Key(f"{path}[].{name}", types.get(name, "size"), default, EDGE_KEYS[name])
    yield Key(f"{path}.auto.ranks", "integer", "all devices", "number of ranks that the planner uses")
    for word in DEGREES:
        yield Key(f"{path}.auto.{word}", "integer or list", "free", f"numbers that {word} may have in the planner's layouts")


def _walk(annotation: Any) -> Iterator[Any]:
    """A type and the types that it is made of."""
    yield annotation
    for argument in get_args(annotation):
        if get_origin(annotation) is not Literal:
            yield from _walk(argument)


def _type_words(field: FieldInfo) -> str:
    words = _words(field.annotation, field.metadata)
    return " or ".join(dict.fromkeys(words))


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:
    """What may be written for a type; a size is an integer, or text such as 64K."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return [word for part in arguments if part is not NoneType for word in _words(part, metadata)]
    if origin is Literal:
        return [", ".join(f"`{value}`" for value in arguments)]
    if origin is tuple:
        items = _words(arguments[0])
        return ["layout"] if items == ["layout"] else ["list of " + " or ".join(PLURALS.get(item, item) for item in items)]
    if annotation in SPECIAL_TYPES:
        return [SPECIAL_TYPES[annotation]]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["sources" if "path" in annotation.model_fields else "section"]
    if annotation is StageConfig:
        return ["stages"]
    if annotation is int and any(isinstance(part, Strict) for part in _flat(metadata)):
        return ["size"]
    if annotation is str and any("absolute" in repr(part) for part in _flat(metadata)):
        return ["path"]
    return [VALUE_TYPES[annotation]]


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    """Constraints, also those inside of a `Field`."""
    for part in metadata:
        yield part
        if isinstance(part, FieldInfo):
            yield from part.metadata


def _default_words(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        return "see meaning"
    value = field.default
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value and value % 1024 == 0:
        return f"`{format_size(value)}`"
    if isinstance(value, HomeTiers | DocumentFormat):
        return f"`{value.to_json()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _described(name: str, text: str | None) -> str:
    if not text:
        raise ValueError(f"{name} has no description")
    return _cell(text)


def _cell(text: str) -> str:
    """Text inside a table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def layout_words() -> str:
    """Every word of a layout and its meaning."""
    return lines(("word", "meaning"), ((f"`{word}`", meaning) for word, meaning in word_meanings().items()))


def word_meanings() -> Mapping[str, str]:
    """Layout words, as examples, with the meanings that the table of axes and the docstring of `layout.layout` have."""
    data_parallel_first = sorted(axes.AXES, key=lambda axis: axis.shares != "packs")
    found = {f"{axis.word}2": axis.meaning for axis in data_parallel_first}
    word = ""
    for line in (layout.__doc__ or "").splitlines():
        if match := re.match(r"    (\S+) {2,}(.+)", line):
            word = match[1]
            found[word] = match[2]
        elif word and re.match(r" {20,}\S", line):
            found[word] += " " + line.strip()
        elif not line.strip():
            word = ""
    return {word: _cell(meaning) for word, meaning in found.items()}


def commands() -> str:
    """Every command with its arguments and options."""
    parts = []
    for name in command_names():
        command = cli.app[name]
        first, arguments = _docstring(command.help)
        rows = []
        for argument in command.assemble_argument_collection():
            if not argument.show:
                continue
            shown = argument.parameter.help or arguments.get(argument.name.lstrip("-").lower())
            if name == "train" and argument.name == "--resume":
                shown = arguments["resume"]
            names = [one for one in argument.names if not one.startswith("--no-")]
            meaning = _described(f"{name} {argument.name}", shown) + _choices(argument.hint)
            rows.append((", ".join(f"`{one}`" for one in names), _argument_default(argument), meaning))
        parts.append(f"### longshift {name}\n\n{first}\n\n{lines(('argument', 'default', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _choices(hint: Any) -> str:
    """The end of a sentence: the words that an argument may be."""
    words = [word for word in _words(hint) if word.startswith("`")] if Literal in map(get_origin, _walk(hint)) else []
    return f": {', '.join(words)}" if words else ""


def _argument_default(argument: Any) -> str:
    if argument.required:
        return "required"
    default = argument.field_info.default
    is_value = isinstance(default, str | int) and not isinstance(default, bool)
    return f"`{default}`" if is_value else ""


def command_names() -> list[str]:
    """Commands that a person types."""
    return [name for name in cli.app if not name.startswith("-") and cli.app[name].show]


def _docstring(text: str) -> tuple[str, Mapping[str, str]]:
    """What stands before the arguments, and the arguments, of a docstring."""
    head, _, tail = inspect.cleandoc(text).partition("Args:\n")
    arguments = dict(re.findall(r"^    (\w+): (.+)$", tail, re.MULTILINE))
    return _cell(head), arguments


def python_names() -> str:
    """Every public name with its signature, the first sentence about it, and the fields of values."""
    parts = []
    for name in longshift.__all__:
        value = getattr(longshift, name)
        paragraph = " ".join(inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[\w)`\]])\. (?=[A-Z`])", paragraph)[0].rstrip(".:")
        parts.append(f"### {_signature(name, value)}\n\n{_described(name, sentence)}.")
        fields = getattr(value, "__dataclass_fields__", None) or getattr(value, "model_fields", {})
        if fields:
            named = [f"`{field}`" for field in fields if not field.startswith("_")]
            parts.append(f"Fields: {', '.join(named)}.")
    return "\n\n".join(parts)


def _signature(name: str, value: Any) -> str:
    """How a function is called, without types; a class by its name alone."""
    if isinstance(value, type):
        return f"`{name}`"
    signature = inspect.signature(value)
    parameters = [_without_type(parameter) for parameter in signature.parameters.values()]
    return f"`{name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}`"


def _without_type(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter as it is shown; a default that is a function has no text worth showing."""
    default = parameter.default
    if inspect.isfunction(default):
        default = _Word("...")
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)


class _Word(str):
    """Text that a signature shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def exit_codes() -> str:
    """Every exit code, the Python error that goes with it, and when it comes."""
    codes = dict(OTHER_CODES)
    for error in LongshiftError.__subclasses__():
        codes[error.exit_code] = (f"`{error.__name__}`", _cell(error.__doc__ or ""))
    rows = [(f"`{code}`", name, meaning) for code, (name, meaning) in sorted(codes.items())]
    return lines(("code", "Python error", "when"), rows)


TABLES = {
    "config-keys": config_keys,
    "layout-words": layout_words,
    "commands": commands,
    "python-names": python_names,
    "exit-codes": exit_codes,
}
