"""The shortlist of a plan: every candidate counted, the bound below the ledger, the program as good as trying everything, no choice worse
than the best single layout."""

import gc
import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from longshift.cluster.cluster import Disk
from longshift.cluster.files import cluster
from longshift.errors import UsageError
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.planner import balance_stages, memory_bound, plan_evaluator
from longshift.planner import group_seconds as rate_cards
from longshift.planner.assign import MAX_GROUPS, best_assignments, tally_lengths
from longshift.planner.candidates import Candidates, enumerate_layouts, violations
from longshift.planner.memory_bound import Training, min_device_bytes, min_plan_bytes
from longshift.planner.neighbors import mesh_set, neighbors
from longshift.planner.plan_evaluator import PlanCandidate, PlanEvaluator, has_one_cut
from longshift.planner.search import SearchResult, search
from longshift.planner.shortlist import PlanEstimate, Problem, compare, find_rivals, shortlist
from longshift.planner.task import CONTEXT_BYTES, FILLED, PlanTask
from longshift.spec.families import preset
from longshift.spec.formats import FORMATS, Format, Wire, formats_of
from longshift.spec.model import ModelSpec, Rope
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import assumed
from longshift.switch.options import SwitchOptions
from longshift.trainer.auto_plan import plan
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.workload.groups import Edge
from longshift.workload.length_file import Lengths

ODD = ModelSpec("llama", 1009, 64, 5, 6, 3, 16, 176, 1 << 16, rope=Rope())
SMALL = ModelSpec("llama", 32000, 1024, 8, 16, 4, 64, 2816, 1 << 17, rope=Rope())
TIED = replace(SMALL, tied=True)
LARGE = ModelSpec("llama", 128256, 4096, 32, 32, 8, 128, 14336, 1 << 17, rope=Rope())
GIB = 1 << 30


def some_lengths(seed: int = 0, documents: int = 20000, longest: int = 1 << 15) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.65, documents)
    return np.unique(np.clip(drawn, 8, longest).astype(np.int64), return_counts=True)


def task_on(
    devices: str = "8xH100",
    gib: float = 80,
    longest: int = 1 << 15,
    seed: int = 0,
    spec: ModelSpec = LARGE,
    tokens: int = 1 << 20,
    **fixed: tuple,
) -> PlanTask:
    machine = cluster(devices)
    lengths = Lengths(*some_lengths(seed, longest=longest))
    return PlanTask(spec, machine, lengths, tokens, "bf16", machine.devices, fixed=fixed, memory_bytes=gib * GIB)


@cache
def listed_on(devices: str = "8xH100", gib: float = 80, longest: int = 1 << 15, seed: int = 0, **fixed: tuple) -> list[PlanEstimate]:
    task = task_on(devices, gib, longest, seed, **fixed)
    return shortlist(compare(Problem.of(task), task.budget_bytes))


# --- candidates ---


@pytest.mark.parametrize("spec", [ODD, SMALL, TIED, replace(SMALL, qk_norm_whole=True)])
@pytest.mark.parametrize("world", [1, 6, 8, 12, 16])
@pytest.mark.parametrize("float8", [False, True])
def test_plan_rules_are_those_of_layouts(spec: ModelSpec, world: int, float8: bool):
    known = enumerate_layouts(spec, world, float8=float8)
    assert sum(known.refused.values()) + len(known.candidates) == known.total
    assert len(np.unique(known.candidates.columns(), axis=0)) == len(known.candidates)
    rng = random.Random(world)
    degrees = [n for n in range(1, world + 1) if world % n == 0]
    some = [
        Layout(
            **{axis: rng.choice(degrees) for axis in ("dp", "pp", "tp", "ulysses", "ring")},
            virtual=rng.choice([1, 2, 4]),
            order=rng.choice(["1f1b", "gpipe"]),
        )
        for _ in range(400)
    ]
    wrong = np.logical_or.reduce(list(violations(spec, Candidates.of(some), float8).values()))
    assert wrong.tolist() == [bool(faults(spec, layout, layout.world, float8=float8)) for layout in some]
    for index in rng.choices(range(len(known.candidates)), k=50):
        layout = known.candidates.layout(index)
        assert faults(spec, layout, world, float8=float8) == ()
        assert Candidates.of([layout]).columns().tolist() == [known.candidates.columns()[index].tolist()]


def test_plan_keeps_to_what_is_fixed():
    known = enumerate_layouts(SMALL, 8, {"tp": [1, 2], "recompute": ["full"], "zero": [1]}).candidates
    assert set(known.degree("tp").tolist()) == {1, 2}
    assert {known.layout(index).recompute for index in range(len(known))} == {"full"}
    with pytest.raises(UsageError, match="'tensor' is nothing that a plan chooses"):
        enumerate_layouts(SMALL, 8, {"tensor": [1]})
    with pytest.raises(UsageError, match="ful"):
        enumerate_layouts(SMALL, 8, {"recompute": ["ful"]})


