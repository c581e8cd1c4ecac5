"""Bytes by name and place, now and at the most."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

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


class Mark:
    """The most bytes in a place at one moment: during which operation, and what was there by name; `inside`: what the operation needed
    beyond that."""

    __slots__ = ("by_name", "inside", "op", "total")

    def __init__(self, total: int, op: Op, by_name: dict[str, int], inside: int):
        self.total, self.op, self.by_name, self.inside = total, op, by_name, inside

    @property
    def alive(self) -> dict[str, int]:
        """Bytes by name, what the operation needed among them."""
        found = {name: size for name, size in self.by_name.items() if size}
        return found | {"gone when it ends": self.inside} if self.inside > 0 else found


class Book:
    """Bytes by name, now and at the most of each place. Mutable.

    `moments`: the mark of each place at every moment of the step, where wanted; `most`: of each place, ever, or since the last settling
    where moments are wanted; `grew`: whether one of `most` did since the last settling; `told`: names operations."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: dict[str, int] = {}
        self.grew = False
        self.by_name: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.peaks: dict[str, Peak] = {}
        self.moments: dict[Moment, dict[str, Mark]] | None = None
        self.told: Callable[[Op], str] = str
        self.number, self.op = 0, START

    def watch(self) -> dict[Moment, dict[str, Mark]]:
        """Moments, which are written down from now on."""
        self.most, self.moments = {}, {}
        return self.moments

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
        for place, most in self.most.items():
            known = self.peaks.get(place)
            if known is None or most > known.total:
                rows = self._mark(place, most).alive.items()
                self.peaks[place] = Peak(most, self.told(self.op), tuple(sorted(rows, key=lambda row: -row[1])))
        if self.moments is not None:
            marks = self.moments.setdefault((self.number, moment), {})
            for place, most in self.most.items():
                if place not in marks or most > marks[place].total:
                    marks[place] = self._mark(place, most)
            self.most = {}
        self.grew = False

    def _mark(self, place: str, most: int) -> Mark:
        return Mark(most, self.op, dict(self.by_name[place]), most - self.now[place])


class Account:
    """How a rank computes and moves, and what it holds and sends. Mutable.

    `transport`: how collectives move, which decides what they need besides their results; `same_format`: weights are computed with in
    home's format; `host_is_device`: a CPU, whose host tier moves nothing; `ahead`: of streams; `float8`: whether matmuls of blocks take
    factors of eight bits; `inside`: whether peaks are wanted, and so what operations need inside themselves: what is sent between them,
    moved and added is known without. `added`: bytes of gradients that were added to their sums in a pass of its own; `coded`: bytes read
    and written to send in the formats of `wire`; `home_sums`: gradient sums at home, by unit and bucket."""

    def __init__(self, steps: Steps, transport: Transport, same_format: bool, host_is_device: bool, ahead: int, float8: bool, inside: bool):
        self.steps, self.same_format, self.host_is_device = steps, same_format, host_is_device
        self.transport: Transport = transport
        self.ahead, self.float8, self.inside = ahead, float8, inside
        self.weight_bytes, self.sum_bytes = steps.bytes
        self.adds_inside = adds_inside(self.weight_bytes, self.sum_bytes, transport == "nccl")
        self.host: Place = "device" if host_is_device else "host"
        self.book = Book()
        self.sent, self.moved, self.flops = Counter[str](), Counter[str](), Counter[str]()
        self.added = self.coded = 0
        self.home_sums: dict[tuple[int, int], Held] = {}

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

    def receive(self, unit: int, number: int, total: Held, size: int) -> None:
        """Add a reduced gradient to the sum of a bucket at home, of `size` bytes; the first is the sum where it can be."""
        if (unit, number) not in self.home_sums:
            self.home_sums[unit, number] = total if self.borrowed(unit) else self.at_home("gradients at home", size, unit)

    def all_reduced(self, size: int, ranks: int) -> int:
        """Bytes out of a rank for a small all-reduce of `size` bytes: to each other rank on gloo, by a ring on NCCL."""
        return size * (ranks - 1) if self.transport == "gloo" else 2 * size * (ranks - 1) // ranks

    def send(self, what: str, size: int) -> None:
        self.sent[what] += size
