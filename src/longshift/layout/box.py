"""Box: a half-open hyper-rectangle of a tensor, in the tensor's global coordinates. The algebra of everything that moves."""

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

    def __and__(self, other: "Box") -> "Box":
        """Intersection; falsy where the two share nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        return Box(start, tuple(max(s, min(a, b)) for s, a, b in zip(start, self.stop, other.stop)))

    def __contains__(self, other: "Box") -> bool:
        return all(a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop))

    def cut(self, dim: int, start: int, stop: int) -> "Box":
        """The part of this box with `start <= x[dim] < stop` (global coordinates)."""
        return Box((*self.start[:dim], start, *self.start[dim + 1 :]), (*self.stop[:dim], stop, *self.stop[dim + 1 :]))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that pick this box out of a tensor that holds `outer`."""
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
