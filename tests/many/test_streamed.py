"""What a streamed layout is said to put, fetch and keep waiting is what it does."""

import pytest
from forked import DEADLINE_S, Worlds
from trial import Trial

from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Rope

SPEC = ModelSpec("llama", 61, 24, 5, 6, 3, 4, 40, 128, rope=Rope())
TRIAL = Trial(SPEC, lengths=((61,),), capacity=61)


@pytest.mark.parametrize(
    "layout",
    [
        "chunk13.disk",
        "chunk61.disk",
        "chunk13.disk.every1",
        "chunk13.disk.every1.kv-offload",
        "chunk13.disk.kv-offload.fpdt",
        "chunk13.disk.fpdt",
        "recompute-full.disk",
        "u2.tp2.chunk16.disk.kv-offload",
        "ring2.recompute-full.disk",
        "ring2.u2.recompute-full.disk",
        "ring2.chunk13.disk.every1",
        "pp2.chunk13.disk",
        "pp2.v2.chunk13.disk",
        "chunk13.every2.disk",
        "chunk13.every3.disk",
        "u2.chunk16.every2.disk.kv-offload.fpdt",
    ],
)
def test_bytes_are_those_predicted(worlds: Worlds, layout: str):
    found = worlds(Layout.parse(layout).world).call("streams:moved_and_predicted", DEADLINE_S, trial=TRIAL.to_json(), layout=layout)
    for moved, predicted in found:
        assert {name: moved[name] for name in predicted} == predicted
