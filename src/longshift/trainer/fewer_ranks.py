"""A run's config for another number of devices: what a run goes on with when some are lost. Needs
no torch.

3 devices are left    dp4     -> dp3       fewer replicas
                      dp2.tp2 -> tp2       fewer replicas; one device is not used
                      tp4     -> tp3       no replica has room: the nearest layout of as many ranks
                      auto    -> planned again for 3
"""

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from longshift.config import Config
from longshift.errors import UsageError
from longshift.layout import legal
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import Layout

Change = Callable[[Layout], Layout | None]


def fit_ranks(config: Config, devices: int) -> Config:
    """The config with layouts for so many devices, or for fewer. `layout: auto` stays to be
    planned, for all of them. Raises UsageError where no layout is possible."""
    if isinstance(config.layout, AutoLayout):
        return config.with_layout(AutoLayout(devices, config.layout.fixed).to_json())
    if config.world == devices:
        return config
    for change in _changes(config, devices):
        changed = _changed(config, change)
        if changed is not None:
            return changed
    raise UsageError(
        f"layout {config.model_dump(mode='json')['layout']}: no layout like it is possible on"
        f" {devices} devices"
    )


def _changes(config: Config, devices: int) -> Iterator[Change]:
    """Ways to change every layout of a run, the first one first."""
    for ranks in range(devices, 0, -1):
        yield lambda layout, ranks=ranks: _with_replicas(layout, ranks)
    yield lambda layout: next(
        (near for near in legal.nearest_layouts(layout, devices) if _is_legal(config, near)), None
    )


def _with_replicas(layout: Layout, ranks: int) -> Layout | None:
    """The layout with as many replicas as have so many ranks together; None where they do not."""
    replicas, rest = divmod(ranks * layout.dp, layout.world)
    return layout.with_degrees({"dp": replicas}) if replicas and not rest else None


def _is_legal(config: Config, layout: Layout) -> bool:
    return not any(
        legal.faults(part.spec, layout, None, float8=part.float8) for part in config.parts
    )


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
    except (UsageError, ValidationError, ValueError):
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
