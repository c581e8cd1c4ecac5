"""The clock: hand cases of lanes, pipelines that take what their papers say, and a step whose pieces add up."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.cluster import files
from longshift.cluster.curves import Curve, SampledSizes
from longshift.cluster.files import cluster as named
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout, Tier
from longshift.planner.candidates import Candidates
from longshift.planner.group_seconds import step_seconds
from longshift.program.turns import visit_of
from longshift.schedule import pipeline
from longshift.simulate.clock import Clock, GroupPacks, StepTime
from longshift.simulate.cost import Cost
from longshift.simulate.habits import habits
from longshift.simulate.lanes import Begin, End, TimedWork, part, play
from longshift.simulate.op_traffic import record_traffic
from longshift.simulate.rates import FITTED, Constants, rates
from longshift.simulate.stage_actions import HOST_BYTES_PER_S
from longshift.spec import families
from longshift.spec.adapters import Lora, partly_trained
from longshift.spec.formats import Wire, formats_of
from longshift.spec.model import ModelSpec, Rope
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import assumed, links_of
from longshift.switch.options import SwitchOptions
from longshift.weigh.needs import StepShape
from longshift.workload.groups import Edge


def ends(pieces: list[TimedWork]) -> dict:
    return {(piece.rank, piece.key): piece.end for piece in pieces}


# Lanes


def card(cost: Cost, layout: Layout, micros: int, lengths: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of a step by its rate card, and what of them a step takes once."""
    pairs = sum(n * n for n in lengths) / 2
    found = step_seconds(cost, Candidates.of([layout]), *(np.array([float(n)]) for n in (micros, sum(lengths), pairs)))
    return float(found.group[0] + found.once[0]), float(found.once[0])


def test_what_is_begun_goes_on_until_it_is_awaited():
    found = ends(play([[Begin("gather", "gather", 3, ("link",)), Begin("one", "compute", 2, ("cores",)), End("one"), End("gather"),
                        Begin("two", "compute", 2, ("cores",)), End("two")]]))  # fmt: skip
    assert found == {(0, "one"): 2, (0, "gather"): 3, (0, "two"): 5}


def test_a_lane_does_one_thing_at_a_time_in_order():
    found = ends(play([[Begin("a", "link", 3, ()), Begin("b", "link", 1, ()), End("b")]]))
    assert found == {(0, "a"): 3, (0, "b"): 4}


def test_two_lanes_share_a_resource():
    """Both run at half rate until the shorter has ended."""
    found = ends(play([[Begin("a", "gather", 2, ("link",)), Begin("b", "reduce", 4, ("link",)), End("a"), End("b")]]))
    assert found == {(0, "a"): 4, (0, "b"): 6}


def test_traffic_crowds_what_computes_beside_it():
    """Ten seconds of computing lose a quarter of their rate for four seconds, whether one piece or two share the link."""
    for pieces in ([4.0], [2.0, 2.0]):
        traffic = [Begin(f"move {n}", f"lane {n}", seconds, ("link",), (), ("cores",)) for n, seconds in enumerate(pieces)]
        found = ends(play([[*traffic, Begin("compute", "compute", 10.0, ("cores",)), End("compute")]], crowd=0.25))
        assert found[0, "compute"] == pytest.approx(11.0)


def test_a_message_takes_a_share_of_the_cores_and_computing_the_rest():
    """Where a message needs more than half of the cores, each gets half."""
    compute = Begin("compute", "compute", 6.0, ("cores",))
    for share, message_s, compute_s in ((0.25, 8.0, 8.0), (0.5, 8.0, 10.0), (0.8, 12.5, 12.0), (1.0, 14.0, 12.0)):
        hop = Begin("hop", "ring", 8.0, ("link", "cores"), share=share)
        found = ends(play([[hop, compute, End("hop"), End("compute")]]))
        assert found == pytest.approx({(0, "hop"): message_s, (0, "compute"): compute_s}), share


