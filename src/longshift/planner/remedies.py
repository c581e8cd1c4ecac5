"""Remedies: the smallest changes that would make something fit, where nothing does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from longshift.layout.home_tiers import TIERS, HomeTiers
from longshift.layout.layout import Layout, format_size
from longshift.planner.candidates import Candidates, enumerate_layouts
from longshift.planner.plan_evaluator import PlanEvaluator
from longshift.planner.shortlist import Problem
from longshift.planner.streaming import streamed_layouts
from longshift.planner.task import PlanTask
from longshift.workload.groups import Edge
from longshift.workload.length_file import Lengths

MAX_DOUBLINGS = 6  # of devices, and halvings of the longest document, that are tried
MAX_WEIGHED = 3  # layouts that the ledger weighs for a change: the bound may prefer a wrong one


def remedies(problem: Problem) -> Iterator[str]:
    """Changes under which some layout fits by the ledger: the smallest of each kind, those that
    cost least first."""
    task = problem.task

    def candidates(world: int = task.world, without: str = "") -> Candidates:
        fixed = {name: values for name, values in task.fixed_fields.items() if name != without}
        return enumerate_layouts(task.spec, world, fixed, task.formats.float8).candidates

    for name in task.fixed_fields:
        if layout := smallest_that_fits(problem, candidates(without=name)):
            yield f"leave {name} free: {layout}"
    yield from _home_outside(problem)
    powers = range(1, MAX_DOUBLINGS + 1)
    for halving in powers:
        shorter = replace(problem, task=_cut(task, task.longest >> halving))
        if smallest_that_fits(shorter, problem.enumeration.candidates):
            yield f"cut documents at {format_size(shorter.task.longest)} tokens with data.max_len"
            break
    for doubling in powers:
        grown = replace(problem, task=replace(task, world=task.world << doubling))
        if layout := smallest_that_fits(grown, candidates(grown.task.world)):
            yield f"{grown.task.world} devices: {layout}"
            break


def _cut(task: PlanTask, longest: int) -> PlanTask:
    """The task with documents of at most so many tokens."""
    longest = max(1, longest)
    lengths = Lengths(np.array([longest]), np.array([1]))
    return replace(task, lengths=lengths, max_len=longest)


def _home_outside(problem: Problem) -> Iterator[str]:
    """The nearest home outside the device with which a layout fits by the ledger, and the
    layout."""
    task = problem.task
    if problem.training.outside:
        return
    tiers = TIERS[1:] if task.on_gpu else TIERS[2:]  # a CPU's host is its device
    for tier in tiers:
        outside = replace(task, home=HomeTiers(tier))
        moved = replace(problem, task=outside, training=outside.training)
        layout = smallest_that_fits(moved, problem.enumeration.candidates)
        if layout is None:
            layout = next(iter(streamed_layouts(moved, first_edge=0)), None)
        if layout is not None:
            yield f"home: {tier}, with {layout}"
            return


def smallest_that_fits(problem: Problem, candidates: Candidates) -> Layout | None:
    """Of the MAX_WEIGHED layouts that need least memory by the bound, the first that fits by the
    ledger; None if none does."""
    if not len(candidates):
        return None
    task = problem.task
    needs = problem.min_bytes(candidates, float(task.longest))
    evaluator = PlanEvaluator(task)
    for index in np.argsort(needs, kind="stable")[:MAX_WEIGHED].tolist():
        layout = candidates.layout(index)
        if needs[index] <= task.budget_bytes and evaluator.fits((Edge(task.longest, layout),)):
            return layout
    return None
