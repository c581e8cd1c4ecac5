"""Bytes of the training state on a rank, as `state.home` and `state.records` keep it: see
`weigh.ledger`."""

from dataclasses import dataclass

from longshift.layout.blocks import cut_blocks, elements_at_once
from longshift.layout.placement import Bucket
from longshift.program.step import Steps
from longshift.state.crossing import SLOT_BYTES, SLOTS, slots_in
from longshift.state.records import PIECE
from longshift.stream.disk_file import ALIGN, THREADS, whole_pages
from longshift.weigh.allocations import Allocation, RankMemory

SCALAR_BYTES = 16 << 10  # losses, counters of updates, norms of runs of gradients


def saved_bytes(steps: Steps) -> int:
    """Bytes of master weights and moments that a rank writes into a checkpoint: of what several
    ranks keep, one writes."""
    rank = steps.rank
    state_bytes = steps.state_bytes
    total = 0
    for bucket in steps.buckets:
        # What is not trained is in the model's own files.
        if bucket.owns(rank) and not bucket.frozen:
            total += bucket.kept(rank) * state_bytes.home_bytes
            total += state_bytes.moments_of(bucket, rank)
    return total


@dataclass
class UnitStateBytes:
    """What a rank keeps of a unit at home, in bytes. Mutable while it is summed up.

    `trained`, `frozen`: one vector of the weights that are trained, and of the others.
    `packed`: moments as they are between updates.
    `scales`: of the moments.
    `elements_at_once`: how many elements are packed at one time.
    """

    trained: int = 0
    frozen: int = 0
    packed: int = 0
    scales: int = 0
    elements_at_once: int = 0