def test_messages_of_two_ranks_take_the_larger_share_of_both():
    lists = []
    for rank, (seconds, share) in enumerate(((4, 0.5), (0, 0.1))):
        own = Begin(f"own {rank}", "compute", 2, ("cores",))
        lists.append([Begin("m", "messages", seconds, ("link", "cores"), (0, 1), share=share), own, End(own.key), End("m")])
    assert ends(play(lists)) == {(0, "own 0"): 4, (1, "own 1"): 4, (0, "m"): 4, (1, "m"): 4}


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.floats(0.2, 1.0))
def test_parts_of_a_resource_are_fair(needs, whole):
    """Nobody gets more than it needs while another wants more, and nothing is left while somebody does."""
    most = part(needs, whole)
    given_out = [min(need, most) for need in needs]
    assert sum(given_out) == pytest.approx(min(whole, sum(needs)))


def test_a_message_starts_when_both_ranks_have_begun_it():
    sender = [Begin("work", "compute", 5, ()), End("work"), Begin("m", "messages", 1, (), (0, 1)), End("m")]
    receiver = [Begin("m", "messages", 0, (), (0, 1)), End("m"), Begin("after", "compute", 2, ()), End("after")]
    assert ends(play([sender, receiver]))[1, "after"] == 8


def test_ranks_that_wait_for_each_other_for_ever_are_named():
    with pytest.raises(ValueError, match="rank 0 waits for ever for b"):
        play([[Begin("a", "x", 1, (), (0, 1)), Begin("b", "y", 1, (), (0, 1)), End("b")], [Begin("a", "x", 1, (), (0, 1))]])


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 9), st.sampled_from(["p", "q"])), min_size=1, max_size=12))
def test_shared_work_is_never_faster_than_alone_nor_slower_than_one_after_another(rows):
    actions = [Begin(number, lane, seconds, (used,)) for number, (lane, seconds, used) in enumerate(rows)]
    last = max(piece.end for piece in play([[*actions, *(End(n) for n in range(len(rows)))]]))
    busiest = max(sum(s for _, s, used in rows if used == name) for name in "pq")
    assert busiest <= last + 1e-9
    assert last <= sum(s for _, s, _ in rows) + 1e-9


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 9), st.sampled_from(["p", "q"]), st.booleans()), min_size=1, max_size=12))
def test_a_rank_alone_takes_what_it_takes_beside_an_idle_one(rows):
    """What nothing else goes on beside is not put into a queue where there is one rank."""
    actions = list[Begin | End]()
    for number, (lane, seconds, used, awaited) in enumerate(rows):
        actions += [Begin(number, lane, 0.1 * seconds, (used,), (), ("p",) * (lane == "x")), *([End(number)] if awaited else [])]
    assert play([actions], 0.2) == play([actions, []], 0.2)


# Pipelines


def played(text: str, micros: int, forward: float = 1, backward: float = 2, slow: tuple[int, float] = (-1, 1.0)) -> float:
    """Seconds of a pipeline whose stages take so long for a micro-batch, in all their model chunks together."""
    layout = Layout.parse(text)
    lists = []
    for stage in range(layout.pp):
        actions = []
        for number, event in enumerate(pipeline.stage_passes(layout, stage, micros)):
            for moved, begins in ((pipeline.receives(layout, stage, event), True), (None, False)):
                if moved is not None and begins:
                    parties = moved.source % layout.pp, moved.target % layout.pp
                    actions += [Begin(("m", moved.tag), f"m{moved.tag}", 0, (), parties), End(("m", moved.tag))]
            seconds = (forward if event.kind == "forward" else backward) / layout.virtual * (slow[1] if stage == slow[0] else 1)
            actions += [Begin((stage, number), "compute", seconds, ()), End((stage, number))]
            moved = pipeline.sends(layout, stage, event)
            if moved is not None:
                actions.append(Begin(("m", moved.tag), f"m{moved.tag}", 0, (), (moved.source % layout.pp, moved.target % layout.pp)))
        lists.append(actions)
    return max(piece.end for piece in play(lists))


