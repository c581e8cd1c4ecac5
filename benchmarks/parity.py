"""Is every layout the same training as one process? Worst relative differences, in float64, of the loss, the gradients, the weights after
20 steps and the optimizer's moments, to a plain one-process run of the decoder with torch's AdamW, or SGD where the family is `sgd`.
Where it is `float8`, matmuls of both take factors of eight bits.

Documents are packed, of uneven lengths, 1 and 2 tokens among them; the vocabulary is prime, blocks, heads and feed-forward columns do
not divide. Exit code 1 when a difference is above LIMIT.

Rows with a `home` train 50 steps with the training state on the host, on disk, or half of it on the device: in float64 beside one
process, and in float32 beside `home: device`, whose every bit must be theirs (`bitwise`).

Rows with `moments` train with packed moments and are given the same gradients in every layout: masters, codes and scales, put together
over all ranks, must have the same bits everywhere (`identical`), wherever they lie.

[Note: eps] A key bias without rotary embedding moves all scores of a query alike and changes no softmax: its gradient is rounding noise,
which AdamW divides by eps. In GPT-2 the usual 1e-8 makes of that noise weight differences of 9e-13 in 20 steps, 1e-6 of 1e-14.

[Note: initial weights] Where norms stand after the MLP, small weights make it give almost nothing, which the norm makes large again with
its rounding: gradients differ by 1e-12 where weights begin at 0.1, by 3e-14 at 0.3.
"""

import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import torch
from common import arguments, publish, say
from home_ranks import half_of_home
from safetensors.torch import load_file
from trial import Later, Trial

from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.layout import Layout, Recompute, Tier
from longshift.layout.legal import faults
from longshift.spec.adapters import Lora
from longshift.spec.families import preset
from longshift.spec.formats import MomentFormat
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule

SWITCHED = (
    ("dp4", "tp4", "pp4", "u4", "ring4", "dp2.tp2", "dp2.u2", "pp2.dp2", "pp2.tp2", "ring2.tp2"),
    ("dp8", "dp4.tp2", "dp2.tp4", "pp2.dp2.tp2", "pp2.dp2.u2", "ring4.tp2"),
)
STREAMED_GROUPS = (
    "dp4 > dp2.tp2 > u4.chunk16.disk",
    "dp4 > u2.tp2.z2.chunk24.disk.kv-offload > tp4",
    "dp4.z3 > pp2.u2.z1.chunk16.disk.fpdt > ring2.u2.z2.chunk13.disk.every1",
    "u4.chunk16.host.kv-offload.fpdt > u4 > u4.chunk24.disk",
    "dp8 > dp2.tp4.z1 > ring2.u4.chunk13.disk.fpdt",
    "dp4.recompute-full.disk > pp4.chunk13 > ring4.z3.chunk16.disk.kv-offload",
)
STAGED = (
    ("llama", "dp4.z2 | tp4 | dp2.u2.z3"),
    ("llama", "dp4 > tp4 | pp4 | pp2.dp2.z1 > u4.chunk13.disk"),
    ("gpt2", "dp2.z3 | u2 | pp2.recompute-full"),
    ("qwen3", "dp2.tp2.z1 | ring2.u2.z2 | ring4.chunk16.disk.kv-offload"),
    ("gemma3", "dp4.z3 | dp2.ring2 | u4"),
    ("mistral", "dp4 > pp2.tp2 | ring4.z2 | u2.tp2.chunk13.fpdt"),
    ("masked", "dp2 | u2.z1 | ring2.chunk13.disk"),
    ("lora", "dp4.z3 | dp2.tp2.z2 | u4.chunk13.disk"),
    ("frozen", "pp2.dp2 | tp4.z1 | dp4.z2 > u4"),
)  # each stage in another layout
HOMES = (
    *("dp1", "dp2.z0", "dp2.z2", "dp2.z3", "dp4.z3", "tp2", "pp2", "pp2.v2.z1", "u2", "u4.z3", "ring2", "ring2.u2.z3", "dp2.tp2.z3"),
    *("pp2.dp2.z3", "dp1.chunk16.disk", "u2.chunk16.disk.kv-offload", "pp2.u2.chunk13.host"),
    *("dp4 > tp4", "dp4.z3 > pp2.dp2 > u4.chunk16.disk", "dp2.z3 > u2.chunk16.disk.every2"),
)  # each with its training state on the host, on disk, and some of it on the device
PACKED = (
    *("dp1", "dp2.z0", "dp2.z1", "dp2.z3", "dp4.z2", "dp4.z3", "tp2", "tp4", "pp2.dp2.z3", "dp2.tp2.z3", "u2.z1", "ring2.z2"),
    *("dp2.z3 > tp2", "tp2 > dp2.z1", "dp4.z3 > tp4", "tp4 > pp2.dp2.z2", "pp2 > dp2.z3 > u2.chunk16.disk", "dp2.tp2.z3 > u4.z3"),
)  # each with packed moments, every third on the host and on disk
EDGES = (6, 20)  # tokens: with these every length group is empty in some step and full in another

