"""What papers and talks say of whole runs, beside what the simulator and the planner say of the same: `published.py --anchors`.

stages    Seconds of a micro-batch of one document on a pipeline stage, 21 layouts of three GPT-like models on A800 (Hydraulis:
          github.com/PKU-DAIR/Hetu, build_parallel_scheme_space_{7b,13b,32b}.py: milliseconds a s^2 + b s + c for s tokens), beside our
          cost model's. One factor a model is fitted.
hotspa    Table 3 of HotSPa (SOSP 2024): seconds of a step of a 32B model on 32 A800, static and under three sets of layouts. Pipelines of
          micro-batches take Hydraulis' stage times ("predicted"), or our cost model's ("modelled"); switches are our own. Lengths are
          lognormal, fitted to the table's totals for GitHub, a guess for CommonCrawl. Documents of each bucket are packed to the bucket's
          end, as static systems with buckets do. One factor, of GitHub static, is fitted; the other seven totals are predicted. `search`:
          what our own planner finds for the same documents on 32 A800, over their set C1, both on the clock: documents packed without
          padding, and each pack computed as one document of the pack's capacity ("padded").
talk      The FPDT talk's ten strategies for Llama 3 8B on eight devices of 80 GiB: device bytes of the same strategy here, by the ledger,
          and as the other trainer keeps them (`other_trainer.py`). Seconds on the clock beside those that their MFU says of Llama 3 8B; it
          counts attention as a full square, of which causal kernels compute half.
llama3    Table 4 of Llama 3 (arXiv 2407.21783): 405B on 8,192 and 16,384 H100. How far the best layout with their tp8 and pp16 (and, at
          128K, ring16) is from the best of all, and how far their mesh itself. `without_recompute`: their mesh as they ran it, nothing
          computed again and a block a virtual stage, which our bound of memory refuses; beside the seconds of their TFLOP/s a device, with
          causal attention counted.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import other_trainer
from block_formulas import FormulaCost, Sizes, Trainer
from closed_form import Candidates, closed_form

from longshift.cluster.files import cluster
from longshift.layout.layout import Layout
from longshift.planner.group_seconds import stalled_s
from longshift.planner.plan_evaluator import PlanEvaluator
from longshift.planner.search import search
from longshift.planner.shortlist import PlanEstimate, Problem, compare
from longshift.planner.task import PlanTask
from longshift.simulate.clock import Clock, GroupPacks, in_visiting_order
from longshift.simulate.cost import CUDNN_GAINS, RECOMPUTE
from longshift.simulate.mesh import Mesh
from longshift.simulate.model_flops import model_flops
from longshift.simulate.rates import rates
from longshift.spec import families
from longshift.spec.formats import FORMATS
from longshift.spec.model import ModelSpec
from longshift.step_report import on_cluster
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import links_of
from longshift.switch.options import SwitchOptions
from longshift.weigh.needs import StepShape
from longshift.workload.groups import Edge
from longshift.workload.length_file import Lengths

StageSeconds = Callable[[str, int, int, int], float]  # of a model, tp, pp, tokens
K = 1 << 10
DRAWS = 10
A800 = "4x8xa800"
STAGE_MS = {  # of a model, (tp, pp): a, b, c
    "32B": {
        (2, 4): (1.97e-06, 0.10656, 42.9),
        (4, 1): (3.87e-06, 0.239, 120.7),
        (4, 2): (2.046e-06, 0.1183, 65.4),
        (4, 4): (1.058e-06, 0.05921, 35.3),
        (8, 1): (2.125e-06, 0.14141, 122.9),
        (8, 2): (1.068e-06, 0.07106, 61.8),
        (16, 1): (1.378e-06, 0.10244, 145.7),
    },
    "13B": {
        (1, 2): (2.332e-06, 0.16811, 37.9),
        (2, 1): (2.937e-06, 0.18009, 75.9),
        (2, 2): (1.534e-06, 0.09009, 40.5),
        (4, 1): (1.629e-06, 0.09976, 76.4),
        (4, 2): (8.127e-07, 0.05008, 39.5),
        (8, 1): (6.592e-07, 0.06668, 50.4),
        (1, 1): (1.034e-05, 0.31226, 91.4),
    },
    "7B": {
        (1, 2): (1.372e-06, 0.09465, 15.0),
        (1, 4): (9.555e-07, 0.04552, 14.3),
        (2, 1): (2.054e-06, 0.09671, 65.2),
        (2, 2): (1.027e-06, 0.04907, 31.9),
        (4, 1): (1.03e-06, 0.05648, 56.7),
        (4, 2): (5.162e-07, 0.02851, 29.0),
        (8, 1): (5.069e-07, 0.03662, 44.3),
    },
}
BUCKETS = (K, 4 * K, 8 * K, 16 * K, 32 * K)
LAWS = {"GitHub": (6.5, 1.65, 1_180_000), "CommonCrawl": (5.6, 1.3, 330_000)}  # mu, sigma, tokens of a batch
STATIC = (1, 16, 2)  # dp, tp, pp
SETS: Mapping[str, tuple[tuple[int, int, int], ...]] = {  # of each bucket
    "static": (STATIC,) * 5,
    "C1": ((4, 2, 4), (4, 2, 4), (2, 8, 2), (2, 8, 2), STATIC),
    "C2": ((4, 2, 4), (4, 2, 4), (4, 4, 2), (2, 8, 2), STATIC),
    "C3": ((8, 4, 1), (4, 2, 4), (4, 4, 2), (2, 8, 2), STATIC),
}
TOTAL_S = {
    "GitHub": {"static": 178.6, "C1": 118.5, "C2": 118.4, "C3": 119.2},
    "CommonCrawl": {"static": 63.4, "C1": 32.3, "C2": 33.5, "C3": 33.2},
}
OTHERS_S = {"static": 0.0, "C1": 1.8, "C2": 3.5, "C3": 4.9}
TALK = (  # strategy here, longest sequence, GiB of HBM, MFU that counts attention as a full square
    ("tp8", 32 * K, 64.3, 0.094),
    ("tp8.recompute-full", 128 * K, 61.2, 0.194),
    ("tp8.recompute-full.host", 512 * K, 78.7, 0.327),
    ("u8.z1", 64 * K, 58.9, 0.153),
    ("u8.z2", 64 * K, 54.5, 0.153),
    ("u8.z3", 64 * K, 52.3, 0.21),
    ("u8.z1.recompute-full.host", 512 * K, 65.5, 0.468),
    ("u8.z2.recompute-full.host", 512 * K, 65.5, 0.468),
    ("u8.z3.recompute-full.host", 512 * K, 60.1, 0.472),
    ("u8.z3.chunk64K.host", 4096 * K, 68.0, 0.557),
)
RUNS = (
    (8192, 8 * K, 1, 64, 430),
    (16384, 8 * K, 1, 128, 400),
    (16384, 128 * K, 16, 8, 380),
)  # devices, length, ring, dp, TFLOP/s; the table's dp 4 would be 8,192 devices
TOKENS_405B = 1 << 24


def llama(width: int, layers: int, heads: int, keys: int, ffn: int, vocab: int, theta: float = 10000.0) -> ModelSpec:
    config = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    more = {"num_key_value_heads": keys, "intermediate_size": ffn, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5}
    return families.from_hugging_face(config | more | {"rope_theta": theta})


MODELS = {
    "7B": llama(4096, 32, 32, 32, 11008, 30592),
    "13B": llama(5120, 40, 40, 40, 13824, 30592),
    "32B": llama(6656, 60, 64, 64, 17920, 30592),
}
LLAMA3_405B = llama(16384, 126, 128, 8, 53248, 128256, 500000.0)


# HotSPa


def drawn(law: str, seed: int) -> np.ndarray:
    """Lengths of the documents of a batch."""
    mu, sigma, tokens = LAWS[law]
    some = np.exp(np.random.default_rng(seed).normal(mu, sigma, 8000))
    lengths = np.clip(np.ceil(some), 1, BUCKETS[-1]).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def packs(lengths: Sequence[int], capacity: int) -> int:
    """How many packs of `capacity` tokens hold these documents, longest first, each where it first fits."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((n for n, room in enumerate(left) if room >= length), None)
        if place is None:
            left.append(capacity - length)
        else:
            left[place] -= length
    return len(left)


