"""Blocks that share a scale: which box saves which, and which of them a home cuts, against a count of every element."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product

import pytest

from longshift.layout.blocks import BLOCK, blocks_starting_in, cut_blocks, scales_of, widen_to_blocks
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets, moving_unit
from longshift.spec.families import preset

SPEC = replace(
    preset("tiny-llama"),
    **{
        "family": "qwen2",
        "qkv_bias": True,
        "vocab": 257,
        "width": 40,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 40,
        "ffn": 300,
    },
)
LAYOUTS = ("dp1", "dp2.z0", "dp3.z1", "dp4.z3", "tp2", "tp4", "dp2.tp2.z3", "pp2.dp2.z2", "pp2.tp2")


def rows(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(first, last) for first, last in zip(box.start[:-1], box.stop[:-1]))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_blocks_are_those_with_several_owners(layout: str, tied: bool):
    spec, home = replace(SPEC, tied=tied), Layout.parse(layout)
    parts, owners = defaultdict(set), defaultdict(set)  # boxes and ranks of each block
    for bucket in buckets(spec, home):
        for rank in bucket.holders:
            for name, box in bucket.home(rank):
                for row in rows(box) if box else ():
                    for column in range(box.start[-1] // BLOCK, -(-box.stop[-1] // BLOCK)):
                        parts[name, row, column].add((box.start[-1], box.stop[-1]))
                        owners[moving_unit(spec, spec.by_name[name])].add(rank)
    several = {key for key, boxes in parts.items() if len(boxes) > 1}
    found, said = cut_blocks(spec, home), set()
    for unit, cut in found.items():
        assert cut.ranks == tuple(sorted(owners[unit]))
        places = list[int]()
        for name, (first, columns) in cut.places.items():
            whole = rows(Box.whole(spec.by_name[name].shape))
            said |= {(name, row, column) for row in whole for column in columns}
            places += range(first, first + len(whole) * len(columns))
        assert sorted(places) == list(range(cut.count))
    assert said == several


def test_where_ranks_have_whole_blocks_none_is_cut():
    spec = replace(SPEC, heads=8, kv_heads=4, head_width=64, width=256, ffn=512)
    assert cut_blocks(spec, Layout.parse("tp2")) == {}


@pytest.mark.parametrize("edges", [(0, 300), (0, 128, 300), (0, 40, 41, 200, 256, 300), (0, 150, 150, 300)])
def test_each_block_begins_in_one_box(edges: tuple[int, ...]):
    boxes = [Box((2, a), (5, b)) for a, b in pairwise(edges)]
    begun = sorted((box.start[-1], box.stop[-1]) for box in map(blocks_starting_in, boxes) if box)
    assert [number for first, last in begun for number in range(first, last)] == [0, 1, 2]
    for box in boxes:
        assert blocks_starting_in(box) in scales_of(box)
        assert scales_of(widen_to_blocks(box, (9, 300))) == scales_of(box)
        assert not box or box in widen_to_blocks(box, (9, 300))
