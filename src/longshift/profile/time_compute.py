"""Arithmetic: matmuls by shape, elementwise operations by bytes, the least time between two
operations, cores that a process gets."""

import math
import time

import torch
from torch import Tensor

from longshift.cluster.curves import Curve, SampledSizes
from longshift.profile.bench import Bench, CurveSpec, Run
from longshift.spec.formats import FORMATS

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, FORMATS[name].compute) for name in ("float32", "bf16")
}
SPIN_S = 0.4

SHAPES = {  # (device, quick): rows; inner and outer widths
    ("cpu", True): ((16, 128, 1024), (64, 256, 1024)),
    ("cpu", False): ((1, 16, 128, 1024), (64, 256, 1024, 4096)),
    ("cuda", True): ((128, 1024, 8192), (1024, 8192)),
    ("cuda", False): ((1, 128, 1024, 4096, 16384), (1024, 4096, 16384)),
}
STREAMED = {  # bytes read and written
    ("cpu", True): (2**18, 2**22, 3 * 2**26),
    ("cpu", False): (2**14, 2**18, 2**20, 2**22, 2**24, 3 * 2**26),
    ("cuda", True): (2**20, 2**26, 3 * 2**29),
    ("cuda", False): (2**16, 2**20, 2**23, 2**26, 3 * 2**29),
}


def matmuls(bench: Bench, budget_s: float) -> dict[str, Curve]:
    rows, widths = SHAPES[bench.device.type, bench.quick]
    axes = (
        SampledSizes("m", rows),
        SampledSizes("k", widths),
        SampledSizes("n", widths),
    )

    def spec(dtype: torch.dtype) -> CurveSpec:
        count = max(rows + widths) * max(widths)
        x, w, out = (noise(count, dtype, bench.device) for _ in range(3))

        def prepare(m: int, k: int, n: int) -> Run:
            # Weights are [n, k], as linear layers keep them.
            x_mk = x[: m * k].view(m, k)
            w_kn = w[: n * k].view(n, k).t()
            out_mn = out[: m * n].view(m, n)
            return lambda: torch.mm(x_mk, w_kn, out=out_mn)

        return CurveSpec(axes, prepare)

    specs = {f"matmul {name}": spec(dtype) for name, dtype in DTYPES.items()}
    return bench.curves(specs, budget_s)


def elementwise(bench: Bench, budget_s: float) -> dict[str, Curve]:
    """c = a + b: two thirds of the bytes are read, a third written."""
    sizes = STREAMED[bench.device.type, bench.quick]

    def spec(dtype: torch.dtype) -> CurveSpec:
        largest = math.ceil(max(sizes) / 3 / dtype.itemsize)
        a, b, c = (noise(largest, dtype, bench.device) for _ in range(3))

        def prepare(moved_bytes: int) -> Run:
            count = max(1, moved_bytes // 3 // dtype.itemsize)
            return lambda: torch.add(a[:count], b[:count], out=c[:count])

        return CurveSpec((SampledSizes("bytes", sizes),), prepare)

    specs = {f"elementwise {name}": spec(dtype) for name, dtype in DTYPES.items()}
    return bench.curves(specs, budget_s)


def launch(bench: Bench, budget_s: float) -> dict[str, Curve]:
    """Many operations on one number, one after the other; on a GPU the queue runs full, so this is
    what launching costs."""
    x = torch.zeros(1, device=bench.device)

    def prepare(count: int) -> Run:
        def run() -> None:
            for _ in range(count):
                x.add_(1.0)

        return run

    spec = CurveSpec((SampledSizes("operations", (256,)),), prepare)
    return bench.curves({"launch": spec}, budget_s)


def granted_cores() -> float:
    """Processor time that this process gets in a second of matmuls on all its threads."""
    size = 512
    x = noise(size * size, torch.float32, torch.device("cpu")).view(size, size)
    out = torch.empty_like(x)
    torch.mm(x, x, out=out)  # starts the threads

    begin_s = time.perf_counter()
    begin_process_s = time.process_time()
    while time.perf_counter() - begin_s < SPIN_S:
        torch.mm(x, x, out=out)

    process_s = time.process_time() - begin_process_s
    return process_s / (time.perf_counter() - begin_s)


def noise(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers; a run of them, over and over, where that saves time: power and speed do not
    depend on more."""
    generator = torch.Generator().manual_seed(count)
    block = torch.randn(min(count, 2**20), generator=generator).to(dtype)
    return block.repeat(math.ceil(count / len(block)))[:count].to(device)
