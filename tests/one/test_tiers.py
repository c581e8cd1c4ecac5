"""Tiers: the same bytes come back, whatever is under way, and nothing is left behind."""

import fcntl
import os
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longshift.errors import LongshiftError, OutOfMemoryError
from longshift.stream import tiers
from longshift.stream.disk_file import ALIGN
from longshift.stream.gpu_tiers import tier_of
from longshift.stream.tiers import DeviceTier, DiskTier, Tier

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
MANY = 1 << 62


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bytes at all; NaNs of many kinds among them."""
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, checked=True)
    yield tier
    tier.close()


@pytest.fixture(params=["device", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    found = tier_of(request.param, CPU, tmp_path, checked=True)
    yield found
    found.close()


# What comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_put_comes_back_bit_for_bit(tier: Tier, dtype: torch.dtype):
    puts = {n: drawn(n * 35, dtype, n).view(n, 5, 7) for n in (1, 3, 600)}
    for key, tensor in puts.items():
        tier.put(key, tensor)
    for key, tensor in reversed(puts.items()):
        assert same(tier.fetch(key)()[0], tensor)


def test_an_object_has_several_tensors_of_several_dtypes_one_of_them_empty(tier: Tier):
    tensors = [drawn(n, dtype, n).view(-1, 1) for n, dtype in enumerate(DTYPES)]
    tier.put(("unit", 3), *tensors)
    found = tier.fetch(("unit", 3))()
    assert [same(a, b) for a, b in zip(found, tensors, strict=True)] == [True] * len(tensors)


def test_views_that_are_not_contiguous(tier: Tier):
    whole = drawn(6 * 8 * 4, torch.float32).view(6, 8, 4)
    views = (whole.transpose(0, 1), whole[::2], whole[:, 3:5])
    tier.put("views", *views)
    assert all(same(a, b) for a, b in zip(tier.fetch("views")(), views, strict=True))


def test_a_put_takes_the_place_of_what_was_there(tier: Tier):
    for seed in range(5):
        tier.put("sum", drawn(1000, torch.float32, seed))
        if seed % 2:
            tier.recycle(tier.fetch("sum")())
    assert same(tier.fetch("sum")()[0], drawn(1000, torch.float32, 4))
    assert (tier.moved.held_bytes, tier.moved.peak_bytes) == (4000, 4000)


def test_held_and_moved_bytes(disk: DiskTier):
    disk.put("a", drawn(100, torch.float32), drawn(10, torch.uint8))
    disk.put("b", drawn(50, torch.float64))
    disk.drop("a")
    disk.fetch("b")()
    disk.fetch("b")()
    disk.put("c", drawn(1, torch.int64))
    moved = disk.moved
    assert (moved.put_bytes, moved.fetched_bytes, moved.held_bytes, moved.peak_bytes) == (818, 800, 408, 810)
    assert moved.waited_s > 0


def test_the_device_moves_nothing():
    tier = DeviceTier()
    tensor = drawn(10, torch.float32)
    tier.put("a", tensor)
    assert tier.fetch("a")()[0] is tensor
    tier.recycle([tensor])
    assert (tier.moved.held_bytes, tier.moved.put_bytes, tier.moved.fetched_bytes) == (40, 0, 0)
    tier.drop("a")
    with pytest.raises(KeyError):
        tier.fetch("a")


def test_a_tier_for_each_name(tmp_path: Path):
    for name, kind in (("device", DeviceTier), ("host", DeviceTier), ("disk", DiskTier)):
        tier = tier_of(name, CPU, tmp_path, checked=False)
        assert type(tier) is kind
        tier.close()
    with pytest.raises(LongshiftError, match=r"no file can be made in .*missing"):
        tier_of("disk", CPU, tmp_path / "missing", checked=False)


# The file


def test_sizes_that_come_again_use_the_same_places(disk: DiskTier):
    disk.put("stays", drawn(3, torch.float32))
    ends = []
    for turn in range(4):
        for chunk in range(5):
            disk.put(chunk, drawn(2000 + 7 * (chunk % 2), torch.float32, turn))
        assert all(same(disk.fetch(chunk)()[0], drawn(2000 + 7 * (chunk % 2), torch.float32, turn)) for chunk in range(5))
        for chunk in range(5):
            disk.drop(chunk)
        ends.append(os.fstat(disk.file.fileno()).st_size)
    assert len(set(ends)) == 1
    assert ends[0] < ALIGN + 5 * 2 * ALIGN
    assert same(disk.fetch("stays")()[0], drawn(3, torch.float32))


def test_an_empty_tier_begins_the_file_anew(disk: DiskTier):
    for size in range(1, 20):
        disk.put("other", drawn(size * ALIGN, torch.uint8))
        disk.drop("other")
    assert os.fstat(disk.file.fileno()).st_size == 19 * ALIGN


@pytest.mark.parametrize("at", [0, 4001, 7999])
def test_a_byte_that_changed_is_noticed(disk: DiskTier, at: int):
    disk.put("a", drawn(1000, torch.float32), drawn(1000, torch.float32, 1))
    disk.fetch("a")()
    before = os.pread(disk.file.fileno(), 1, at)
    os.pwrite(disk.file.fileno(), bytes([before[0] ^ 1]), at)
    with pytest.raises(LongshiftError, match=r"8000 bytes came back from .* changed"):
        disk.fetch("a")()


def test_a_file_cut_short_is_noticed(disk: DiskTier):
    disk.put("a", drawn(5000, torch.uint8))
    disk.fetch("a")()
    os.ftruncate(disk.file.fileno(), 100)
    with pytest.raises(LongshiftError, match="ends before byte 100"):
        disk.fetch("a")()


def test_the_file_has_no_name_and_no_other_reader(disk: DiskTier, tmp_path: Path):
    disk.put("a", drawn(5000, torch.uint8))
    disk.fetch("a")()
    status = os.fstat(disk.file.fileno())
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 5000)
    assert fcntl.fcntl(disk.file.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert list(tmp_path.iterdir()) == []


def in_child(folder: Path, body: Callable[[DiskTier, int], object]) -> tuple[int, int]:
    """(pid, end to read from) of a forked process that runs body(tier, end to write to); it computes nothing, since threads of torch
    do not survive a fork."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body(DiskTier(folder), write)
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def plain(size: int) -> Tensor:
    return torch.frombuffer(bytearray(size), dtype=torch.uint8)


