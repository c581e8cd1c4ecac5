"""Seconds that an operation takes, as a function of its sizes, known at some points.

A curve lives on a grid: one ascending list of sizes an axis, seconds at every crossing. Between the points seconds are multilinear in
the logarithms, so that a curve is positive everywhere, exact at its points, and grows along an axis wherever its points do; and its
points must, since more work is never faster (`monotone` makes noisy medians so).

Beyond the points nothing was measured. A caller who wants an answer there says `beyond=True` and gets this: below the smallest size,
its seconds (a floor); above the largest, growth with the work, at the rate of the last point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from longshift.errors import UsageError


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
        asked = self._sizes(sizes)
        if not beyond:
            for axis, size in zip(self.axes, asked):
                if np.any(size < axis.sizes[0]) or np.any(size > axis.sizes[-1]):
                    low, high = (np.format_float_positional(end, trim="-") for end in (axis.sizes[0], axis.sizes[-1]))
                    raise UsageError(f"{axis.name} = {_span(size)} was not measured, only {low} to {high}; beyond=True guesses")
        corners, weights, growth = [], [], np.asarray(0.0)
        for axis, size in zip(self.axes, asked):
            known = np.log(axis.sizes)
            at = np.clip(np.log(size), known[0], known[-1])
            left = np.clip(np.searchsorted(known, at, side="right") - 1, 0, max(0, len(known) - 2))
            right = np.minimum(left + 1, len(known) - 1)
            gap = np.where(right > left, known[right] - known[left], 1.0)
            weight = (at - known[left]) / gap
            corners.append((left, right))
            weights.append((1.0 - weight, weight))
            growth = growth + axis.power * np.maximum(0.0, np.log(size) - known[-1])
        total = np.asarray(0.0)
        for choice in product((0, 1), repeat=len(self.axes)):
            weight = np.asarray(1.0)
            for dim, side in enumerate(choice):
                weight = weight * weights[dim][side]
            total = total + weight * self._logs[tuple(corners[dim][side] for dim, side in enumerate(choice))]
        return np.exp(total + growth)

    @cached_property
    def _logs(self) -> np.ndarray:
        return np.log(self.grid)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(len(axis.sizes) for axis in self.axes)

    @property
    def _names(self) -> str:
        return ", ".join(axis.name for axis in self.axes)

    def _sizes(self, sizes: Sequence[float | np.ndarray]) -> list[np.ndarray]:
        if len(sizes) != len(self.axes):
            raise UsageError(f"a curve over {self._names} was asked for {len(sizes)} sizes")
        asked = [np.asarray(size, dtype=float) for size in sizes]
        for axis, size in zip(self.axes, asked):
            if not np.all(size > 0):
                raise UsageError(f"{axis.name} = {_span(size)}: a size is positive")
        return asked


def monotone(seconds: np.ndarray) -> np.ndarray:
    """The given grid where it grows along every dim already; elsewhere the middle (in logarithms) between the least growing grid above
    it and the greatest below it."""
    above, below = np.array(seconds, dtype=float), np.array(seconds, dtype=float)
    for dim in range(above.ndim):
        above = np.maximum.accumulate(above, axis=dim)
        below = np.flip(np.minimum.accumulate(np.flip(below, dim), axis=dim), dim)
    return np.where(above == below, above, np.sqrt(above) * np.sqrt(below))


def _span(values: np.ndarray) -> str:
    low, high = (np.format_float_positional(end, trim="-") for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