def test_plan_shards_experts_over_the_ranks_of_tp():
    """Of 8 x 3 matrices a block, whole on both ranks of tp: ZeRO-3 leaves half of their state on each, and the bound knows it."""
    spec = replace(SMALL, experts=8, top_k=2)
    known = enumerate_layouts(spec, 2, {"tp": [2], "recompute": ["full"]}).candidates
    assert known.zero.tolist() == [0, 1, 2, 3]
    assert enumerate_layouts(SMALL, 2, {"tp": [2], "recompute": ["full"]}).candidates.zero.tolist() == [0]
    machine = cluster("2xH100")
    task = PlanTask(spec, machine, Lengths.from_array(np.full(16, 4096)), 1 << 16, "bf16", 2, fixed={"tp": (2,), "pp": (1,)})
    evaluator, problem = PlanEvaluator(task), Problem.of(task)
    layouts = [Layout(f"tp2.recompute-full.z{zero}") for zero in (0, 3)]
    bounds = problem.min_bytes(Candidates.of(layouts), 4096.0)
    replicated, sharded = (evaluator.weigh((Edge(4096, layout),))[0]["device"] for layout in layouts)
    assert sharded < 0.6 * replicated
    assert bounds[0] <= replicated
    assert bounds[1] <= sharded
    assert evaluator.step((Edge(4096, layouts[1]),), 0).busy_s("gather") > 0
    small = replace(task, memory_bytes=1.1 * (sharded + CONTEXT_BYTES) / FILLED, fixed=task.fixed | {"recompute": ("full",)})
    assert {edge.use.zero for way in search(small).plans for edge in way.edges} >= {3}


# --- the bound ---


def ledger_bytes(
    spec: ModelSpec,
    layout: Layout,
    pack: int,
    micros: int,
    formats: Format,
    transport: str,
    home: HomeTiers = HomeTiers(),  # noqa: B008
) -> float:
    edges = (Edge(pack, layout),)
    way = Itinerary(spec, edges, assumed(8), formats.compute_bytes, formats.home_bytes, SwitchOptions())
    tokens = pack * layout.dp * micros - pack + 1  # with the last document, so many packs
    shape = StepShape(way, edges, formats, tokens, pack, home_in=home)
    return largest_need(memory_needs(shape, edges, transport)).device.total  # pyright: ignore[reportArgumentType]


def of_bound(
    seeds: range,
    wire: Wire = Wire(),  # noqa: B008  (frozen)
    home: HomeTiers = HomeTiers(),  # noqa: B008  (frozen)
    **switches: object,
) -> list[float]:
    """The bound over what the ledger says, of random layouts and of models with these switches."""
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        spec = replace(rng.choice([ODD, SMALL, TIED, LARGE]), **switches)  # pyright: ignore[reportArgumentType]
        known = enumerate_layouts(spec, rng.choice([1, 2, 4, 8]), {"order": ["1f1b", "gpipe"]}).candidates
        index = rng.randrange(len(known))
        layout, pack, micros = known.layout(index), rng.choice([256, 1024, 4096, 8192]), rng.choice([1, 2, 5, 9])
        precision, transport = rng.choice(["bf16", "bf16", "bf16", "float32"]), rng.choice(["nccl", "nccl", "gloo"])
        formats = formats_of(precision, rng.choice([0, 1, 2, 2]), wire=wire)
        few = micros if layout.order == "gpipe" else min(micros, 2 * layout.pp * layout.virtual + 1)
        outside = home.last == "disk" or (home.last == "host" and transport == "nccl")
        training = Training(spec, formats, transport, outside)  # pyright: ignore[reportArgumentType]
        bound = min_device_bytes(training, known.take(np.array([index])), pack, few)[0]
        found.append(bound / ledger_bytes(spec, layout, pack, micros, formats, transport, home))
    return found


def test_plan_bound_is_never_above_the_ledger_and_near_it():
    found = of_bound(range(120))
    assert max(found) <= 1
    assert np.median(found) > 0.9


@pytest.mark.parametrize(
    "switches",
    [{"qk_norm_whole": True, "norm_place": "after"}, {"fused": True, "rotary": 8}, {"residual_scale": 0.2}, {"experts": 8, "top_k": 2}],
)
def test_plan_bound_holds_for_models_of_other_families(switches: dict):
    found = of_bound(range(30), **switches)
    assert max(found) <= 1
    assert np.median(found) > 0.85


@pytest.mark.parametrize("wire", [Wire("bf16"), Wire("float8", "float8")], ids=str)
def test_plan_bound_holds_with_fewer_bits_on_the_wire(wire: Wire):
    found = of_bound(range(60), wire)
    assert max(found) <= 1
    assert np.median(found) > 0.85


@pytest.mark.parametrize("home", ["host", "disk", {"device": "8M", "host": "rest"}], ids=str)
def test_plan_bound_holds_for_homes_outside_the_device(home: object):
    found = of_bound(range(60), home=HomeTiers.parse(home))
    assert max(found) <= 1
    assert np.median(found) > 0.6  # a window of states, and masters on their way, are not counted


@pytest.mark.parametrize("home", ["device", "host"])
def test_plan_bound_of_several_groups_holds(home: str):
    found = []
    for seed in range(60):
        rng = random.Random(seed)
        spec, world = rng.choice([ODD, SMALL, TIED, LARGE]), rng.choice([2, 4, 8])
        known = enumerate_layouts(spec, world, {"order": ["1f1b", "gpipe"]}).candidates
        uptos = sorted(rng.sample([256, 1024, 2048, 4096], rng.choice([1, 2, 3])))
        edges = tuple(Edge(upto, known.layout(rng.randrange(len(known))), upto * rng.choice([1, 2])) for upto in uptos)
        formats, tokens, transport = formats_of(rng.choice(["bf16", "float32"]), rng.choice([0, 2])), 1 << 14, rng.choice(["nccl", "gloo"])
        way = Itinerary(spec, edges, assumed(8), formats.compute_bytes, formats.home_bytes, SwitchOptions())
        shape = StepShape(way, edges, formats, tokens, uptos[-1], home_in=HomeTiers(home))
        needed = largest_need(memory_needs(shape, edges, transport)).device.total  # pyright: ignore[reportArgumentType]
        training = Training(spec, formats, transport, home == "host" and transport == "nccl")  # pyright: ignore[reportArgumentType]
        found.append(min_plan_bytes(training, edges, tokens) / needed)
    assert max(found) <= 1
    assert np.median(found) > 0.6


