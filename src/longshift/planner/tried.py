"""Which of the ways that a run has tried goes on: the one that is the fastest by the clock and by its own steps together.

The steps of a trial are few, each way has documents of its own, and steps of one way differ by as much as ways do. So what a step took is
compared with what the clock has for the same documents. A way whose steps took longer than the clock says, beside those of the other ways,
is expected to do so on typical documents too, but for the part of the difference that chance explains:

    log expected = log typical + shrink x (mean log ratio of its steps - mean of all ways)          ratio: measured over the clock's
    shrink       = CLOCK^2 / (CLOCK^2 + noise^2 / steps)                                             noise: of the steps of one way

This is the mean of what is known of a way where the clock's errors and the steps' are normal (empirical Bayes: Efron and Morris, JASA 70,
1975). A noisy machine is believed less, and steps that say nothing leave the clock's order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLOCK = 0.06  # logarithm: what ways that were tried together differ by beside the clock (81 budgets of benchmarks/plan_choice.py)
NOISE = 0.08  # logarithm: what steps of one way differ by beside the clock, there; for ways with one step each


@dataclass(frozen=True)
class Tried:
    """A way that was tried. `typical_s`: the clock's seconds of a typical step; `measured_s`: of the steps that were trained; `clock_s`:
    the clock's for the documents of each."""

    typical_s: float
    measured_s: tuple[float, ...]
    clock_s: tuple[float, ...]

    @property
    def logs(self) -> list[float]:
        """Logarithms of measured over the clock's seconds; none where the clock was not asked."""
        return [math.log(measured / clock) for measured, clock in zip(self.measured_s, self.clock_s)]


def expected_s(ways: Sequence[Tried]) -> list[float]:
    """Seconds that a typical step of each way is expected to take, on a machine whose mean ratio to the clock is 1."""
    stepped = [way.logs for way in ways if way.logs]
    free = sum(map(len, stepped)) - len(stepped)
    squares = sum((one - _mean(logs)) ** 2 for logs in stepped for one in logs)
    noise = math.sqrt(squares / free) if free else NOISE
    middle = _mean(list(map(_mean, stepped)))
    found = []
    for way in ways:
        shrink = CLOCK**2 / (CLOCK**2 + noise**2 / len(way.logs)) if way.logs else 0.0
        found.append(way.typical_s * math.exp(shrink * (_mean(way.logs) - middle)))
    return found


def going_on(ways: Sequence[Tried]) -> int:
    """The number of the way that goes on: the one with the fewest expected seconds, of equal ones the first."""
    expected = expected_s(ways)
    return expected.index(min(expected))


def _mean(values: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0
