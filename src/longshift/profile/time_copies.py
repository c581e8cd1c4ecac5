"""Copies between pinned host memory and the device, one way and both ways at once.

On a CPU the device is the host, and one curve is measured: `copy host`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longshift.cluster.curves import Curve, SampledSizes
from longshift.profile.bench import Bench, Plan, Run
from longshift.profile.time_compute import noise

SIZES = {  # bytes
    ("cpu", True): (2**16, 2**20, 2**26),
    ("cpu", False): (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26),
    ("cuda", True): (2**16, 2**20, 2**26),
    ("cuda", False): (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28),
}
BOTH_WAYS_BYTES = (2**26, 2**28)  # long enough to overlap


def copies(bench: Bench, budget_s: float) -> dict[str, Curve]:
    """Curves `copy to_device|to_host pinned`, and those with ` both` at their end, of copies during
    others in the opposite direction."""
    sizes = SIZES[bench.device.type, bench.quick]
    axes = (SampledSizes("bytes", sizes),)
    largest = max(sizes)
    if bench.device.type == "cpu":
        source, target = (noise(largest, torch.uint8, bench.device) for _ in range(2))
        return bench.curves({"copy host": Plan(axes, _copier(target, source))}, budget_s)

    # 1. Alone.
    device, host = _memory(largest, bench.device)
    plans = {
        "copy to_device pinned": Plan(axes, _copier(device, host)),
        "copy to_host pinned": Plan(axes, _copier(host, device)),
    }

    # 2. While others go the opposite way.
    long = (SampledSizes("bytes", BOTH_WAYS_BYTES[:1] if bench.quick else BOTH_WAYS_BYTES),)
    device, host = _memory(max(BOTH_WAYS_BYTES), bench.device)
    other_device, other_host = _memory(max(BOTH_WAYS_BYTES), bench.device)
    streams = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
    to_device = _copier(device, host)
    to_host = _copier(host, device)
    other_to_device = _copier(other_device, other_host)
    other_to_host = _copier(other_host, other_device)
    plans |= {
        "copy to_device pinned both": Plan(long, _copier_beside(to_device, other_to_host, streams)),
        "copy to_host pinned both": Plan(long, _copier_beside(to_host, other_to_device, streams)),
    }
    return bench.curves(plans, budget_s)


def _memory(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As much memory of the device and, pinned, of the host, whose pages are there."""
    return (
        torch.empty(size, dtype=torch.uint8, device=device),
        torch.ones(size, dtype=torch.uint8).pin_memory(),
    )


def _copier(target: Tensor, source: Tensor) -> Callable[[int], Run]:
    return lambda size: lambda: target[:size].copy_(source[:size], non_blocking=True)


def _copier_beside(
    copy: Callable[[int], Run],
    opposite: Callable[[int], Run],
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
) -> Callable[[int], Run]:
    """Prepares copies that time themselves: each on one stream, while opposite ones of the same
    size are under way on the other."""

    def prepare(size: int) -> Run:
        timed_copy = copy(size)
        opposite_copy = opposite(size)

        def run() -> float:
            torch.cuda.synchronize()
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # Three, so that one is under way from the timed copy's begin to its end.
            with torch.cuda.stream(streams[0]):
                for _ in range(3):
                    opposite_copy()
            with torch.cuda.stream(streams[1]):
                begin.record()
                timed_copy()
                end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 1e3

        return run

    return prepare
