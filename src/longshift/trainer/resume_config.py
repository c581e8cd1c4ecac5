"""The config that a run goes on with: the run's own, changed in what the command line names, in its
layout where devices are lost, and in nothing else. Needs no torch.

run/config.yaml  train.lr 1e-3  steps 100  layout dp2   the run's
run.yaml         train.lr 2e-3  steps 100  layout dp2   what the file says now: told, and not taken
command line                    steps 200               taken
goes on with     train.lr 1e-3  steps 200  layout dp2

3 devices are left    dp4     -> dp3       fewer replicas
                      dp2.tp2 -> tp2       fewer replicas; one device is not used
                      tp4     -> tp3       no replica has room: the nearest layout of as many ranks
                      auto    -> planned again for 3
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from longshift.config import Config
from longshift.config_file import load_config
from longshift.errors import UsageError, shown
from longshift.layout import legal
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import AUTO, Layout
from longshift.terminal import Say
from longshift.trainer.plan_file import PlanFile, read
from longshift.trainer.run_folder import RunFolder
from longshift.workload.groups import Edge

Change = Callable[[Layout], Layout | None]


def resume_config(given: Config, file: Path, overrides: Sequence[str], say: Say) -> Config:
    """The config with which the run in `given.save.dir` goes on, where `file` and `overrides` say
    `given`. What differs is said, line by line. `given` itself where the folder has no checkpoint,
    or no config, which is said. Raises UsageError."""
    folder = RunFolder(Path(given.save.dir))
    if not folder.latest.exists():
        return given
    if not folder.config.is_file():
        say(f"{folder.shown} holds no config.yaml: the run goes on as {file} says")
        return given
    plan = read(folder.path)
    # `auto` is what the plan says, with the layout that the run has.
    if plan is not None and plan.home is not None:
        home = f"home.at={json.dumps(plan.home)}"
        overrides = [home if text in ("home=auto", "home.at=auto") else text for text in overrides]
    run, different = _compare(given, folder, overrides, say)
    if different:
        say(
            f"{file} is not what the run in {folder.shown} has; the run's settings stay, where the"
            " command line names no other:"
        )
        for key, (old, new) in different.items():
            values = f"{_shown_value(old)} in the run, {_shown_value(new)} in {file.name}"
            say(f"  {key}: {values}; to change it, write {_override(key, new)}")
    return run


def name_changes(now: Config, say: Say) -> list[str]:
    """Overrides that make the config of the run in `now.save.dir` the config `now`, all of which is
    meant; what they change is said."""
    folder = RunFolder(Path(now.save.dir))
    if not (folder.latest.exists() and folder.config.is_file()):
        return []
    _, different = _compare(now, folder, [], say)
    overrides = []
    for key, (old, new) in different.items():
        say(f"{key} was {_shown_value(old)} in {folder.shown}, and is {_shown_value(new)} now")
        overrides.append(f"{key}={json.dumps(new)}")
    return overrides


def _compare(
    given: Config, folder: RunFolder, overrides: Sequence[str], say: Say
) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """The run's config with overrides, and in what `given` differs from it."""
    run = load_config(folder.config, overrides, say)
    given, run = with_its_plan(given, run, read(folder.path))
    return run, changes(run, given)


def with_its_plan(given: Config, run: Config, plan: PlanFile | None) -> tuple[Config, Config]:
    """Both configs, with one layout and home where the run's are what `auto` of the given one
    became: of chunks, or of the run's plan, which it goes on with."""
    request = given.layout

    # 1. `layout: auto` stands for a choice of the plan, and `home: auto` for the plan's home.
    if isinstance(request, AutoLayout):
        run_values = run.model_dump(mode="json")
        is_planned = (
            plan is not None
            and plan.asked == request.to_json()
            and run_values["layout"] in plan.choices
            and plan.home == (run_values["home"]["at"] if given.home.at.auto else None)
        )
        if not is_planned:
            return given, run
        home = run.home
        if given.home.at.auto:
            home = home.model_copy(update={"at": given.home.at})
        return given, run.model_copy(update={"layout": request, "home": home})

    # 2. `chunk-auto` and `recompute-auto` stand for what the run's groups have.
    given_edges = _edges(given)
    run_edges = _edges(run)
    resolved = tuple(
        _resolve_edge(edge, run_edge) for edge, run_edge in zip(given_edges, run_edges)
    )
    if len(given_edges) == len(run_edges) and resolved == run_edges:
        return given.model_copy(update={"layout": run.layout}), run
    return given, run


