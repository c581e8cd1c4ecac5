"""The exchanges of a planned switch, as a program needs them: which storage they open and close,
and which weights of home they read or add to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from longshift.layout.placement import moving_unit
from longshift.spec.model import ModelSpec
from longshift.switch.plan import Plan


@dataclass(frozen=True)
class Exchanges:
    """A switch as the program needs it. `opens[i]`: the units that need storage before exchange i;
    `closes[i]`: the units of the layout that is left which nothing reads after exchange i is
    posted; `ahead`: how many exchanges may go ahead; `spans`: by unit the first exchange that reads
    a source or adds to a target, and the last that does."""

    count: int
    opens: tuple[tuple[int, ...], ...]
    closes: tuple[tuple[int, ...], ...]
    ahead: int
    spans: Mapping[int, tuple[int, int]]


def plan_exchanges(
    spec: ModelSpec,
    plan: Plan,
    opened_units: Collection[int],
    closed_units: Collection[int],
    ahead_bytes: int,
) -> Exchanges:
    """The exchanges of a plan on one rank. `opened_units`: those that it has in the layout to come;
    `closed_units`: in the layout that is left; `ahead_bytes`: how much storage of any rank may be
    opened ahead."""
    count = plan.exchanges
    first, last, max_bytes = _spans(spec, plan)
    ahead = next((number for number, opened in enumerate(max_bytes) if opened > ahead_bytes), count)
    return Exchanges(
        count=count,
        opens=_by_exchange(opened_units, first, count),
        closes=_by_exchange(closed_units, last, count),
        ahead=ahead,
        spans={unit: (first[unit], min(count, last[unit] + plan.rounds) - 1) for unit in first},
    )


def _by_exchange(
    units: Collection[int], number_of: Mapping[int, int], count: int
) -> tuple[tuple[int, ...], ...]:
    """The units of each exchange, by its number."""
    by_exchange: list[list[int]] = [[] for _ in range(count)]
    for unit in sorted(units):
        by_exchange[number_of[unit]].append(unit)
    return tuple(map(tuple, by_exchange))


def _spans(spec: ModelSpec, plan: Plan) -> tuple[dict[int, int], dict[int, int], list[int]]:
    """The first and the last bucket of each moving unit; the most bytes of wanted weights that any
    rank has storage for after each exchange's `open`."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    unit_bytes: dict[int, np.ndarray] = {}  # int64 [ranks]
    for weight in plan.weights:
        unit = moving_unit(spec, spec.by_name[weight.name])
        # A weight without slices, which nobody is sent, counts as one of the first bucket.
        buckets = weight.bucket if len(weight.bucket) else [0]
        first[unit] = min(int(buckets[0]), first.get(unit, plan.exchanges))
        last[unit] = max(int(buckets[-1]), last.get(unit, 0))
        slices = weight.slices
        unit_bytes[unit] = unit_bytes.get(unit, 0) + slices.size_bytes @ slices.wants

    opened = np.zeros((plan.exchanges, plan.world), np.int64)
    for unit, number in first.items():
        opened[number] += unit_bytes[unit]
    total_bytes = opened.cumsum(0)
    return first, last, total_bytes.max(1).tolist()
