"""Bytes by name and place, now and at the most."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from longshift.layout.layout import Tier
from longshift.program.operations import START, Op
from longshift.program.step import Steps
from longshift.spec.formats import adds_inside
from longshift.weigh.recorder import Transport

Place = Tier


@dataclass(frozen=True)
class Peak:
    """The most bytes in a place: after which operation of the step, and what was alive, by name, largest first."""

    total: int
    op: str
    alive: tuple[tuple[str, int], ...]


class Held:
    """A tensor that is bytes of a book alone, until nobody refers to it. `shape`: alike for tensors of a size that may take over each
    other's memory."""

    __slots__ = ("book", "name", "nbytes", "place", "shape")

    def __init__(self, book: "Book", name: str, size: int, place: Place = "device", shape: Hashable = ()):
        self.book, self.name, self.nbytes, self.place, self.shape = book, name, size, place, shape
        book.change(name, size, place)

    def __del__(self) -> None:
        self.book.change(self.name, -self.nbytes, self.place)

    def contiguous(self) -> "Held":
        return self


Moment = tuple[int, tuple]  # an operation of the step by number, and where in it
ALL: Moment = -1, ()  # all that is played, where no moments are told apart


class Mark(NamedTuple):
    """The most bytes in a place at one moment: during which operation, and what was there by name; `inside`: what the operation needed
    beyond that."""

    total: int
    op: Op
    by_name: Mapping[str, int]
    inside: int

    @property
    def alive(self) -> dict[str, int]:
        """Bytes by name, what the operation needed among them."""
        found = {name: size for name, size in self.by_name.items() if size}
        return found | {"gone when it ends": self.inside} if self.inside > 0 else found

    def peak(self, name: Callable[[Op], str]) -> Peak:
        """`name`: of an operation."""
        return peak_of(self.total, name(self.op), self.alive)


def peak_of(total: int, op: str, alive: Mapping[str, int]) -> Peak:
    return Peak(total, op, tuple(sorted(alive.items(), key=lambda row: -row[1])))


class Book:
    """Bytes by name, now and at the most of each place. Mutable.

    `most`: of each place, ever, or since the last settling where moments are told apart; `grew`: whether one of `most` did since the last
    settling; `marks`: of each place, by moment."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: dict[str, int] = {}
        self.grew = False
        self.by_name: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.has_moments = False
        self.marks: dict[Moment, dict[str, Mark]] = {}
        self.number, self.op = 0, START

    def watch(self) -> dict[Moment, dict[str, Mark]]:
        """Tell moments apart. Their marks are written down from now on."""
        self.most, self.marks, self.has_moments = {}, {}, True
        return self.marks

    def change(self, name: str, size: int, place: str) -> None:
        self.by_name[place][name] += size
        now = self.now[place] = self.now[place] + size
        if size > 0 and now > self.most.get(place, 0):
            self.most[place], self.grew = now, True

    def inside(self, size: int, place: Place = "device") -> None:
        """An operation needs so many bytes in a place, beyond what is there."""
        if (most := self.now[place] + size) > self.most.get(place, 0):
            self.most[place], self.grew = most, True

    def begin(self, number: int, op: Op) -> None:
        """What follows is this operation's of a step."""
        self.number, self.op = number, op

    def settle(self, moment: tuple = ()) -> None:
        """Write down the peaks that the operation, or this moment of it, has raised."""
        if not self.grew:
            return
        marks = self.marks.setdefault((self.number, moment) if self.has_moments else ALL, {})
        for place, most in self.most.items():
            if place not in marks or most > marks[place].total:
                marks[place] = Mark(most, self.op, dict(self.by_name[place]), most - self.now[place])
        if self.has_moments:
            self.most = {}
        self.grew = False


class Account:
    """How a rank computes and moves, and what it holds and sends. Mutable.

    `transport`: how collectives move, which decides what they need besides their results; `same_format`: weights are computed with in
    home's format; `host_is_device`: a CPU, whose host tier moves nothing; `ahead`: of streams; `float8`: whether matmuls of blocks take
    factors of eight bits; `inside`: whether peaks are wanted, and so what operations need inside themselves: what is sent between them,
    moved and added is known without. `added`: bytes of gradients that were added to their sums in a pass of its own; `coded`: bytes read
    and written to send in the formats of `wire`."""

    def __init__(self, steps: Steps, transport: Transport, same_format: bool, host_is_device: bool, ahead: int, float8: bool, inside: bool):
        self.steps, self.same_format, self.host_is_device = steps, same_format, host_is_device
        self.transport: Transport = transport
        self.ahead, self.float8, self.inside = ahead, float8, inside
        self.weight_bytes, self.sum_bytes = steps.bytes
        self.adds_inside = adds_inside(self.weight_bytes, self.sum_bytes, transport == "nccl")
        self.host: Place = "device" if host_is_device else "host"
        self.book = Book()
        self.sent, self.moved = Counter[str](), Counter[str]()
        self.flops = self.added = self.coded = 0

    def held(self, name: str, size: int, place: Place = "device", shape: Hashable = ()) -> Held:
        return Held(self.book, name, size, place, shape)

    def borrowed(self, unit: int) -> bool:
        """Whether copies of a unit may be tensors of home's own."""
        tier = self.steps.home_tiers[unit]
        return tier == "device" or (tier == "host" and self.host_is_device)

    def memory_of_home(self, unit: int) -> Place:
        """Where the training state of a unit is as far as it is in memory."""
        return "device" if self.borrowed(unit) else self.host

    def at_home(self, name: str, size: int, unit: int) -> Held:
        """Memory of the training state of a unit, as far as it is in memory."""
        return self.held(name, size, self.memory_of_home(unit))

    def all_reduced(self, size: int, ranks: int) -> int:
        """Bytes out of a rank for a small all-reduce of `size` bytes: to each other rank on gloo, by a ring on NCCL."""
        return size * (ranks - 1) if self.transport == "gloo" else 2 * size * (ranks - 1) // ranks

    def send(self, what: str, size: int) -> None:
        self.sent[what] += size