def changes(was: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between two configs: both values in the config's form, by key,
    as in `train.lr`."""
    return dict(_differences(was.model_dump(mode="json"), now.model_dump(mode="json")))


def _differences(
    was: Mapping[str, Any], now: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, new in now.items():
        old = was.get(key)
        # A mapping that has other keys now is told whole, as an override sets it.
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
            yield from _differences(old, new, f"{above}{key}.")
        elif old != new:
            yield f"{above}{key}", (old, new)


def _edges(config: Config) -> tuple[Edge, ...]:
    return () if isinstance(config.layout, AutoLayout) else config.edges


def _resolve_edge(edge: Edge, run_edge: Edge) -> Edge:
    """A group whose `chunk-auto` and `recompute-auto` are what the run's group has."""
    layout = edge.use
    run_layout = run_edge.use
    if layout.chunk == AUTO:
        layout = replace(layout, chunk=run_layout.chunk)
    if layout.recompute == "auto":
        layout = replace(
            layout,
            recompute=run_layout.recompute,
            kept_blocks=run_layout.kept_blocks,
            offload=run_layout.offload,
        )
    return replace(edge, use=layout)


def _shown_value(value: Any) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else shown(value)


def _override(key: str, value: Any) -> str:
    """The override as a shell takes it. A plain word is no other YAML without quotes."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[./-]*\w[\w./-]*", value, re.ASCII)
    return shlex.quote(f"{key}={value if is_plain else json.dumps(value)}")


def fit_ranks(config: Config, devices: int) -> Config:
    """The config with layouts for so many devices, or for fewer. `layout: auto` stays to be
    planned, for all of them. Raises UsageError where no layout is possible."""
    if isinstance(config.layout, AutoLayout):
        return config.with_layout(AutoLayout(devices, config.layout.fixed).to_json())
    if config.world == devices:
        return config
    # Fewer replicas come first: what a replica computes with stays as it is.
    for ranks in range(devices, 0, -1):
        if changed := _changed(config, partial(_with_replicas, ranks=ranks)):
            return changed
    if changed := _changed(config, partial(_nearest, config=config, devices=devices)):
        return changed
    raise UsageError(
        f"layout {config.model_dump(mode='json')['layout']}: no layout like it is possible on"
        f" {devices} devices"
    )


def _nearest(layout: Layout, config: Config, devices: int) -> Layout | None:
    """The nearest layout of so many ranks that all stages of the run may have."""
    for near in legal.nearest_layouts(layout, devices):
        faults = (legal.faults(part.spec, near, None, float8=part.float8) for part in config.parts)
        if not any(faults):
            return near
    return None


def _with_replicas(layout: Layout, ranks: int) -> Layout | None:
    """The layout with as many replicas as have so many ranks together; None where they do not."""
    replicas, rest = divmod(ranks * layout.dp, layout.world)
    return layout.with_degrees({"dp": replicas}) if replicas and not rest else None


def _changed(config: Config, change: Change) -> Config | None:
    """The config with all layouts changed, those of stages too; None where that is not possible."""
    values = config.model_dump(mode="json")
    try:
        values["layout"] = _change_value(values["layout"], change)
        for stage in values["train"]["stages"]:
            if "layout" in stage:
                stage["layout"] = _change_value(stage["layout"], change)
        changed = Config.model_validate(values)
        for part in changed.parts:
            part.check_layouts()
    except (UsageError, ValueError):  # a layout, or the config with it
        return None
    return changed


def _change_value(value: Any, change: Change) -> Any:
    """A layout, or layouts by length, in the config's form. Raises UsageError where one cannot be
    changed."""
    if not isinstance(value, str):
        return [edge | {"use": _change_value(edge["use"], change)} for edge in value]
    changed = change(Layout.parse(value))
    if changed is None:
        raise UsageError(f"layout {value} cannot be changed so")
    return str(changed)
