"""What a pipeline keeps of what it sends."""

import pytest
from conftest import DEADLINE_S, Worlds

from longshift.layout.layout import Layout


@pytest.mark.parametrize("layout", ["pp2", "pp2.gpipe", "pp4.gpipe", "pp2.v2"])
def test_few_of_the_tensors_that_a_rank_sends_are_there_at_one_time(worlds: Worlds, layout: str):
    """However many micro-batches there are."""
    stages, micros = Layout.parse(layout).pp, 12
    found = worlds(stages).call("streams:pipelined", DEADLINE_S, layout=layout, micros=micros)
    assert all(right for _, right in found)
    assert max(most for most, _ in found) <= stages + 2  # p + 1 on their way, and the one being made
    assert max(most for most, _ in found) > 1
