"""Steps of a run, predicted before they are trained: by the clock, on this machine as the trials of
`layout: auto` have calibrated it."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from longshift.cluster.cluster import Cluster
from longshift.cluster.files import figures
from longshift.config import Config
from longshift.dist.world import World
from longshift.simulate.calibrate import band_of_errors
from longshift.step_report import RunForecast
from longshift.terminal import say
from longshift.trainer.metrics import StepMetrics, read_rows
from longshift.trainer.plan_file import place, read
from longshift.trainer.run_folder import RunFolder
from longshift.trainer.step_measurements import profile_here

SHARE = 0.01  # of the run's seconds, that predicting may take
# Steps that say how wide the band is: few, so that it follows a machine that other work slows down.
RECENT = 8


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
        if (
            plan is None
            or plan.calibration is None
            or config.model_dump(mode="json")["layout"] != plan.layout
        ):
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
