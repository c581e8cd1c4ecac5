"""The device of a rank, and the memory of its machine, as environment and control groups tell them."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from longshift.dist.memory import host_memory
from longshift.dist.world import ALLOCATOR, RANKS_PER_GPU, World, allocator, check_gpus, own_device, use_gpu
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


def test_ranks_share_a_gpu_where_the_environment_asks_for_it(monkeypatch):
    """Each is a host of its own to NCCL, which refuses two ranks on one GPU of a host; what a person has set stays."""
    for name in ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS", RANKS_PER_GPU, "SLURM_LOCALID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(UsageError, match=r"^4 ranks need a GPU each, and this machine has 2"):
        check_gpus(4)
    use_gpu(torch.device("cuda", 1), 3)
    assert "NCCL_HOSTID" not in os.environ

    monkeypatch.setenv(RANKS_PER_GPU, "2")
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    check_gpus(4)
    for rank, index in enumerate((0, 0, 1, 1)):
        monkeypatch.setenv("RANK", str(rank))
        for local in (str(rank), ""):
            monkeypatch.setenv("LOCAL_RANK", local)
            assert own_device() == torch.device("cuda", index)
    use_gpu(own_device(), 3)
    assert [os.environ[name] for name in ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_MAX_CTAS")] == ["rank3", "1", "8"]
    for text in ("0", "two", "-1", ""):
        monkeypatch.setenv(RANKS_PER_GPU, text)
        with pytest.raises(UsageError, match=rf"^LONGSHIFT_RANKS_PER_GPU is '{text}', and how many"):
            check_gpus(1)


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


@pytest.mark.parametrize("uuids", ["a", "ab", "aab"])
def test_a_rank_on_a_gpu_has_the_room_that_is_free_there(monkeypatch, uuids):
    """What others hold of the device counts as held; ranks of one GPU have equal parts of it."""
    sharing = uuids.count("a")
    told = [f"{socket.gethostname()} {uuid}" for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(World, "gather_text", lambda world, text: done.append("told") or told)
    done = list[str]()
    monkeypatch.setattr(admission, "settle", lambda device: done.append("taken"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("there"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: done.append("asked") or (10, 80))
    room, held = admission._room(World(0, 1, torch.device("cuda", 0)))
    assert (room, held) == (80 // sharing, 70 // sharing)
    assert done == ["taken", "there", "told", "asked"]


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
