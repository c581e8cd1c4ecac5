"""Collectives, as training calls them (`dist/collectives.Group`), by bytes, ranks and level of
link.

At the level `node` groups are consecutive ranks of one node; at `network`, ranks with the same
place in different nodes. `network by 4` has four consecutive ranks of each node in a group. All
groups of a size run at once, as they do in training. A collective takes as long as its slowest
rank.

On a CPU what travels takes time of the cores that compute: `cores send` has the processor seconds
of a rank that sends so many bytes and receives as many. And ranks that have computed come to a
collective one after another: `late` has the seconds, over ranks, that a small collective after
matmuls takes beyond both by themselves.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product

import numpy as np
import torch

from longshift.cluster.cluster import OPERATIONS, Link
from longshift.cluster.curves import Curve, SampledSizes
from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.profile.bench import LATEST_S, SHORT_S, curve_of

SMALLEST_BYTES = 2**12
LARGEST_BYTES = 2**26
SENDS = 4  # in a row while processor time is read
LEAST_CORES_S = 1e-6  # of a send, by that
SIDE = 128  # of matmuls before a collective
LEAST_WORK_S = 0.01  # that they take
WORKS = 6  # how often both are done in a row
LATENESSES = {True: 15, False: 5}  # rounds of that, where the cores are free or not
LEAST_LATE_S = 1e-5
# Of one operation, quick or not; sizes go up to where it takes so long.
LONGEST_S = {True: 0.03, False: 0.1}
FEWEST = 3  # rounds
MOST = 11


def collectives(
    world: World, per_node: int, quick: bool, budget_s: float, least_s: float
) -> dict[str, dict]:
    """Curves `OPERATION LEVEL` over ranks and bytes, as JSON, the same on every rank. All ranks
    call it together. `least_s`: of one timing."""
    groups = _groups(world, per_node)

    # 1. What is timed, by curve, ranks and bytes.
    runs: dict[tuple[str, int, int], tuple[Group, Callable[[], None]]] = {}
    for level, sizes in groups.items():
        largest = _largest(world, max(sizes.items())[1], LONGEST_S[quick])
        doublings = round(math.log2(largest / SMALLEST_BYTES))
        for operation in OPERATIONS:
            if operation == "send" and " by " in level:
                continue  # of two ranks, whatever the group
            for ranks, group in sizes.items():
                for size in (
                    SMALLEST_BYTES << step for step in range(doublings % 2, doublings + 1, 2)
                ):
                    runs[f"{operation} {level}", ranks, size] = (
                        group,
                        _operation(operation, group, size, world.device),
                    )
    samples = dict(zip(runs, _rounds(world, list(runs.values()), budget_s, least_s)))

    # 2. A curve of each operation and level.
    curves = {}
    for name in dict.fromkeys(name for name, _, _ in runs):
        points = [point for point in runs if point[0] == name]
        # More ranks need not be slower in proportion: the bytes that a rank moves hardly depend on
        # their number.
        ranks = SampledSizes("ranks", tuple(sorted({ranks for _, ranks, _ in points})), 0.0)
        message_bytes = SampledSizes("bytes", tuple(sorted({size for _, _, size in points})))
        curves[name] = asdict(
            curve_of((ranks, message_bytes), [samples[point] for point in points])
        )
    if world.device.type == "cpu":
        farthest = [point[:2] for point in runs if point[0].startswith("send ")][-1]
        sends = {point[2]: run for point, run in runs.items() if point[:2] == farthest}
        curves["cores send"] = asdict(_cores_of_sends(world, sends))
        by_size = {size: group for sizes in groups.values() for size, group in sizes.items()}
        curves["late"] = asdict(
            _lateness(world, by_size, max(LEAST_WORK_S, least_s), LATENESSES[least_s <= SHORT_S])
        )
    return curves


def _cores_of_sends(world: World, sends: Mapping[int, tuple[Group, Callable[[], None]]]) -> Curve:
    """Processor seconds of a rank that sends and receives, over bytes: of both ranks of a group
    that send and receive, the mean of all groups."""
    seconds = []
    for group, run in sends.values():
        for _ in range(FEWEST):
            group.all_reduce(torch.zeros(1))
            begin_s = time.process_time()
            for _ in range(SENDS):
                run()
            seconds.append((time.process_time() - begin_s) / SENDS)
    groups = world.size / next(iter(sends.values()))[0].size
    totals = world.everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64)) / groups
    samples = totals.view(len(sends), FEWEST).clamp_min(LEAST_CORES_S).tolist()
    return curve_of((SampledSizes("bytes", tuple(sends)),), samples)


def _lateness(world: World, groups: Mapping[int, Group], work_s: float, rounds: int) -> Curve:
    """How much longer ranks take for computing `work_s` and a small collective than for both by
    themselves, over ranks of a group. Ranks end their computing at random within some time: the
    last of n comes after n / (n + 1) of it on average, and any one after half of it. That time is
    what groups of all sizes show together."""
    x = torch.ones(SIDE, SIDE)
    out = torch.empty_like(x)

    def works(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x, out=out)

    def meets(count: int, collective: Callable[[], None]) -> None:
        works(count)
        collective()

    # 1. As many matmuls as take `work_s` on the slowest rank.
    works(1)
    matmul_s = _time(world, world.everyone, partial(works, 8), 1) / 8
    slowest_s = _slowest(world, [[matmul_s]])[0][0]
    count = max(1, round(work_s / slowest_s))

    # 2. How late each rank is in groups of each size.
    sizes = sorted(groups)
    late_s = []
    for _ in range(rounds):
        for size in sizes:
            group = groups[size]
            small = _operation("all_to_all", group, SMALLEST_BYTES, world.device)
            together_s = _time(world, group, partial(meets, count, small), WORKS)
            collective_s = _time(world, group, small, WORKS)
            computing_s = _time(world, group, partial(works, count), WORKS)
            late_s.append(together_s - (collective_s + computing_s))
    totals = world.everyone.all_reduce(torch.tensor(late_s, dtype=torch.float64))

    # 3. The time within which ranks end their computing, of all sizes together.
    means = totals.view(rounds, -1) / world.size
    shares = torch.tensor([size / (size + 1) - 0.5 for size in sizes], dtype=torch.float64)
    within_s = (means.sum(1) / shares.sum()).clamp_min(LEAST_LATE_S)
    return curve_of(
        (SampledSizes("ranks", tuple(map(float, sizes)), 0.0),),
        (shares[:, None] * within_s).tolist(),
    )


def link_of(curve: Curve) -> Link:
    """Latency and bandwidth of the messages that a `send` curve timed: the smallest one's seconds,
    the largest two's slope."""
    sizes = curve.axes[-1].sizes
    seconds = curve.grid.reshape(-1, len(sizes))[0]
    rate = sizes[-1] / seconds[-1]
    if len(sizes) > 1 and seconds[-1] > seconds[-2]:
        rate = (sizes[-1] - sizes[-2]) / (seconds[-1] - seconds[-2])
    return Link(float(rate), float(seconds[0]))


