"""How `layout: auto` becomes layouts before the ranks start, and what `longshift plan` writes. Needs no torch."""

from collections.abc import Callable
from pathlib import Path

from longshift.cluster.cluster import Cluster
from longshift.cluster.host import core_count
from longshift.config import Config
from longshift.errors import OutOfMemoryError, UsageError
from longshift.forecast import LANES, Planned, layout_text, plan, task_of
from longshift.layout.auto_layout import AutoLayout
from longshift.planner.replay import Way
from longshift.stream.trace import Span, events_of, save
from longshift.trainer.plan_file import PlanFile, place, read
from longshift.workload.given import Lengths

Tell = Callable[[str], None]


def chosen(config: Config, cluster: Callable[[int], Cluster], lengths: Callable[[], Lengths], tell: Tell) -> tuple[Config, PlanFile | None]:
    """The config with `layout: auto` chosen, and the plan that is kept in the run's folder. A run that has a plan for what is asked goes on
    with it. `cluster`: this machine, for a number of ranks; `lengths`: of the run's corpus. Raises OutOfMemoryError where nothing fits."""
    asked = config.layout
    if not isinstance(asked, AutoLayout):
        return config, None
    kept = read(Path(config.save.dir))
    if kept is not None and kept.asked == asked.to_json() and (kept.home is not None) == config.home.at.auto:
        tell(f"layout: auto: as {place(Path(config.save.dir))} says")
        return kept.config(config), kept
    found = plan(task_of(config, cluster(asked.ranks or core_count()), lengths()), tell)
    if found.choice.best is None:
        raise OutOfMemoryError("\n  ".join(["layout: auto:", *found.lines()]))
    ways = found.choice.worth_trying()
    choices = tuple(found.layout(way) for way in ways)
    home = found.task.home.to_json() if config.home.at.auto else None
    file = PlanFile(asked.to_json(), choices, found.result().to_json(), chosen=None if len(choices) > 1 else 0, home=home)
    if home is not None:
        tell(f"home: auto: {found.task.home}")
    for number, (choice, way) in enumerate(zip(choices, ways)):
        tell(f"layout: auto: {'first' if number == 0 else 'then'} {layout_text(choice)}, {way.seconds:.3g} s a step")
    return file.config(config), file


def write_config(config: Config, found: Planned, path: Path) -> None:
    """Write the config with the best choice. Raises UsageError where there is none or the file cannot be written."""
    if found.choice.best is None:
        raise UsageError("--emit: nothing fits, so there is no layout to write")
    try:
        home = found.task.home.to_json() if config.home.at.auto else None
        path.write_text(config.with_layout(found.layout(found.choice.best), home).to_yaml(), encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{path} cannot be written: {fault.strerror}") from None


def write_trace(way: Way, path: Path) -> None:
    """Write the first of the steps that were played, in the Trace Event Format. Raises UsageError where the file cannot be written."""
    step, _ = way.steps[0]
    spans: dict[int, list[Span]] = {}
    for start, pieces in zip(step.starts, step.played):
        for piece in pieces:
            lane = "messages" if piece.lane.startswith("messages") else piece.lane
            name = str(piece.key[0] if isinstance(piece.key, tuple) else piece.key)
            spans.setdefault(piece.rank, []).append(Span(lane, name, start + piece.start, start + piece.end, {}))
    events = []
    for stage, some in sorted(spans.items()):
        events += events_of(some, stage, f"stage {stage}, predicted", (*LANES, "messages"), 0.0)
    save(path, events)
