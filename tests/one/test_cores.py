"""A rank with a GPU stays on the cores of its GPU's memory node."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longshift.cluster.files import cluster, profile_of_host, save
from longshift.cluster.host import host_facts
from longshift.dist.cores import cores_beside, parsed, stay_near
from longshift.dist.world import World

PLACE = "0000:4b:00.0"


def machine(folder: Path, nodes: dict[int, str], number: str = "1") -> Path:
    """A tree such as /sys, of a machine with these nodes, to one of which a device at PLACE is attached."""
    for node, cores in nodes.items():
        there = folder / "devices" / "system" / "node" / f"node{node}"
        there.mkdir(parents=True)
        (there / "cpulist").write_text(f"{cores}\n")
    device = folder / "bus" / "pci" / "devices" / PLACE
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{number}\n")
    return folder


@pytest.mark.parametrize(("listed", "cores"), [("0-2,5", {0, 1, 2, 5}), ("7", {7}), ("", set())])
def test_lists_of_the_kernel_are_read(listed: str, cores: set[int]) -> None:
    assert parsed(listed) == cores


def test_a_device_has_the_cores_of_its_node(tmp_path: Path) -> None:
    assert cores_beside(PLACE, machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"})) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize(("nodes", "number"), [({0: "0-3"}, "0"), ({0: "0-3", 1: "4-7"}, "-1"), ({0: "0-3", 1: "x"}, "1")])
def test_nothing_is_said_of_one_node_or_where_the_kernel_does_not_know(tmp_path: Path, nodes: dict[int, str], number: str) -> None:
    assert cores_beside(PLACE, machine(tmp_path, nodes, number)) == set()
    assert cores_beside("0000:00:00.0", tmp_path) == set()


def test_a_rank_stays_on_the_cores_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, chosen = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: chosen.append(cores))
    assert stay_near(torch.device("cuda", 0), machine(tmp_path / "two", {0: "0-3", 1: "4-7"})) == {4, 5}
    assert stay_near(torch.device("cuda", 0), machine(tmp_path / "apart", {0: "0-5", 1: "6-7"})) == set()
    assert stay_near(torch.device("cpu"), tmp_path / "two") == set()
    assert chosen == [{4, 5}]


def test_a_rank_that_stays_on_few_cores_finds_the_profile_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    made = replace(cluster("8xA800"), name="here", origin="measured", facts=host_facts() | {"measured": "full"})
    save(made, tmp_path / "profiles" / "here.json")
    world = World.alone()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    assert profile_of_host(8, cache=tmp_path, cores=world.cores) == made
    assert profile_of_host(8, cache=tmp_path) is None
