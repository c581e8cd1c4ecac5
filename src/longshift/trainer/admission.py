"""Admission: whether the largest step of a run has room on every rank, decided by all ranks before
anything is built."""

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
from longshift.layout.home_tiers import HomeTiers
from longshift.print_result import gib_text
from longshift.step_report import shape_of
from longshift.weigh.needs import Need, StepShape, largest_need, memory_needs
from longshift.weigh.recorder import Transport, transport_on
from longshift.weigh.state_memory import saved_bytes

# Copies of the state that must have room where one is made: as much again stays free for other
# programs and cached files.
COPY_ROOM = 2
CONTROL_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Admission:
    """`told`: what the rank that needs most needs, and what there is for it, in a sentence;
    `early`: whether units on disk may be updated before the norm; `background`: whether memory has
    room for a copy of the state, from which checkpoints are written while training goes on."""

    told: str
    early: bool
    background: bool


def admit(config: Config, world: World, run: Path) -> Admission:
    """Refuse a run whose largest step cannot have room on some rank, on the device or where it
    waits; collective, and one decision of all. Where a run has room only if no unit is updated
    before the norm, none is. Raises OutOfMemoryError with the arithmetic."""
    room, process = _room(world)
    cpu = world.device.type == "cpu"
    transport = transport_on(not cpu)

    def weigh(shape: StepShape) -> tuple[tuple[Need, ...], dict[str, dict[str, int]], str | None]:
        step_needs = memory_needs(shape, config.edges, transport)
        waiting = _waiting(config, shape, step_needs, transport)
        faults = _lacking(config, world, run, room, process, step_needs, waiting)
        return step_needs, waiting, next(faults, None)

    # 1. Weigh the largest step; once more without early updates, if any rank lacks room for it.
    shape = shape_of(config, world.per_node)
    is_on_disk = "disk" in config.home.at.tiers
    step_needs, waiting, fault = weigh(shape)
    if is_on_disk and any(world.gather_text(fault or "")):
        shape = replace(shape, early=False)
        step_needs, waiting, fault = weigh(shape)
    world.agree(OutOfMemoryError(fault) if fault else None)

    # 2. See whether host memory has room for a copy of the state. All ranks of a node share it.
    need = largest_need(step_needs)
    copy_bytes = max(saved_bytes(shape.steps(rank_need.rank)) for rank_need in step_needs)
    host_bytes = COPY_ROOM * copy_bytes
    host_bytes += need.device.total if cpu else sum(waiting["host"].values())
    lacks_room = host_bytes * world.per_node > host_memory()[1] or (
        cpu and host_bytes + process > room
    )
    background = not is_on_disk and not any(world.gather_text("lacks room" * lacks_room))

    # 3. Say what is needed.
    text = (
        f"at most {_gib(need.device.total)} of tensors, on rank {need.rank}, and {_gib(process)} of"
        " the process"
    )
    text += f"; a rank may have {_gib(room)}"
    for place, where in (("host", "in host memory"), ("disk", "on disk")):
        if size := largest_need(step_needs, place).of(place):
            text += f"; {_gib(size)} lie {where}"
    if not background and not is_on_disk:
        text += (
            f"; a copy of the state, {_gib(copy_bytes)}, has no room, so training waits while a"
            " checkpoint is written"
        )
    if not shape.early:
        text += "; updates before the norm have no room"
    return Admission(told=text, early=shape.early, background=background)


def _gib(size: int) -> str:
    return gib_text(size, digits=2)


