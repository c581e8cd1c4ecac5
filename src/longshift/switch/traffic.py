"""What a plan puts on the links, and the least time they need for it."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from longshift.switch.links import Links
from longshift.switch.plan import Plan, world_of
from longshift.switch.slices import refine
from longshift.switch.spread import BoxesByWeight


@dataclass(frozen=True)
class Traffic:
    """Bytes of a plan by link, and the seconds that they take.

    `bound_s`: all links at work at one time, bandwidth alone. `overlapped_s`: in exchanges one
    after another, each a bucket's first round with the second round of the bucket before, latency
    included. `in_order_s`: an exchange for every round.
    """

    max_received_bytes: int
    inter_node_bytes: int
    intra_node_bytes: int
    bound_s: float
    overlapped_s: float
    in_order_s: float
    by_node: tuple[tuple[int, ...], ...]  # from node, to node; the diagonal is inside nodes

    def __str__(self) -> str:
        inside_gb = self.intra_node_bytes / 1e9
        between_gb = self.inter_node_bytes / 1e9
        total = f"{inside_gb:.3g} GB inside nodes, {between_gb:.3g} GB between them"
        lines = [f"{total}, at least {self.bound_s:.3g} s"]
        for source, row in enumerate(self.by_node if between_gb else ()):
            parts = [f"  node {source}: {row[source] / 1e9:.3g} GB inside"]
            # Most pairs of nodes of a large world exchange nothing.
            for target, size in enumerate(row):
                if size and target != source:
                    parts.append(f"{size / 1e9:.3g} GB to node {target}")
            lines.append(", ".join(parts))
        return "\n".join(lines)


def traffic(plan: Plan) -> Traffic:
    """What a plan puts on the links. Of a device's links to its node and to other nodes, one way
    each, the busiest sets the time."""
    links = plan.links
    pairs = plan.bytes_by_pair
    starts = np.arange(0, plan.world, links.per_node)
    by_node = np.add.reduceat(np.add.reduceat(pairs, starts, 0), starts, 1)
    round_bytes = _by_round(plan)
    # As if all of it were one exchange.
    total_bytes = round_bytes.sum((0, 1))[None]
    exchange_bytes = _by_exchange(plan, round_bytes)
    return Traffic(
        max_received_bytes=int(pairs.sum(0).max()),
        inter_node_bytes=int(by_node.sum() - by_node.trace()),
        intra_node_bytes=int(by_node.trace()),
        bound_s=float(_seconds(total_bytes, replace(links, latency_s=0.0)).sum()),
        overlapped_s=float(_seconds(exchange_bytes, links).sum()),
        in_order_s=float(_seconds(round_bytes.reshape(-1, 4, plan.world), links).sum()),
        by_node=tuple(tuple(map(int, row)) for row in by_node),
    )


def least_s(held: BoxesByWeight, wanted: BoxesByWeight, links: Links, itemsize: int) -> float:
    """Lower bound of `bound_s` for `fan_out` and `algorithm1`, some fifty times faster than a plan.

    It is the time of the busiest link of a node or a rank, where all that a planner may choose is
    dealt evenly. A slice enters a node without holders once, from the holders' node where there is
    only one. Otherwise it moves inside the node, from the holder where there is only one.
    """
    world = world_of(held, wanted)
    starts = np.arange(0, world, min(links.per_node, world))
    devices = np.diff(np.append(starts, world))
    node = np.repeat(np.arange(len(starts)), devices)
    sent_inside = np.zeros(world, np.int64)  # by rank
    received_inside = np.zeros(world, np.int64)
    sent_between = np.zeros(len(starts), np.int64)  # by node
    received_between = np.zeros(len(starts), np.int64)

    pairs = Counter((held[name], wanted[name]) for name in wanted)
    for (source, target), count in pairs.items():
        slices = refine(source, target, world, itemsize, None)
        size = count * slices.size_bytes
        holders = np.add.reduceat(slices.has, starts, 1, dtype=np.int64)
        lacking = np.add.reduceat(slices.needs, starts, 1, dtype=np.int64)
        has_holder = holders > 0

        entering = (lacking > 0) & ~has_holder
        received_between += size @ entering
        is_one_node = has_holder.sum(1) == 1
        sent_between += (size * entering.sum(1) * is_one_node) @ has_holder

        received_inside += size @ (slices.needs & has_holder[:, node])
        is_one_holder = holders[:, node] == 1
        sent_inside += size @ (slices.has & is_one_holder * lacking[:, node])

    inside_bytes = max(sent_inside.max(), received_inside.max())
    between_bytes = np.maximum(sent_between, received_between) / devices
    return max(
        float(inside_bytes) / links.intra_bytes_s,
        float(between_bytes.max()) / links.inter_bytes_s,
    )


def seconds_by_exchange(plan: Plan) -> list[float]:
    """Seconds of each exchange of a plan, one after another as in `Traffic.overlapped_s`."""
    return _seconds(bytes_by_exchange(plan), plan.links).tolist()


def bytes_by_exchange(plan: Plan) -> np.ndarray:
    """Bytes of every exchange by rank, sent and received inside nodes, sent and received between
    them: int64 [exchanges, 4, world]."""
    return _by_exchange(plan, _by_round(plan))


def _seconds(loads: np.ndarray, links: Links) -> np.ndarray:
    """Seconds of each exchange, int64 [exchanges, 4, world]; one that moves nothing takes no
    time."""
    rates = np.array(
        (links.intra_bytes_s, links.intra_bytes_s, links.inter_bytes_s, links.inter_bytes_s)
    )
    return (loads.max(2) / rates).max(1) + links.latency_s * loads.any((1, 2))


def _by_exchange(plan: Plan, round_bytes: np.ndarray) -> np.ndarray:
    """Bytes of every exchange, each a bucket's first round with later rounds of the buckets before:
    int64 [exchanges, 4, world]."""
    exchange_bytes = np.zeros((plan.exchanges, 4, plan.world), np.int64)
    for number in range(plan.rounds):
        exchange_bytes[number : number + plan.buckets] += round_bytes[:, number]
    return exchange_bytes


def _by_round(plan: Plan) -> np.ndarray:
    """Bytes of every round of every bucket, sent and received inside nodes, sent and received
    between them: int64 [buckets, rounds, 4, world]."""
    loads = np.zeros((plan.buckets, plan.rounds, 4, plan.world), np.int64)
    per_node = plan.links.per_node
    for w in plan.weights:
        moves = w.moves
        bucket = w.bucket[moves.slice]
        size = w.slices.size_bytes[moves.slice]

        # Columns 0 and 1 are inside nodes, 2 and 3 between them.
        is_between = moves.source // per_node != moves.target // per_node
        sent = 2 * is_between
        received = sent + 1
        np.add.at(loads, (bucket, moves.round, sent, moves.source), size)
        np.add.at(loads, (bucket, moves.round, received, moves.target), size)
    return loads
