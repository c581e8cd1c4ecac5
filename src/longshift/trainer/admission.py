"""Admission: whether the largest step of a run has room on every rank, decided by all ranks before anything is built."""

import gc
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from longshift.config import Config
from longshift.dist.memory import host_memory
from longshift.dist.world import World
from longshift.errors import OutOfMemoryError
from longshift.explained import shape_of
from longshift.layout.home_tiers import HomeTiers
from longshift.weigh.held_home import saved_bytes
from longshift.weigh.needs import Need, StepShape, most, needs
from longshift.weigh.recorder import Transport

COPY_ROOM = 2  # copies of the state that must have room where one is made: as much again stays free for other programs and cached files
CONTROL_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Admitted:
    """`told`: what the rank that needs most needs, and what there is for it, in a sentence; `early`: whether units on disk may be updated
    before the norm; `background`: whether memory has room for a copy of the state, from which checkpoints are written while training goes
    on."""

    told: str
    early: bool
    background: bool


def admit(config: Config, world: World, run: Path) -> Admitted:
    """Refuse a run whose largest step cannot have room on some rank, on the device or where it waits; collective, and one decision of all.
    Where a run has room only if no unit is updated before the norm, none is. Raises OutOfMemoryError with the arithmetic."""
    room, process = _room(world)
    cpu = world.device.type == "cpu"
    transport: Transport = "gloo" if cpu else "nccl"

    def weighed(shape: StepShape) -> tuple[tuple[Need, ...], dict[str, dict[str, int]], str | None]:
        whole = needs(shape, config.edges, transport, cpu)
        waiting = _waiting(config, shape, whole, transport, cpu)
        return whole, waiting, next(_lacking(config, world, run, room, process, whole, waiting), None)

    shape, is_on_disk = shape_of(config, world.per_node), "disk" in config.home.at.named
    whole, waiting, fault = weighed(shape)
    if is_on_disk and any(world.gather_text(fault or "")):
        shape = replace(shape, early=False)
        whole, waiting, fault = weighed(shape)
    world.agree(OutOfMemoryError(fault) if fault else None)

    copy_bytes = max(saved_bytes(shape.steps(need.rank)) for need in whole)
    host_bytes = COPY_ROOM * copy_bytes + (most(whole).device.total if cpu else sum(waiting["host"].values()))
    lacks_room = host_bytes * world.per_node > host_memory()[1] or (cpu and host_bytes + process > room)
    background = not is_on_disk and not any(world.gather_text("lacks room" * lacks_room))

    need, wait = most(whole), {"host": "in host memory", "disk": "on disk"}
    told = f"at most {_gib(need.device.total)} of tensors, on rank {need.rank}, and {_gib(process)} of the process"
    peaks = {place: most(whole, place).of(place) for place in wait}
    told += f"; a rank may have {_gib(room)}" + "".join(f"; {_gib(size)} lie {wait[place]}" for place, size in peaks.items() if size)
    if not background and not is_on_disk:
        told += f"; a copy of the state, {_gib(copy_bytes)}, has no room, so training waits while a checkpoint is written"
    return Admitted(told + "; updates before the norm have no room" * (not shape.early), shape.early, background)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _lacking(
    config: Config, world: World, run: Path, room: int, process: int, whole: Sequence[Need], waiting: dict[str, dict[str, int]]
) -> Iterator[str]:
    """What has no room on this rank, place by place, with the arithmetic. `whole`: the needs of the largest step."""
    need = most(whole)
    if need.device.total + process > room:
        alive = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in need.device.alive[:6])
        yield (
            f"rank {need.rank} needs {need.device.total / 2**30:.2f} GiB for tensors, in {need.device.op} ({alive}), besides "
            f"{process / 2**30:.2f} GiB that the process has, and there are {room / 2**30:.2f} GiB for it; "
            "recompute-full, more tp, u or ring, z3, chunks, a smaller upto, pack or train.pack_tokens take less"
        )
    if waiting["disk"]:
        folder = config.stream.options(run).folder
        yield from _crowded(waiting["disk"], world.per_node, shutil.disk_usage(folder).free, f"{folder} has", "another stream.folder")
    if waiting["host"]:
        yield from _crowded(waiting["host"], world.per_node, host_memory()[1], "this machine's memory has", "disk")


def _waiting(config: Config, shape: StepShape, whole: Sequence[Need], transport: Transport, cpu: bool) -> dict[str, dict[str, int]]:
    """Bytes that a rank keeps in host memory and on disk, by layout; each group's tier is kept while others run."""
    waiting: dict[str, dict[str, int]] = {"host": {}, "disk": {}}
    alone = replace(shape, home_in=HomeTiers())
    for edge in config.edges:
        place = edge.use.offload
        if place == "disk" or (place == "host" and not cpu):
            same = len(config.edges) == 1 and config.home.at == HomeTiers()
            waiting[place][str(edge.use)] = most(whole if same else needs(alone, [edge], transport, cpu), place).of(place)
    for place, known in waiting.items():
        if state := max(0, most(whole, place).of(place) - max(known.values(), default=0)):
            known["the training state"] = state
    return waiting


def _crowded(waiting: dict[str, int], ranks: int, free: int, where: str, instead: str) -> Iterator[str]:
    """What has no room of what is kept in a place, in bytes of a rank by layout. A group's memory is kept while others run."""
    need = sum(waiting.values())
    if need * ranks > free:
        parts = " + ".join(f"{size / 2**30:.2f} ({layout})" for layout, size in waiting.items())
        yield (
            f"what is kept there in the largest step needs {parts} = {need / 2**30:.2f} GiB of each of {ranks} ranks, "
            f"together {need * ranks / 2**30:.2f} GiB, and {where} {free / 2**30:.2f} GiB free: try {instead}, every1, every4, more "
            "tp, u or ring, or a smaller upto"
        )


def _room(world: World) -> tuple[int, int]:
    """Bytes that this rank may have, those of the process included, and how many the process has already. Ranks of one control group share
    what it allows; collective."""
    settle(world.device)
    gc.collect()  # what a trial or a stage before this one had: its player and its table refer to each other
    if world.device.type != "cpu":
        torch.cuda.synchronize(world.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(world.device)
        return total, total - free
    own = f"{socket.gethostname()} {CONTROL_GROUPS.read_text() if CONTROL_GROUPS.exists() else ''}"
    sharing = world.gather_text(own).count(own)
    return min(host_memory()[0] // sharing, psutil.virtual_memory().total // world.per_node), psutil.Process().memory_info().rss


def settle(device: torch.device) -> None:
    """Have the process take what it takes once, whatever is trained: what a first backward and matmul in bf16 load, and on a GPU the
    workspaces of cuBLAS, 32 MiB for each thread that multiplies on Hopper."""
    x = torch.ones(64, 64, requires_grad=True, device=device)
    (x @ x).sum().backward()
    torch.mm(x.detach().bfloat16(), x.detach().bfloat16())