@pytest.mark.parametrize(("text", "layers", "micros"), [("pp4.v2.dp2.z1", 8, 13), ("pp3.v2.dp2.z1", 12, 9), ("pp4.v2.dp2.z1", 8, 6)])
def test_plan_bound_counts_packs_in_flight_of_interleaved_orders(text: str, layers: int, micros: int):
    """The first stage of pp4.v2 has 11 passes under way, of which 3 are of the second four micro-batches: without these, 0.77."""
    spec, layout, formats = replace(SMALL, layers=layers), Layout.parse(text), FORMATS["bf16"]
    weighed = min(micros, 2 * layout.pp * layout.virtual + 1)
    bound = float(min_device_bytes(Training(spec, formats, "nccl"), Candidates.of([layout]), 8192, weighed)[0])
    assert 0.95 < bound / ledger_bytes(spec, layout, 8192, micros, formats, "nccl") <= 1


def test_plan_bound_counts_packs_in_flight(monkeypatch: pytest.MonkeyPatch):
    """Mutants: one pack in flight on every stage, and all of them."""
    layout = Layout.parse("pp4.dp2.z1")
    at, small = Candidates.of([layout]), FORMATS["bf16"]

    def ratio() -> float:
        return float(min_device_bytes(Training(SMALL, small, "nccl"), at, 8192, 9)[0] / ledger_bytes(SMALL, layout, 8192, 9, small, "nccl"))

    assert 0.9 < ratio() <= 1
    one = np.ones(1, np.int64)
    monkeypatch.setattr(memory_bound, "in_flight", lambda candidates, micros, is_first: memory_bound.InFlight(one, one > 0, one > 0))
    assert ratio() < 0.75
    monkeypatch.setattr(memory_bound, "in_flight", lambda candidates, micros, is_first: memory_bound.InFlight(micros, one > 0, one > 0))
    assert ratio() > 1


# --- the program over edges and layouts ---


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    edges, layouts = (int(rng.integers(1, most)) for most in (5, 4))
    cost = np.full((edges, edges + 1, layouts), np.inf)
    for i, j in combinations(range(edges + 1), 2):
        cost[i, j] = np.where(rng.random(layouts) < 0.8, rng.random(layouts) * (j - i), np.inf)
    switch = np.where(np.eye(layouts, dtype=bool), 0.0, rng.random((layouts, layouts)) * 0.3)
    return cost, rng.random((edges, edges + 1)), switch, rng.random(layouts) * 0.1


def brute(cost: np.ndarray, present: np.ndarray, switch: np.ndarray, last: np.ndarray) -> float:
    """The least seconds of every assignment, tried one by one."""
    edges, _, layouts = cost.shape
    least = np.inf
    for count in range(1, min(MAX_GROUPS, edges) + 1):
        for ends in combinations(range(1, edges), count - 1):
            cuts = [0, *ends, edges]
            for some in product(range(layouts), repeat=count):
                seconds = sum(cost[i, j, k] for i, j, k in zip(cuts, cuts[1:], some)) + last[some[-1]]
                seconds += sum(present[cuts[n], cuts[n + 1]] * switch[some[n + 1], some[n]] for n in range(count - 1))
                least = min(least, float(seconds))
    return least


def test_plan_program_equals_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        case = random_case(rng)
        found, least = best_assignments(*case), brute(*case)
        assert bool(found) == np.isfinite(least)
        if found:
            cost, present, switch, last = case
            one = found[0]
            cuts = (0, *one.ends)
            seconds = sum(cost[i, j, k] for i, j, k in zip(cuts, one.ends, one.layouts)) + last[one.layouts[-1]]
            for n in range(len(one.ends) - 1):
                seconds += present[cuts[n], cuts[n + 1]] * switch[one.layouts[n + 1], one.layouts[n]]
            assert one.seconds == pytest.approx(least, rel=1e-12) == seconds
            assert [a.seconds for a in found] == sorted(a.seconds for a in found)


def test_plan_program_with_more_layouts_is_never_worse():
    rng = np.random.default_rng(1)
    for _ in range(100):
        cost, present, switch, last = random_case(rng)
        few = best_assignments(cost[:, :, :1], present, switch[:1, :1], last[:1])
        every = best_assignments(cost, present, switch, last)
        assert not few or every[0].seconds <= few[0].seconds + 1e-12


# --- lengths, packs ---


def test_plan_tallies_all_tokens():
    lengths = Lengths(*some_lengths(longest=5000))
    found = tally_lengths(ODD, lengths, 10_000, int(lengths.lengths[-1]))
    documents, tokens, *_ = found.sums[-1]
    assert tokens == pytest.approx(10_000)
    assert documents == pytest.approx(10_000 * lengths.documents / lengths.tokens)
    assert found.edges[-1] == lengths.lengths[-1]
    assert (np.diff(found.edges) > 0).all()
    parts = [found.between(n, n + 1) for n in range(len(found.edges))]
    assert sum(float(part.tokens) for part in parts) == pytest.approx(10_000)
    assert all(part.documents > 0 for part in parts)
    assert [float(part.longest) <= edge for part, edge in zip(parts, found.edges)] == [True] * len(parts)