class StateMemory:
    """`state.home.Home` on bytes. Mutable.

    `shards`: elements of each bucket that is trained, by unit and its number there.
    """

    def __init__(self, memory: RankMemory):
        steps = memory.steps
        spec = steps.itinerary.spec
        self.memory = memory
        self.steps = steps
        self.shards: dict[tuple[int, int], int] = {}
        self.units = {bucket.unit: UnitStateBytes() for bucket in steps.buckets}
        has_scales = steps.packed == "float8"
        self.cut_blocks = cut_blocks(spec, steps.itinerary.home) if has_scales else {}

        # What stays for the whole run.
        self.resident = [memory.allocate("scalars", SCALAR_BYTES)]
        disk_vectors: list[int] = []
        for bucket in steps.buckets:
            if bucket.frozen:
                disk_vectors += self._add_frozen(bucket)
            else:
                disk_vectors += self._add_trained(bucket)
        if disk_vectors:
            self._add_file(disk_vectors)
        slots = slots_in(steps.home_tiers, steps.buckets, steps.rank, memory.weight_bytes)
        if slots and not memory.host_is_device:
            size = (slots + SLOTS) * SLOT_BYTES
            self.resident.append(memory.allocate("pinned slots", size, "host"))

        # What comes and goes.
        self.sums: dict[tuple[int, int], Allocation] = {}  # of gradients, by unit and bucket
        self.unpacked: Allocation | None = None  # moments of the unit that is updated
        self.from_disk: dict[tuple[str, int], list[Allocation]] = {}  # by part and unit

    def _add_frozen(self, bucket: Bucket) -> list[int]:
        """Add a bucket that is not trained. Returns bytes of its vectors on disk."""
        size = bucket.kept(self.steps.rank) * self.memory.weight_bytes
        self.units[bucket.unit].frozen += size
        if bucket.unit in self.steps.on_disk:
            return [size]
        self.resident.append(self.memory.allocate_state("weights not trained", size, bucket.unit))
        return []

    def _add_trained(self, bucket: Bucket) -> list[int]:
        """Add a bucket that is trained. Returns bytes of its vectors on disk."""
        steps = self.steps
        rank = steps.rank
        state_bytes = steps.state_bytes
        elements = bucket.kept(rank)
        master = elements * state_bytes.home_bytes
        moments = state_bytes.moments_of(bucket, rank)
        codes = elements * state_bytes.moment_bytes
        scales = 4 * state_bytes.blocks(bucket, rank)
        number = sum(unit == bucket.unit for unit, _ in self.shards)
        self.shards[bucket.unit, number] = elements

        sizes = self.units[bucket.unit]
        sizes.trained += master
        sizes.packed += moments
        sizes.scales += scales * steps.moments
        if steps.packed != "float32":
            for _, box in bucket.home(rank):
                if box:
                    sizes.elements_at_once = max(sizes.elements_at_once, elements_at_once(box))

        if bucket.unit not in steps.on_disk:
            for name, size in (("master weights", master), ("moments", moments)):
                self.resident.append(self.memory.allocate_state(name, size, bucket.unit))
            return []
        grad = master
        vectors = [master, grad] + [codes, scales] * steps.moments
        if bucket.unit in steps.early:
            vectors += [master] + [codes] * steps.moments  # second places
        return vectors

    def _add_file(self, vectors: list[int]) -> None:
        """Add a file with vectors of so many bytes, and the buffers of the threads that read and
        write it."""
        sizes = [whole_pages(size) for size in vectors]
        buffer_bytes = min(PIECE, max(sizes)) + ALIGN
        # Each thread of either direction has a buffer.
        buffers_bytes = 2 * THREADS * buffer_bytes
        self.resident += [
            self.memory.allocate("training state", sum(sizes), "disk"),
            self.memory.allocate("buffers of the disk", buffers_bytes, self.memory.host),
        ]

    def elements(self, unit: int) -> int:
        """Elements of a unit that are trained and that this rank keeps."""
        return sum(size for (owner, _), size in self.shards.items() if owner == unit)

    # Gradient sums

    def receive(self, unit: int, number: int, total: Allocation, size: int) -> None:
        """Add a reduced gradient to the sum of a bucket, of `size` bytes."""
        if (unit, number) in self.sums:
            return
        # The first gradient is the sum where it lies in home's memory, else it is copied there.
        is_near = self.memory.is_state_on_device(unit)
        self.sums[unit, number] = total if is_near else self._allocate_sum(unit, size)

    def _allocate_sum(self, unit: int, size: int) -> Allocation:
        return self.memory.allocate_state("gradients at home", size, unit)

    def total(self, unit: int) -> None:
        """Make the gradient sums of a unit, of all where it is -1, where there are none."""
        for (shard_unit, number), elements in self.shards.items():
            key = shard_unit, number
            if key not in self.sums and unit in (-1, shard_unit):
                self.sums[key] = self._allocate_sum(shard_unit, elements * self.memory.sum_bytes)

    def _forget_sums(self, unit: int) -> None:
        self.sums = {key: total for key, total in self.sums.items() if key[0] != unit}

    # Updates

    def update(self, unit: int) -> None:
        """Update a unit, all where it is -1: unpack its moments, and free its gradient sums."""
        if unit < 0:
            # Else each unit's own update frees its sums.
            if not self.steps.by_unit:
                self.sums.clear()
            return
        if self.steps.packed != "float32":
            sizes = self.units[unit]
            moments = self.steps.moments * sizes.trained
            self.unpacked = self.memory.allocate_state("unpacked moments", moments, unit)
            self._add_workspace(unit, sizes.elements_at_once * (self.memory.sum_bytes + 1))
        if unit not in self.steps.on_disk:
            self._forget_sums(unit)

    def pack(self, unit: int, world: object) -> None:
        sizes = self.units[unit]
        workspace = sizes.scales + sizes.elements_at_once * (self.memory.sum_bytes + 1)
        if unit in self.cut_blocks:
            # Ranks share the maxima of blocks that home cuts.
            cut = self.cut_blocks[unit]
            maxima = self.steps.moments * cut.count
            begin, _ = self.memory.begin_collective("scales", "sum", len(cut.ranks), maxima, 4)
            workspace = max(workspace, sizes.scales + 4 * maxima + begin.peak)
        self._add_workspace(unit, workspace)
        self.unpacked = None

    def _add_workspace(self, unit: int, size: int) -> None:
        self.memory.allocations.add_workspace(size, self.memory.state_place(unit))

    # Units on disk

    def read(self, unit: int, part: str) -> None:
        sizes = self.units[unit]
        moved = self.memory.moved
        if part == "sums":
            moved["home in"] += sizes.trained
            self.total(unit)
            return
        vectors = {
            "master": [sizes.trained, sizes.frozen],
            "state": [sizes.trained, sizes.packed],
            "record": [sizes.trained, sizes.trained + sizes.packed],
        }[part]

        # Masters that are in memory for another part are not read again.
        other_part = {"master": "state", "state": "master"}.get(part, "")
        present = self.from_disk.get((other_part, unit), [])[:1]
        self.from_disk[part, unit] = present
        for size in vectors[len(present) :]:
            moved["home in"] += size
            present.append(self.memory.allocate_state(f"{part} from disk", size, unit))

    def ready(self, unit: int, part: str) -> None:
        """What is read has its memory already."""

    def evict(self, unit: int, part: str) -> None:
        del self.from_disk[part, unit]

    def write(self, unit: int, part: str) -> None:
        sizes = self.units[unit]
        self.memory.moved["home out"] += sizes.trained + (0 if part == "sums" else sizes.packed)
        if part == "record":
            del self.from_disk[part, unit][0]  # the gradient sums

    def written(self, unit: int, part: str) -> None:
        if part == "sums":
            self._forget_sums(unit)
        else:
            del self.from_disk[part, unit]