def _groups(world: World, per_node: int) -> dict[str, dict[int, Group]]:
    """This rank's group of every size, by level; made by all ranks together."""
    nodes = world.size // per_node
    groups_of: dict[str, dict[int, Group]] = {}
    for count, inside in product((1, *_powers(nodes)), (1, *_powers(per_node))):
        if count == inside == 1:
            continue
        level = "node" if count == 1 else "network" if inside == 1 else f"network by {inside}"
        groups = []
        for first_node, first_place in product(range(0, nodes, count), range(0, per_node, inside)):
            group_nodes = range(first_node, first_node + count)
            places = range(first_place, first_place + inside)
            ranks = tuple(node * per_node + place for node, place in product(group_nodes, places))
            groups.append(ranks)
        world.prepare(groups, "profile")
        rank_group = next(ranks for ranks in groups if world.rank in ranks)
        groups_of.setdefault(level, {})[count * inside] = world.group(rank_group, "profile")
    return groups_of


def _powers(count: int) -> list[int]:
    """Group sizes that divide `count`: its powers of two, and itself."""
    return sorted(
        {n for n in (2, 4, 8, 16, 32, 64) if count % n == 0} | ({count} if count > 1 else set())
    )


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


def _operation(
    operation: str, group: Group, size_bytes: int, device: torch.device
) -> Callable[[], None]:
    """One collective, complete on this rank when it returns (on a GPU: enqueued)."""
    share = max(1, size_bytes // 4 // group.size)
    buffer = torch.ones(share * group.size, device=device)
    sums = torch.ones(share * group.size, device=device)
    part = buffer[:share].clone()
    rows = list(buffer.view(group.size, share))
    shapes = [(share,)] * group.size
    if operation == "send":
        message = torch.ones(max(1, size_bytes // 4), device=device)
        if group.index > 1:
            return lambda: None
        if group.index == 0:
            return lambda: group.send(message, 1, tag=0).wait()
        return lambda: group.receive(message, 0, tag=0).wait()
    return {
        "all_gather": lambda: group.all_gather(buffer, part).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, buffer).wait(),
        "all_reduce": lambda: group.start_all_reduce(sums).wait(),
        "all_to_all": lambda: group.exchange(rows, shapes)[0].wait(),
    }[operation]


def _rounds(
    world: World, runs: list[tuple[Group, Callable[[], None]]], budget_s: float, least_s: float
) -> list[list[float]]:
    """Seconds of each operation in every round, of the slowest rank."""
    first = []
    begin_s = world.now()
    for group, run in runs:
        run()
        first.append(_time(world, group, run, 1))
    *agreed, first_s = _slowest(world, [[*first, world.now() - begin_s]])[0]
    least_s = min(least_s, budget_s / (FEWEST * len(runs)))
    repeats = [max(1, math.ceil(least_s / seconds)) for seconds in agreed]
    # Where others run on the cores, ranks wait for one another: the first operations took longer
    # than the sum of their seconds.
    a_round_s = first_s + sum(seconds * (count - 1) for seconds, count in zip(agreed, repeats))
    fewest = FEWEST if FEWEST * a_round_s <= LATEST_S else 1
    rounds = int(min(MOST, max(fewest, budget_s / a_round_s)))
    samples = []
    for _ in range(rounds):
        samples.append([_time(world, group, run, n) for (group, run), n in zip(runs, repeats)])
    return np.array(_slowest(world, samples)).T.tolist()


def _time(world: World, group: Group, run: Callable[[], None], count: int) -> float:
    """Seconds of one, begun together."""
    group.all_reduce(torch.zeros(1, device=world.device))
    started = world.now()
    for _ in range(count):
        run()
    return (world.now() - started) / count


def _slowest(world: World, seconds: list[list[float]]) -> list[list[float]]:
    """The seconds of the slowest rank, at every place."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    return world.everyone.all_reduce(tensor, torch.distributed.ReduceOp.MAX).tolist()