def _lacking(
    config: Config,
    world: World,
    run: Path,
    room: int,
    process: int,
    step_needs: Sequence[Need],
    waiting: dict[str, dict[str, int]],
) -> Iterator[str]:
    """What has no room on this rank, place by place, with the arithmetic. `step_needs`: the needs
    of the largest step."""
    need = largest_need(step_needs)
    if need.device.total + process > room:
        alive = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in need.device.alive[:6])
        yield (
            f"rank {need.rank} needs {_gib(need.device.total)} for tensors, in"
            f" {need.device.op} ({alive}), besides {_gib(process)} that the process has,"
            f" and there are {_gib(room)} for it; recompute-full, more tp, u or ring, z3,"
            " chunks, a smaller upto or pack take less"
        )
    if waiting["disk"]:
        folder = config.stream.options(run).folder
        yield from _crowded(
            waiting["disk"],
            world.per_node,
            shutil.disk_usage(folder).free,
            f"{folder} has",
            "another stream.folder",
        )
    if waiting["host"]:
        yield from _crowded(
            waiting["host"], world.per_node, host_memory()[1], "this machine's memory has", "disk"
        )


def _waiting(
    config: Config, shape: StepShape, step_needs: Sequence[Need], transport: Transport
) -> dict[str, dict[str, int]]:
    """Bytes that a rank keeps in host memory and on disk, by layout; each group's tier is kept
    while others run."""
    waiting: dict[str, dict[str, int]] = {"host": {}, "disk": {}}
    # 1. Offloaded activations of each group, as if it were alone and the state on the device.
    shape_without_state = replace(shape, home_in=HomeTiers())
    is_alone = len(config.edges) == 1 and config.home.at == HomeTiers()
    for edge in config.edges:
        place = edge.use.offload
        if place == "disk" or (place == "host" and transport == "nccl"):
            edge_needs = (
                step_needs if is_alone else memory_needs(shape_without_state, [edge], transport)
            )
            waiting[place][str(edge.use)] = largest_need(edge_needs, place).of(place)

    # 2. The rest of what lies there is the state.
    for place, sizes in waiting.items():
        rest = largest_need(step_needs, place).of(place) - max(sizes.values(), default=0)
        if rest > 0:
            sizes["the training state"] = rest
    return waiting


def _crowded(
    waiting: dict[str, int], ranks: int, free: int, where: str, instead: str
) -> Iterator[str]:
    """What has no room of what is kept in a place, in bytes of a rank by layout. A group's memory
    is kept while others run."""
    need = sum(waiting.values())
    if need * ranks > free:
        parts = " + ".join(f"{size / 2**30:.2f} ({layout})" for layout, size in waiting.items())
        yield (
            f"what is kept there in the largest step needs {parts} = {_gib(need)} of each"
            f" of {ranks} ranks, together {_gib(need * ranks)}, and"
            f" {where} {_gib(free)} free: try {instead}, every1, every4, more tp, u or"
            " ring, or a smaller upto"
        )


def _room(world: World) -> tuple[int, int]:
    """Bytes that this rank may have, those of the process included, and how many the process has
    already. Ranks of one control group share what it allows, and ranks of one GPU its memory;
    collective."""
    device = world.device
    settle(device)
    # What a trial or a stage before this one had: its player and its table refer to each other.
    gc.collect()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        sharing = _ranks_with(
            f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}", world
        )
        # All have settled: what is not free is theirs, in equal parts.
        free, total = torch.cuda.mem_get_info(device)
        return total // sharing, (total - free) // sharing
    control_groups = CONTROL_GROUPS.read_text() if CONTROL_GROUPS.exists() else ""
    sharing = _ranks_with(f"{socket.gethostname()} {control_groups}", world)
    room = min(host_memory()[0] // sharing, psutil.virtual_memory().total // world.per_node)
    return room, psutil.Process().memory_info().rss


def _ranks_with(identity: str, world: World) -> int:
    """How many ranks say the same of what they compute on; collective."""
    return world.gather_text(identity).count(identity)


def settle(device: torch.device) -> None:
    """Have the process take what it takes once, whatever is trained: what a first backward and
    matmul in bf16 load, and on a GPU the workspaces of cuBLAS, 32 MiB for each thread that
    multiplies on Hopper."""
    x = torch.ones(64, 64, requires_grad=True, device=device)
    (x @ x).sum().backward()
    torch.mm(x.detach().bfloat16(), x.detach().bfloat16())
