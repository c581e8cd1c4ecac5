"""Copies between host and device, alone, both ways at once, and beside a matmul; and what pinning host memory costs.

Host memory is `pageable`, `pinned` by torch's allocator (sizes rounded up to powers of two), or an `arena`: pages of exactly the size,
registered with CUDA. On a CPU the device is the host, and one curve is measured: `copy host`.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from longshift.cluster.curves import Axis, Curve
from longshift.profile.bench import Bench, Plan, Run
from longshift.profile.time_compute import noise
from longshift.stream.tiers import Arena

SIZES = {  # bytes
    ("cpu", True): (2**16, 2**20, 2**26),
    ("cpu", False): (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26),
    ("cuda", True): (2**16, 2**20, 2**26),
    ("cuda", False): (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28),
}
BESIDE_BYTES = (2**26, 2**28)  # copies that run beside something, long enough to overlap
WIDTH = 8192  # of the matmul beside


def copies(bench: Bench, budget_s: float) -> dict[str, Curve]:
    sizes = SIZES[bench.device.type, bench.quick]
    axes, largest = (Axis("bytes", sizes),), max(sizes)
    if bench.device.type == "cpu":
        source, target = (noise(largest, torch.uint8, bench.device) for _ in range(2))
        return bench.curves({"copy host": Plan(axes, _copier(target, source))}, budget_s)
    here = torch.empty(largest, dtype=torch.uint8, device=bench.device)
    plans = {}
    arena = Arena(largest)
    for memory, host in (("pageable", _touched(largest)), ("pinned", _touched(largest).pin_memory()), ("arena", arena.bytes)):
        plans[f"copy to_device {memory}"] = Plan(axes, _copier(here, host))
        plans[f"copy to_host {memory}"] = Plan(axes, _copier(host, here))
    beside = _Beside(bench.device)
    long = (Axis("bytes", BESIDE_BYTES[: 1 if bench.quick else None]),)
    shape = tuple(Axis(name, (WIDTH,)) for name in "mkn")
    for way in ("to_device", "to_host"):
        plans[f"copy {way} pinned both"] = Plan(long, lambda size, way=way: lambda: beside.copy(way, size, "copy"))
        plans[f"copy {way} pinned matmul"] = Plan(long, lambda size, way=way: lambda: beside.copy(way, size, "matmul"))
        plans[f"beside {way} matmul bf16"] = Plan(shape, lambda *_, way=way: lambda: beside.matmul(way))
    if hasattr(torch._C, "_host_emptyCache"):
        plans["pin pinned"] = Plan(axes, lambda size: lambda: _timed_pin(size))
    plans["pin arena"] = Plan(axes, lambda size: lambda: _timed(lambda: Arena(size)))
    try:
        return bench.curves(plans, budget_s)
    finally:
        bench.wait()
        arena.release()


class _Beside:
    """Copies and matmuls on streams of their own; what is timed is surrounded by the other."""

    def __init__(self, device: torch.device):
        largest = max(BESIDE_BYTES)
        self.device = torch.empty(largest, dtype=torch.uint8, device=device)
        self.other = torch.empty(largest, dtype=torch.uint8, device=device)
        self.host, self.back = (torch.empty(largest, dtype=torch.uint8).pin_memory() for _ in range(2))
        self.x = noise(WIDTH * WIDTH, torch.bfloat16, device).view(WIDTH, WIDTH)
        self.out = torch.empty_like(self.x)
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, way: str, size: int, other: str) -> float:
        opposite = "to_host" if way == "to_device" else "to_device"
        surround = self._matmuls(8) if other == "matmul" else (lambda: [self._move(opposite, size, True) for _ in range(3)])
        return self._timed(lambda: self._move(way, size, False), surround)

    def matmul(self, way: str) -> float:
        return self._timed(self._matmuls(1), lambda: [self._move(way, max(BESIDE_BYTES), False) for _ in range(3)])

    def _matmuls(self, count: int) -> Callable[[], object]:
        return lambda: [torch.mm(self.x, self.x, out=self.out) for _ in range(count)]

    def _move(self, way: str, size: int, other: bool) -> None:
        device, host = (self.other, self.back) if other else (self.device, self.host)
        target, source = (device, host) if way == "to_device" else (host, device)
        target[:size].copy_(source[:size], non_blocking=True)

    def _timed(self, inner: Callable[[], object], around: Callable[[], object]) -> float:
        """Seconds of `inner` on one stream while `around` is under way on the other."""
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.streams[0]):
            around()
        with torch.cuda.stream(self.streams[1]):
            begin.record()
            inner()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def _copier(target: Tensor, source: Tensor) -> Callable[[int], Run]:
    return lambda size: lambda: target[:size].copy_(source[:size], non_blocking=True)


def _touched(size: int) -> Tensor:
    """Host memory whose pages are there."""
    return torch.zeros(size, dtype=torch.uint8).add_(1)


def _timed(make: Callable[[], object]) -> float:
    started = time.perf_counter()
    made = make()
    took = time.perf_counter() - started
    del made
    return took


def _timed_pin(size: int) -> float:
    """A pinned tensor from torch's allocator, its cache emptied before."""
    torch._C._host_emptyCache()  # pyright: ignore[reportAttributeAccessIssue]
    return _timed(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True))
