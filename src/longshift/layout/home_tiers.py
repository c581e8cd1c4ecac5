"""In which memory each unit of the training state lies: all of it in one, or by bytes.

    device 8G, host rest      │ embeddings │ block 1 │ block 2 │ ... │ block 31 │ block 32 │ head │
                              └────────── device, 8G of a rank ──────┘└───────── host ─────────┘

Units are taken in the order of the forward. Each goes to the first memory that still has room for all of it, gradient sums included. So the
first units lie nearest: the next forward wants their weights first, and the backward gives their gradients last (as in SuperOffload, arXiv
2509.21271).
"""

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
LATE = 5  # one in so many elements of a state on disk is updated under the forward: see `early_units`


@dataclass(frozen=True)
class HomeTiers:
    """Where the training state of a rank lies: in `last`, but for as many bytes as `first` names in other, faster memories. `auto`: whether
    it is still to be chosen; until then it counts as the device's."""

    last: Tier = "device"
    first: tuple[tuple[Tier, int], ...] = ()
    auto: bool = False

    @staticmethod
    def parse(value: object) -> "HomeTiers":
        """`disk`, {device: 8G, host: rest}, or the text of one. Raises UsageError."""
        if isinstance(value, HomeTiers):
            return value
        if value == "auto":
            return HomeTiers(auto=True)
        if isinstance(value, str):
            pairs = [part.split() for part in value.split(",")]
            value = {pair[0]: pair[1] for pair in pairs} if all(len(pair) == 2 for pair in pairs) else {value: REST}
        if not isinstance(value, Mapping) or not value:
            raise UsageError("device, host, disk, or bytes of them, as in {device: 8G, host: rest}")
        for name in value:
            if name not in TIERS:
                raise UsageError(f"{name!r} is not one of device, host, disk; several are written {{device: 8G, host: rest}}")
        named: list[Tier] = [tier for tier in TIERS if tier in value]
        *faster, last = named
        if REST not in value.values() and last != TIERS[-1]:
            raise UsageError(f"say where the rest lies, as in {TIERS[TIERS.index(last) + 1]}: {REST}")
        if value[last] != REST or any(value[tier] == REST for tier in faster):
            raise UsageError(f"the rest goes to the last of {', '.join(named)}: write {last}: {REST}, and bytes for those before it")
        return HomeTiers(last, tuple((tier, _bytes(tier, value[tier])) for tier in faster))

    @property
    def named(self) -> tuple[Tier, ...]:
        """All that it names, the fastest first."""
        return (*(tier for tier, _ in self.first), self.last)

    def outside(self, host_is_device: bool) -> bool:
        """Whether all of it may lie outside the device."""
        return self.last == "disk" or (self.last == "host" and not host_is_device)

    @property
    def late(self) -> bool:
        """Whether units are updated under the forward of the next step: where some of them may lie outside the device."""
        return self.named != ("device",)

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
        return ", ".join([*(f"{tier} {format_size(size)}" for tier, size in self.first), f"{self.last} {REST}"])


def _bytes(tier: Tier, size: object) -> int:
    try:
        found = parse_size(size)
    except ValueError as fault:
        raise UsageError(f"{tier}: {fault}") from None
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise UsageError(f"{tier}: {size!r} is no number of bytes")
    return found


@dataclass(frozen=True)
class StateBytes:
    """What an element of the training state takes. `weight_bytes`: of a weight that is not trained; `home_bytes`: of a master or gradient
    sum; `moments`: how many the optimizer keeps, `packed` into this format."""

    weight_bytes: int
    home_bytes: int
    moments: int
    packed: MomentFormat

    @property
    def moment_bytes(self) -> int:
        """Of an element of a moment, without scales."""
        return {"float32": self.home_bytes, "bf16": 2, "float8": 1}[self.packed]

    def blocks(self, bucket: Bucket, rank: int) -> int:
        """How many blocks with a scale a rank has a part of, in each moment of a bucket."""
        return sum(scales_of(box).elements for _, box in bucket.home(rank)) if self.packed == "float8" and not bucket.frozen else 0

    def moments_of(self, bucket: Bucket, rank: int) -> int:
        """Bytes of a rank's moments of a bucket, between updates."""
        return 0 if bucket.frozen else self.moments * (bucket.kept(rank) * self.moment_bytes + 4 * self.blocks(bucket, rank))

    def state_of(self, bucket: Bucket, rank: int) -> int:
        """Bytes of all that a rank keeps of a bucket, gradient sums included."""
        weights = bucket.kept(rank) * (self.weight_bytes if bucket.frozen else 2 * self.home_bytes)
        return weights + self.moments_of(bucket, rank)


def tiers_of(home_in: HomeTiers, mine: Iterable[Bucket], rank: int, each: StateBytes) -> dict[int, Tier]:
    """Where a rank has the state of each unit, of whose buckets `mine` are."""
    sizes: dict[int, int] = {}
    for bucket in mine:
        sizes[bucket.unit] = sizes.get(bucket.unit, 0) + each.state_of(bucket, rank)
    room = dict[Tier, int](home_in.first)
    found: dict[int, Tier] = {}
    for unit, size in sorted(sizes.items()):
        roomy: list[Tier] = [tier for tier in room if size <= room[tier]]
        tier = found[unit] = roomy[0] if roomy else home_in.last
        if tier in room:
            room[tier] -= size
    return found


def trained_elements(spec: ModelSpec, mine: Iterable[Bucket], rank: int) -> dict[int, int]:
    """How many elements that are trained a rank keeps of each unit, in the order of the forward. `mine`: the rank's buckets."""
    found: dict[int, int] = {}
    for bucket in mine:
        if not bucket.frozen:
            found[bucket.unit] = found.get(bucket.unit, 0) + bucket.kept(rank)
    return {unit: found[unit] for unit in sorted(found, key=lambda unit: place_of(spec, unit))}


def early_units(tiers: Mapping[int, Tier], elements: Mapping[int, int]) -> frozenset[int]:
    """Units on disk that a rank may update under the backward ([Note: early updates] in `program.step`). The first unit that is trained is
    updated under the forward; so is every LATE-th of the others on disk, by elements. A forward computes for a quarter or a third of a
    step, and moves an eighth of the bytes where all other units are updated under the backward. `elements`: of `trained_elements`."""
    found, owed = set[int](), 0  # LATE times the elements that the forward should have had by now
    for number, (unit, size) in enumerate(elements.items()):
        if tiers[unit] == "disk":
            owed += size
            if number and 2 * owed < LATE * size:
                found.add(unit)
            else:
                owed -= LATE * size
    return frozenset(found)
