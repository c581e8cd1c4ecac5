"""Layout's text form and rank maths, Box algebra, and the parameter table's cuts."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.errors import UsageError
from longshift.layout import axes
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec
from longshift.spec.param import Part, share

AXES = axes.names()
degree = st.integers(1, 3)
layouts = st.builds(
    Layout,
    **dict.fromkeys(("dp", "pp", "tp", "ulysses", "ring", "virtual"), degree),
    zero=st.integers(0, 3),
    order=st.sampled_from(["gpipe", "1f1b", "vertical"]),
    recompute=st.sampled_from(["none", "selective", "full", "auto"]),
    kept_blocks=st.integers(0, 9),
    stages=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    chunk=st.sampled_from([0, 7, 64 << 10]),
    every=st.integers(0, 9),
)


@given(layouts)
def test_text_is_the_inverse_of_parse(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text",
    [
        "dp2.tp2",
        "pp2.dp2.tp2.z3",
        "ring2.u4",
        "pp2:3-2.gpipe",
        "pp2.v2",
        "dp4.recompute-full",
        "recompute-full.disk",
        "dp1",
        "recompute-full.keep8.disk",
        "dp2.chunk64K.host",
    ],
)
def test_canonical_text_stays(text):
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a layout word"),
        ("ddp2", "'ddp2' is not a layout word; did you mean 'dp2'"),
        ("dp2.tp", "'tp' is not a layout word; did you mean 'tp2'?"),
        ("chunk64K.evry4", "'evry4' is not a layout word; did you mean 'every4'?"),
        ("dp4.zero3", "'zero3' is not a layout word; did you mean 'z3'?"),
        ("ulysses8", "'ulysses8' is not a layout word; did you mean 'u8'?"),
        ("chunks64K", "'chunks64K' is not a layout word; did you mean 'chunk64K'?"),
        ("recompute", "'recompute' is not a layout word; did you mean 'recompute-selective'?"),
        ("1f1", "'1f1' is not a layout word; did you mean '1f1b'?"),
        ("dp0", "a degree is at least 1"),
        ("z4", "z4 does not exist; z0 replicated"),
        ("dp2.dp2", "sets dp a second time"),
        ("gpipe.1f1b", "sets order a second time"),
        ("tp2:1-1", "only pp takes a list of layers per stage"),
        ("recompute-ful", "did you mean 'recompute-full'"),
        ("dp2 tp2", "is not a layout word"),
        ("dp-2", "is not a layout word"),
    ],
)
def test_bad_text_is_refused_and_explained(text, message):
    with pytest.raises(UsageError, match=message):
        Layout.parse(text)


@given(layouts)
def test_coord_and_rank_are_inverses_and_tp_varies_fastest(layout):
    coords = [layout.coord(rank) for rank in range(layout.world)]
    assert [layout.rank(c) for c in coords] == list(range(layout.world))
    expected = product(*(range(layout.degree(axis)) for axis in reversed(AXES)))
    assert [tuple(getattr(c, axis) for axis in reversed(AXES)) for c in coords] == list(expected)


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(layout, along):
    groups = layout.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert all(len(group) == np.prod([layout.degree(a) for a in along], dtype=int) for group in groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert layout.ranks(*along, of=group[-1]) == group
        others = [axis for axis in AXES if axis not in along]
        assert len({tuple(getattr(layout.coord(rank), axis) for axis in others) for rank in group}) == 1


def test_ranks_outside_are_refused():
    layout = Layout.parse("dp2.tp2")
    with pytest.raises(UsageError, match=r"rank 4 is outside layout dp2\.tp2, which has ranks 0 to 3"):
        layout.coord(4)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 10))
def test_units_of_all_stages_are_the_model_once_in_order(pp, virtual, extra):
    layers = pp * virtual + extra
    layout = Layout(pp=pp, virtual=virtual)
    chunks = [layout.units_of(layers, coord) for coord in range(pp)]
    in_order = [unit for chunk in range(virtual) for coord in range(pp) for unit in chunks[coord][chunk]]
    assert in_order == list(range(layers + 2))
    sizes = [stop - start for start, stop in layout.layers_of(layers)]
    assert max(sizes) - min(sizes) <= 1


def test_explicit_stages_are_kept_and_checked():
    assert Layout.parse("pp2:1-4").layers_of(5) == ((0, 1), (1, 5))
    assert Layout.parse("pp2:1-4").units_of(5, 1) == ((2, 3, 4, 5, 6),)
    with pytest.raises(UsageError, match="must be 2 numbers that add up to 6"):
        Layout.parse("pp2:1-4").layers_of(6)


boxes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), min_size=2, max_size=2).map(
    lambda pairs: Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
)


def cells(box):
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop))))


@given(boxes, boxes)
def test_box_algebra_is_that_of_sets_of_cells(a, b):
    assert cells(a & b) == cells(a) & cells(b)
    assert (a & b).elements == len(cells(a) & cells(b))
    assert bool(a & b) == bool(cells(a) & cells(b))
    assert min((a & b).shape) >= 0
    assert Box.parse(str(a)) == a
    if a:
        assert (a in b) == (cells(a) <= cells(b))
    if a in b:
        held = np.zeros(b.shape)
        held[a.within(b)] = 1
        assert held.sum() == a.elements


def test_box_within_picks_global_coordinates():
    outer = Box((2, 3), (6, 9))
    full = np.arange(100).reshape(10, 10)
    held = full[2:6, 3:9]
    inner = outer.cut(0, 3, 5)
    np.testing.assert_array_equal(held[inner.within(outer)], full[3:5, 3:9])
    with pytest.raises(ValueError, match="is not inside"):
        Box((0, 0), (1, 1)).within(outer)
    assert Box.whole((4, 5)) == Box((0, 0), (4, 5))


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_tile_and_are_nearly_equal(total, parts):
    shares = [share(total, parts, i) for i in range(parts)]
    assert [x for a, b in shares for x in range(a, b)] == list(range(total))
    assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 36))
def test_each_coordinate_has_just_the_key_value_heads_of_its_query_heads(kv_heads, group, tp):
    heads = kv_heads * group
    if tp > heads:
        return
    part = Part(kv_heads, 4, heads=heads)
    for index in range(tp):
        first, last = share(heads, tp, index)
        needed = {q // group for q in range(first, last)}
        start, stop = part.rows(tp, index)
        assert (start % 4, stop % 4) == (0, 0)
        assert set(range(start // 4, stop // 4)) == needed


LLAMA = ModelSpec("llama", vocab=257, width=48, layers=3, heads=6, kv_heads=2, head_width=8, ffn=101, max_positions=64)
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GPT2_WORDS = {"fused_qkv": True, "gated": False, "learned_positions": True, "rope": None, "tied": True, "norm": "layer", **BIASES}
GPT2 = replace(LLAMA, family="gpt2", kv_heads=6, **GPT2_WORDS)
FULL = replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True, tied=True)


@pytest.mark.parametrize("spec", [LLAMA, GPT2, FULL], ids=["llama", "gpt2", "all switches"])
def test_the_parameter_table_is_consistent(spec):
    assert len(spec.by_name) == len(spec.params)
    assert {p.unit for p in spec.params} == set(range(spec.units))
    for param in spec.params:
        if param.dim is None:
            assert param.parts == ()
        else:
            assert sum(part.units * part.size for part in param.parts) == param.shape[param.dim]
    head = spec.of_unit(spec.layers + 1)
    assert any(p.role == ("embed" if spec.tied else "head") for p in head)
    assert sum(len(spec.of_unit(unit)) for unit in range(spec.units)) == len(spec.params) + spec.tied


def test_known_sizes():
    llama_8b = ModelSpec("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192)
    gpt2 = ModelSpec("gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024, **GPT2_WORDS)
    assert llama_8b.parameters == 8_030_261_248
    assert gpt2.parameters == 124_439_808
    embeddings, attention = 128256 * 4096, 12 * 32 * 4096
    assert llama_8b.flops_per_token(context=100) == 6 * (llama_8b.parameters - embeddings) + attention * 100


def test_heads_that_do_not_group_are_refused():
    with pytest.raises(ValueError, match="6 query heads do not divide into 4"):
        replace(LLAMA, kv_heads=4)