def measured_s(model: str, tp: int, pp: int, tokens: int) -> float:
    """Seconds of a micro-batch of one document on a stage, by Hydraulis."""
    times, stages = STAGE_MS[model], pp
    if (tp, pp) not in times:
        stages = 1
    a, b, c = times[tp, stages]
    return (a * tokens**2 + b * tokens + c) / 1000 * stages / pp


OTHERS = Trainer(messages_hidden=1.0, embeddings_accumulated=1.0)


@cache
def modelled_s(model: str, tp: int, pp: int, tokens: int) -> float:
    """The same by our cost model: forward and backward of the stage's blocks."""
    cost = FormulaCost(Sizes.of(MODELS[model]), rates(cluster(A800), "bf16"), OTHERS)
    works = [cost.turn("block", turn, "block", Mesh(tp), float(tokens), tokens**2 / 2) for turn in ("forward", "backward")]
    return MODELS[model].layers / pp * sum(float(work.exposed_s(cost.launch_s)) for work in works)


def stages() -> dict:
    """Stage times at the ends of the buckets; errors after one factor a model, the geometric mean."""
    rows, errors, factors = [], [], {}
    for model, times in STAGE_MS.items():
        ratios = np.array([[modelled_s(model, *mesh, end) / measured_s(model, *mesh, end) for end in BUCKETS] for mesh in times])
        factors[model] = float(np.exp(-np.log(ratios).mean()))
        errors.append(factors[model] * ratios - 1)
        rows += [{"model": model, "tp": tp, "pp": pp, "errors": row.tolist()} for (tp, pp), row in zip(times, errors[-1])]
    found = np.abs(np.concatenate(errors))
    by_length = {str(end): {"median": float(np.median(column)), "worst": float(column.max())} for end, column in zip(BUCKETS, found.T)}
    return {"factors": factors, "rows": rows, "median": float(np.median(found)), "worst": float(found.max()), "by_length": by_length}


