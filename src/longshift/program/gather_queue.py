"""The gathers of a length group's units, posted before the turns that use them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from longshift.program.byte_window import ByteWindow
from longshift.program.disk_home import READ_AHEAD
from longshift.program.operations import Op


@dataclass
class GatherQueue:
    """Gathers in the order of use. Mutable.

    `units`: what is gathered, one entry for each use. `present`: units whose copies can be used;
    the queue adds to it. `gather`: makes the operations of a gather, for a unit and those after it.
    `stays`: how many further uses wait for copies that are there, or under way.
    """

    number: int  # of the visit
    units: Sequence[int]
    present: set[int]
    window: ByteWindow
    gather: Callable[[int, Sequence[int]], Iterator[Op]]
    stays: Counter[int] = field(default_factory=Counter)
    num_posted: int = 0
    num_used: int = 0

    def post(self) -> Iterator[Op]:
        """Post gathers of what comes next, as far as there is room."""
        while self.num_posted < len(self.units) and self.window.fits(self.units[self.num_posted]):
            unit = self.units[self.num_posted]
            if self._is_here(unit):
                self.stays[unit] += 1
            else:
                self.window.append(unit)
                upcoming = self.units[self.num_posted + 1 :][:READ_AHEAD]
                yield from self.gather(unit, [u for u in upcoming if not self._is_here(u)])
            self.num_posted += 1

    def use(self, unit: int) -> Iterator[Op]:
        """Have the copies of the unit that is next in `units`."""
        if self.num_posted <= self.num_used:
            yield from self.post()
        # A unit that is there still stays for its next use, instead of another gather.
        if self.stays[unit] and unit in self.present:
            self.stays[unit] -= 1
        else:
            self.window.remove(unit)
            yield Op("await gather", self.number, unit)
            self.present.add(unit)
        self.num_used += 1

    def _is_here(self, unit: int) -> bool:
        """Whether the unit's copies can be used, or are under way."""
        return unit in self.present or unit in self.window