@pytest.mark.parametrize(("text", "micros", "expected"), [("pp4", 8, 33), ("pp4.gpipe", 8, 33), ("pp4.v2", 8, 28.5), ("pp4.v2", 6, 24.5)])
def test_pipelines_take_what_is_counted_by_hand(text: str, micros: int, expected: float):
    assert played(text, micros) == expected


def test_a_slow_stage_is_waited_for_by_all():
    assert played("pp4", 8, slow=(0, 1.5)) == 40.5


# A step


LLAMA = families.preset("llama-3-8b")
# Ranks of equal speed, and nothing outside of what is played.
IDEAL = replace(FITTED, jitter=0.0, crowd=0.0, begin_s=0.0)


def step_of(text: str, micros: int = 4, lengths: tuple[int, ...] = (4096, 4096), on: str = "h100", reached: Constants = IDEAL) -> StepTime:
    return steps_of([(text, micros, lengths)], on, reached)


def steps_of(groups: list[tuple[str, int, tuple[int, ...]]], on: str = "h100", reached: Constants = IDEAL) -> StepTime:
    edges = [Edge(sum(lengths), Layout.parse(text)) for text, _, lengths in groups]
    return clock_of(edges, on, reached).step(
        [GroupPacks(edge.use, ((lengths,) * micros,)) for edge, (_, micros, lengths) in zip(edges, groups)]
    )


def clock_of(
    edges: list[Edge],
    on: str = "h100",
    reached: Constants = IDEAL,
    wire: Wire = Wire(),  # noqa: B008  (frozen)
    home: Tier = "device",
    spec: ModelSpec = LLAMA,
) -> Clock:
    cluster, formats = files.preset(on), formats_of("bf16", wire=wire)
    way = Itinerary(spec, tuple(edges), links_of(cluster, 8), formats.compute_bytes, formats.home_bytes, SwitchOptions())
    shape = StepShape(way, tuple(edges), formats, 1 << 16, edges[-1].upto, home_in=HomeTiers(home))
    return Clock(shape, cluster, Cost(spec, rates(cluster, constants=reached)))


def test_a_home_on_the_host_is_updated_beside_what_the_gpu_computes():
    """A weight takes the host 34 bytes for its update and 6 for its cast: 5.4 s for 8.03 billion, under which weights cross the link. Their
    gradients cross it in 0.59 s, which a long backward hides, too."""
    elements = sum(param.elements for param in families.preset("llama-3-8b").params)
    link = files.preset("h100").copy_s("to_host pinned", 4 * elements)
    found = {}
    for tokens in (2048, 1 << 17):
        edges = [Edge(tokens, Layout.parse("dp1.recompute-full"))]
        for home in ("device", "host"):
            found[tokens, home] = clock_of(edges, home=home).step([GroupPacks(edges[0].use, (((tokens,),),))])
    host_s = elements * 40 / HOST_BYTES_PER_S
    assert found[2048, "host"].busy_s("gather") == pytest.approx(host_s, rel=0.02)
    assert found[2048, "host"].busy_s("home out") == pytest.approx(link, rel=0.02)
    assert found[2048, "host"].seconds >= host_s + link
    more = {tokens: found[tokens, "host"].seconds - found[tokens, "device"].seconds for tokens in (2048, 1 << 17)}
    assert more[1 << 17] < 0.1 * host_s < 0.5 * more[2048], "a long forward hides the update"


