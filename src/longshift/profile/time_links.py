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

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product

import torch

from longshift.cluster.cluster import OPERATIONS, Link, Operation
from longshift.cluster.curves import Curve, SampledSizes
from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.profile.bench import FEWEST, SHORT_S, Bench, CurveSpec, Run, curve_of

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


def collectives(
    world: World, per_node: int, quick: bool, budget_s: float, least_s: float
) -> dict[str, dict]:
    """Curves `OPERATION LEVEL` over ranks and bytes, as JSON, the same on every rank. All ranks
    call it together. `least_s`: of one timing."""
    bench = Bench(world.device, quick, least_s, world)
    levels = _groups(world, per_node)

    # 1. Every operation at every level.
    specs = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for level, groups in levels.items():
        sizes[level] = _sizes(bench, groups[max(groups)])
        # More ranks need not be slower in proportion: the bytes that a rank moves hardly depend on
        # their number.
        axes = SampledSizes("ranks", tuple(groups), 0.0), SampledSizes("bytes", sizes[level])
        for operation in OPERATIONS:
            if operation == "send" and " by " in level:
                continue  # of two ranks, whatever the group
            prepare = _preparation(operation, groups, world.device)
            specs[f"{operation} {level}"] = CurveSpec(axes, prepare)
    curves = bench.curves(specs, budget_s)

    # 2. What traffic takes of a CPU's ranks that compute.
    if world.device.type == "cpu":
        farthest = [level for level in levels if " by " not in level][-1]
        groups = levels[farthest]
        curves["cores send"] = _cores_of_sends(world, groups[max(groups)], sizes[farthest])
        by_size = {size: group for groups in levels.values() for size, group in groups.items()}
        curves["late"] = _lateness(bench, world, by_size)
    return {name: asdict(curve) for name, curve in curves.items()}


def _cores_of_sends(world: World, group: Group, sizes: tuple[int, ...]) -> Curve:
    """Processor seconds of a rank that sends and receives, over bytes: of both ranks of a group
    that send and receive, the mean of all groups."""
    seconds = []
    for size in sizes:
        send = _operation("send", group, size, world.device)
        for _ in range(FEWEST):
            group.all_reduce(torch.zeros(1))  # ranks begin together
            begin_s = time.process_time()
            for _ in range(SENDS):
                send()
            seconds.append((time.process_time() - begin_s) / SENDS)

    groups = world.size / group.size
    totals = world.everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64)) / groups
    samples = totals.view(len(sizes), FEWEST).clamp_min(LEAST_CORES_S).tolist()
    return curve_of((SampledSizes("bytes", sizes),), samples)


def _lateness(bench: Bench, world: World, groups: Mapping[int, Group]) -> Curve:
    """How much longer ranks take for matmuls and a small collective than for both by themselves,
    over ranks of a group. Ranks end their computing at random within some time: the last of n comes
    after n / (n + 1) of it on average, and any one after half of it. That time is what groups of
    all sizes show together."""
    x = torch.ones(SIDE, SIDE)
    out = torch.empty_like(x)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x, out=out)

    def compute_and_meet(count: int, collective: Run) -> None:
        compute(count)
        collective()

    # 1. As many matmuls as take long enough on the slowest rank.
    compute(1)
    [matmul_s] = bench.slowest([bench.time(partial(compute, 8), 1) / 8])
    count = max(1, round(max(LEAST_WORK_S, bench.least_s) / matmul_s))

    # 2. How late each rank is in groups of each size.
    sizes = sorted(groups)
    rounds = LATENESSES[bench.least_s <= SHORT_S]
    late_s = []
    for _ in range(rounds):
        for size in sizes:
            small = _operation("all_to_all", groups[size], SMALLEST_BYTES, world.device)
            together_s = bench.time(partial(compute_and_meet, count, small), WORKS)
            collective_s = bench.time(small, WORKS)
            computing_s = bench.time(partial(compute, count), WORKS)
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
    """This rank's group of every size, ascending, by level; made by all ranks together."""
    nodes = world.size // per_node
    groups_of: dict[str, dict[int, Group]] = {}
    for count, inside in product((1, *_powers(nodes)), (1, *_powers(per_node))):
        if count == inside == 1:
            continue
        level = "network" if inside == 1 else f"network by {inside}"
        if count == 1:
            level = "node"
        groups = []
        for first_node, first_place in product(range(0, nodes, count), range(0, per_node, inside)):
            ranks = []
            for node in range(first_node, first_node + count):
                first_rank = node * per_node + first_place
                ranks += range(first_rank, first_rank + inside)
            groups.append(tuple(ranks))

        # All ranks make all groups, in one order: `World.prepare` asks for it.
        world.prepare(groups, "profile")
        rank_group = next(ranks for ranks in groups if world.rank in ranks)
        groups_of.setdefault(level, {})[count * inside] = world.group(rank_group, "profile")
    return groups_of


def _powers(count: int) -> list[int]:
    """Group sizes that divide `count`, ascending: its powers of two, and itself."""
    return sorted(
        {n for n in (2, 4, 8, 16, 32, 64) if count % n == 0} | ({count} if count > 1 else set())
    )


def _sizes(bench: Bench, group: Group) -> tuple[int, ...]:
    """Bytes of the operations that are timed, up to where a send takes too long or LARGEST_BYTES;
    all ranks agree."""
    sizes = [SMALLEST_BYTES, SMALLEST_BYTES << 2, SMALLEST_BYTES << 4]

    while sizes[-1] < LARGEST_BYTES:
        send = _operation("send", group, sizes[-1], bench.device)
        send()  # warm

        # Of all ranks, so that they agree where to stop.
        [slowest_s] = bench.slowest([bench.time(send, 1)])
        if slowest_s > LONGEST_S[bench.quick]:
            break
        sizes.append(sizes[-1] << 2)
    return tuple(sizes)


def _preparation(
    operation: Operation, groups: Mapping[int, Group], device: torch.device
) -> Callable[[int, int], Run]:
    """What makes an operation of so many ranks and bytes."""
    return lambda ranks, size_bytes: _operation(operation, groups[ranks], size_bytes, device)


def _operation(operation: Operation, group: Group, size_bytes: int, device: torch.device) -> Run:
    """One collective, complete on this rank when it returns (on a GPU: enqueued)."""
    if operation == "send":
        message = torch.ones(max(1, size_bytes // 4), device=device)
        # A message has two ends: other ranks of the group have nothing to do.
        if group.index > 1:
            return lambda: None
        if group.index == 0:
            return lambda: group.send(message, 1, tag=0).wait()
        return lambda: group.receive(message, 0, tag=0).wait()

    share = max(1, size_bytes // 4 // group.size)
    buffer = torch.ones(share * group.size, device=device)
    part = torch.ones(share, device=device)
    rows = list(buffer.view(group.size, share))
    shapes = [(share,)] * group.size
    runs: dict[str, Run] = {
        "all_gather": lambda: group.all_gather(buffer, part).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, buffer).wait(),
        "all_reduce": lambda: group.start_all_reduce(buffer).wait(),
        "all_to_all": lambda: group.exchange(rows, shapes)[0].wait(),
    }
    return runs[operation]
