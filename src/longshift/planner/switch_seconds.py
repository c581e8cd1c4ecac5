"""Seconds of a switch between layouts by rate card, for arrays of candidates at once."""

import numpy as np

from longshift.planner.candidates import Candidates
from longshift.simulate.cost import Cost


def switch_seconds(cost: Cost, candidates: Candidates, prefetch_bytes: float) -> np.ndarray:
    """Seconds to switch to each layout and to bring its gradients home, float64 [candidates].

    Every rank receives its weights from all others and gives its gradient sums back.

    `prefetch_bytes`: weights of so many bytes arrive while the group before still computes.
    """
    sizes = cost.sizes
    fabric = cost.rates.fabric
    pp = candidates.pp
    weight_ranks = candidates.weight_ranks
    world = candidates.world
    per_node = np.minimum(fabric.per_node, world)
    nodes = np.ceil(world / per_node)
    num_ends = 2.0 - cost.spec.tied
    blocks = cost.spec.layers * sizes.rank_elements(weight_ranks)
    wanted = (blocks + num_ends * sizes.head_elements / weight_ranks) / pp

    # A slice crosses to a node once and is passed on inside it, so a rank's card carries only its
    # share of what differs between the ranks of its node.
    stages_share_node = world / pp < per_node
    node_shards = np.where(stages_share_node, weight_ranks * per_node * pp / world, weight_ranks)
    distinct = np.minimum(per_node, node_shards) / per_node

    def exchange_s(size_bytes: np.ndarray) -> np.ndarray:
        inside_s = size_bytes * (per_node - 1) / per_node / fabric.node_bytes_per_s
        between_s = size_bytes * distinct * (nodes - 1) / nodes / fabric.network_bytes_per_s
        return np.maximum(inside_s, between_s)

    weight_bytes = cost.rates.element_bytes * wanted
    gradient_bytes = cost.habits.gradient_bytes * wanted
    prefetched = np.minimum(1.0, prefetch_bytes / np.maximum(weight_bytes, 1.0))
    return exchange_s(weight_bytes) * (1 - prefetched) + exchange_s(gradient_bytes)
