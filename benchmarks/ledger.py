"""Does the ledger say what a training step holds and sends? Peaks of tensor bytes on every rank and bytes sent by communicator, of the
second of two equal steps, measured and predicted, for every word of layouts and for steps that switch between several.

    measured    storages that torch's operations return, each from when it is made until it is gone (`longshift.dist.live_bytes`)
    predicted   the step's program played on bytes (`longshift.weigh.ledger`); scalars have an allowance of 16 KiB
    fake        one rank at the width of Llama 3 8B on a device that is not there (`gpu/fake_device.py`), its collectives NCCL's by size

The ratio of the two is at least 0.98 and never above 1, and all bytes sent are equal: exit code 1 otherwise. `admission_s`: seconds of one
core that it takes to weigh all kinds of ranks of a large run before it starts, in a fresh process. `--quick`: some rows of each sort.
`--caps N`: also N layouts under a limit of memory (`ledger_caps.py`).
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trial  # noqa: F401  (what the forked ranks call is imported before they fork)
from common import arguments, publish, say
from ledger_ranks import from_few, predict, row_of
from trial import Trial, parse_layouts

from longshift.dist.fork import ForkedWorld
from longshift.layout.layout import Layout, Tier
from longshift.spec.adapters import Lora
from longshift.spec.formats import MomentFormat, PrecisionName, Wire
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.weigh.ledger import StepEstimate

LOW, HIGH = 0.98, 1.0
DEADLINE_S = 300.0
_LLAMA = ModelSpec("llama", 509, 64, 5, 6, 2, 16, 175, 4096, rope=Rope())
FAMILIES = {
    "llama": _LLAMA,
    "llama-tied": replace(_LLAMA, tied=True),
    "rows": replace(_LLAMA, tied=True, loss_rows=50),  # the loss of a pack in several blocks
    "llama-5-heads": replace(_LLAMA, heads=5, kv_heads=5),
    "qwen3": replace(_LLAMA, family="qwen3", heads=4, kv_heads=1, qk_norm=True),
    "granite": replace(_LLAMA, family="granite", attention_scale=0.1, embed_scale=12.0, residual_scale=0.22, logit_divisor=8.0),
    "smollm3": replace(_LLAMA, family="smollm3", nope_every=2),
    "phi3": replace(_LLAMA, family="phi3", fused=True, rotary=12),
    "olmo2": replace(_LLAMA, family="olmo2", qk_norm_whole=True, norm_place="after"),
    "qwen3-moe": replace(_LLAMA, family="qwen3_moe", qk_norm=True, ffn=48, experts=7, top_k=3),
    "gemma2": replace(
        _LLAMA,
        **{"family": "gemma2", "norm_place": "both", "norm_less_one": True, "sliding_window": 130, "full_blocks": (2, 4)},
        **{"embed_scale": 8.0, "score_cap": 2.0, "logit_cap": 1.5},
    ),
    "gemma3": replace(
        _LLAMA,
        **{"family": "gemma3_text", "qk_norm": True, "norm_place": "both", "norm_less_one": True, "sliding_window": 130},
        **{"full_blocks": (3,), "window_rope": Rope(100.0), "embed_scale": 8.0, "attention_scale": 0.3},
    ),
    "gpt2": ModelSpec(
        *("gpt2", 509, 64, 5, 5, 5, 16, 255, 4096, True, "layer", 1e-5, "gelu_tanh", False),
        **{"fused_qkv": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope": None, "learned_positions": True},
    ),
    "lora": replace(_LLAMA, lora=Lora(8, 16.0)),
    "lora-tied": replace(_LLAMA, tied=True, lora=Lora(8, 16.0, ("q_proj", "v_proj"))),
    "sgd": _LLAMA,
    "blocks": replace(_LLAMA, width=200, heads=4, kv_heads=4, head_width=64, ffn=512),  # tp2 cuts no block of 128
    "frozen": replace(_LLAMA, qkv_bias=True, freeze=("*embed*", "*.layers.[01].*", "*.o_proj.*", "*.k_proj.bias")),
}
LENGTHS = (700, 333, 1000, 2, 517, 260, 91, 640)  # of documents, in tokens
FEW = (333, 700, 2, 177)
SHORT = (40, 25, 61)  # weights are most
CAPACITY = 1024
EDGES = (300, 650)


@dataclass(frozen=True)
class Case:
    """A training step that is measured: `layout` may be several, joined by " > ". `per_node`: ranks that count as one node, where switches
    go in two rounds and many small exchanges; `few`: documents are full packs of the groups, and predicted from packs of few chunks, as
    admission does."""

    layout: str
    family: str = "llama"
    precision: PrecisionName = "float32"
    lengths: tuple[int, ...] = LENGTHS
    per_node: int | None = None
    few: bool = False
    home: str = "device"
    packed: MomentFormat = "float32"
    wire: Wire = Wire()  # noqa: RUF009  (frozen)

    @property
    def world(self) -> int:
        return Layout.parse(self.layout.split(" > ")[0]).world

    @property
    def trial(self) -> Trial:
        edges = EDGES[-self.layout.count(" > ") :] if " > " in self.layout else ()
        sizes = {"capacity": max(CAPACITY, *self.lengths), "edges": edges} | ({"bucket_bytes": 60_000} if self.per_node else {})
        rule = Rule("sgd") if self.family == "sgd" else Rule()
        how = {"home": self.home, "packed": self.packed, "gradients": self.wire.gradients, "weights": self.wire.weights}
        return Trial(FAMILIES[self.family], (self.lengths,) * 2, self.precision, rule=rule, **how, **sizes)

    def __str__(self) -> str:
        return (
            f"{self.family} {self.precision} {self.layout}"
            + ", from few chunks" * self.few
            + f", home {self.home}" * (self.home != "device")
            + f", moments {self.packed}" * (self.packed != "float32")
            + f", wire {self.wire.gradients} {self.wire.weights}" * self.wire.coded
        )


def cases() -> Iterator[Case]:
    yield from (Case(layout) for layout in ("dp1", "recompute-selective", "recompute-full", "chunk300", "chunk256.fpdt"))
    yield from (Case("dp1", family, precision) for family in FAMILIES for precision in ("float32", "bf16", "fp16", "float64"))
    yield from (Case(f"dp{n}", "llama", "bf16") for n in (2, 3, 8))
    yield from (Case(f"dp{n}.z{z}", family, "bf16") for n, z, family in ((2, 1, "qwen3"), (3, 1, "gpt2"), (4, 2, "llama"), (2, 2, "gpt2")))
    yield from (Case(f"dp{n}.z3", family) for n, family in ((2, "llama"), (3, "gpt2"), (4, "llama-tied"), (8, "qwen3")))
    yield from (Case(layout, "llama-5-heads") for layout in ("tp2", "tp3", "u2", "u3", "ring2", "ring3", "u4", "ring4"))
    yield from (Case(layout, "qwen3", "bf16") for layout in ("tp4", "u2.tp2", "ring2.tp2", "ring2.u2", "ring2.u2.tp2"))
    yield from (Case(layout, "gpt2", "fp16") for layout in ("tp2", "u5", "ring3", "tp5"))
    yield from (Case(layout, "llama-tied", "bf16") for layout in ("pp2", "pp2:3-2", "pp2.gpipe", "pp2.v2", "pp4", "pp3.dp2.z1"))
    yield from (Case(layout, "gpt2") for layout in ("pp2.dp2.z2", "pp2.tp2.recompute-full", "pp2.ring2.z3", "pp5.gpipe"))
    yield Case("pp2.dp2.tp2.z3", "llama", "fp16")
    yield from (Case(f"{layout}.recompute-selective", "qwen3") for layout in ("tp2", "u2.z3", "ring2", "pp2.v2.dp2"))
    yield from (Case(f"{layout}.recompute-full", "llama-tied") for layout in ("tp2", "u2", "ring2.z2", "dp2.z3", "pp2"))
    vertical = ("dp2.z3.vertical", "tp2.vertical.recompute-full.disk", "u2.z2.vertical")
    yield from (Case(layout, "llama-tied", "bf16") for layout in vertical)
    kept = (
        "recompute-full.keep2",
        "dp2.recompute-full.keep1.disk",
        "pp2.recompute-full.keep1",
        "tp2.recompute-full.keep3",
    )
    yield from (Case(layout, "qwen3", "bf16") for layout in kept)
    yield from (Case(layout, "rows", "bf16") for layout in ("dp2.z3", "tp2", "pp2", "chunk256"))
    yield from (
        Case(layout)
        for layout in ("recompute-full.host", "recompute-full.disk", "pp2.recompute-full.disk", "u2.tp2.z3.recompute-full.disk")
    )
    for family, precision in (("llama", "bf16"), ("gpt2", "float32"), ("llama-tied", "float64")):
        yield from (Case(layout, family, precision) for layout in ("chunk256.disk.kv-offload", "tp2.chunk300.every1", "u2.chunk256.fpdt"))
    yield from (Case(layout, "qwen3") for layout in ("ring2.chunk300.disk", "u4.chunk512.host.kv-offload", "chunk256.every4.disk"))
    yield from (
        Case(layout, "qwen3") for layout in ("dp2.z3.chunk300.disk.kv-offload.fpdt", "pp2.chunk256.disk", "pp2.u2.z2.chunk300.every2")
    )
    yield from (Case(layout, "llama-tied") for layout in ("pp2.v2.chunk256", "ring2.u2.z3.chunk400.disk.every1", "ring2.tp2.chunk300"))
    windowed = ("tp2", "u2", "ring2", "pp2.v2", "recompute-selective", "ring2.recompute-full", "chunk256.fpdt", "ring2.chunk300.disk")
    yield from (Case(layout, "gemma3", ("float32", "bf16")[number % 2]) for number, layout in enumerate(windowed))
    yield from (Case(layout, "gemma3", lengths=(2 * CAPACITY,), few=True) for layout in ("chunk64", "u2.chunk64.disk.kv-offload"))
    yield from (Case(layout, "lora", ("float32", "bf16")[number % 2]) for number, layout in enumerate((*windowed, "dp2.z3", "dp4.z2")))
    yield from (Case(layout, "frozen", ("bf16", "float32")[number % 2]) for number, layout in enumerate((*windowed, "dp2.z3", "dp4.z2")))
    yield from (Case(layout, family, precision, SHORT, home="disk") for layout, family, precision in ON_DISK)
    yield from (Case(layout, family, precision, SHORT, home="device 1M, disk rest") for layout, family, precision in ON_DISK)
    yield from (Case(layout, family, precision, SHORT, home=home, packed=packed) for layout, family, precision, home, packed in PACKED)
    yield from (Case(layout, family, "float8") for layout, family in FLOAT8)
    yield from (Case(layout, "sgd", "bf16", SHORT) for layout in ("dp2.z2", "tp2 > dp2.z3"))
    yield Case("dp2", lengths=(5, 1, 2, 700))
    yield Case("dp4.z2", "gpt2", lengths=(900,))  # fewer packs than replicas
    yield from (
        Case(layout, lengths=(2 * CAPACITY,), few=True) for layout in ("chunk64", "chunk32.disk.kv-offload", "u2.chunk64.disk.fpdt")
    )
    yield from (
        Case(f"{layout} > {layout}.chunk64{tier}", lengths=(EDGES[-1], 2 * CAPACITY), few=True)
        for layout, tier in (("dp1", ""), ("tp2", ".disk"))
    )


def hot_cases() -> Iterator[Case]:
    yield Case("dp4 > tp4", lengths=(*SHORT, 700), per_node=2)
    yield Case("tp4 > dp4.z2 > pp4", "gpt2", "bf16", (*SHORT, 400, 700), per_node=2)
    yield Case("pp2.tp2.z3 > dp4", "qwen3", "float32", (*SHORT, 700), per_node=2)
    for number, layout in enumerate(
        (
            "dp2 > tp2",
            "dp2 > u2",
            "dp2.z2 > ring2",
            "tp2 > dp2.z3 > ring2.chunk300.disk",
            "dp2 > pp2",
            "pp2.gpipe > u2.chunk256",
            "dp3 > tp3 > ring3",
            "dp4 > tp4",
            "dp4.z3 > dp2.tp2.z3",
            "dp4.z2 > dp2.tp2.z3 > pp2.ring2",
            "dp4 > dp2.tp2 > u4.chunk300.disk",
            "dp4.chunk256 > pp2.tp2.z3 > u4.chunk512.disk",
            "dp4.recompute-full.disk > pp4 > ring4.z3.chunk256.disk.kv-offload",
            "pp2.dp2.z2 > pp2.u2.z1.chunk300.fpdt > ring2.u2.z2",
            "dp4.z1 > u4.z1 > ring4.z1",
            "dp2.pp2.v2.recompute-selective > tp4.z2 > u2.tp2.z3",
            "tp4 > pp4.recompute-full",
            "dp8 > dp4.tp2.z2 > pp2.dp2.u2.z3",
            "dp8.z3 > dp2.tp4.z1",
            "pp2.dp4.z2 > ring2.u4.z3.chunk400.every2",
        )
    ):
        family, precision = tuple(FAMILIES)[number % len(FAMILIES)], ("float32", "bf16", "fp16", "float64")[number % 4]
        yield Case(layout, family, precision)


ON_DISK: tuple[tuple[str, str, PrecisionName], ...] = (
    ("dp1", "llama", "float32"),
    ("dp2.z1", "gpt2", "bf16"),
    ("dp2.z3", "llama-tied", "float32"),
    ("dp4.z2", "qwen3", "fp16"),
    ("pp2.dp2.z3", "llama-tied", "bf16"),
    ("tp2", "lora", "bf16"),
    ("u2.chunk64.disk", "llama", "bf16"),
    ("dp2.z3 > tp2", "llama", "bf16"),
    ("dp2.z3", "sgd", "bf16"),
    ("dp2.z1 > pp2 > u2.z3", "gpt2", "float32"),
)

PACKED: tuple[tuple[str, str, PrecisionName, Tier, MomentFormat], ...] = (
    ("dp1", "llama", "float32", "device", "float8"),
    ("dp1", "llama", "bf16", "device", "bf16"),
    ("dp2.z1", "gpt2", "bf16", "host", "float8"),
    ("dp4.z3", "llama-tied", "float32", "device", "float8"),
    ("tp2", "qwen3", "bf16", "disk", "float8"),
    ("pp2.dp2.z3", "llama-tied", "bf16", "device", "float8"),
    ("dp2.z3 > tp2", "lora", "float32", "disk", "bf16"),
    ("dp2.z2 > pp2 > u2.z3", "llama", "bf16", "disk", "float8"),
    ("dp2.z3", "sgd", "bf16", "device", "float8"),
)

FLOAT8 = (
    *(("dp1", family) for family in ("llama", "gpt2", "phi3", "lora", "frozen", "gemma3", "blocks")),
    *(("recompute-selective", "qwen3"), ("recompute-full.disk", "llama"), ("dp2.z3", "llama-tied"), ("u2.z2", "gpt2"), ("ring2", "olmo2")),
    *(("pp2.v2", "llama"), ("dp2.z3.vertical", "llama"), ("chunk256.disk.kv-offload", "lora"), ("u2.chunk256.fpdt", "llama")),
    *(("tp2", "blocks"), ("tp2.z3.recompute-full", "blocks"), ("ring2.tp2.chunk300", "blocks"), ("dp2.z2 > tp2", "blocks")),
)

QUICK = (
    Case("dp2.z3 > tp2", "llama", "bf16", SHORT, home="disk"),
    Case("dp2.z2", "lora", "float32", SHORT, home="disk"),
    Case("dp2.z3", "sgd", "bf16", SHORT, home="disk"),
    Case("dp2.z1", "sgd", "float32", SHORT),
    Case("dp1 > dp1.chunk64", lengths=(EDGES[-1], 2 * CAPACITY), few=True),
    Case("dp1", "gpt2", "bf16"),
    Case("dp2.tp2", "rows", "bf16", FEW),
    Case("recompute-selective", "qwen3", lengths=FEW),
    Case("recompute-full"),
    Case("pp2.recompute-full.keep1.disk", "qwen3", "bf16", FEW),
    Case("dp2.z3.vertical.recompute-full.disk", "llama-tied", "bf16", SHORT, home="disk"),
    Case("chunk256.disk.kv-offload", "llama", "bf16", FEW),
    Case("dp2.z3", "llama-tied", lengths=SHORT),
    Case("tp2", "llama-5-heads", lengths=FEW),
    Case("pp2.v2", "llama-tied", "bf16", FEW),
    Case("u2.chunk256.fpdt", "gpt2", lengths=FEW),
    Case("ring2.z1.recompute-full.disk", "qwen3", "bf16", FEW),
    Case("dp2.z3", "granite", lengths=FEW),
    Case("pp2.dp2.z2", "smollm3", "bf16", FEW),
    Case("u2.chunk256.disk", "rows", lengths=FEW),
    Case("tp2.recompute-full", "phi3", "bf16", FEW),
    Case("tp2", "olmo2", "bf16", FEW),
    Case("dp2.z3", "qwen3-moe", lengths=FEW),
    Case("tp2.recompute-full", "qwen3-moe", "bf16", FEW),
    Case("u2.chunk256.disk", "qwen3-moe", lengths=FEW),
    Case("recompute-selective", "gemma3", "bf16", FEW),
    Case("ring2.z1", "gemma3", lengths=FEW),
    Case("u2.chunk64.disk", "gemma3", lengths=(2 * CAPACITY,), few=True),
    Case("dp3.z2", "gpt2", "fp16", SHORT),
    Case("dp1", "lora", "bf16", FEW),
    Case("dp2.z3", "lora-tied", "bf16", SHORT),
    Case("tp2.recompute-full", "lora", lengths=FEW),
    Case("pp2.z2.dp2", "frozen", "bf16", FEW),
    Case("u2.chunk256.disk", "lora", "bf16", FEW),
    Case("chunk256.fpdt", "frozen", lengths=FEW),
    Case("dp2 > tp2 > pp2", "lora", "bf16", (*SHORT, 400)),
    Case("dp2.z2 > tp2", "frozen", "bf16", (*SHORT, 700)),
    Case("dp2.z2 > tp2", "qwen3", lengths=(*SHORT, 700)),
    Case("dp2 > tp2 > pp2", "llama-tied", "bf16", FEW),
    Case("dp2.tp2.z3", "llama", "float32", (3, 2), packed="float8"),
    Case("tp2", "qwen3", "bf16", (3, 2), home="disk", packed="float8"),
    Case("dp2.z1", "sgd", "bf16", (3, 2), packed="bf16"),
    Case("dp2.z3 > tp2", "llama-tied", "bf16", SHORT, home="device 1M, disk rest"),
    Case("tp2", "lora", "bf16", SHORT, home="host 400K, disk rest", packed="float8"),
    Case("dp2.z1", "llama", "bf16", (3, 2), wire=Wire("float8")),
    Case("dp3.z2", "gpt2", "float32", (3, 2, 4), wire=Wire("bf16")),
    Case("dp2.tp2.z3", "llama-tied", "bf16", SHORT, home="disk", wire=Wire("float8", "float8")),
    Case("dp2.z3 > tp2", "llama", "bf16", SHORT, wire=Wire("float8")),
    Case("dp1", "blocks", "float8", FEW),
    Case("tp2", "blocks", "float8", SHORT),
    Case("dp2.z2 > u2.recompute-full", "lora", "float8", FEW),
    Case("pp2", "gpt2", "float8", FEW),
    Case("chunk256.disk.kv-offload", "phi3", "float8", FEW),
)


def rows_of(case: Case, answers: Iterable[dict]) -> list[dict]:
    """What each rank measured, beside what the ledger says of it."""
    name = {"device": "cpu", "family": case.family, "layout": case.layout, "precision": case.precision, "lengths": case.lengths}
    layouts = tuple(parse_layouts(case.layout))

    def said(rank: int) -> StepEstimate:
        return from_few(case.trial, layouts, rank) if case.few else predict(case.trial, layouts, rank, per_node=case.per_node)[0]

    return [row_of(name | {"rank": rank, "few": case.few}, found, said(rank)) for rank, found in enumerate(answers)]


def wrong(rows: Iterable[dict]) -> list[str]:
    """What differs, in words."""
    found = []
    for row in rows:
        name = f"{row['device']} {row['family']} {row['precision']} {row['layout']}, rank {row['rank']}"
        if not LOW <= row["ratio"] <= HIGH:
            found.append(f"{name}: {row['measured']} bytes measured, {row['predicted']} predicted: {row['ratio']:.4f}, at {row['peak_at']}")
        for what in ("sent", "records"):
            if row[what] != row[f"{what}_predicted"]:
                found.append(f"{name}: {what} {row[what]}, predicted {row[f'{what}_predicted']}")
    return found


def play(some: Iterable[Case]) -> list[dict]:
    """All cases, world by world."""
    rows, by_world = [], dict[int, list[Case]]()
    for case in some:
        by_world.setdefault(case.world, []).append(case)
    for size, here in sorted(by_world.items()):
        with ForkedWorld(size) as world:
            for case in here:
                how = {"trial": case.trial.to_json(), "layout": case.layout, "per_node": case.per_node}
                found = rows_of(case, world.call("ledger_ranks:weigh", DEADLINE_S, **how))
                ratios = [row["ratio"] for row in found]
                say(f"{case}: {min(ratios):.4f} to {max(ratios):.4f}", *wrong(found))
                rows += found
    return rows


def script(name: str, *words: str) -> Any:
    """What a script of this folder prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name(name), *words]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--caps", type=int, default=0, help="run so many random layouts under a limit of memory")
    parser.add_argument("--only", default="", help="cases whose name has these words")
    args = parser.parse_args()
    some = QUICK if args.quick else (*cases(), *hot_cases())
    rows = play(case for case in some if args.only in str(case))
    if not args.quick and not args.only:
        rows += script("ledger_fake.py")
    ratios = [row["ratio"] for row in rows]
    summary = {"worst_low": min(ratios), "worst_high": max(ratios), "rows": len(rows), "layouts": len({row["layout"] for row in rows})}
    summary["traffic_mismatches"] = sum(row["sent"] != row["sent_predicted"] for row in rows)
    if not args.only:
        summary["admission_s"] = script("ledger_admission.py", *(["--quick"] if args.quick else []))
    if args.caps:
        summary |= script("ledger_caps.py", str(args.caps))["summary"]
    faults = wrong(rows)
    for fault in faults:
        say(fault)
    publish("ledger", summary, rows, args.json)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
