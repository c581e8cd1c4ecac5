"""What the training state takes on a rank, in bytes, as `state.home` and `state.records` keep it: see `program.ledger`."""

from collections import Counter

from longshift.layout.placement import buckets_of
from longshift.program.book import Account, Held
from longshift.program.operations import Op
from longshift.program.step import Steps

ALIGN = 4096  # bytes: where vectors of a file begin
SMALL = 16 << 10  # scalars: losses, counters of updates, norms of runs of gradients


def saved_bytes(steps: Steps) -> int:
    """Bytes of master weights and moments that a rank writes into a checkpoint: of what several ranks keep, one writes."""
    mine = buckets_of(steps.itinerary.spec, steps.itinerary.home, steps.rank)
    elements = sum(bucket.kept(steps.rank) for bucket in mine if bucket.owns(steps.rank) and not bucket.frozen)
    return (1 + steps.moments) * steps.bytes[1] * elements


class HeldHome:
    """The training state of a rank. Mutable. `copied`: whether checkpoints are written from a copy; `shards`, `frozen`: unit and elements
    of each bucket that is trained, and that is not."""

    def __init__(self, account: Account, steps: Steps, copied: bool):
        self.account = account
        (self.weight_bytes, self.sum_bytes), self.moments = steps.bytes, steps.moments
        mine = buckets_of(steps.itinerary.spec, steps.itinerary.home, steps.rank)
        self.shards = [(bucket.unit, bucket.kept(steps.rank)) for bucket in mine if not bucket.frozen]
        self.frozen = [(bucket.unit, bucket.kept(steps.rank)) for bucket in mine if bucket.frozen]
        trained = self.sum_bytes * sum(elements for _, elements in self.shards)
        self.state = [account.held("scalars", SMALL)]
        if steps.home_in == "disk":
            vectors = [elements * self.sum_bytes for _, elements in self.shards] * (2 + self.moments)
            vectors += [elements * self.weight_bytes for _, elements in self.frozen]
            self.state += [account.held("training state", sum(-(-size // ALIGN) * ALIGN for size in vectors), "disk")]
        else:
            frozen = self.weight_bytes * sum(elements for _, elements in self.frozen)
            parts = ("master weights", trained), ("moments", self.moments * trained), ("weights not trained", frozen)
            self.state += [account.at_home(*part) for part in parts]
        if copied:
            self.state.append(account.held("copy for checkpoints", saved_bytes(steps), "device" if account.host_is_device else "host"))
        self.here: dict[tuple[str, int], list[Held]] = {}  # parts of units on disk that are in memory too

    def total(self, op: Op) -> None:
        """Gradient sums of a unit, of all where it is -1."""
        units = Counter[int]()
        for unit, elements in self.shards:
            key = unit, units[unit]
            units[unit] += 1
            if key not in self.account.home_sums and op.unit in (-1, unit):
                self.account.home_sums[key] = self.account.at_home("gradients at home", elements * self.sum_bytes)

    def read(self, op: Op) -> None:
        trained, frozen = self._of(op.unit)
        self.account.moved["home in"] += {"master": trained + frozen, "sums": trained, "record": (2 + self.moments) * trained}[op.part]
        if op.part == "sums":
            self.total(op)
            return
        parts = [trained + frozen] if op.part == "master" else [trained, (1 + self.moments) * trained]
        self.here[op.part, op.unit] = [self.account.at_home(f"{op.part} from disk", size) for size in parts]

    def evict(self, op: Op) -> None:
        del self.here[op.part, op.unit]

    def write(self, op: Op) -> None:
        trained, _ = self._of(op.unit)
        self.account.moved["home out"] += trained * (1 + self.moments if op.part == "record" else 1)
        if op.part == "record":
            del self.here[op.part, op.unit][0]  # the gradient sums

    def written(self, op: Op) -> None:
        if op.part == "record":
            del self.here[op.part, op.unit]
            return
        for key in [key for key in self.account.home_sums if key[0] == op.unit]:
            del self.account.home_sums[key]

    def _of(self, unit: int) -> tuple[int, int]:
        """Bytes of one vector of a unit's weights that are trained, and of those that are not."""
        trained = self.sum_bytes * sum(elements for at, elements in self.shards if at == unit)
        return trained, self.weight_bytes * sum(elements for at, elements in self.frozen if at == unit)
