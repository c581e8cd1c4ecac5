"""Times operations: warm, interleaved, as medians.

All points of a family are visited in turn, round after round, so that a machine that slows down for a while slows all of them, and the
median over the rounds leaves it out.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longshift.cluster.curves import Axis, Curve, monotone

FEWEST, MOST = 3, 15  # rounds
SHORT_S = 2e-3  # operations that are shorter are repeated inside one timing
LONG_S = 0.05  # the same where cores are shared or capped: several periods of the kernel's scheduler, to see what is sustained

Run = Callable[[], object]
"""One operation. A float that it returns is the seconds that it took: it times itself, as one must that waits for something else first."""


@dataclass(frozen=True)
class Plan:
    """A curve to measure. `prepare(*sizes)` makes what one point needs and gives the operation to time."""

    axes: tuple[Axis, ...]
    prepare: Callable[..., Run]


@dataclass(frozen=True)
class Bench:
    """Where and how thoroughly. `least_s`: of one timing."""

    device: torch.device
    quick: bool
    least_s: float = SHORT_S

    def curves(self, plans: Mapping[str, Plan], budget_s: float) -> dict[str, Curve]:
        """Measure a family in about `budget_s`, preparation aside; FEWEST rounds are made whatever they take."""
        curves = {name: Curve(plan.axes, (1.0,) * math.prod(len(a.sizes) for a in plan.axes)).points for name, plan in plans.items()}
        runs = [(name, plans[name].prepare(*point)) for name, points in curves.items() for point in points]
        found = iter(self.seconds([run for _, run in runs], budget_s))
        return {name: curve_of(plan.axes, [next(found) for _ in curves[name]]) for name, plan in plans.items()}

    def seconds(self, runs: Sequence[Run], budget_s: float) -> list[list[float]]:
        """For each operation its seconds in every round."""
        repeats = []
        for run in runs:
            run()
            repeats.append(max(1, math.ceil(self.least_s / max(1e-9, self._time(run, 1)))))
        samples: list[list[float]] = [[] for _ in runs]
        started, rounds = time.perf_counter(), 0
        while rounds < FEWEST or (rounds < MOST and (time.perf_counter() - started) * (rounds + 1) / rounds < budget_s):
            for run, count, kept in zip(runs, repeats, samples):
                kept.append(self._time(run, count))
            rounds += 1
        return samples

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _time(self, run: Run, count: int) -> float:
        self.wait()
        started, own_s = time.perf_counter(), []
        for _ in range(count):
            if isinstance(took := run(), float):
                own_s.append(took)
        self.wait()
        return statistics.median(own_s) if own_s else (time.perf_counter() - started) / count


def curve_of(axes: tuple[Axis, ...], samples: Sequence[Sequence[float]]) -> Curve:
    """Medians of each point's samples, in the order of `Curve.points`."""
    shape = tuple(len(axis.sizes) for axis in axes)
    medians = np.array([statistics.median(rounds) for rounds in samples])
    quartiles = np.array([np.percentile(rounds, (25, 75)) for rounds in samples])
    spread = (quartiles[:, 1] - quartiles[:, 0]) / medians
    seconds = monotone(medians.reshape(shape)).ravel()
    return Curve(axes, tuple(map(float, seconds)), tuple(map(float, spread)))
