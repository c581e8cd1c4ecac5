"""A run's `plan.json`: what was planned, what was tried of it, what goes on. Needs no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import hypot, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

from longshift.cluster.cluster import Calibration
from longshift.config import Config
from longshift.errors import CheckpointError
from longshift.forecast import with_layout


@dataclass(frozen=True)
class PlanFile:
    """A run's `plan.json`. `asked`: the config's `layout` as it was written; `choices`: layouts in the config's form, all of which are
    tried, first the one that goes on unless another is faster (`Choice.worth_trying`); `facts`: what the planner said; `rates`: model
    FLOP/s of those that were tried, medians, and `errors`: their standard errors; `chosen`: the one that goes on; `calibration`: what the
    trials' steps showed of the machine; `home`: what `home: auto` became, None where the config names a home."""

    asked: Any
    choices: tuple[Any, ...]
    facts: Any = None
    rates: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    chosen: int | None = None
    calibration: Calibration | None = None
    home: Any = None

    @property
    def layout(self) -> Any:
        """What the next step is computed with, in the config's form."""
        return self.choices[len(self.rates) if self.chosen is None else self.chosen]

    def after(self, rates: Sequence[float]) -> "PlanFile":
        """With one more trial, whose steps had these model FLOP/s. After the last one the first choice goes on, unless the
        fastest one is faster by more than their standard errors: steps of a trial are few, and differ."""
        error = stdev(rates) / sqrt(len(rates)) if len(rates) > 1 else 0.0
        tried = replace(self, rates=(*self.rates, median(rates)), errors=(*self.errors, error))
        if len(tried.rates) < len(self.choices):
            return tried
        fastest = max(range(len(tried.rates)), key=lambda number: (tried.rates[number], -number))
        faster = tried.rates[fastest] - tried.rates[0] > hypot(tried.errors[fastest], tried.errors[0])
        return replace(tried, chosen=fastest if faster else 0)

    def config(self, config: Config) -> Config:
        """The config with the layout of the next step, and its home."""
        return with_layout(config, self.layout, self.home)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "PlanFile":
        found = json.loads(text)
        calibration = found.get("calibration")
        made = {"calibration": None if calibration is None else Calibration.from_json(calibration)}
        errors = found.get("errors", [0.0] * len(found["rates"]))
        tried = {"choices": tuple(found["choices"]), "rates": tuple(found["rates"]), "errors": tuple(errors)}
        return cls(**found | tried | made)


def place(run: Path) -> Path:
    """The file of a run folder's plan."""
    return run / "plan.json"


def read(run: Path) -> PlanFile | None:
    """The plan of a run folder; None where there is none. Raises CheckpointError where it cannot be read."""
    file = place(run)
    try:
        return PlanFile.from_json(file.read_text(encoding="utf-8")) if file.exists() else None
    except (OSError, ValueError, TypeError, KeyError) as fault:
        raise CheckpointError(f"{file} cannot be read: {fault}; remove it, and layout: auto is chosen again") from None
