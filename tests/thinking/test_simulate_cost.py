"""Seconds of collectives, turns and steps: by hand, by a replay of the pipeline, scalar and vector, monotone; and the published rows."""

import csv
import json
import statistics
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.cluster import files, network
from longshift.cluster.cluster import SHARES, Cluster, Link, Operation
from longshift.cluster.curves import Curve, SampledSizes
from longshift.cluster.network import Fabric
from longshift.layout.layout import Layout
from longshift.layout.placement import boxes_on
from longshift.model.packed_attention import EVEN, LONG
from longshift.planner import candidates as layouts
from longshift.planner.group_seconds import GroupSeconds, stalled_s, step_seconds
from longshift.schedule.pipeline import stage_passes
from longshift.simulate.calibrate import fit, moved
from longshift.simulate.cost import CODED, CODES_GAIN, CUDNN_GAINS, OF_PRESETS, RECOMPUTE, REST, Cost, recompute_code
from longshift.simulate.habits import habits
from longshift.simulate.mesh import Mesh
from longshift.simulate.model_flops import mfu, model_flops
from longshift.simulate.rates import OF_CPU_CURVES, Constants, Rates, rates
from longshift.simulate.sizes import sizes
from longshift.spec.families import preset

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from block_formulas import FormulaCost, Sizes, Trainer  # noqa: E402
from closed_form import PARTS, Candidates, closed_form  # noqa: E402
from correction import Correction, calibrate  # noqa: E402

PUBLISHED = ROOT / "benchmarks" / "published.py"
SPEC = preset("llama-3-8b")
COST = Cost(SPEC, rates(files.cluster("64xh100")))
FORMULAS = FormulaCost(Sizes.of(SPEC), COST.rates)  # of another trainer
ONE = {"tp": 1, "ulysses": 1, "ring": 1, "dp": 1, "pp": 1, "virtual": 1, "zero": 0, "recompute": 0, "micros": 8}
ONE |= {"tokens": 8192, "pairs": 8192**2 / 2}
FABRIC = Fabric(per_node=8, node_bytes_per_s=100.0, node_latency_s=1.0, network_bytes_per_s=5.0, network_latency_s=10.0, begin_s=0.5)


def at(**changes) -> Candidates:
    return Candidates(**(ONE | changes))


def card(cost: Cost, **changes) -> GroupSeconds:
    """Seconds of steps of these layouts and packs by their rate cards."""
    values = ONE | changes | {"order": 0}
    columns = dict(zip(values, np.broadcast_arrays(*map(np.atleast_1d, values.values()))))
    loads = [columns.pop(name).astype(float) for name in ("micros", "tokens", "pairs")]
    at = layouts.Candidates({name: column.astype(np.int64) for name, column in columns.items()})
    return step_seconds(cost, at, *loads)


def seconds(cost: Cost = COST, **changes) -> float:
    found = card(cost, **changes)
    return float((found.group + found.once)[0])


def collectives_by_hand(fabric: Fabric) -> list[str]:
    """What is wrong with a fabric's collectives."""
    cases = {
        "all_reduce of 800 bytes on 8 of a node": (fabric.collective_s("all_reduce", 800.0, 8, 8), 0.5 + 2 * (7 + 700 / 100)),
        "16 ranks leave two nodes through 8 cards each": (fabric.collective_s("all_gather", 1600.0, 16, 8), 0.5 + 14 + 10 + 1500 / 40),
        "one rank a node has one card": (fabric.collective_s("all_gather", 400.0, 4, 1), 0.5 + 30 + 300 / 5),
        "eight hops of a reduce_scatter": (fabric.collective_s("reduce_scatter", 0.0, 9, 1), 0.5 + 80),
        "a send between nodes": (fabric.collective_s("send", 50.0, 2, 1), 0.5 + 10 + 10),
        "an all_to_all inside": (fabric.collective_s("all_to_all", 400.0, 4, 4), 0.5 + 3 + 300 / 100),
        "alone": (fabric.collective_s("all_reduce", 800.0, 1, 1), 0.0),
    }
    return [name for name, (ours, hand) in cases.items() if abs(float(ours) - hand) > 1e-9]


