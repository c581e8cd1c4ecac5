"""What the training state takes on a rank, in bytes, as `state.home` and `state.records` keep it: see `weigh.ledger`."""

from collections import Counter

from longshift.layout.blocks import cut_blocks, elements_at_once
from longshift.program.operations import Op
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


class HeldHome:
    """The training state of a rank. Mutable. `shards`, `frozen`: unit and elements
    of each bucket that is trained, and that is not; `packed`: bytes of the moments of each that is trained, as they are between updates;
    by unit `scales`, their bytes, and `at_once`, how many elements are packed at one time."""

    def __init__(self, account: Account, steps: Steps):
        self.account, self.steps = account, steps
        (self.weight_bytes, self.sum_bytes), self.moments = steps.bytes, steps.moments
        mine, each = steps.buckets, steps.state_bytes
        self.shards = [(bucket.unit, bucket.kept(steps.rank)) for bucket in mine if not bucket.frozen]
        self.frozen = [(bucket.unit, bucket.kept(steps.rank)) for bucket in mine if bucket.frozen]
        blocks = [each.blocks(bucket, steps.rank) for bucket in mine if not bucket.frozen]
        self.packed = [each.moments_of(bucket, steps.rank) for bucket in mine if not bucket.frozen]
        self.scales = {bucket.unit: 0 for bucket in mine}
        self.at_once = dict(self.scales)
        for bucket, some in zip((bucket for bucket in mine if not bucket.frozen), blocks):
            self.scales[bucket.unit] += 4 * some * self.moments
            runs = [elements_at_once(box) for _, box in bucket.home(steps.rank) if box] if steps.packed != "float32" else []
            self.at_once[bucket.unit] = max(self.at_once[bucket.unit], *runs, 0)
        self.cut = cut_blocks(steps.itinerary.spec, steps.itinerary.home) if steps.packed == "float8" else {}
        self.wide: list[Held] = []  # moments of the unit that is updated
        self.state = [account.held("scalars", SMALL)]
        vectors = list[int]()
        for (unit, elements), moments, some in zip(self.shards, self.packed, blocks):
            masters, codes = elements * self.sum_bytes, elements * each.moment_bytes
            if unit in steps.on_disk:
                vectors += [masters] * 2 + [codes, 4 * some] * self.moments
                vectors += [masters] + [codes] * self.moments if unit in steps.early else []
            else:
                self.state += [account.at_home("master weights", masters, unit), account.at_home("moments", moments, unit)]
        for unit, elements in self.frozen:
            if unit in steps.on_disk:
                vectors.append(elements * self.weight_bytes)
            else:
                self.state.append(account.at_home("weights not trained", elements * self.weight_bytes, unit))
        if vectors:
            rooms = [-(-size // ALIGN) * ALIGN for size in vectors]
            self.state += [account.held("training state", sum(rooms), "disk")]
            self.state += [account.held("buffers of the disk", 2 * THREADS * (min(PIECE, max(rooms, default=0)) + ALIGN), account.host)]
        slots = 0 if account.host_is_device else slots_in(steps.home_tiers, mine, steps.rank, self.weight_bytes)
        if slots:
            self.state.append(account.held("pinned slots", (slots + SLOTS) * SLOT_BYTES, "host"))
        self.here: dict[tuple[str, int], list[Held]] = {}  # parts of units on disk that are in memory too

    def total(self, op: Op) -> None:
        """Gradient sums of a unit, of all where it is -1."""
        units = Counter[int]()
        for unit, elements in self.shards:
            key = unit, units[unit]
            units[unit] += 1
            if key not in self.account.home_sums and op.unit in (-1, unit):
                self.account.home_sums[key] = self.account.at_home("gradients at home", elements * self.sum_bytes, unit)

    def update(self, op: Op) -> None:
        """Of all, or of a unit: its moments are unpacked, and its gradient sums are done with."""
        if op.unit < 0:
            if not self.steps.by_unit:
                self.account.home_sums.clear()
            return
        if self.steps.packed != "float32":
            trained, _ = self._of(op.unit)
            self.wide = [self.account.at_home("unpacked moments", self.moments * trained, op.unit)]
            self._inside(op.unit, self.at_once[op.unit] * (self.sum_bytes + 1))
        if op.unit not in self.steps.on_disk:
            for key in [key for key in self.account.home_sums if key[0] == op.unit]:
                del self.account.home_sums[key]

    def pack(self, op: Op) -> None:
        packing = self.scales[op.unit] + self.at_once[op.unit] * (self.sum_bytes + 1)
        if op.unit in self.cut:
            size, ranks = 4 * self.moments * self.cut[op.unit].count, len(self.cut[op.unit].ranks)
            self.account.send("scales", self.account.all_reduced(size, ranks))
            packing = max(packing, self.scales[op.unit] + size * (2 + ranks))
        self._inside(op.unit, packing)
        self.wide = []

    def _inside(self, unit: int, size: int) -> None:
        self.account.book.inside(size, self.account.memory_of_home(unit))

    def read(self, op: Op) -> None:
        trained, frozen = self._of(op.unit)
        if op.part == "sums":
            self.account.moved["home in"] += trained
            self.total(op)
            return
        packed = self._packed(op.unit)
        sizes = {"master": [trained, frozen], "state": [trained, packed], "record": [trained, trained + packed]}[op.part]
        other = {"master": "state", "state": "master"}.get(op.part, "")
        self.here[op.part, op.unit] = found = self.here.get((other, op.unit), [])[:1]  # masters that are in memory are not read
        for size in sizes[len(found) :]:
            self.account.moved["home in"] += size
            found.append(self.account.at_home(f"{op.part} from disk", size, op.unit))

    def evict(self, op: Op) -> None:
        del self.here[op.part, op.unit]

    def write(self, op: Op) -> None:
        trained, _ = self._of(op.unit)
        self.account.moved["home out"] += trained + (0 if op.part == "sums" else self._packed(op.unit))
        if op.part == "record":
            del self.here[op.part, op.unit][0]  # the gradient sums

    def written(self, op: Op) -> None:
        if op.part != "sums":
            del self.here[op.part, op.unit]
            return
        for key in [key for key in self.account.home_sums if key[0] == op.unit]:
            del self.account.home_sums[key]

    def _packed(self, unit: int) -> int:
        """Bytes of a unit's moments between updates."""
        return sum(size for (at, _), size in zip(self.shards, self.packed) if at == unit)

    def _of(self, unit: int) -> tuple[int, int]:
        """Bytes of one vector of a unit's weights that are trained, and of those that are not."""
        trained = self.sum_bytes * sum(elements for at, elements in self.shards if at == unit)
        return trained, self.weight_bytes * sum(elements for at, elements in self.frozen if at == unit)
