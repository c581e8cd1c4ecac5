"""Simulated allocations of a rank: bytes by name and memory, now and at their peaks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Self

from longshift.layout.layout import Tier
from longshift.program.operations import START, Op
from longshift.program.step import Steps
from longshift.spec.formats import adds_inside
from longshift.weigh.recorder import Transport, TurnProfile
from longshift.weigh.turn_profile import CollectiveName, CollectiveTurn, play_collective

Place = Tier

# An operation of the step by its number, and a point of time in it.
Instant = tuple[int, tuple]
WHOLE_STEP: Instant = -1, ()  # the key of all peaks where instants are not told apart


@dataclass(frozen=True)
class Peak:
    """The most bytes in a place: during which operation of the step, and what was alive, by name,
    largest first."""

    total: int
    op: str
    alive: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, total: int, op: str, alive: Mapping[str, int]) -> "Peak":
        """The peak at which these bytes were alive, by name."""
        sizes = [(name, size) for name, size in alive.items() if size]
        return cls(total, op, tuple(sorted(sizes, key=lambda row: -row[1])))

    @classmethod
    def unsorted(cls, total: int, op: str, alive: Mapping[str, int]) -> "Peak":
        """The same in no order, and with names that have no bytes."""
        return cls(total, op, tuple(alive.items()))


class TensorStandIn:
    """What runners and tiers ask of a tensor.

    `shape`: equal for tensors of one size that may take over each other's memory.
    """

    __slots__ = ("nbytes", "shape")

    def __init__(self, size: int, shape: Hashable):
        self.nbytes = size
        self.shape = shape

    @property
    def dtype(self) -> int:
        # Tiers keep spare memory by shape and format: bytes tell formats apart.
        return self.nbytes

    def contiguous(self) -> Self:
        return self

    def data_ptr(self) -> int:
        return id(self)


class Allocation(TensorStandIn):
    """Memory of a simulated tensor. It is freed when nobody refers to it any more."""

    __slots__ = ("name", "place", "tracker")

    def __init__(
        self,
        tracker: "AllocationTracker",
        name: str,
        size: int,
        place: Place = "device",
        shape: Hashable = (),
    ):
        super().__init__(size, shape)
        self.tracker = tracker
        self.name = name
        self.place = place
        tracker.change(name, size, place)

    def __del__(self) -> None:
        self.tracker.change(self.name, -self.nbytes, self.place)


class AllocationTracker:
    """Bytes by name, now and at the peak of each place. Mutable.

    `peaks`: bytes by place, of all times; where instants are told apart, since `save_peaks`.
    `has_new_peak`: whether one of `peaks` has risen since `save_peaks`.
    `snapshots`: the peak of each place, by instant.
    `op_name`: of an operation in them.
    """

    def __init__(self) -> None:
        self.op_name: Callable[[Op], str] = str
        self.now: Counter[str] = Counter()
        self.by_name: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.peaks: dict[str, int] = {}
        self.has_new_peak = False
        self.has_instants = False
        self.snapshots: dict[Instant, dict[str, Peak]] = {}
        self.op_number = 0
        self.op = START
        self._shown_op = ""  # the operation's name, once somebody asks

    def track_instants(self) -> dict[Instant, dict[str, Peak]]:
        """From now on tell instants apart. Returns their snapshots, which a step will fill."""
        self.has_instants = True
        # Peaks of the steps before would hide those of instants. What is there all the time raises
        # none, as pinned pieces.
        self.peaks = dict(self.now)
        self.has_new_peak = True
        self.snapshots = {}
        return self.snapshots

    def change(self, name: str, size: int, place: str) -> None:
        self.by_name[place][name] += size
        total = self.now[place] = self.now[place] + size
        if size > 0:
            self._raise_peak(total, place)

    def add_workspace(self, size: int, place: Place = "device") -> None:
        """Note that an operation needs so many bytes in a place, beyond what is allocated."""
        self._raise_peak(self.now[place] + size, place)

    def _raise_peak(self, total: int, place: str) -> None:
        if total > self.peaks.get(place, 0):
            self.peaks[place] = total
            self.has_new_peak = True

    def begin_op(self, number: int, op: Op) -> None:
        self.op_number = number
        self.op = op
        self._shown_op = ""

    def save_peaks(self, instant: tuple = ()) -> None:
        """Take snapshots of the peaks that the operation, or this instant of it, has raised."""
        if not self.has_new_peak:
            return
        key = (self.op_number, instant) if self.has_instants else WHOLE_STEP
        snapshots = self.snapshots.setdefault(key, {})
        # An operation in chunks has many instants. So its name is put together once, and names of
        # what was alive are sorted by who extrapolates from them.
        self._shown_op = self._shown_op or self.op_name(self.op)
        make_peak = Peak.unsorted if self.has_instants else Peak.of
        for place, peak in self.peaks.items():
            if place not in snapshots or peak > snapshots[place].total:
                # At the peak there was also what is gone again.
                workspace = max(0, peak - self.now[place])
                alive = {**self.by_name[place], "gone when it ends": workspace}
                snapshots[place] = make_peak(peak, self._shown_op, alive)
        if self.has_instants:
            self.peaks = {}
        self.has_new_peak = False


@dataclass(eq=False)
class RankMemory:
    """Memory and traffic of a rank, and what they depend on. Mutable.

    `transport`: how collectives move, which decides what they need besides their results.
    `same_format`: weights are computed with in home's format.
    `float8`: whether matmuls of blocks take factors of eight bits.
    `with_peaks`: whether peaks are wanted, and so what operations need as workspace. Traffic is
    known without.

    `sent`, `moved`: bytes by communicator, and by way between memories. `flops`: of computations.
    `added_bytes`: of gradients that were added to their sums in a pass of its own.
    `coded_bytes`: read and written to send in the formats of `wire`.
    """

    steps: Steps
    transport: Transport
    same_format: bool
    float8: bool = False
    with_peaks: bool = True

    def __post_init__(self) -> None:
        self.weight_bytes, self.sum_bytes = self.steps.bytes
        on_gpu = self.transport == "nccl"
        self.adds_inside = adds_inside(self.weight_bytes, self.sum_bytes, on_gpu)
        self.host: Place = "device" if self.host_is_device else "host"

        self.allocations = AllocationTracker()
        self.clear_traffic()

    def clear_traffic(self) -> None:
        """Count traffic and computations anew."""
        self.sent = Counter[str]()
        self.moved = Counter[str]()
        self.flops = 0
        self.added_bytes = 0
        self.coded_bytes = 0

    @property
    def host_is_device(self) -> bool:
        """Whether the device is a CPU, whose host tier moves nothing."""
        return self.transport == "gloo"

    def allocate(
        self, name: str, size: int, place: Place = "device", shape: Hashable = ()
    ) -> Allocation:
        return Allocation(self.allocations, name, size, place, shape)

    def allocate_state(self, name: str, size: int, unit: int) -> Allocation:
        """Memory of the training state of a unit, as far as it is in memory."""
        return self.allocate(name, size, self.state_place(unit))

    def is_state_on_device(self, unit: int) -> bool:
        """Whether the working copies of a unit may be tensors of home's own."""
        tier = self.steps.home_tiers[unit]
        return tier == "device" or (tier == "host" and self.host_is_device)

    def state_place(self, unit: int) -> Place:
        """Where the training state of a unit is as far as it is in memory."""
        return "device" if self.is_state_on_device(unit) else self.host

    def begin_collective(
        self, purpose: str, operation: CollectiveName, holders: int, elements: int, item_bytes: int
    ) -> CollectiveTurn:
        """Note what a collective needs to begin, and what it sends: see `play_collective`."""
        collective = play_collective(
            self.transport, purpose, operation, holders, elements, item_bytes
        )
        self.record_profile(collective.begin)
        return collective

    def record_profile(self, profile: TurnProfile) -> None:
        """Note what an operation needs as workspace, what it computes, and what it sends."""
        self.allocations.add_workspace(profile.peak)
        self.flops += profile.flops
        for communicator, size in profile.sent.items():
            self.send(communicator, size)

    def send(self, communicator: str, size: int) -> None:
        self.sent[communicator] += size
