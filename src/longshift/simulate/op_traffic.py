"""What each operation of a rank's step sends and moves, as the ledger counts it.

The ledger plays the same program as the clock. Its counters after an operation, less those before,
are what the operation moves. What passes over memory (casts, sums, updates) is `stage_actions`'.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longshift.layout.layout import Tier
from longshift.program.operations import Op
from longshift.program.turns import Visit
from longshift.weigh.ledger import Ledger


@dataclass(slots=True)
class OpTraffic:
    """An operation and what it moves, as the ledger counts it.

    `format_bytes`: read and written on the device to convert to or from the wire's format.
    `elements`: that the operation adds or updates, or that cross between device and host.
    `frozen_elements`: of weights that are not trained, which cross as they are.
    `home`: the memory that holds the optimizer state of its unit; "device" on a CPU.
    """

    op: Op
    sent_bytes: int
    moved_bytes: int
    format_bytes: int
    elements: int
    frozen_elements: int
    home: Tier


def record_traffic(
    ledger: Ledger,
    visits: Sequence[Visit],
    packs_by_visit: Sequence[Sequence[tuple[int, ...]]],
    steps: int | None,
) -> list[list[OpTraffic]]:
    """Play `steps` steps on the ledger, and return the last one's operations by visit.

    The norm and the update belong to the last visit.
    """
    by_visit: list[list[OpTraffic]] = [[]]
    memory = ledger.memory
    uses_home = [ledger.steps.views[visit.layout].cut.at_home for visit in visits]
    # The ledger's counters after the operation before.
    total_sent = total_moved = total_coded = total_added = 0

    def crosses_link(op: Op, home: Tier) -> bool:
        is_crossing = op.kind in ("gather", "await reduce")
        return is_crossing and home != "device" and uses_home[op.visit]

    def updated_elements(op: Op, home: Tier) -> int:
        if op.kind == "accumulate":
            return (memory.added_bytes - total_added) // memory.weight_bytes
        if op.kind == "update" and op.unit < 0 and not ledger.steps.by_unit:
            return sum(ledger.home.shards.values())
        if op.kind in ("update", "pack"):
            return ledger.home.elements(op.unit)
        return ledger.home.elements(op.unit) if crosses_link(op, home) else 0

    def record(op: Op) -> None:
        nonlocal total_sent, total_moved, total_coded, total_added
        home: Tier = (
            "device" if memory.host_is_device else ledger.steps.home_tiers.get(op.unit, "device")
        )
        sent_bytes = sum(memory.sent.values())
        moved_bytes = sum(memory.moved.values())
        frozen_elements = 0
        if op.kind == "gather" and crosses_link(op, home):
            frozen_elements = ledger.home.units[op.unit].frozen // memory.weight_bytes
        by_visit[-1].append(
            OpTraffic(
                op=op,
                sent_bytes=sent_bytes - total_sent,
                moved_bytes=moved_bytes - total_moved,
                format_bytes=memory.coded_bytes - total_coded,
                elements=updated_elements(op, home),
                frozen_elements=frozen_elements,
                home=home,
            )
        )
        total_sent = sent_bytes
        total_moved = moved_bytes
        total_coded = memory.coded_bytes
        total_added = memory.added_bytes
        if op.kind == "leave" and op.visit < len(visits) - 1:
            by_visit.append([])

    ledger.play(visits, packs_by_visit, record, steps)
    return by_visit