LIMIT = 1e-12
HOME_STEPS = 50
PACKED_STEPS = 4
STEPS, QUICK_STEPS, QUICK_EVERY = 20, 3, 7  # steps; one in 7 of the cases
SGD: Mapping = {"sgd": {"rule": Rule("sgd"), "lr": 0.1}}  # by family
CLIP = 0.4  # below every step's gradient norm
DEADLINE_S = 300.0
KINDS = ("loss", "score", "grad", "weight", "optimizer")

_SIZES: Mapping = {
    **{"vocab": 257, "width": 24, "layers": 5, "heads": 4, "kv_heads": 2, "head_width": 6, "ffn": 37},
    **{"max_positions": 64, "init_std": 0.1},
}

# Blocks of 128 in both directions, a shorter one at the end, and parts of two tensor-parallel ranks that are cut between blocks.
BLOCKS: Mapping = {"width": 136, "kv_heads": 4, "head_width": 64, "ffn": 256}
GRANITE: Mapping = {"attention_scale": 0.7, "embed_scale": 3.0, "residual_scale": 0.6, "logit_divisor": 1.7}
GEMMA2: Mapping = {
    **{"norm_place": "both", "norm_less_one": True, "activation": "gelu_tanh", "embed_scale": 24**0.5, "sliding_window": 7},
    **{"full_blocks": (2, 4), "score_cap": 1.5, "logit_cap": 2.5},
}
GEMMA3: Mapping = {
    **{"qk_norm": True, "norm_place": "both", "norm_less_one": True, "activation": "gelu_tanh", "embed_scale": 24**0.5},
    **{"attention_scale": 0.5, "sliding_window": 6, "full_blocks": (3,), "window_rope": Rope(100.0)},
}
EXPERTS: Mapping = {"ffn": 12, "experts": 7, "top_k": 3, "norm_top_k": False}
FROZEN = ("model.embed_tokens.*", "model.layers.[02].*", "*k_proj.weight", "*.v_proj.bias", "model.layers.3.*norm.weight")
FAMILIES: Mapping[str, ModelSpec] = {
    "llama": replace(preset("tiny-llama"), **_SIZES),
    "llama-tied": replace(preset("tiny-llama"), **_SIZES, tied=True),
    "rows": replace(preset("tiny-llama"), **_SIZES, tied=True, loss_rows=5),  # the loss of a pack in several blocks
    "llama-6-heads": replace(preset("tiny-llama"), **_SIZES | {"heads": 6, "head_width": 4}),
    "gpt2": replace(preset("tiny-gpt2"), **_SIZES | {"kv_heads": 4}),
    "qwen3": replace(preset("tiny-qwen3"), **_SIZES, tied=False, qkv_bias=True),
    "smollm3": replace(preset("tiny-llama"), **_SIZES, family="smollm3", tied=True, nope_every=2),
    "phi3": replace(preset("tiny-llama"), **_SIZES, family="phi3", fused=True, rotary=4),
    "granite": replace(preset("tiny-llama"), **_SIZES, family="granite", tied=True, **GRANITE),
    "olmo2": replace(preset("tiny-llama"), **_SIZES | {"init_std": 0.3}, family="olmo2", qk_norm_whole=True, norm_place="after"),
    "mistral": replace(preset("tiny-llama"), **_SIZES, family="mistral", sliding_window=9),
    "qwen2": replace(preset("tiny-llama"), **_SIZES, family="qwen2", qkv_bias=True, sliding_window=5, full_blocks=(1, 2)),
    "gemma2": replace(preset("tiny-llama"), **_SIZES | {"init_std": 0.3}, family="gemma2", tied=True, **GEMMA2),
    "gemma3": replace(preset("tiny-llama"), **_SIZES | {"init_std": 0.3}, family="gemma3_text", tied=True, **GEMMA3),
    "mixtral": replace(preset("tiny-llama"), **_SIZES, family="mixtral", experts=5, top_k=2),
    "qwen3-moe": replace(preset("tiny-qwen3"), **_SIZES | EXPERTS, tied=False, family="qwen3_moe"),
    "masked": replace(preset("tiny-llama"), **_SIZES),
    "lora": replace(preset("tiny-llama"), **_SIZES, tied=True, lora=Lora(3, 5.0)),
    "lora-gpt2": replace(preset("tiny-gpt2"), **_SIZES | {"kv_heads": 4}, lora=Lora(2, 3.0, ("c_attn", "c_proj"))),
    "lora-phi3": replace(preset("tiny-llama"), **_SIZES, family="phi3", fused=True, lora=Lora(4, 4.0, ("qkv_proj", "o_proj", "down_proj"))),
    "frozen": replace(preset("tiny-llama"), **_SIZES, family="qwen2", qkv_bias=True, freeze=FROZEN),
    "sgd": replace(preset("tiny-llama"), **_SIZES),
    "float8": replace(preset("tiny-llama"), **_SIZES | BLOCKS),
    "float8-gpt2": replace(preset("tiny-gpt2"), **_SIZES | BLOCKS),
}