# --- the whole ---


@pytest.mark.parametrize("gib", [40, 60, 80, 141])
@pytest.mark.parametrize("devices", ["8xH100", "32xH100"])
def test_plan_is_never_worse_than_the_best_single_layout(gib: float, devices: str):
    task, listed = task_on(devices, gib), listed_on(devices, gib)
    problem = Problem.of(task)
    assert min(len(way.edges) for way in listed) == 1
    assert [way.seconds for way in listed] == sorted(way.seconds for way in listed)
    for way in listed:
        assert way.edges[-1].upto == task.longest
        for edge in way.edges:
            assert faults(LARGE, edge.use, task.world, edge.upto) == ()
            assert edge.pack >= edge.upto
            assert problem.min_bytes(Candidates.of([edge.use]), edge.pack)[0] <= task.budget_bytes


def test_plan_with_more_memory_or_faster_links_is_not_slower():
    """Candidates are pruned, so this holds to a percent, not to the last bit."""
    seconds = [listed_on("8xH100", gib)[0].seconds for gib in (40, 60, 80, 141)]
    assert all(after <= before * 1.01 for before, after in pairwise(seconds))
    task = task_on("32xH100")
    network = task.cluster.links["network"]
    links = {**task.cluster.links, "network": replace(network, bytes_per_s=4 * network.bytes_per_s)}
    fast = replace(task, cluster=replace(task.cluster, links=links))
    one, other = (shortlist(compare(Problem.of(some), some.budget_bytes))[0] for some in (task, fast))
    assert other.seconds <= one.seconds * 1.01


def test_plan_of_fewer_candidates_is_not_faster():
    free = listed_on()[0]
    for fixed in ({"tp": (1, 2)}, {"pp": (2,)}, {"zero": (1,)}, {"recompute": ("full",)}):
        assert all(free.seconds <= way.seconds * 1.01 for way in listed_on(**fixed)[:1])


def test_plan_is_equal_in_every_process():
    lines = (
        "import sys, json",
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
        "import test_plan_search as t",
    )
    program = "; ".join((*lines, "print(t.listed_on())"))
    texts = []
    for seed in ("0", "1"):
        where = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        texts.append(subprocess.run([sys.executable, "-c", program], env=where, capture_output=True, check=True, text=True).stdout)
    assert texts[0] == texts[1]
    assert texts[0].strip() == str(listed_on())


def test_plan_says_what_would_fit_where_nothing_does():
    found = search(task_on(gib=12))
    assert found.best is None
    assert any("data.max_len" in change or "devices" in change for change in found.changes)
    fixed = search(task_on(gib=43, tp=(1,), u=(1,), ring=(1,), recompute=("none",)))
    assert fixed.best is None
    assert any(change.startswith("leave") for change in fixed.changes)


def test_plan_says_that_a_device_is_below_what_torch_needs():
    small = cluster("8xH100")
    small = replace(small, device=replace(small.device, memory_bytes=1e6))
    found = plan(PlanTask(SMALL, small, Lengths.from_array(np.full(8, 1024)), 1 << 14, "bf16", 8))
    assert found.lines() == ["a device has 977 KiB of memory, and torch and its context alone need 1.06 GiB"]


def test_plan_names_the_longest_cut_that_the_ledger_confirms():
    """Bounds say that 8K fits, and a step with documents of 4K lacks 1 GiB."""
    lengths, fixed = Lengths.from_array(np.full(64, 1 << 13)), {"tp": (2,), "pp": (1,), "z": (3,), "recompute": ("full",)}
    asked = PlanTask(preset("llama-3-8b"), cluster("4xa100-40"), lengths, 1 << 20, "bf16", 4, fixed=fixed)
    changes = search(asked).changes
    assert "cut documents at 2K tokens with data.max_len" in changes
    for longest, fits in ((1 << 11, True), (1 << 12, False)):
        shorter = replace(asked, lengths=Lengths.from_array(np.full(64, longest)))
        assert (search(shorter).best is not None) == fits


def test_plan_names_a_streamed_layout_for_a_home_outside_the_device():
    lengths, fixed = Lengths.from_array(np.array([1 << 19])), {"tp": (1,), "pp": (1,), "ring": (1,), "u": (4,)}
    asked = PlanTask(preset("llama-3-8b"), cluster("4xa100-40"), lengths, 1 << 19, "bf16", 4, fixed=fixed)
    (change,) = [change for change in search(asked).changes if change.startswith("home: host, with ")]
    assert "u4.z3.chunk64K" in change
    assert search(replace(asked, home=HomeTiers("host"))).best is not None


