"""The switches that benchmarks/switch_plan.py plans. Imports no torch, so that a process of its own can tell the memory of planning.

python benchmarks/switch_cases.py MODEL SRC DST SIDE PLANNER BUCKET_BYTES      one plan, as one line of JSON
"""

import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longshift.layout.layout import Layout
from longshift.spec.families import preset
from longshift.spec.model import ModelSpec
from longshift.switch import planners
from longshift.switch.links import Links
from longshift.switch.plan import Plan, switch_plan
from longshift.switch.planners import MoveColumns, Wave
from longshift.switch.spread import BoxesByWeight, spread_weights, together, turn_about
from longshift.switch.traffic import Traffic, traffic

BF16_BYTES = 2
LINKS = Links(per_node=8, intra_bytes_s=300e9, inter_bytes_s=25e9)  # NVLink one way; one network card a device


class FirstOwner(Wave):
    """No planner: the lowest rank that holds a slice sends it."""

    def parts(self) -> list[MoveColumns]:
        row, targets = np.nonzero(self.near | self.far)
        return [MoveColumns(self.rows[row], np.zeros_like(row), self.has.argmax(1)[row], targets)]


planners.PLANNERS["first_owner"] = FirstOwner
PLANNERS = ("algorithm1", "fan_out", "first_owner")


def _llama(layers: int, width: int, ffn: int, heads: int) -> ModelSpec:
    """Untied, three feed-forward matrices, as many key/value heads as query heads, the vocabulary of the published case."""
    return ModelSpec("llama", 30592, width, layers, heads, heads, width // heads, ffn, 4096)


MODELS = {
    "7B": _llama(32, 4096, 11008, 32),
    "13B": _llama(40, 5120, 13824, 40),
    "32B": _llama(60, 6656, 17920, 64),
    "70B": preset("llama-3-70b"),
}


@dataclass(frozen=True)
class Published:
    """A row of the table in the design notes: triples are (dp, tp, pp); GB are 1e9 bytes; `least_gb` and `fan_out_s` are of a plan in
    which a missing byte enters a node once."""

    model: str
    src: tuple[int, int, int]
    dst: tuple[int, int, int]
    max_recv_gb: float
    inter_node_gb: float
    least_gb: float
    algorithm1_s: float
    fan_out_s: float

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return triple(*self.src), triple(*self.dst)


def triple(dp: int, tp: int, pp: int) -> Layout:
    """The paper's (dp, tp, pp): tensor parallel inside, pipeline outside, as every Layout."""
    return Layout(dp=dp, tp=tp, pp=pp)


PUBLISHED = (
    Published("7B", (4, 4, 2), (32, 1, 1), 11.8, 215, 27, 0.269, 0.036),
    Published("7B", (4, 8, 1), (32, 1, 1), 11.8, 0, 0, 0.039, 0.039),
    Published("13B", (4, 8, 1), (16, 2, 1), 13.0, 0, 0, 0.043, 0.043),
    Published("13B", (2, 8, 2), (16, 2, 1), 13.0, 208, 52, 0.260, 0.065),
    Published("32B", (1, 16, 2), (4, 2, 4), 8.2, 130, 33, 0.329, 0.041),
    Published("32B", (4, 2, 4), (2, 8, 2), 4.1, 65, 65, 0.082, 0.082),
    Published("32B", (2, 8, 2), (1, 16, 2), 2.0, 0, 0, 0.014, 0.007),
    Published("32B", (1, 16, 2), (8, 4, 1), 16.3, 390, 195, 0.650, 0.244),
    Published("32B", (8, 4, 1), (4, 2, 4), 8.2, 0, 0, 0.027, 0.027),
)

# 70B on 1,024 ranks: model, source, target, what is held, bytes a bucket. The home of ZeRO-1 is cut into rows, and is the largest to plan.
LARGE = (
    ("70B", triple(16, 8, 8), triple(128, 8, 1), "copies", None),
    ("70B", triple(2, 64, 8), triple(128, 8, 1), "copies", None),
    ("70B", Layout.parse("pp8.dp16.tp8.z1"), triple(128, 8, 1), "home+copies", None),
    ("70B", Layout.parse("dp128.tp8.z1"), triple(8, 8, 16), "home", None),
    ("70B", Layout.parse("pp8.dp16.tp8.z1"), triple(128, 8, 1), "home", 256 * 2**20),
)


@dataclass(frozen=True)
class MeasuredSwitch:
    """A plan, what it puts on the links, the seconds it took to make, on the clock and of this process."""

    plan: Plan
    traffic: Traffic
    plan_s: float
    cpu_s: float


def measure(model: str, src: Layout, dst: Layout, side: str, planner: str, bucket_bytes: int | None) -> MeasuredSwitch:
    """Plan from nothing: placements, slices, moves and the digest are all inside the time. `side`: copies, home, or home+copies."""
    clock, cpu = time.perf_counter(), time.process_time()
    spec = MODELS[model]
    held: BoxesByWeight = together(*(spread_weights(spec, src, part) for part in ("home", "copies") if part in side.split("+")))
    wanted = spread_weights(spec, dst, "copies")
    plan = switch_plan(held, wanted if bucket_bytes is None else turn_about(held, wanted), LINKS, BF16_BYTES, planner, bucket_bytes)  # pyright: ignore
    _ = plan.digest
    plan_s, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
    return MeasuredSwitch(plan, traffic(plan), plan_s, cpu_s)


def row(model: str, src: Layout, dst: Layout, side: str, planner: str, bucket_bytes: int | None) -> dict:
    """One row of the benchmark."""
    found = measure(model, src, dst, side, planner, bucket_bytes)
    return {
        "model": model,
        "gpus": found.plan.world,
        "src": f"{src} {side}" if side != "copies" else str(src),
        "dst": str(dst),
        "planner": planner,
        "max_recv_gb": found.traffic.max_received_bytes / 1e9,
        "inter_node_gb": found.traffic.inter_node_bytes / 1e9,
        "bound_s": found.traffic.bound_s,
        "overlapped_s": found.traffic.overlapped_s,
        "in_order_s": found.traffic.in_order_s,
        "bucket_mib": bucket_bytes and bucket_bytes / 2**20,
        "buckets": found.plan.buckets,
        "buffer_gb": found.plan.buffer_bytes / 1e9,
        "moves": sum(len(w.moves) for w in found.plan.weights),
        "plan_s": found.plan_s,
        "plan_cpu_s": found.cpu_s,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """Largest resident size of this process. On Linux ru_maxrss begins with that of the process which started this one; VmHWM does not."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    name, source, target, held_side, by, size = sys.argv[1:]
    print(json.dumps(row(name, Layout.parse(source), Layout.parse(target), held_side, by, int(size) or None)))