def test_nothing_is_left_after_a_kill(tmp_path: Path):
    def hold(tier: DiskTier, write: int) -> None:
        tier.put("a", plain(1 << 20))
        tier.fetch("a")()
        tier.put("b", plain(1 << 20))
        os.write(write, str(os.fstat(tier.file.fileno()).st_size).encode())
        signal.pause()

    pid, read = in_child(tmp_path, hold)
    try:
        assert int(os.read(read, 100)) >= 1 << 20
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it is to be killed with its objects"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_what_it_took(tmp_path: Path):
    """A limit on the size of files stands for the disk's end."""

    def fill(tier: DiskTier, write: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 20, 48 << 20))
        tier.put("a", plain(32 << 20))
        tier.fetch("a")()
        tier.put("b", plain(32 << 20))
        try:
            tier.fetch("b")()
        except OutOfMemoryError as fault:
            os.write(write, f"{fault.exit_code} {fault} ".encode())
        os.write(write, b"and a is there" if not any(tier.fetch("a")()[0].numpy()[:: 1 << 10]) else b"a is lost")

    pid, read = in_child(tmp_path, fill)
    with os.fdopen(read) as lines:
        said = lines.read()
    os.waitpid(pid, 0)
    assert said.startswith(f"7 offload: {tmp_path} took 0.05 of 0.06 GiB and no more: File too large; choose another stream.folder, "), said
    assert said.endswith("and a is there")


# What is under way


class SlowDisk(DiskTier):
    """A write begins when `open` is set, or after `delay_s`."""

    def __init__(self, folder: Path, in_flight_bytes: int = MANY, delay_s: float = 0.0):
        super().__init__(folder, checked=True)
        self.max_put_bytes = in_flight_bytes
        self.open, self.delay_s = threading.Event(), delay_s
        if delay_s:
            self.open.set()

    def _write(self, start: int, tensors: list[Tensor]) -> int:
        time.sleep(self.delay_s)
        assert self.open.wait(60)
        return super()._write(start, tensors)


