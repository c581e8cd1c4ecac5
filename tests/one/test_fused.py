"""Strips of a fused buffer are, bit for bit, the views of its slots one by one."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.layout.placement import Bucket, assemble, buckets, local_boxes, local_shape
from longshift.spec.model import ModelSpec
from longshift.state.strip_views import Strips

SPECS = [
    ModelSpec("llama", 37, 24, 3, 6, 2, 4, 29, 16, tied=True),
    ModelSpec("llama", 64, 32, 2, 4, 4, 8, 48, 16, qkv_bias=True),
    ModelSpec(
        "gpt2",
        *(53, 20, 2, 5, 5, 4, 21, 16),
        tied=True,
        norm="layer",
        fused_qkv=True,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
]
specs = st.sampled_from(SPECS)
layouts = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
    tp=st.integers(1, 4),
    pp=st.integers(1, 2),
    ulysses=st.just(1),
    zero=st.integers(0, 3),
)


def tensors_of(spec: ModelSpec, layout: Layout, bucket: Bucket, rank: int) -> tuple[dict[str, tuple[Box, ...]], dict[str, Tensor]]:
    """The rank's boxes and tensors of a bucket's weights, of distinct numbers."""
    boxes = {piece.name: local_boxes(spec.by_name[piece.name], layout, layout.coord(rank)) for piece in bucket.pieces}
    shapes = {name: local_shape(spec.by_name[name], local) for name, local in boxes.items()}
    tensors, first = {}, 1
    for name, shape in shapes.items():
        tensors[name] = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        first += tensors[name].numel()
    return boxes, tensors


def by_slot(spec: ModelSpec, bucket: Bucket, boxes: dict[str, tuple[Box, ...]]) -> Iterator[tuple[str, int, int, Box, tuple[slice, ...]]]:
    """The definition: weight, slot, first element, box, and where it lies in the rank's tensor, of every holder's share of every piece."""
    for slot in range(len(bucket.holders) if bucket.sharded else 1):
        start = 0
        for name, box in bucket.home(bucket.holders[slot]):
            if box:
                yield name, slot, start, box, assemble(box, boxes[name], spec.by_name[name].dim)
            start += box.elements


@settings(max_examples=150, deadline=None)
@given(specs, layouts, st.integers(0, 2**20), st.booleans())
def test_both_ways_are_those_of_single_slots(spec: ModelSpec, layout: Layout, choice: int, without: bool):
    if faults(spec, layout, None):
        layout = replace(layout, tp=1, pp=1)
    some = buckets(spec, layout)
    bucket = some[choice % len(some)]
    rank = bucket.holders[choice % len(bucket.holders)]
    boxes, tensors = tensors_of(spec, layout, bucket, rank)
    if without:
        del tensors[next(iter(tensors))]
    strips = Strips(bucket, rank, boxes, spec)
    sizes = [sum(box.elements for _, box in bucket.home(holder)) for holder in bucket.holders]
    assert strips.width == max(sizes)
    assert strips.own == sizes[bucket.holders.index(rank)]

    into = torch.zeros(strips.slots, strips.width, dtype=torch.float64)
    for name in tensors:
        for strip in strips.of[name]:
            strip.in_buffer(into).copy_(strip.in_weight(tensors[name]))
    expected = torch.zeros_like(into)
    for name, slot, start, box, at in by_slot(spec, bucket, boxes):
        if name in tensors:
            expected[slot, start : start + box.elements] = tensors[name][at].flatten()
    assert torch.equal(into, expected)

    buffer = torch.randn(into.shape, dtype=torch.float64)
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in own:
        for strip in strips.of[name]:
            strip.in_weight(own[name]).copy_(strip.in_buffer(buffer))
    for name, slot, start, box, at in by_slot(spec, bucket, boxes):
        if name in tensors:
            tensors[name][at] = buffer[slot, start : start + box.elements].view(box.shape)
    assert all(torch.equal(own[name], tensors[name]) for name in own)


def test_the_number_of_strips_does_not_grow_with_the_holders():
    """Rows that divide are one strip a piece; of those that do not, each adds one to the pieces behind it."""
    even = ModelSpec("llama", 1024, 512, 1, 64, 64, 8, 1024, 16)
    uneven = replace(even, ffn=1000)
    for spec, most in ((even, 1), (uneven, 4)):
        for dp in (8, 64, 512):
            (bucket,) = (b for b in buckets(spec, Layout(dp=dp, zero=3)) if b.unit == 1)
            strips = Strips(
                bucket, 0, {p.name: local_boxes(spec.by_name[p.name], Layout(), Layout().coord(0)) for p in bucket.pieces}, spec
            )
            assert len(bucket.pieces) <= len(strips.strips) <= most * len(bucket.pieces)
            assert strips.slots == dp
