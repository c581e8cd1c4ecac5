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
from longshift.layout.layout import AUTO, Layout
from longshift.layout.legal import min_chunk
from longshift.planner.activations import choose_activations
from longshift.planner.chunk_size import Machine, choose_chunk, powers
from longshift.profile.run import kept
from longshift.simulate.clock import Clock, GroupPacks
from longshift.simulate.cost import Cost
from longshift.simulate.habits import habits
from longshift.simulate.rates import rates
from longshift.spec.formats import arithmetic
from longshift.step_report import shape_of
from longshift.weigh.extrapolate_chunks import full_pack
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.weigh.recorder import transport_on
from longshift.workload.groups import Edge

DEFAULTS = {"cpu": 4 << 10, "cuda": 64 << 10}  # tokens, where nothing was measured
FREE_SHARE = 0.8  # of a device's memory: kernels and the allocator need some too


def make_choices(config: Config, tell: Callable[[str], None]) -> Config:
    """The config with every `chunk-auto` and `recompute-auto` replaced; `tell`: each choice and
    why. Raises UsageError in a rank, whose peers may be other machines and choose differently."""
    if launched():
        is_chunk = any(edge.use.chunk == AUTO for edge in config.edges)
        word, part = ("chunk-auto", "chunk") if is_chunk else ("recompute-auto", "layout")
        where = "that longshift train CONFIG --explain tells on one machine"
        raise UsageError(f"{word} is chosen before ranks start: write the {part} {where}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cluster = kept(device, 1, max(1, torch.cuda.device_count()), True, CACHE, tell)
    edges = []
    for edge in config.edges:
        layout = edge.use
        if layout.open:
            choose = _chunks if layout.chunk == AUTO else _activations
            layout, reason = choose(config, edge, device, cluster)
            tell(f"{edge.use}: {layout}: {reason}")
        edges.append(replace(edge, use=layout))
    return config.model_copy(
        update={"layout": edges[0].use if isinstance(config.layout, Layout) else tuple(edges)}
    )


def _chunks(
    config: Config, edge: Edge, device: torch.device, cluster: Cluster | None
) -> tuple[Layout, str]:
    """A group's layout with a chunk, and why. A machine that was not measured has a default."""
    longest = min(edge.upto, config.data.max_len)

    def with_chunk(tokens: int) -> Layout:
        return replace(edge.use, chunk=tokens)

    fault = "this machine was not measured; longshift profile does"
    if cluster is not None:
        try:
            known = cluster.with_arithmetic(arithmetic(config.train.precision))
            machine = Machine(known, _cost(config, known), _free_bytes(config, device))
            tokens, reason = choose_chunk(
                config.spec,
                edge.use,
                longest,
                machine,
                lambda tokens: _needed_bytes(config, edge, device, with_chunk(tokens)),
                edge.pack,
            )
            return with_chunk(tokens), reason
        except UsageError as unknown:
            fault = str(unknown)
    tokens = min(DEFAULTS[device.type], powers(longest)[-1])
    return with_chunk(max(min_chunk(longest, edge.pack), tokens)), f"a default, because {fault}"


def _cost(config: Config, machine: Cluster) -> Cost:
    precision = config.train.precision
    run_habits = habits(config.train.compile, precision, machine.device)
    return Cost(config.spec, rates(machine, arithmetic(precision)), run_habits)


def _activations(
    config: Config, edge: Edge, device: torch.device, cluster: Cluster | None
) -> tuple[Layout, str]:
    """A group's layout with what its blocks keep, and why. A machine that was not measured is taken
    for the preset of a CPU or an H100."""
    spec = config.spec
    free_bytes = _free_bytes(config, device)
    machine = cluster or preset("cpu" if device.type == "cpu" else "h100")
    machine = machine.with_arithmetic(arithmetic(config.train.precision))
    cost = _cost(config, machine)
    pack = tuple(full_pack(edge.pack, min(edge.upto, config.data.max_len)))

    def seconds(layout: Layout) -> float:
        micros = max(1, config.train.tokens_per_step // (edge.pack * layout.dp))
        clock = Clock(_shape(config, edge, layout), machine, cost)
        return clock.step([GroupPacks(layout, ((pack,) * micros,) * layout.dp)]).seconds

    blocks = max(stop - start for start, stop in edge.use.layers_of(spec.layers))
    needed_bytes = cache(partial(_needed_bytes, config, edge, device))
    best, ranking = choose_activations(edge.use, blocks, free_bytes, needed_bytes, seconds)
    room = f"{best.bytes / 2**30:.2f} of {free_bytes / 2**30:.2f} GiB"
    if not ranking:
        return best.layout, f"the smallest, and more than is free: {room}"
    slower = ", ".join(
        f"{rival.layout} {rival.seconds / best.seconds - 1:+.0%}" for rival in ranking[1:3]
    )
    return best.layout, f"the fastest that fits, {room}" + (f"; {slower}" if slower else "")


def _free_bytes(config: Config, device: torch.device) -> float:
    """What a rank may use of its device's memory."""
    if device.type == "cuda":
        return FREE_SHARE * torch.cuda.get_device_properties(device).total_memory
    return FREE_SHARE * (psutil.virtual_memory().total // config.world)


def _needed_bytes(config: Config, edge: Edge, device: torch.device, layout: Layout) -> int:
    """What a rank needs on its device for a group under another layout."""
    shape = _shape(config, edge, layout)
    edges = [replace(edge, use=layout)]
    needs = memory_needs(shape, edges, transport_on(device.type != "cpu"))
    return largest_need(needs).device.total


def _shape(config: Config, edge: Edge, layout: Layout) -> StepShape:
    """The shape of a run's steps with another layout for a group."""
    if isinstance(config.layout, Layout):
        return shape_of(config.model_copy(update={"layout": layout}))
    edges = (replace(group, use=layout) if group == edge else group for group in config.edges)
    return shape_of(config.model_copy(update={"layout": tuple(edges)}))
