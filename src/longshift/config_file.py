"""Config files: a text, and `key=value` overrides, to a valid config, or to every fault with its line."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longshift.config import Config, StageConfig
from longshift.config_parts import Section
from longshift.errors import UsageError, did_you_mean, shown
from longshift.files import read_small
from longshift.layout import legal
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import Layout, format_size
from longshift.layout.old_words import with_current_words
from longshift.old_keys import hint, translate
from longshift.other_tools import key_hint
from longshift.written import MOST_BYTES, not_text, read_yaml

MOST_FAULTS = 50  # that are listed
SHORT = {"home": "at"}  # sections that a word may stand for, and which key of theirs it is


def load_config(path: str | Path, overrides: Sequence[str] = (), say: Callable[[str], None] = lambda line: None) -> Config:
    """Read a config file and apply `key=value` overrides, such as `train.lr=2e-5`. The config of a run may be of an earlier version; `say`
    gets a line for each of its settings that is no more. Raises UsageError that lists every fault."""
    path = Path(path)
    try:
        text = read_small(path, MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"config {path} does not exist; write one with: longshift init --to {path}") from None
    except (OSError, ValueError) as fault:
        raise UsageError(f"config {str(path)[:300]} cannot be read: {fault}") from None
    is_of_run = path.name in ("config.yaml", ".config.yaml") and path.with_name("env.json").is_file()
    return parse_config(text, overrides, name=str(path), say=say if is_of_run else None)


def parse_config(text: str, overrides: Sequence[str] = (), name: str = "config", say: Callable[[str], None] | None = None) -> Config:
    """As `load_config`, of text; `name` stands for the file in faults; `say`: given where the text is the config of a run."""
    written = read_yaml(text, name)
    values = written.value if say is None else with_current_words(written.value)
    if not isinstance(values, dict):
        raise UsageError(f"{name}: a config is a mapping with the keys {', '.join(Config.model_fields)}; see longshift init")
    if say is not None:
        for line in translate(values):
            say(line)
    places = {key: f"{name}:{line}" for key, line in written.lines.items()}
    faults = [f"{name}:{line}: {'.'.join(map(str, key))}: given twice" for key, line in written.twice]
    for override in overrides:
        key, sign, value = override.partition("=")
        keys = tuple(key.split("."))
        if not sign or not all(keys):
            faults.append(f"command line: {shown(override)}: an override is key=value, as in train.lr=2e-5")
        elif why := not_text(override) or ("more than 32 dots in its key" if len(keys) > 32 else None):
            faults.append(f"command line: {shown(override)} holds {why}")
        elif not _put(values, keys, _value(value)):
            faults.append(f"command line: {key[:80]}: {'.'.join(keys[:-1])[:80]} is not a section")
        else:
            places[keys] = "command line"
            places |= {keys[:n]: "command line" for n in range(1, len(keys)) if keys[:n] not in places}
    try:
        config = Config.model_validate(values)
    except ValidationError as fault:
        found = fault.errors(include_url=False)
        found = [error for error in found if error["type"] != "default_factory_not_called"]
        faults += [_describe(error, places, name) for error in found[:MOST_FAULTS]] + [""] * len(found[MOST_FAULTS:])
    else:
        place = places.get(("layout",), name)
        for number, part in enumerate(() if isinstance(config.layout, AutoLayout) else config.parts):
            stage = f"train.stages.{number}: " if config.train.stages else ""
            for edge in part.edges:
                at = "layout" if isinstance(part.layout, Layout) else f"layout (upto {format_size(edge.upto)})"
                longest = min(edge.upto, part.data.max_len)
                wrong = legal.faults(part.spec, edge.use, None, longest, edge.pack, part.formats.float8)
                faults += [f"{place}: {stage}{at}: {fault}" for fault in wrong]
        if not faults:
            return config
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
    raise UsageError("\n  ".join([f"{name}: {count} in the config", *faults[:MOST_FAULTS], *more]))


def _value(text: str) -> object:
    """The value of an override: YAML, or the text as it stands where it is none that is read here."""
    try:
        return read_yaml(text, "command line").value
    except UsageError:
        return text


def _put(values: dict[str, Any], keys: tuple[str, ...], value: object) -> bool:
    """Set a nested key in place; False where the way to it leads through something that is not a mapping."""
    for key in keys[:-1]:
        if isinstance(values, dict) and key in SHORT and isinstance(values.get(key), str):
            values[key] = {SHORT[key]: values[key]}
        values = values.setdefault(key, {}) if isinstance(values, dict) else None  # pyright: ignore[reportAssignmentType]
    if not isinstance(values, dict):
        return False
    values[keys[-1]] = value
    return True


def _fields(at: tuple) -> dict[str, Any]:
    """The known keys of the section at a key path; empty where that is no section."""
    if at[:2] == ("train", "stages") and len(at) > 2:
        if len(at) == 3:
            return StageConfig.__annotations__
        at = (*at[3].split("."), *at[4:])
    section: Any = Config
    for key in at:
        if isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        args = getattr(field.annotation, "__args__", (field.annotation,)) if field else ()
        section = next((a for a in args if isinstance(a, type) and issubclass(a, Section)), None)
        if section is None:
            return {}
    return section.model_fields


def _stage_hint(at: tuple) -> str:
    """The end of a sentence about a key of the run that a stage cannot change; empty for others."""
    if _fields(at[:-1]) != StageConfig.__annotations__ or not ("." in at[-1] or at[-1] in Config.model_fields):
        return ""
    return f"; a stage has {', '.join(StageConfig.__annotations__)}, and all else is the run's"


def _describe(error: Any, places: dict[tuple, str], name: str) -> str:
    """One fault as `file:line: key: what is wrong and what mends it`."""
    at = tuple(error["loc"])
    place = next((places[at[:n]] for n in range(len(at), -1, -1) if at[:n] in places), name)
    key = ".".join(str(part)[:80] for part in at) or "config"
    if error["type"] == "extra_forbidden":
        here = hint(at) or _stage_hint(at) or key_hint(str(at[-1])) or did_you_mean(str(at[-1]), _fields(at[:-1]))
        return f"{place}: {key}: no such key{here}"
    if error["type"] == "missing":
        return f"{place}: {key}: must be given"
    if error["type"] == "value_error":
        return f"{place}: {key}: {error['ctx']['error']}"
    if error["type"] == "literal_error":
        word = error["input"]
        known = [w.strip(" '") for w in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"{place}: {key}: {shown(word)} is not one of {', '.join(known)}{did_you_mean(str(word), known, otherwise='')}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{place}: {key}: must be a section with the keys {', '.join(_fields(at))}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{place}: {key}: {message}, not {shown(error['input'])}"