LAYOUTS = (
    *("dp2", "dp3", "dp4", "dp8", "tp2", "tp4", "u2", "u4", "ring2", "ring4"),
    *("pp2", "pp2.gpipe", "pp2.v2", "pp2:4-1", "pp3", "pp4", "pp4.gpipe", "pp5"),
    *("dp2.tp2", "dp2.u2", "dp2.ring2", "pp2.dp2", "u2.tp2", "ring2.tp2", "ring2.u2", "pp2.tp2", "pp2.u2", "pp2.ring2"),
    *("pp2.dp2.tp2", "pp2.dp2.u2"),
)
MORE = ("tp3", "u3", "ring3", "pp2.dp3", "pp2.dp2.ring2", "pp2.dp2.tp2.v2", "pp2.u2.tp2", "dp2.u2.tp2", "ring2.u2.tp2")
STREAMED = ("dp1", "dp2", "tp2", "u2", "ring2", "pp2", "pp2.v2", "u2.tp2", "ring2.u2", "u4", "pp2.u2", "dp2.u2", "pp2.dp2.tp2")
CHUNKS = (24, 7, 16, 6, 13)  # tokens: 2 to 8 of them in a pack, or an uneven last one; every second for many ranks
TIERS = (("device", "device"), ("disk", "device"), ("host", "offload"), ("disk", "offload"))  # offload, kv
EVERY = (0, 2, 1, 3, 0, 2, 1)  # of five blocks
STREAMING = tuple(product(("stream", "fpdt"), TIERS))
OFFLOADED = (
    "recompute-full.keep2",
    "dp2.z3.vertical",
    "dp3.tp2.z2.vertical.recompute-full",
    "u2.z1.vertical.recompute-full.keep1.disk",
    "pp2.dp2.recompute-full.keep1.disk",
    "pp2.v2.tp2.recompute-full.keep1",
    "u2.recompute-full.keep3.disk",
    "pp2.dp2.ring2.recompute-full.disk",
    "recompute-full.disk",
    "pp2.recompute-full.disk",
    "u2.tp2.z3.recompute-full.disk",
)
RECOMPUTED = ("dp2", "tp2", "u2", "ring2", "pp2", "dp2.tp2", "pp2.dp2.tp2")
FULL = "llama"  # goes through all stages of ZeRO, MORE, both recomputations and all of streaming; the others take some, in turn


