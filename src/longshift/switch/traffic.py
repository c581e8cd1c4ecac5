"""What a plan puts on the links, and the least time they need for it."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from longshift.switch.links import Links
from longshift.switch.placed import Placed
from longshift.switch.plan import Plan, world_of
from longshift.switch.slices import refine


@dataclass(frozen=True)
class Traffic:
    """Bytes of a plan by link, and the seconds that they take.

    `bound_s`: all links at work at one time, bandwidth alone. `overlapped_s`: in exchanges one after another, each a bucket's first round
    with the second round of the bucket before, latency included. `in_order_s`: an exchange for every round.
    """

    max_received_bytes: int
    inter_node_bytes: int
    intra_node_bytes: int
    bound_s: float
    overlapped_s: float
    in_order_s: float
    by_node: tuple[tuple[int, ...], ...]  # from node, to node; the diagonal is inside nodes

    def __str__(self) -> str:
        inside, between = self.intra_node_bytes / 1e9, self.inter_node_bytes / 1e9
        lines = [f"{inside:.3g} GB inside nodes, {between:.3g} GB between them, at least {self.bound_s:.3g} s"]
        for source, row in enumerate(self.by_node if between else ()):
            moved = ", ".join(f"{size / 1e9:.3g} GB to node {target}" for target, size in enumerate(row) if size and target != source)
            lines += [f"  node {source}: {row[source] / 1e9:.3g} GB inside" + (f", {moved}" if moved else "")]
        return "\n".join(lines)


def traffic(plan: Plan) -> Traffic:
    """What a plan puts on the links. Of a device's links to its node and to other nodes, one way each, the busiest sets the time."""
    pairs, links = plan.bytes_by_pair, plan.links
    played = _by_round(plan)
    overlapped = _by_exchange(plan, played)
    starts = np.arange(0, plan.world, links.per_node)
    by_node = np.add.reduceat(np.add.reduceat(pairs, starts, 0), starts, 1)
    return Traffic(
        max_received_bytes=int(pairs.sum(0).max()),
        inter_node_bytes=int(by_node.sum() - by_node.trace()),
        intra_node_bytes=int(by_node.trace()),
        bound_s=float(_seconds(played.sum((0, 1))[None], replace(links, latency_s=0.0)).sum()),
        overlapped_s=float(_seconds(overlapped, links).sum()),
        in_order_s=float(_seconds(played.reshape(-1, *played.shape[2:]), links).sum()),
        by_node=tuple(tuple(map(int, row)) for row in by_node),
    )


def least_s(held: Placed, wanted: Placed, links: Links, itemsize: int) -> float:
    """Lower bound of `bound_s` for `fan_out` and `algorithm1`, some fifty times faster than a plan: the busiest link of a node or a rank
    where all that a planner may choose is dealt evenly. What a node has no holder of enters it once, from the holders' node where there is
    only one; the rest moves inside the node, from the holder where there is only one."""
    world = world_of(held, wanted)
    starts = np.arange(0, world, min(links.per_node, world))
    devices = np.diff(np.append(starts, world))
    near, far = np.zeros((2, world), np.int64), np.zeros((2, len(starts)), np.int64)  # sent, received: by rank inside, by node between
    for (have, want), count in Counter((held[name], wanted[name]) for name in wanted).items():
        slices = refine(have, want, world, itemsize, None)
        size, node = count * slices.size_bytes, np.repeat(np.arange(len(starts)), devices)
        holders = np.add.reduceat(slices.has, starts, 1, dtype=np.int64)
        lacking = np.add.reduceat(slices.needs, starts, 1, dtype=np.int64)
        entering = (lacking > 0) & (holders == 0)
        far[1] += size @ entering
        alone = (holders > 0).sum(1) == 1
        far[0] += (size * entering.sum(1) * alone) @ (holders > 0)
        near[1] += size @ (slices.needs & (holders[:, node] > 0))
        near[0] += size @ (slices.has & (holders[:, node] == 1) * lacking[:, node])
    return max(float(near.max()) / links.intra_bytes_s, float((far / devices).max()) / links.inter_bytes_s)


def seconds_by_exchange(plan: Plan) -> list[float]:
    """Seconds of each exchange of a plan, one after another as in `Traffic.overlapped_s`."""
    return _seconds(_by_exchange(plan, _by_round(plan)), plan.links).tolist()


def _seconds(loads: np.ndarray, links: Links) -> np.ndarray:
    """Seconds of each exchange, int64 [exchanges, 4, world]; one that moves nothing takes no time."""
    rates = np.array((links.intra_bytes_s, links.intra_bytes_s, links.inter_bytes_s, links.inter_bytes_s))
    return (loads.max(2) / rates).max(1) + links.latency_s * loads.any((1, 2))


def _by_exchange(plan: Plan, played: np.ndarray) -> np.ndarray:
    """Bytes of every exchange, each a bucket's first round with later rounds of the buckets before: int64 [exchanges, 4, world]."""
    found = np.zeros((plan.exchanges, *played.shape[2:]), np.int64)
    for number in range(plan.rounds):
        found[number : number + plan.buckets] += played[:, number]
    return found


def _by_round(plan: Plan) -> np.ndarray:
    """Bytes of every round of every bucket, sent and received inside nodes, sent and received between them: int64 [buckets, rounds, 4,
    world]."""
    loads = np.zeros((plan.buckets, plan.rounds, 4, plan.world), np.int64)
    for w in plan.weights:
        m, bucket, size = w.moves, w.bucket[w.moves.slice], w.slices.size_bytes[w.moves.slice]
        sent = 2 * (m.source // plan.links.per_node != m.target // plan.links.per_node)
        np.add.at(loads, (bucket, m.round, sent, m.source), size)
        np.add.at(loads, (bucket, m.round, sent + 1, m.target), size)
    return loads
