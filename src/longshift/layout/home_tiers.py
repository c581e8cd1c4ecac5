"""In which memory each unit of the training state lies: all of it in one, or by bytes.

    device 8G, host rest      │ embeddings │ block 1 │ block 2 │ ... │ block 31 │ block 32 │ head │
                              └────────── device, 8G of a rank ──────┘└───────── host ─────────┘

Units are taken in the order of the forward. Each goes to the first memory that still has room for
all of it, gradient sums included. So the first units lie nearest: the next forward wants their
weights first, and the backward gives their gradients last (as in SuperOffload, arXiv 2509.21271).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from longshift.errors import UsageError
from longshift.layout.blocks import scales_of
from longshift.layout.layout import Tier, format_size, parse_size
from longshift.layout.placement import Bucket, place_of
from longshift.spec.formats import MomentFormat
from longshift.spec.model import ModelSpec

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
REST = "rest"
# One in so many elements of a state on disk is updated under the forward: see `early_units`.
LATE = 5


@dataclass(frozen=True)
class HomeTiers:
    """Where the training state of a rank lies.

    `last`: the memory of all but `first`.
    `first`: bytes in other, faster memories.
    `auto`: whether it is still to be chosen; until then it counts as the device's.
    """

    last: Tier = "device"
    first: tuple[tuple[Tier, int], ...] = ()
    auto: bool = False

    @staticmethod
    def parse(value: object) -> "HomeTiers":
        """Read `disk`, {device: 8G, host: rest}, or the text of one. Raises UsageError."""
        if isinstance(value, HomeTiers):
            return value
        if value == "auto":
            return HomeTiers(auto=True)
        if isinstance(value, str):
            pairs = [part.split() for part in value.split(",")]
            is_split = all(len(pair) == 2 for pair in pairs)
            value = {pair[0]: pair[1] for pair in pairs} if is_split else {value: REST}

        # 1. Every name is a memory.
        example = "{device: 8G, host: rest}"
        if not isinstance(value, Mapping) or not value:
            raise UsageError(f"device, host, disk, or bytes of them, as in {example}")
        for name in value:
            if name not in TIERS:
                raise UsageError(
                    f"{name!r} is not one of device, host, disk; several are written {example}",
                )

        # 2. The rest goes to the slowest of them.
        tiers: list[Tier] = [tier for tier in TIERS if tier in value]
        *faster, last = tiers
        if REST not in value.values() and last != TIERS[-1]:
            raise UsageError(
                f"say where the rest lies, as in {TIERS[TIERS.index(last) + 1]}: {REST}",
            )
        if value[last] != REST or any(value[tier] == REST for tier in faster):
            raise UsageError(
                f"the rest goes to the last of {', '.join(tiers)}: write {last}: {REST}, and bytes"
                " for those before it"
            )
        return HomeTiers(last, tuple((tier, _parse_bytes(tier, value[tier])) for tier in faster))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All that it names, the fastest first."""
        return (*(tier for tier, _ in self.first), self.last)

    def outside(self, host_is_device: bool) -> bool:
        """Whether all of it may be outside the device."""
        return self.last == "disk" or (self.last == "host" and not host_is_device)

    @property
    def updates_late(self) -> bool:
        """Whether units are updated under the forward of the next step: some of them may be outside
        the device."""
        return self.tiers != ("device",)

    def to_json(self) -> str | dict[str, int | str]:
        """As a config has it."""
        if self.auto:
            return "auto"
        return {**dict(self.first), self.last: REST} if self.first else self.last

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        if not self.first:
            return self.last
        parts = [f"{tier} {format_size(size)}" for tier, size in self.first]
        return ", ".join([*parts, f"{self.last} {REST}"])


def _parse_bytes(tier: Tier, text: object) -> int:
    try:
        size = parse_size(text)
    except ValueError as fault:
        raise UsageError(f"{tier}: {fault}") from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise UsageError(f"{tier}: {text!r} is no number of bytes")
    return size


@dataclass(frozen=True)
class StateBytes:
    """What an element of the training state takes.

    `weight_bytes`: of a weight that is not trained.
    `home_bytes`: of a master or gradient sum.
    `moments`: how many the optimizer keeps, `packed` into this format.
    """

    weight_bytes: int
    home_bytes: int
    moments: int
    packed: MomentFormat

    @property
    def moment_bytes(self) -> int:
        """Bytes of an element of a moment, without scales."""
        return {"float32": self.home_bytes, "bf16": 2, "float8": 1}[self.packed]

    def blocks(self, bucket: Bucket, rank: int) -> int:
        """How many blocks with a scale a rank has a part of, in each moment of a bucket."""
        if self.packed != "float8" or bucket.frozen:
            return 0
        # Of a block that two ranks share, both keep the scale.
        return sum(scales_of(box).elements for _, box in bucket.home(rank))

    def moments_of(self, bucket: Bucket, rank: int) -> int:
        """Bytes of a rank's moments of a bucket, between updates."""
        if bucket.frozen:
            return 0
        scale_bytes = 4 * self.blocks(bucket, rank)
        return self.moments * (bucket.kept(rank) * self.moment_bytes + scale_bytes)

    def state_of(self, bucket: Bucket, rank: int) -> int:
        """Bytes of all that a rank keeps of a bucket, gradient sums included."""
        element_bytes = self.weight_bytes if bucket.frozen else 2 * self.home_bytes
        return bucket.kept(rank) * element_bytes + self.moments_of(bucket, rank)


def tiers_of(
    home_in: HomeTiers,
    buckets: Iterable[Bucket],
    rank: int,
    state_bytes: StateBytes,
) -> dict[int, Tier]:
    """Where a rank has the state of each unit. `buckets`: the rank's."""
    sizes: Counter[int] = Counter()
    for bucket in buckets:
        sizes[bucket.unit] += state_bytes.state_of(bucket, rank)
    room = dict[Tier, int](home_in.first)
    tiers: dict[int, Tier] = {}
    for unit, size in sorted(sizes.items()):
        # Later units may still fit a memory that has no room for this one.
        fitting: list[Tier] = [tier for tier in room if size <= room[tier]]
        tiers[unit] = fitting[0] if fitting else home_in.last
        if fitting:
            room[fitting[0]] -= size
    return tiers


def trained_elements(spec: ModelSpec, buckets: Iterable[Bucket], rank: int) -> dict[int, int]:
    """How many trained elements a rank keeps of each unit, in the order of the forward. `buckets`:
    the rank's."""
    elements: Counter[int] = Counter()
    for bucket in buckets:
        if not bucket.frozen:
            elements[bucket.unit] += bucket.kept(rank)

    # The tied embedding has the last number, and the first place.
    units = sorted(elements, key=lambda unit: place_of(spec, unit))
    return {unit: elements[unit] for unit in units}


def early_units(tiers: Mapping[int, Tier], elements: Mapping[int, int]) -> frozenset[int]:
    """Units on disk that a rank may update under the backward ([Note: early updates] in
    `program.step`).

    The first trained unit is updated under the forward; so is every LATE-th of the others on disk,
    by elements. A forward computes for a quarter or a third of a step, and moves an eighth of the
    bytes if all other units are updated under the backward.

    `elements`: of `trained_elements`.
    """
    early: set[int] = set()
    # LATE times the elements that the forward should have had by now, less those that it had.
    owed_elements = 0
    for number, (unit, size) in enumerate(elements.items()):
        if tiers[unit] != "disk":
            continue
        owed_elements += size
        if number and 2 * owed_elements < LATE * size:
            early.add(unit)
        else:
            owed_elements -= LATE * size
    return frozenset(early)