@pytest.mark.parametrize("operation", ["send", "all_to_all"])
def test_simulate_a_measured_network_carries_what_its_constants_say(operation: Operation):
    """What a rank sends by itself goes through its own card: a ring's hop between nodes, an exchange of four ranks a node."""
    fabric, sizes = Fabric(4, 1e9, 0.0, 1e8, 0.0, begin_s=0.0), (1e4, 1e6, 1e8)
    axes = {"node": (2, 4), "network": (2,)}
    curves = {
        f"{operation} {level}": Curve(
            (SampledSizes("ranks", ranks, 0.0), SampledSizes("bytes", sizes)),
            tuple(float(fabric.collective_s(operation, size, n, n if level == "node" else 1)) for n in ranks for size in sizes),
        )
        for level, ranks in axes.items()
    }
    links = {"node": Link(1e9, 0.0), "network": Link(1e8, 0.0)}
    measured = replace(files.cluster("2x8xh100"), devices_per_node=4, links=links, shares=dict.fromkeys(SHARES, 1.0), curves=curves)
    for ranks, per_node in ((8, 4), (4, 2), (2, 1), (4, 4), (2, 2)):
        for size in (1e5, 1e7):
            group = operation, size, ranks, per_node
            wanted = float(fabric.collective_s(*group))
            assert float(network.collective_s(measured, *group)) == pytest.approx(wanted, rel=1e-6), group


def curve_over_bytes(ranks: int, seconds: float) -> Curve:
    """Seconds of a million bytes on so many ranks, twice as many for two."""
    return Curve((SampledSizes("ranks", (ranks,), 0.0), SampledSizes("bytes", (1e6, 2e6))), (seconds, 2 * seconds))


def test_simulate_groups_with_several_ranks_on_each_node_are_what_was_measured_of_such():
    curves = {"all_gather node": curve_over_bytes(2, 1.0), "all_gather network": curve_over_bytes(2, 10.0)}
    measured = replace(files.cluster("2x4xh100"), curves={**curves, "all_gather network by 4": curve_over_bytes(8, 7.0)})

    def seconds(size_bytes, ranks, per_node) -> list[float]:
        return np.asarray(network.collective_s(measured, "all_gather", size_bytes, ranks, per_node)).ravel().tolist()

    assert seconds(1e6, 8, 4) == pytest.approx([7.0])
    assert seconds(2e6, 4, 2) == pytest.approx([10.0])  # of one rank a node, and through two cards
    assert seconds(1e6, 4, 4) == pytest.approx([1.0])
    assert seconds(np.array([1e6, 2e6, 2e6]), np.array([8, 8, 4]), np.array([4, 4, 2])) == pytest.approx([7.0, 14.0, 10.0])
    assert measured.moved({"network": 0.5}).curves["all_gather network by 4"].seconds == (14.0, 28.0)


def cpu_that_sends(cores: float, **curves: Curve) -> Cluster:
    """The CPU preset, of which a message of a million bytes takes 0.1 s and 0.05 processor seconds."""
    here = files.preset("cpu")
    known = {"send node": curve_over_bytes(2, 0.1), "cores send": Curve((SampledSizes("bytes", (1e6,)),), (0.05,)), **curves}
    return replace(here, device=replace(here.device, cores=cores), curves={**here.curves, **known})


def test_simulate_a_message_of_a_cpu_takes_the_share_of_its_cores_that_was_measured():
    assert cpu_that_sends(1.0).cores_share("node") == pytest.approx(0.5)
    assert cpu_that_sends(2.0).cores_share("node") == pytest.approx(0.25)
    assert cpu_that_sends(0.2).cores_share("node") == 1.0
    assert cpu_that_sends(1.0).cores_share("network") == 1.0  # not measured
    assert files.preset("cpu").cores_share("node") == 1.0
    both = replace(cpu_that_sends(2.0), facts={"cores": 2, "threads": 2})
    assert both.shared(2).cores_share("node") == pytest.approx(0.5)  # two ranks have a core each


def test_simulate_ranks_of_a_cpu_come_late_by_what_was_measured():
    made = rates(cpu_that_sends(1.0, late=Curve((SampledSizes("ranks", (2, 8), 0.0),), (0.01, 0.04))), "float32")
    alone_s = float(network.collective_s(made.cluster, "send", 1e6, 8, 8))
    assert float(made.collective_s("send", 1e6, 8, 8)) == pytest.approx(alone_s + 0.01)  # a hop of a ring of eight is of two
    gather_s = float(network.collective_s(made.cluster, "all_gather", 1e6, 8, 8))
    assert float(made.collective_s("all_gather", 1e6, 8, 8)) == pytest.approx(gather_s + 0.04)
    assert float(made.collective_s("all_gather", 1e6, 1, 8)) == 0.0


