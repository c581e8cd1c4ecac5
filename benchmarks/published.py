"""Step seconds that others published, beside what the closed form predicts for them without having seen them.

A CSV has one row a measurement, with the columns of a model, a cluster, a layout and `step_time_s`. `source` forms groups only. Constants
are fitted to all other groups and predict this one (raw). Then five factors are fitted to K rows of it and predict its other rows
(calibrated; the mean over seeded choices of the K rows). No rule below reads `source`, `row_id` or `note`.

What a row leaves empty is read so: precision fp16 (it runs at the rate of bf16); attention unfused on A100, flash on what came after;
gradients are reduced in their own format for fp16, in float32 for bf16 (Megatron-LM's rule); micro-batch 1; no recomputation; no overlap,
ZeRO 0, but a distributed optimizer and one block a pipeline chunk where data-parallel and pipeline traffic are overlapped, which need them.
Recompute "selective" computes every second matmul again with a flash kernel (torchtitan), attention without one (Korthikanti et al.).
Elementwise operations are fused by a compiler or by the kernels that come with Megatron-LM, Transformer Engine and FlashAttention-3, not
where attention is torch's own or FlashAttention-2. A feed-forward that is not four times as wide as the model is gated; so is a Llama's.
"""

import csv
import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anchors
import numpy as np
from block_formulas import FormulaCost, Sizes, Trainer
from closed_form import Candidates, Forecast, closed_form
from common import commit, machine, versions
from correction import calibrate

from longshift.cluster.files import preset
from longshift.cluster.network import Fabric, fabric
from longshift.simulate.calibrate import fit
from longshift.simulate.cost import CUDNN_GAINS, RECOMPUTE
from longshift.simulate.rates import FITTED, MULTIPROCESSORS, Constants, Rates, clock_share

DEVICES = (("a100", "40", "a100-40"), ("a100", "", "a100-80"), ("a800", "", "a800"), ("h100", "96", "h100-96"), ("h100", "", "h100"),
           ("h200", "", "h200"), ("b200", "", "b200"))  # fmt: skip  # what a name has, and the preset
NEEDED = ("gpus", "layers", "hidden", "heads", "ffn", "seq", "global_batch", "tp", "pp")
VOCABULARY = 51200  # where a row has none: GPT-2's, padded as Megatron-LM pads it
LEAST_SOURCES = 3  # to fit constants to
CHOICES = 20  # of the K rows
SECOND = ("sdpa", "fa2", "attention-2", "flash2", "triton", "v2")
KNOWN_RECOMPUTE = {"": 0} | {name: code for code, name in enumerate(RECOMPUTE)}
APART = 0.05
SWEEP_ROWS = 10  # layouts of one model, batch and number of devices that make a sweep


Row = dict[str, str]  # column to text


@dataclass(frozen=True)
class Rows:
    """Rows as arrays: what the closed form takes, and measured seconds."""

    sizes: Sizes
    habits: Trainer
    candidates: Candidates
    device: dict[str, np.ndarray]
    measured_s: np.ndarray

    def predict(self, constants: Constants) -> Forecast:
        """Seconds of every row."""
        d, c = self.device, constants
        found = Fabric(d["per_node"], d["node"] * c.node, d["node_latency_s"], d["network"] * c.network, d["network_latency_s"])
        peak = d["peak"] * clock_share(d["peak"], d["watts"], c.power)
        made = Rates(
            peak * d["matmul"] * c.matmul,
            peak * d["forward"] * c.attention,
            peak * d["backward"] * c.attention,
            d["memory"] * c.memory,
            d["launch_s"] * c.launch,
            d["multiprocessors"],
            found,
            c,
        )
        return closed_form(FormulaCost(self.sizes, made, self.habits), self.candidates)


def preset_of(name: str) -> str:
    """The preset of a device that a row names; empty where there is none."""
    name = name.lower()
    return next((found for first, second, found in DEVICES if first in name and second in name and "pcie" not in name), "")


def reason(row: Row) -> str:
    """Why a row is not predicted; empty where it is."""
    if not row["step_time_s"]:
        return "no step time"
    if row["precision"] not in ("", "bf16", "fp16"):
        return f"precision {row['precision']}"
    if not preset_of(row["gpu"]):
        return f"no preset of {row['gpu']}"
    if row["recompute"] not in KNOWN_RECOMPUTE:
        return f"recompute {row['recompute']}"
    missing = [name for name in NEEDED if not row[name]]
    return f"no {', '.join(missing)}" if missing else ""


def number(rows: Sequence[Row], name: str, default: float | np.ndarray = np.nan) -> np.ndarray:
    """A column; `default` where it is empty."""
    found = np.array([float(row[name]) if row[name] else np.nan for row in rows])
    return np.where(np.isnan(found), default, found)


