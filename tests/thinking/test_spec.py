"""The parameter table in numbers, and how tensor parallelism cuts it."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.spec.families import PRESETS
from longshift.spec.model import ModelSpec
from longshift.spec.param import Part, share

PUBLIC_SIZES = {
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
}


@pytest.mark.parametrize("name", PUBLIC_SIZES)
def test_presets_have_the_published_number_of_weights(name):
    assert PRESETS[name].parameters == PUBLIC_SIZES[name]


@pytest.mark.parametrize("name", PRESETS)
def test_table_names_every_weight_once_and_gives_it_to_its_unit(name):
    spec = PRESETS[name]
    assert len(spec.by_name) == len(spec.params)
    for unit in range(spec.units):
        roles = [p.role for p in spec.of_unit(unit)]
        assert roles
        assert len(set(roles)) == len(roles)
    tied = [p.name for p in spec.of_unit(0) if p in spec.of_unit(spec.units - 1)]
    assert len(tied) == spec.tied


@pytest.mark.parametrize("every", [0, 1, 2, 3, 7])
def test_one_block_is_told_for_all_that_compute_so(every):
    spec = replace(PRESETS["tiny-llama"], layers=6, nope_every=every)
    for block in range(1, 7):
        assert spec.rope_of(spec.like(block)) == spec.rope_of(block)
        assert spec.like(block) == next(other for other in range(1, 7) if spec.rope_of(other) == spec.rope_of(block))


@given(total=st.integers(0, 500), parts=st.integers(1, 20))
def test_shares_tile_and_differ_by_one_at_most(total, parts):
    spans = [share(total, parts, i) for i in range(parts)]
    assert spans[0][0] == 0
    assert spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    sizes = [b - a for a, b in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(kv=st.integers(1, 6), group=st.integers(1, 6), width=st.integers(1, 4), tp=st.integers(1, 8))
def test_key_value_rows_are_exactly_those_that_the_query_heads_need(kv, group, width, tp):
    heads = kv * group
    query, keys = Part(heads, width), Part(kv, width, heads=heads)
    for coord in range(tp):
        first, last = (row // width for row in query.rows(tp, coord))
        needed = {head // group for head in range(first, last)}
        start, stop = (row // width for row in keys.rows(tp, coord))
        if needed:
            assert set(range(start, stop)) == needed


def test_parts_cover_the_cut_dim():
    for spec in PRESETS.values():
        for p in spec.params:
            if p.dim is not None:
                assert sum(part.units * part.size for part in p.parts) == p.shape[p.dim]


def test_flops_follow_six_per_weight_and_the_attended_context():
    spec = PRESETS["llama-2-7b"]
    matmul = spec.parameters - 32000 * 4096
    assert spec.flops_per_token(0) == 6 * matmul
    assert spec.flops_per_token(2048) - spec.flops_per_token(0) == 12 * 32 * 4096 * 2048
    gpt2 = PRESETS["gpt2"]
    assert gpt2.flops_per_token(0) == 6 * (gpt2.parameters - 1024 * 768)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 query heads do not divide into 2"):
        ModelSpec("llama", 257, 40, 1, 5, 2, 8, 64, 64)


def test_elements_are_the_product_of_the_shape():
    assert all(p.elements == math.prod(p.shape) for p in PRESETS["tiny-gpt2"].params)
