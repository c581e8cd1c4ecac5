"""A file of one rank that no other process can open: where tiers and a home on disk keep what is
not in memory.

It has no name, so nothing is left behind however the process ends. Threads read and write it while
the step computes."""

import os
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshift.errors import LongshiftError

THREADS = 2  # for each direction
ALIGN = 4096  # bytes: a page


@dataclass
class BytesMoved:
    """What went to a memory and came back. Mutable. `waited_s`: computing waited for a copy;
    `copying_s`: at least one copy was under way."""

    put_bytes: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0
    copying_s: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, count: int) -> None:
        self.held_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def restart(self) -> None:
        """Count from here; what is held stays. No copy may be under way."""
        self.put_bytes = self.fetched_bytes = 0
        self.waited_s = self.copying_s = 0.0
        self.peak_bytes = self.held_bytes


class CopyClock:
    """`with` it, in any number of threads: adds to `copying_s` the time for which at least one is
    inside. Mutable."""

    def __init__(self, moved: BytesMoved):
        self.moved = moved
        self.num_inside = 0
        self.begin_s = 0.0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            if not self.num_inside:
                self.begin_s = time.perf_counter()
            self.num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.num_inside -= 1
            if not self.num_inside:
                self.moved.copying_s += time.perf_counter() - self.begin_s


class DiskFile:
    """A file in `folder` with threads for each direction. Mutable; `close` it. `subject`: what its
    errors begin with; `moved`: counts the seconds for which somebody waited. Raises LongshiftError
    where no file can be made, or what was written cannot be read."""

    def __init__(self, folder: Path, subject: str, moved: BytesMoved):
        self.folder = folder
        self.subject = subject
        self.moved = moved
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as fault:
            raise LongshiftError(
                f"{subject}: no file can be made in {folder}: {fault.strerror}"
            ) from None
        self.readers = ThreadPoolExecutor(THREADS, f"longshift-{subject}-read")
        self.writers = ThreadPoolExecutor(THREADS, f"longshift-{subject}-write")

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, start: int, data: memoryview) -> None:
        """Write all of `data` from byte `start` on. Raises OSError."""
        while data:
            # The system may write a part.
            count = os.pwrite(self.fileno(), data, start)
            data = data[count:]
            start += count

    def read(self, start: int, into: memoryview, needed: int) -> None:
        """Fill at least the first `needed` bytes of `into` with what lies from byte `start` on.
        Raises LongshiftError where the file is shorter."""
        end = start + needed
        while start < end:
            count = os.preadv(self.fileno(), [into], start)
            if not count:
                raise LongshiftError(
                    f"{self.subject}: the file in {self.folder} ends before byte {start}"
                )
            into = into[count:]
            start += count

    @property
    def taken_bytes(self) -> int:
        """What the disk has given to it."""
        return os.fstat(self.fileno()).st_blocks * 512

    def wait(self, copy: Future) -> Any:
        """The result of a copy."""
        begin_s = time.perf_counter()
        try:
            return copy.result()
        finally:
            self.moved.waited_s += time.perf_counter() - begin_s

    def close(self) -> None:
        # A thread may still use the file: it is closed after them.
        for pool in (self.readers, self.writers):
            pool.shutdown(cancel_futures=True)
        self._file.close()


def whole_pages(size: int) -> int:
    """Bytes of the pages that `size` bytes take."""
    return -(-size // ALIGN) * ALIGN