def test_weights_that_are_not_trained_cross_the_link_as_they_are():
    """Of a LoRA run, whose adapters alone have masters, gradients and an update."""
    spec = partly_trained(families.preset("llama-3-8b"), Lora(rank=8, alpha=16), freeze=())
    edges = [Edge(2048, Layout.parse("dp1.recompute-full"))]
    step = clock_of(edges, home="host", spec=spec).step([GroupPacks(edges[0].use, (((2048,),),))])
    trained = sum(param.elements for param in spec.params if not param.frozen)
    frozen = sum(param.elements for param in spec.params if param.frozen)
    # A weight is read and written in bf16; of masters the host reads four bytes, and updates them by 34.
    host_s = (frozen * 4 + trained * 40) / HOST_BYTES_PER_S
    link_s = files.preset("h100").copy_s("to_device pinned", 2 * frozen)
    assert step.busy_s("gather") == pytest.approx(max(host_s, link_s))


def test_a_step_is_computed_all_the_time_where_nothing_travels():
    found = step_of("dp1")
    assert found.seconds == pytest.approx(found.busy_s("compute"))


def test_tensor_traffic_is_waited_for_and_gathers_are_not():
    tensor, gathered = step_of("tp8"), step_of("dp8.z3")
    assert tensor.seconds == pytest.approx(tensor.busy_s("compute") + tensor.busy_s("tp"))
    assert gathered.busy_s("gather") > 10 * (gathered.seconds - gathered.busy_s("compute")) > 0


def test_a_slower_network_is_never_faster():
    times = [step_of("ring8.z3", on=on).seconds for on in ("h200", "a100-80", "a800")]
    assert all(one <= other for one, other in pairwise(times))


def test_a_ring_of_cpus_takes_the_cores_that_its_messages_need():
    """Keys and values of a document travel while its own are attended to; the less of the cores that takes, the shorter the step."""
    spec, edges, formats = families.preset("tiny-llama"), (Edge(8192, Layout.parse("ring2")),), formats_of("float32")
    sends = Curve((SampledSizes("ranks", (2,), 0.0), SampledSizes("bytes", (2.0**20,))), (0.1,))

    def seconds(cores_s: float | None) -> tuple[float, float]:
        cores = {} if cores_s is None else {"cores send": Curve((SampledSizes("bytes", (2.0**20,)),), (cores_s,))}
        here = files.preset("cpu")
        machine = replace(here, devices_per_node=2, curves={**here.curves, "send node": sends, **cores})
        way = Itinerary(spec, edges, assumed(2), formats.compute_bytes, formats.home_bytes, SwitchOptions())
        cost = Cost(spec, rates(machine, "float32"))
        clock = Clock(StepShape(way, edges, formats, 8192, 8192), machine, cost)
        form = card(cost, edges[0].use, 1, (8192,))
        return clock.step([GroupPacks(edges[0].use, (((8192,),),))]).seconds, form[0]

    times, forms = zip(*(seconds(cores_s) for cores_s in (0.01, 0.1, 1.0, None)))
    assert list(times) == sorted(times)
    assert times[0] < 0.98 * times[2]
    assert times[2] == times[3]
    assert [forms[0], forms[2]] == pytest.approx([times[0], times[2]], rel=0.02)
    assert times[1] <= forms[1] < 1.15 * times[1]  # half of what computes catches up while the ring is waited for


def test_a_pipeline_waits_for_its_stages():
    even, alone = step_of("pp4", 8), step_of("dp1", 8)
    bubble = even.seconds / (alone.seconds / 4) - 1
    assert 3 / 8 < bubble < 1  # the head makes the last stage slower


def test_a_switch_takes_time_where_it_is_not_hidden():
    groups = [("dp8", 2, (1024,) * 4), ("tp8", 2, (8192,))]
    both = steps_of(groups)
    assert len(both.starts) == 2
    assert both.busy_s("switch") > 0
    assert both.seconds > max(steps_of([one]).seconds for one in groups)


def test_the_same_step_takes_the_same_time():
    assert step_of("pp2.tp2.dp2.z2").seconds == step_of("pp2.tp2.dp2.z2").seconds