def test_plan_puts_the_training_state_where_the_config_says():
    """Of 8B on one GPU: masters, moments and gradients need 120 GiB of the host, which a small host has not, and a disk may have."""
    spec, lengths = preset("llama-3-8b"), Lengths.from_array(np.full(64, 4096))
    asked = PlanTask(spec, replace(cluster("1xh100"), host_bytes=200e9), lengths, 1 << 15, "bf16", 1)
    none = search(asked)
    assert none.best is None
    assert any(change.startswith("home: host, with ") for change in none.changes)
    found = search(replace(asked, home=HomeTiers("host"))).best
    assert found
    state = spec.parameters * 16
    assert found.bytes["device"] <= asked.budget_bytes
    assert state < found.bytes["host"] < 1.1 * state
    small = replace(asked.cluster, host_bytes=80e9)
    lacking = search(replace(asked, cluster=small, home=HomeTiers("host")))
    assert lacking.best is None
    _, lack, place = lacking.short[0]
    assert (lack, place) == (pytest.approx(state - 0.94 * 80e9, rel=0.05), "host")
    with pytest.raises(UsageError, match="nothing is known of a disk of NVIDIA H100"):
        search(replace(asked, home=HomeTiers("disk")))
    on_disk = search(replace(asked, cluster=replace(small, disk=Disk(1e12, 6e9, 6e9)), home=HomeTiers("disk"))).best
    assert on_disk
    assert on_disk.bytes["disk"] > state - 4 * spec.parameters
    assert found.seconds < on_disk.seconds


@pytest.mark.parametrize(
    ("devices", "disk", "best"),
    [("1xh100", None, "host"), ("2xh100", None, "host"), ("8xh100", 1e12, "device"), ("1xh100", 1e12, "disk")],
)
def test_plan_takes_the_home_that_makes_a_step_fastest(devices: str, disk: float | None, best: str):
    """Of 8B; the disk, which is slower, where nothing else fits. One home alone would say what it says among several."""
    spec, lengths = preset("llama-3-8b"), Lengths.from_array(np.full(64, 4096))
    small = {"host_bytes": 80e9} if best == "disk" else {}
    machine = replace(cluster(devices), disk=None if disk is None else Disk(disk, 6e9, 6e9), **small)
    homes = [HomeTiers("device"), HomeTiers("host"), *([HomeTiers("disk")] if disk else [])]
    asked = PlanTask(spec, machine, lengths, 1 << 18, "bf16", machine.devices, homes=tuple(homes))
    found = plan(asked)
    assert str(found.task.home) == best
    seconds = {str(one.task.home): one.choice.seconds for one in (found, *found.alternatives)}
    assert set(seconds) == ({"device", "host", "disk"} if best == "disk" else {"device", "host"})
    assert found.choice.seconds == min(each for each in seconds.values() if each is not None)
    for home, each in seconds.items():
        alone = plan(replace(asked, home=HomeTiers.parse(home), homes=()))
        assert (alone.choice.seconds, alone.alternatives) == (each, ())
    told = "\n".join(found.lines())
    tried = [f"  {way}: {way.seconds:.3g} s" for way in found.choice.trial_plans()]
    assert ("layout: auto trains some steps of each of these" in told) == (len(tried) > 1)
    assert len(tried) == 1 or "\n".join(tried) in told
    for home, each in seconds.items():
        assert (f"with home: {home} " in told) == (home != best)
        assert each is not None or f"with home: {home} nothing fits" in told


def test_plan_makes_all_updates_late_where_early_ones_have_no_room():
    lengths = Lengths.from_array(np.full(64, 4096))
    machine = replace(cluster("1xh100"), disk=Disk(1e12, 2e9, 2e9))
    asked = PlanTask(preset("llama-3-8b"), machine, lengths, 1 << 15, "bf16", 1, home=HomeTiers("disk"))
    edges = (Edge(4096, Layout.parse("vertical.recompute-full")),)
    early, late = PlanEvaluator(asked), PlanEvaluator(asked)
    late.late_updates.add(edges)
    needs = [one.weigh(edges)[0]["disk"] for one in (early, late)]
    assert needs[1] < needs[0]
    tight = PlanEvaluator(replace(asked, cluster=replace(asked.cluster, disk=Disk(sum(needs) / 2, 2e9, 2e9))))
    assert tight.fits(edges)
    assert tight.weigh(edges) == late.weigh(edges)
    assert not tight.candidate(edges).shape.early
    assert early.candidate(edges).shape.early


def test_plan_streams_what_no_layout_of_whole_packs_holds():
    """Of few tokens, so that chunks are few; documents that fit whole packs have these."""
    found = search(task_on("4xH100", 6, 1 << 19, spec=SMALL, tokens=1 << 19, pp=(1,), ring=(1,)))
    assert found.best is not None
    assert found.single is not None
    *whole, streamed = found.best.edges
    assert streamed.use.chunk
    assert whole
    assert not any(edge.use.chunk for edge in whole)
    assert found.single.edges[0].use.chunk
    assert found.best.seconds <= found.single.seconds


@pytest.mark.parametrize("gib", [3.0, 4.0, 5.0, 8.0])
def test_plan_finds_what_fits_though_bounds_say_that_more_does(gib: float):
    """Of a few layouts, all of them weighed."""
    task = task_on("4xH100", gib, 1 << 14, spec=SMALL, tokens=1 << 17, pp=(1,), ring=(1,), recompute=("full",))
    found, evaluator = search(task), PlanEvaluator(task)
    at = enumerate_layouts(SMALL, 4, task.fixed_fields).candidates
    fits = [evaluator.fits((Edge(task.longest, at.layout(n)),)) for n in range(len(at))]
    assert any(fits)
    assert found.best is not None
    assert not any(edge.use.chunk for edge in found.best.edges)


def test_plan_counts_every_candidate_and_names_rivals():
    task = task_on(gib=40)
    problem = Problem.of(task)
    comparison = compare(problem, task.budget_bytes)
    assert problem.enumeration.total == enumerate_layouts(LARGE, 8).total
    assert comparison.num_too_large == sum(problem.min_bytes(comparison.candidates, 256.0) > task.budget_bytes)
    rivals = find_rivals(comparison, shortlist(comparison)[0].seconds)
    assert rivals
    for rival in rivals:
        layout = Candidates.of([Layout.parse(rival.layout)])
        assert rival.short_bytes == problem.min_bytes(layout, float(task.longest))[0] - task.budget_bytes > 0
        assert rival.times < 1


