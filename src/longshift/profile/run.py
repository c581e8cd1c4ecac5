"""`longshift profile`: everything that is measured, in order, and the cache of what was measured
before.

Under a launcher every rank measures at once, as training computes at once; medians over the ranks
are kept. In one process on a CPU, collectives are measured in forked processes, one a core.
"""

import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import psutil
import torch
from torch.distributed import ReduceOp

from longshift.cluster.cluster import SHARES, Cluster, Device, Disk, Level, Link
from longshift.cluster.curves import Curve
from longshift.cluster.files import (
    constants,
    decode,
    decode_curves,
    encode,
    fingerprint,
    load,
    save,
)
from longshift.cluster.host import CACHE, core_count, core_quota, cpu_name, host_facts
from longshift.dist.fork import ForkedWorld
from longshift.dist.launcher import launched
from longshift.dist.world import World
from longshift.errors import UsageError
from longshift.files import temporary_folder
from longshift.profile import time_attention, time_compute, time_copies, time_links
from longshift.profile.bench import LONG_S, SHORT_S, Bench
from longshift.trainer.launch import launch
from longshift.trainer.run_folder import RunFolder

SOURCE = "longshift profile"
BUSY = 0.85  # of the cores; a quiet machine gives more
STARVED = 0.4  # of the cores, with less than which all sizes would take minutes

BUDGETS_S = {  # of each family: CPU quick, CPU full, GPU quick, GPU full
    "links": (3.0, 4.0, 10.0, 30.0),
    "launch": (0.2, 0.3, 0.5, 1.0),
    "matmul": (3.0, 7.0, 5.0, 15.0),
    "elementwise": (1.0, 2.0, 2.0, 4.0),
    "attention": (4.0, 9.0, 10.0, 40.0),
    "copies": (0.5, 1.5, 5.0, 15.0),
    "disk": (3.0, 4.0, 5.0, 15.0),
}


def measure_here(per_node: int, quick: bool, fresh: bool, tell: Callable[[str], None]) -> Cluster:
    """`obtain` in this process: as one of its ranks where a launcher started it; with a process a
    GPU where there are several; else alone. The result is in the cache."""
    if launched() or torch.cuda.device_count() <= 1:
        world = World.from_environment()
        cluster = obtain(world, per_node, quick, fresh, tell)
        world.close()
        return cluster

    count = torch.cuda.device_count()
    with temporary_folder() as scratch:
        file = scratch / "profile.json"
        command = [sys.executable, "-m", "longshift.profile.run", str(file), str(count)]
        if quick:
            command.append("quick")
        if fresh:
            command.append("fresh")
        launch(command, count, RunFolder(scratch), tell)
        return load(file)


