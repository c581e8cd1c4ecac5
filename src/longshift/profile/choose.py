"""`chunk-auto` becomes a number before the ranks start, from what `longshift profile` has kept of this machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import psutil
import torch

from longshift.cluster.cluster import Cluster
from longshift.cluster.host import CACHE
from longshift.config import Config
from longshift.dist.world import launched
from longshift.errors import UsageError
from longshift.explained import shape_of
from longshift.layout.layout import AUTO, Layout, format_size
from longshift.layout.legal import least_chunk
from longshift.planner.chunk_size import Machine, choose, powers
from longshift.profile.run import kept
from longshift.program.needs import most, needs
from longshift.workload.groups import Edge

DEFAULTS = {"cpu": 4 << 10, "cuda": 64 << 10}  # tokens, where nothing was measured
FREE_SHARE = 0.8  # of a device's memory: kernels and the allocator need some too


def with_chunks(config: Config, tell: Callable[[str], None]) -> Config:
    """The config with every `chunk-auto` replaced; `tell`: each choice and why. Raises UsageError in a rank, whose peers may be other
    machines and choose differently."""
    if launched():
        raise UsageError(
            "chunk-auto is chosen before ranks start: write the chunk that longshift train CONFIG --explain tells on one machine"
        )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cluster = kept(device, 1, max(1, torch.cuda.device_count()), True, CACHE, tell)
    edges = []
    for edge in config.edges:
        layout = edge.use
        if layout.chunk == AUTO:
            tokens, why = _choice(config, edge, device, cluster)
            layout = replace(layout, chunk=tokens)
            tell(f"{edge.use}: chunks of {format_size(tokens)}: {why}")
        edges.append(replace(edge, use=layout))
    return config.model_copy(update={"layout": edges[0].use if isinstance(config.layout, Layout) else tuple(edges)})


def _choice(config: Config, edge: Edge, device: torch.device, cluster: Cluster | None) -> tuple[int, str]:
    longest = min(edge.upto, config.data.max_len)
    fault = "this machine was not measured; longshift profile does"
    if cluster is not None:
        machine = Machine(cluster, config.train.precision, device.type == "cpu", FREE_SHARE * _memory(config, device))
        try:
            return choose(config.spec, edge.use, longest, machine, partial(_bytes, config, edge, device), config.stream.ahead, edge.pack)
        except UsageError as unknown:
            fault = str(unknown)
    least = least_chunk(longest, edge.pack)
    return max(least, min(DEFAULTS[device.type], powers(longest)[-1])), f"a default, because {fault}"


def _memory(config: Config, device: torch.device) -> int:
    """Bytes of a rank's device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // config.world


def _bytes(config: Config, edge: Edge, device: torch.device, tokens: int) -> int:
    """What a rank needs on its device for a group with chunks of so many tokens."""
    chosen = replace(edge, use=replace(edge.use, chunk=tokens))
    layout = chosen.use if isinstance(config.layout, Layout) else tuple(chosen if one == edge else one for one in config.edges)
    shape = shape_of(config.model_copy(update={"layout": layout}))
    cpu = device.type == "cpu"
    return most(needs(shape, [chosen], "gloo" if cpu else "nccl", cpu)).device.total
