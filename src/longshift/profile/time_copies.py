"""Copies between pinned host memory and the device, one way and both ways at once; reads and writes
of a private file, one block after another, through the page cache, as training moves what waits on
disk.

On a CPU the device is the host, and one curve of copies is measured: `copy host`. The page cache is
dropped before reading, and written out at the end of writing.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from longshift.cluster.curves import Curve, SampledSizes
from longshift.profile.bench import Bench, CurveSpec, Run
from longshift.profile.time_compute import noise

SIZES = {  # bytes, quick or not
    True: (2**16, 2**20, 2**26),
    False: (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26),
}
BOTH_WAYS_BYTES = (2**26, 2**28)  # long enough to overlap
FILE_BYTES = 2**25
BLOCKS = {True: (2**18, 2**22), False: (2**16, 2**18, 2**20, 2**22)}  # bytes
MOST_BLOCKS = 32  # of one operation


def copies(bench: Bench, budget_s: float) -> dict[str, Curve]:
    """Curves `copy to_device|to_host pinned`, and those with ` both` at their end, of copies during
    others in the opposite direction."""
    sizes = SIZES[bench.quick]
    axes = (SampledSizes("bytes", sizes),)
    largest = max(sizes)
    if bench.device.type == "cpu":
        source, target = (noise(largest, torch.uint8, bench.device) for _ in range(2))
        return bench.curves({"copy host": CurveSpec(axes, _copier(target, source))}, budget_s)

    # 1. Alone.
    device, host = _memory(largest, bench.device)
    specs = {
        "copy to_device pinned": CurveSpec(axes, _copier(device, host)),
        "copy to_host pinned": CurveSpec(axes, _copier(host, device)),
    }

    # 2. While others go the opposite way.
    long = (SampledSizes("bytes", BOTH_WAYS_BYTES[:1] if bench.quick else BOTH_WAYS_BYTES),)
    device, host = _memory(max(BOTH_WAYS_BYTES), bench.device)
    other_device, other_host = _memory(max(BOTH_WAYS_BYTES), bench.device)
    streams = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
    to_device = _copier_beside(_copier(device, host), _copier(other_host, other_device), streams)
    to_host = _copier_beside(_copier(host, device), _copier(other_device, other_host), streams)
    specs["copy to_device pinned both"] = CurveSpec(long, to_device)
    specs["copy to_host pinned both"] = CurveSpec(long, to_host)
    return bench.curves(specs, budget_s)


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


def disk(bench: Bench, folder: Path, budget_s: float) -> dict[str, Curve]:
    """Curves `disk read|write plain depth1`: seconds a block. Nothing stays behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, FILE_BYTES, 2**20):
            file.write(os.urandom(2**20))
        # Pages that are not written out cannot be dropped before a read.
        os.fsync(file)

        axes = (SampledSizes("bytes", BLOCKS[bench.quick]),)
        number = file.fileno()
        specs = {
            "disk read plain depth1": CurveSpec(axes, lambda size: lambda: _read(number, size)),
            "disk write plain depth1": CurveSpec(axes, lambda size: lambda: _write(number, size)),
        }

        return bench.curves(specs, budget_s)


def _read(file: int, size: int) -> float:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    block = bytearray(size)
    return _block_seconds(size, lambda offset: os.preadv(file, [block], offset), lambda: None)


def _write(file: int, size: int) -> float:
    block = os.urandom(size)
    return _block_seconds(
        size, lambda offset: os.pwrite(file, block, offset), lambda: os.fdatasync(file)
    )


def _block_seconds(size: int, move: Callable[[int], int], end: Run) -> float:
    """Seconds a block: as many as fill the file, at most MOST_BLOCKS."""
    count = max(1, min(MOST_BLOCKS, FILE_BYTES // size))

    begin_s = time.perf_counter()
    for block in range(count):
        moved = move(block * size % FILE_BYTES)
        # A system call may move less than it was asked for, which is no time of a block.
        if moved != size:
            raise OSError(f"moved {moved} of {size} bytes")

    end()
    return (time.perf_counter() - begin_s) / count
