"""A small Llama on two ranks under Longshift's static layouts, against torch DDP and FSDP2 and, where `longshift[peers]` is installed,
DeepSpeed and the Hugging Face Trainer; tensor and pipeline parallelism against torch's own.

All train the same function from the same weights on the same packs (two documents of equal length), one thread a rank, over gloo, with
torch's fused AdamW and one clip a step; the losses must agree, else the exit code is 1. Every system has its own pair of processes;
rounds are interleaved, each begins with another system, and ratios are taken within a round. The first round is not counted.

`--against FOLDER` compares with Longshift as it is in another checkout, and with `train.compile`, instead: ranks are processes of their
own, with the code of each.

No system here cuts the sequence, so u2 and ring2 have no ratio to a like-for-like peer, only one to the best data-parallel system.
"""

import importlib
import json
import os
import socket
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from common import arguments, publish, say
from peers.session import small_llama
from trial import Trial

from longshift.dist.fork import ForkedWorld, SpawnedWorld
from longshift.errors import LongshiftError, PeerError

RANKS = 2
DEADLINE_S = 300.0
LOSS_LIMIT: Mapping[str, float] = {"float32": 1e-4, "bf16": 1e-2}  # relative, over the first updates
EXTRA: Mapping[str, tuple[str, ...]] = {  # peer: what it needs
    "deepspeed": ("deepspeed",),
    "hf": ("transformers", "accelerate"),
    "dtensor": ("transformers",),
}

# Longshift's layout -> the peers that do the same.
LIKE: Mapping[str, tuple[str, ...]] = {
    "dp2": ("ddp dp2", "hf dp2"),
    "dp2.z1": ("fsdp2 z1", "deepspeed z1"),
    "dp2.z2": ("fsdp2 z2", "deepspeed z2"),
    "dp2.z3": ("fsdp2 z3", "deepspeed z3"),
    "dp2.z2,host": ("deepspeed z2,host",),
    "tp2": ("dtensor tp2",),
    "pp2": ("pipelining pp2",),
    "pp2:3-1": ("pipelining pp2:3-1",),
    "u2": (),
    "ring2": (),
}


YOUNG = ("compile",)  # what trials have not always had
BEFORE = ("dp2", "dp2.z3", "tp2", "pp2", "u2", "ring2")  # layouts that are compared with those of another checkout


class OtherWorld(SpawnedWorld):
    """Ranks that import Longshift, and these benchmarks, from a checkout."""

    def __init__(self, checkout: Path):
        super().__init__(RANKS)
        self._path = os.pathsep.join(str(checkout.resolve() / name) for name in ("src", "benchmarks"))

    def _begin(self, rank: int, listener: socket.socket, pipe: Connection) -> int:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = self._path
        try:
            return super()._begin(rank, listener, pipe)
        finally:
            os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@dataclass(frozen=True)
class Round:
    """One block of one system: tokens a second of both ranks, the larger peak memory and processor time a step of a rank."""

    rate: float
    peak_mib: float
    base_mib: float
    cpu_s: float


