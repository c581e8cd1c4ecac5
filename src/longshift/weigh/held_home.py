"""What the training state takes on a rank, in bytes, as `state.home` and `state.records` keep it: see `weigh.ledger`."""

from collections import Counter
from dataclasses import dataclass

from longshift.layout.blocks import cut_blocks, elements_at_once
from longshift.program.step import Steps
from longshift.state.crossing import SLOT_BYTES, SLOTS, slots_in
from longshift.state.records import PIECE
from longshift.stream.disk_file import ALIGN, THREADS
from longshift.weigh.book import Account, Held

SMALL = 16 << 10  # scalars: losses, counters of updates, norms of runs of gradients


def saved_bytes(steps: Steps) -> int:
    """Bytes of master weights and moments that a rank writes into a checkpoint: of what several ranks keep, one writes."""
    mine, each = steps.buckets, steps.state_bytes
    owned = [bucket for bucket in mine if bucket.owns(steps.rank) and not bucket.frozen]
    return sum(bucket.kept(steps.rank) * each.home_bytes + each.moments_of(bucket, steps.rank) for bucket in owned)


@dataclass
class UnitState:
    """What a rank keeps of a unit at home, in bytes. Mutable while it is made. `trained`, `frozen`: one vector of the weights that are
    trained, and those that are not; `packed`: moments as they are between updates; `scales`: of these; `elements_at_once`: that are packed
    at one time."""

    trained: int = 0
    frozen: int = 0
    packed: int = 0
    scales: int = 0
    elements_at_once: int = 0


class HeldHome:
    """`state.home.Home` on bytes. Mutable. `shards`: unit and elements of each bucket that is trained."""

    def __init__(self, account: Account):
        self.account, self.steps = account, account.steps
        steps, each = account.steps, account.steps.state_bytes
        self.shards = [(bucket.unit, bucket.kept(steps.rank)) for bucket in steps.buckets if not bucket.frozen]
        self.units = {bucket.unit: UnitState() for bucket in steps.buckets}
        self.cut = cut_blocks(steps.itinerary.spec, steps.itinerary.home) if steps.packed == "float8" else {}
        self.sums: dict[tuple[int, int], Held] = {}  # of gradients, by unit and bucket
        self.unpacked: Held | None = None  # moments of the unit that is updated
        self.state = [account.held("scalars", SMALL)]
        vectors = list[int]()  # on disk
        for bucket in steps.buckets:
            unit, on_disk = self.units[bucket.unit], bucket.unit in steps.on_disk
            elements = bucket.kept(steps.rank)
            if bucket.frozen:
                size = elements * account.weight_bytes
                unit.frozen += size
                if on_disk:
                    vectors.append(size)
                else:
                    self.state.append(account.at_home("weights not trained", size, bucket.unit))
                continue
            masters, moments = elements * account.sum_bytes, each.moments_of(bucket, steps.rank)
            codes, scales = elements * each.moment_bytes, 4 * each.blocks(bucket, steps.rank)
            unit.trained += masters
            unit.packed += moments
            unit.scales += scales * steps.moments
            if steps.packed != "float32":
                runs = [elements_at_once(box) for _, box in bucket.home(steps.rank) if box]
                unit.elements_at_once = max(unit.elements_at_once, *runs, 0)
            if on_disk:
                vectors += [masters] * 2 + [codes, scales] * steps.moments
                vectors += [masters] + [codes] * steps.moments if bucket.unit in steps.early else []
            else:
                self.state.append(account.at_home("master weights", masters, bucket.unit))
                self.state.append(account.at_home("moments", moments, bucket.unit))
        if vectors:
            rooms = [-(-size // ALIGN) * ALIGN for size in vectors]
            self.state.append(account.held("training state", sum(rooms), "disk"))
            self.state.append(account.held("buffers of the disk", 2 * THREADS * (min(PIECE, max(rooms)) + ALIGN), account.host))
        slots = 0 if account.host_is_device else slots_in(steps.home_tiers, steps.buckets, steps.rank, account.weight_bytes)
        if slots:
            self.state.append(account.held("pinned slots", (slots + SLOTS) * SLOT_BYTES, "host"))
        self.in_memory: dict[tuple[str, int], list[Held]] = {}  # parts of units on disk

    def receive(self, unit: int, number: int, total: Held, size: int) -> None:
        """Add a reduced gradient to the sum of a bucket, of `size` bytes; the first is the sum where it can be."""
        if (unit, number) not in self.sums:
            self.sums[unit, number] = total if self.account.borrowed(unit) else self._sums_of(unit, size)

    def _sums_of(self, unit: int, size: int) -> Held:
        return self.account.at_home("gradients at home", size, unit)

    def total(self, unit: int) -> None:
        """Make the gradient sums of a unit, of all where it is -1, where there are none."""
        numbers = Counter[int]()
        for number, elements in self.shards:
            key = number, numbers[number]
            numbers[number] += 1
            if key not in self.sums and unit in (-1, number):
                self.sums[key] = self._sums_of(number, elements * self.account.sum_bytes)

    def update(self, unit: int) -> None:
        """Update all, or a unit: its moments are unpacked, and its gradient sums are done with."""
        if unit < 0:
            if not self.steps.by_unit:
                self.sums.clear()
            return
        if self.steps.packed != "float32":
            state = self.units[unit]
            self.unpacked = self.account.at_home("unpacked moments", self.steps.moments * state.trained, unit)
            self._inside(unit, state.elements_at_once * (self.account.sum_bytes + 1))
        if unit not in self.steps.on_disk:
            self._forget_sums(unit)

    def _forget_sums(self, unit: int) -> None:
        for key in [key for key in self.sums if key[0] == unit]:
            del self.sums[key]

    def pack(self, unit: int, world: object) -> None:
        state = self.units[unit]
        packing = state.scales + state.elements_at_once * (self.account.sum_bytes + 1)
        if unit in self.cut:
            size, ranks = 4 * self.steps.moments * self.cut[unit].count, len(self.cut[unit].ranks)
            self.account.send("scales", self.account.all_reduced(size, ranks))
            packing = max(packing, state.scales + size * (2 + ranks))
        self._inside(unit, packing)
        self.unpacked = None

    def _inside(self, unit: int, size: int) -> None:
        self.account.book.inside(size, self.account.memory_of_home(unit))

    def read(self, unit: int, part: str) -> None:
        state, key = self.units[unit], (part, unit)
        if part == "sums":
            self.account.moved["home in"] += state.trained
            self.total(unit)
            return
        sizes = {
            "master": [state.trained, state.frozen],
            "state": [state.trained, state.packed],
            "record": [state.trained, state.trained + state.packed],
        }[part]
        other = {"master": "state", "state": "master"}.get(part, "")
        self.in_memory[key] = parts = self.in_memory.get((other, unit), [])[:1]  # masters that are in memory are not read
        for size in sizes[len(parts) :]:
            self.account.moved["home in"] += size
            parts.append(self.account.at_home(f"{part} from disk", size, unit))

    def ready(self, unit: int, part: str) -> None:
        """What is read has its memory already."""

    def evict(self, unit: int, part: str) -> None:
        del self.in_memory[part, unit]

    def write(self, unit: int, part: str) -> None:
        state = self.units[unit]
        self.account.moved["home out"] += state.trained + (0 if part == "sums" else state.packed)
        if part == "record":
            del self.in_memory[part, unit][0]  # the gradient sums

    def written(self, unit: int, part: str) -> None:
        if part == "sums":
            self._forget_sums(unit)
        else:
            del self.in_memory[part, unit]