def obtain(
    world: World,
    per_node: int,
    quick: bool,
    fresh: bool,
    tell: Callable[[str], None],
    cache: Path = CACHE,
) -> Cluster:
    """The profile of this machine, from the cache unless `fresh`, else measured. Every rank of a
    launched world calls it, and gets the same. Raises UsageError where ranks do not fill nodes."""
    if world.size % per_node:
        raise UsageError(
            f"{world.size} ranks do not fill nodes of {per_node}; start as many on each node"
        )
    cluster = None
    if not fresh:
        cluster = kept(world.device, world.size // per_node, per_node, quick, cache, tell)
    # Ranks measure together: all of them do where one has nothing.
    if all(world.gather_text("known" if cluster else "")) and cluster:
        tell(f"measured before; kept in {cache_file(cluster.facts, cache)}")
        return cluster
    return profile(world, per_node, quick, tell, cache)


def cache_file(facts: Mapping[str, object], cache: Path) -> Path:
    return cache.expanduser() / "profiles" / f"{fingerprint(facts)}.json"


def kept(
    device: torch.device,
    nodes: int,
    per_node: int,
    quick: bool,
    cache: Path,
    tell: Callable[[str], None],
) -> Cluster | None:
    """What was measured before with the same hardware and software; a full profile serves for a
    quick one. A damaged file is told of and passed over."""
    for detail in (False, True) if quick else (False,):
        file = cache_file(facts(device, nodes, per_node, detail), cache)
        if file.exists():
            try:
                return load(file)
            except UsageError as fault:
                tell(str(fault))
    return None


def facts(
    device: torch.device, nodes: int, devices_per_node: int, quick: bool
) -> dict[str, str | int | float]:
    """Hardware, driver, torch and a CPU's threads, and how much was measured."""
    values = host_facts() | {
        "measured": "quick" if quick else "full",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch": torch.__version__,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
    }
    if device.type == "cpu":
        values["threads"] = torch.get_num_threads()
    else:
        values["driver"] = driver()
        values["cuda"] = torch.version.cuda or "none"
        values["cudnn"] = str(torch.backends.cudnn.version())
    return values


def driver() -> str:
    """Version of the GPU's driver."""
    version = Path("/proc/driver/nvidia/version")
    words = re.findall(r"\d+\.\d+[.\d]*", version.read_text()) if version.exists() else []
    return words[0] if words else "unknown"


def profile(
    world: World, per_node: int, quick: bool, tell: Callable[[str], None], cache: Path = CACHE
) -> Cluster:
    """Measure, and put the result into the cache. `tell`: progress."""
    cores = time_compute.granted_cores()
    threads = min(torch.get_num_threads(), core_quota() or core_count())
    if cores < BUSY * threads:
        tell(
            f"this process gets {cores:.2f} of its {threads:g} cores: others run, or its cores are"
            " capped; the numbers hold for that"
        )
    shares = torch.tensor([-cores / threads], device=world.device)
    least_share = -world.everyone.all_reduce(shares, ReduceOp.MAX).item()
    if least_share < STARVED and not quick:
        quick = True
        tell("as with --quick, for this would take minutes: measure again when less runs here")
    any_busy = least_share < BUSY
    least_s = LONG_S if any_busy else SHORT_S
    machine_facts = facts(world.device, world.size // per_node, per_node, quick)
    which = 2 * (world.device.type == "cuda") + (not quick)
    budget_s = {family: budgets[which] for family, budgets in BUDGETS_S.items()}
    tell(
        f"measuring for about {sum(budget_s.values()):.0f} s"
        + ", up to two minutes while others run" * any_busy
    )
    begin_s = time.monotonic()

    def begin(number: int, what: str) -> None:
        tell(f"{number} of 5, after {time.monotonic() - begin_s:.0f} s: {what}")

    begin(1, "collectives")
    curves = _collectives(world, per_node, quick, budget_s["links"], least_s)
    bench = Bench(world.device, quick, least_s)
    begin(2, "launch floor and matmuls")
    curves |= time_compute.launch(bench, budget_s["launch"])
    curves |= time_compute.matmuls(bench, budget_s["matmul"])
    begin(3, "elementwise operations and copies")
    curves |= time_compute.elementwise(bench, budget_s["elementwise"])
    curves |= time_copies.copies(bench, budget_s["copies"])
    begin(4, "attention")
    backends, attention_curves = time_attention.attention(bench, budget_s["attention"])
    curves |= attention_curves
    if world.rank % per_node == 0:  # ranks of a node share its disk
        begin(5, "disk")
        with suppress(OSError):
            curves |= time_copies.disk(bench, cache.expanduser(), budget_s["disk"])

    cores, curves = _gather_medians(world, cores, curves)
    cluster = _cluster(world, per_node, machine_facts, curves, cores, cache.expanduser())
    cluster = replace(cluster, backends=backends)
    # What rank 0 says of memory, disk and kernels, on every rank.
    cluster = decode(json.loads(world.gather_text(json.dumps(encode(cluster)))[0]))
    if world.rank == 0:
        save(cluster, cache_file(machine_facts, cache))
    return cluster


def _gather_medians(
    world: World, cores: float, curves: dict[str, Curve]
) -> tuple[float, dict[str, Curve]]:
    """Cores and curves of the ranks together, the same on every rank."""
    measured = {"cores": cores, "curves": {name: asdict(curve) for name, curve in curves.items()}}
    ranks = [json.loads(text) for text in world.gather_text(json.dumps(measured))]
    all_curves = medians([decode_curves(rank["curves"]) for rank in ranks])
    return statistics.median(rank["cores"] for rank in ranks), all_curves


def medians(ranks: list[dict[str, Curve]]) -> dict[str, Curve]:
    """Curves of what ranks measured: medians over those that measured the same points."""
    curves = {}
    # A rank may lack a curve: of the disk one rank a node has it.
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        rank_curves = [rank[name] for rank in ranks if name in rank]
        seconds = zip(*(curve.seconds for curve in rank_curves))
        spreads = zip(*(curve.spread for curve in rank_curves))

        curves[name] = Curve(
            axes=rank_curves[0].axes,
            seconds=tuple(map(statistics.median, seconds)),
            spread=tuple(map(statistics.median, spreads)),
        )
    return curves


def _collectives(
    world: World, per_node: int, quick: bool, budget_s: float, least_s: float
) -> dict[str, Curve]:
    arguments = {"quick": quick, "budget_s": budget_s, "least_s": least_s}
    if world.size > 1:
        return decode_curves(time_links.collectives(world, per_node, **arguments))

    # A process alone with a GPU has no peer: another rank needs a GPU of its own.
    cores = min(8, core_count())
    if world.device.type == "cuda" or cores == 1:
        return {}
    function = "longshift.profile.time_links:collectives"
    with ForkedWorld(cores) as forked:
        curves_of_ranks = forked.call(function, 300.0, per_node=cores, **arguments)
        return decode_curves(curves_of_ranks[0])


def _cluster(
    world: World,
    per_node: int,
    machine_facts: dict,
    curves: dict[str, Curve],
    cores: float,
    folder: Path,
) -> Cluster:
    """What the curves say, with the constants that follow from them."""
    device = world.device
    host_bytes = float(psutil.virtual_memory().total)
    flops = {}
    links: dict[Level, Link] = {}
    for name, curve in curves.items():
        words = name.split()
        if words[0] == "matmul":
            # The best rate that was reached stands for the peak of a datasheet.
            flops[words[1]] = _best_rate(curve, lambda m, k, n: 2 * m * k * n)
    for level in get_args(Level):
        if send := curves.get(f"send {level}"):
            links[level] = time_links.link_of(send)
    memory_bytes = host_bytes / per_node
    if device.type == "cuda":
        links["device"] = time_links.link_of(curves["copy to_device pinned"])
        memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    disk = None
    if "disk read plain depth1" in curves:
        read, write = (curves[f"disk {way} plain depth1"] for way in ("read", "write"))
        disk_bytes = float(shutil.disk_usage(folder).total)
        disk = Disk(disk_bytes, _best_rate(read, float), _best_rate(write, float))
    stream = curves["elementwise float32"]
    launch = curves["launch"]
    cluster = Cluster(
        name=machine_facts["device"],
        origin="measured",
        nodes=world.size // per_node,
        devices_per_node=per_node,
        device=Device(
            name=machine_facts["device"],
            kind="cuda" if device.type == "cuda" else "cpu",
            memory_bytes=memory_bytes,
            memory_bytes_per_s=stream.points[-1][0] / stream.seconds[-1],
            flops_per_s=flops,
            launch_s=launch.seconds[0] / launch.points[0][0],
            cores=cores,
        ),
        host_bytes=host_bytes,
        links=links,
        shares=dict.fromkeys(SHARES, 1.0),
        sources={},
        disk=disk,
        curves=curves,
        facts=machine_facts,
    )
    return replace(cluster, sources=dict.fromkeys(constants(cluster), SOURCE))


def _best_rate(curve: Curve, work: Callable[..., float]) -> float:
    """Largest rate among the measured points."""
    return max(work(*point) / seconds for point, seconds in zip(curve.points, curve.seconds))


def _rank(file: str, per_node: str, *words: str) -> None:
    """One of the processes that `measure_here` started."""
    world = World.from_environment()
    tell = (
        (lambda line: print(f"longshift: {line}", file=sys.stderr, flush=True))
        if world.rank == 0
        else (lambda line: None)
    )
    cluster = obtain(world, int(per_node), "quick" in words, "fresh" in words, tell)
    if world.rank == 0:
        save(cluster, Path(file))
    world.close()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
