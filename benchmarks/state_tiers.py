"""What does it cost to keep the training state elsewhere, and what does it save? `home: host` and `home: disk` beside `home: device`.

    speed     seconds of a step by tokens a step, in vertical order, rounds of all homes in turn; the disk is held to a named bandwidth, so
              that a CPU stands for a device. "split" has the units that fit a third of the state in host memory. No norm clips, so that
              units on disk are updated under the backward; in "clipped" every norm does, so that they are updated under the next forward.
              `bound_s` is the larger of the device's seconds and bytes over bandwidth: nothing takes less. `exact_s` is the sum of two
              such bounds, to the first loss and from there: nothing takes less that moves as many bytes before the first loss.
              16 blocks, as many as Llama 3.2 1B has: what nothing hides is moved for the last ones of a backward
    vertical  the same of `home: disk` under ZeRO-3, micro-batch by micro-batch and in vertical order; `vertical_ratio`: seconds of the one
              over those of the other
    file      all records of a home are read and written, as an update does, in turn with a plain test of the same disk: one file, direct,
              as many threads, as large blocks. `disk_share`: of its rate, the median over rounds. Rounds are short and many: a
              disk that others use too is twice as fast in one second as in another
    adam      the update of a home, its clip included, beside torch's fused AdamW alone on one vector of the same size
    moments   a Llama of 128 wide learns Python's standard library, byte by byte, with moments in each format: its loss, the mean of the
              last tenth of the steps, over that with moments in float32, on the same documents; and bytes of state a parameter. "again" is
              float32 with a learning rate of one millionth more: how far apart runs are that nothing but rounding tells apart
    memory    two ranks whose address space for data may grow by a quarter of what each has of the training state: `home: disk` trains and
              has the loss, and every bit of the state, of the run without a limit; `home: host` cannot begin

On a CPU `home: host` lies in the same memory as `home: device`: its ratio says only that nothing is in its way.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, quantiles

import home_ranks  # noqa: F401  (what the forked ranks call is imported before they fork)
from common import arguments, publish, say
from in_turn import in_turn
from trial import Trial

from longshift.dist.fork import ForkedWorld
from longshift.spec.families import preset
from longshift.spec.formats import MomentFormat
from longshift.spec.model import ModelSpec

DEADLINE_S = 600.0
FORMATS: tuple[MomentFormat, ...] = ("float32", "bf16", "float8")
LR, WARMUP = 1e-3, 50  # with 3e-3 and 20, two runs in float32 whose rates differ by a millionth end 1.8 % apart
HOMES = ("device", "host", "disk", "split", "clipped")
BANDWIDTH = 200e6  # bytes a second, of reads and writes together
SHARE = 4  # of a rank's state, how much of it may be in memory: one part in
PARTS = ("speed", "vertical", "adam", "file", "moments", "memory")
CAPPED = "dp2.z3.recompute-full"


def model(width: int, layers: int) -> ModelSpec:
    """A Llama of this width with a small vocabulary."""
    sizes = {"vocab": 512, "width": width, "layers": layers, "heads": 4, "kv_heads": 4, "head_width": width // 4, "ffn": 4 * width}
    return replace(preset("tiny-llama"), **sizes, max_positions=1024)


def trial(spec: ModelSpec, tokens: int, steps: int, home: str) -> dict:
    """Steps of documents of 256 tokens."""
    lengths = ((256,) * (tokens // 256),) * steps
    clip = 1e-3 if home == "clipped" else None
    home = {"split": f"host {16 * spec.parameters // 3}, disk rest", "clipped": "disk"}.get(home, home)
    folder = tempfile.gettempdir()
    return Trial(spec, lengths, precision="float32", capacity=512, home=home, clip=clip, stream_folder=folder).to_json()


def speed(spec: ModelSpec, sizes: Sequence[int], rounds: int) -> list[dict]:
    """A row for each number of tokens a step and home."""
    rows = []
    with ForkedWorld(1) as world:
        for tokens in sizes:
            how = {"layout": "dp1.vertical.recompute-full", "bandwidth": BANDWIDTH}
            found = in_turn(world, {home: how | {"trial": trial(spec, tokens, 1, home)} for home in HOMES}, rounds, f"{tokens} tokens, ")
            device, forward = (median(one[key] for one in found["device"]) for key in ("seconds", "forward_s"))
            for home, some in found.items():
                seconds, moved = [one["seconds"] for one in some], some[-1]["moved"]
                low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
                row = {"part": "speed", "home": home, "tokens": tokens, "step_s": median(seconds), "spread": (high - low) / median(seconds)}
                early = some[-1]["forward_moved"]
                bound = max(device, moved / BANDWIDTH)
                exact = max(forward, early / BANDWIDTH) + max(device - forward, (moved - early) / BANDWIDTH)
                row |= {"moved_mib": moved / 2**20, "bound_s": bound, "over_bound": median(seconds) / bound}
                rows.append(row | {"exact_s": exact, "over_exact": median(seconds) / exact})
    return rows


def vertical(spec: ModelSpec, tokens: int, rounds: int) -> list[dict]:
    """A row for each order of micro-batches, of `home: disk`."""
    layouts = ("dp1.z3.recompute-full", "dp1.z3.vertical.recompute-full")
    how = {"trial": trial(spec, tokens, 1, "disk"), "bandwidth": BANDWIDTH}
    with ForkedWorld(1) as world:
        found = in_turn(world, {layout: how | {"layout": layout} for layout in layouts}, rounds, "order, ")
    rows = []
    for layout, some in found.items():
        row = {"part": "vertical", "order": layout, "tokens": tokens, "step_s": median(one["seconds"] for one in some)}
        rows.append(row | {"moved_mib": some[-1]["moved"] / 2**20})
    return rows


def adam(spec: ModelSpec, rounds: int) -> dict:
    """Seconds of an update of a home over those of torch's fused AdamW."""
    with ForkedWorld(1) as world:
        [found] = world.call("home_ranks:timed_update", DEADLINE_S, trial=trial(spec, 256, 1, "host"), rounds=rounds)
    return {"part": "adam", "elements": found["elements"]} | {name: median(found[name]) for name in ("ours_s", "clipped_s", "torch_s")}


