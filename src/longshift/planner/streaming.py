"""Streaming: layouts in chunks for documents that no layout of whole packs holds
(`schedule.block_events`).

By rate cards a streamed layout takes what the same mesh takes under recompute-full: its backward
recomputes a block from its input, except attention. Offloading is assumed to be hidden under that.
So its seconds are a lower bound, and the clock has the last word.
"""

from dataclasses import replace

import numpy as np

from longshift.layout import legal
from longshift.layout.layout import Layout
from longshift.planner.shortlist import Problem
from longshift.planner.task import PlanTask
from longshift.simulate.cost import RECOMPUTE
from longshift.workload.groups import Edge

MAX_MESHES = 3
# Tokens and tier, in the order in which they are tried.
CHUNKS = ((1 << 16, "device"), (1 << 16, "host"), (1 << 14, "host"), (1 << 14, "disk"))


def streamed_layouts(problem: Problem, first_edge: int) -> list[Layout]:
    """The fastest meshes, each with the first of CHUNKS that fits.

    `first_edge`: they compute the documents longer than this edge of the tally; 0: all.
    """
    candidates = problem.enumeration.candidates
    # The layouts that cost by rate card what a streamed one does: see the module.
    is_full = candidates.recompute == RECOMPUTE.index("full")
    holders = candidates.state_holders(problem.task.spec.experts > 0)
    is_sharded = (candidates.zero == 3) | (holders == 1)
    can_stream = (candidates.pp == 1) & is_full & is_sharded
    candidates = candidates.take(np.flatnonzero(can_stream))
    load = problem.tally.between(first_edge, len(problem.tally.edges))
    seconds = problem.step_seconds(candidates, float(problem.task.longest), load)
    layouts = []
    for index in np.argsort(seconds, kind="stable")[:MAX_MESHES].tolist():
        mesh = replace(candidates.layout(index), recompute="none")
        layout = _first_fitting_chunk(problem.task, mesh)
        if layout is not None:
            layouts.append(layout)
    return layouts


def _first_fitting_chunk(task: PlanTask, mesh: Layout) -> Layout | None:
    for chunk, tier in CHUNKS:
        layout = replace(mesh, chunk=chunk, offload=tier)
        # A chunk that holds the longest document streams nothing.
        if chunk >= task.longest or legal.faults(task.spec, layout, task.world, task.longest):
            continue
        if fits_first_rank(task, layout):
            return layout
    return None


def fits_first_rank(task: PlanTask, layout: Layout) -> bool:
    """Whether every place has room for what the first rank needs in the largest step of this layout
    alone."""
    edges = (Edge(task.longest, layout),)
    shape = task.step_shape(edges, early=False)
    weighed = shape.estimate(edges, 0, task.transport)
    limits = task.limits
    return all(peak.total <= limits[place] for place, peak in weighed.peaks.items())
