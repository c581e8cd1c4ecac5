"""What a step will do, said before it does it: from the plans that the run plays, not beside them."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from longshift.cluster.files import cluster
from longshift.config import Config, parse_config
from longshift.explain import explain, insertions, itinerary
from longshift.layout.layout import Layout
from longshift.layout.memory import least_bytes
from longshift.spec.families import preset
from longshift.switch.traffic import traffic

BASE = """\
model: {preset: tiny-llama}
data: {train: [{corpus: python}], max_len: 4K, overlong: split}
train: {tokens_per_step: 16K, steps: 100, lr: 3e-4}
save: {dir: runs/demo}
"""
GROUPS = "layout=[{upto: 256, use: dp4}, {upto: 1K, use: u4}, {upto: 4K, use: pp2.tp2}]"


def config(*overrides: str) -> Config:
    return parse_config(BASE, overrides)


def test_layouts_that_are_cut_alike_share_their_copies():
    found = explain(config(GROUPS))
    assert found.home == "pp2.tp2.z1"
    by_layout = {group.layout: group for group in found.groups}
    order = [group.layout for group in found.groups]
    first, second = sorted(("dp4", "u4"), key=order.index)
    assert order.index(second) == order.index(first) + 1
    assert by_layout[second].weights == f"here already: the copies of {first}"
    assert by_layout[second].weights_traffic is None
    assert f"no reduction yet: {second} adds to the same sums" in by_layout[first].pruned
    assert by_layout[first].gradients_traffic is None
    assert by_layout["pp2.tp2"].weights_traffic is None
    assert "all-gather" in by_layout["pp2.tp2"].weights


@pytest.mark.parametrize("per_node", [2, 4])
def test_the_bytes_are_those_of_the_plans(per_node: int):
    run = config(GROUPS, "switch.bucket=1M")
    way, found = itinerary(run, per_node), explain(run, per_node)
    cut = way.cuts[Layout.parse("dp4")]
    order = [group.layout for group in found.groups]
    first = min(order.index("dp4"), order.index("u4"))
    before = way.cuts[Layout.parse(order[first - 1])] if first else None
    moved = found.groups[first].weights_traffic
    assert moved == traffic(way.weights(before, cut))
    assert moved is not None
    assert (moved.inter_node_bytes > 0) == (per_node == 2)
    assert found.groups[first + 1].gradients_traffic == traffic(way.sums(cut))
    weights, wanted = run.spec.parameters * 2, 4 * run.spec.parameters * 2
    assert weights <= moved.intra_node_bytes + moved.inter_node_bytes <= wanted


def test_seconds_of_a_switch_are_said_where_links_are_known():
    """Of a cluster that knows the links that are crossed; a network that was not measured is assumed, and then nothing has seconds."""
    machine = cluster("A800")
    known, unknown = explain(config(GROUPS), 2, machine), explain(config(GROUPS), 2)
    assert str(unknown.links) == "assumed, inside a node 8 times what is between"
    assert "links: assumed, inside a node 8 times" in str(unknown)
    assert "links: published, " in str(known)
    assert " s where nothing is computed meanwhile" in str(known)
    assert " s where nothing" not in str(unknown)
    moved = [group["weights_traffic"] for found in (known, unknown) for group in found.to_json()["groups"] if group["weights_traffic"]]
    assert ["overlapped_s" in traffic for traffic in moved] == [True, False]
    alone = replace(machine, links={"node": machine.links["node"]})
    assert explain(config(GROUPS), 2, alone).links == unknown.links
    assert explain(config(GROUPS), 4, alone).links.origin == "published"


def many(names: list[str]) -> Config:
    edges = ", ".join(f"{{upto: {256 * (number + 1)}, use: {name}}}" for number, name in enumerate(names))
    return config(f"layout=[{edges}]", f"data.max_len={256 * len(names)}")


def test_any_number_of_groups_of_one_layout():
    found = explain(many(["dp4"] * 17))
    assert [group.upto for group in found.groups] == [256 * number for number in range(1, 18)]
    assert sum(group.gradients_traffic is not None for group in found.groups) == 0
    assert sum("here already" in group.weights for group in found.groups) == 16


CUTS = ("dp8", "dp4.tp2", "dp2.tp4", "dp2.tp2.pp2", "dp4.pp2", "tp4.pp2", "dp2.pp4", "tp2.pp4", "pp2:1-3.dp4", "pp2:1-3.dp2.tp2")
CUTS += tuple(f"{text}.z2" for text in CUTS)


def test_more_cuts_than_an_exact_order_can_have():
    run = many(list(CUTS))
    assert len(set(itinerary(run).cuts.values())) >= 17
    found = explain(run, 2)
    assert sorted(group.upto for group in found.groups) == [256 * number for number in range(1, len(CUTS) + 1)]
    cuts = [itinerary(run).cuts[Layout.parse(group.layout)] for group in found.groups]
    changes = sum(before != after for before, after in pairwise(cuts))
    assert changes == len(set(cuts)) - 1, "a cut was left and entered again"


def test_what_the_next_switch_takes_from_is_computed_last():
    """Under ZeRO-3 at home nothing stays after the group; under ZeRO-1 the copies do, and lie as the next switch may want them."""
    way = itinerary(many(["tp2.pp2.z1", "dp4", "tp2.pp2.z3"]))
    layouts = tuple(Layout.parse(text) for text in ("tp2.pp2.z1", "dp4", "tp2.pp2.z3"))
    assert way.order(layouts) == (2, 0, 1)


def test_a_single_layout():
    (group,) = explain(config("layout=dp2.tp2.z3.recompute-full")).groups
    assert group.weights.startswith("all-gather of ")
    assert "each unit before its use" in group.weights
    assert "after every backward" in group.gradients
    assert group.pruned == ()
    (group,) = explain(config("layout=dp2", "train.precision=float32")).groups
    assert group.weights == "home's own"
    assert group.inserted == ()


def test_it_reads_and_it_parses():
    found = explain(config(GROUPS, "train.precision=bf16"))
    text = str(found)
    assert text.count("documents of up to") == 3
    assert "cast from float32 to bfloat16 at the source" in text
    assert json.loads(json.dumps(found.to_json()))["groups"][0]["least"].keys() == asdict(found.groups[0].least).keys()


def test_what_a_layout_inserts_is_what_its_file_says():
    spec, tokens = preset("tiny-llama"), 1024
    (tensor,) = insertions(spec, Layout.parse("tp2"), tokens, 2)
    assert (tensor.count, tensor.bytes_out) == (8, 8 * tokens * spec.width // 2 * 2)
    (ulysses,) = insertions(spec, Layout.parse("u2"), tokens, 2)
    elements = tokens // 2 * (2 * spec.heads + 2 * spec.kv_heads) * spec.head_width // 2
    assert (ulysses.count, ulysses.bytes_out) == (4, 2 * elements * 2)
    (ring,) = insertions(spec, Layout.parse("ring2"), tokens, 2)
    pair = 2 * tokens // 2 * spec.kv_heads * spec.head_width
    assert ring.bytes_out == 2 * pair * 2 + 2 * pair * 4
    (boundary,) = insertions(spec, Layout.parse("pp2"), tokens, 2)
    assert boundary.bytes_out == 2 * tokens * spec.width * 2
    (again,) = insertions(spec, Layout.parse("tp2.recompute-full"), tokens, 2)
    assert again.bytes_out == tensor.bytes_out * 3 // 2


def test_the_least_memory():
    spec = preset("tiny-llama")
    alone = least_bytes(spec, Layout(), Layout(), 1024, 2, 4)
    assert alone.state == 4 * 4 * spec.parameters
    assert alone.copies == 6 * spec.parameters
    assert alone.logits == 1024 * spec.vocab * 6
    assert least_bytes(spec, Layout(), Layout(), 100, 2, 4).logits == 100 * spec.vocab * 6
    assert least_bytes(spec, Layout(), Layout(), 4096, 2, 4).logits == 1024 * spec.vocab * 6, "the rest of the rows wait"
    halved = least_bytes(spec, Layout.parse("tp2"), Layout.parse("tp2.z1"), 1024, 2, 4)
    assert halved.state < 0.52 * alone.state
    assert halved.activations == alone.activations // 2
    full = least_bytes(spec, Layout.parse("recompute-full"), Layout(), 1024, 2, 4)
    assert full.activations == spec.layers * 1024 * spec.width * 2
    assert least_bytes(spec, Layout.parse("dp2.z3"), Layout.parse("dp2.z3"), 1024, 2, 4).copies < alone.copies / 2
    assert alone.total == sum(asdict(alone).values())
    assert str(alone).endswith("GiB")


def test_a_streamed_group_says_what_waits_where():
    (group,) = explain(config("layout=chunk256.disk", "train.precision=bf16")).groups
    (wider,) = explain(config("layout=chunk1K.disk", "train.precision=bf16")).groups
    spec = preset("tiny-llama")
    found, stream = group.streamed, 4096 * spec.width * 2
    assert found is not None
    assert found.chunks == 16
    kept = (
        stream + 4096 * spec.heads * (spec.head_width * 2 + 4) + 15 * 256 * 2 * spec.kv_heads * spec.head_width * 2
    )  # x, o, kv but the last
    assert spec.layers * kept + stream <= found.tier <= spec.layers * kept + 2 * stream
    assert found.put == (2 * spec.layers + 2) * stream + spec.layers * (kept - stream)
    assert group.least.activations == found.buffers
    assert group.least.logits == 0
    assert wider.streamed is not None
    assert wider.streamed.buffers > found.buffers
    assert wider.streamed.tier < 1.01 * found.tier
    text = str(explain(config("layout=chunk256.disk")))
    assert "16 chunks of 256 for the longest document; x, o and kv wait for the backward; pairs' operands stay on the device" in text
    assert "disk       at most" in text


def test_offloaded_residual_streams_leave_the_device():
    (kept,) = explain(config("layout=recompute-full")).groups
    (gone,) = explain(config("layout=recompute-full.disk")).groups
    assert kept.streamed is None
    assert gone.streamed is not None
    assert kept.least.activations == gone.streamed.tier == preset("tiny-llama").layers * gone.least.activations