def test_a_put_returns_before_the_disk_has_it_and_a_fetch_of_it_waits(tmp_path: Path):
    tier = SlowDisk(tmp_path)
    first, second = drawn(5000, torch.float32), drawn(5000, torch.float32, 1)
    tier.put("a", first)
    tier.put("b", second)
    waits = [tier.fetch(key) for key in "ba"]
    assert os.fstat(tier.file.fileno()).st_size == 0
    assert not any(stored.left.done() for stored in tier.objects.values())
    tier.open.set()
    assert same(waits[0]()[0], second)
    assert same(waits[1]()[0], first)
    tier.close()


def test_a_fetch_right_after_a_new_put_of_its_key_gives_the_new_bytes(tmp_path: Path):
    tier = SlowDisk(tmp_path, delay_s=0.002)
    for seed in range(20):
        tier.put("sum", drawn(3000, torch.float32, seed))
        (found,) = tier.fetch("sum")()
        assert same(found, drawn(3000, torch.float32, seed)), seed
        tier.recycle([found])
    tier.close()


@pytest.mark.parametrize(("bound", "expected"), [(10_000, 2), (4_000, 1), (1, 1), (MANY, tiers.WRITES)])
def test_only_so_many_bytes_are_on_their_way_out(tmp_path: Path, bound: int, expected: int):
    tier = SlowDisk(tmp_path, bound, delay_s=0.003)
    most = 0
    for number in range(9):
        tier.put(number, drawn(4000, torch.uint8, number))
        most = max(most, sum(not stored.left.done() for stored in tier.objects.values()))
    assert most == expected
    assert all(same(tier.fetch(number)()[0], drawn(4000, torch.uint8, number)) for number in range(9))
    tier.close()


class LatePool(ThreadPoolExecutor):
    """Keeps what it was given to do, as any pool does for a moment after the future has ended."""

    def submit(self, function: Callable, *arguments: Any) -> Future:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.given = (*getattr(self, "given", ()), arguments)
        return super().submit(function, *arguments)


def test_what_is_written_and_no_longer_kept_is_gone_at_once(disk: DiskTier):
    disk.file.writers = LatePool(1)
    made = [drawn(4000, torch.uint8, number) for number in range(tiers.WRITES + 1)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in made]
    for number in range(len(made)):
        disk.put(number, made.pop(0))
    assert [storage() is None for storage in storages] == [True] + [False] * tiers.WRITES


def reuse(tier: DiskTier) -> bool:
    """Fetch, change, put back, recycle; then fetch others of the shape while the disk has not taken it. Whether all is as it was put."""
    tier.put("other", drawn(4000, torch.float32, 1))
    tier.put("sum", torch.zeros(4000))
    for turn in range(10):
        (found,) = tier.fetch("sum")()
        found += 1
        tier.put("sum", found)
        tier.recycle([found])
        (other,) = tier.fetch("other")()
        if not same(other, drawn(4000, torch.float32, 1)) or not bool((tier.fetch("sum")()[0] == turn + 1).all()):
            return False
        tier.recycle([other])
    return True


def test_memory_still_on_its_way_out_is_not_filled_again(tmp_path: Path):
    tier = SlowDisk(tmp_path, delay_s=0.003)
    assert reuse(tier)
    tier.close()


def test_a_tier_that_forgets_what_is_leaving_is_noticed(tmp_path: Path):
    tier = SlowDisk(tmp_path, delay_s=0.003)
    tier.leaving = type("Forgetful", (dict,), {"get": lambda *_: None})()
    assert not reuse(tier)
    tier.close()


def test_recycled_memory_is_used_again(disk: DiskTier):
    for key in "abc":
        disk.put(key, drawn(100, torch.float32))
    (first,) = disk.fetch("a")()
    (held,) = disk.fetch("b")()
    disk.recycle([first])
    (again,) = disk.fetch("c")()
    assert again.data_ptr() == first.data_ptr() != held.data_ptr()
    assert disk.fetch("a")()[0].data_ptr() not in (again.data_ptr(), held.data_ptr())
