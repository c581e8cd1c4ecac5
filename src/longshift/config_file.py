"""Config files: a text, and `key=value` overrides, to a valid config, or to every fault with its
line."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longshift.config import Config
from longshift.config_parts import Section
from longshift.errors import UsageError, did_you_mean, shown
from longshift.files import read_small
from longshift.layout.auto_layout import AutoLayout, with_current_words
from longshift.layout.layout import Layout, format_size
from longshift.other_tools import key_hint, translate
from longshift.terminal import Say, silent
from longshift.train_config import StageConfig, default_min_lr
from longshift.yaml_reader import MAX_BYTES, MAX_DEPTH, not_text, read_yaml

MAX_FAULTS = 50  # that are listed
COMMAND_LINE = "command line"  # where an override stands
SHORT = {"home": "at"}  # sections that a word may stand for, and which key of theirs it is


def load_config(path: str | Path, overrides: Sequence[str] = (), say: Say = silent) -> Config:
    """Read a config file and apply `key=value` overrides, such as `train.lr=2e-5`. The config of a
    run may be of an earlier version; `say` gets a line for each of its settings that is no more.
    Its save.dir is the folder in which it lies; `say` gets a line where that was moved or copied.
    Raises UsageError that lists every fault."""
    path = Path(path)
    try:
        text = read_small(path, MAX_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"config {path} does not exist; write one with: longshift init --to {path}"
        ) from None
    except (OSError, ValueError) as fault:
        raise UsageError(f"config {str(path)[:300]} cannot be read: {fault}") from None
    # Only the config of a run may have keys of an earlier version: a new one is corrected instead.
    is_of_run = path.name in ("config.yaml", ".config.yaml") and is_run_folder(path.parent)
    run = path.parent.absolute() if is_of_run else None
    return parse_config(text, overrides, name=str(path), run=run, say=say)


def is_run_folder(folder: Path) -> bool:
    """Whether a run has left its newest checkpoint or its machine there."""
    if (folder / "LATEST").is_file():
        return True
    try:
        return "packages" in json.loads((folder / "env.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def parse_config(
    text: str,
    overrides: Sequence[str] = (),
    name: str = "config",
    run: Path | None = None,
    say: Say = silent,
) -> Config:
    """As `load_config`, of text; `name` stands for the file in faults; `run`: the folder of the run
    whose config the text is. Raises UsageError that lists every fault."""
    # 1. The values of the text, and where each stands.
    document = read_yaml(text, name)
    values = document.value if run is None else with_current_words(document.value)
    if not isinstance(values, dict):
        raise UsageError(
            f"{name}: a config is a mapping with the keys {', '.join(Config.model_fields)}; see"
            " longshift init"
        )
    if run is not None:
        for line in translate(values):
            say(line)
        _unset_min_lr(values)
        keys = [override.partition("=")[0] for override in overrides]
        if "save" not in keys and "save.dir" not in keys:
            _set_folder(values, run, name, say)
    places = {key: f"{name}:{line}" for key, line in document.lines.items()}
    faults = [
        f"{name}:{line}: {'.'.join(map(str, key))}: given twice" for key, line in document.twice
    ]

    # 2. Those of the command line, over them.
    for override in overrides:
        if fault := _override(values, places, override):
            faults.append(f"{COMMAND_LINE}: {fault}")

    # 3. The config: faults of its values, else of its layouts.
    try:
        config = Config.model_validate(values)
    except ValidationError as fault:
        for error in fault.errors(include_url=False):
            if error["type"] != "default_factory_not_called":  # follows from another fault
                faults.append(_describe(error, places, name) if len(faults) < MAX_FAULTS else "")
    else:
        faults += _layout_faults(config, places.get(("layout",), name))
        if not faults:
            return config
    lines = [f"{name}: {len(faults)} fault{'s' * (len(faults) > 1)} in the config"]
    lines += faults[:MAX_FAULTS]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more")
    raise UsageError("\n  ".join(lines))


def _unset_min_lr(values: dict[str, Any]) -> None:
    """Leave out the tenth of lr that an earlier version wrote down, so that it follows lr."""
    train = values.get("train")
    if not isinstance(train, dict) or not isinstance(train.get("lr"), int | float):
        return
    if train.get("min_lr") == default_min_lr(train):
        del train["min_lr"]


def _set_folder(values: dict[str, Any], run: Path, name: str, say: Say) -> None:
    """Set save.dir to the folder in which the config of a run lies, in place."""
    save = values.get("save")
    if not isinstance(save, dict):
        return
    previous = save.get("dir")
    save["dir"] = str(run)
    if isinstance(previous, str) and os.path.realpath(previous) != os.path.realpath(run):
        say(
            f"{name} says save.dir {previous}: the folder was moved or copied; the run goes on in"
            f" {run}"
        )


def _override(values: dict[str, Any], places: dict[tuple, str], override: str) -> str | None:
    """Set what an override says in `values`, and its place in `places`. Returns what is wrong with
    it, or None."""
    key, sign, text = override.partition("=")
    keys = tuple(key.split("."))
    if not sign or not all(keys):
        return f"{shown(override)}: an override is key=value, as in train.lr=2e-5"
    reason = not_text(override)
    if reason is None and len(keys) > MAX_DEPTH:
        reason = f"more than {MAX_DEPTH} dots in its key"
    if reason is not None:
        return f"{shown(override)} holds {reason}"
    if not _put(values, keys, _value(text)):
        return f"{key[:80]}: {'.'.join(keys[:-1])[:80]} is not a section"
    places[keys] = COMMAND_LINE
    for length in range(1, len(keys)):
        places.setdefault(keys[:length], COMMAND_LINE)
    return None


def _layout_faults(config: Config, place: str) -> Iterator[str]:
    """Why layouts of a config, which stand at a `place`, are not possible."""
    if isinstance(config.layout, AutoLayout):
        return
    for number, part in enumerate(config.parts):
        stage = f"train.stages.{number}: " if config.train.stages else ""
        for edge in part.edges:
            key = "layout"
            if not isinstance(part.layout, Layout):
                key += f" (upto {format_size(edge.upto)})"
            for fault in part.edge_faults(edge):
                yield f"{place}: {stage}{key}: {fault}"


def _value(text: str) -> object:
    """The value of an override: YAML, or the text as it stands where it is none that is read
    here."""
    try:
        return read_yaml(text, COMMAND_LINE).value
    except UsageError:
        return text


def _put(values: dict[str, Any], keys: tuple[str, ...], value: object) -> bool:
    """Set a nested key in place; False where the way to it leads through something that is not a
    mapping."""
    for key in keys[:-1]:
        section = values.setdefault(key, {})
        # A word that stands for the section keeps its meaning beside the new key.
        if key in SHORT and isinstance(section, str):
            section = values[key] = {SHORT[key]: section}
        if not isinstance(section, dict):
            return False
        values = section
    values[keys[-1]] = value
    return True


def _fields(path: tuple) -> dict[str, Any]:
    """The known keys of the section at a key path; empty where that is no section."""
    # A stage has keys with dots in them, such as train.lr, which name fields of other sections.
    if path[:2] == ("train", "stages") and len(path) > 2:
        if len(path) == 3:
            return StageConfig.__annotations__
        path = (*path[3].split("."), *path[4:])
    section: Any = Config
    for key in path:
        if isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        types = getattr(field.annotation, "__args__", (field.annotation,)) if field else ()
        section = next(
            (type_ for type_ in types if isinstance(type_, type) and issubclass(type_, Section)),
            None,
        )
        if section is None:
            return {}
    return section.model_fields


def _stage_hint(path: tuple) -> str:
    """The end of a sentence about a key of the run that a stage cannot change; empty for others."""
    if _fields(path[:-1]) != StageConfig.__annotations__ or not (
        "." in path[-1] or path[-1] in Config.model_fields
    ):
        return ""
    return f"; a stage has {', '.join(StageConfig.__annotations__)}, and all else is the run's"


def _describe(error: Any, places: dict[tuple, str], name: str) -> str:
    """One fault as `file:line: key: what is wrong and what mends it`."""
    path = tuple(error["loc"])
    # The place of the longest part of the path that somebody has written.
    above = path
    while above and above not in places:
        above = above[:-1]
    place = places.get(above, name) if path else name
    # A section's fault may come from what an override has changed in it.
    overridden = [keys for keys, written in places.items() if written == COMMAND_LINE]
    if place != COMMAND_LINE and any(keys[: len(path)] == path for keys in overridden):
        place += f" and the {COMMAND_LINE}"
    key = ".".join(str(part)[:80] for part in path) or "config"
    if error["type"] == "extra_forbidden":
        known = _fields(path[:-1])
        advice = key_hint(path) or _stage_hint(path) or did_you_mean(str(path[-1]), known)
        return f"{place}: {key}: no such key{advice}"
    if error["type"] == "missing":
        return f"{place}: {key}: must be given"
    if error["type"] == "value_error":
        return f"{place}: {key}: {error['ctx']['error']}"
    if error["type"] == "literal_error":
        words = [
            word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")
        ]
        advice = did_you_mean(str(error["input"]), words, otherwise="")
        return f"{place}: {key}: {shown(error['input'])} is not one of {', '.join(words)}{advice}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{place}: {key}: must be a section with the keys {', '.join(_fields(path))}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{place}: {key}: {message}, not {shown(error['input'])}"
