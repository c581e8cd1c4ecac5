"""A disk that is full, over quota or read-only from one file operation on, and a kill at one: each operation of a small run is that one.
`make test-all` takes a sample; the campaign takes all."""

import errno
from pathlib import Path

import disks
import figures
import pytest
from disks import KILL, Disk
from launches import Launches

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@pytest.fixture(scope="module")
def alone(launches: Launches, place: Path) -> Disk:
    return Disk(launches, place, "dp1")


@pytest.fixture(scope="module")
def together(launches: Launches, place: Path) -> Disk:
    return Disk(launches, place, "dp2")


def test_the_operations_are_those_of_a_run(alone: Disk):
    """Else the library counts nothing, and every case is one in which nothing happens."""
    found = {Path(operation.path).name for operation in alone.operations}
    assert {".lock", "env.json", "config.yaml", "metrics.jsonl", "manifest.json", "step-2", "step-4", "LATEST"} <= found
    assert {"open", "write", "fsync", "rename", "mkdir", "unlink"} <= {operation.name for operation in alone.operations}
    assert sum(operation.name == "write" for operation in alone.operations) > 20


def test_one_rank(alone: Disk):
    """Each twelfth operation, with the next way to fail."""
    ways = (errno.ENOSPC, KILL, errno.EDQUOT, KILL, errno.EROFS)
    bad = disks.campaign(alone, [(at, ways[number % len(ways)]) for number, at in enumerate(range(1, len(alone.operations) + 1, 12))])
    assert not bad, bad[:2]


def where(disk: Disk, name: str, file: str) -> int:
    """The first operation of a name on a file."""
    return next(n for n, found in enumerate(disk.operations, 1) if found.name == name and Path(found.path).name.startswith(file))


def test_two_ranks(together: Disk):
    """The metrics' first row, which rank 0 cannot write, nor why, and a rank that is killed while it saves."""
    cases = [(where(together, "open", "metrics.jsonl") + 1, errno.ENOSPC), (where(together, "open", "manifest.json"), KILL)]
    bad = disks.campaign(together, cases)
    assert not bad, bad


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_checkpoints_in_the_background(launches: Launches, place: Path, layout: str):
    """A disk that is full, and a kill, while the first checkpoint is written beside the steps and when it takes its place."""
    disk = Disk(launches, place, layout, background=True)
    first = where(disk, "open", ".tmp")  # safetensors renames it to rank-00000.safetensors
    files = [(first, errno.ENOSPC), (first, KILL), (first + 2, errno.EDQUOT)]
    named = [(where(disk, "open", "manifest.json"), KILL), (where(disk, "rename", "step-2"), KILL)]
    bad = disks.campaign(disk, [*files, *named])
    assert not bad, bad[:2]


def test_the_campaign_can_fail(alone: Disk, monkeypatch: pytest.MonkeyPatch):
    at = where(alone, "open", ".lock")
    assert not alone.wrong(at, errno.ENOSPC)
    monkeypatch.setattr(disks, "CODES", (1,))
    assert alone.wrong(at, errno.ENOSPC).startswith("code 7: ")
    monkeypatch.undo()
    monkeypatch.setattr(alone, "weights", {})
    assert alone.wrong(at, errno.ENOSPC) == "other weights"
    monkeypatch.undo()
    monkeypatch.setattr(alone, "files", alone.files - {"env.json"})
    assert alone.wrong(at, errno.ENOSPC) == "files ['env.json']"


@pytest.mark.campaign
def test_the_campaign(alone: Disk, together: Disk):
    found, bad = {}, []
    for ranks, disk, ways in ((1, alone, (*ERRORS, KILL)), (2, together, (errno.ENOSPC, KILL))):
        for how in ways:
            cases = [(at, how) for at in range(1, len(disk.operations) + 1)]
            wrong = disks.campaign(disk, cases)
            found[f"{ranks} ranks, {errno.errorcode.get(how, 'SIGKILL')}"] = {"operations": len(cases), "failures": len(wrong)}
            bad += wrong
    figures.keep("disks", disks.summary(sum(way["operations"] for way in found.values()), bad), {"ways": found, "failures": bad})
    assert not bad, bad[:3]