def test_simulate_collectives_by_hand():
    assert collectives_by_hand(FABRIC) == []


@pytest.mark.parametrize("mutant", ["network cards not added up", "latency without ranks"])
def test_simulate_mutants_of_collectives_die(mutant):
    class Wrong(Fabric):
        def collective_s(self, operation, size_bytes, ranks, ranks_per_node):
            if mutant == "network cards not added up":
                one_card = replace(FABRIC, network_bytes_per_s=FABRIC.network_bytes_per_s / np.minimum(ranks_per_node, ranks))
                return one_card.collective_s(operation, size_bytes, ranks, ranks_per_node)
            flat = replace(FABRIC, node_latency_s=0.0, network_latency_s=0.0)
            return flat.collective_s(operation, size_bytes, ranks, ranks_per_node) + FABRIC.network_latency_s

    assert collectives_by_hand(Wrong(8, 100.0, 1.0, 5.0, 10.0, 0.5))


def test_simulate_collectives_of_h200_are_near_nccl_tests():
    """Milliseconds of nccl_perf.csv (DistCA repository): all-gathers of 67 MB on 4 ranks and of 134 MB and 1.07 GB on 8."""
    h200 = files.preset("h200")
    for size_bytes, ranks, measured_s in ((67108864, 4, 166.9e-6), (134217728, 8, 354.7e-6), (1073741824, 8, 2589.3e-6)):
        assert network.collective_s(h200, "all_gather", size_bytes, ranks, 8) == pytest.approx(measured_s, rel=0.1)


def replay(text: str, micros: int, forward_s=lambda coord: 1.0, backward_s=lambda coord: 2.0) -> float:
    """When the last event of a pipeline ends: `schedule.pipeline` on as many clocks as coordinates, messages free."""
    layout = Layout.parse(text)
    pp, virtual = layout.pp, layout.virtual
    todo = [list(stage_passes(layout, coord, micros)) for coord in range(pp)]
    clocks, ended = [0.0] * pp, {}
    while any(todo):
        for coord, queue in enumerate(todo):
            while queue:
                event, stage = queue[0], queue[0].chunk * pp + coord
                up = event.kind == "forward"
                needs = (event.kind, stage - 1 if up else stage + 1, event.micro)
                if not up and stage == pp * virtual - 1:
                    needs = ("forward", stage, event.micro)
                if needs not in ended and not (up and stage == 0):
                    break
                took = (forward_s if up else backward_s)(coord) / virtual
                clocks[coord] = max(clocks[coord], ended.get(needs, 0.0)) + took
                ended[event.kind, stage, event.micro] = clocks[coord]
                queue.pop(0)
    return max(clocks)


def bubbled(pp: int, virtual: int, micros: int) -> float:
    """The closed form for stages of one second forward and two backward."""
    return 3 * micros + 3 * (pp - 1) / virtual + float(stalled_s(micros, pp, virtual, 1.0, 2.0))


def test_simulate_pipelines_by_hand():
    assert replay("pp4", 8) == replay("pp4.gpipe", 8) == bubbled(4, 1, 8) == 33
    assert replay("pp4.v2", 8) == bubbled(4, 2, 8) == 28.5
    assert replay("pp4.v2", 6) == bubbled(4, 2, 6) == 24.5
    slow = replay("pp4", 8, lambda coord: 1.5 if coord == 0 else 1.0, lambda coord: 3.0 if coord == 0 else 2.0)
    assert slow == 40.5
    assert slow <= 8 * 4.5 + 3 * 3 <= 1.12 * slow


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
def test_simulate_bubble_is_that_of_the_replay(pp, virtual):
    for micros in range(1, 3 * pp + 1):
        real = replay(f"pp{pp}.v{virtual}", micros)
        exact = virtual == 1 or micros % pp == 0 or micros < pp
        assert bubbled(pp, virtual, micros) == pytest.approx(real, rel=1e-9 if exact else 0.03)


