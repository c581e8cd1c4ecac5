"""`chunk-auto` becomes a number, and `recompute-auto` what blocks keep, before the ranks start,
from what `longshift profile` has kept of this machine, and its memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import psutil
import torch

from longshift.cluster.cluster import Cluster
from longshift.cluster.files import preset
from longshift.cluster.host import CACHE
from longshift.config import Config
from longshift.dist.launcher import launched
from longshift.errors import UsageError
from longshift.layout.layout import AUTO, Layout, format_size
from longshift.layout.legal import min_chunk
from longshift.planner.activations import choose_activations
from longshift.planner.chunk_size import Machine, choose_chunk, powers
from longshift.profile.run import kept
from longshift.simulate.clock import Clock, GroupPacks
from longshift.simulate.cost import Cost, habits
from longshift.simulate.rates import rates
from longshift.spec.formats import arithmetic
from longshift.step_report import shape_of
from longshift.weigh.extrapolate_chunks import full_pack
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.workload.groups import Edge

DEFAULTS = {"cpu": 4 << 10, "cuda": 64 << 10}  # tokens, where nothing was measured
FREE_SHARE = 0.8  # of a device's memory: kernels and the allocator need some too


def make_choices(config: Config, tell: Callable[[str], None]) -> Config:
    """The config with every `chunk-auto` and `recompute-auto` replaced; `tell`: each choice and
    why. Raises UsageError in a rank, whose peers may be other machines and choose differently."""
    if launched():
        word = "recompute-auto"
        part = "layout"
        if any(edge.use.chunk == AUTO for edge in config.edges):
            word = "chunk-auto"
            part = "chunk"
        where = "that longshift train CONFIG --explain tells on one machine"
        raise UsageError(f"{word} is chosen before ranks start: write the {part} {where}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cluster = kept(device, 1, max(1, torch.cuda.device_count()), True, CACHE, tell)
    edges = []
    for edge in config.edges:
        layout = edge.use
        if layout.chunk == AUTO:
            tokens, reason = _choice(config, edge, device, cluster)
            layout = replace(layout, chunk=tokens)
            tell(f"{edge.use}: chunks of {format_size(tokens)}: {reason}")
        elif layout.recompute == "auto":
            layout, reason = _activations(config, edge, device, cluster)
            tell(f"{edge.use}: {layout}: {reason}")
        edges.append(replace(edge, use=layout))
    return config.model_copy(
        update={"layout": edges[0].use if isinstance(config.layout, Layout) else tuple(edges)}
    )


def _choice(
    config: Config, edge: Edge, device: torch.device, cluster: Cluster | None
) -> tuple[int, str]:
    longest = min(edge.upto, config.data.max_len)
    fault = "this machine was not measured; longshift profile does"
    if cluster is not None:
        dtype = arithmetic(config.train.precision)
        try:
            machine = Machine(
                cluster.with_arithmetic(dtype),
                dtype,
                device.type == "cpu",
                FREE_SHARE * _memory(config, device),
            )

            def needed(tokens: int) -> int:
                return _of_layout(config, edge, device, replace(edge.use, chunk=tokens))

            return choose_chunk(config.spec, edge.use, longest, machine, needed, edge.pack)
        except UsageError as unknown:
            fault = str(unknown)
    least = min_chunk(longest, edge.pack)
    return (
        max(least, min(DEFAULTS[device.type], powers(longest)[-1])),
        f"a default, because {fault}",
    )


def _memory(config: Config, device: torch.device) -> int:
    """Bytes of a rank's device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // config.world


def _activations(
    config: Config, edge: Edge, device: torch.device, cluster: Cluster | None
) -> tuple[Layout, str]:
    """What blocks of a group keep, and why. A machine that was not measured is taken for the preset
    of a CPU or an H100."""
    spec = config.spec
    free = FREE_SHARE * _memory(config, device)
    dtype = arithmetic(config.train.precision)
    stand_in = "cpu" if device.type == "cpu" else "h100"
    machine = (cluster or preset(stand_in)).with_arithmetic(dtype)
    run_habits = habits(config.train.compile, config.train.precision, machine.device)
    cost = Cost(spec, rates(machine, dtype), run_habits)
    pack = tuple(full_pack(edge.pack, min(edge.upto, config.data.max_len)))

    def seconds(way: Layout) -> float:
        micros = max(1, config.train.tokens_per_step // (edge.pack * way.dp))
        clock = Clock(_shape(config, edge, way), machine, cost, dtype)
        return clock.step([GroupPacks(way, ((pack,) * micros,) * way.dp)]).seconds

    blocks = max(stop - start for start, stop in edge.use.layers_of(spec.layers))
    layout_bytes = cache(partial(_of_layout, config, edge, device))
    best, ranking = choose_activations(edge.use, blocks, free, layout_bytes, seconds)
    room = f"{best.bytes / 2**30:.2f} of {free / 2**30:.2f} GiB"
    if not ranking:
        return best.layout, f"the smallest, and more than is free: {room}"
    slower = ", ".join(
        f"{rival.layout} {rival.seconds / best.seconds - 1:+.0%}" for rival in ranking[1:3]
    )
    return best.layout, f"the fastest that fits, {room}" + (f"; {slower}" if slower else "")


def _of_layout(config: Config, edge: Edge, device: torch.device, way: Layout) -> int:
    """What a rank needs on its device for a group under another layout."""
    on_cpu = device.type == "cpu"
    transport = "gloo" if on_cpu else "nccl"
    edges = [replace(edge, use=way)]
    return largest_need(
        memory_needs(_shape(config, edge, way), edges, transport, on_cpu)
    ).device.total


def _shape(config: Config, edge: Edge, way: Layout) -> StepShape:
    """The shape of a run's steps with another layout for a group."""
    edges = tuple(replace(group, use=way) if group == edge else group for group in config.edges)
    layout = way if isinstance(config.layout, Layout) else edges
    return shape_of(config.model_copy(update={"layout": layout}))
