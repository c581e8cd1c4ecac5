"""Lengths to packs to shares. Every document is in one pack and every pack in one share; nothing is
padded, nothing dropped."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from longshift.spec.model import ModelSpec


def pack(lengths: Sequence[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Best-fit decreasing: whole documents, longest first, each into the fullest pack that still
    holds it, else into a new one.

    Returns indices into `lengths`; the packs in the order they were opened. A function of its
    arguments alone: equal lengths keep their order, and of equally full packs the first is taken.
    Needs at most 11/9 of the fewest possible packs, plus one. No document is longer than
    `capacity`: the over-length policy comes before packing.
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fit = bisect_left(free, (length, 0))
        if fit < len(free):
            space, pack_index = free.pop(fit)
        else:
            space = capacity
            pack_index = len(packs)
            packs.append([])
        packs[pack_index].append(index)
        insort(free, (space - length, pack_index))
    return tuple(map(tuple, packs))


def shares(costs: Sequence[float], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Longest processing time first: each pack, dearest first, goes to the replica with the least
    to do.

    Returns indices into `costs` for every replica, dearest first. Shares may differ in number and
    may be empty. A function of its arguments alone: equal costs keep their order, and of equally
    loaded replicas the first is taken. The dearest share costs at most 4/3 of the best possible.
    """
    replica_shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]  # sorted, so a heap
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, replica = loads[0]
        replica_shares[replica].append(index)
        heapq.heapreplace(loads, (load + costs[index], replica))
    return tuple(map(tuple, replica_shares))


def cost(lengths: Sequence[int], spec: ModelSpec) -> float:
    """Model FLOP of forward and backward over a pack of documents: linear in its tokens, quadratic
    in each document as far as the model's sliding window reaches."""
    return sum(n * spec.flops_per_token(float(spec.attended(n)) / n) for n in lengths if n)
