"""Reads and writes of a private file, one block after another, through the page cache, as training
moves what waits on disk.

The cache is dropped before reading, and written out at the end of writing.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from longshift.cluster.curves import Curve, SampledSizes
from longshift.profile.bench import Bench, Plan, Run

FILE_BYTES = 2**25
BLOCKS = {True: (2**18, 2**22), False: (2**16, 2**18, 2**20, 2**22)}  # bytes
MOST_BLOCKS = 32  # of one operation


def disk(bench: Bench, folder: Path, budget_s: float) -> dict[str, Curve]:
    """Curves `disk read|write plain depth1`: seconds a block. Nothing stays behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, FILE_BYTES, 2**20):
            file.write(os.urandom(2**20))
        os.fsync(file)
        axes = (SampledSizes("bytes", BLOCKS[bench.quick]),)
        plans = {
            "disk read plain depth1": Plan(axes, lambda size: lambda: _read(file.fileno(), size)),
            "disk write plain depth1": Plan(axes, lambda size: lambda: _write(file.fileno(), size)),
        }
        return bench.curves(plans, budget_s)


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
        if moved != size:
            raise OSError(f"moved {moved} of {size} bytes")
    end()
    return (time.perf_counter() - begin_s) / count
