"""Calibration: constants fitted to measured steps, pulled towards what was known before.

Least squares on the logarithm of predicted over measured seconds, by Gauss-Newton with differences.
A constant's logarithm is held to its prior by a spring of its own width, so that what the steps do
not show stays where it was.

Of a run (`by_steps`): the clock plays each step as the cluster stands, and with each figure of it a
little worse. The differences say what a step shows of a figure. Those that show most are fitted,
and each step is predicted by what the others say: these errors make a band."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longshift.cluster.cluster import MOVED
from longshift.simulate.rates import Constants

# Constants that a fit may move, and how far: the width, in logarithms,
# of what is known of each beforehand.
FREE: Mapping[str, float] = {
    "matmul": 0.1, "attention": 0.2, "memory": 0.1, "node": 0.25, "network": 0.25, "launch": 0.5,
    "power": 0.5, "ramp": 0.5, "tail": 0.5, "eager": 0.3, "compiled": 0.3, "scores": 0.3,
    "loss": 0.3, "update": 0.5, "jitter": 0.7, "messages": 0.5, "crowd": 0.5, "begin_s": 0.5,
}  # fmt: skip
# A step's seconds differ by so much, as a logarithm, from one run to the next; no constant explains
# it.
ERROR = 0.05
OUTLIER = 0.12  # logarithm: three times what repeats of a published measurement differ by, and more
ROUNDS = 8
STEP = 1e-4  # of a logarithm, for differences
MOST = 5  # constants that steps of a run move
LEAST_SHARE = 0.005  # of a step's seconds, that a figure must stand for
# How much more time a figure is given to see what it stands for,
# and a change that is worth another look.
WORSE = 0.05
LOOKS = 3
# Relative half-width that holds 80 % of the errors of benchmarks/published.py, for sources to which
# constants were not fitted: 0.10, and 0.12 after three of their rows,
# most of which belong to one source.
BAND = 0.12
HELD = 0.8  # share of steps that were held back, which a band holds

PlaySteps = Callable[[Mapping[str, float]], np.ndarray]  # seconds of each step, by figures


def bounded(error: np.ndarray) -> np.ndarray:
    """Errors whose squares grow like a line beyond OUTLIER (Huber's loss): a step that no constant
    explains pulls no more than that."""
    size = np.abs(error)
    return np.where(
        size <= OUTLIER,
        error,
        np.sign(error) * np.sqrt(np.maximum(0.0, 2 * OUTLIER * size - OUTLIER**2)),
    )


def moved(constants: Constants, logs: Mapping[str, float]) -> Constants:
    """Constants times the exponentials of `logs`."""
    return replace(
        constants,
        **{name: getattr(constants, name) * float(np.exp(value)) for name, value in logs.items()},
    )


def fit(
    predict: Callable[[Constants], np.ndarray],
    measured_s: np.ndarray,
    prior: Constants,
    widths: Mapping[str, float] = FREE,
    weights: np.ndarray | None = None,
) -> Constants:
    """Constants for which `predict` (seconds of each step) is nearest to `measured_s`. `weights`:
    of each step in the sum of squares."""
    names = tuple(widths)
    measured_s = np.asarray(measured_s, dtype=float)
    root = np.sqrt(np.ones_like(measured_s) if weights is None else weights) / ERROR
    springs = np.diag([1 / widths[name] for name in names])

    def residuals(logs: np.ndarray) -> np.ndarray:
        seconds = predict(moved(prior, dict(zip(names, logs))))
        return root * bounded(np.log(seconds / measured_s))

    def loss(errors: np.ndarray, logs: np.ndarray) -> float:
        return float(errors @ errors + np.sum((springs @ logs) ** 2))

    logs = np.zeros(len(names))
    for _ in range(ROUNDS):
        # 1. Solve the linear problem around these logarithms.
        errors = residuals(logs)
        slopes = [(residuals(logs + STEP * unit) - errors) / STEP for unit in np.eye(len(names))]
        matrix = np.vstack([np.stack(slopes, axis=1), springs])
        target = np.concatenate([-errors, -springs @ logs])
        change = np.linalg.lstsq(matrix, target, rcond=None)[0]

        # 2. Halve the step until it makes the loss no larger.
        limit = loss(errors, logs)
        stride = 1.0
        while stride > 0.05:
            trial = logs + stride * change
            if loss(residuals(trial), trial) <= limit:
                break
            stride /= 2
        if stride > 0.05:
            logs = logs + stride * change
        if np.max(np.abs(change)) < 1e-3:
            break
    return moved(prior, dict(zip(names, logs)))


@dataclass(frozen=True)
class StepFit:
    """What steps of a run say of a cluster. `constants`: as in `Cluster.moved`; `before`: measured
    over predicted seconds, less 1, of each step on the cluster as it stands; `held_back`: the same
    of each step by what the others say."""

    constants: Mapping[str, float]
    before: np.ndarray
    held_back: np.ndarray


@dataclass(frozen=True)
class _StepParts:
    """What steps show of a cluster's figures: `seconds` of each step at `constants`, of which
    `parts` go with each figure."""

    constants: Mapping[str, float]
    seconds: np.ndarray
    parts: Mapping[str, np.ndarray]

    @classmethod
    def by(cls, play: PlaySteps, constants: Mapping[str, float]) -> "_StepParts":
        seconds = play(constants)

        parts = {}
        for name, value in constants.items():
            slower_s = play({**constants, name: value * (1 + WORSE) ** _power(name)})
            parts[name] = (slower_s - seconds) / WORSE

        return cls(constants, seconds, parts)

    def at(self, constants: Mapping[str, float]) -> np.ndarray:
        """Seconds of each step."""
        times = {
            name: (constants[name] / self.constants[name]) ** _power(name) for name in self.parts
        }
        return self.seconds + sum(
            (part * (times[name] - 1) for name, part in self.parts.items()), np.zeros(())
        )

    def fitted(self, measured_s: np.ndarray, rows: np.ndarray) -> dict[str, float]:
        """The constants by which some of the steps took what was measured."""
        prior = Constants(**dict.fromkeys(MOVED, 1.0))

        def predict(constants: Constants) -> np.ndarray:
            return self.at({name: getattr(constants, name) for name in self.parts})[rows]

        widths = {name: FREE[name] for name in self.parts}
        constants = fit(predict, measured_s[rows], prior, widths)
        return {name: getattr(constants, name) for name in self.parts}


def band_of_errors(errors: Sequence[float] | np.ndarray) -> float:
    """The relative half-width that a next step is in with probability HELD, where it is as likely
    as those of `errors` (measured over predicted seconds, less 1; one or more) to be anywhere among
    them; never less than what repeats of a step differ by."""
    rank = min(len(errors), math.ceil(HELD * (len(errors) + 1)))
    return max(ERROR, float(np.sort(np.abs(errors))[rank - 1]))


def by_steps(play: PlaySteps, measured_s: np.ndarray) -> StepFit:
    """What steps that took `measured_s`, two or more, say. `play`: the clock's seconds of each step
    where figures of the cluster are so many times what they are (`Cluster.moved`)."""
    measured_s = np.asarray(measured_s, dtype=float)
    num_steps = len(measured_s)
    all_steps = np.ones(num_steps, dtype=bool)

    # 1. Choose the figures that stand for most of the seconds.
    parts = _StepParts.by(play, dict.fromkeys(MOVED, 1.0))
    prior_errors = measured_s / parts.seconds - 1
    shares = {name: float(np.max(part / parts.seconds)) for name, part in parts.parts.items()}
    names = [name for name in MOVED if shares[name] >= LEAST_SHARE]
    names = sorted(names, key=lambda name: -shares[name])[:MOST]
    parts = replace(
        parts,
        parts={name: parts.parts[name] for name in names},
        constants=dict.fromkeys(names, 1.0),
    )

    # 2. Fit them, and play again where they moved far: what is fitted is linear in each.
    constants = parts.fitted(measured_s, all_steps)
    for _ in range(LOOKS - 1):
        changes = [abs(np.log(constants[name] / parts.constants[name])) for name in names]
        if all(change < WORSE for change in changes):
            break
        parts = _StepParts.by(play, constants)
        constants = parts.fitted(measured_s, all_steps)

    # 3. Predict each step by what the others say.
    held_back = []
    for step, is_step in enumerate(np.eye(num_steps, dtype=bool)):
        predicted_s = parts.at(parts.fitted(measured_s, ~is_step))[step]
        held_back.append(float(measured_s[step] / predicted_s) - 1)
    return StepFit(constants, prior_errors, np.array(held_back))


def _power(name: str) -> int:
    """1 where a constant multiplies seconds, -1 where it multiplies a rate."""
    return 1 if name == "launch" else -1