def test_simulate_closed_form_has_the_bubble():
    """Equal stages: what the step takes beyond its micro-batches is three stages' slots."""
    found = closed_form(FORMULAS, at(pp=4, micros=8)).parts
    busy = sum(found[name] for name in ("matmul", "attention", "elementwise", "launch", "recompute", "head"))
    ends = float(busy - found["head"]) / 8 / 8  # seconds of a block
    assert float(found["bubble"]) == pytest.approx(3 * 8 * ends, rel=0.1)
    assert float(closed_form(FORMULAS, at(pp=1)).parts["bubble"]) == 0


def test_simulate_turns_add_up_to_a_block():
    mesh, tokens, pairs = Mesh(2, 1, 1), 8192, 8192**2 / 2
    whole = COST.turn("block", "forward", "block", mesh, tokens, pairs)
    again = COST.turn("block", "again", "block with output", mesh, tokens, pairs)
    assert float(again.attention_s) == 0
    assert float(again.matmul_s) == float(whole.matmul_s)
    plain = COST.turn("block", "backward", "block", mesh, tokens, pairs)
    selective = COST.turn("block", "backward", "block", mesh, tokens, pairs, RECOMPUTE.index("selective"))
    assert float(selective.attention_s) == pytest.approx(float(plain.attention_s + whole.attention_s))
    assert float(COST.turn("head", "loss", "", mesh, tokens, pairs).traffic_s["tp"]) > 0
    assert float(whole.exposed_s(1e-6)) > float(whole.compute_s(1e-6)) > 0


