"""One long document on one GPU, at the width of Llama 3 8B: tokens a second, memory, and the share of the matmul peak, by method, length
and chunk. `python benchmarks/gpu/long_context.py --json > report.json`, which `tables.py --keep report.json` puts into `results/`.

A step is forward, backward and update in bf16, from random weights. FLOP/s count a causal attention's scores once and no recomputation;
the peak is a bf16 matmul of 8192 x 8192 in the same process. The share of transfers that is hidden, their time under a kernel, is the
profiler's, of a step of at most 4 chunks; what they cost is also seen against the same layout with everything on the device, where that
fits. `--device cpu` tries the script itself on a small model; `--device fake` needs no GPU and counts, of the same steps (fake_device.py),
the bytes that the device's tensors take and what its operations compute and move, and no seconds.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import bare as bare
from fake_device import Held, fake_device
from first_day import commit
from steps import Case, K, count, llama, measure, peak_flops

from longshift.layout.layout import Layout

METHODS = {  # C: the chunk
    "recompute": "recompute-full",
    "recompute+offload": "recompute-full.host",
    "fpdt": "chunkC.host.kv-offload.fpdt",
    "stream input": "chunkC.host.every1",
    "stream": "chunkC.host",
    "stream kv-offload": "chunkC.host.kv-offload",
    "stream on the device": "chunkC",
}


def case_of(method: str, layers: int, chunk: int, tokens: int, longest: int, small: bool) -> Case:
    return Case(llama(layers, longest, small), Layout.parse(METHODS[method].replace("chunkC", f"chunk{chunk}")), (tokens,))


def counted(method: str, case: Case, device: torch.device, held: Held) -> dict:
    """One row of a fake device."""
    return {"method": method, **case.told, **count(case, device, held), "model_flops": case.flops["causal"]}


def measured(method: str, case: Case, device: torch.device, peak: float, trace: Path | None) -> dict:
    """One row; `fault` where it does not fit."""
    found = measure(case, device, trace)
    flops_per_s = found.pop("flops_per_s", {}).get("causal", 0.0)
    return {"method": method, **case.told, **found, "flops_per_s": flops_per_s, "mfu_causal": flops_per_s / peak}


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
    parser.add_argument("--trace", type=Path, help="a file for the profiler's trace of `stream` at the first length and chunk")
    options = parser.parse_args()
    small = options.device == "cpu"
    cases = [
        (method, case_of(method, layers, chunk, tokens, max(options.lengths), small))
        for tokens in options.lengths
        for layers in options.layers
        for method in options.methods
        for chunk in (options.chunks if "chunkC" in METHODS[method] else options.chunks[:1])
    ]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    report = {"benchmark": "gpu/long_context", "versions": versions}
    if options.device == "fake":
        with fake_device() as (device, held):
            rows = [_told(counted(*case, device, held)) for case in cases]
        report |= {"device": "fake: bytes of tensors, without what kernels need inside", "rows": rows}
    else:
        device = torch.device(options.device)
        peak, trace, rows = peak_flops(device, 1024 if small else 8192), options.trace, []
        for method, case in cases:
            rows.append(_told(measured(method, case, device, peak, trace if method == "stream" else None)))
            trace = None if method == "stream" else trace
        report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        report |= {"matmul_peak_flops_per_s": peak, "mfu": "causal scores counted once, no recomputation", "rows": rows}
    report["commit"] = commit()
    print(json.dumps(report) if options.json else "\n".join(map(str, report["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