def available(layouts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Names "system variant" of what these layouts are compared with and can run here, and why other systems cannot. Imports them: the
    ranks are forked. DDP is always among them."""
    peers = list(dict.fromkeys(["ddp dp2", *(name for layout in layouts for name in LIKE[layout])]))
    skipped = {}
    for system, needs in EXTRA.items():
        if not any(name.split()[0] == system for name in peers):
            continue
        try:
            with redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output, from its import on
                for module in (*needs, f"peers.{system}"):
                    importlib.import_module(module)
        except ImportError as fault:
            skipped[system] = f"{fault}; the extra `peers` of the package brings it"
            say(f"without {system}: {skipped[system]}")
    return [f"longshift {layout}" for layout in layouts] + [name for name in peers if name.split()[0] not in skipped], skipped


def measure(
    names: Sequence[str], trial: Trial, rounds: int, steps: int, world_of: Callable[[str], ForkedWorld]
) -> tuple[dict[str, list[Round]], dict[str, list[float]]]:
    """Rounds and losses of every system, the uncounted first round's losses included. `world_of`: where a system computes."""
    text, tokens = json.dumps(asked(trial)), sum(trial.lengths[0])
    found: dict[str, list[Round]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        worlds = {name: stack.enter_context(world_of(name)) for name in names}
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                system, variant = name.split()
                system = "longshift" if system == "before" else system
                call = {"system": system, "variant": variant, "trial": text, "first": number * steps, "steps": steps}
                try:
                    ranks = worlds[name].call("peers.session:block", DEADLINE_S, **call)
                except LongshiftError as fault:
                    raise PeerError(f"{name}, round {number}: {fault}") from fault
                losses[name] += ranks[0]["losses"]
                if number:
                    rate = steps * tokens / max(rank["seconds"] for rank in ranks)
                    peak, base, cpu_s = (max(rank[key] for rank in ranks) for key in ("peak_mib", "base_mib", "cpu_s"))
                    found[name].append(Round(rate, peak, base, cpu_s / steps))
            say(f"{trial.precision}: round {number} of {rounds}")
    return found, losses


def asked(trial: Trial) -> dict:
    """A trial in JSON, without what an older checkout does not know and does not do."""
    return {key: value for key, value in trial.to_json().items() if value or key not in YOUNG}


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles, relative to the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def row(name: str, dtype: str, rounds: Sequence[Round]) -> dict:
    system, variant = name.split()
    rates = [r.rate for r in rounds]
    like = LIKE[variant] if system == "longshift" else ()
    return {
        "system": system,
        "layout": variant,
        "dtype": dtype,
        "like_for_like": ", ".join(like) or ("no peer cuts the sequence" if system == "longshift" else None),
        "tokens_per_s": statistics.median(rates),
        "spread": spread(rates),
        "peak_mib": max(r.peak_mib for r in rounds),
        "base_mib": max(r.base_mib for r in rounds),
        "cpu_s_per_step": statistics.median(r.cpu_s for r in rounds),
    }


def ratio(found: Mapping[str, list[Round]], layout: str, like: Sequence[str]) -> dict:
    """Longshift's rate over that of the best of the peers `like`, round by round."""
    best = max(like, key=lambda name: statistics.median(r.rate for r in found[name]))
    pairs = [ours.rate / theirs.rate for ours, theirs in zip(found[f"longshift {layout}"], found[best])]
    return {"peer": best, "ratio": statistics.median(pairs), "spread": spread(pairs)}


def against(options: Namespace) -> int:
    """Rates of layouts over those of another checkout, as they are and with `train.compile`, round by round."""
    here, rows, summary = Path(__file__).parents[1], list[dict](), dict[str, dict]()
    names = [f"{system} {layout}" for layout in options.layouts for system in ("before", "longshift", "compiled")]
    for dtype in options.dtypes:
        trial = trial_of(options, dtype)
        found, losses = measure(
            names, trial, options.rounds, options.steps, lambda name: OtherWorld(options.against if name.startswith("before") else here)
        )
        rows += [row(name, dtype, rounds) for name, rounds in found.items()]
        for layout in options.layouts:
            for system, key in (("longshift", "ratio_to_before"), ("compiled", "compiled_to_before")):
                pairs = [ours.rate / theirs.rate for ours, theirs in zip(found[f"{system} {layout}"], found[f"before {layout}"])]
                told = {"ratio": statistics.median(pairs), "spread": spread(pairs)}
                summary.setdefault(key, {}).setdefault(layout, {})[dtype] = told
        summary.setdefault("loss_difference", {})[dtype] = worst_loss(losses, f"before {options.layouts[0]}", 4)
    publish("static", summary, rows, options.json)
    return int(any(not value <= LOSS_LIMIT[dtype] for dtype, value in summary["loss_difference"].items()))


def trial_of(options: Namespace, dtype: str) -> Trial:
    lengths = ((options.length,) * 8,) * 4
    spec = small_llama(options.width, 4, options.vocab)
    return Trial(spec, lengths, dtype, capacity=2 * options.length)  # pyright: ignore[reportArgumentType]


def worst_loss(losses: Mapping[str, list[float]], usual: str, steps: int) -> float:
    """Largest relative distance from the losses of a system over the first updates."""
    truth = losses[usual][:steps]
    return max(abs(loss - right) / right for mine in losses.values() for loss, right in zip(mine, truth))


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--steps", type=int, default=2, help="updates a round and system")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bf16"], choices=["float32", "bf16"])
    parser.add_argument("--width", type=int, default=256, help="model width")
    parser.add_argument("--vocab", type=int, default=4096, help="of the model")
    parser.add_argument("--length", type=int, default=512, help="tokens of a document; a pack holds two, a step four packs")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of this repository")
    parser.add_argument("--layouts", nargs="+", choices=LIKE, help="that are compared")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.dtypes = 2, 1, ["float32"]
        options.width, options.vocab, options.length = 128, 512, 32
    if options.against is not None:
        options.layouts = options.layouts or BEFORE
        return against(options)
    layouts = options.layouts or list(LIKE)
    names, skipped = available(layouts)
    keys = ("ratio_to_best_peer", "ratio_spread", "best_peer", "ratio_to_best_data_parallel", "loss_difference")
    rows: list[dict] = []
    summary: dict[str, dict] = {key: {} for key in keys} | {"skipped": skipped}
    for dtype in options.dtypes:
        found, losses = measure(names, trial_of(options, dtype), options.rounds, options.steps, lambda name: ForkedWorld(RANKS))
        rows += [row(name, dtype, rounds) for name, rounds in found.items()]
        replicas = [name for layout, like in LIKE.items() if layout.startswith("dp") for name in like if name in found]
        for layout in layouts:
            if like := [name for name in LIKE[layout] if name in found]:
                told = ratio(found, layout, like)
                for key, value in (("ratio_to_best_peer", "ratio"), ("ratio_spread", "spread"), ("best_peer", "peer")):
                    summary[key].setdefault(layout, {})[dtype] = told[value]
            summary["ratio_to_best_data_parallel"].setdefault(layout, {})[dtype] = ratio(found, layout, replicas)["ratio"]
        summary["loss_difference"][dtype] = worst_loss(losses, "ddp dp2", 4)
    publish("static", summary, rows, options.json)
    wrong = [dtype for dtype, value in summary["loss_difference"].items() if not value <= LOSS_LIMIT[dtype]]
    if wrong:
        say(f"the systems do not train the same: losses differ by {summary['loss_difference']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
