"""The config that a run goes on with: the run's own, changed in what the command line names and in nothing else. Needs no torch.

run/config.yaml    train.lr 1e-3    steps 100    layout dp2     the run's
run.yaml           train.lr 2e-3    steps 100    layout dp2     what the file says now: told, and not taken
command line                        steps 200                   taken
goes on with       train.lr 1e-3    steps 200    layout dp2
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longshift.config import Config
from longshift.config_file import load_config
from longshift.errors import shown
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import AUTO
from longshift.trainer.plan_file import read
from longshift.trainer.run_folder import RunFolder
from longshift.workload.groups import Edge

Say = Callable[[str], None]


def going_on(given: Config, file: Path, overrides: Sequence[str], say: Say) -> Config:
    """The config with which the run in `given.save.dir` goes on, where `file` and `overrides` say `given`. What differs is said, line by
    line. `given` itself where the folder has no checkpoint, or no config, which is said. Raises UsageError."""
    folder = RunFolder(Path(given.save.dir))
    if not folder.latest.exists():
        return given
    if not folder.config.is_file():
        say(f"{folder.shown} holds no config.yaml: the run goes on as {file} says")
        return given
    plan = read(folder.path)
    if plan is not None and plan.home is not None:  # `auto` is what the plan says, with the layout that the run has
        overrides = [f"home.at={json.dumps(plan.home)}" if one in ("home=auto", "home.at=auto") else one for one in overrides]
    run, different = _compare(given, folder, overrides, say)
    if different:
        say(f"{file} is not what the run in {folder.shown} has; the run's settings stay, where the command line names no other:")
        for key, (was, now) in different.items():
            say(f"  {key}: {_told(was)} in the run, {_told(now)} in {file.name}; to change it, write {_override(key, now)}")
    return run


def named(now: Config, say: Say) -> list[str]:
    """Overrides that make the config of the run in `now.save.dir` the config `now`, all of which is meant; what they change is said."""
    folder = RunFolder(Path(now.save.dir))
    if not (folder.latest.exists() and folder.config.is_file()):
        return []
    _, different = _compare(now, folder, [], say)
    for key, (before, after) in different.items():
        say(f"{key} was {_told(before)} in {folder.shown}, and is {_told(after)} now")
    return [f"{key}={json.dumps(after)}" for key, (_, after) in different.items()]


def _compare(given: Config, folder: RunFolder, overrides: Sequence[str], say: Say) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """The run's config with overrides, and in what `given` differs from it."""
    run = load_config(folder.config, [*overrides, f"save.dir={json.dumps(given.save.dir)}"], say)
    given, run = with_its_plan(given, run, folder.path)
    return run, changes(run, given)


def with_its_plan(given: Config, run: Config, folder: Path) -> tuple[Config, Config]:
    """Both configs, with one layout and home where the run's are what `auto` of the given one became: of chunks, or of the plan in the
    folder, which the run goes on with."""
    asked, plan = given.layout, read(folder)
    if isinstance(asked, AutoLayout):
        written = run.model_dump(mode="json")
        made = plan is not None and plan.asked == asked.to_json() and written["layout"] in plan.choices
        if not made or (plan.home if plan else None) != (written["home"]["at"] if given.home.at.auto else None):
            return given, run
        home = run.home.model_copy(update={"at": given.home.at}) if given.home.at.auto else run.home
        return given, run.model_copy(update={"layout": asked, "home": home})
    chosen = tuple(_chosen(*pair) for pair in zip(_edges(given), _edges(run)))
    if len(_edges(given)) == len(_edges(run)) and chosen == _edges(run):
        return given.model_copy(update={"layout": run.layout}), run
    return given, run


def changes(was: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between two configs: both values in the config's form, by key, as in `train.lr`."""
    return dict(_differences(was.model_dump(mode="json"), now.model_dump(mode="json")))


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in now:
        before, after = was.get(key), now[key]
        if isinstance(before, Mapping) and isinstance(after, Mapping) and before.keys() == after.keys():
            yield from _differences(before, after, f"{above}{key}.")
        elif before != after:
            yield f"{above}{key}", (before, after)


def _edges(config: Config) -> tuple[Edge, ...]:
    return () if isinstance(config.layout, AutoLayout) else config.edges


def _chosen(asked: Edge, of_run: Edge) -> Edge:
    """A group whose `chunk-auto` and `recompute-auto` are what the run's group has."""
    use, was = asked.use, of_run.use
    if use.chunk == AUTO:
        use = replace(use, chunk=was.chunk)
    if use.recompute == "auto":
        use = replace(use, recompute=was.recompute, kept_blocks=was.kept_blocks, offload=was.offload)
    return replace(asked, use=use)


def _told(value: Any) -> str:
    return value if isinstance(value, str) else shown(value) if value is not None else "nothing"


def _override(key: str, value: Any) -> str:
    text = value if isinstance(value, str) and value.replace(".", "").replace("-", "").replace("/", "").isalnum() else json.dumps(value)
    return f"{key}={text}" if text.isascii() and " " not in text and '"' not in text else f"'{key}={text}'"