def trial_of(family: str, steps: int, **other: object) -> Trial:
    """What is trained: packs of up to 48 tokens, 1 to 5 a step; 5 in the first and 3 in the 20th, whose gradients are compared. The
    clip is active in every step. [Note: eps]"""
    values = {"capacity": 48, "clip": CLIP, "rule": Rule(eps=1e-6), "float8": eight(family)} | SGD.get(family, {}) | other
    return Trial(FAMILIES[family], uneven_lengths(steps, 18, 40, (6, 2, 2, 3)), masked=family == "masked", **values)  # pyright: ignore[reportArgumentType]


def eight(family: str) -> bool:
    """Whether matmuls of a family take factors of eight bits."""
    return family.startswith("float8")


def layouts_of(family: str) -> Iterator[Layout]:
    """The legal layouts of the matrix."""
    turn, full = list(FAMILIES).index(family), family == FULL
    for number, text in enumerate(LAYOUTS + (MORE if full else MORE[turn::4])):
        layout = Layout.parse(text)
        if not faults(FAMILIES[family], layout, None, float8=eight(family)):
            stages = range(4) if full and text in LAYOUTS else [(number + turn) % 4]
            yield from (replace(layout, zero=zero) for zero in stages)
    policies: tuple[Recompute, ...] = ("selective", "full")
    for number, text in enumerate(RECOMPUTED if full else RECOMPUTED[turn % 2 :: 2]):
        for policy in policies if full else policies[number % 2 :][:1]:
            yield replace(Layout.parse(text), recompute=policy, zero=(number + turn) % 4)
    yield from map(Layout.parse, OFFLOADED if full else ())
    yield from streamed(turn, full)


def streamed(turn: int, full: bool) -> Iterator[Layout]:
    """One process under every way to stream; the layouts of STREAMED under some, in turn."""
    for number, text in enumerate(STREAMED if full else STREAMED[turn::4]):
        first = 7 * number + turn
        for way in range(first, first + (len(STREAMING) if full and text == "dp1" else 2 if full else 1)):
            schedule, (offload, kv) = STREAMING[way % len(STREAMING)]
            layout = replace(Layout.parse(text), schedule=schedule, offload=offload, kv=kv, zero=(way + turn) % 4)
            chunks = CHUNKS if layout.world <= 2 else CHUNKS[::2]
            yield replace(layout, chunk=chunks[way % len(chunks)], every=EVERY[way % len(EVERY)])


