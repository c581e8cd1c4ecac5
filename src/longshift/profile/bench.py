"""Times operations: warm, interleaved, as medians.

All points of a family are visited in turn, round after round, so that a machine that slows down for
a while slows all of them, and the median over the rounds leaves it out.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import ReduceOp

from longshift.cluster.curves import Curve, SampledSizes, crossings, monotone
from longshift.dist.world import World

FEWEST = 3  # rounds
MOST = 15  # rounds
# A family that would take longer has fewer rounds than FEWEST, or none after its warm-up: others
# run on the cores.
LATEST_S = 10.0
# An operation that takes this many seconds is warm after its first run: what is made once takes
# less.
WARM_S = 0.5
LOOK_EVERY = 16  # operations, after which the clock is looked at
SHORT_S = 2e-3  # operations that are shorter are repeated inside one timing
# The same where cores are shared or capped: several periods of the kernel's scheduler, to see what
# is sustained.
LONG_S = 0.05

Run = Callable[[], object]
"""One operation. A float that it returns is the seconds that it took: it times itself, as one must
that waits for something else first."""


@dataclass(frozen=True)
class CurveSpec:
    """A curve to measure. `prepare(*sizes)` makes what one point needs and gives the operation to
    time."""

    axes: tuple[SampledSizes, ...]
    prepare: Callable[..., Run]


@dataclass(frozen=True)
class Bench:
    """Where and how thoroughly. `least_s`: of one timing, where FEWEST rounds fit into the budget.
    `world`: ranks that run every operation together, begun at one time; it takes as long as on the
    slowest."""

    device: torch.device
    quick: bool
    least_s: float = SHORT_S
    world: World | None = None

    def curves(self, specs: Mapping[str, CurveSpec], budget_s: float) -> dict[str, Curve]:
        """Measure a family in about `budget_s`, preparation aside."""
        # All points are one list, so that rounds visit those of all curves in turn.
        runs = []
        for spec in specs.values():
            for sizes in crossings(spec.axes):
                runs.append(spec.prepare(*sizes))
        samples = iter(self.seconds(runs, budget_s))

        curves = {}
        for name, spec in specs.items():
            spec_samples = [next(samples) for _ in crossings(spec.axes)]
            curves[name] = curve_of(spec.axes, spec_samples)

        return curves

    def seconds(self, runs: Sequence[Run], budget_s: float) -> list[list[float]]:
        """For each operation its seconds in every round."""
        # 1. Warm each up, and see how long it takes. One that takes long is warm after its first
        #    time, and all are where there is no time for more. Ranks decide alike.
        warm_s = []
        begin_s = time.perf_counter()
        for run in runs:
            run_s, warming_s = self.slowest([self.time(run), time.perf_counter() - begin_s])
            if run_s < WARM_S and warming_s < LATEST_S:
                [run_s] = self.slowest([self.time(run)])
            warm_s.append(run_s)
        [warming_s] = self.slowest([time.perf_counter() - begin_s])
        if warming_s > max(budget_s, LATEST_S):
            return [[run_s] for run_s in warm_s]

        # 2. How often each is repeated inside one timing.
        least_s = max(SHORT_S, min(self.least_s, budget_s / (FEWEST * len(runs))))
        repeats = [max(1, math.ceil(least_s / max(1e-9, run_s))) for run_s in warm_s]
        most_s = max(least_s, LATEST_S / len(runs))

        # 3. Rounds, as many as the budget has time for.
        samples = []
        begin_s = time.perf_counter()
        while len(samples) < MOST:
            round_s = [self.time(run, count, most_s) for run, count in zip(runs, repeats)]
            *round_s, elapsed_s = self.slowest([*round_s, time.perf_counter() - begin_s])
            samples.append(round_s)
            # One more round takes as long as those before.
            expected_s = elapsed_s * (len(samples) + 1) / len(samples)
            if expected_s >= (budget_s if len(samples) >= FEWEST else max(budget_s, LATEST_S)):
                break
        return list(map(list, zip(*samples)))

    def time(self, run: Run, count: int = 1, most_s: float = math.inf) -> float:
        """Seconds of one of so many in a row, or the median of those that it reports itself.

        Alone, a process ends a row after `most_s`: warm operations may take a hundred times as long
        once others run. Ranks run equally many.
        """
        if self.world is not None:
            self.world.everyone.all_reduce(torch.zeros(1, device=self.device))
            most_s = math.inf
        self._wait()
        begin_s = time.perf_counter()
        reported_s = []
        number = 0
        while number < count:
            if isinstance(seconds := run(), float):
                reported_s.append(seconds)
            number += 1
            if not number % LOOK_EVERY and time.perf_counter() - begin_s > most_s:
                break
        self._wait()
        if reported_s:
            return statistics.median(reported_s)
        return (time.perf_counter() - begin_s) / number

    def slowest(self, seconds: list[float]) -> list[float]:
        """The seconds of the slowest rank, at every place."""
        if self.world is None:
            return seconds
        tensor = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        return self.world.everyone.all_reduce(tensor, ReduceOp.MAX).tolist()

    def _wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def curve_of(axes: tuple[SampledSizes, ...], samples: Sequence[Sequence[float]]) -> Curve:
    """Medians of each point's samples, in the order of `Curve.points`."""
    shape = tuple(len(axis.sizes) for axis in axes)
    medians = np.array([statistics.median(rounds) for rounds in samples])
    quartiles = np.array([np.percentile(rounds, (25, 75)) for rounds in samples])
    spread = (quartiles[:, 1] - quartiles[:, 0]) / medians
    seconds = monotone(medians.reshape(shape)).ravel()
    return Curve(axes, tuple(map(float, seconds)), tuple(map(float, spread)))
