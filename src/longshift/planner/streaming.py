"""Streaming: layouts in chunks for documents that no layout of whole packs holds (`schedule.chunks`).

In closed form a streamed layout takes what the same mesh takes under recompute-full: its backward computes a block again from its
input, but attention. What waits in tiers is taken to travel under that. So its seconds are a lower bound, and the clock has
the last word.
"""

from dataclasses import dataclass, replace

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout import legal
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.planner.enumerated import Meshes
from longshift.planner.least_bytes import beyond_device, reserved
from longshift.planner.survive import Problem
from longshift.simulate.cost import RECOMPUTE
from longshift.switch.itinerary import Itinerary, SwitchOptions
from longshift.switch.links import links_of
from longshift.weigh.needs import StepShape
from longshift.workload.groups import Edge

MOST_MESHES = 3  # that are weighed, fastest first
CHUNKS = ((1 << 16, "device"), (1 << 16, "host"), (1 << 14, "host"), (1 << 14, "disk"))  # tokens and tier, in the order that they are tried


@dataclass(frozen=True, eq=False)
class Streamed:
    """A streamed layout that fits: `mesh`, the candidate of whole packs that its seconds are taken from; bytes of a device, of its host's
    memory and of disk."""

    layout: Layout
    mesh: Meshes
    device_bytes: float
    host_bytes: float
    disk_bytes: float

    def seconds(self, problem: Problem, before: int) -> float:
        """Of a step as expected, for documents longer than edge `before` of the tally (0: all)."""
        edges = problem.tally.edges
        group, once = problem.expected(self.mesh, float(edges[-1]), before, len(edges))
        return float(group[0] + once[0])


def streamed(
    problem: Problem,
    cluster: Cluster,
    at: Meshes,
    before: int,
    more_bytes: float = 0.0,
    home: HomeTiers = HomeTiers(),  # noqa: B008
) -> Streamed | None:
    """The fastest mesh for documents longer than edge `before` of the tally (0: all), and chunks and tier with which the longest ones fit
    and leave `more_bytes`; None where none is found. `home`: where the training state lies."""
    edges = problem.tally.edges
    longest = int(edges[-1])
    able = (at.pp == 1) & (at.recompute == RECOMPUTE.index("full")) & ((at.zero == 3) | (at.holders == 1))
    some = at.take(np.flatnonzero(able))
    if not len(some):
        return None
    group, once = problem.expected(some, float(longest), before, len(edges))
    seconds = group + once
    for number in map(int, np.argsort(seconds, kind="stable")[:MOST_MESHES]):
        whole = replace(some.layout(number), recompute="none")
        for chunk, tier in CHUNKS:
            layout = replace(whole, chunk=chunk, offload=tier)
            if chunk >= longest or legal.faults(problem.spec, layout, layout.world, longest):
                continue
            device, host, disk = bytes_by_place(problem, cluster, layout, longest, home)
            most = problem.budget_bytes - more_bytes, *beyond_device(cluster)
            if all(need <= limit for need, limit in zip((device, host, disk), most)):
                return Streamed(layout, some.take(np.array([number])), device + more_bytes, host, disk)
    return None


def bytes_by_place(problem: Problem, cluster: Cluster, layout: Layout, longest: int, home: HomeTiers) -> tuple[float, float, float]:
    """Bytes that the first rank needs in the largest step, by place."""
    edges, formats = (Edge(longest, layout),), problem.formats
    links = links_of(cluster, cluster.devices_per_node, cluster.nodes)
    way = Itinerary(problem.spec, edges, links, formats.compute_bytes, formats.home_bytes, SwitchOptions())
    shape = StepShape(way, edges, formats, int(problem.tokens_per_step), longest, home_in=home, early=False)
    peaks = shape.weighed(edges, 0, "gloo" if problem.on_cpu else "nccl", problem.on_cpu).peaks
    device, host, disk = (float(peaks[place].total) if place in peaks else 0.0 for place in ("device", "host", "disk"))
    return float(reserved(device, problem.on_cpu)), host, disk