EIGHT = [(SPEC.width, 2048), (SPEC.width, 512), (SPEC.width, 512), (2048, SPEC.width)]  # [k, n] of a block's weights on one of two ranks
EIGHT += [(SPEC.width, SPEC.ffn // 2)] * 2 + [(SPEC.ffn // 2, SPEC.width)]


def test_simulate_rounding_to_eight_bits_is_memory_traffic():
    """Of a block, forward what each weight takes and the weight, backward the gradient of what it gives and the weight. Each element of
    these is read for the largest magnitude of its block, divided, cast, copied and multiplied."""
    machine = files.cluster("64xa100-80")
    plain, eight = (Cost(SPEC, rates(machine, name), habits(False, name, machine.device)) for name in ("bf16", "float8"))
    mesh, tokens = Mesh(2, 1, 1), 4096
    for way, elements in (
        ("forward", sum(tokens * k + k * n for k, n in EIGHT)),
        ("backward", sum(tokens * n + k * n for k, n in EIGHT)),
    ):
        slower, before = (cost.turn("block", way, "block", mesh, tokens, 0.0) for cost in (eight, plain))
        assert float(slower.matmul_s) == float(before.matmul_s)
        passes = float(slower.elementwise_s - before.elementwise_s) / float(plain.rates.elementwise_s(2.0 * elements))
        assert 8 < passes < 16
    heads = [float(cost.turn("head", "loss", "", mesh, tokens, 0.0).device_s) for cost in (plain, eight)]
    assert heads[0] == heads[1]
    assert seconds(eight) > seconds(plain)


def test_simulate_codes_of_eight_bits_are_multiplied_faster_where_a_device_does():
    """By hand, of a block as above."""
    machine, mesh, tokens = files.cluster("64xh100"), Mesh(2, 1, 1), 4096
    plain, eight = (Cost(SPEC, rates(machine, name), habits(False, name, machine.device)) for name in ("bf16", "float8"))
    matmuls_s = sum(float(plain.rates.matmul_s(tokens, k, n)) for k, n in EIGHT)
    coded_s = float(plain.rates.elementwise_s(2 * CODED * sum(tokens * k + k * n for k, n in EIGHT)))
    work = eight.turn("block", "forward", "block", mesh, tokens, 0.0)
    assert float(work.matmul_s) == pytest.approx(OF_PRESETS * matmuls_s / CODES_GAIN + coded_s)
    assert seconds(eight) < seconds(plain)
    # Gradients of weights have no codes: half of a backward's matmuls are as fast as before.
    backward = [float(cost.turn("block", "backward", "block", mesh, tokens, 0.0).matmul_s) for cost in (plain, eight)]
    assert backward[0] * (1 / CODES_GAIN + 1) / 2 < backward[1] < backward[0]


def attention_s(cost: Cost, tokens: float, pairs: float, backward: bool) -> float:
    return float(cost.turn("block", "backward" if backward else "forward", "block", Mesh(), tokens, pairs).attention_s)


def test_simulate_long_documents_and_those_of_even_length_have_the_faster_kernel():
    """tokens and pairs; the length that documents have then, where some of each is left to the other kernel."""
    machine = files.cluster("64xh100")
    own = Cost(SPEC, rates(machine), habits(False, "bf16", machine.device))
    whole = (65536, 2**31), (8192, 8192**2 * 2), (2048, 2**21)
    cut = (65536, 2**30, 32768), (65535, 65535**2 / 2, 65535), (65536, 65536 * LONG / 2, LONG)
    other = (65536, 2**24), (LONG - 1, (LONG - 1) ** 2 / 2)
    for tokens, pairs, *lengths in (*whole, *cut, *other):
        for backward, gain in ((False, CUDNN_GAINS["forward_gain"]), (True, CUDNN_GAINS["backward_gain"])):
            slow_s, found_s = (attention_s(cost, tokens, pairs, backward) for cost in (COST, own))
            left = EVEN / lengths[0] if lengths else 0.0
            expected = 1.0 if (tokens, pairs) in other else REST * left + (1 - left) / gain
            assert found_s / slow_s == pytest.approx(expected)
    assert habits(False, "bf16", files.cluster("a100-80").device).cudnn == habits(False, "float32", machine.device).cudnn == 0


def test_simulate_operations_of_a_program_add_up_to_the_rate_card():
    """One rank, one micro-batch: the compute operations of `program.turns` take what the rate card says, whatever is recomputed."""
    for text in ("dp1", "recompute-selective", "recompute-full"):
        layout, code = Layout.parse(text), recompute_code(Layout.parse(text))
        turns = [("embeddings", turn, "embed") for turn in ("forward", "backward")] + [("head", "loss", "")] * 4
        if layout.recompute == "full":
            turns += [("block", turn, "block with output") for turn in ("pass", "again", "backward")] * SPEC.layers
        else:
            turns += [("block", turn, "block") for turn in ("forward", "backward")] * SPEC.layers
        works = [COST.turn(*turn, Mesh(), 8192, ONE["pairs"], code, loss_blocks=4) for turn in turns]
        works += [COST.accumulated(Mesh(), COST.sizes.block_elements)] * SPEC.layers + [
            COST.accumulated(Mesh(), COST.sizes.head_elements)
        ] * 2
        group_s = card(COST, micros=1, recompute=code).group[0]
        assert sum(float(work.device_s) for work in works) == pytest.approx(group_s, rel=0.02)  # a head in four blocks has smaller matmuls


def test_simulate_rate_cards_take_as_long_as_eight_thousand_divisions_at_the_most():
    """Divisions of as many numbers: 6,000 and 7,000 were measured, beside other work. A busy machine slows both, so they take turns."""
    count, rng = 65536, np.random.default_rng(0)
    many = {name: rng.choice([1.0, 2.0, 4.0], count) for name in ONE} | {"tokens": rng.choice([8192.0, 32768.0], count)}
    many |= {"pairs": many["tokens"] ** 2 / 2, "zero": rng.choice([0.0, 1, 2, 3], count)}
    card(COST, **many)
    ratios = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(1000):
            np.divide(many["pairs"], many["tokens"])
        divided = time.process_time()
        card(COST, **many)
        ratios.append((time.process_time() - divided) / (divided - began))
    assert statistics.median(ratios) < 8


def test_simulate_matmul_flops_of_a_block():
    """Without shape factors and memory, a block's forward and backward are six FLOP a weight and token."""
    plain = replace(Constants(), ramp=0.0, tail=0.0)
    made = replace(rates(files.preset("h100"), constants=plain), memory_bytes_per_s=1e30)
    cost = Cost(SPEC, made)
    work = cost.turn("block", "forward", "block", Mesh(), 8192, 1.0) + cost.turn("block", "backward", "block", Mesh(), 8192, 1.0)
    weights = sum(p.elements for p in SPEC.of_unit(1) if len(p.shape) > 1)
    assert float(work.matmul_s) == pytest.approx(OF_PRESETS * 6 * weights * 8192 / made.matmul_flops_per_s)


def test_simulate_measured_cluster_answers_from_its_curves():
    here = files.preset("cpu")
    made = rates(here, "float32")
    alone_s = float(here.matmul_s(256, 256, 256, "float32"))
    assert float(made.matmul_s(256, 256, 256)) == pytest.approx(alone_s / OF_CPU_CURVES["hot"])
    one = here.attention_s(256, 256, here.measured_heads[0], "float32", "forward", causal=True)
    assert float(one) > 0
    assert float(made.attention_s(512, 512**2 / 2, 4, 64, False)) > float(made.attention_s(256, 256**2 / 2, 4, 64, False))
    small = Cost(preset("tiny-llama"), made)
    assert seconds(small, tokens=1024, pairs=1024**2 / 2, dp=2, zero=1) > seconds(small, tokens=512, pairs=512**2 / 2, dp=2, zero=1) > 0


def test_simulate_a_cpu_pays_for_each_operation_and_a_gpu_for_those_that_it_waits_for():
    """However short a pack is, a block's operations take their time on a CPU, and each of its collectives waits for a late rank."""
    here, there = rates(files.preset("cpu"), "float32"), rates(files.preset("h100"))
    assert here.launch_s == 0 < here.dispatch_s
    assert there.dispatch_s == there.late_s == 0 < there.launch_s
    blind = replace(here, dispatch_s=0.0, late_s=0.0)
    found = {}
    for tokens in (1, 2048):
        for name, mesh in (("alone", Mesh()), ("tensor", Mesh(2))):
            works = [
                Cost(preset("tiny-llama"), one).turn("block", "forward", "block", mesh, tokens, 1024.0 * tokens) for one in (here, blind)
            ]
            found[name, tokens] = [*(float(one.exposed_s(here.launch_s)) for one in works), float(works[0].kernels)]
    for (name, _), (seconds, without, kernels) in found.items():
        assert 30 < kernels < 50
        assert seconds - without == pytest.approx(kernels * here.dispatch_s + 4 * here.late_s * (name == "tensor"), rel=1e-3)


def test_simulate_documents_shorter_than_all_that_were_measured():
    """On a CPU each has a call of its own, which takes what the shortest one took; in a GPU's one call they take their part of it."""
    alone = rates(files.preset("cpu"), "float32")
    together = replace(alone, dispatch_s=0.0)
    shortest = alone.cluster.shortest_attention(alone.cluster.measured_heads[0], "float32", "forward")
    assert shortest >= 32

    def of_one(made, tokens: float) -> float:
        return float(made.attention_s(tokens, tokens**2 / 2, 8, 64, False))

    assert of_one(alone, shortest) == of_one(together, shortest)
    for tokens in (1, shortest / 4, shortest / 2):
        assert of_one(alone, tokens) == pytest.approx(of_one(alone, shortest))
        share = tokens / shortest * (tokens / 2 + 256) / (shortest / 2 + 256)
        assert of_one(together, tokens) == pytest.approx(share * of_one(together, shortest))


LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8, 16]), "ulysses": st.sampled_from([1, 2]), "ring": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2, 8, 32]), "pp": st.sampled_from([1, 2, 4]), "virtual": st.sampled_from([1, 2]),
        "zero": st.sampled_from([0, 1, 2, 3]), "recompute": st.sampled_from(range(len(RECOMPUTE))), "micros": st.integers(1, 16),
        "tokens": st.sampled_from([1024, 8192, 65536]), "pairs": st.sampled_from([1024.0 * 512, 8192.0 * 4096]),
    }
)  # fmt: skip


