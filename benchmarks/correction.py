"""Factors on groups of parts of a forecast, fitted to a few published steps of one source, pulled towards 1."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from closed_form import PARTS

from longshift.simulate.calibrate import ROUNDS, STEP, bounded

ERROR_OF_ONE = 0.1  # logarithm: of steps of one source beside each other, of different layouts
# What `calibrate` moves: groups of parts of a forecast, all of them first; and how far each can be off, as a logarithm: what
# published sources differ by from the constants fitted to the others.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": PARTS,
    "device": ("matmul", "attention", "recompute", "head"),
    "inside": ("tp", "ulysses", "ring"),
    "data": ("gather", "reduce", "optimizer"),
    "pipeline": ("bubble", "messages"),
}
WIDTHS: Mapping[str, float] = {"all": 0.15, "device": 0.03, "inside": 0.15, "data": 0.15, "pipeline": 0.1}


@dataclass(frozen=True)
class Correction:
    """Factors on groups of parts, by the names in GROUPS; 1 where there is none."""

    factors: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(GROUPS, 1.0))

    def total(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Seconds of steps with these parts, corrected."""
        found = np.zeros(())
        for part, seconds in parts.items():
            factor = float(np.prod([self.factors[name] for name, members in GROUPS.items() if part in members]))
            found = found + factor * np.asarray(seconds)
        return found

    def moved(self, logs: Mapping[str, float]) -> "Correction":
        """This correction times the exponentials of `logs`."""
        return Correction({name: factor * float(np.exp(logs[name])) for name, factor in self.factors.items()})


def calibrate(parts: Mapping[str, np.ndarray], measured_s: np.ndarray) -> Correction:
    """The correction for which forecasts with these parts (seconds by part, an array over steps) are nearest to `measured_s`; of no steps,
    none. Deterministic."""
    known = Correction()
    measured_s = np.asarray(measured_s, dtype=float)
    if not measured_s.size:
        return known
    names = tuple(GROUPS)
    springs, logs = np.diag([1 / WIDTHS[name] for name in names]), np.zeros(len(names))

    def error(at: np.ndarray) -> np.ndarray:
        return bounded(np.log(known.moved(dict(zip(names, at))).total(parts) / measured_s)) / ERROR_OF_ONE

    for _ in range(ROUNDS):
        here = error(logs)
        slopes = np.stack([(error(logs + STEP * one) - here) / STEP for one in np.eye(len(names))], axis=1)
        left, right = np.vstack([slopes, springs]), np.concatenate([-here, -springs @ logs])
        logs = logs + np.linalg.lstsq(left, right, rcond=None)[0]
    return known.moved(dict(zip(names, logs)))
