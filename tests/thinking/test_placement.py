"""Placement on one rank is what placement of the model says, and takes milliseconds on any number of ranks."""

import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from longshift.layout.layout import Coord, Layout
from longshift.layout.legal import faults
from longshift.layout.placement import boxes_on, buckets, buckets_of, local_boxes, moving_unit, stages_of
from longshift.spec.model import ModelSpec

SPECS = [
    ModelSpec("llama", 37, 24, 5, 6, 2, 4, 29, 16, tied=True),
    ModelSpec("llama", 64, 32, 4, 4, 4, 8, 48, 16, qkv_bias=True, qk_norm=True),
    ModelSpec("gpt2", 53, 20, 6, 5, 5, 4, 21, 16, tied=True, norm="layer", fused_qkv=True, gated=False, learned_positions=True),
]
layouts = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 3, 7, 30]),
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    ulysses=st.integers(1, 2),
    ring=st.integers(1, 2),
    zero=st.integers(0, 3),
    virtual=st.integers(1, 2),
)


def possible(spec: ModelSpec, layout: Layout) -> Layout:
    for other in (layout, replace(layout, virtual=1), replace(layout, virtual=1, ulysses=1), Layout(dp=layout.dp, zero=layout.zero)):
        if not faults(spec, other, None):
            return other
    raise AssertionError(layout)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SPECS), layouts, st.integers(0, 2**20))
def test_one_rank_is_what_the_whole_says(spec: ModelSpec, layout: Layout, choice: int):
    layout = possible(spec, layout)
    rank = choice % layout.world
    at, whole = layout.coord(rank), buckets(spec, layout)
    assert buckets_of(spec, layout, rank) == tuple(bucket for bucket in whole if rank in bucket.holders)
    boxes: dict[int, dict] = {}
    for param in spec.params:
        if at.pp in stages_of(spec, layout, param):
            boxes.setdefault(moving_unit(spec, param), {})[param.name] = local_boxes(param, layout, at)
    found = boxes_on(spec, layout, rank)
    assert list(found) == sorted(boxes)
    assert found == boxes
    for unit, local in found.items():
        mine = [bucket for bucket in whole if bucket.unit == unit and rank in bucket.holders]
        assert sum(box.elements for some in local.values() for box in some) == sum(bucket.elements for bucket in mine)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SPECS), layouts)
def test_shares_of_buckets(spec: ModelSpec, layout: Layout):
    """The width is the largest share; the shares tile the bucket where home is sharded."""
    for bucket in buckets(spec, layout := possible(spec, layout)):
        shares = [sum(box.elements for _, box in bucket.home(rank)) for rank in bucket.holders]
        assert [bucket.kept(rank) for rank in bucket.holders] == shares
        assert bucket.width == max(shares)
        assert sum(shares) == bucket.elements * (1 if bucket.sharded else len(shares))
        assert bucket.home(bucket.holders[-1]) == tuple(
            (p.name, p.share(len(p.holders) - 1) if bucket.sharded else p.box) for p in bucket.pieces
        )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPECS), layouts)
def test_no_rank_is_heavier_than_the_first_of_its_stage_and_tensor_coordinate(spec: ModelSpec, layout: Layout):
    layout = possible(spec, layout)

    def weights_on(rank: int) -> dict[int, tuple[int, int]]:
        """Elements that a rank computes with and keeps at home, by moving unit."""
        mine = buckets_of(spec, layout, rank)
        return {
            unit: tuple(map(sum, zip(*((b.elements, b.kept(rank)) for b in mine if b.unit == unit)))) for unit in {b.unit for b in mine}
        }

    firsts = (Coord(tp, 0, 0, 0, pp) for pp in range(layout.pp) for tp in range(layout.tp))
    heavy = {(at.pp, at.tp): weights_on(layout.rank(at)) for at in firsts}
    for rank in range(layout.world):
        at, weights = layout.coord(rank), weights_on(rank)
        assert weights.keys() == heavy[at.pp, at.tp].keys()
        for unit, (elements, kept) in weights.items():
            most_elements, most_kept = heavy[at.pp, at.tp][unit]
            assert elements == most_elements
            assert kept <= most_kept


def test_stages_of_tied_embeddings_and_interleaved_chunks():
    spec = SPECS[0]
    layout = Layout.parse("pp2.v2")
    by_unit = {param.unit: stages_of(spec, layout, param) for param in spec.params}
    assert by_unit == {0: (0, 1), 1: (0,), 2: (0,), 3: (1,), 4: (0,), 5: (1,), 6: (1,)}


def test_sixteen_thousand_ranks_take_no_longer():
    """Llama 3's 405B in 128 x 16 x 8: processor time, as the machine may be busy."""
    spec = ModelSpec("llama", 128256, 16384, 126, 128, 8, 128, 53248, 8192)
    for text in ("tp8.pp16.dp128.z1", "tp8.pp16.dp128.z3"):
        layout = Layout.parse(text)
        began = time.process_time()
        boxes, mine = boxes_on(spec, layout, 9001), buckets_of(spec, layout, 9001)
        assert time.process_time() - began < 0.3
        assert len(boxes) == len({bucket.unit for bucket in mine})
        assert sum(bucket.elements for bucket in mine) > 3e9