def switched() -> Iterator[tuple[Trial, str, int]]:
    """(trial, groups, ranks a node): every ordered pair of layouts in the first two of three groups, all stages of ZeRO, tied and untied,
    one node and two, all planners, weights that go ahead and weights that do not, small buckets."""
    for layouts in SWITCHED:
        for number, (first, second) in enumerate(permutations(layouts, 2)):
            third = layouts[(layouts.index(second) + 1) % len(layouts)]
            if third == first:
                third = layouts[(layouts.index(third) + 1) % len(layouts)]
            three = [replace(Layout.parse(text), zero=1 + (number + i) % 3) for i, text in enumerate((first, second, third))]
            how = {"edges": EDGES, "bucket_bytes": (20_000, 1 << 20)[number % 2], "ahead_bytes": (0, 1 << 30)[number // 2 % 2]}
            planner = ("fan_out", "fan_out", "algorithm1")[number % 3]
            trial = trial_of(("llama", "llama-tied")[number // 3 % 2], STEPS, planner=planner, **how)
            yield trial, " > ".join(map(str, three)), three[0].world // (1 + number % 2)
    for number, groups in enumerate(STREAMED_GROUPS):
        yield trial_of("masked" if number % 2 else "llama", STEPS, edges=EDGES), groups, 2


def of_switches(trial: Trial) -> str:
    """The family of a trial of `switched`."""
    return "masked" if trial.masked else "llama-tied" if trial.spec.tied else "llama"


def staged(family: str, steps: int) -> Trial:
    """A trial of three stages, each with positions and packs of its own; families without rotary embedding keep their positions."""
    base = FAMILIES[family].rope
    ropes = (replace(base, theta=5e5), replace(base, scaling="yarn", factor=2.0, original_positions=32)) if base else (None, None)
    bounds = zip((steps // 3, 2 * steps // 3), ropes, (64, 96))
    return trial_of(family, steps, edges=EDGES, stages=tuple(Later(*each) for each in bounds))


def packed_trial(layout: str, packed: MomentFormat, home: Tier) -> Trial:
    """A model with rows of several blocks, which layouts cut inside: 2 or 4 ranks of tensor parallelism, biases of 160 and norms of 48."""
    how = {"heads": 4, "kv_heads": 2, "head_width": 40, "width": 48, "ffn": 300, "layers": 4}
    spec = replace(FAMILIES["llama"], family="qwen2", qkv_bias=True, **how)
    edges, rule = EDGES[: layout.count(" > ")], Rule(eps=1e-6)
    lengths = uneven_lengths(PACKED_STEPS, 18, 40, (6,))
    where = {"home": home, "packed": packed, "stream_folder": tempfile.gettempdir()}
    return Trial(spec, lengths, "float32", capacity=48, clip=None, rule=rule, edges=edges, **where)


def uneven_lengths(steps: int, seed: int, largest: int = 61, documents: Iterable[int] = (9, 5, 7)) -> tuple[tuple[int, ...], ...]:
    """Document lengths of some steps, with very short ones among them; the number of documents varies from step to step."""
    generator = torch.Generator().manual_seed(seed)
    counts = list(documents)
    return tuple(
        (1, 2, *(int(n) for n in torch.randint(3, largest + 1, (counts[step % len(counts)],), generator=generator)))
        for step in range(steps)
    )


def sizes(world: World, trial: dict, path: str) -> dict[str, float]:
    """How large the reference in `path` is where it is smallest, over steps or weights: the loss, a gradient's norm, a weight's change
    in training relative to its start, a first moment's norm. A comparison with a reference near zero would say nothing."""
    what, truth = Trial.from_json(trial), load_file(Path(path))
    source = what.source()
    starts = {p.name: source(p.name, Box.whole(p.shape)).double() for p in what.spec.params if not p.frozen}
    return {
        "loss": float(truth["loss"].min()),
        "grad": min(float(truth[f"{kind}/{name}"].norm()) for name in starts for kind in ("grad-first", "grad-last")),
        "weight": min(float((truth[f"master/{name}"] - start).norm() / start.norm()) for name, start in starts.items()),
        "optimizer": min(float(truth[f"{what.rule.moments[0]}/{name}"].norm()) for name in starts),
    }


def main() -> int:
    parser = arguments("Worst relative differences of every layout to one process.")
    parts = (*FAMILIES, "switches", "stages", "homes", "packed")
    parser.add_argument("--only", nargs="+", default=parts, choices=parts, metavar="PART", help=f"of {', '.join(parts)}")
    options = parser.parse_args()
    steps, rows, started = QUICK_STEPS if options.quick else STEPS, [], time.monotonic()
    every = QUICK_EVERY if options.quick else 1
    cases = {family: list(layouts_of(family))[::every] for family in FAMILIES if family in options.only}
    switches = list(switched())[::every] if "switches" in options.only else []
    stages = STAGED[::every] if "stages" in options.only else ()
    homes = list(product(HOMES, ("host", "disk", "split")))[::every] if "homes" in options.only else []
    packed = list(product(PACKED, ("float8", "bf16")))[::every] if "packed" in options.only else []
    total = sum(map(len, cases.values())) + len(switches) + len(stages) + len(homes) + len(packed)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longshift-")))
        sizes = sorted({1, 2, 4, 8} | {layout.world for layouts in cases.values() for layout in layouts})
        worlds = {size: stack.enter_context(ForkedWorld(size)) for size in sizes}
        for family in dict.fromkeys((*cases, *(of_switches(trial) for trial, _, _ in switches))):
            what = {"trial": trial_of(family, steps).to_json(), "path": str(scratch / f"{family}.safetensors")}
            worlds[1].call("trial:write_reference", DEADLINE_S, **what)
            for layout in cases.get(family, ()):
                found = worlds[layout.world].call("trial:compare", DEADLINE_S, layout=str(layout), **what)
                rows.append(row(family, str(layout), found, len(rows), total))
        for trial, groups, per_node in switches:
            family = of_switches(trial)
            what = {"trial": replace(trial, lengths=trial.lengths[:steps]).to_json(), "path": str(scratch / f"{family}.safetensors")}
            found = worlds[Layout.parse(groups.split(" > ")[0]).world].call(
                "trial:compare", DEADLINE_S, layout=groups, per_node=per_node, **what
            )
            rows.append(row(family, groups, found, len(rows), total))
        for family, layouts in stages:
            what = {"trial": staged(family, steps).to_json(), "path": str(scratch / f"{family}-staged.safetensors")}
            worlds[1].call("trial:write_reference", DEADLINE_S, **what)
            world = worlds[Layout.parse(layouts.split(" ")[0]).world]
            found = world.call("trial:compare", DEADLINE_S, layout=layouts, per_node=2, **what)
            rows.append(row(f"{family}, 3 stages", layouts, found, len(rows), total))
        home_steps = QUICK_STEPS if options.quick else HOME_STEPS
        longer = trial_of(FULL, home_steps)
        path = str(scratch / f"{FULL}-longer.safetensors")
        worlds[1].call("trial:write_reference", DEADLINE_S, trial=longer.to_json(), path=path)
        for groups, home in homes:
            world = worlds[Layout.parse(groups.split(" > ")[0]).world]
            what = replace(longer, edges=EDGES[: groups.count(" > ")])
            single = replace(what, precision="float32")
            home = home if home != "split" else f"device {half_of_home(single, groups)}, disk rest"
            there = {"layout": groups, "trial": replace(what, home=home).to_json()}
            found = world.call("trial:compare", DEADLINE_S, per_node=2, path=path, **there)
            trials = (replace(single, home=where).to_json() for where in ("device", home))
            device, tier = (world.call("home_ranks:trained", DEADLINE_S, layout=groups, trial=trial) for trial in trials)
            same = all(ours["bits"] == theirs["bits"] for ours, theirs in zip(tier, device, strict=True))
            rows.append(row(f"{FULL}, home: {home}", groups, found, len(rows), total) | {"bitwise": same})
        known = dict[str, dict[str, str]]()
        for number, (groups, format) in enumerate(packed):
            what = packed_trial(groups, format, ("device", "host", "disk")[number // 2 % 3])
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                how = {"trial": what.to_json(), "layout": groups, "folder": folder}
                [found, *_] = worlds[Layout.parse(groups.split(" > ")[0]).world].call("home_ranks:logical_bits", DEADLINE_S, **how)
            same = found == known.setdefault(format, found)
            say(f"{len(rows) + 1}/{total} moments: {format} {groups}, home {what.home}: {'the same bits' if same else 'OTHER BITS'}")
            rows.append(
                {"family": f"{FULL}, moments: {format}", "layout": groups, "dtype": "float32", "home": what.home, "identical": same}
            )
    worst = largest(row[kind] for row in rows for kind in KINDS if kind in row)
    bitwise = all(row.get("bitwise", True) for row in rows)
    identical = all(row.get("identical", True) for row in rows)
    summary = {"worst": worst, "rows": len(rows), "limit": LIMIT, "steps": steps, "home_steps": home_steps}
    summary |= {"bitwise": bitwise, "identical": identical}
    publish("parity", summary | {"seconds": round(time.monotonic() - started, 1)}, rows, options.json)
    return 0 if worst <= LIMIT and bitwise and identical else 1


def row(family: str, layout: str, found: Sequence[Mapping[str, float]], done: int, total: int) -> dict:
    """The worst of all ranks' answers."""
    worst = {kind: largest(answer[kind] for answer in found) for kind in KINDS}
    verdict = "" if largest(worst.values()) <= LIMIT else "   ABOVE THE LIMIT"
    say(f"{done + 1}/{total} {family} {layout}: {largest(worst.values()):.1e}{verdict}")
    return {"family": family, "layout": layout, "dtype": "float64", **worst}


def largest(values: Iterable[float]) -> float:
    """The maximum; NaN if one is NaN."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


if __name__ == "__main__":
    sys.exit(main())
