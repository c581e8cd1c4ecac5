"""Steps of a run beside the clock. What they took says something of the cluster: `longshift
calibrate`, and `layout: auto` after its trials. By what trials have said of this machine, steps are
predicted before they are trained."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Self

import numpy as np

from longshift.cluster.cluster import MOVED, Calibration, Cluster
from longshift.cluster.files import figures, profile_of_host
from longshift.command_results import CalibrationResult, CalibrationStep
from longshift.config import Config
from longshift.config_parts import layout_out
from longshift.dist.world import World
from longshift.documents.batch import Batches
from longshift.errors import UsageError
from longshift.simulate.calibrate import LOOKS, StepFit, band_of_errors, by_steps
from longshift.simulate.calibrate import MOST as MOST_CONSTANTS
from longshift.step_report import RunForecast, layout_text
from longshift.terminal import Say, say, silent
from longshift.trainer.corpus import open_corpus
from longshift.trainer.metrics import StepMetrics, read_rows
from longshift.trainer.plan_file import place, read
from longshift.trainer.run_folder import RunFolder

MOST = 24  # steps of a run that are played
LEAST = 4  # steps without which nothing is said
PLAYS = 2 + len(MOVED) + (LOOKS - 1) * (1 + MOST_CONSTANTS)  # of all steps, at the most
LONGEST_S = 60.0  # that they should take together
TOLD_EVERY_S = 10.0
SHARE = 0.01  # of the run's seconds, that predicting may take
# Steps that say how wide the band is: few, so that it follows a machine that other work slows down.
RECENT = 8


def profile_here(world: World) -> Cluster | None:
    """The profile of the machine that ranks run on; None where it was not measured."""
    return profile_of_host(world.per_node, world.nodes, world.device.type, cores=world.cores)


def clock_steps(config: Config, cluster: Cluster, cursors: Sequence[int]) -> list[float]:
    """The clock's seconds of the steps of a run that begin at these cursors."""
    _, cache = open_corpus(config, verify=False)
    batches = Batches.of(config, cache)
    forecast = RunForecast(config, cluster)
    seconds = []
    for cursor in cursors:
        lengths = [len(document.ids) for document in batches.at(cursor).documents]
        seconds.append(forecast.step(lengths).seconds)
    return seconds


@dataclass(frozen=True)
class StepMeasurement:
    """A step of a run. `layout`: in the config's form; `lengths`: of its documents, in tokens."""

    step: int
    layout: Any
    lengths: tuple[int, ...]
    seconds: float


def read_measurements(run: Path, config: Config) -> list[StepMeasurement]:
    """Steps of a run folder, evenly chosen, with their documents. Those in which memory was
    allocated are left out: the first of a process, and of a layout. Raises UsageError where fewer
    than LEAST are left."""
    if config.train.stages:
        raise UsageError(
            f"{run} has stages, whose steps differ; calibrate by a run without train.stages"
        )
    rows = read_rows(RunFolder(run).metrics)
    now = layout_out(config.layout)

    # 1. Choose steps, evenly. A step begins at the cursor at which the step before it ended.
    cursors = {row["step"]: row["cursor"] for row in rows} | {0: 0}
    usable = [
        row for row in rows if not row.get("first", row["step"] == 1) and row["step"] - 1 in cursors
    ]
    selected = _evenly_chosen(usable, MOST)

    # 2. Read their documents.
    _, cache = open_corpus(config, verify=False)
    batches = Batches.of(config, cache)
    steps = []
    for row in selected:
        batch = batches.at(cursors[row["step"] - 1])
        # Else the config was another one.
        if (batch.tokens, batch.next_cursor) == (row["tokens"], row["cursor"]):
            lengths = tuple(len(document.ids) for document in batch.documents)
            steps.append(
                StepMeasurement(row["step"], row.get("layout", now), lengths, row["seconds"])
            )
    if len(steps) < LEAST:
        raise UsageError(
            f"{run} has {len(steps)} step{'s' * (len(steps) != 1)} to calibrate by, without those"
            f" that allocate memory, and {LEAST} are needed: train more under its config"
        )
    return steps