def where(rows: Sequence[Row], test: Callable[[Row], object]) -> np.ndarray:
    """1 where `test` holds, else 0."""
    return np.array([float(bool(test(row))) for row in rows])


def ampere(row: Row) -> bool:
    return row["gpu"].startswith(("A100", "A800"))


def second(row: Row) -> bool:
    """Whether attention is torch's own or FlashAttention-2."""
    return any(word in row["attn_impl"].lower() for word in SECOND)


def overlapped(rows: Sequence[Row], what: str) -> np.ndarray:
    return where(rows, lambda row: what in row["overlap"].split("+"))


def habits_of(rows: Sequence[Row]) -> Trainer:
    """What the trainer of each row does."""
    flash = where(rows, lambda row: row["attn_impl"] != "unfused" and (row["attn_impl"] or not ampere(row)))
    selective = where(rows, lambda row: row["recompute"] == "selective")
    third = where(rows, lambda row: not ampere(row) and not second(row))
    return Trainer(
        flash=flash,
        compiled=np.maximum(number(rows, "compiled", 0), where(rows, lambda row: not second(row))),
        sequence_parallel=number(rows, "sequence_parallel", 0),
        tensor_hidden=overlapped(rows, "tp"),
        gather_hidden=overlapped(rows, "zero3"),
        reduce_hidden=np.maximum(overlapped(rows, "zero3"), overlapped(rows, "dp")),
        messages_hidden=overlapped(rows, "pp"),
        ring_hidden=1.0,
        gradient_bytes=number(rows, "grad_bytes", 2 + 2 * where(rows, lambda row: row["precision"] == "bf16")),
        selective_matmuls=0.5 * selective * flash,
        selective_attention=1 - flash,
        full_attention=1.0,
        shard_group=number(rows, "shard_group", 0),
        **{name: 1 + (gain - 1) * third for name, gain in CUDNN_GAINS.items()},
    )


