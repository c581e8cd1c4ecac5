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


@dataclass(frozen=True)
class Bench:
    """Where and how thoroughly. `least_s`: of one timing, where FEWEST rounds fit into the budget.
    `world`: ranks that run every operation together, begun at one time; it takes as long as on the
    slowest."""

    device: torch.device
    quick: bool
    least_s: float = SHORT_S
    world: World | None = None

    def curves(self, plans: Mapping[str, Plan], budget_s: float) -> dict[str, Curve]:
        """Measure a family in about `budget_s`, preparation aside."""
        runs = []
        for plan in plans.values():
            for sizes in crossings(plan.axes):
                runs.append(plan.prepare(*sizes))
        samples = iter(self.seconds(runs, budget_s))

        curves = {}
        for name, plan in plans.items():
            curves[name] = curve_of(plan.axes, [next(samples) for _ in crossings(plan.axes)])
        return curves

    def seconds(self, runs: Sequence[Run], budget_s: float) -> list[list[float]]:
        """For each operation its seconds in every round."""
        # 1. Warm each up, and see how long it takes.
        warm_s = []
        begin_s = time.perf_counter()
        for run in runs:
            self.time(run, 1)
            warm_s.append(self.time(run, 1))
        *warm_s, warming_s = self.slowest([*warm_s, time.perf_counter() - begin_s])
        if warming_s > max(budget_s, LATEST_S):
            return [[run_s] for run_s in warm_s]

        # 2. How often each is repeated inside one timing, and how long a round takes then. Where
        #    ranks wait for one another, warming took longer than the sum of its seconds.
        least_s = max(SHORT_S, min(self.least_s, budget_s / (FEWEST * len(runs))))
        repeats = [max(1, math.ceil(least_s / max(1e-9, run_s))) for run_s in warm_s]
        round_s = warming_s / 2 + sum(run_s * (count - 1) for run_s, count in zip(warm_s, repeats))

        # 3. Rounds, as many as the budget has time for.
        round_s = max(1e-9, round_s)
        rounds = max(budget_s / round_s, min(FEWEST, LATEST_S / round_s))
        samples = [
            self.slowest([self.time(run, count) for run, count in zip(runs, repeats)])
            for _ in range(max(1, int(min(MOST, rounds))))
        ]
        return list(map(list, zip(*samples)))

    def time(self, run: Run, count: int) -> float:
        """Seconds of one of so many in a row, or the median of those that it reports itself."""
        if self.world is not None:
            self.world.everyone.all_reduce(torch.zeros(1, device=self.device))
        self._wait()
        begin_s = time.perf_counter()
        reported_s = []
        for _ in range(count):
            if isinstance(seconds := run(), float):
                reported_s.append(seconds)
        self._wait()
        if reported_s:
            return statistics.median(reported_s)
        return (time.perf_counter() - begin_s) / count

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
