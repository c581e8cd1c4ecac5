"""A run's `plan.json`: what was planned, what was tried of it, what goes on. Needs no torch."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longshift.cluster.cluster import Calibration
from longshift.config import Config
from longshift.errors import CheckpointError
from longshift.forecast import with_layout


@dataclass(frozen=True)
class PlanFile:
    """A run's `plan.json`. `asked`: the config's `layout` as it was written; `choices`: layouts in the config's form, best first, all of
    which are tried; `facts`: what the planner said; `rates`: model FLOP/s of those that were tried; `chosen`: the one that goes on;
    `calibration`: what the trials' steps showed of the machine."""

    asked: Any
    choices: tuple[Any, ...]
    facts: Any = None
    rates: tuple[float, ...] = ()
    chosen: int | None = None
    calibration: Calibration | None = None

    @property
    def layout(self) -> Any:
        """What the next step is computed with, in the config's form."""
        return self.choices[len(self.rates) if self.chosen is None else self.chosen]

    def after(self, rate: float) -> "PlanFile":
        """With the rate of one more trial. The fastest is chosen after the last one."""
        rates = (*self.rates, rate)
        chosen = max(range(len(rates)), key=lambda number: (rates[number], -number)) if len(rates) == len(self.choices) else None
        return replace(self, rates=rates, chosen=chosen)

    def config(self, config: Config) -> Config:
        """The config with the layout of the next step."""
        return with_layout(config, self.layout)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "PlanFile":
        found = json.loads(text)
        calibration = found.get("calibration")
        made = {"calibration": None if calibration is None else Calibration.from_json(calibration)}
        return cls(**found | {"choices": tuple(found["choices"]), "rates": tuple(found["rates"])} | made)


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
