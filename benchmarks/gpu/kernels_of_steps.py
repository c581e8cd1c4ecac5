"""What a GPU's kernels take: of attention by length, of matmuls for a moment and for a while, and in training steps by kind.
`python benchmarks/gpu/kernels_of_steps.py --json > report.json`, which `tables.py --keep report.json` puts into `results/`.

    attention   pieces of lengths that are multiples of 1,024 tokens, and of others: FlashAttention-2, and cuDNN for what it takes of them
                (`model.cut`); the first call of a shape, in which cuDNN plans, and later ones
    matmuls     FLOP/s in 0.02, 0.2 and 1.5 s of one matmul after another: a power limit shows
    steps       of two layers of Llama 3 8B, with torch.profiler's sums of kernels by kind

`--device cpu` tries the script itself on small shapes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import bare as bare
from first_day import commit
from first_day_parts import machine, seconds_of, versions
from steps import Case, K, build, llama, profiled, wait, warm

from longshift.cluster.cluster import Heads
from longshift.layout.layout import Layout
from longshift.model.cut import cut
from longshift.model.kernels import CUDNN, FLASH
from longshift.model.packed_attention import EVEN

SQUARES = (1024, 1500, 2048, 2500, 3000, 4096, 4500, 5100, 6000, 8200, 10000, 16384, 17000, 33000, 65536, 66000)
PIECES = ((2500, 2500), (5000, 5000), (5000, 9000), (8192, 8192), (17000, 17000))  # queries and keys of pieces that are not causal
MATMULS = ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 4096), (8192, 4096, 14336), (4096, 14336, 8192), (1024, 128256, 4096))
STEPS = (  # layout, lengths of documents, train.compile
    ("dp1", (8 * K,), False),
    ("dp1", (16 * K,), False),
    ("recompute-full", (16 * K,), False),
    ("dp1", (8 * K,), True),
    ("dp1", (16 * K,), True),
    ("dp1", (7000, 9384), False),
    ("dp1", (300, 20000, 12000, 84, 384), False),
)
KINDS = {"flash": "attention", "fmha": "attention", "nvjet": "matmul", "gemm": "matmul", "cutlass": "matmul", "FusedOptimizer": "update"}


def attention(device: torch.device, few: int) -> Iterator[dict]:
    """Seconds of pieces, by kernel and direction."""
    pieces = [(tokens, tokens, True) for tokens in SQUARES] + [(*piece, False) for piece in PIECES]
    kernels = {"flash": FLASH, "cudnn": cut(CUDNN, FLASH, EVEN, 0)}
    for heads in (Heads(32, 8, 128), Heads(32, 8, 64)):
        for queries, keys, causal in pieces:
            shapes = [(queries // few, heads.query)] * 2 + [(keys // few, heads.key)] * 2
            grad, q, k, v = (torch.randn(*shape, heads.width, device=device).bfloat16() for shape in shapes)
            given, known = (q, k, v, causal, heads.width**-0.5), None
            for name, kernel in kernels.items() if device.type == "cuda" else [("flash", FLASH)]:
                found = {"first_forward_s": once(lambda: kernel.forward(*given), device)}  # noqa: B023  (called here)
                made = kernel.forward(*given)
                found["forward_s"] = seconds_of(lambda: kernel.forward(*given), device)  # noqa: B023
                back = lambda: kernel.backward(grad, *given[:3], *made, *given[3:])  # noqa: B023, E731
                found |= {"first_backward_s": once(back, device), "backward_s": seconds_of(back, device)}
                results = [*made, *back()]
                known = known or results
                found["off_flash"] = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(results, known)]
                yield {"heads": str(heads), "queries": len(q), "keys": len(k), "causal": causal, "kernel": name, "measured": found}


def once(run: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def matmuls(device: torch.device, few: int) -> Iterator[dict]:
    """FLOP/s of one matmul after another, for a moment and for a while."""
    for m, n, k in MATMULS:
        m, n, k = m // few, n // few, k // few
        a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
        found = {}
        for seconds in (0.02, 0.2, 1.5):
            once(lambda: a @ b, device)  # noqa: B023
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                for _ in range(10):
                    a @ b
                wait(device)
                count += 10
            found[str(seconds)] = 2.0 * m * n * k * count / (time.perf_counter() - began)
        yield {"matmul": [m, n, k], "measured": {"flops_per_s": found}}


def steps(device: torch.device, few: int) -> Iterator[dict]:
    """Seconds of steps, and of their kernels by kind."""
    for layout, lengths, compiles in STEPS:
        lengths = tuple(max(1, length // few) for length in lengths)
        case = Case(llama(2, sum(lengths), few > 1), Layout.parse(layout), lengths, compile=compiles)
        built = build(case, device)
        built.step(warm(case))
        built.step(lengths)
        seconds = [once(lambda: built.step(lengths), device) for _ in range(6)]  # noqa: B023
        with tempfile.TemporaryDirectory() as folder:
            trace = profiled(lambda: built.step(lengths), device, Path(folder) / "trace.json")  # noqa: B023
        built.close()
        sums: Counter[str] = Counter()
        for event in trace["traceEvents"]:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                sums[next((kind for word, kind in KINDS.items() if word in event["name"]), "other")] += event["dur"] / 1e6
        found = {"seconds": min(seconds), "most_s": max(seconds), "kernels_s": dict(sums)}
        yield {"layout": layout, "lengths": lengths, "compile": compiles, "measured": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="*", choices=("attention", "matmuls", "steps"), default=["attention", "matmuls", "steps"])
    parser.add_argument("--commit", default=commit(), help="what is measured, where there is no git")
    options = parser.parse_args()
    device, few = (torch.device("cuda", 0), 1) if options.device == "cuda" else (torch.device("cpu"), 64)
    parts = {"attention": attention, "matmuls": matmuls, "steps": steps}
    report = {"benchmark": "gpu_kernels", "date": datetime.now(UTC).date().isoformat(), "commit": options.commit}
    report |= {"machine": machine(), "versions": versions(), "rows": []}
    for part in options.parts:
        for row in parts[part](device, few):
            report["rows"].append({"part": part, **row, "commit": options.commit})
            print(report["rows"][-1], file=sys.stderr, flush=True)
    print(json.dumps(report) if options.json else f"{len(report['rows'])} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
