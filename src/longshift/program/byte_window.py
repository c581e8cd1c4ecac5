"""How many gathers, or reductions, are under way at one time.

[Note: windows] Gathers that are not yet used, and reductions that are not yet home, may have as
many bytes as those of the largest block. One of each may always be under way, however large. Bytes
are nominal (a unit's elements over `tp`), the same number on every rank, so that all decide alike.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache

from longshift.layout.layout import Layout
from longshift.layout.placement import moving_unit
from longshift.program.turns import RankLayout
from longshift.spec.model import ModelSpec


@lru_cache(maxsize=256)
def _nominal_elements(spec: ModelSpec, layout: Layout, learned: bool) -> Mapping[int, int]:
    """Elements of each moving unit on a rank, all or those that are trained. [Note: windows]"""
    elements = dict.fromkeys(range(spec.units + 1), 0)
    for param in spec.params:
        if not (learned and param.frozen):
            slices = layout.weight_ranks if param.dim is not None else 1
            elements[moving_unit(spec, param)] += -(-param.elements // slices)
    return elements


class ByteWindow(deque[int]):
    """Units whose gathers, or reductions, are under way, oldest first. Mutable. [Note: windows]"""

    def __init__(self, view: RankLayout, itemsize: int, learned: bool):
        """`itemsize`: bytes of an element; `learned`: whether weights that are not trained count
        for nothing, since they have no gradients."""
        super().__init__()
        elements = _nominal_elements(view.spec, view.layout, learned)
        self.size = {unit: elements * itemsize for unit, elements in elements.items()}
        self.capacity = max(self.size[unit] for unit in range(1, view.spec.layers + 1))

    def fits(self, unit: int) -> bool:
        """Whether a unit may be under way beside the others. One always may."""
        return not self or sum(self.size[u] for u in self) + self.size[unit] <= self.capacity

    def make_room(self, unit: int) -> Iterator[int]:
        """Those that must end before this unit begins, oldest first."""
        while not self.fits(unit):
            yield self.popleft()
