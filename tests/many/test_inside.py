"""Bytes that operations hold, leave and send, as `schedule.inside` says, against those of torch's own tensors in ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DEADLINE_S, Worlds
from inside_measured import LENGTHS, PARTS, SPECS, TURNS

from longshift.layout.layout import Layout
from longshift.schedule import inside
from longshift.schedule.inside import Inside, Place, Transport
from longshift.schedule.sequence import token_order

LAYOUTS = {"dp1": 0, "tp2": 1, "u2": 1, "ring2": 0, "u2.tp2": 2, "ring2.tp2": 1, "tp3": 1, "u3": 2, "ring3": 1}  # which rank on a fake device
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
FAKE = [
    {"spec": spec, "layout": layout, "rank": rank, "dtype": dtype}
    for spec in SPECS
    for layout, rank in LAYOUTS.items()
    for dtype in ("bfloat16", "float32")
]


def predicted(spec: str, layout: str, rank: int, dtype: str, transport: Transport = "gloo") -> dict[str, Inside]:
    parsed = Layout.parse(layout)
    place = Place(SPECS[spec], parsed, parsed.coord(rank), BYTES[dtype], transport)
    order = token_order(LENGTHS, parsed.ring, parsed.ulysses * parsed.tp)
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


@pytest.fixture(scope="module")
def on_fake_device() -> list[dict]:
    """What a process with a device that is not there measured, by case; one for all, as the device stays known to its process."""
    program = Path(__file__).with_name("inside_measured.py")
    done = subprocess.run([sys.executable, program, json.dumps(FAKE)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(FAKE)), ids=lambda number: " ".join(map(str, FAKE[number].values())))
def test_operations_on_a_fake_device_do_as_is_said(number: int, on_fake_device: list[dict]):
    wrong = list(faults(on_fake_device[number], predicted(**FAKE[number], transport="nccl")))
    assert not wrong, "\n".join(wrong)
