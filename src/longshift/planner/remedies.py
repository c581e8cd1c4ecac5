"""Remedies: the smallest changes that would make something fit, where nothing does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from longshift.layout.home_tiers import TIERS, HomeTiers
from longshift.layout.layout import Layout, format_size
from longshift.planner.candidates import Candidates, enumerate_layouts
from longshift.planner.shortlist import Problem
from longshift.planner.streaming import fits_first_rank

DOUBLINGS = 6  # of devices, and halvings of the longest document, that are tried


def remedies(problem: Problem) -> Iterator[str]:
    """Changes under which the bound of some layout fits, the smallest of each kind, those that cost least first."""
    task, longest = problem.task, problem.task.longest

    def candidates(world: int = task.world, without: str = "") -> Candidates:
        fixed = {name: values for name, values in task.fixed_fields.items() if name != without}
        return enumerate_layouts(task.spec, world, fixed, task.formats.float8).candidates

    for name in task.fixed_fields:
        if layout := smallest_that_fits(problem, candidates(without=name), longest):
            yield f"leave {name} free: {layout}"
    yield from _home_elsewhere(problem)
    yield from _first(
        lambda halving: smallest_that_fits(problem, problem.known.candidates, longest >> halving),
        lambda halving, layout: f"cut documents at {format_size(longest >> halving)} tokens with data.max_len",
    )
    yield from _first(
        lambda doubling: smallest_that_fits(problem, candidates(world=task.world << doubling), longest),
        lambda doubling, layout: f"{task.world << doubling} devices: {layout}",
    )


def _first(layout_of: Callable[[int], Layout | None], text: Callable[[int, Layout], str]) -> Iterator[str]:
    """The change of the first power of two with which something fits."""
    for power in range(1, DOUBLINGS + 1):
        if layout := layout_of(power):
            yield text(power, layout)
            return


def _home_elsewhere(problem: Problem) -> Iterator[str]:
    """The nearest home outside the device with which a layout fits by the ledger, and the layout. A CPU's host is its device."""
    task = problem.task
    outside = replace(problem, training=replace(problem.training, outside=True))
    if problem.training.outside or (layout := smallest_that_fits(outside, problem.known.candidates, task.longest)) is None:
        return
    for tier in TIERS[1:] if task.on_gpu else TIERS[2:]:
        if fits_first_rank(replace(task, home=HomeTiers(tier)), layout):
            yield f"home: {tier}, with {layout}"
            return


def smallest_that_fits(problem: Problem, at: Candidates, longest: int) -> Layout | None:
    """The layout that needs least for packs of so many tokens, where it fits a device."""
    if not len(at) or longest < 1:
        return None
    needs = problem.bytes(at, float(longest))
    number = int(np.argmin(needs))
    return at.layout(number) if needs[number] <= problem.task.budget_bytes else None
