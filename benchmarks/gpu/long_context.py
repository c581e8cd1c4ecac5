"""One long document on one GPU, at the width of Llama 3 8B: tokens a second, memory, and the share of the matmul peak, by method, length
and chunk. `python benchmarks/gpu/long_context.py --json > report.json`, which `tables.py --keep report.json` puts into `results/`.

A step is forward, backward and update in bf16, from random weights. FLOP/s count a causal attention's scores once and no recomputation;
the peak is a bf16 matmul of 8192 x 8192 in the same process. The share of transfers that is hidden, their time under a kernel, is the
profiler's, of a step of at most 8 chunks; what they cost is also seen against the same layout with everything on the device, where that
fits. `--device cpu` tries the script itself on a small model; `--device fake` needs no GPU and counts, of the same steps (fake_device.py),
the bytes that the device's tensors take and what its operations compute and move, and no seconds.
"""

# ruff: noqa: E402  (what stands before the imports makes them possible)

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

SOURCE = Path(__file__).parents[2] / "src" / "longshift"
sys.modules["longshift"] = ModuleType("longshift")  # without what the package itself imports: a GPU machine may lack pydantic
sys.modules["longshift"].__path__ = [str(SOURCE)]

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import NAME, Held, fake_device

from longshift.dist.world import World
from longshift.documents.batch import Document, StepBatch
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets
from longshift.schedule.chunks import StreamOptions
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.state.home import Home, random_source
from longshift.state.optimizer import Optimizer, Schedule
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.stream.tiers import Tier
from longshift.switch.itinerary import SwitchOptions
from longshift.workload.groups import Edge

METHODS = {  # C: the chunk
    "recompute": "recompute-full",
    "recompute+offload": "recompute-full.host",
    "fpdt": "chunkC.host.kv-offload.keep-input.fpdt",
    "stream input": "chunkC.host.keep-input",
    "stream": "chunkC.host",
    "stream kv-offload": "chunkC.host.kv-offload",
    "stream on the device": "chunkC",
}
K = 1024


def llama(layers: int, longest: int, small: bool) -> ModelSpec:
    """Llama 3 8B with fewer layers; `small`: something that a CPU can try."""
    if small:
        return ModelSpec("llama", 257, 128, layers, 2, 1, 64, 352, longest, rope=Rope())
    return ModelSpec("llama", 128256, 4096, layers, 32, 8, 128, 14336, longest, rope=Rope(theta=500000.0))


def peak_flops(device: torch.device, size: int) -> float:
    """FLOP/s of a bf16 matmul."""
    x = torch.randn(size, size, device=device).bfloat16()
    best = float("inf")
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        x @ x
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_of(spec: ModelSpec, layout: Layout, device: torch.device, longest: int):
    """What makes one update from a document of so many tokens, and the tier it uses."""
    world, precision = World(0, 1, device), Precision.of("bf16")
    real = device.type in ("cpu", "cuda")  # where it is not, nobody looks at numbers
    source = random_source(spec, 0, precision.home) if real else lambda _, box: torch.empty(box.shape, dtype=precision.home)
    home = Home(spec, buckets(spec, layout), 0, precision.home, device, source)
    state = State(spec, home, Optimizer(home, Rule()), Schedule(1e-4, 1000, 0.0, 1), 1.0)
    player = Player(spec, [Edge(longest, layout)], world, home, precision, SwitchOptions(), StreamOptions())

    def step(tokens: int) -> float:
        ids = np.random.default_rng(0).integers(0, spec.vocab, tokens)
        labels = np.append(ids[1:], -100)
        return train_step(state, StepBatch((Document(ids, labels),), tokens - 1, 0, 1), player).loss

    return step, player.runners[layout].tier


def profiled(step: Callable[[int], float], tokens: int, device: torch.device, path: Path) -> dict:
    """The profiler's trace of a step, which is also left at `path`."""
    with torch.profiler.profile() as profile:
        step(tokens)
        _wait(device)
    profile.export_chrome_trace(str(path))
    return json.loads(path.read_text())


def hidden(trace: dict) -> float | None:
    """The share of the time of copies between host and device that lies under kernels; None without copies."""
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "gpu_memcpy": []}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" or (event.get("cat") == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"])):
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    copies, kernels, either = map(_covered, (spans["gpu_memcpy"], spans["kernel"], spans["gpu_memcpy"] + spans["kernel"]))
    return (copies + kernels - either) / copies if copies else None


