"""Reads and writes of a private file, by block size, blocks under way at a time, and whether the page cache is passed by.

plain: through the page cache, which is dropped before reading and written out at the end of writing. direct: O_DIRECT, into page-aligned
memory; left out where the file system has none.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from longshift.cluster.curves import Axis, Curve
from longshift.profile.bench import Bench, Plan, Run

FILE_BYTES = 2**25
BLOCKS = {True: (2**18, 2**22), False: (2**16, 2**18, 2**20, 2**22)}  # bytes
DEPTHS = {True: (1, 4), False: (1, 4, 16)}


def disk(bench: Bench, folder: Path, budget_s: float) -> dict[str, Curve]:
    """Curves `disk read|write plain|direct depthN`: seconds a block. Nothing stays behind."""
    total, axes = FILE_BYTES, (Axis("bytes", BLOCKS[bench.quick]),)
    plans = {}
    with _files(folder, total) as files:
        for mode, file in files.items():
            for depth in DEPTHS[bench.quick]:
                for direction, move in (("read", _read), ("write", _write)):

                    def prepare(size: int, move=move, file=file, depth=depth) -> Run:
                        return lambda: move(file, size, depth, total)

                    plans[f"disk {direction} {mode} depth{depth}"] = Plan(axes, prepare)
        return bench.curves(plans, budget_s)


@contextmanager
def _files(folder: Path, total: int) -> Iterator[dict[str, int]]:
    """A file without a name, open in each mode that works here."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder)
    files = {"plain": descriptor}
    try:
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):
                files["direct"] = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.unlink(name)
        block = os.urandom(2**20)
        for at in range(0, total, len(block)):
            os.pwrite(descriptor, block, at)
        os.fsync(descriptor)
        yield files
    finally:
        for file in files.values():
            os.close(file)


def _read(file: int, size: int, depth: int, total: int) -> float:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return _blocks(size, depth, total, lambda memory, at: os.preadv(file, [memory], at))


def _write(file: int, size: int, depth: int, total: int) -> float:
    return _blocks(size, depth, total, lambda memory, at: os.pwritev(file, [memory], at), lambda: os.fdatasync(file))


def _blocks(size: int, depth: int, total: int, move: Callable[[mmap.mmap, int], int], end: Callable[[], None] | None = None) -> float:
    """Seconds a block: as many as fill the file, at most 32, each worker taking every depth-th."""
    count = max(depth, min(32, total // size))
    memories = [mmap.mmap(-1, size) for _ in range(depth)]  # anonymous maps are aligned to pages, as O_DIRECT asks
    for memory in memories:
        memory.write(os.urandom(min(size, 4096)))

    def work(worker: int) -> None:
        for block in range(worker, count, depth):
            moved = move(memories[worker], block * size % total)
            if moved != size:
                raise OSError(f"moved {moved} of {size} bytes")

    with ThreadPoolExecutor(depth) as pool:
        started = time.perf_counter()
        list(pool.map(work, range(depth)))
        if end is not None:
            end()
        took = time.perf_counter() - started
    return took / count
