"""What a step will do, said before it does it: from the plans that the run plays, not beside them."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from longshift.cluster.files import cluster
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.spec.families import preset
from longshift.spec.formats import EIGHT_BITS
from longshift.step_report import explain, shape_of
from longshift.switch.options import SwitchOptions
from longshift.switch.traffic import traffic
from longshift.weigh.needs import Need

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


def test_eight_bits_are_told():
    plain, eight = (explain(config("layout=u2", f"train.precision={name}")) for name in ("bf16", "float8"))
    assert EIGHT_BITS in str(eight)
    assert "eight bits" not in str(plain)
    assert eight.groups[0].weights == plain.groups[0].weights
    with pytest.raises(UsageError, match=r"tp2 cuts model\.layers\.0\.self_attn\.\w_proj\.weight inside a block of 128 .*: try tp1"):
        config("layout=tp2", "train.precision=float8")


@pytest.mark.parametrize("per_node", [2, 4])
def test_the_bytes_are_those_of_the_plans(per_node: int, monkeypatch):
    monkeypatch.setattr("longshift.weigh.needs.SwitchOptions", lambda: SwitchOptions(bucket_bytes=1 << 20))
    run = config(GROUPS)
    way, found = shape_of(run, per_node).itinerary, explain(run, per_node)
    cut = way.cuts[Layout.parse("dp4")]
    order = [group.layout for group in found.groups]
    first = min(order.index("dp4"), order.index("u4"))
    before = way.cuts[Layout.parse(order[first - 1])] if first else None
    moved = found.groups[first].weights_traffic
    plan = way.weights(before, cut)
    assert moved == traffic(plan)
    assert f", {plan.exchanges} exchanges, cast" in found.groups[first].weights
    assert moved is not None
    assert (moved.inter_node_bytes > 0) == (per_node == 2)
    assert found.groups[first + 1].gradients_traffic == traffic(way.sums(cut))
    weights, wanted = run.spec.parameters * 2, 4 * run.spec.parameters * 2
    assert weights <= moved.intra_node_bytes + moved.inter_node_bytes <= wanted


def test_one_exchange_is_no_plural():
    weights = [group.weights for group in explain(config(GROUPS)).groups]
    assert [text for text in weights if ", 1 exchange, cast" in text]


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


def test_a_pack_of_its_own_is_said_and_weighed():
    larger = GROUPS.replace("use: dp4", "use: dp4, pack: 1K")
    found, plain = explain(config(larger)), explain(config(GROUPS))
    assert "documents of up to 256 tokens, in packs of up to 1K: dp4" in str(found)
    assert [(group.upto, group.pack) for group in found.groups if group.layout == "dp4"] == [(256, 1024)]
    assert "documents of up to 256 tokens: dp4" in str(plain)
    (more,), (less,) = ([group.need.device.total for group in one.groups if group.layout == "dp4"] for one in (found, plain))
    assert more > less


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
    assert len(set(shape_of(run).itinerary.cuts.values())) >= 17
    found = explain(run, 2)
    assert sorted(group.upto for group in found.groups) == [256 * number for number in range(1, len(CUTS) + 1)]
    cuts = [shape_of(run).itinerary.cuts[Layout.parse(group.layout)] for group in found.groups]
    changes = sum(before != after for before, after in pairwise(cuts))
    assert changes == len(set(cuts)) - 1, "a cut was left and entered again"


def test_what_the_next_switch_takes_from_is_computed_last():
    """Under ZeRO-3 at home nothing stays after the group; under ZeRO-1 the copies do, and lie as the next switch may want them."""
    way = shape_of(many(["tp2.pp2.z1", "dp4", "tp2.pp2.z3"])).itinerary
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
    assert group.sent.keys().isdisjoint({"tp", "ulysses", "ring", "rising", "falling"})


def test_what_travels_in_fewer_bits_is_said():
    (plain,), (group,) = (explain(config("layout=dp4.z3", *more)).groups for more in ([], ["wire={gradients: float8, weights: float8}"]))
    assert group.weights.endswith("coded in float8 at the source")
    assert group.gradients == "all-to-all of pieces in float8, added in float32 at their owner, unit by unit after every backward"
    assert 0.25 < group.sent["reduce"] / plain.sent["reduce"] < 0.28
    assert 0.5 < group.sent["gather"] / plain.sent["gather"] < 0.53
    switched = explain(config("layout=[{upto: 256, use: dp4.z2}, {upto: 4K, use: pp2.tp2}]", "wire.gradients=bf16")).groups
    (visiting,) = (group.gradients for group in switched if group.layout == "dp4.z2")
    assert visiting.startswith("all-to-all of pieces in bf16, added in float32 at their owner after every backward, then home by the plan")
    assert visiting.endswith("wire is for reductions, a switch sends float32")


def test_it_reads_and_it_parses():
    found = explain(config(GROUPS, "train.precision=bf16"))
    text = str(found)
    assert text.count("documents of up to") == 3
    assert "cast from float32 to bfloat16 at the source" in text
    assert json.loads(json.dumps(found.to_json()))["groups"][0]["need"] == json.loads(json.dumps(asdict(found.groups[0].need)))


def needed(layout: str, *overrides: str) -> Need:
    return explain(config(f"layout={layout}", *overrides)).need


def alive(need: Need, name: str) -> int:
    return dict(need.device.alive)[name]


def test_what_a_rank_needs_is_said_by_name():
    spec = preset("tiny-llama")
    alone = needed("dp1", "train.precision=float32")
    assert alive(alone, "master weights") == 4 * spec.parameters
    assert alive(alone, "moments") == 8 * spec.parameters
    assert "working copies of dp1" not in dict(alone.device.alive), "home's own tensors compute"
    assert alone.device.total == sum(size for _, size in alone.device.alive)
    mixed = needed("dp1")
    assert alive(mixed, "working copies of dp1") == 2 * spec.parameters
    assert alive(needed("tp2.z1"), "moments") < 0.52 * alive(mixed, "moments")
    assert needed("dp4.z3").device.total < needed("dp4.z1").device.total < needed("dp4").device.total
    assert needed("recompute-full").device.total < needed("recompute-selective").device.total < mixed.device.total
    assert needed("pp2.gpipe").device.total > needed("pp2").device.total
    text = str(explain(config(GROUPS)))
    assert text.count("needs most") == 3 + 1


def test_what_axes_send_is_said():
    spec, tokens = preset("tiny-llama"), 4096
    (group,) = explain(config("layout=ring2.tp2")).groups
    kv = 2 * tokens // 2 * spec.kv_heads // 2 * spec.head_width
    assert group.sent["ring"] == spec.layers * (2 * kv * 2 + 2 * kv * 4)
    text = str(explain(config("layout=ring2.tp2")))
    assert "inserted   ring: keys and values, and their gradients" in text
    assert "inserted   tensor: all-gather" in text
    (group,) = explain(config("layout=pp2")).groups
    assert group.sent["rising"] == tokens * spec.width * 2


def test_a_streamed_group_says_what_waits_where():
    found, wider = (explain(config(f"layout={layout}", "train.precision=bf16")) for layout in ("chunk256.disk", "chunk1K.disk"))
    spec = preset("tiny-llama")
    stream = 4096 * spec.width * 2
    kept = (
        stream + 4096 * spec.heads * (spec.head_width * 2 + 4) + 15 * 256 * 2 * spec.kv_heads * spec.head_width * 2
    )  # x, o, kv but the last
    assert spec.layers * kept + stream <= found.need.of("disk") <= spec.layers * kept + 2 * stream
    assert found.groups[0].moved["put"] == (2 * spec.layers + 2) * stream + spec.layers * (kept - stream)
    assert wider.need.device.total > found.need.device.total
    assert wider.need.of("disk") < 1.01 * found.need.of("disk")
    assert "disk       rank 0 needs most" in str(found)
    assert "out and" in str(found)


def test_offloaded_residual_streams_leave_the_device():
    """With outputs of attention, as wide, and their log-sum-exp; all but those of the last blocks, which the backward is about to need."""
    kept, gone = (needed(layout, "model.preset=small-llama") for layout in ("recompute-full", "recompute-full.disk"))
    spec = preset("small-llama")
    assert kept.of("disk") == 0
    assert gone.of("disk") == spec.layers * 4096 * (2 * spec.width * 2 + spec.heads * 4)
    assert gone.device.total < kept.device.total
