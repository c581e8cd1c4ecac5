"""Collectives, as training calls them (`dist/collectives.Group`), by bytes, ranks and level of link.

At the level `node` groups are consecutive ranks of one node; at `network`, ranks with the same place in different nodes. All groups of a
size run at once, as they do in training. A collective takes as long as its slowest rank.
"""

import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch

from longshift.cluster.cluster import OPERATIONS, Link
from longshift.cluster.curves import Axis, Curve
from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.profile.bench import curve_of

SMALLEST_BYTES, LARGEST_BYTES = 2**12, 2**26
LONGEST_S = {True: 0.03, False: 0.1}  # of one operation, quick or not; sizes go up to where it takes so long
LEAST_S = 5e-3
FEWEST, MOST = 3, 11


def collectives(world: World, per_node: int, quick: bool, budget_s: float) -> dict[str, dict]:
    """Curves `OPERATION LEVEL` over ranks and bytes, as JSON, the same on every rank. All ranks call it together."""
    groups = _groups(world, per_node)
    largest = {level: _largest(world, max(sizes.items())[1], LONGEST_S[quick]) for level, sizes in groups.items()}
    points, runs = [], []
    for level, sizes in groups.items():
        steps = range(round(math.log2(largest[level] / SMALLEST_BYTES)), -1, -4 if quick else -2)
        for operation in OPERATIONS:
            for ranks, group in sizes.items():
                for size in sorted(SMALLEST_BYTES << step for step in steps):
                    points.append((f"{operation} {level}", ranks, size))
                    runs.append((group, _operation(operation, group, size, world.device)))
    samples = _rounds(world, runs, budget_s)
    curves = {}
    for name in dict.fromkeys(name for name, _, _ in points):
        mine = [(ranks, size, rounds) for (at, ranks, size), rounds in zip(points, samples) if at == name]
        # More ranks need not be slower in proportion: the bytes that a rank moves hardly depend on their number.
        axes = Axis("ranks", tuple(sorted({at[0] for at in mine})), 0.0), Axis("bytes", tuple(sorted({at[1] for at in mine})))
        curves[name] = asdict(curve_of(axes, [rounds for _, _, rounds in mine]))
    return curves


def link_of(curve: Curve) -> Link:
    """Latency and bandwidth of the messages that a `send` curve timed: the smallest one's seconds, the largest two's slope."""
    sizes, seconds = curve.axes[-1].sizes, curve.grid.reshape(-1, len(curve.axes[-1].sizes))[0]
    rate = sizes[-1] / seconds[-1]
    if len(sizes) > 1 and seconds[-1] > seconds[-2]:
        rate = (sizes[-1] - sizes[-2]) / (seconds[-1] - seconds[-2])
    return Link(float(rate), float(seconds[0]))


def _groups(world: World, per_node: int) -> dict[str, dict[int, Group]]:
    """This rank's group of every size, by level; made by all ranks together."""
    nodes = world.size // per_node
    wanted: dict[str, dict[int, list[tuple[int, ...]]]] = {"node": {}, "network": {}}
    for size in _powers(per_node):
        starts = (node * per_node + first for node in range(nodes) for first in range(0, per_node, size))
        wanted["node"][size] = [tuple(range(start, start + size)) for start in starts]
    for size in _powers(nodes):
        starts = (first * per_node + place for first in range(0, nodes, size) for place in range(per_node))
        wanted["network"][size] = [tuple(range(start, start + size * per_node, per_node)) for start in starts]
    found: dict[str, dict[int, Group]] = {}
    for level, sizes in wanted.items():
        for size, groups in sizes.items():
            world.prepare(groups, "profile")
            mine = next(ranks for ranks in groups if world.rank in ranks)
            found.setdefault(level, {})[size] = world.group(mine, "profile")
    return found


def _powers(count: int) -> list[int]:
    """Group sizes that divide `count`: its powers of two, and itself."""
    return sorted({n for n in (2, 4, 8, 16, 32, 64) if count % n == 0} | ({count} if count > 1 else set()))


def _largest(world: World, group: Group, longest_s: float) -> int:
    """Bytes at which a send takes `longest_s`, at most LARGEST_BYTES; all ranks agree."""
    size = SMALLEST_BYTES << 4
    while size < LARGEST_BYTES:
        run = _operation("send", group, size, world.device)
        run()
        if _slowest(world, [[_time(world, group, run, 1)]])[0][0] > longest_s:
            break
        size <<= 2
    return size


def _operation(operation: str, group: Group, size_bytes: int, device: torch.device) -> Callable[[], None]:
    """One collective, complete on this rank when it returns (on a GPU: enqueued)."""
    share = max(1, size_bytes // 4 // group.size)
    whole, other = (torch.ones(share * group.size, device=device) for _ in range(2))
    part, rows, shapes = whole[:share].clone(), list(whole.view(group.size, share)), [(share,)] * group.size
    if operation == "send":
        message = torch.ones(max(1, size_bytes // 4), device=device)
        if group.index > 1:
            return lambda: None
        if group.index == 0:
            return lambda: group.send(message, 1, tag=0).wait()
        return lambda: group.receive(message, 0, tag=0).wait()
    return {
        "all_gather": lambda: group.all_gather(whole, part).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
        "all_reduce": lambda: group.start_all_reduce(other).wait(),
        "all_to_all": lambda: group.exchange(rows, shapes)[0].wait(),
    }[operation]


def _rounds(world: World, runs: list[tuple[Group, Callable[[], None]]], budget_s: float) -> list[list[float]]:
    """Seconds of each operation in every round, of the slowest rank."""
    first = []
    for group, run in runs:
        run()
        first.append(_time(world, group, run, 1))
    agreed = _slowest(world, [first])[0]
    repeats = [max(1, math.ceil(LEAST_S / seconds)) for seconds in agreed]
    a_round_s = sum(seconds * count for seconds, count in zip(agreed, repeats))
    rounds = int(min(MOST, max(FEWEST, budget_s / a_round_s)))
    mine = [[_time(world, group, run, count) for (group, run), count in zip(runs, repeats)] for _ in range(rounds)]
    return np.array(_slowest(world, mine)).T.tolist()


def _time(world: World, group: Group, run: Callable[[], None], count: int) -> float:
    """Seconds of one, begun together."""
    group.all_reduce(torch.zeros(1, device=world.device))
    started = world.now()
    for _ in range(count):
        run()
    return (world.now() - started) / count


def _slowest(world: World, mine: list[list[float]]) -> list[list[float]]:
    """Of the ranks, at every place."""
    return world.everyone.all_reduce(torch.tensor(mine, dtype=torch.float64, device=world.device), torch.distributed.ReduceOp.MAX).tolist()
