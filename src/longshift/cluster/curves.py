"""Seconds that an operation takes, as a function of its sizes, known at some points.

A curve lives on a grid: one ascending list of sizes an axis, seconds at every crossing. Between the
points seconds are multilinear in the logarithms, so that a curve is positive everywhere, exact at
its points, and grows along an axis wherever its points do; and its points must, since more work is
never faster (`monotone` makes noisy medians so).

Beyond the points nothing was measured. Below the smallest size a curve gives its seconds, a floor;
above the largest, growth with the work, at the rate of the last point.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

import numpy as np

from longshift.errors import UsageError


@dataclass(frozen=True)
class SampledSizes:
    """Sizes at which seconds are known, ascending; work grows with their `power`."""

    name: str
    sizes: tuple[int | float, ...]  # as they were written
    power: float = 1.0

    def __post_init__(self) -> None:
        # Sizes that ascend from 0 are positive too.
        sizes = np.asarray([0.0, *self.sizes])
        if len(sizes) < 2 or not np.all(np.isfinite(sizes)) or np.any(np.diff(sizes) <= 0):
            raise UsageError(
                f"axis {self.name}: sizes {list(self.sizes)} must be positive and ascending"
            )

        if not 0 <= self.power < inf:
            raise UsageError(f"axis {self.name}: work cannot grow with the power {self.power}")


@dataclass(frozen=True)
class Curve:
    """`seconds` at every crossing of the axes, the last axis fastest. `spread`: at each, the middle
    half of the measurements over their median; empty where nothing was measured. Raises UsageError
    for seconds that no clock could have shown."""

    axes: tuple[SampledSizes, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        grid = self.grid
        if not np.all(np.isfinite(grid)) or np.any(grid <= 0):
            raise UsageError(f"a curve over {self._names}: seconds must be finite and positive")
        if any(np.any(np.diff(grid, axis=dim) < 0) for dim in range(grid.ndim)):
            raise UsageError(f"a curve over {self._names}: seconds fall as a size grows")

    @property
    def grid(self) -> np.ndarray:
        """Seconds, one dim an axis. Raises UsageError for more or fewer than there are points."""
        shape = tuple(len(axis.sizes) for axis in self.axes)
        seconds = np.asarray(self.seconds, dtype=float)
        count = np.prod(shape)

        if seconds.size != count:
            raise UsageError(
                f"a curve over {self._names} has {count} points, but {seconds.size} seconds"
            )
        return seconds.reshape(shape)

    @property
    def points(self) -> list[tuple[float, ...]]:
        """Sizes of every crossing, in the order of `seconds`."""
        return crossings(self.axes)

    def slower(self, times: float) -> "Curve":
        """The curve of operations that take so many times as long."""
        return replace(self, seconds=tuple(times * seconds for seconds in self.seconds))

    def __call__(self, *sizes: float | np.ndarray) -> np.ndarray:
        """Seconds at these sizes, one argument an axis, numbers or arrays that broadcast."""
        log_axes, log_seconds = self._logarithms
        # A corner of the cell that holds the point: its place among `seconds`, and its weight.
        corners: list[tuple[Any, Any]] = [(0, 1.0)]
        growth = 0.0
        for axis, log_sizes, size in zip(self.axes, log_axes, sizes, strict=True):
            point = np.log(np.maximum(size, axis.sizes[0]))
            count = len(axis.sizes)
            growth = growth + axis.power * np.maximum(0.0, point - log_sizes[-1])
            corners = [(place * count, weight) for place, weight in corners]
            if count == 1:
                continue
            point = np.minimum(point, log_sizes[-1])
            low = np.minimum(np.searchsorted(log_sizes, point, side="right") - 1, count - 2)
            share = (point - log_sizes[low]) / (log_sizes[low + 1] - log_sizes[low])
            cell_corners = []
            for place, weight in corners:
                cell_corners.append((place + low, weight * (1.0 - share)))
                cell_corners.append((place + low + 1, weight * share))
            corners = cell_corners
        total = sum((weight * log_seconds[place] for place, weight in corners), growth)
        return np.asarray(np.exp(total))

    @cached_property
    def _logarithms(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Logarithms of each axis' sizes, and of the seconds in their order."""
        return [np.log(axis.sizes) for axis in self.axes], np.log(self.seconds)

    @property
    def _names(self) -> str:
        return ", ".join(axis.name for axis in self.axes)


def crossings(axes: tuple[SampledSizes, ...]) -> list[tuple[float, ...]]:
    """Sizes of every crossing of the axes, the last axis fastest."""
    return list(product(*(axis.sizes for axis in axes)))


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
