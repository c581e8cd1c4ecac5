"""Admission: whether the largest step of a run has room on every rank, decided by all ranks before anything is built."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from longshift.config import Config
from longshift.dist.memory import host_memory
from longshift.dist.world import World
from longshift.errors import OutOfMemoryError
from longshift.explain import shape_of
from longshift.program.needs import most, needs
from longshift.schedule.inside_rank import Transport

CONTROL_GROUPS = Path("/proc/self/cgroup")


def admit(config: Config, world: World, run: Path) -> None:
    """Refuse a run whose largest step cannot have room on some rank, on the device or where it waits; collective, and one decision of all.
    Raises OutOfMemoryError with the arithmetic."""
    fault = next(_lacking(config, world, run, *_room(world)), None)
    world.agree(OutOfMemoryError(fault) if fault else None)


def _lacking(config: Config, world: World, run: Path, room: int, process: int) -> Iterator[str]:
    """What has no room on this rank, place by place, with the arithmetic."""
    cpu = world.device.type == "cpu"
    transport: Transport = "gloo" if cpu else "nccl"
    shape = shape_of(config, world.per_node)
    whole = needs(shape, config.edges, transport, cpu)
    need = most(whole)
    if need.device.total + process > room:
        alive = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in need.device.alive[:6])
        yield (
            f"rank {need.rank} needs {need.device.total / 2**30:.2f} GiB for tensors, in {need.device.op} ({alive}), besides "
            f"{process / 2**30:.2f} GiB that the process has, and there are {room / 2**30:.2f} GiB for it; recompute-full, more tp, u or "
            "ring, z3, chunks, a smaller upto, pack or train.pack_tokens take less"
        )
    waiting: dict[str, dict[str, int]] = {"host": {}, "disk": {}}
    for edge in config.edges:
        place = edge.use.offload
        if place == "disk" or (place == "host" and not cpu):
            alone = whole if len(config.edges) == 1 else needs(shape, [edge], transport, cpu)
            waiting[place][str(edge.use)] = most(alone, place).of(place)
    if waiting["disk"]:
        folder = config.stream.options(run).folder
        yield from _crowded(waiting["disk"], world.per_node, shutil.disk_usage(folder).free, f"{folder} has", "another stream.folder")
    if waiting["host"]:
        yield from _crowded(waiting["host"], world.per_node, host_memory()[1], "this machine's memory has", "disk")


def _crowded(waiting: dict[str, int], ranks: int, free: int, where: str, instead: str) -> Iterator[str]:
    """What has no room of what waits, in bytes of a rank by layout. A group's memory is kept while others run."""
    need = sum(waiting.values())
    if need * ranks > free:
        parts = " + ".join(f"{size / 2**30:.2f} ({layout})" for layout, size in waiting.items())
        yield (
            f"what waits for the backward of the longest documents needs {parts} = {need / 2**30:.2f} GiB of each of {ranks} ranks, "
            f"together {need * ranks / 2**30:.2f} GiB, and {where} {free / 2**30:.2f} GiB free: try {instead}, keep-input, every4, more "
            "tp, u or ring, or a smaller upto"
        )


def _room(world: World) -> tuple[int, int]:
    """Bytes that this rank may have, those of the process included, and how many the process has already. Ranks of one control group share
    what it allows; collective."""
    if world.device.type != "cpu":
        free, total = torch.cuda.mem_get_info(world.device)
        return total, total - free
    settle(world.device)
    own = f"{socket.gethostname()} {CONTROL_GROUPS.read_text() if CONTROL_GROUPS.exists() else ''}"
    sharing = world.gather_text(own).count(own)
    return min(host_memory()[0] // sharing, psutil.virtual_memory().total // world.per_node), psutil.Process().memory_info().rss


def settle(device: torch.device) -> None:
    """Have the process take what it takes once, whatever is trained: what a first backward, optimizer and matmul in bf16 load."""
    x = torch.ones(64, 64, requires_grad=True, device=device)
    (x @ x).sum().backward()
    torch.optim.AdamW([x], fused=True).step()
    torch.mm(x.detach().bfloat16(), x.detach().bfloat16())
