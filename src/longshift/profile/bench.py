"""Times operations: warm, interleaved, as medians.

All points of a family are visited in turn, round after round, so that a machine that slows down for
a while slows all of them, and the median over the rounds leaves it out.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from longshift.cluster.curves import Curve, SampledSizes, monotone

FEWEST = 3  # rounds
MOST = 15  # rounds
# After so many seconds a family has fewer rounds than FEWEST, or none after its warm-up: others run
# on the cores.
LATEST_S = 10.0
# An operation that takes this many seconds is warm after its first run: what is made once takes
# less.
WARM_S = 0.5
SHORT_S = 2e-3  # operations that are shorter are repeated inside one timing
# The same where cores are shared or capped: several periods of the kernel's scheduler, to see what
# is sustained.
LONG_S = 0.05

Run = Callable[[], object]
"""One operation. A float that it returns is the seconds that it took: it times itself, as one must
that waits for something else first."""


@dataclass(frozen=True)
class Plan:
    """A curve to measure. `prepare(*sizes)` makes what one point needs and gives the operation to
    time."""

    axes: tuple[SampledSizes, ...]
    prepare: Callable[..., Run]

    @property
    def points(self) -> list[tuple[float, ...]]:
        """Sizes of every point, as in `Curve.points`."""
        return list(product(*(axis.sizes for axis in self.axes)))


@dataclass(frozen=True)
class Bench:
    """Where and how thoroughly. `least_s`: of one timing, where FEWEST rounds fit into the
    budget."""

    device: torch.device
    quick: bool
    least_s: float = SHORT_S

    def curves(self, plans: Mapping[str, Plan], budget_s: float) -> dict[str, Curve]:
        """Measure a family in about `budget_s`, preparation aside."""
        runs = []
        for plan in plans.values():
            for sizes in plan.points:
                runs.append(plan.prepare(*sizes))
        samples = iter(self.seconds(runs, budget_s))

        curves = {}
        for name, plan in plans.items():
            curves[name] = curve_of(plan.axes, [next(samples) for _ in plan.points])
        return curves

    def seconds(self, runs: Sequence[Run], budget_s: float) -> list[list[float]]:
        """For each operation its seconds in every round."""
        # 1. Warm each up. An operation that takes long needs no second time for that.
        least_s = max(SHORT_S, min(self.least_s, budget_s / (FEWEST * len(runs))))
        repeats = []
        warm_s = []
        begin_s = time.perf_counter()
        for run in runs:
            run_s = self._time(run, 1)
            if run_s < WARM_S:
                run_s = self._time(run, 1)
            warm_s.append(run_s)
            repeats.append(max(1, math.ceil(least_s / max(1e-9, run_s))))
        if time.perf_counter() - begin_s > max(budget_s, LATEST_S):
            return [[run_s] for run_s in warm_s]

        # 2. Rounds, as many as the budget has time for.
        samples: list[list[float]] = [[] for _ in runs]
        begin_s = time.perf_counter()
        for round_number in range(MOST):
            if round_number > 0:
                # One more round takes as long as those before.
                expected_s = (time.perf_counter() - begin_s) * (round_number + 1) / round_number
                if expected_s >= (budget_s if round_number >= FEWEST else max(budget_s, LATEST_S)):
                    break
            for run, count, run_samples in zip(runs, repeats, samples):
                run_samples.append(self._time(run, count))
        return samples

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _time(self, run: Run, count: int) -> float:
        self.wait()
        begin_s = time.perf_counter()
        reported_s = []
        for _ in range(count):
            if isinstance(seconds := run(), float):
                reported_s.append(seconds)
        self.wait()
        if reported_s:
            return statistics.median(reported_s)
        return (time.perf_counter() - begin_s) / count


def curve_of(axes: tuple[SampledSizes, ...], samples: Sequence[Sequence[float]]) -> Curve:
    """Medians of each point's samples, in the order of `Curve.points`."""
    shape = tuple(len(axis.sizes) for axis in axes)
    medians = np.array([statistics.median(rounds) for rounds in samples])
    quartiles = np.array([np.percentile(rounds, (25, 75)) for rounds in samples])
    spread = (quartiles[:, 1] - quartiles[:, 0]) / medians
    seconds = monotone(medians.reshape(shape)).ravel()
    return Curve(axes, tuple(map(float, seconds)), tuple(map(float, spread)))
