"""A run's `plan.json`: what was planned, what was tried of it, what goes on. Needs no torch.

Layouts that were tried are ranked by their predicted and their measured seconds together. A trial
has few steps. Each layout gets documents of its own, and steps of one layout differ by as much as
layouts do. So every measured step is compared with what was predicted for its documents. If the
steps of one layout took longer than predicted, compared with those of the other layouts, its
typical step is expected to do so too, except for the part that chance explains:

    log expected = log typical + shrink * (mean log ratio of its steps - mean over all layouts)
    shrink       = PREDICTION_ERROR^2 / (PREDICTION_ERROR^2 + noise^2 / steps)

    ratio: measured over predicted seconds        noise: how much steps of one layout differ

This is the posterior mean if both errors are normal (empirical Bayes: Efron and Morris, JASA 70,
1975). On a noisy machine the prediction counts more. Without measurements it decides alone.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from longshift.cluster.cluster import Calibration
from longshift.config import Config
from longshift.errors import CheckpointError
from longshift.files import rewrite, written
from longshift.layout.auto_layout import with_current_words

AGAIN = "remove it, and layout: auto is chosen again"
# Standard deviations of log ratios, from 81 budgets of benchmarks/plan_choice.py.
PREDICTION_ERROR = 0.06  # between layouts that were tried together
STEP_NOISE = 0.08  # between steps of one layout; used if every layout has only one step


@dataclass(frozen=True)
class TrialResult:
    """What is known of a layout that was tried.

    `typical_s`: predicted seconds of a typical step.
    `measured_s`: measured seconds of the steps that were trained.
    `clock_s`: predicted seconds of these steps; empty if nothing was predicted.
    """

    typical_s: float
    measured_s: tuple[float, ...]
    clock_s: tuple[float, ...]

    @property
    def log_ratios(self) -> list[float]:
        """Logarithms of measured over predicted seconds, for each step with a prediction."""
        seconds = zip(self.measured_s, self.clock_s)
        return [math.log(measured / predicted) for measured, predicted in seconds]


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
        # Choices are tried in order, so the trials so far number this one.
        typical_s = self.facts["tried"][len(self.trials)]["seconds"]
        trial = TrialResult(typical_s, tuple(measured_s), tuple(clock_s))
        trials = (*self.trials, trial)
        is_last = len(trials) == len(self.choices)
        return replace(self, trials=trials, chosen=fastest_trial(trials) if is_last else None)

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
        plan = TypeAdapter(cls).validate_python(fields)
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
    except ValidationError as fault:
        error = fault.errors()[0]
        reason = f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
        raise CheckpointError(f"{file} cannot be read: {reason}; {AGAIN}") from None
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


def fastest_trial(trials: Sequence[TrialResult]) -> int:
    """Return the number of the trial with the fewest expected seconds; of equal ones the first."""
    expected = expected_seconds(trials)
    return expected.index(min(expected))


def expected_seconds(trials: Sequence[TrialResult]) -> list[float]:
    """Seconds that a typical step of each trial is expected to take.

    They compare layouts with each other. A machine that is slower than predicted under all layouts
    alike does not change them.
    """
    noise = _step_noise(trials)
    means = [_mean(trial.log_ratios) for trial in trials if trial.log_ratios]
    mean_of_layouts = _mean(means)
    expected = []
    for trial in trials:
        log_ratios = trial.log_ratios
        # A trial without predictions keeps its typical seconds.
        shrink = 0.0
        if log_ratios:
            noise_of_mean = noise**2 / len(log_ratios)
            shrink = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + noise_of_mean)
        correction = shrink * (_mean(log_ratios) - mean_of_layouts)
        expected.append(trial.typical_s * math.exp(correction))
    return expected


def _step_noise(trials: Sequence[TrialResult]) -> float:
    """Standard deviation of the log ratios of one layout, pooled over all layouts."""
    squares = []
    degrees_of_freedom = 0
    for trial in trials:
        log_ratios = trial.log_ratios
        if log_ratios:
            # The mean of each layout takes one degree of freedom.
            mean = _mean(log_ratios)
            squares += [(log_ratio - mean) ** 2 for log_ratio in log_ratios]
            degrees_of_freedom += len(log_ratios) - 1
    if degrees_of_freedom == 0:
        return STEP_NOISE
    return math.sqrt(sum(squares) / degrees_of_freedom)


def _mean(values: Sequence[float]) -> float:
    """The mean; 0 of an empty list."""
    return sum(values) / len(values) if values else 0.0
