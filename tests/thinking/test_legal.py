"""Legality: what can be computed is let through, everything else is refused with its arithmetic and a way that works."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.layout.legal import faults, refuse
from longshift.spec.model import ModelSpec

SPEC = ModelSpec("llama", vocab=257, width=48, layers=5, heads=6, kv_heads=2, head_width=8, ffn=101, max_positions=128)


def only_fault(text, spec=SPEC, world=None, max_tokens=None):
    found = faults(spec, Layout.parse(text), world, max_tokens)
    assert len(found) == 1, found
    return found[0]


def test_a_document_of_too_many_chunks():
    assert only_fault("dp2.chunk100.disk", max_tokens=10**6) == (
        "documents of 1000000 tokens are 10000 chunks of 100, whose pairs are too many: at most 1024, as in dp2.chunk1K.disk"
    )
    (fault,) = faults(SPEC, Layout.parse("chunk64"), None, 2**14, 2**24)
    assert fault == (
        "documents of 16384 tokens are 256 chunks of 64, in packs of 16777216 of 262144, whose pairs are too many: at most 1024 x 1024, "
        "as in chunk512"
    )
    assert faults(SPEC, Layout.parse("chunk512"), None, 2**14, 2**24) == ()
    assert faults(SPEC, Layout.parse("chunk1K"), None, 2**20) == faults(SPEC, Layout.parse("chunk-auto"), None, 2**30) == ()


def test_eight_bits_want_blocks_that_no_cut_divides():
    spec = replace(SPEC, width=300, heads=8, kv_heads=4, head_width=64, ffn=768)
    told = "inside a block of 128 that shares a scale under precision float8: try"
    for tp, found in {
        1: (),
        2: (),
        3: (f"tp3 cuts model.layers.0.self_attn.q_proj.weight {told} tp2",),
        4: (f"tp4 cuts model.layers.0.self_attn.k_proj.weight {told} tp2",),  # one head of 64 each
        8: (f"tp8 cuts model.layers.0.self_attn.q_proj.weight {told} tp2",),
    }.items():
        assert faults(spec, Layout(tp=tp), None, float8=True) == found
        assert not faults(spec, Layout(tp=tp), None)
    wide = replace(spec, head_width=128, ffn=1024)
    assert not faults(wide, Layout(tp=4), None, float8=True)
    assert "k_proj" in faults(wide, Layout(tp=8), None, float8=True)[0]  # two ranks to a head
    assert "gate_proj" in faults(replace(wide, ffn=600), Layout(tp=4), None, float8=True)[0]
    assert not faults(replace(wide, ffn=600), Layout(dp=2, ulysses=4, pp=5), None, float8=True)
    assert not faults(replace(spec, ffn=356), Layout(tp=1), None, float8=True)
    assert faults(spec, Layout(tp=8), 4, float8=True)[0].endswith("try dp2.tp2 or dp4")
    assert faults(spec, Layout(tp=8), 4)[0].endswith("try tp4 or dp2.tp2")


@pytest.mark.parametrize(
    "text",
    [
        "dp1",
        "dp3.z3",
        "tp6",
        "tp4",
        "tp5.u1",
        "u6",
        "tp2.u3",
        "tp4.u1.ring7",
        "pp5",
        "pp2:4-1",
        "pp2.v2",
        "pp2:2-1-1-1.v2",
        "pp4.gpipe",
    ],
)
def test_uneven_is_possible(text):
    layout = Layout.parse(text)
    assert faults(SPEC, layout, layout.world, max_tokens=10**6) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp7", "tp7 shares 6 query heads among 7 ranks, which leaves some none: at most tp6"),
        (
            "pp2.vertical",
            "vertical takes all micro-batches through a block before the next, and stages wait for each: drop vertical, or pp and v",
        ),
        ("chunk1K.vertical", "vertical is said of packs that are computed whole, and this layout has chunks: drop it"),
        ("keep2", "keep2: the blocks of this layout keep all anyway; drop it, or add recompute-full"),
        (
            "recompute-selective.keep2",
            "keep2: the blocks of this layout keep all but attention's inside anyway; drop it, or add recompute-full",
        ),
        ("recompute-auto.keep2", "recompute-auto chooses how many blocks keep all: drop keep2"),
        ("chunk1K.keep2", "keep2 is said of blocks that are computed whole, and this layout has chunks: drop it"),
        ("u7", "u7 shares 6 query heads among 7 ranks: at most u6; ring has no such limit"),
        ("u4.tp2", "u4 shares 3 query heads after tp2 (of 6) among 4 ranks: at most u3, or tp1 with u4; ring has no such limit"),
        ("u2.tp4", "u2 shares 1 query head after tp4 (of 6) among 2 ranks: at most u1, or tp3 with u2; ring has no such limit"),
        ("pp6", "pp6 makes 6 stages of at least one block, the model has 5: at most pp5"),
        ("pp4.v2", "pp4.v2 makes 4 x 2 = 8 stages of at least one block, the model has 5: at most pp2.v2"),
        ("pp2.v3", "pp2.v3 makes 2 x 3 = 6 stages of at least one block, the model has 5: at most pp2.v2"),
        ("pp3.v2", "pp3.v2 makes 3 x 2 = 6 stages of at least one block, the model has 5: at most pp2.v2"),
        ("pp3.v3", "pp3.v3 makes 3 x 3 = 9 stages of at least one block, the model has 5: at most pp3"),
        ("pp2:3-3", "pp2:3-3 has 3 + 3 = 6 blocks, the model has 5: try pp2:3-2"),
        ("pp2:5-0", "pp2:5-0 has a stage without a block: try pp2:3-2"),
        ("pp2:1-2-2.v2", "pp2:1-2-2 has 3 stages, 4 are needed: try pp2:2-1-1-1"),
        ("pp2:4", "pp2:4 has 1 stage, 2 are needed and 4 = 4 blocks, the model has 5: try pp2:3-2"),
        ("every4", "every4 is said of a layout in chunks, and this one has none: add chunk64K, say"),
        ("pp2.v2.gpipe", "gpipe and v2 contradict: model chunks are what 1F1B interleaves; drop gpipe or v2"),
        ("v2", "v2 interleaves the model chunks of several pipeline ranks, and pp is 1: drop v2 or add pp2"),
    ],
)
def test_what_is_impossible_is_explained(text, message):
    assert only_fault(text) == message


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("dp2.tp2", 2, "dp2.tp2 needs 2 x 2 = 4 ranks, 2 are here: try tp2 or dp2"),
        ("dp2.tp2", 1, "dp2.tp2 needs 2 x 2 = 4 ranks, 1 is here: try dp1"),
        ("dp1", 2, "dp1 needs 1 rank, 2 are here: try dp2"),
        ("tp2", 4, "tp2 needs 2 ranks, 4 are here: try dp2.tp2 or tp4"),
        ("tp4", 16, "tp4 needs 4 ranks, 16 are here: try dp4.tp4 or dp8.tp2"),  # tp8 and tp16 have no heads
        ("pp2:3-2.z3", 3, "pp2:3-2.z3 needs 2 ranks, 3 are here: try pp3.z3 or dp3.z3"),
        ("pp2.v2", 1, "pp2.v2 needs 2 ranks, 1 is here: try dp1"),
        ("ring4.u2", 6, "ring4.u2 needs 4 x 2 = 8 ranks, 6 are here: try ring3.u2 or ring2.u3"),
    ],
)
def test_a_wrong_world_names_the_nearest_layouts(text, world, message):
    assert only_fault(text, world=world) == message


def test_documents_longer_than_the_model_reaches():
    positions = replace(SPEC, learned_positions=True)
    assert "learned 128 positions: data.max_len at most 128" in only_fault("dp1", positions, max_tokens=129)
    assert faults(positions, Layout(), 1, 128) == faults(replace(SPEC, sliding_window=16), Layout(), 1, 4096) == ()
    assert faults(SPEC, Layout(), 1, 10**9) == ()


def test_small_feed_forward_and_vocabulary_bound_the_tensor_degree():
    tiny = replace(SPEC, ffn=2, vocab=2)
    found = faults(tiny, Layout(tp=3), 3)
    assert ["feed-forward columns" in f for f in found] == [True, False]
    assert ["vocabulary rows" in f for f in found] == [False, True]


def test_a_norm_over_all_keys_wants_each_of_them_on_one_rank():
    whole = replace(SPEC, qk_norm_whole=True)
    assert "some of 2 key/value heads to two ranks" in only_fault("tp3", whole)
    assert only_fault("tp6", whole).endswith("try tp2")
    assert faults(whole, Layout(tp=2), 2) == faults(replace(whole, kv_heads=6), Layout(tp=6), 6) == ()
    assert faults(replace(whole, kv_heads=6), Layout(tp=4), 4) == ()  # shares are uneven, but whole


def test_degrees_below_one_are_refused_before_any_arithmetic():
    for build, message in ((lambda: Layout(tp=0), "tp is a whole number of at least 1"), (lambda: Layout(zero=4), "zero=4")):
        with pytest.raises(UsageError, match=message):
            build()


def test_a_refusal_lists_all_faults_at_once():
    layout = Layout.parse("tp7.pp6")
    with pytest.raises(UsageError) as caught:
        refuse(layout, faults(SPEC, layout, 2))
    lines = str(caught.value).splitlines()
    assert lines[0] == "layout pp6.tp7 is not possible here:"
    assert len(lines) == 4
    assert all(re.match(f"  {start}", line) for start, line in zip(("pp6.tp7 needs", "tp7 shares", "pp6 makes"), lines[1:]))


degree = st.integers(1, 7)


@given(st.builds(Layout, dp=degree, pp=degree, tp=degree, ulysses=degree, ring=degree, virtual=st.integers(1, 3)), st.integers(1, 64))
def test_whatever_is_proposed_for_a_world_is_possible(layout, world):
    wrong_world = [f for f in faults(SPEC, layout, world) if " here: try " in f]
    for fault in wrong_world:
        for text in fault.rpartition(": try ")[2].split(" or "):
            assert faults(SPEC, Layout.parse(text), world) == ()


@given(st.builds(Layout, pp=degree, tp=degree, ulysses=degree, virtual=st.integers(1, 3)))
def test_a_possible_layout_leaves_no_rank_idle(layout):
    if faults(SPEC, layout, layout.world):
        return
    assert all(stop > start for start, stop in layout.layers_of(SPEC.layers))
    assert all(chunk for coord in range(layout.pp) for chunk in layout.units_of(SPEC.layers, coord))
    for param in SPEC.params:
        for part in param.parts:
            assert all(stop > start for start, stop in (part.rows(layout.tp, t) for t in range(layout.tp)))
    assert SPEC.heads // layout.tp // layout.ulysses >= 1


def test_one_rank_cuts_no_block_of_a_scale_whatever_parts_a_weight_has():
    """GPT-2 XL's fused weight of queries, keys and values has parts of 1,600 rows, which 128 does not divide: tp2 cuts blocks, tp1 none."""
    spec = ModelSpec("gpt2", 50257, 1600, 2, 25, 25, 64, 6400, 1024, norm="layer", gated=False, fused_qkv=True, learned_positions=True)
    assert faults(spec, Layout(dp=2), 2, float8=True) == ()
    assert any("inside a block of 128" in reason for reason in faults(spec, Layout(tp=2), 2, float8=True))
