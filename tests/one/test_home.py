"""Initial weights: the same values for any box, and a box costs what it holds."""

from itertools import product

import pytest
import torch

from longshift.layout.box import Box
from longshift.spec.model import ModelSpec
from longshift.state import initial_weights
from longshift.state.initial_weights import BLOCK, random_source

SPEC = ModelSpec("llama", vocab=70, width=1300, layers=1, heads=4, kv_heads=2, head_width=325, ffn=70, max_positions=64, init_std=0.1)
HEAD, DOWN, NORM = "lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
WHOLE = Box.whole((70, 1300))
CUTS = [(0, 7), (7, 16), (16, 33), (33, 33), (33, 70)], [(0, 511), (511, 1024), (1024, 1300)]


def source(seed: int = 0, dtype: torch.dtype = torch.float32):
    return random_source(SPEC, seed, dtype)


def test_any_boxes_put_together_are_the_whole_weight():
    """Along rows, columns and both, on and off the edges of blocks; each box by a source of its own, as on ranks."""
    whole = source()(HEAD, WHOLE)
    for rows, columns in (*product(*CUTS), *product(CUTS[0], [(0, 1300)]), *product([(0, 70)], CUTS[1])):
        box = Box((rows[0], columns[0]), (rows[1], columns[1]))
        assert torch.equal(source()(HEAD, box), whole[box.within(WHOLE)]), box
    tall = source()(DOWN, Box.whole((1300, 70)))
    assert torch.equal(source()(DOWN, Box((600, 3), (1300, 5))), tall[600:, 3:5])


def test_values_are_drawn_as_asked_and_no_block_is_drawn_twice():
    whole = source()(HEAD, WHOLE)
    assert abs(float(whole.std()) - 0.1) < 2e-3
    assert abs(float(whole.mean())) < 2e-3
    assert float(source()(DOWN, Box.whole((1300, 70))).std()) == pytest.approx(0.1 / 2**0.5, rel=0.02)  # 1/sqrt(2 L)
    assert len(whole.unique()) > 0.95 * whole.numel()  # float32 has few numbers
    assert not torch.equal(source(1)(HEAD, WHOLE), whole)
    assert not torch.equal(source()("model.embed_tokens.weight", WHOLE), whole)
    assert torch.equal(source(dtype=torch.bfloat16)(HEAD, WHOLE), whole.bfloat16())
    assert torch.equal(source()(NORM, Box((5,), (9,))), torch.ones(4))


def test_a_box_costs_what_it_holds_and_at_most_a_block_around_it(monkeypatch):
    """Of a weight that no machine could draw whole."""
    drawn, blocks = [], initial_weights._blocks

    def counted(box: Box, shape: tuple[int, ...]):
        for number, block in blocks(box, shape):
            drawn.append(block.elements)
            yield number, block

    monkeypatch.setattr(initial_weights, "_blocks", counted)
    huge = ModelSpec("llama", vocab=1 << 24, width=1 << 20, layers=1, heads=4, kv_heads=2, head_width=4, ffn=4, max_positions=4)
    for rows, columns in ((8, 8), (1, 40_000), (3_000, 1)):
        drawn.clear()
        start = ((1 << 24) - rows - 3, (1 << 19) - 5)
        box = Box(start, (start[0] + rows, start[1] + columns))
        assert random_source(huge, 0, torch.float32)(HEAD, box).shape == (rows, columns)
        assert sum(drawn) <= (rows + 2 * BLOCK[0]) * (columns + 2 * BLOCK[1])
