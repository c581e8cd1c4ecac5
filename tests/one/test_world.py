"""The device of a rank, and the memory of its machine, as environment and control groups tell them."""

import os
from pathlib import Path

import psutil
import pytest
import torch

from longshift.dist.memory import host_memory
from longshift.dist.world import ALLOCATOR, World, allocator, own_device
from longshift.errors import UsageError
from longshift.trainer import admission

TOTAL = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("gpus", "place", "index"),
    [
        (4, {"RANK": "6", "LOCAL_RANK": "2"}, 2),
        (4, {"RANK": "6", "SLURM_LOCALID": "3"}, 3),
        (4, {"RANK": "6"}, 2),
        (1, {"RANK": "3", "LOCAL_RANK": "3"}, 0),  # a launcher that shows each rank its own
    ],
)
def test_a_rank_takes_its_own_gpu(monkeypatch, gpus, place, index):
    for name in ("RANK", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_device() == torch.device("cuda", index)


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UsageError, match=r"^rank 7 is number 3 \(from 0\) on its machine, which shows it 2 GPUs$"):
        own_device()


def test_the_allocator_of_a_gpu_grows_its_segments_unless_a_person_has_set_it(monkeypatch):
    for name in (*ALLOCATOR, "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert allocator() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    World.from_environment()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ALLOCATOR:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:64")
        World.from_environment()
        assert os.environ.get("PYTORCH_ALLOC_CONF") == ("max_split_size_mb:64" if name == "PYTORCH_ALLOC_CONF" else None)
        monkeypatch.delenv(name)


def test_a_rank_on_a_gpu_has_the_room_that_is_free_there(monkeypatch):
    """What others hold of the device counts as held."""
    done = list[str]()
    monkeypatch.setattr(admission, "settle", lambda device: done.append("taken"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("there"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: done.append("asked") or (10, 80))
    room, held = admission._room(World(0, 1, torch.device("cuda", 0)))
    assert room - held == 10
    assert done == ["taken", "there", "asked"]


VERSIONS = {
    1: ("5:cpu,memory:/a/b", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("0::/a/b", "", "memory.max", "memory.current", "inactive_file"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("where", ["a/b", "a", ""])
def test_memory_is_no_more_than_a_control_group_allows(tmp_path: Path, version: int, where: str):
    """Its own, one above, or the one that a container shows as the topmost; files that can be dropped count as free."""
    line, top, limit, used, cache = VERSIONS[version]
    groups, folder = tmp_path / "groups", tmp_path / top / where
    groups.write_text(f"9:pids:/elsewhere\n{line}\n")
    (tmp_path / top / "a/b").mkdir(parents=True)
    for name, text in ((limit, "1000000"), (used, "700000"), ("memory.stat", f"anon 1\n{cache} 200000\n")):
        (folder / name).write_text(text)
    assert host_memory(groups, tmp_path) == (1000000, 500000)


def test_memory_without_limits_is_the_machines(tmp_path: Path):
    groups = tmp_path / "groups"
    assert host_memory(groups, tmp_path)[0] == TOTAL
    groups.write_text("0::/\n")
    for name, text in (("memory.max", "max"), ("memory.current", "5"), ("memory.stat", "")):
        (tmp_path / name).write_text(text)
    total, free = host_memory(groups, tmp_path)
    assert total == TOTAL >= free > 0