def pipelined_s(slot_s: StageSeconds, mesh: tuple[int, int, int], lengths: Sequence[int], capacity: int) -> float:
    """Seconds of a bucket: micro-batches of full packs through a pipeline."""
    dp, tp, pp = mesh
    if not len(lengths):
        return 0.0
    micros, one_s = -(-packs(lengths, capacity) // dp), slot_s("32B", tp, pp, capacity)
    return float((micros + pp - 1) * one_s + stalled_s(micros, pp, 1, one_s / 3, 2 * one_s / 3))


def totals(law: str, slot_s: StageSeconds) -> dict[str, float]:
    """Mean seconds of a batch under each set of layouts, without switches."""
    found = dict.fromkeys(SETS, 0.0)
    for seed in range(DRAWS):
        lengths = drawn(law, seed)
        bucket = np.array([bisect.bisect_left(BUCKETS, length) for length in lengths])
        for name, meshes in SETS.items():
            found[name] += (
                sum(pipelined_s(slot_s, mesh, lengths[bucket == n].tolist(), BUCKETS[n]) for n, mesh in enumerate(meshes)) / DRAWS
            )
    return found


def edges_of(name: str) -> tuple[Edge, ...]:
    """A set of theirs as length groups here; equal neighbours are one."""
    found: list[Edge] = []
    for end, (dp, tp, pp) in zip(BUCKETS, SETS[name]):
        layout = Layout(dp=dp, tp=tp, pp=pp, zero=1 if dp > 1 else 0)
        if found and found[-1].use == layout:
            found.pop()
        found.append(Edge(end, layout, end))
    return tuple(found)


def task_of(law: str) -> PlanTask:
    """What our planner is asked: the same law on 32 A800."""
    lengths = Lengths.from_array(np.concatenate([drawn(law, seed) for seed in range(DRAWS)]))
    machine = cluster(A800)
    return PlanTask(MODELS["32B"], on_cluster(machine, machine.devices), lengths, LAWS[law][2], "bf16", machine.devices)


def padded_s(evaluator: PlanEvaluator, edges: tuple[Edge, ...]) -> float:
    """Mean seconds on the clock, each pack computed as one document of its capacity."""
    clock = Clock(evaluator.shape(edges), evaluator.task.cluster, evaluator.cost)
    capacity, seconds = {edge.use: edge.pack for edge in edges}, []
    for step in evaluator.typical[1:]:
        groups = [
            GroupPacks(group.layout, tuple(tuple((capacity[group.layout],) for pack in own if pack) for own in group.replicas))
            for group in in_visiting_order(clock.shape, step)
        ]
        seconds.append(clock.step(groups).seconds)
    return float(np.mean(seconds))


def bucketed(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """The same layouts, packs that end where their group ends: what a system with buckets pads to."""
    return tuple(replace(edge, pack=edge.upto) for edge in edges)


def beside_c1() -> dict:
    """What our search finds over C1, padding-free and padded. C1 is timed whether it fits a device or not; GiB are the ledger's."""
    best, evaluator = search(task_of("GitHub")).best, PlanEvaluator(task_of("GitHub"))
    assert best is not None
    c1 = edges_of("C1")
    c1_s = evaluator.mean_seconds(c1)
    own_s = evaluator.mean_seconds(best.edges)
    padded = {"search": min(padded_s(evaluator, best.edges), padded_s(evaluator, bucketed(best.edges))), "c1": padded_s(evaluator, c1)}
    return {
        "search": str(best),
        "search_s": own_s,
        "c1_s": c1_s,
        "search_over_c1": own_s / c1_s,
        "padded_search_s": padded["search"],
        "padded_c1_s": padded["c1"],
        "padded_search_over_c1": padded["search"] / padded["c1"],
        "search_gib": evaluator.weigh(best.edges)[0]["device"] / 2**30,
        "c1_gib": evaluator.weigh(c1)[0]["device"] / 2**30,
    }


def hotspa(with_search: bool = True) -> dict:
    """Table 3. Errors are of totals that include what switches take here. `switch_s`: seconds that weights and
    sums of gradients travel, on the clock; without the search, what the table says."""
    evaluator = PlanEvaluator(task_of("GitHub"))
    switch_s = {name: evaluator.step(edges_of(name), 0).busy_s("switch") for name in SETS} if with_search else OTHERS_S
    ways, rows, worst = {"predicted": measured_s, "modelled": modelled_s}, [], {}
    seconds = {way: {law: totals(law, slot_s) for law in LAWS} for way, slot_s in ways.items()}
    factors = {way: TOTAL_S["GitHub"]["static"] / found["GitHub"]["static"] for way, found in seconds.items()}
    for law in LAWS:
        for name in SETS:
            row: dict = {"law": law, "set": name, "published_s": TOTAL_S[law][name]}
            for way, found in seconds.items():
                row[f"{way}_s"] = factors[way] * found[law][name] + switch_s[name]
                row[f"{way}_error"] = row[f"{way}_s"] / row["published_s"] - 1
            rows.append(row | {"switch_s": switch_s[name], "published_others_s": OTHERS_S[name]})
    for way in ways:
        ours = {row["set"]: row[f"{way}_s"] for row in rows if row["law"] == "GitHub"}
        ratios = [TOTAL_S["GitHub"][name] / TOTAL_S["GitHub"]["static"] * ours["static"] / ours[name] - 1 for name in SETS]
        worst[way] = {"total": max(abs(row[f"{way}_error"]) for row in rows), "ratio": max(map(abs, ratios))}
    return {"factors": factors, "rows": rows, "worst": worst} | (beside_c1() if with_search else {})


# The FPDT talk


def device_bytes(text: str, longest: int) -> int:
    """Bytes of the fullest moment of rank 0 in a step of one sequence, by the ledger."""
    spec, formats, machine = families.preset("llama-3-8b"), FORMATS["bf16"], cluster("8xa100-80")
    edges = (Edge(longest, Layout.parse(text)),)
    way = Itinerary(spec, edges, links_of(machine, 8, 1), formats.compute_bytes, formats.home_bytes, SwitchOptions())
    return StepShape(way, edges, formats, longest, longest).estimate(edges, 0, "nccl").peaks["device"].total


def clock_s(text: str, longest: int) -> float:
    """Seconds of a step of one sequence on the clock."""
    machine = cluster("8xa100-80")
    task = PlanTask(families.preset("llama-3-8b"), on_cluster(machine, 8), Lengths.from_array(np.array([longest])), longest, "bf16", 8)
    return PlanEvaluator(task).seconds((Edge(longest, Layout.parse(text)),), 0)


def talk(with_clock: bool = True) -> dict:
    """The ten strategies. Seconds where the clock plays them."""
    spec, rows = families.preset("llama-3-8b"), []
    for text, longest, gib, told in TALK:
        ours, theirs = device_bytes(text, longest) / 2**30, other_trainer.device_bytes(Layout.parse(text), longest) / 2**30
        flops = float(model_flops(Sizes.of(spec), longest, longest**2 / 2, spec.parameters)["full square"])
        row = {"strategy": text, "longest": longest, "published_gib": gib, "ledger_gib": ours, "fits": ours < 80, "over": ours / gib - 1}
        row |= {"as_theirs_gib": theirs, "as_theirs_over": theirs / gib - 1}
        row |= {"published_s": flops / (8 * told * cluster("8xa100-80").device.flops_per_s["bf16"])}
        rows.append(row | ({"clock_s": clock_s(text, longest)} if with_clock else {}))
    within = {name: sum(abs(row[name]) <= 0.15 for row in rows) for name in ("over", "as_theirs_over")}
    return {"rows": rows, "all_fit": all(row["fits"] for row in rows), "within_0.15": within}


# Llama 3


def fastest_single(task: PlanTask) -> PlanEstimate:
    """The fastest single layout by rate cards, of those that fit by the ledger of the first and the last stage."""
    problem = Problem.of(task)
    for share in (1.0, 0.9, 0.8, 0.7):
        for way in compare(problem, share * task.budget_bytes).singles:
            layout, shape = way.edges[0].use, task.step_shape(way.edges)
            ranks = {0, layout.world - layout.world // layout.pp}
            if all(shape.estimate(way.edges, rank, "nccl").device <= task.budget_bytes for rank in ranks):
                return way
    raise AssertionError(f"no layout of {task.world} ranks fits")


def llama3() -> dict:
    rows = []
    for devices, length, ring, dp, teraflops in RUNS:
        machine = cluster(f"{devices // 8}x8xh100")
        seconds, layouts = {}, {}
        meshes = {"best": None, "tp8.pp16": {"tp": [8], "pp": [16]}, "theirs": {"tp": [8], "pp": [16], "ulysses": [1]}}
        for name, fixed in meshes.items():
            if fixed and (ring > 1 or name == "theirs"):
                fixed = fixed | {"ring": [ring]}
            lengths = Lengths(np.array([length]), np.array([1000]))
            asked = PlanTask(LLAMA3_405B, machine, lengths, TOKENS_405B, "bf16", machine.devices, fixed=fixed or {})
            single = fastest_single(asked)
            seconds[name], layouts[name] = single.seconds, str(single.edges[0].use)
        micros, pairs = TOKENS_405B / length / dp, length**2 / 2
        ran = Candidates(8, 1, ring, dp, 16, 8, 1, RECOMPUTE.index("none"), micros, length, pairs)
        theirs = FormulaCost(Sizes.of(LLAMA3_405B), rates(machine), replace(OTHERS, **CUDNN_GAINS))
        seconds["without_recompute"] = float(closed_form(theirs, ran).total)
        flops = model_flops(Sizes.of(LLAMA3_405B), TOKENS_405B, TOKENS_405B * length / 2, LLAMA3_405B.parameters)["causal"]
        seconds["published"] = float(flops) / (devices * teraflops * 1e12)
        rows.append({"devices": devices, "length": length, "seconds": seconds, "layouts": layouts,
                     "without_recompute_over_published": seconds["without_recompute"] / seconds["published"] - 1,
                     "tp8.pp16_over_best": seconds["tp8.pp16"] / seconds["best"] - 1,
                     "theirs_over_best": seconds["theirs"] / seconds["best"] - 1})  # fmt: skip
    return {"rows": rows, "worst": max(row["tp8.pp16_over_best"] for row in rows)}


def judge(with_search: bool = True) -> dict:
    """All anchors."""
    return {"stages": stages(), "hotspa": hotspa(with_search), "talk": talk(with_search), "llama3": llama3()}
