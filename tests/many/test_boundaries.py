"""What a pipeline keeps of what it sends."""

import pytest
from forked import DEADLINE_S, Worlds
from trial import Trial

from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Rope

SPEC = ModelSpec("llama", 61, 24, 5, 6, 3, 4, 40, 128, rope=Rope())


@pytest.mark.parametrize("layout", ["pp2", "pp2.gpipe", "pp4.gpipe", "pp2.v2"])
def test_few_of_the_tensors_that_a_rank_sends_are_there_at_one_time(worlds: Worlds, layout: str):
    """However many micro-batches there are."""
    stages, micros = Layout.parse(layout).pp, 12
    trial = Trial(SPEC, ((7,) * micros,), capacity=7)
    found = worlds(stages).call("streams:pipelined", DEADLINE_S, trial=trial.to_json(), layout=layout)
    assert all(right for _, right in found)
    assert max(most for most, _ in found) <= stages + 1  # on their way
    assert max(most for most, _ in found) > 1
