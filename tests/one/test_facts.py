"""A checkpoint goes on with the function that it was trained as."""

import json
from dataclasses import asdict, fields, replace

import pytest

from longshift.spec.families import PRESETS
from longshift.trainer.facts import changed_model

SPEC = PRESETS["tiny-llama"]
SAVED = json.loads(json.dumps(asdict(SPEC)))


@pytest.mark.parametrize("field", [f.name for f in fields(SPEC)])
def test_every_field_of_the_model_is_compared(field: str):
    value = getattr(SPEC, field)
    other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value + 0.5}.get(type(value), lambda: "other")()
    assert changed_model(SAVED | {field: other}, SPEC) == [(field, other, SAVED[field])]
    assert changed_model(SAVED, SPEC) == []


def test_a_field_that_is_younger_than_the_checkpoint_had_its_default():
    old = {name: value for name, value in SAVED.items() if name not in ("qk_norm_whole", "norm_place")}
    assert changed_model(old, SPEC) == []
    assert changed_model(old, replace(SPEC, norm_place="after")) == [("norm_place", "before", "after")]