@given(st.lists(LAYOUTS, min_size=2, max_size=8))
def test_simulate_scalar_is_vector(many):
    arrays = Candidates(**{name: np.array([one[name] for one in many], dtype=float) for name in ONE})
    together = closed_form(FORMULAS, arrays)
    cards = card(COST, **{name: np.array([one[name] for one in many]) for name in ONE})
    for index, one in enumerate(many):
        of_one = card(COST, **one)
        assert (of_one.group[0], of_one.once[0]) == pytest.approx((cards.group[index], cards.once[index]), rel=1e-12)
        alone = closed_form(FORMULAS, Candidates(**one))
        assert float(alone.total) == pytest.approx(together.total[index], rel=1e-12)
        assert float(closed_form(FORMULAS, arrays.take(slice(index, index + 1))).total[0]) == pytest.approx(float(alone.total), rel=1e-12)
        assert set(alone.parts) == set(PARTS)
        assert all(float(part) >= -1e-12 for part in [*alone.parts.values(), *alone.hidden.values()])


@given(LAYOUTS, st.sampled_from(["device.memory_bytes_per_s", "flops", "node", "network"]), st.floats(1.0, 4.0))
def test_simulate_faster_is_never_slower(layout, what, factor):
    slow = files.cluster("64xh100")
    device, links = slow.device, dict(slow.links)
    if what == "flops":
        device = replace(device, flops_per_s={name: value * factor for name, value in device.flops_per_s.items()})
    elif what in links:
        links[what] = replace(links[what], bytes_per_s=links[what].bytes_per_s * factor)
    else:
        device = replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor)
    fast = replace(slow, device=device, links=links)
    before, after = (seconds(Cost(SPEC, rates(one)), **layout) for one in (slow, fast))
    assert after <= before * (1 + 1e-12)