def test_plan_scale_is_measured():
    """A busy machine takes longer; the benchmark's bounds are for a quiet one."""
    script = Path(__file__).parents[2] / "benchmarks" / "plan_scale.py"
    run = subprocess.run([sys.executable, script, "--quick", "--json"], capture_output=True, text=True, timeout=120, check=True)
    summary = json.loads(run.stdout)["summary"]
    for name, most_s in (("8B on 8", 1.0), ("a million lengths", 1.0)):
        case = summary["cases"][name]
        assert case["seconds"] <= 4 * most_s
        assert case["peak_mib"] <= 512
        assert case["candidates"] > sum(case["refused"].values()) > 0


# --- uneven stages ---


def test_plan_deals_blocks_as_trying_every_way_does():
    """The rank with most to do has as little as it can; every virtual stage has a block, and all blocks are dealt."""
    rng = random.Random(3)
    for _ in range(300):
        pp, virtual = rng.choice([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
        layers, besides = rng.randint(pp * virtual, 12), [0.0] * pp
        besides[0], besides[-1] = rng.choice([0.0, 0.3, 2.0]), rng.choice([0.0, 0.7, 2.5, 6.0])
        sizes = balance_stages.stage_sizes(layers, virtual, besides)
        layout = Layout(pp=pp, virtual=virtual, stages=sizes)
        assert not faults(replace(SMALL, layers=layers), layout, pp)
        each = [some for some in product(range(virtual, layers + 1), repeat=pp) if sum(some) == layers]
        assert balance_stages.largest_load(layers, layout, besides) == min(max(map(sum, zip(some, besides))) for some in each)
        assert all(max(mine) - min(mine) <= 1 for mine in (sizes[rank::pp] for rank in range(pp)))


def test_plan_moves_blocks_off_the_rank_with_the_head():
    """A vocabulary of 128K beside blocks of 1,024: the way that is chosen is no slower than the same mesh with any other stages."""
    spec, machine = replace(SMALL, vocab=128256, layers=8), cluster("4xH100")
    task = PlanTask(
        spec, machine, Lengths(*some_lengths(longest=1 << 13)), 1 << 18, "bf16", 4, fixed={"pp": [2], "virtual": [1], "tp": [1]}
    )
    found = search(task)
    best = found.best
    assert best is not None
    assert found.single is not None
    (use,) = {edge.use for edge in found.single.edges}
    assert use.stages[0] > use.stages[-1]
    evaluator = PlanEvaluator(task)
    for first in range(1, spec.layers):
        other = replace(found.single.edges[0], use=replace(use, stages=(first, spec.layers - first)))
        assert found.single.seconds <= evaluator.mean_seconds((other,)) * (1 + 1e-9), (use, first)


def test_plan_groups_of_one_cut_gather_and_reduce_once():
    """A shortlist names groups of one cut, and has them and single layouts as near to the clock."""
    task = PlanTask(SMALL, cluster("2x4xa100-40"), Lengths(*some_lengths(longest=1 << 14)), 1 << 21, "bf16", 8)
    listed, evaluator = shortlist(compare(Problem.of(task), task.budget_bytes)), PlanEvaluator(task)
    near = {way.edges: way.seconds / evaluator.mean_seconds(way.edges) for way in listed}
    assert all(0.85 < ratio < 1.05 for ratio in near.values())
    assert any(len(edges) > 1 and has_one_cut(edges) for edges in near)


def test_plan_plays_siblings_of_what_a_shortlist_names():
    """Recomputation that nothing needs, and packs that are too small, go; where the memory is short they stay."""
    task = PlanTask(SMALL, cluster("4xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 18, "bf16", 4)
    given = (Edge(1 << 10, Layout.parse("dp4.recompute-full.z2"), 1 << 11), Edge(1 << 12, Layout.parse("dp2.u2.z2")))
    evaluator = PlanEvaluator(task)
    best, named = evaluator.rank([given])[0], evaluator.mean_seconds(given)
    assert best.seconds < 0.9 * named
    assert [edge.use for edge in best.edges] == [Layout.parse("dp4.z1"), Layout.parse("dp2.u2.z1")]
    needed = evaluator.weigh(given)[0]["device"]
    tight = PlanEvaluator(replace(task, memory_bytes=reserved(needed + 1)))
    assert all(way.bytes["device"] <= needed + 1 for way in tight.rank([given]))
    assert best.bytes["device"] > needed
    assert tight.rank([given])[0].edges != best.edges


def test_plan_tries_the_plainest_first_and_near_ways_of_other_meshes():
    """First the plainest way that the clock has CLOSE, then the fastest, a single layout, other meshes as far as they are NEAR, and
    siblings where these are few; none twice."""
    three, two = "dp4.z1 <= 512 > dp2.u2 <= 1K > u4 <= 2K", "dp4.z1 <= 512 > u4 <= 2K"

    def tried(*ways: tuple[str, float]) -> list[str]:
        made = [PlanCandidate(_groups(text), seconds, {}, "", cast(StepShape, None), ()) for text, seconds in ways]
        names = {_groups(text): text for text, _ in ways}
        return [names[way.edges] for way in SearchResult(tuple(made)).trial_plans()]

    assert tried((three, 1.0), (two, 1.04), ("dp2.u2.z1", 1.06), ("dp2.u2", 1.07)) == [two, three, "dp2.u2.z1"]
    assert tried((three, 1.0), ("dp2.u2", 1.04), (two, 1.14)) == ["dp2.u2", three, two]
    assert tried((three, 1.0), ("dp2.u2", 1.04), (two, 1.16)) == ["dp2.u2", three]
    assert tried((three, 1.0), (two, 1.04), ("dp2.u2", 1.5), ("tp4", 1.6)) == [two, three, "dp2.u2"]
    assert tried((two, 1.0), ("u4", 1.06), (three, 1.07), ("dp4", 1.1), ("tp4", 1.2)) == [two, "u4", "dp4", three]
    alone = [(text, 1.06 + number / 100) for number, text in enumerate(("u4", "dp2.u2", "tp4", "ring4", "pp4", "dp2.tp2", "pp2.tp2"))]
    assert tried((two, 1.0), *alone) == [two, "u4", "dp2.u2", "tp4", "ring4", "pp4"]
    alike = ("dp4.z2", 1.0), ("dp4.z1 <= 512 > dp4.z2 <= 2K", 1.01), ("dp4", 1.04), ("dp4.z3", 1.04), ("dp4.z1", 1.06), ("u4", 1.07)
    assert tried(*alike) == ["dp4", "dp4.z2", "u4", "dp4.z3", "dp4.z1 <= 512 > dp4.z2 <= 2K"]
    assert tried(("dp4", 1.0), ("u4", 1.2)) == ["dp4"]
    assert tried() == []


def _groups(text: str) -> tuple[Edge, ...]:
    parts = [part.split(" <= ") for part in text.split(" > ")]
    sizes = {"512": 512, "1K": 1024, "2K": 2048}
    return tuple(Edge(sizes[upto[0]] if upto else 2048, Layout.parse(use)) for use, *upto in parts)


def test_plan_is_sure_of_what_is_tried_and_of_what_it_is_compared_with():
    """Of most ways one step is played on the clock. Those that a run would try, and the best single layouts, are played on several."""
    task = PlanTask(SMALL, cluster("4xH100"), Lengths(*some_lengths(longest=1 << 13)), 1 << 17, "bf16", 4)
    for gib in (4.0, 6.0, 80.0):
        asked = replace(task, memory_bytes=gib * GIB)
        found, fresh = search(asked), PlanEvaluator(asked)
        assert any(not way.is_sure for way in found.plans)
        assert found.single is not None
        assert found.context_parallel is not None
        for way in (*found.trial_plans(), found.single, found.context_parallel):
            assert way.seconds == fresh.mean_seconds(way.edges)
        assert [way.seconds for way in found.plans] == sorted(way.seconds for way in found.plans)


def test_plan_siblings_differ_in_one_group_and_hold_its_longest_document():
    edges = (Edge(512, Layout.parse("dp4.recompute-full")), Edge(2048, Layout.parse("u4"), 8192))
    others = list(neighbors(edges))
    assert len(set(others)) == len(others)
    for other in others:
        (place,) = (n for n in range(2) if other[n] != edges[n])
        assert other[place].upto <= other[place].pack
    assert {str(other[1].use) for other in others} == {"u4", "u4.z1", "u4.z2", "u4.z3"}
    assert {other[0].upto for other in others} == {256, 512, 1024}
    assert {other[1].pack for other in others} == {4096, 8192, 16384}
    whole = {str(other[0].use) for other in neighbors((Edge(512, Layout.parse("dp4.recompute-full")),))}
    assert whole >= {"dp4", "dp4.recompute-selective"}
    assert list(neighbors((Edge(1 << 20, Layout.parse("u4.z3.chunk16K")),))) == []


def test_plan_siblings_have_less_zero_in_one_group_or_in_all():
    stream = Edge(1 << 20, Layout.parse("u4.z3.chunk16K"))
    edges = (Edge(512, Layout.parse("dp4.recompute-full.z3")), Edge(2048, Layout.parse("u4.z1")), stream)
    others = [other for other in neighbors(edges) if [edge.pack for edge in other] == [edge.pack for edge in edges]]
    named = {tuple(str(edge.use) for edge in other) for other in others if other[0].use.recompute == "full"}
    one = {("dp4.recompute-full" + stage, "u4.z1") for stage in (".z1", ".z2")}
    one |= {("dp4.recompute-full.z3", "u4.z1" + stage) for stage in ("",)} | {
        ("dp4.recompute-full.z3", "u4" + stage) for stage in (".z2", ".z3")
    }
    assert named == {(*uses, "u4.z3.chunk16K") for uses in one}
    assert "u4" in {str(other[0].use) for other in neighbors((Edge(2048, Layout.parse("u4.z1")),))}
    (both,) = (
        other for other in neighbors((Edge(512, Layout.parse("dp4.z2")), Edge(2048, Layout.parse("u4.z2")))) if _zeros(other) == [1, 1]
    )
    assert [edge.upto for edge in both] == [512, 2048]


def test_plan_plays_what_it_is_given_with_less_zero():
    """A shortlist's bound can lack what the ledger has room for, and names a dearer ZeRO stage then. Of the slowest way, too."""
    task = PlanTask(SMALL, cluster("4xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 18, "bf16", 4)
    given = [(Edge(1 << 12, Layout.parse(text)),) for text in ("dp4", "dp2.u2.z1", "u4.z3", "tp4")]
    found = {str(way) for way in PlanEvaluator(task).rank(given)}
    assert found >= {"dp2.u2", "u4.z2", "u4.z3", "tp4"}


def test_plan_plays_what_does_not_fit_with_smaller_packs():
    """Its packs are halved until it fits, and no further; what fits in none is left out."""
    task = PlanTask(SMALL, cluster("4xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 18, "bf16", 4)
    given = (Edge(1 << 12, Layout.parse("u4.z1"), 1 << 16),)
    needed = {pack: PlanEvaluator(task).weigh((replace(given[0], pack=pack),))[0]["device"] for pack in (1 << 12, 1 << 13, 1 << 14)}
    for pack, room in ((1 << 14, needed[1 << 14]), (1 << 13, needed[1 << 14] - 1)):
        tight = PlanEvaluator(replace(task, memory_bytes=reserved(room)))
        played = {(str(way.edges[0].use), way.edges[0].pack) for way in tight.rank([given])}
        assert ("u4.z1", pack) in played
        assert all(size <= pack for use, size in played if use == "u4.z1")
    tight = PlanEvaluator(replace(task, memory_bytes=reserved(needed[1 << 12] - 1)))
    assert not any(way.edges[0].use.zero <= 1 for way in tight.rank([given]))


def test_plan_takes_rate_cards_in_pieces_as_all_at_once(monkeypatch: pytest.MonkeyPatch):
    task = PlanTask(LARGE, cluster("8xH100"), Lengths(np.array([300, 2000, 9000]), np.array([900, 90, 9])), 1 << 17, "bf16", 8)
    problem = Problem.of(task)
    whole = compare(problem, task.budget_bytes).seconds
    monkeypatch.setattr(rate_cards, "AT_ONCE", 77)
    np.testing.assert_array_equal(compare(problem, task.budget_bytes).seconds, whole)
    assert len(whole) > 10 * rate_cards.AT_ONCE


def test_plan_names_single_layouts_besides_the_best_groups():
    listed = listed_on("64xH100", longest=1 << 17)
    singles = [way for way in listed if len(way.edges) == 1]
    assert len(listed) - len(singles) >= 3
    assert len(singles) >= 3
    assert len({mesh_set(way.edges) for way in singles}) == len(singles)


def reserved(tensor_bytes: float) -> float:
    """Memory of a device with room for tensors of so many bytes."""
    return (tensor_bytes + CONTEXT_BYTES) / FILLED


def _zeros(edges: tuple[Edge, ...]) -> list[int]:
    return [edge.use.zero for edge in edges]


def test_plan_plays_the_best_of_several_meshes_to_the_end():
    """Siblings of the fastest do not crowd them out."""
    task = PlanTask(SMALL, cluster("4xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 18, "bf16", 4)
    given = [(Edge(1 << 12, Layout.parse(text)),) for text in ("dp4.recompute-full.z3", "dp2.u2.z1", "u4.z1", "tp4")]
    found = PlanEvaluator(task).rank(given)
    ended = {mesh_set(way.edges) for way in found if len(way.steps) == plan_evaluator.STEPS}
    assert ended == set(map(mesh_set, given))
    assert len(found) > 2 * len(given)


def test_plan_siblings_keep_to_what_is_fixed():
    task = PlanTask(SMALL, cluster("4xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 18, "bf16", 4)
    given = (Edge(1 << 12, Layout.parse("dp4.z3")),)
    for fixed, zeros in (({}, {0, 1, 2, 3}), ({"z": (2, 3)}, {2, 3}), ({"zero": (3,)}, {3})):
        found = PlanEvaluator(replace(task, fixed=fixed)).rank([given])
        assert {edge.use.zero for way in found for edge in way.edges} == zeros


def test_plan_leaves_even_stages_that_are_as_good():
    task = PlanTask(
        replace(SMALL, vocab=64), cluster("4xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 17, "bf16", 4, fixed={"pp": [2]}
    )
    found = search(task)
    assert found.plans
    assert not any(edge.use.stages for way in found.plans for edge in way.edges)


def test_plan_says_how_far_it_is_and_leaves_garbage_collection_as_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_evaluator, "REPORT_EVERY_S", 0.0)
    task, before, told = (
        PlanTask(SMALL, cluster("2xH100"), Lengths(*some_lengths(longest=1 << 12)), 1 << 16, "bf16", 2),
        gc.get_threshold(),
        [],
    )
    found = search(task, lambda line: told.append((line, gc.get_threshold())))
    words = [line for line, _ in told if "steps played on the clock" in line]
    assert words[0].startswith("0 ways weighed, 0 steps")
    weighed, played = (int(word) for word in words[-1].split() if word.isdigit())
    assert weighed >= len(found.plans)
    assert played >= len(found.plans)
    assert all(thresholds != before for _, thresholds in told)
    assert gc.get_threshold() == before


def test_plan_of_one_layout_alone_is_the_best_single_one():
    task = PlanTask(SMALL, cluster("4xA100-40"), Lengths(*some_lengths(longest=1 << 15)), 1 << 18, "bf16", 4)
    all_, alone = search(task), search(task, single=True)
    assert {len(way.edges) for way in alone.plans} == {1}
    assert alone.best == alone.single
    assert alone.single is not None
    assert all_.single is not None
    assert all_.best is not None
    assert all_.best.seconds <= alone.single.seconds * (1 + 1e-9) <= all_.single.seconds * (1 + 1e-9)
