"""Reads and writes of a home on disk, as operations around those that use it."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from longshift.program.operations import Op

# How far ahead the disk is read: masters in units, where a forward moves records too; masters and
# moments in turns.
READ_AHEAD = 3


class DiskHome:
    """What of a home on disk is in memory, while a program grows. Mutable. `units`: that lie
    there."""

    def __init__(self, units: Sequence[int]):
        self.units = frozenset(units)
        self.masters = Counter[int]()  # users
        # Units with the part that was asked for: a master until it is used, others until they are
        # written.
        self.asked: set[tuple[int, str]] = set()
        self.sums: set[int] = set()  # units that have gradient sums
        self.writing: deque[Op] = deque()

    def ask(self, unit: int, part: str, number: int = 0) -> Iterator[Op]:
        """Read a part of a unit, unless that has been asked for."""
        if (unit, part) in self.asked or (part == "master" and self.masters[unit]):
            return
        if part == "state" and (unit, "record") in self.asked:
            yield from self.await_writes()
        self.asked.add((unit, part))
        yield Op("read", number, unit, part=part)

    def have(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the master of a unit, until it is left."""
        if not self.masters[unit]:
            yield from self.ask(unit, "master", number)
            self.asked.remove((unit, "master"))
            yield Op("await read", number, unit, part="master")
        self.masters[unit] += 1

    def leave(self, number: int, unit: int) -> Iterator[Op]:
        """End a use of a master, which goes with the last one."""
        self.masters[unit] -= 1
        if not self.masters[unit]:
            yield Op("evict", number, unit, part="master")

    def have_record(self, unit: int, next_unit: int | None) -> Iterator[Op]:
        """Bring the record of a unit, until it is written, and ask for that of `next_unit`."""
        yield from self.ask(unit, "record")
        yield Op("await read", unit=unit, part="record")
        if next_unit is not None:
            yield from self.ask(next_unit, "record")
        self.masters[unit] += 1

    def bring_sums(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the gradient sums of a unit, if there are some."""
        if unit in self.sums:
            if any(op.unit == unit for op in self.writing):
                yield from self.await_writes()
            yield Op("read", number, unit, part="sums")
            yield Op("await read", number, unit, part="sums")
        self.sums.add(unit)

    def have_sums(self, number: int, unit: int) -> Iterator[Op]:
        """Bring the gradient sums of a unit; zeros, if there are none."""
        is_new = unit not in self.sums
        yield from self.bring_sums(number, unit)
        if is_new:
            yield Op("total", number, unit)

    def write(self, number: int, unit: int, part: str) -> Iterator[Op]:
        """Write a part of a unit, when that before it is written."""
        yield from self.await_writes()
        yield from self.write_beside(number, unit, part)

    def write_beside(self, number: int, unit: int, part: str) -> Iterator[Op]:
        """Write a part of a unit while that before it is written."""
        self.writing.append(Op("write", number, unit, part=part))
        yield self.writing[-1]

    def await_writes(self, part: str | None = None, but: int | None = None) -> Iterator[Op]:
        """Await what is written, oldest first: all, or as far as it is of a part. What is of the
        unit `but`, and what follows it, goes on."""
        while self.writing and part in (None, self.writing[0].part) and self.writing[0].unit != but:
            op = self.writing.popleft()
            self.asked.discard((op.unit, op.part))
            if op.part == "record":
                self.masters[op.unit] -= 1
            yield op._replace(kind="await write")
