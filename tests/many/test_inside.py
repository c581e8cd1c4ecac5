"""Bytes that operations hold, leave and send, as `schedule.inside` says, against those of torch's own tensors in ranks."""

from collections.abc import Iterator

import pytest
from conftest import DEADLINE_S, Worlds
from inside_measured import LENGTHS, PARTS, SPECS, TURNS

from longshift.layout.layout import Layout
from longshift.schedule import inside
from longshift.schedule.inside import Inside, Place, Transport
from longshift.schedule.sequence import token_order

LAYOUTS = ("dp1", "tp2", "u2", "ring2", "u2.tp2", "ring2.tp2")
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def predicted(spec: str, text: str, rank: int, dtype: str, transport: Transport = "gloo") -> dict[str, Inside]:
    layout = Layout.parse(text)
    place = Place(SPECS[spec], layout, layout.coord(rank), BYTES[dtype], transport)
    order = token_order(LENGTHS, layout.ring, layout.ulysses * layout.tp)
    found = {f"{part} {turn}": inside.inside(place, order, part, turn) for part in PARTS for turn in TURNS}
    return found | {"loss": inside.loss(place, order)}


def faults(measured: dict[str, dict], told: dict[str, Inside]) -> Iterator[str]:
    """Peaks within [0.98, 1] of the prediction; what is kept and sent, exactly."""
    assert measured.keys() == told.keys()
    for name, found in measured.items():
        if not 0.98 * told[name].peak <= found["peak"] <= told[name].peak:
            yield f"{name}: peak {found['peak']}, said to be {told[name].peak}"
        for what in ("output", "graph", "grads", "sent"):
            if found[what] != getattr(told[name], what):
                yield f"{name}: {what} {found[what]}, said to be {getattr(told[name], what)}"


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_operations_hold_leave_and_send_what_is_said(worlds: Worlds, spec: str, layout: str, dtype: str):
    answers = worlds(Layout.parse(layout).world).call("inside_measured:operations", DEADLINE_S, spec=spec, layout=layout, dtype=dtype)
    wrong = [f"rank {rank}: {fault}" for rank, found in enumerate(answers) for fault in faults(found, predicted(spec, layout, rank, dtype))]
    assert not wrong, "\n".join(wrong)
