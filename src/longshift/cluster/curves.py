"""Seconds that an operation takes, as a function of its sizes, known at some points.

A curve lives on a grid: one ascending list of sizes an axis, seconds at every crossing. Between the
points seconds are multilinear in the logarithms, so that a curve is positive everywhere, exact at
its points, and grows along an axis wherever its points do; and its points must, since more work is
never faster (`monotone` makes noisy medians so).

Beyond the points nothing was measured. A caller who wants an answer there says `beyond=True` and
gets this: below the smallest size, its seconds (a floor); above the largest, growth with the work,
at the rate of the last point.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import exp, inf, log

import numpy as np

from longshift.errors import UsageError

# What a curve is computed with, of numbers and of arrays: numpy takes ten times as long for a
# number.
NUMBERS = bisect_right, log, exp, min, max
ARRAYS = partial(np.searchsorted, side="right"), np.log, np.exp, np.minimum, np.maximum


@dataclass(frozen=True)
class SampledSizes:
    """Sizes at which seconds are known, ascending; work grows with their `power`."""

    name: str
    sizes: tuple[float, ...]
    power: float = 1.0

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes, dtype=float)
        is_valid = sizes.size and np.all(np.isfinite(sizes)) and sizes[0] > 0
        if not is_valid or np.any(np.diff(sizes) <= 0):
            raise UsageError(
                f"axis {self.name}: sizes {list(self.sizes)} must be positive and ascending"
            )
        if not (np.isfinite(self.power) and self.power >= 0):
            raise UsageError(f"axis {self.name}: work cannot grow with the power {self.power}")


@dataclass(frozen=True)
class Curve:
    """`seconds` at every crossing of the axes, the last axis fastest. `spread`: at each, the middle
    half of the measurements over their median, zeros where nothing was measured. Raises UsageError
    for values that no clock could have shown."""

    axes: tuple[SampledSizes, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = int(np.prod(self._shape))
        for name, values in (("seconds", self.seconds), ("spread", self.spread or (0.0,) * count)):
            if len(values) != count:
                raise UsageError(
                    f"a curve over {self._names} has {count} points, but {len(values)} {name}"
                )
            if not np.all(np.isfinite(values)) or min(values) < 0:
                raise UsageError(
                    f"a curve over {self._names}: {name} must be finite and not negative"
                )
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
        """Seconds at these sizes, one argument an axis, numbers or arrays that broadcast. Raises
        UsageError outside the measured range unless `beyond`."""
        if len(sizes) != len(self.axes):
            raise UsageError(f"a curve over {self._names} was asked for {len(sizes)} sizes")
        numbers = all(isinstance(size, float | int) for size in sizes)
        if not numbers:
            sizes = tuple(np.asarray(size, dtype=float) for size in sizes)
        for axis, size in zip(self.axes, sizes):
            self._check(axis, size, beyond)
        find, log, exp, minimum, maximum = NUMBERS if numbers else ARRAYS
        log_axes, log_seconds = self._numbers if numbers else self._arrays

        # A corner of the cell that holds the point: its place among `seconds`, and its weight.
        corners = [(0, 1.0)]
        growth = 0.0
        for axis, log_sizes, size in zip(self.axes, log_axes, sizes):
            point = log(size)
            count = len(axis.sizes)
            growth = growth + axis.power * maximum(0.0, point - log_sizes[-1])
            corners = [(place * count, weight) for place, weight in corners]
            if count == 1:
                continue
            point = minimum(maximum(point, log_sizes[0]), log_sizes[-1])
            low = minimum(find(log_sizes, point) - 1, count - 2)
            share = (point - log_sizes[low]) / (log_sizes[low + 1] - log_sizes[low])
            cell_corners = []
            for place, weight in corners:
                cell_corners.append((place + low, weight * (1.0 - share)))
                cell_corners.append((place + low + 1, weight * share))
            corners = cell_corners
        total = sum((weight * log_seconds[place] for place, weight in corners), growth)
        return np.asarray(exp(total))

    def _check(self, axis: SampledSizes, size: float | np.ndarray, beyond: bool) -> None:
        low = size if isinstance(size, float | int) else size.min(initial=inf)
        high = size if isinstance(size, float | int) else size.max(initial=-inf)
        if not low > 0:
            raise UsageError(f"{axis.name} = {_span(low, high)}: a size is positive")
        if not beyond and (low < axis.sizes[0] or high > axis.sizes[-1]):
            raise UsageError(
                f"{axis.name} = {_span(low, high)} was not measured, only"
                f" {_number(axis.sizes[0])} to {_number(axis.sizes[-1])}; beyond=True guesses"
            )

    @cached_property
    def _arrays(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Logarithms of each axis' sizes, and of the seconds in their order."""
        return [np.log(axis.sizes) for axis in self.axes], np.log(self.seconds)

    @cached_property
    def _numbers(self) -> tuple[list[list[float]], list[float]]:
        """As `_arrays`, in Python's numbers."""
        log_axes, log_seconds = self._arrays
        return [log_sizes.tolist() for log_sizes in log_axes], log_seconds.tolist()

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(len(axis.sizes) for axis in self.axes)

    @property
    def _names(self) -> str:
        return ", ".join(axis.name for axis in self.axes)


def monotone(seconds: np.ndarray) -> np.ndarray:
    """The grid itself where it grows along every dim already.

    Elsewhere the middle, in logarithms, between the least growing grid above it and the greatest
    below it.
    """
    upper = np.array(seconds, dtype=float)
    lower = np.array(seconds, dtype=float)
    for dim in range(upper.ndim):
        upper = np.maximum.accumulate(upper, axis=dim)
        lower = np.flip(np.minimum.accumulate(np.flip(lower, dim), axis=dim), dim)
    return np.where(upper == lower, upper, np.sqrt(upper) * np.sqrt(lower))


def _span(low: float, high: float) -> str:
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return np.format_float_positional(value, trim="-")