@given(LAYOUTS)
def test_simulate_habits_that_overlap_are_never_slower(layout):
    crowded = replace(FORMULAS, rates=replace(COST.rates, constants=replace(COST.rates.constants, crowd=0.0)))
    for name in ("tensor_hidden", "gather_hidden", "reduce_hidden", "messages_hidden", "ring_hidden"):
        off, on = (replace(crowded, habits=replace(Trainer(), **{name: value})) for value in (0.0, 1.0))
        off_s, on_s = (float(closed_form(cost, at(**layout)).total) for cost in (off, on))
        assert on_s <= off_s * (1 + 1e-3)  # what hides under computation leaves other traffic less of it


def test_simulate_more_recomputation_takes_longer():
    found = [seconds(recompute=RECOMPUTE.index(name)) for name in ("none", "selective", "full")]
    assert found == sorted(found)


def test_simulate_model_flops_by_convention():
    tokens, pairs = 8192.0, 8192.0**2 / 2
    found = model_flops(sizes(SPEC), tokens, pairs, SPEC.parameters)
    assert float(found["causal"]) == pytest.approx(tokens * SPEC.flops_per_token(8192 / 2), rel=1e-4)  # norms are not counted here
    assert found["6N blocks"] < found["6N"] < found["causal"] < found["full square"] < found["full square, recomputed"]
    assert float(mfu(found, 1.0, 8, 1e15)["causal"]) == pytest.approx(float(found["causal"]) / 8e15)


def test_simulate_calibration_finds_factors_and_stays_near_the_prior():
    rng = np.random.default_rng(0)
    parts = {name: rng.uniform(0.1, 1.0, 40) for name in PARTS}
    truth = Correction().moved({"all": 0.1, "device": 0.0, "inside": 0.2, "data": 0.0, "pipeline": 0.0})
    found = calibrate(parts, truth.total(parts))
    assert found.total(parts) == pytest.approx(truth.total(parts), rel=0.02)
    assert calibrate(parts, np.zeros(0)).factors == Correction().factors
    one = calibrate({name: part[:1] for name, part in parts.items()}, 3 * truth.total(parts)[:1])
    assert 1 < one.factors["all"] < 3
    assert len(found.factors) == 5


def test_simulate_fit_recovers_constants():
    arrays = Candidates(**(ONE | {"tp": np.array([1.0, 2, 4, 8, 8, 1]), "tokens": np.array([1024.0, 8192, 8192, 8192, 65536, 65536])}))

    def predict(constants):
        return closed_form(replace(FORMULAS, rates=rates(files.preset("a100-80"), constants=constants)), arrays).total

    truth = moved(Constants(), {"matmul": -0.1, "node": -0.2})
    found = fit(predict, predict(truth), Constants(), {"matmul": 0.2, "node": 0.4})
    assert found.matmul == pytest.approx(truth.matmul, rel=0.02)
    assert found.node == pytest.approx(truth.node, rel=0.05)


EMPTY = ("kv_heads", "vocab", "cp", "sp_ulysses", "vpp", "zero", "attn_impl", "shard_group", "fabric_gb_s_per_gpu", "overlap")
EMPTY += ("sequence_parallel", "compiled", "grad_bytes", "note")


