"""Steps of a run, predicted before they are trained: by the clock, on this machine as the trials of `layout: auto` have calibrated it."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from longshift.cluster.cluster import Cluster
from longshift.cluster.files import figures
from longshift.config import Config
from longshift.data.batch import StepBatch
from longshift.dist.world import World
from longshift.forecast import RunForecast
from longshift.train.measured import profile_here
from longshift.train.plan_file import place, read

SHARE = 0.01  # of the run's seconds, that predicting may take


class Foretold:
    """Predicts steps of a run. Mutable: it keeps what it has taken, and leaves steps out where that were more than SHARE of the run."""

    def __init__(self, config: Config, cluster: Cluster):
        self._forecast = RunForecast(config, cluster)
        self._spent_s, self._trained_s = 0.0, 0.0

    @classmethod
    def of(cls, run: Path, config: Config, world: World) -> Self | None:
        """What predicts the steps that this rank trains under `config`; None on other ranks than 0, where the run's plan was not calibrated
        or is of other layouts, and where this machine's profile is not the one that it was calibrated by, which is said."""
        plan = read(run) if world.rank == 0 else None
        if plan is None or plan.calibration is None or config.model_dump(mode="json")["layout"] != plan.layout:
            return None
        profile = profile_here(world)
        if profile is None or figures(profile) != plan.calibration.fingerprint:
            print(f"longshift: steps are not predicted: {place(run)} was calibrated by another profile of this machine", file=sys.stderr)
            return None
        return cls(config, replace(profile, calibration=plan.calibration))

    @property
    def band(self) -> float:
        """Relative half-width of what is predicted."""
        return self._forecast.band

    def seconds(self, batch: StepBatch) -> float | None:
        """Seconds that a step will take; None for one that is left out."""
        if self._spent_s > SHARE * self._trained_s:
            return None
        began = time.perf_counter()
        found = self._forecast.step([len(document.ids) for document in batch.documents]).seconds
        self._spent_s += time.perf_counter() - began
        return found

    def took(self, seconds: float) -> None:
        """A step was trained in so many seconds."""
        self._trained_s += seconds
