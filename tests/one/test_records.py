"""The file of a home on disk: what is read is what was written, whatever the sizes, past the file system's cache or through it."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longshift.state import records as module
from longshift.state.records import Records, in_memory
from longshift.stream.disk_file import ALIGN

SIZES = (1, 1023, 1024, 1025, 2048, 5000, 3 * 2048 + 7, 0, 1)


@pytest.fixture(params=["disk", "/dev/shm"])
def records(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    """On a disk and in memory, which has no direct access, with pieces of two pages."""
    folder = tmp_path if request.param == "disk" else Path(request.param)
    if not folder.is_dir():
        pytest.skip("no such file system here")
    monkeypatch.setattr(module, "PIECE", 2 * ALIGN)
    found = Records(folder)
    yield found
    found.close()


def test_what_is_read_is_what_was_written(records: Records):
    """Neighbours are written in turn: the pages of one never reach the other's."""
    vectors = [records.vector(size, torch.float32) for size in SIZES]
    for turn in range(3):
        values = [torch.arange(size, dtype=torch.float32) * (number + 1) + 1000 * turn for number, size in enumerate(SIZES)]
        for vector, value in zip(vectors[turn % 2 :: 2], values[turn % 2 :: 2]):
            vector.hold()
            vector.flat.copy_(value)
            vector.write()
        for vector in vectors[turn % 2 :: 2]:
            vector.written()
            assert not vector.memory.held or not vector.flat.numel()
        with in_memory(vectors):
            for number, vector in enumerate(vectors):
                last = turn if number % 2 == turn % 2 else turn - 1
                expected = torch.arange(SIZES[number], dtype=torch.float32) * (number + 1) + 1000 * last if last >= 0 else vector.flat * 0
                assert torch.equal(vector.flat, expected), (turn, number)
    assert records.end == os.fstat(records.fileno()).st_size


def test_a_disk_is_moved_to_and_from_past_the_cache(tmp_path: Path):
    """Where it can be: the kernel has the flag, and where a file cannot have it, nothing else is tried."""
    records = Records(tmp_path)
    try:
        flags = fcntl.fcntl(records.fileno(), fcntl.F_GETFL)
        probe = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("no direct access here")
    finally:
        records.close()
    os.close(probe)
    assert flags & os.O_DIRECT
    assert records.direct


def test_a_second_place_keeps_another_state(records: Records):
    vectors = [records.vector(size, torch.float32) for size in (5000, 1)]
    assert records.double(vectors)
    assert records.end == os.fstat(records.fileno()).st_size == 2 * sum(vector.room for vector in vectors)
    for number, second in ((1.0, False), (2.0, True)):
        for vector in vectors:
            vector.hold()
            vector.flat.fill_(number)
            vector.write(second=second)
        for vector in vectors:
            vector.written()
    for number in (1.0, 2.0):
        with in_memory(vectors):
            assert all((vector.flat == number).all() for vector in vectors)
        for vector in vectors:
            assert vector.second is not None
            vector.start, vector.second = vector.second, vector.start


@pytest.mark.parametrize(("ranks", "pages", "has"), [(1, 3, False), (1, 4, True), (2, 7, False), (2, 8, True)])
def test_second_places_leave_as_much_room_for_all_ranks(
    records: Records, monkeypatch: pytest.MonkeyPatch, ranks: int, pages: int, has: bool
):
    vectors = [records.vector(100, torch.float32) for _ in range(2)]
    end = records.end
    monkeypatch.setattr(os, "statvfs", lambda file: SimpleNamespace(f_bavail=pages, f_frsize=ALIGN))
    assert records.double(vectors, ranks) == has
    assert records.end == os.fstat(records.fileno()).st_size == (2 * end if has else end)
    assert all((vector.second is not None) == has for vector in vectors)


def test_second_places_are_given_back_where_a_disk_fills_up_meanwhile(records: Records, monkeypatch: pytest.MonkeyPatch):
    vector = records.vector(100, torch.float32)

    def full(file: int, start: int, size: int) -> None:
        os.ftruncate(file, start + size // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not records.double([vector])
    assert records.end == os.fstat(records.fileno()).st_size == vector.room
    assert vector.second is None


def test_a_file_that_ends_early_is_told(records: Records):
    vector = records.vector(3000, torch.float32)
    os.ftruncate(records.fileno(), ALIGN)
    vector.read()
    with pytest.raises(module.LongshiftError, match=r"ends before byte 4096"):
        vector.ready()
