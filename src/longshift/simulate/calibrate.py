"""Calibration: constants fitted to measured steps, pulled towards what was known before.

Least squares on the logarithm of predicted over measured seconds, by Gauss-Newton with differences. A constant's logarithm is held to its
prior by a spring of its own width, so that what the steps do not show stays where it was.

Of a run (`by_steps`): the clock plays each step as the cluster stands, and with each figure of it a little worse. The differences say
what a step shows of a figure. Those that show most are fitted, and each step is predicted by what the others say: these errors make a band.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longshift.cluster.cluster import MOVED
from longshift.simulate.rates import Constants

# Constants that a fit may move, and how far: the width, in logarithms, of what is known of each beforehand.
FREE: Mapping[str, float] = {
    "matmul": 0.1, "attention": 0.2, "memory": 0.1, "node": 0.25, "network": 0.25, "launch": 0.5, "power": 0.5, "ramp": 0.5, "tail": 0.5,
    "eager": 0.3, "compiled": 0.3, "scores": 0.3, "loss": 0.3, "update": 0.5, "jitter": 0.7, "messages": 0.5, "crowd": 0.5, "begin_s": 0.5,
}  # fmt: skip
ERROR = 0.05  # logarithm: what a step's seconds differ by from one run to the next, and what no constant explains
OUTLIER = 0.12  # logarithm: three times what repeats of a published measurement differ by, and more
ROUNDS, STEP = 8, 1e-4
MOST = 5  # constants that steps of a run move
LEAST_SHARE = 0.005  # of a step's seconds, that a figure must stand for
WORSE = 0.05  # how much more time a figure is given to see what it stands for, and a change that is worth another look
LOOKS = 3
# Relative half-width that holds 80 % of the errors of benchmarks/published.py, for sources to which constants were not fitted: 0.10, and
# 0.12 after three of their rows, most of which belong to one source.
BAND = 0.12
HELD = 0.8  # share of steps that were held back, which a band holds


def bounded(error: np.ndarray) -> np.ndarray:
    """Errors whose squares grow like a line beyond OUTLIER (Huber's loss): a step that no constant explains pulls no more than that."""
    size = np.abs(error)
    return np.where(size <= OUTLIER, error, np.sign(error) * np.sqrt(np.maximum(0.0, 2 * OUTLIER * size - OUTLIER**2)))


def moved(constants: Constants, logs: Mapping[str, float]) -> Constants:
    """Constants times the exponentials of `logs`."""
    return replace(constants, **{name: getattr(constants, name) * float(np.exp(value)) for name, value in logs.items()})


def fit(
    predict: Callable[[Constants], np.ndarray],
    measured_s: np.ndarray,
    prior: Constants,
    widths: Mapping[str, float] = FREE,
    weights: np.ndarray | None = None,
) -> Constants:
    """Constants for which `predict` (seconds of each step) is nearest to `measured_s`. `weights`: of each step in the sum of squares."""
    names, measured_s = tuple(widths), np.asarray(measured_s, dtype=float)
    root = np.sqrt(np.ones_like(measured_s) if weights is None else weights) / ERROR
    springs = np.diag([1 / widths[name] for name in names])
    at, best = np.zeros(len(names)), np.inf
    stride = 1.0

    def error(logs: np.ndarray) -> np.ndarray:
        return root * bounded(np.log(predict(moved(prior, dict(zip(names, logs)))) / measured_s))

    for _ in range(ROUNDS):
        here = error(at)
        slopes = np.stack([(error(at + STEP * one) - here) / STEP for one in np.eye(len(names))], axis=1)
        left, right = np.vstack([slopes, springs]), np.concatenate([-here, -springs @ at])
        change = np.linalg.lstsq(left, right, rcond=None)[0]
        best, stride = float(here @ here + np.sum((springs @ at) ** 2)), 1.0
        while stride > 0.05:
            to = at + stride * change
            after = error(to)
            if float(after @ after + np.sum((springs @ to) ** 2)) <= best:
                break
            stride /= 2
        at = at + stride * change if stride > 0.05 else at
        if np.max(np.abs(change)) < 1e-3:
            break
    return moved(prior, dict(zip(names, at)))


@dataclass(frozen=True)
class StepFit:
    """What steps of a run say of a cluster. `constants`: as in `Cluster.moved`; `before`: measured over predicted seconds, less 1, of each
    step on the cluster as it stands; `held_back`: the same of each step by what the others say."""

    constants: Mapping[str, float]
    before: np.ndarray
    held_back: np.ndarray


@dataclass(frozen=True)
class _StepParts:
    """What steps show of a cluster's figures: `seconds` of each step at `constants`, of which `parts` go with each figure."""

    constants: Mapping[str, float]
    seconds: np.ndarray
    parts: Mapping[str, np.ndarray]

    @classmethod
    def by(cls, play: Callable[[Mapping[str, float]], np.ndarray], constants: Mapping[str, float]) -> "_StepParts":
        seconds = play(constants)
        worse = {name: play({**constants, name: value * (1 + WORSE) ** _power(name)}) for name, value in constants.items()}
        return cls(constants, seconds, {name: (slower - seconds) / WORSE for name, slower in worse.items()})

    def at(self, constants: Mapping[str, float]) -> np.ndarray:
        """Seconds of each step."""
        times = {name: (constants[name] / self.constants[name]) ** _power(name) for name in self.parts}
        return self.seconds + sum((part * (times[name] - 1) for name, part in self.parts.items()), np.zeros(()))

    def fitted(self, measured_s: np.ndarray, rows: np.ndarray) -> dict[str, float]:
        """The constants by which some of the steps took what was measured."""
        prior = Constants(**dict.fromkeys(MOVED, 1.0))

        def predict(constants: Constants) -> np.ndarray:
            return self.at({name: getattr(constants, name) for name in self.parts})[rows]

        found = fit(predict, measured_s[rows], prior, {name: FREE[name] for name in self.parts})
        return {name: getattr(found, name) for name in self.parts}


def band_of_errors(errors: Sequence[float] | np.ndarray) -> float:
    """The relative half-width that a next step is in with probability HELD, where it is as likely as those of `errors` (measured over
    predicted seconds, less 1; one or more) to be anywhere among them; never less than what repeats of a step differ by."""
    rank = min(len(errors), math.ceil(HELD * (len(errors) + 1)))
    return max(ERROR, float(np.sort(np.abs(errors))[rank - 1]))


def by_steps(play: Callable[[Mapping[str, float]], np.ndarray], measured_s: np.ndarray) -> StepFit:
    """What steps that took `measured_s`, two or more, say. `play`: the clock's seconds of each step where figures of the cluster are so
    many times what they are (`Cluster.moved`)."""
    measured_s = np.asarray(measured_s, dtype=float)
    count, every = len(measured_s), np.ones(len(measured_s), dtype=bool)
    shown = _StepParts.by(play, dict.fromkeys(MOVED, 1.0))
    before = measured_s / shown.seconds - 1
    shares = {name: float(np.max(part / shown.seconds)) for name, part in shown.parts.items()}
    most = sorted((name for name in MOVED if shares[name] >= LEAST_SHARE), key=lambda name: -shares[name])[:MOST]
    shown = replace(shown, parts={name: shown.parts[name] for name in most}, constants=dict.fromkeys(most, 1.0))
    found = shown.fitted(measured_s, every)
    for _ in range(LOOKS - 1):
        if all(abs(np.log(found[name] / shown.constants[name])) < WORSE for name in most):
            break
        shown = _StepParts.by(play, found)
        found = shown.fitted(measured_s, every)
    alone = np.eye(count, dtype=bool)
    held_back = np.array([float(measured_s[one] / shown.at(shown.fitted(measured_s, ~own))[one]) - 1 for one, own in enumerate(alone)])
    return StepFit(found, before, held_back)


def _power(name: str) -> int:
    """1 where a constant multiplies seconds, -1 where it multiplies a rate."""
    return 1 if name == "launch" else -1
