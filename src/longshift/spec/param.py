"""A weight of a model: its shape, its place, and how tensor parallelism cuts it."""

from dataclasses import dataclass
from math import prod
from typing import Literal


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range of the `index`-th of `parts` contiguous, nearly equal shares of `total`; the
    first ones are the larger."""
    size, extra = divmod(total, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


@dataclass(frozen=True)
class Part:
    """A run of the cut dim made of `units` indivisible pieces of `size` rows: heads, feed-forward
    columns, vocabulary rows.

    `heads`: the units are key/value heads that serve this many query heads; a coordinate then gets
    those that its query heads need, so that neighbours may hold the same one (grouped queries,
    K < tp).
    """

    units: int
    size: int = 1
    heads: int | None = None

    def rows(self, parts: int, index: int) -> tuple[int, int]:
        """Half-open range of rows, from the part's start, of coordinate `index` of `parts`."""
        # Queries are shared out, and the keys follow them.
        first, last = share(self.heads or self.units, parts, index)
        group = self.heads // self.units if self.heads else 1
        return first // group * self.size, -(-last // group) * self.size


@dataclass(frozen=True)
class Param:
    """One weight. `dim` None: tensor-parallel ranks hold all of it. Else `parts` tile dim `dim` and
    each is cut on its own, so that the query, key and value thirds of a fused matrix are never
    sliced together."""

    name: str
    role: str
    shape: tuple[int, ...]
    unit: int
    dim: int | None = None
    parts: tuple[Part, ...] = ()
    decay: bool = True
    init: Literal["normal", "normal_out", "fan_in", "zeros", "ones"] = "normal"
    also_unit: int | None = None  # tied embeddings: the head uses it too
    experts: int = 0  # whose matrices are its rows, one after another; a folder has one for each
    frozen: bool = False  # not trained: it has no gradient and no moments

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Its names in a folder: of a matrix of all experts one for each."""
        if not self.experts:
            return (self.name,)
        return tuple(
            self.name.replace(".experts.", f".experts.{expert}.") for expert in range(self.experts)
        )
