"""Remedies: what a plan is bound by, what is short, and the smallest changes that would make something fit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.home_tiers import TIERS, HomeTiers
from longshift.layout.layout import format_size
from longshift.planner.chosen import GIB, Answer, Rival
from longshift.planner.enumerated import Fixed, Meshes, enumerate_layouts
from longshift.planner.least_bytes import beyond_device
from longshift.planner.streaming import bytes_by_place
from longshift.planner.survive import Compared, Problem, Statics

MOST_RIVALS = 3  # that do not fit
NEAREST = 4096  # of those that do not fit, that are timed
DOUBLINGS = 6  # of devices, and halvings of the longest document, that are tried


def binding(budget_bytes: float, best: Answer) -> str:
    """What the choice is bound by: the group that leaves least memory."""
    most = max(best.groups, key=lambda group: group.device_bytes)
    left = (budget_bytes - most.device_bytes) / GIB
    return f"fits, {left:.1f} GiB left in {most.layout} with packs of {format_size(most.pack)}"


def too_large(problem: Problem, at: Meshes, found: Compared, statics: Statics) -> tuple[Rival, ...]:
    """Single layouts that would be faster than the best one and do not fit the longest documents, those that lack least first."""
    longest = float(problem.tally.edges[-1])
    out = np.flatnonzero(~np.isfinite(found.seconds[:, -1]) & np.isfinite(found.seconds[:, 0]))
    if not len(out):
        return ()
    short = problem.bytes(at.take(out), longest) - problem.budget_bytes
    nearest = np.argsort(short, kind="stable")[:NEAREST]
    out, short = out[nearest], short[nearest]
    group, once = problem.expected(at.take(out), longest, 0, len(problem.tally.edges))
    seconds, first = group + once, statics.seconds[0]
    some = [n for n in range(len(out)) if seconds[n] < first and short[n] > 0][:MOST_RIVALS]
    return tuple(Rival(str(at.layout(int(out[n]))), float(seconds[n] / first - 1), float(short[n])) for n in some)


def remedies(problem: Problem, cluster: Cluster, at: Meshes, fixed: Fixed) -> tuple[str, tuple[str, ...]]:
    """What the layout that needs least lacks; and changes under which the bound of some layout fits, the smallest of each kind."""
    longest = int(problem.tally.edges[-1])
    if not len(at):
        return "no layout is possible under the rules", ()
    needs = problem.bytes(at, float(longest))
    least = int(np.argmin(needs))
    lacking = (needs[least] - problem.budget_bytes) / GIB
    where = f"{at.layout(least)} with packs of {format_size(longest)}"
    told = f"{where} lacks {lacking:.1f} GiB of {problem.budget_bytes / GIB:.1f} GiB a device at the least"
    return told, tuple(_changes(problem, cluster, at, fixed, longest))


def _changes(problem: Problem, cluster: Cluster, at: Meshes, fixed: Fixed, longest: int) -> list[str]:
    changes = []
    for name in fixed:
        freed: Mapping[str, Sequence[int | str]] = {key: value for key, value in fixed.items() if key != name}
        more = enumerate_layouts(problem.spec, cluster.devices, freed, problem.formats.float8).meshes
        if (number := _least(problem, more, longest)) is not None:
            changes.append(f"leave {name} free: {more.layout(number)}")
    if (other := _elsewhere(problem, cluster, at, longest)) is not None:
        changes.append(other)
    for halving in range(1, DOUBLINGS + 1):
        if _least(problem, at, longest >> halving) is not None:
            changes.append(f"cut documents at {format_size(longest >> halving)} tokens with data.max_len")
            break
    for doubling in range(1, DOUBLINGS + 1):
        devices = cluster.devices << doubling
        more = enumerate_layouts(problem.spec, devices, fixed, problem.formats.float8).meshes
        if (number := _least(problem, more, longest)) is not None:
            changes.append(f"{devices} devices: {more.layout(number)}")
            break
    return changes


def _elsewhere(problem: Problem, cluster: Cluster, at: Meshes, longest: int) -> str | None:
    """The nearest home outside the device with which a layout fits by the ledger, and the layout. A CPU's host is its device."""
    number = None if problem.outside else _least(replace(problem, outside=True), at, longest)
    if number is None:
        return None
    layout, tiers = at.layout(number), TIERS[2:] if problem.on_cpu else TIERS[1:]
    room = (problem.budget_bytes, *beyond_device(cluster))
    for tier in tiers:
        if all(need <= most for need, most in zip(bytes_by_place(problem, cluster, layout, longest, HomeTiers(tier)), room)):
            return f"home: {tier}, with {layout}"
    return None


def _least(problem: Problem, at: Meshes, longest: int) -> int | None:
    """The layout that needs least for packs of so many tokens, where it fits."""
    if not len(at) or longest < 1:
        return None
    needs = problem.bytes(at, float(longest))
    number = int(np.argmin(needs))
    return number if needs[number] <= problem.budget_bytes else None