def _evenly_chosen(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, from the first to the last."""
    places = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[place] for place in places]


@dataclass(frozen=True)
class CalibrationFit:
    """A cluster as the steps of a run reach it, and how much nearer they are predicted."""

    cluster: Cluster
    steps: tuple[StepMeasurement, ...]
    fit: StepFit

    @property
    def calibration(self) -> Calibration:
        assert self.cluster.calibration is not None
        return self.cluster.calibration

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute relative errors: by the cluster as it stood, and of steps that were held
        back."""
        return {
            "before": mean(map(abs, self.fit.before.tolist())),
            "held_back": mean(map(abs, self.fit.held_back.tolist())),
        }

    def result(self, file: Path) -> CalibrationResult:
        """What was found, where the cluster was written into a file."""
        rows = [
            CalibrationStep(
                step=step.step,
                layout=step.layout,
                seconds=step.seconds,
                before=float(before),
                held_back=float(held_back),
            )
            for step, before, held_back in zip(self.steps, self.fit.before, self.fit.held_back)
        ]
        calibration = self.calibration
        return CalibrationResult(
            cluster=self.cluster.name,
            constants=calibration.constants,
            band=calibration.band,
            fingerprint=calibration.fingerprint,
            layouts=calibration.layouts,
            errors=self.errors,
            rows=tuple(rows),
            file=file,
        )


def fit_measurements(
    run: Path, config: Config, profile: Cluster, tell: Say = silent
) -> CalibrationFit:
    """What the steps of a run folder say of the cluster that they ran on: fewer of them where
    playing all would take longer than LONGEST_S. `tell`: progress. Raises UsageError where they are
    too few."""
    steps = read_measurements(run, config)
    # A fit starts from rates that were measured, not from an earlier fit.
    profile = replace(profile, calibration=None)
    configs = {layout_text(step.layout): config.with_layout(step.layout) for step in steps}

    began_s = told_s = time.monotonic()
    num_plays = 0

    def play(constants: Mapping[str, float]) -> np.ndarray:
        nonlocal num_plays, told_s
        now_s = time.monotonic()
        if now_s - told_s > TOLD_EVERY_S:
            told_s = now_s
            tell(f"after {now_s - began_s:.0f} s: played {num_plays} times, of {PLAYS} at the most")
        num_plays += 1
        forecasts = {}
        for layout, layout_config in configs.items():
            forecasts[layout] = RunForecast(layout_config, profile.moved(constants))
        return np.array(
            [forecasts[layout_text(step.layout)].step(step.lengths).seconds for step in steps]
        )

    # The first play is for its seconds alone.
    play({})
    expected_s = (time.monotonic() - began_s) * PLAYS
    if expected_s > LONGEST_S:
        steps = _evenly_chosen(steps, max(LEAST, int(len(steps) * LONGEST_S / expected_s)))
    tell(f"playing {len(steps)} steps on the clock takes about {min(expected_s, LONGEST_S):.0f} s")
    fit = by_steps(play, np.array([step.seconds for step in steps]))
    errors = tuple(fit.held_back.tolist())
    calibration = Calibration(
        fit.constants,
        band_of_errors(errors),
        figures(profile),
        tuple(configs),
        errors,
    )
    return CalibrationFit(replace(profile, calibration=calibration), tuple(steps), fit)


class StepForecast:
    """Predicts steps of a run. Mutable: its band follows how far off it was. The first step, in
    which memory is allocated, and steps for which it has no time are left out."""

    def __init__(self, config: Config, cluster: Cluster, errors: Sequence[float]):
        """`errors`: measured over predicted seconds, less 1, of the steps so far."""
        self._forecast = RunForecast(config, cluster)
        self._errors = deque(errors, maxlen=RECENT)
        self._spent_s = 0.0
        self._trained_s = 0.0
        self._said: dict[str, float] = {}

    @classmethod
    def of(cls, run: Path, config: Config, world: World) -> Self | None:
        """What predicts the steps that this rank trains under `config`; None on other ranks than 0,
        where the run's plan was not calibrated or is of other layouts, and where this machine's
        profile is not the one that it was calibrated by, which is said."""
        plan = read(run) if world.rank == 0 else None
        if plan is None or plan.calibration is None or layout_out(config.layout) != plan.layout:
            return None
        profile = profile_here(world)
        if profile is None or figures(profile) != plan.calibration.fingerprint:
            say(
                f"steps are not predicted: {place(run)} was calibrated by another profile of this"
                " machine"
            )
            return None
        rows = [row for row in read_rows(RunFolder(run).metrics) if "predicted_seconds" in row]
        since = [row["seconds"] / row["predicted_seconds"] - 1 for row in rows]
        return cls(
            config,
            replace(profile, calibration=plan.calibration),
            [*plan.calibration.errors, *since],
        )

    def predict(self, lengths: Sequence[int]) -> None:
        """Predict a step with documents of these lengths: its seconds, and a band by how far off
        the steps before it were."""
        self._said = {}
        # False before the first step too, as both are 0 then.
        if self._spent_s < SHARE * self._trained_s:
            began = time.perf_counter()
            self._said = {
                "predicted_seconds": self._forecast.step(lengths).seconds,
                "band": band_of_errors(self._errors),
            }
            self._spent_s += time.perf_counter() - began

    def beside(self, metrics: StepMetrics) -> StepMetrics:
        """The metrics of that step with what was predicted."""
        self._trained_s += metrics.seconds
        if self._said:
            self._errors.append(metrics.seconds / self._said["predicted_seconds"] - 1)
        return replace(metrics, **self._said)