def disk(mebibytes: int, rounds: int) -> dict:
    """Rates of a home's file and of a plain one, in bytes a second, reads and writes together."""
    with ForkedWorld(1) as world:
        [found] = world.call("home_ranks:moved_records", DEADLINE_S, folder=tempfile.gettempdir(), mebibytes=mebibytes, rounds=rounds)
    shares = [ours / plain for ours, plain in zip(found["ours"], found["plain"])]
    row = {"part": "file", "mebibytes": mebibytes, "direct": found["direct"], "shares": shares}
    return row | {name: median(found[name]) for name in ("ours", "plain")}


def moments(layers: int, tokens: int, documents: int, steps: int, seeds: Sequence[int]) -> list[dict]:
    """A row for each format and seed; steps of so many documents of so many tokens."""
    spec = replace(model(128, layers), vocab=256, ffn=256, max_positions=256)
    rows = []
    with ForkedWorld(1) as world:
        for seed in seeds:
            losses: dict[str, float] = {}
            ways: dict[str, tuple[MomentFormat, float]] = {packed: (packed, LR) for packed in FORMATS}
            ways["again"] = "float32", LR * (1 + 1e-6)
            for name, (packed, lr) in ways.items():
                lengths, capacity = ((tokens,) * documents,) * steps, tokens * documents
                what = Trial(spec, lengths, precision="float32", capacity=capacity, seed=seed, lr=lr, warmup=WARMUP, packed=packed)
                how = {"trial": what.to_json(), "tokens": tokens, "documents": documents}
                [found] = world.call("home_ranks:learned", 10 * DEADLINE_S, **how)
                last = found["losses"][-max(1, steps // 10) :]
                losses[name] = sum(last) / len(last)
                row = {"part": "moments", "format": name, "seed": seed, "steps": steps, "loss": losses[name]}
                rows.append(row | {"over_float32": losses[name] / losses["float32"], "state_bytes": found["state_bytes"]})
                say("moments:", rows[-1])
    return rows


def memory(spec: ModelSpec, steps: int) -> dict:
    """The run without a limit, and both homes under it."""
    elements = sum(p.elements for p in spec.params)
    state = 16 * elements // 2
    answers = {}
    for name, home, limit in (("whole", "device", None), ("capped", "disk", state // SHARE), ("host", "host", state // SHARE)):
        with ForkedWorld(2) as world:
            how = {"trial": trial(spec, 512, steps, home), "limit": limit}
            answers[name] = world.call("home_ranks:capped", DEADLINE_S, layout=CAPPED, **how)
        say("memory:", name, answers[name][0]["failed"] or f"grew by {answers[name][0]['grew'] >> 20} MiB")
    same = [one["bits"] for one in answers["capped"]] == [one["bits"] for one in answers["whole"]]
    grew = {f"{name}_grew_mib": max(one["grew"] for one in answers[name]) / 2**20 for name in ("whole", "capped")}
    host = all(one["failed"] for one in answers["host"])
    row = {"part": "memory", "layout": CAPPED, "state_mib": state / 2**20, "limit_mib": state / SHARE / 2**20, **grew}
    return row | {"same_bits": same and not answers["capped"][0]["failed"], "host_fails": host}


def speed_summary(rows: Sequence[dict]) -> dict:
    """By home and tokens a step: the device's seconds over a home's, and a home's over the bounds."""
    by_home = {(row["home"], row["tokens"]): row["step_s"] for row in rows}
    summary = {
        f"ratio_{home}": {tokens: by_home["device", tokens] / seconds for (at, tokens), seconds in by_home.items() if at == home}
        for home in HOMES[1:]
    }
    for name in ("bound", "exact"):
        for home, key in (("disk", name), ("split", f"{name}_split"), ("clipped", f"{name}_clipped")):
            summary |= {key: {row["tokens"]: row[f"over_{name}"] for row in rows if row["home"] == home}}
    return summary | {"bandwidth": BANDWIDTH}


def moments_summary(rows: Sequence[dict]) -> dict:
    """Of each format the loss that is farthest from that of float32, and its bytes."""
    summary = {}
    for name in (*FORMATS[1:], "again"):
        some = [row for row in rows if row["format"] == name]
        farthest = max((row["over_float32"] for row in some), key=lambda ratio: abs(ratio - 1))
        summary |= {f"{name}_loss": farthest, f"{name}_bytes": some[0]["state_bytes"]}
    return summary


def main() -> int:
    parser = arguments("What homes on the host and on disk cost and save.")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="that are measured")
    options = parser.parse_args()
    quick, rows, summary = options.quick, list[dict](), dict[str, object]()
    if "speed" in options.parts:
        rows += speed(model(64, 2) if quick else model(160, 16), (256,) if quick else (512, 2048, 8192), 1 if quick else 5)
        summary |= speed_summary(rows)
    if "vertical" in options.parts:
        rows += (orders := vertical(*((model(64, 2), 1024, 1) if quick else (model(256, 6), 4096, 5))))
        summary |= {"vertical_ratio": orders[0]["step_s"] / orders[1]["step_s"]}
    if "adam" in options.parts:
        rows.append(update := adam(model(64, 2) if quick else model(512, 8), 2 if quick else 20))
        summary |= {f"adam_ratio{name}": update[key] / update["torch_s"] for name, key in (("", "ours_s"), ("_clipped", "clipped_s"))}
    if "file" in options.parts:
        rows.append(moved := disk(*((64, 2) if quick else (256, 28))))
        say("disk:", moved)
        summary |= {"disk_share": median(moved["shares"]), "direct": moved["direct"]}
    if "moments" in options.parts:
        rows += (formats := moments(*((1, 128, 2, 30, (0,)) if quick else (2, 256, 4, 500, (0, 1, 2)))))
        summary |= moments_summary(formats)
    right = True
    if "memory" in options.parts:
        rows.append(limited := memory(model(256, 96 if quick else 160), 1 if quick else 3))
        summary |= {"over_memory": limited["state_mib"] / limited["limit_mib"], "over_memory_same_bits": limited["same_bits"]}
        right = limited["same_bits"] and limited["host_fails"]
    publish("state_tiers", summary, rows, options.json)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
