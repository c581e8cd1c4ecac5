"""The bytes that `--explain` says a layout adds are the bytes that its ranks send."""

from dataclasses import replace

import pytest
from conftest import DEADLINE_S, Worlds

from longshift.explain import insertions
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Rope
from longshift.train.check import Trial

TOKENS = 64
SPEC = ModelSpec("llama", 61, 24, 1, 4, 2, 4, 40, TOKENS, rope=Rope())
TRIAL = Trial(SPEC, lengths=((TOKENS,),), precision="float32", capacity=TOKENS)
AXES = {"tensor": "tp", "Ulysses": "ulysses", "ring": "ring"}


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        "u2",
        "ring2",
        "u4",
        "ring2.tp2",
        "tp2.recompute-full",
        "u2.recompute-full",
        "ring2.recompute-full",
        *(f"{axis}2.recompute-{what}" for axis in ("tp", "u", "ring") for what in ("selective", "attention", "full.keep-output")),
        "tp2.chunk16",
        "u2.chunk16",
        "ring2.chunk16",
        "ring2.chunk64",
        "ring2.u2.chunk32.keep-input",
        "u2.tp2.chunk16.keep-input.fpdt",
        "ring2.chunk16.keep-input.fpdt",
    ],
)
def test_bytes_of_a_block_are_those_explained(worlds: Worlds, layout: str):
    """Three layers less one are two blocks, whatever the ends of the model send."""
    world, sent = worlds(Layout.parse(layout).world), []
    for layers in (1, 3):
        trial = replace(TRIAL, spec=replace(SPEC, layers=layers))
        sent.append(world.call("traffic_counted:sent_by_axis", DEADLINE_S, trial=trial.to_json(), layout=layout)[0])
    counted = {axis: (sent[1][axis] - sent[0][axis]) // 2 for axis in sent[1]}
    told = {AXES[i.what.split(":")[0]]: i.bytes_out for i in insertions(SPEC, Layout.parse(layout), TOKENS, 4)}
    assert counted == told


def test_bytes_of_a_block_that_is_played_again_are_those_explained(worlds: Worlds):
    """Blocks 1 to 3 and 4 alone, less 1 and 2 and 3 alone."""
    world, sent, how = worlds(4), [], "ring2.u2.chunk16.every{}.keep-input"
    for layers in (4, 3):
        trial = replace(TRIAL, spec=replace(SPEC, layers=layers))
        sent.append(world.call("traffic_counted:sent_by_axis", DEADLINE_S, trial=trial.to_json(), layout=how.format(layers - 1))[0])
    told = {AXES[i.what.split(":")[0]]: i.bytes_out for i in insertions(SPEC, Layout.parse(how.format(2)), TOKENS, 4)}
    assert {axis: sent[0][axis] - sent[1][axis] for axis in sent[0]} == told