def _covered(spans: list[tuple[float, float]]) -> float:
    """Time that lies in at least one."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _moved(tier: Tier | None) -> dict:
    """In the last step, and the most that the tier held."""
    if tier is None:
        return {}
    moved = {"tier_peak": tier.moved.peak_bytes, "put": tier.moved.put_bytes, "fetched": tier.moved.fetched_bytes}
    return {f"{name}_gib": size / 2**30 for name, size in moved.items()}


def count(spec: ModelSpec, method: str, chunk: int, tokens: int, device: torch.device, held: Held) -> dict:
    """One row of a fake device: the most it holds in a step, and what of that is there between steps."""
    layout = Layout.parse(METHODS[method].replace("chunkC", f"chunk{chunk}"))
    gc.collect()  # a player and its table refer to each other
    step, tier = step_of(spec, layout, device, tokens)
    step(min(tokens, 2 * chunk))
    between = held.now[NAME]
    held.restart()
    step(tokens)
    row = {"method": method, "layout": str(layout), "layers": spec.layers, "tokens": tokens}
    row |= {"device_peak_gib": held.most[NAME] / 2**30, "device_between_gib": between / 2**30, **held.work}
    row["model_flops"] = tokens * spec.flops_per_token((tokens + 1) / 2)
    row |= _moved(tier)
    if tier is not None:
        tier.close()
    return row


def measure(spec: ModelSpec, method: str, chunk: int, tokens: int, device: torch.device, trace: str | None) -> dict:
    """One row; `fault` where it does not fit."""
    layout = Layout.parse(METHODS[method].replace("chunkC", f"chunk{chunk}"))
    row = {"method": method, "layout": str(layout), "layers": spec.layers, "tokens": tokens}
    tier = None
    try:
        step, tier = step_of(spec, layout, device, tokens)
        step(min(tokens, 2 * chunk))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _wait(device)
        began = time.perf_counter()
        loss = step(tokens)
        _wait(device)
        seconds = time.perf_counter() - began
        row |= {"seconds": seconds, "tokens_per_s": tokens / seconds, "loss": loss}
        row["flops_per_s"] = tokens * spec.flops_per_token((tokens + 1) / 2) / seconds
        if device.type == "cuda":
            row["device_peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        row["host_resident_gib"] = _resident() / 2**30  # arenas stay pinned till the tier is closed
        row |= _moved(tier)
        if tier is not None or trace is not None:
            with tempfile.TemporaryDirectory() as folder:
                row["hidden_share"] = hidden(profiled(step, min(tokens, 8 * chunk), device, Path(trace or f"{folder}/trace.json")))
    except torch.cuda.OutOfMemoryError as fault:
        row["fault"] = str(fault).splitlines()[0]
    finally:
        if tier is not None:
            tier.close()
    return row


def _told(row: dict) -> dict:
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="*", default=[64 * K, 128 * K, 256 * K, 512 * K, 1024 * K])
    parser.add_argument("--chunks", type=int, nargs="*", default=[4 * K, 16 * K, 64 * K, 128 * K])
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--trace", help="a file for the profiler's trace of `stream` at the first length and chunk")
    options = parser.parse_args()
    small = options.device == "cpu"
    cases = [
        (llama(layers, max(options.lengths), small), method, chunk, tokens)
        for tokens in options.lengths
        for layers in options.layers
        for method in options.methods
        for chunk in (options.chunks if "chunkC" in METHODS[method] else options.chunks[:1])
    ]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    report = {"benchmark": "gpu/long_context", "versions": versions}
    if options.device == "fake":
        with fake_device() as (device, held):
            rows = [_told(count(*case, device, held)) for case in cases]
        report |= {"device": "fake: bytes of tensors, without what kernels need inside", "rows": rows}
    else:
        device = torch.device(options.device)
        peak, trace, rows = peak_flops(device, 1024 if small else 8192), options.trace, []
        for case in cases:
            row = measure(*case, device, trace if case[1] == "stream" else None)
            row["mfu_causal"] = row.get("flops_per_s", 0.0) / peak
            rows.append(_told(row))
            trace = None if case[1] == "stream" else trace
            gc.collect()  # a player and its table refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()
        report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        report |= {"matmul_peak_flops_per_s": peak, "mfu": "causal scores counted once, no recomputation", "rows": rows}
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    report["commit"] = commit.stdout.strip() or None
    print(json.dumps(report) if options.json else "\n".join(map(str, report["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
