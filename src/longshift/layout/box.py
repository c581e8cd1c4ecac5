"""Box: a half-open hyper-rectangle of a tensor, in the tensor's global coordinates. The algebra of
everything that moves."""

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True, order=True)
class Box:
    """`start[i] <= x[i] < stop[i]`. A box with an empty dim holds nothing and is falsy."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @cached_property
    def elements(self) -> int:
        return prod(max(size, 0) for size in self.shape)

    def __bool__(self) -> bool:
        return self.elements > 0

    def __and__(self, box: "Box") -> "Box":
        """Intersection; falsy where the two share nothing."""
        start = tuple(map(max, self.start, box.start))
        stop = map(min, self.stop, box.stop)
        return Box(start, tuple(map(max, start, stop)))  # an empty dim has no negative size

    def __contains__(self, box: "Box") -> bool:
        starts_inside = all(a <= b for a, b in zip(self.start, box.start))
        return starts_inside and all(b <= a for a, b in zip(self.stop, box.stop))

    def cut(self, dim: int, start: int, stop: int) -> "Box":
        """The part of this box with `start <= x[dim] < stop` (global coordinates)."""
        starts = (*self.start[:dim], start, *self.start[dim + 1 :])
        stops = (*self.stop[:dim], stop, *self.stop[dim + 1 :])
        return Box(starts, stops)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that pick this box out of a tensor that holds `outer`. Raises ValueError if it is
        not inside."""
        if self not in outer:
            raise ValueError(f"{self} is not inside {outer}")
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop)) + "]"

    @classmethod
    def parse(cls, text: str) -> "Box":
        """Inverse of `str`. Raises ValueError."""
        pairs = [part.split(":") for part in text.strip("[]").split(",")]
        return cls(tuple(int(a) for a, _ in pairs), tuple(int(b) for _, b in pairs))
