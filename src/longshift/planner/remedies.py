"""Remedies: the smallest changes that would make something fit, where nothing does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from longshift.layout.home_tiers import TIERS, HomeTiers
from longshift.layout.layout import Layout, format_size
from longshift.planner.candidates import Candidates, enumerate_layouts
from longshift.planner.shortlist import Problem
from longshift.planner.streaming import fits_first_rank

MAX_DOUBLINGS = 6  # of devices, and halvings of the longest document, that are tried


def remedies(problem: Problem) -> Iterator[str]:
    """Changes under which the bound of some layout fits: the smallest of each kind, those that cost
    least first."""
    task = problem.task
    longest = task.longest

    def candidates(world: int = task.world, without: str = "") -> Candidates:
        fixed = {name: values for name, values in task.fixed_fields.items() if name != without}
        return enumerate_layouts(task.spec, world, fixed, task.formats.float8).candidates

    for name in task.fixed_fields:
        if layout := smallest_that_fits(problem, candidates(without=name), longest):
            yield f"leave {name} free: {layout}"
    yield from _home_outside(problem)
    powers = range(1, MAX_DOUBLINGS + 1)
    for halving in powers:
        shorter = longest >> halving
        if smallest_that_fits(problem, problem.enumeration.candidates, shorter):
            yield f"cut documents at {format_size(shorter)} tokens with data.max_len"
            break
    for doubling in powers:
        world = task.world << doubling
        if layout := smallest_that_fits(problem, candidates(world), longest):
            yield f"{world} devices: {layout}"
            break


def _home_outside(problem: Problem) -> Iterator[str]:
    """The nearest home outside the device with which a layout fits by the ledger, and the
    layout."""
    task = problem.task
    if problem.training.outside:
        return
    outside = replace(problem, training=replace(problem.training, outside=True))
    layout = smallest_that_fits(outside, problem.enumeration.candidates, task.longest)
    if layout is None:
        return
    tiers = TIERS[1:] if task.on_gpu else TIERS[2:]  # a CPU's host is its device
    for tier in tiers:
        if fits_first_rank(replace(task, home=HomeTiers(tier)), layout):
            yield f"home: {tier}, with {layout}"
            return


def smallest_that_fits(problem: Problem, candidates: Candidates, longest: int) -> Layout | None:
    """The layout that needs least memory for packs of so many tokens; None if it does not fit a
    device."""
    if not len(candidates) or longest < 1:
        return None
    needs = problem.min_bytes(candidates, float(longest))
    index = int(np.argmin(needs))
    return candidates.layout(index) if needs[index] <= problem.task.budget_bytes else None