def device_of(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Constants of each row's preset, and of its fabric where the row names one."""
    made = [preset(preset_of(row["gpu"])) for row in rows]
    links = [fabric(one) for one in made]
    share = np.array([one.shares["network link"] for one in made])
    rate = np.array([one.links["network"].bytes_per_s / 1e9 for one in made])
    return {
        "peak": np.array([one.device.flops_per_s["bf16"] for one in made]),
        "matmul": np.array([one.shares["matmul"] for one in made]),
        "forward": np.array([one.shares["attention forward"] for one in made]),
        "backward": np.array([one.shares["attention backward"] for one in made]),
        "memory": np.array([one.device.memory_bytes_per_s * one.shares["memory"] for one in made]),
        "launch_s": np.array([one.device.launch_s for one in made]),
        "multiprocessors": np.array([one.device.multiprocessors or MULTIPROCESSORS for one in made]),
        "watts": np.array([one.device.watts for one in made]),
        "per_node": number(rows, "gpus_per_node", 8),
        "node": np.array([float(link.node_bytes_per_s) for link in links]),
        "node_latency_s": np.array([float(link.node_latency_s) for link in links]),
        "network": number(rows, "fabric_gb_s_per_gpu", rate) * 1e9 * share,
        "network_latency_s": np.array([float(link.network_latency_s) for link in links]),
    }


def read(rows: Sequence[Row]) -> Rows:
    """Rows without a `reason` as arrays."""
    width, heads, tp, pp, layers = (number(rows, name) for name in ("hidden", "heads", "tp", "pp", "layers"))
    ring, ulysses, seq = number(rows, "cp", 1), number(rows, "sp_ulysses", 1), number(rows, "seq")
    dp, micro = number(rows, "dp", number(rows, "gpus") / (tp * pp * ring * ulysses)), number(rows, "micro_batch", 1)
    gated = where(rows, lambda row: "llama" in row["model"].lower() or float(row["ffn"]) != 4 * float(row["hidden"]))
    keys, vocabulary = number(rows, "kv_heads", heads) * width / heads, number(rows, "vocab", VOCABULARY)
    sizes = Sizes(layers, width, heads, width, keys, number(rows, "ffn"), vocabulary, gated, 1 - gated)
    virtual = number(rows, "vpp", np.where((overlapped(rows, "pp") == 1) & (pp > 1), np.maximum(1, layers // pp), 1))
    zero, tokens = number(rows, "zero", overlapped(rows, "dp")), micro * seq
    recompute = np.array([float(KNOWN_RECOMPUTE[row["recompute"]]) for row in rows])
    micros = np.maximum(1, number(rows, "global_batch") / dp / micro)
    candidates = Candidates(tp, ulysses, ring, dp, pp, virtual, zero, recompute, micros, tokens, tokens * seq / 2)
    return Rows(sizes, habits_of(rows), candidates, device_of(rows), number(rows, "step_time_s"))


def weights(groups: Sequence[str]) -> np.ndarray:
    """Of each row: a group counts by the square root of its rows."""
    count = Counter(groups)
    return np.array([count[group] ** -0.5 for group in groups])


def fitted(rows: Sequence[Row]) -> Constants:
    """Constants fitted to rows."""
    made = read(rows)
    return fit(
        lambda constants: made.predict(constants).total, made.measured_s, Constants(), weights=weights([row["source"] for row in rows])
    )


def left_out(rows: Sequence[Row]) -> list[tuple[np.ndarray, Forecast]]:
    """Of each source: its rows' numbers, and their forecast by constants fitted to all other sources; where these are few, by the
    constants that come with Longshift."""
    found = []
    for source in dict.fromkeys(row["source"] for row in rows):
        own = np.array([index for index, row in enumerate(rows) if row["source"] == source])
        others = [row for row in rows if row["source"] != source]
        constants = fitted(others) if len({row["source"] for row in others}) >= LEAST_SOURCES else FITTED
        found.append((own, read([rows[index] for index in own]).predict(constants)))
    return found


def after(forecast: Forecast, measured_s: np.ndarray, count: int, choices: int) -> np.ndarray:
    """Predicted over measured seconds of the rows left when `count` of them calibrate, over seeded choices: (choices, rows left)."""
    found = []
    for seed in range(choices):
        order = np.random.default_rng(seed).permutation(len(measured_s))
        seen, rest = order[:count], order[count:]
        correction = calibrate({name: part[seen] for name, part in forecast.parts.items()}, measured_s[seen])
        found.append(correction.total({name: part[rest] for name, part in forecast.parts.items()}) / measured_s[rest])
    return np.array(found)


def ranking(rows: Sequence[Row], predicted_s: np.ndarray, measured_s: np.ndarray) -> dict:
    """Of layouts of the same model, devices and batch: pairs more than APART from each other that are in the right order; and what choosing
    the first, or the best of the first three, loses, on average over such sweeps."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        what = ("source", "gpu", "gpus", "layers", "hidden", "ffn", "seq", "global_batch", "precision")
        groups.setdefault(tuple(row[name] for name in what), []).append(index)
    pairs, right, first, three = 0, 0, [], []
    for members in groups.values():
        ours, theirs = predicted_s[members], measured_s[members]
        apart = np.log(theirs[:, None] / theirs[None, :]) > APART
        if len(members) < SWEEP_ROWS:
            continue
        pairs, right = pairs + int(apart.sum()), right + int((apart & (ours[:, None] > ours[None, :])).sum())
        order = np.argsort(ours, kind="stable")
        first.append(theirs[order[0]] / theirs.min() - 1)
        three.append(theirs[order[:3]].min() / theirs.min() - 1)
    mean = float(np.mean(first)) if first else 0.0
    return {
        "pairs": pairs,
        "pairs_right": right / pairs if pairs else 1.0,
        "regret_first": mean,
        "regret_best_of_3": float(np.mean(three)) if three else 0.0,
        "regrets_first": [float(one) for one in first],
        "regrets_best_of_3": [float(one) for one in three],
    }


def summary(errors: np.ndarray) -> dict[str, float]:
    return {
        "rows": int(errors.shape[-1]),
        "median": float(np.median(errors)),
        "mean": float(np.mean(errors)),
        "p90": float(np.quantile(errors, 0.9)),
    }


def judge(table: Sequence[Row], count: int, choices: int) -> dict:
    """Everything that the script reports of a table. `predicted_s`: by the constants that come with Longshift, which were fitted to the
    published table. All errors are of `left_out_s`: by constants that were fitted to other sources."""
    skipped = Counter(found for row in table if (found := reason(row)))
    rows = [row for row in table if not reason(row)]
    asked = sum(bool(row["step_time_s"]) and row["precision"] in ("", "bf16", "fp16") for row in table)
    measured_s = np.array([float(row["step_time_s"]) for row in rows])
    predicted_s, raw, calibrated, spread, by_source = np.zeros(len(rows)), np.zeros(len(rows)), [], [], {}
    for own, forecast in left_out(rows):
        predicted_s[own] = forecast.total
        raw[own] = np.abs(predicted_s[own] / measured_s[own] - 1)
        found = by_source.setdefault(rows[own[0]]["source"], {"raw": summary(raw[own])})
        if len(own) > count:
            errors = np.abs(after(forecast, measured_s[own], count, choices) - 1)
            found["calibrated"] = summary(errors)
            spread.append(errors.ravel())
            calibrated.append((len(own), float(np.mean(errors))))
    shipped_s = read(rows).predict(FITTED).total
    sizes = [number for number, _ in calibrated]
    return {
        "mean_raw": float(np.mean(raw)),
        "mean_calibrated": float(np.average([error for _, error in calibrated], weights=sizes)) if calibrated else None,
        "mean_raw_of_sources": float(np.mean([one["raw"]["mean"] for one in by_source.values()])),
        "mean_calibrated_of_sources": float(np.mean([error for _, error in calibrated])) if calibrated else None,
        "worst_raw_source": max(one["raw"]["mean"] for one in by_source.values()),
        "worst_calibrated_source": max((error for _, error in calibrated), default=None),
        "coverage": len(rows) / asked if asked else 0.0,
        "skipped": dict(skipped),
        **ranking(rows, predicted_s, measured_s),
        "constants": {name: float(value) for name, value in vars(fitted(rows)).items()},
        "band": {"raw": float(np.quantile(raw, 0.8)), "calibrated": float(np.quantile(np.concatenate(spread), 0.8)) if spread else None},
        "by_source": by_source,
        "mean_of_shipped_constants": float(np.mean(np.abs(shipped_s / measured_s - 1))),
        "predicted_s": [float(one) for one in shipped_s],
        "left_out_s": [float(one) for one in predicted_s],
    }


def publish_anchors(quick: bool, as_json: bool) -> None:
    found = anchors.judge(with_search=not quick)
    if as_json:
        print(json.dumps({"benchmark": "anchors", "machine": machine(), "versions": versions(), "commit": commit()} | found))
        return
    stages, hotspa = found["stages"], found["hotspa"]
    print(f"Stage times of Hydraulis, {len(stages['rows'])} layouts: median {stages['median']:.1%}, worst {stages['worst']:.1%}")
    for row in hotspa["rows"]:
        both = f"{row['predicted_s']:6.1f} s, {row['predicted_error']:+.1%}; without stage times {row['modelled_s']:6.1f} s"
        print(f"HotSPa {row['law']:12s} {row['set']:7s} {row['published_s']:6.1f} s, here {both}, {row['modelled_error']:+.1%}")
    for row in found["talk"]["rows"]:
        told = f"{row['strategy']:28s} {row['longest'] >> 10:5d}K {row['published_gib']:5.1f} GiB"
        theirs = f"as theirs {row['as_theirs_gib']:5.1f} GiB, {row['as_theirs_over']:+.0%}"
        print(f"FPDT talk {told}, here {row['ledger_gib']:5.1f} GiB, {row['over']:+.0%}; {theirs}")
    for row in found["llama3"]["rows"]:
        told = f"{row['devices']:6d} devices, {row['length'] >> 10:4d}K: {row['layouts']['tp8.pp16']}"
        best = f"{row['tp8.pp16_over_best']:+.1%} over {row['layouts']['best']}"
        ran = f"as they ran {row['without_recompute_over_published']:+.1%} over published"
        print(f"Llama 3 405B {told} {best}; theirs {row['theirs_over_best']:+.1%}; {ran}")
    print({key: value for key, value in hotspa.items() if key != "rows"})


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, help="published measurements, a row each")
    parser.add_argument("--anchors", action="store_true", help="whole runs of papers and talks instead; see anchors.py")
    parser.add_argument("--calibrate", type=int, default=3, metavar="K", help="rows of a source that calibrate")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="two choices of the K rows instead of 20")
    args = parser.parse_args()
    if args.anchors:
        publish_anchors(args.quick, args.json)
        return
    if args.csv is None:
        parser.error("--csv FILE, or --anchors")
    with args.csv.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    found = judge(table, args.calibrate, 2 if args.quick else CHOICES)
    if args.json:
        facts = {"benchmark": "published", "machine": machine(), "versions": versions(), "commit": commit()}
        print(json.dumps(facts | found))
        return
    for source, one in found.pop("by_source").items():
        words = [f"{name} median {part['median']:.3f} mean {part['mean']:.3f} p90 {part['p90']:.3f}" for name, part in one.items()]
        print(f"{source[:44]:44s} {one['raw']['rows']:4d} rows  {'   '.join(words)}")
    found = {name: value for name, value in found.items() if name not in ("predicted_s", "left_out_s")}
    for name, value in found.items():
        print(f"{name:28s} {value:.4f}" if isinstance(value, float) else f"{name:28s} {value}")


if __name__ == "__main__":
    main()