def small_table() -> list[dict[str, str]]:
    """Rows of four made-up sources, 24 in all, and one without a step time."""
    rows = []
    for index in range(25):
        tp, pp = 2 ** (index % 4), 2 ** (index // 4 % 2)
        row = dict.fromkeys(EMPTY, "")
        row |= {"source": f"s{index % 4}", "row_id": f"r{index}", "gpu": "A100-80GB-SXM" if index % 3 else "H100-80GB-SXM", "gpus": "64"}
        row |= {"gpus_per_node": "8", "model": "GPT", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn": "16384"}
        row |= {
            "seq": "2048",
            "global_batch": "512",
            "micro_batch": str(1 + index % 3),
            "tp": str(tp),
            "pp": str(pp),
            "dp": str(64 // tp // pp),
        }
        row |= {"precision": "bf16", "recompute": "full", "step_time_s": str(4 + tp / 4 + pp / 3 + index / 50) if index < 24 else ""}
        rows.append(row)
    return rows


def judged(folder: Path, rows: list[dict[str, str]]) -> dict:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    words = [sys.executable, str(PUBLISHED), "--csv", str(path), "--calibrate", "3", "--json", "--quick"]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


def test_simulate_published_judges_a_table(tmp_path):
    found = judged(tmp_path, small_table())
    assert found["coverage"] == 1
    assert found["skipped"] == {"no step time": 1}
    assert {"mean_raw", "mean_calibrated", "pairs_right", "regret_first", "regret_best_of_3", "by_source"} <= set(found)


def test_simulate_published_is_blind_to_names(tmp_path):
    rows = small_table()
    rng = np.random.default_rng(0)
    other = [dict(row) for row in rows]
    for row, index in zip(other, rng.permutation(len(rows))):
        row |= {"source": rows[index]["source"], "row_id": rows[index]["row_id"], "note": f"x{index}"}
    one, two = judged(tmp_path, rows), judged(tmp_path, other)
    assert two["predicted_s"] == pytest.approx(one["predicted_s"], rel=1e-12)
    renamed = judged(tmp_path, [row | {"source": "z" + row["source"], "row_id": "", "note": "s0"} for row in rows])
    assert renamed["left_out_s"] == pytest.approx(one["left_out_s"], rel=1e-12)


def test_simulate_constants_are_named_and_fitted():
    assert {field.name for field in fields(Constants)} >= {"matmul", "network", "launch"}
    assert rates(files.preset("h100")).constants != Constants()


def test_simulate_asks_for_positive_sizes_where_meshes_have_other_kinds_of_matmuls(monkeypatch: pytest.MonkeyPatch):
    """On two of four ranks matmuls of a block of tiny-llama are alike that are not on others: measured curves refuse a size of none."""
    spec, asked = preset("tiny-llama"), []
    cost = Cost(spec, replace(rates(files.cluster("64xh100")), core_shares=(1.0, 1.0)))
    matmul_s = Rates.matmul_s
    monkeypatch.setattr(Rates, "matmul_s", lambda self, *sides: (asked.append(min(map(np.min, sides))), matmul_s(self, *sides))[1])
    meshes = Mesh.of(layouts.enumerate_layouts(spec, 4).candidates)
    counts = {len(turn.counts) for turn in cost._recorded(meshes, "block", "block", "backward", False)}
    assert len(counts) > 1
    cost.turn("block", "backward", "block", meshes, np.full(len(meshes.distinct[1]), 256.0), 256.0**2 / 2)
    assert min(asked) > 0


@pytest.mark.parametrize("name", ["gemma-3-1b", "llama-3-8b", "qwen3-0.6b", "tiny-qwen3-moe"])
@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_weights_of_a_rank_are_those_that_are_placed_there(name: str, tp: int):
    """Ranks beyond the key/value heads have copies of these."""
    spec, layout = preset(name), Layout.parse(f"tp{tp}")
    if spec.heads % tp:
        return
    boxes = boxes_on(spec, layout, 0)[1]
    placed = sum(box.elements for weight, parts in boxes.items() for box in parts if len(spec.by_name[weight].shape) == 2)
    assert sizes(spec).rank_elements(tp) == placed


def test_a_rate_card_has_the_formats_and_moments_of_the_run():
    device = files.preset("h100").device
    assert habits(False, "float64", device).gradient_bytes == 8
    assert habits(False, "bf16", device).gradient_bytes == 4
    layout, work = layouts.Candidates.of([Layout.parse("dp8.z2")]), (np.array([1]), np.array([4096.0]), np.array([4096.0**2 / 2]))
    machine = files.cluster("8xh100")
    without, usual = (habits(False, "bf16", device, moments=moments) for moments in (0, 2))
    seconds = [step_seconds(Cost(SPEC, rates(machine), habit), layout, *work).once for habit in (without, usual)]
    assert seconds[0] < seconds[1]
