"""Seconds that an operation takes, as a function of its sizes, known at some points.

A curve lives on a grid: one ascending list of sizes an axis, seconds at every crossing. Between the points seconds are multilinear in
the logarithms, so that a curve is positive everywhere, exact at its points, and grows along an axis wherever its points do; and its
points must, since more work is never faster (`monotone` makes noisy medians so).

Beyond the points nothing was measured. A caller who wants an answer there says `beyond=True` and gets this: below the smallest size,
its seconds (a floor); above the largest, growth with the work, at the rate of the last point.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import exp, inf, log

import numpy as np

from longshift.errors import UsageError

# What a curve is computed with, of numbers and of arrays: numpy takes ten times as long for a number.
NUMBERS = bisect_right, log, exp, min, max
ARRAYS = partial(np.searchsorted, side="right"), np.log, np.exp, np.minimum, np.maximum


@dataclass(frozen=True)
class Axis:
    """Sizes at which seconds are known, ascending; work grows with their `power`."""

    name: str
    sizes: tuple[float, ...]
    power: float = 1.0

    def __post_init__(self) -> None:
        known = np.asarray(self.sizes, dtype=float)
        if not known.size or not np.all(np.isfinite(known)) or known[0] <= 0 or np.any(np.diff(known) <= 0):
            raise UsageError(f"axis {self.name}: sizes {list(self.sizes)} must be positive and ascending")
        if not (np.isfinite(self.power) and self.power >= 0):
            raise UsageError(f"axis {self.name}: work cannot grow with the power {self.power}")


@dataclass(frozen=True)
class Curve:
    """`seconds` at every crossing of the axes, the last axis fastest. `spread`: at each, the middle half of the measurements over their
    median, zeros where nothing was measured. Raises UsageError for values that no clock could have shown."""

    axes: tuple[Axis, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = int(np.prod(self._shape))
        for name, values in (("seconds", self.seconds), ("spread", self.spread or (0.0,) * count)):
            if len(values) != count:
                raise UsageError(f"a curve over {self._names} has {count} points, but {len(values)} {name}")
            if not np.all(np.isfinite(values)) or min(values) < 0:
                raise UsageError(f"a curve over {self._names}: {name} must be finite and not negative")
        if min(self.seconds) <= 0:
            raise UsageError(f"a curve over {self._names}: no operation takes 0 seconds")
        grid = self.grid
        if any(np.any(np.diff(grid, axis=dim) < 0) for dim in range(grid.ndim)):
            raise UsageError(f"a curve over {self._names}: seconds fall as a size grows")

    @property
    def grid(self) -> np.ndarray:
        """Seconds, one dim an axis."""
        return np.asarray(self.seconds, dtype=float).reshape(self._shape)

    @property
    def points(self) -> list[tuple[float, ...]]:
        """Sizes of every crossing, in the order of `seconds`."""
        return list(product(*(axis.sizes for axis in self.axes)))

    def __call__(self, *sizes: float | np.ndarray, beyond: bool = False) -> np.ndarray:
        """Seconds at these sizes, one argument an axis, numbers or arrays that broadcast. Raises UsageError outside the measured range
        unless `beyond`."""
        if len(sizes) != len(self.axes):
            raise UsageError(f"a curve over {self._names} was asked for {len(sizes)} sizes")
        numbers = all(isinstance(size, float | int) for size in sizes)
        if not numbers:
            sizes = tuple(np.asarray(size, dtype=float) for size in sizes)
        for axis, size in zip(self.axes, sizes):
            self._check(axis, size, beyond)
        find, log, exp, least, most = NUMBERS if numbers else ARRAYS
        knowns, logs = self._numbers if numbers else self._arrays
        corners, growth = [(0, 1.0)], 0.0
        for axis, known, size in zip(self.axes, knowns, sizes):
            at, count = log(size), len(axis.sizes)
            growth = growth + axis.power * most(0.0, at - known[-1])
            corners = [(first * count, weight) for first, weight in corners]
            if count > 1:
                at = least(most(at, known[0]), known[-1])
                left = least(find(known, at) - 1, count - 2)
                share = (at - known[left]) / (known[left + 1] - known[left])
                corners = [(first + left + side, w * own) for first, w in corners for side, own in ((0, 1.0 - share), (1, share))]
        return np.asarray(exp(sum((weight * logs[corner] for corner, weight in corners), growth)))

    def _check(self, axis: Axis, size: float | np.ndarray, beyond: bool) -> None:
        low, high = (size, size) if isinstance(size, float | int) else (size.min(initial=inf), size.max(initial=-inf))
        if not low > 0:
            raise UsageError(f"{axis.name} = {_span(low, high)}: a size is positive")
        if not beyond and (low < axis.sizes[0] or high > axis.sizes[-1]):
            raise UsageError(
                f"{axis.name} = {_span(low, high)} was not measured, only {_number(axis.sizes[0])} to {_number(axis.sizes[-1])}; "
                "beyond=True guesses"
            )

    @cached_property
    def _arrays(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Logarithms of each axis' sizes, and of the seconds in their order."""
        return [np.log(axis.sizes) for axis in self.axes], np.log(self.seconds)

    @cached_property
    def _numbers(self) -> tuple[list[list[float]], list[float]]:
        """As `_arrays`, in Python's numbers."""
        known, logs = self._arrays
        return [one.tolist() for one in known], logs.tolist()

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(len(axis.sizes) for axis in self.axes)

    @property
    def _names(self) -> str:
        return ", ".join(axis.name for axis in self.axes)


def monotone(seconds: np.ndarray) -> np.ndarray:
    """The given grid where it grows along every dim already; elsewhere the middle (in logarithms) between the least growing grid above
    it and the greatest below it."""
    above, below = np.array(seconds, dtype=float), np.array(seconds, dtype=float)
    for dim in range(above.ndim):
        above = np.maximum.accumulate(above, axis=dim)
        below = np.flip(np.minimum.accumulate(np.flip(below, dim), axis=dim), dim)
    return np.where(above == below, above, np.sqrt(above) * np.sqrt(below))


def _span(low: float, high: float) -> str:
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return np.format_float_positional(value, trim="-")