@pytest.mark.parametrize(
    "texts",
    [
        *(("dp8.z3",), ("pp2.tp2.dp2.z2",), ("dp8.z2", "tp8"), ("dp8.recompute-full.host.z3", "u8.z3", "pp2.tp4")),
        *(("dp4.u2.z3.chunk2K.disk.kv-offload", "ring8.recompute-full.disk"), ("dp8.z3.vertical.recompute-full",)),
    ],
)
@pytest.mark.parametrize("home", ["device", "host", "disk"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_travels_is_known_without_what_operations_need_inside(texts: tuple[str, ...], home: Tier, on_cpu: bool):
    """A clock asks the ledger for no more."""
    edges = [Edge(4096 << n, Layout.parse(text)) for n, text in enumerate(texts)]
    packs = [[(edge.upto - 100, 100), (edge.upto,), ()] for edge in edges]
    visits = [visit_of(families.preset("llama-3-8b"), edge.use, own) for edge, own in zip(edges, packs)]
    found = []
    for inside in (True, False):
        ledger = clock_of(edges, home=home).shape.ledger(0, "gloo" if on_cpu else "nccl", inside)
        known = [one for visit in record_traffic(ledger, visits, packs, None) for one in visit if one.op.kind != "compute"]
        found.append([[getattr(one, name) for name in one.__slots__] for one in known])
    assert found[0] == found[1]
    assert len(found[0]) > 100


@pytest.mark.parametrize(
    "texts", [("dp8.z2",), ("dp8.z3",), ("pp2.tp2.dp2.z2",), ("dp8.z2", "tp8"), ("dp8.recompute-full.host.z3", "u8.z3", "pp2.tp4")]
)
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_step_takes_as_long_whatever_the_clock_has_played_before(texts: tuple[str, ...], home: Tier):
    """All groups, fewer packs of all, the last group alone, and all again; of a home on the host each step updates under the next one."""
    edges = [Edge(4096 << n, Layout.parse(text)) for n, text in enumerate(texts)]
    whole, fewer = ([GroupPacks(edge.use, (((edge.upto,),) * micros,)) for edge in edges] for micros in (3, 1))
    used = clock_of(edges, home=home)
    for groups in (whole, fewer, whole[-1:], whole, fewer):
        assert used.step(groups).seconds == clock_of(edges, home=home).step(groups).seconds


@pytest.mark.parametrize(
    "text", ["dp8", "dp8.z2", "dp8.z3", "tp8", "u8.z3", "ring8.z3", "pp4.dp2", "pp4.dp2.v2", "pp2.tp2.dp2.z2", "dp8.recompute-full"]
)
def test_rate_card_and_clock_agree(text: str):
    """One description of the step in numbers that broadcast, one played operation by operation."""
    layout, micros, lengths = Layout.parse(text), 4, (4096, 4096)
    total_s, _ = card(Cost(families.preset("llama-3-8b"), rates(files.preset("h100"))), layout, micros, lengths)
    rel = 0.07 if text == "u8.z3" else 0.05  # gathers share a link with Ulysses, which a rate card knows less of
    assert total_s == pytest.approx(step_of(text, micros, lengths, reached=FITTED).seconds, rel=rel)


def test_groups_of_one_cut_gather_and_reduce_once():
    """Weights are gathered and gradients reduced once a step, whatever number of groups computes with these copies."""
    groups = [("dp8.z1", 1, (128,) * 4), ("ring8.z1", 1, (8192,))]
    cost = Cost(families.preset("llama-3-8b"), rates(files.preset("a800")))
    (short_s, once_s), (long_s, _) = (card(cost, Layout.parse(text), micros, lengths) for text, micros, lengths in groups)
    both = steps_of(groups, "a800", FITTED).seconds
    assert short_s + long_s - once_s == pytest.approx(both, rel=0.03)
    assert short_s + long_s > 1.2 * both


WIRES = Wire("bf16"), Wire("float8"), Wire("float8", "float8")


@pytest.mark.parametrize("text", ["dp8.z1", "dp8.z2", "dp8.z3", "tp8.dp2.z2", "pp2.tp2.dp2.z2"])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_they_agree_about_fewer_bits_on_the_wire(text: str, wire: Wire):
    layout, micros, lengths = Layout.parse(text), 4, (4096, 4096)
    found = clock_of([Edge(sum(lengths), layout)], reached=FITTED, wire=wire).step([GroupPacks(layout, ((lengths,) * micros,))])
    cost = Cost(families.preset("llama-3-8b"), rates(files.preset("h100")), habits(False, "bf16", files.preset("h100").device, wire))
    assert card(cost, layout, micros, lengths)[0] == pytest.approx(found.seconds, rel=0.05)


def test_fewer_bits_travel_faster_and_are_paid_for_in_passes_over_memory():
    """One replica a node, whose all-to-all crosses the network once, as a ring does."""
    layout = Layout.parse("tp8.dp8.z2")
    clocks = [clock_of([Edge(8192, layout)], wire=wire) for wire in (Wire(), *WIRES[:2])]
    steps = [clock.step([GroupPacks(layout, (((4096, 4096),) * 2,))]) for clock in clocks]
    wide, half, quarter = (step.busy_s("reduce") for step in steps)
    assert 0.5 < half / wide < 0.55
    assert 0.25 < quarter / wide < 0.31
    assert steps[0].busy_s("compute") < steps[1].busy_s("compute") < steps[2].busy_s("compute")


@pytest.mark.parametrize("text", ["pp2.dp4.z2", "pp4.dp2.v2", "dp8.z3"])
def test_a_choice_of_many_micro_batches_stands_for_all(text: str, monkeypatch: pytest.MonkeyPatch):
    """Sixty packs of documents of many lengths; an even choice of them is played, and all."""
    draw = np.random.default_rng(0)
    packs = tuple((length, 8192 - length) for length in draw.integers(64, 8128, 60).tolist())
    groups = [GroupPacks(Layout.parse(text), (packs,))]
    short = clock_of([Edge(8192, Layout.parse(text))]).step(groups)
    monkeypatch.setattr("longshift.simulate.clock.LEAST_PLAYED", 1000)
    whole = clock_of([Edge(8192, Layout.parse(text))]).step(groups)
    assert max(short.shares) < 0.5
    assert whole.shares == (1.0,)
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert short.busy_s("compute") == pytest.approx(whole.busy_s("compute"), rel=0.02)


@pytest.mark.parametrize("cluster", ["1xh200", "1xa100-80"])
@pytest.mark.parametrize("tokens", [65536, 524288])
def test_chunks_take_what_a_whole_document_takes(cluster: str, tokens: int):
    """On a device that keeps all of them. A chunk's backward computes its forward again but for attention: a larger share of a document
    that is shorter."""
    spec = ModelSpec("llama", 128256, 4096, 2, 32, 8, 128, 14336, tokens, rope=Rope(theta=500000.0))
    machine = named(cluster)
    cost = Cost(spec, rates(machine, "bf16"))

    def seconds(layout: str) -> float:
        edges = (Edge(tokens, Layout.parse(layout)),)
        formats = formats_of("bf16")
        way = Itinerary(spec, edges, assumed(1), formats.compute_bytes, formats.home_bytes, SwitchOptions())
        shape = StepShape(way, edges, formats, 0, tokens)
        return Clock(shape, machine, cost).step([GroupPacks(edges[0].use, (((tokens,),),))]).seconds

    whole, large, small = (seconds(layout) for layout in ("dp1", "chunk64K", "chunk16K"))
    assert 1.0 < large / whole < (1.35 if tokens < 100_000 else 1.07)
    assert 0.99 < small / large < 1.1
