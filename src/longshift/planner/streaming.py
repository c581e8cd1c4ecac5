"""Streaming: layouts in chunks for documents that no layout of whole packs holds (`schedule.chunks`).

By rate cards a streamed layout takes what the same mesh takes under recompute-full: its backward computes a block again from its input, but
attention. What waits in tiers is taken to travel under that. So its seconds are a lower bound, and the clock has the last word.
"""

from dataclasses import replace

import numpy as np

from longshift.layout import legal
from longshift.layout.layout import Layout
from longshift.planner.shortlist import Problem
from longshift.planner.task import Task
from longshift.simulate.cost import RECOMPUTE
from longshift.workload.groups import Edge

MOST_MESHES = 3
CHUNKS = ((1 << 16, "device"), (1 << 16, "host"), (1 << 14, "host"), (1 << 14, "disk"))  # tokens and tier, in the order that they are tried


def streamed_layouts(problem: Problem, before: int) -> list[Layout]:
    """The fastest meshes for documents longer than edge `before` of the tally (0: all), each with the first of CHUNKS that fits."""
    task, at = problem.task, problem.known.candidates
    is_able = (at.pp == 1) & (at.recompute == RECOMPUTE.index("full")) & ((at.zero == 3) | (at.holders == 1))
    at = at.take(np.flatnonzero(is_able))
    load = problem.tally.between(before, len(problem.tally.edges))
    found = problem.seconds(at, float(task.longest), load)
    fastest = np.argsort(found.group + found.once, kind="stable")[:MOST_MESHES].tolist()
    fitting = (_first_that_fits(task, replace(at.layout(number), recompute="none")) for number in fastest)
    return [layout for layout in fitting if layout is not None]


def _first_that_fits(task: Task, mesh: Layout) -> Layout | None:
    for chunk, tier in CHUNKS:
        layout = replace(mesh, chunk=chunk, offload=tier)
        if chunk < task.longest and not legal.faults(task.spec, layout, task.world, task.longest) and fits_first_rank(task, layout):
            return layout
    return None


def fits_first_rank(task: Task, layout: Layout) -> bool:
    """Whether every place has room for what the first rank needs in the largest step of this layout alone."""
    edges = (Edge(task.longest, layout),)
    weighed = task.step_shape(edges, early=False).estimate(edges, 0, task.transport, not task.on_gpu)
    limits = task.limits
    return all(peak.total <= limits[place] for place, peak in weighed.peaks.items())
