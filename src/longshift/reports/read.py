"""A run folder in numbers: all that the page of `longshift report` shows, and what `--json`
prints."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from rich.console import RenderableType

from longshift.cluster.host import has_gpu
from longshift.config import Config
from longshift.errors import CheckpointError, UsageError
from longshift.files import read_json_object
from longshift.print_result import CommandResult, fields_table
from longshift.step_report import explain
from longshift.trainer.metrics import GroupMetrics, StepMetrics, read_rows
from longshift.trainer.plan_file import read as read_plan
from longshift.trainer.run_folder import RunFolder, read_causes, read_config
from longshift.trainer.trackers import flat

SERIES = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_s",
    "model_flops_per_s",
    "memory_bytes",
    "seconds",
)
# Steps at either end of a run whose mean loss is told; half of the steps where they are fewer.
ENDS = 5


class GroupSums(CommandResult):
    """What documents of a range of lengths took in a run under one layout: sums over its steps;
    `tier_peak_bytes`: the most of a rank."""

    upto: int
    layout: str
    steps: int
    documents: int
    tokens: int
    seconds: float
    switch_exposed_s: float
    switch_hidden_s: float
    intra_node_bytes: int
    inter_node_bytes: int
    put_bytes: int
    fetched_bytes: int
    waited_s: float
    tier_peak_bytes: int


class RunReport(CommandResult):
    """A run. `facts`: what it is and how it went, in words and numbers; `config`: its settings by
    dotted key; `series`: a number for each of `steps`, None where one is not finite; `predicted`:
    step, seconds, predicted seconds, relative half-width of the band; `valid`: step, loss, and loss
    by longest document; `memory`: the ledger's peak by place, and what is alive then, in bytes."""

    name: str
    facts: dict[str, Any]
    config: dict[str, Any]
    steps: list[int]
    series: dict[str, list[float | None]]
    groups: list[GroupSums]
    predicted: list[dict[str, Any]]
    valid: list[dict[str, Any]]
    memory: dict[str, dict[str, Any]]

    def parts(self) -> Iterator[RenderableType]:
        """The facts."""
        yield fields_table(
            self.name, ((name, value) for name, value in self.facts.items() if value is not None)
        )


def read_run(path: Path) -> RunReport:
    """A run folder in numbers. Raises CheckpointError where it is none or its metrics are damaged,
    and UsageError where it has no step yet."""
    config = read_config(path)
    folder = RunFolder(path)
    try:
        rows = [StepMetrics.from_json(row) for row in read_rows(folder.metrics)]
    except (TypeError, ValueError, KeyError) as fault:
        raise CheckpointError(
            f"{folder.metrics} has a row that no step has written: {fault}"
        ) from None
    if not rows:
        raise UsageError(f"{path} has no step yet: there is nothing to report")
    series = {name: [_finite(getattr(row, name)) for row in rows] for name in SERIES}
    predicted = [
        {name: getattr(row, name) for name in ("step", "seconds", "predicted_seconds", "band")}
        for row in rows
        if row.predicted_seconds is not None
    ]
    valid = [
        {
            "step": row.step,
            "loss": _finite(row.valid_loss),
            "by_length": {part.upto: _finite(part.loss) for part in row.valid},
        }
        for row in rows
        if row.valid_loss is not None
    ]
    return RunReport(
        name=str(path),
        facts=_facts(config, folder, rows),
        config=dict(flat(config.model_dump(mode="json"))),
        steps=[row.step for row in rows],
        series=series,
        groups=_groups(rows),
        predicted=predicted,
        valid=valid,
        memory=_memory(config),
    )


def _facts(config: Config, folder: RunFolder, rows: Sequence[StepMetrics]) -> dict[str, Any]:
    env = read_json_object(folder.env)
    losses = [row.loss for row in rows if math.isfinite(row.loss)]
    ends = min(ENDS, (len(losses) + 1) // 2)
    last = rows[-1]
    latest = folder.latest
    plan = read_plan(folder.path)
    # In its first step a process allocates memory, and is slower than usual.
    usual = [row.tokens_per_s for row in rows if not row.first] or [last.tokens_per_s]
    causes = read_causes(folder)
    spec = config.spec
    packages = env.get("packages") or {}
    return {
        "model": config.model.preset or config.model.path,
        "parameters": spec.parameters,
        "trained parameters": spec.learned,
        "precision": config.train.precision,
        "layout": " > ".join(str(edge.use) for edge in config.parts[-1].edges),
        "ranks": config.parts[-1].world,
        "longest document": config.data.max_len,
        "tokens per step": config.train.tokens_per_step,
        "step": last.step,
        "steps": config.train.steps,
        "ended": _ended(config, last, causes[0].message if causes else None),
        "starts": sum(row.first for row in rows),
        "newest checkpoint": latest.read_text("utf-8").strip() if latest.is_file() else None,
        "first losses": sum(losses[:ends]) / ends if losses else None,
        "last losses": sum(losses[-ends:]) / ends if losses else None,
        "best validation": min(
            (row.valid_loss for row in rows if row.valid_loss is not None), default=None
        ),
        "tokens": sum(row.tokens for row in rows),
        "seconds": sum(row.seconds for row in rows),
        "median tokens per second": median_high(usual),
        "memory": max(row.memory_bytes for row in rows),
        "layouts tried": [str(choice) for choice in plan.choices] if plan else None,
        "machine": env.get("processor"),
        "torch": packages.get("torch"),
        "longshift": packages.get("longshift"),
        "command": env.get("command"),
    }


def _ended(config: Config, last: StepMetrics, cause: str | None) -> str:
    if cause:
        return f"failed after step {last.step}: {cause}"
    if last.stopped is not None:
        return f"ended by train.on_step at step {last.step}: {last.stopped}"
    if last.early:
        return f"ended early at step {last.step}: validation became no better"
    return (
        "finished"
        if last.step >= config.train.steps
        else f"stands at step {last.step} of {config.train.steps}"
    )


def _groups(rows: Sequence[StepMetrics]) -> list[GroupSums]:
    """By layout and longest document, in the order of lengths."""
    visits_of: dict[tuple[int, str], list[GroupMetrics]] = {}
    for row in rows:
        for group in row.groups:
            visits_of.setdefault((group.upto, group.layout), []).append(group)
    sums = GroupSums.model_fields.keys() - {"upto", "layout", "steps", "tier_peak_bytes"}
    return [
        GroupSums(
            upto=upto,
            layout=layout,
            steps=len(visits),
            **{name: sum(getattr(group, name) or 0 for group in visits) for name in sums},
            tier_peak_bytes=max(group.tier_peak_bytes for group in visits),
        )
        for (upto, layout), visits in sorted(visits_of.items())
    ]


def _memory(config: Config) -> dict[str, dict[str, Any]]:
    """What the ledger says of the rank that needs most, by place, in the stage that needs most."""
    needs = [explain(part, gpus=has_gpu()).need for part in config.parts]
    need = max(needs, key=lambda need: need.device.total)
    return {
        place: {
            "rank": need.rank,
            "total": peak.total,
            "during": peak.op,
            "alive": dict(peak.alive),
        }
        for place, peak in need.estimate.peaks.items()
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
