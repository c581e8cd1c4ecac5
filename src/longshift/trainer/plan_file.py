"""A run's `plan.json`: what was planned, what was tried of it, what goes on. Needs no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from longshift.cluster.cluster import Calibration
from longshift.config import Config
from longshift.errors import CheckpointError
from longshift.files import rewrite, written
from longshift.layout.auto_layout import with_current_words
from longshift.trainer.trial_ranking import TrialResult, fastest_trial

AGAIN = "remove it, and layout: auto is chosen again"


@dataclass(frozen=True)
class PlanFile:
    """A run's `plan.json`. `asked`: the config's `layout` as it was written; `choices`: layouts in
    the config's form, all of which are tried (`SearchResult.trial_plans`); `facts`: what the
    planner said; `trials`: what the steps of those that were tried took; `chosen`: the one that
    goes on; `calibration`: what the trials' steps showed of the machine; `home`: what `home: auto`
    became,
    None where the config names a home."""

    asked: Any
    choices: tuple[Any, ...]
    facts: Any = None
    trials: tuple[TrialResult, ...] = ()
    chosen: int | None = None
    calibration: Calibration | None = None
    home: Any = None

    @property
    def layout(self) -> Any:
        """What the next step is computed with, in the config's form."""
        return self.choices[len(self.trials) if self.chosen is None else self.chosen]

    def after(self, measured_s: Sequence[float], clock_s: Sequence[float]) -> "PlanFile":
        """With one more trial, whose steps took these seconds; `clock_s`: the clock's for the same
        documents, empty where it was not asked. After the last trial it says which choice goes
        on."""
        typical_s = self.facts["tried"][len(self.trials)]["seconds"]
        trials = (*self.trials, TrialResult(typical_s, tuple(measured_s), tuple(clock_s)))
        return replace(
            self,
            trials=trials,
            chosen=fastest_trial(trials) if len(trials) == len(self.choices) else None,
        )

    def config(self, config: Config) -> Config:
        """The config with the layout of the next step, and its home."""
        return config.with_layout(self.layout, self.home)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "PlanFile":
        """The plan of a file's text. A plan of an earlier version has rates in place of trials,
        which are dropped: its choice stays, and without a choice its ways are tried anew. Raises
        ValueError, TypeError or KeyError where the text is no plan."""
        try:
            fields = with_current_words(json.loads(text))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(fields, dict):
            raise ValueError(f"it holds {type(fields).__name__}, where an object is needed")
        for name in ("rates", "errors"):  # of earlier versions
            fields.pop(name, None)
        rows = fields.pop("trials", ())
        trials = (
            TrialResult(row["typical_s"], tuple(row["measured_s"]), tuple(row["clock_s"]))
            for row in rows
        )
        calibration = TypeAdapter(Calibration | None).validate_python(
            fields.pop("calibration", None)
        )
        plan = cls(
            **fields | {"choices": tuple(fields["choices"])},  # pyright: ignore[reportArgumentType]
            trials=tuple(trials),
            calibration=calibration,
        )
        if plan.chosen is not None and not 0 <= plan.chosen < len(plan.choices):
            raise ValueError(f"chosen is {plan.chosen}, of {len(plan.choices)} choices")
        if plan.chosen is None and len(plan.facts["tried"]) != len(plan.choices):
            raise ValueError("it does not say what each choice is predicted to take")
        return plan


def place(run: Path) -> Path:
    """The file of a run folder's plan."""
    return run / "plan.json"


def read(run: Path) -> PlanFile | None:
    """The plan of a run folder; None where there is none. Raises CheckpointError where it cannot be
    read."""
    file = place(run)
    try:
        return parse(file.read_text(encoding="utf-8"), file) if file.exists() else None
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError(f"{file} cannot be read: {fault}; {AGAIN}") from None


def parse(text: str, file: Path) -> PlanFile:
    """The plan that a file holds as text. Raises CheckpointError."""
    try:
        return PlanFile.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as fault:
        raise CheckpointError(f"{file} cannot be read: {fault}; {AGAIN}") from None


def keep(file: PlanFile | None, run: Path, resume: bool) -> None:
    """Write a plan into a run's folder; a run that begins without one takes away what another has
    left there."""
    with written(str(place(run))):
        if file is not None:
            rewrite(place(run), file.to_json())
        elif not resume:
            place(run).unlink(missing_ok=True)
