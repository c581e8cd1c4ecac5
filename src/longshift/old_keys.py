"""Keys that configs of earlier versions had: what an error says of them, and how the config of an
older run reads today.

run/config.yaml        train: {frozen: 45.0, crowded: false}
of an older version    switch: {planner: algorithm1, ahead: 256M}
as it is read          train: {stall_timeout: 45.0}
                       switch: {ahead: 256M}
what is said           switch.planner was 'algorithm1' in the run: fan_out always plans
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

RENAMED = {"train.frozen": "train.stall_timeout"}


class RemovedKey(NamedTuple):
    """`defaults`: values with which a run does today what it did; `instead`: what does it now, or
    why nothing has to."""

    defaults: tuple[Any, ...]
    instead: str


REMOVED = {
    "train.crowded": RemovedKey(
        (False,), "it is a flag of the command line now: longshift train CONFIG --crowded"
    ),
    "data.valid.epochs": RemovedKey((None,), "what is validated on is read once: leave it out"),
    "data.valid.weight": RemovedKey((None,), "what is validated on is read once: leave it out"),
    "home.early": RemovedKey(
        (True,),
        "units on disk are updated before the norm wherever memory and disk have room: leave"
        " it out",
    ),
    "save.background": RemovedKey(
        (False, True),
        "checkpoints are written while training goes on wherever memory has room: leave it out",
    ),
    "stream.ahead": RemovedKey(
        (1,), "an object is always fetched one operation ahead: leave it out"
    ),
    "stream.checked": RemovedKey(
        (False,),
        "longshift check compares what comes back from disk, and a run does not: leave it out",
    ),
    "switch.bucket": RemovedKey(
        (32 << 20,), "a rank always sends, or receives, at most 32 MiB at one time: leave it out"
    ),
    "switch.planner": RemovedKey(("fan_out",), "fan_out always plans: leave it out"),
    "window": RemovedKey(
        ({"gather": None, "reduce": None},),
        "as many bytes as the largest block's are always under way: leave it out",
    ),
}
STAGE = {
    "max_len": "data.max_len",
    "data": "data.train",
    "overlong": "data.overlong",
    "tokens_per_step": "train.tokens_per_step",
    "pack_tokens": "train.pack_tokens",
    "rope": "model.rope",
    "lr": "train.lr",
    "min_lr": "train.min_lr",
    "warmup": "train.warmup",
    "schedule": "train.schedule",
}
SOURCES = "data.train", "data.valid"
FORMATS = {  # keys that a source had, which named fields, and its format now
    "text": "text: body",
    "messages": "messages: chat",
    "prompt": "prompt: question, completion: answer",
    "completion": "prompt: question, completion: answer",
}
PACK = "it is pack of a group now, as in layout: [{upto: 4K, use: dp2, pack: 16K}]"
# Of each key that was, what it is now. Numbers of stages and of sources are left out.
SUCCESSORS = {
    **{key: f"it is {new_key} now" for key, new_key in RENAMED.items()},
    **{key: removed.instead for key, removed in REMOVED.items()},
    **{f"train.stages.{key}": f"it is {new_key} now" for key, new_key in STAGE.items()},
    **{f"{above}pack_tokens": PACK for above in ("train.", "train.stages.", "train.stages.train.")},
    **{
        f"{source}.{key}": f"it is format now, as in format: {{{fields}}}"
        for source in (*SOURCES, "train.stages.data", "train.stages.data.train")
        for key, fields in FORMATS.items()
    },
}


def hint(path: tuple[str | int, ...]) -> str:
    """The end of a sentence about an unknown key: what it is now; empty where no version had it."""
    successor = SUCCESSORS.get(".".join(name for name in path if isinstance(name, str)))
    return f"; {successor}" if successor else ""


def translate(values: dict[str, Any]) -> Iterator[str]:
    """Give the config of an older run today's keys, in place. Yields a sentence for each setting
    that is no more."""
    # 1. Keys of the run.
    for key, new_key in RENAMED.items():
        for value in _take(values, key):
            section, name = new_key.split(".")
            values[section][name] = value
    for key, removed in REMOVED.items():
        for value in _take(values, key):
            if value not in removed.defaults:
                yield f"{key} was {value!r} in the run: {removed.instead}"

    # 2. A stage had keys of its own, and is a list of overrides now.
    for stage in _mappings(values, ["train", "stages"]):
        overrides = {
            STAGE.get(key, key): value for key, value in stage.items() if value is not None
        }
        stage.clear()
        stage.update(overrides)

    # 3. A single layout had its packs in another section, and has them as the only group now.
    for train in _mappings(values, ["train"]):
        data = next(_mappings(values, ["data"]), {})
        run = {
            "layout": values.get("layout"),
            "data.max_len": data.get("max_len"),
            "train.pack_tokens": train.pop("pack_tokens", None),
        }
        for stage in _mappings(train, ["stages"]):
            part = run | stage
            stage.pop("train.pack_tokens", None)
            stage.update(_group_of_packs(part))
        values.update(_group_of_packs(run))

    # 4. A source named fields by keys of its own, and has a format now.
    for path in (*(path.split(".") for path in SOURCES), ["train", "stages", "data.train"]):
        for source in _mappings(values, path):
            fields = {name: source.pop(name) for name in FORMATS if name in source}
            if fields := {name: field for name, field in fields.items() if field is not None}:
                source["format"] = fields


def _group_of_packs(part: dict[str, Any]) -> dict[str, Any]:
    """The `layout` of a part of a run whose single layout has packs of a size of their own; empty
    for others."""
    layout = part["layout"]
    pack = part["train.pack_tokens"]
    if pack is None or not isinstance(layout, str) or layout == "auto":
        return {}
    return {"layout": [{"upto": part["data.max_len"], "use": layout, "pack": pack}]}


def _take(values: dict[str, Any], key: str) -> Iterator[Any]:
    """Remove a key. Yields its value, wherever it is there."""
    *path, name = key.split(".")
    for section in _mappings(values, path):
        if name in section:
            yield section.pop(name)


def _mappings(value: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The mapping under a path of keys; each of a list of them."""
    if isinstance(value, list):
        for item in value:
            yield from _mappings(item, path)
    elif isinstance(value, dict):
        if path:
            yield from _mappings(value.get(path[0]), path[1:])
        else:
            yield value
