"""Seconds of a collective on a fabric of nodes: numbers or arrays that broadcast.

A node has one network card a device. A group with r ranks on each of its nodes leaves a node
through r cards at once: 16 ranks over two nodes of 8 have 8 cards each way. Groups of the same kind
that share a node have the other cards, so that each group has its own.

    ring         bytes (n-1)/n through every rank, and through the cards of every node
                 (all_gather, reduce_scatter; all_reduce is both)
    all_to_all   each rank's bytes to other nodes through its own card, the rest inside
    send         one card, or the link inside a node

A message waits at every hop of a ring: n - nodes hops inside and nodes - 1 between them, and a
collective begins once.
"""

from dataclasses import dataclass

import numpy as np

from longshift.cluster.cluster import Cluster, Link, Number, Operation
from longshift.errors import UsageError

# Seconds before the first hop. nccl-tests on 8 H200 (DistCA repository): all-gathers of 8 to 16 MB
# take 27, 39 and 48 us more than their bytes on 2, 4 and 8 ranks, which is 20 us and 3.4 us a hop,
# and 3.4 us is NCCL's own figure for NVLink.
BEGIN_S = 20e-6


@dataclass(frozen=True)
class Fabric:
    """Links of a cluster as numbers or arrays. Rates in bytes/s one way per device, as reached;
    latencies in seconds a hop."""

    per_node: Number
    node_bytes_per_s: Number
    node_latency_s: Number
    network_bytes_per_s: Number
    network_latency_s: Number
    begin_s: Number = BEGIN_S

    def collective_s(
        self, operation: Operation, size_bytes: Number, ranks: Number, ranks_per_node: Number
    ) -> np.ndarray:
        """Seconds of a collective of `ranks`, of which `ranks_per_node` share each node.
        bytes: see `cluster.cluster`."""
        size_bytes = np.asarray(size_bytes, dtype=float)
        ranks = np.asarray(ranks, dtype=float)
        inside = np.minimum(ranks_per_node, ranks)
        nodes = np.ceil(ranks / inside)
        if operation == "send":
            across_bytes_per_s = np.minimum(self.network_bytes_per_s, self.node_bytes_per_s)
            rate = np.where(nodes > 1, across_bytes_per_s, self.node_bytes_per_s)
            latency_s = np.where(nodes > 1, self.network_latency_s, self.node_latency_s)
            seconds = self.begin_s + latency_s + size_bytes / rate
            return np.where(ranks > 1, seconds, 0.0)

        hops_s = (ranks - nodes) * self.node_latency_s + (nodes - 1) * self.network_latency_s
        if operation == "all_to_all":
            between_s = size_bytes * (ranks - inside) / ranks / self.network_bytes_per_s
            inside_s = size_bytes * (inside - 1) / ranks / self.node_bytes_per_s
            wire_s = np.maximum(between_s, inside_s)
        else:
            cards = np.where(nodes > 1, inside * self.network_bytes_per_s, np.inf)
            wire_s = size_bytes * (ranks - 1) / ranks / np.minimum(self.node_bytes_per_s, cards)

        # An all-reduce is a reduce-scatter and an all-gather, which begin once.
        times = 2 if operation == "all_reduce" else 1
        seconds = self.begin_s + times * (hops_s + wire_s)
        return np.where(ranks > 1, seconds, 0.0)


NO_LINK = Link(float("inf"), 0.0)  # of one device: nothing travels


def fabric(cluster: Cluster) -> Fabric:
    """The fabric of a cluster's constants. A single device was measured without links to others,
    and needs none. Raises UsageError for several without."""
    if "node" not in cluster.links and cluster.devices > 1:
        raise UsageError(
            f"{cluster.name} was measured on one device and knows no links between devices: name a"
            " preset, or measure several"
        )
    inside = cluster.links.get("node", NO_LINK)
    between = cluster.links.get("network", inside)
    between_level = "network" if "network" in cluster.links else "node"
    return Fabric(
        cluster.devices_per_node,
        inside.bytes_per_s * cluster.shares["node link"],
        inside.latency_s,
        between.bytes_per_s * cluster.shares[f"{between_level} link"],
        between.latency_s,
    )


def collective_s(
    cluster: Cluster,
    operation: Operation,
    size_bytes: Number,
    ranks: Number,
    ranks_per_node: Number,
) -> np.ndarray:
    """Seconds of a collective: from curves where the cluster has them, else from its constants.

    `ranks_per_node`: of the `ranks`, how many share each node. Of groups over nodes the curve with
    so many ranks a node counts. Where there is none, that of one rank, and so one card,
    a node does."""
    inside = np.minimum(ranks_per_node, ranks)
    by_constants = fabric(cluster).collective_s(operation, size_bytes, ranks, ranks_per_node)
    node_curve = cluster.curves.get(f"{operation} node")
    network_curve = cluster.curves.get(f"{operation} network")
    if node_curve is None:
        return by_constants
    ranks = np.asarray(ranks, dtype=float)
    size_bytes = np.maximum(np.asarray(size_bytes, dtype=float), 1.0)

    # 1. At which points of the two curves the parts inside a node and between nodes are.
    node_ranks = network_ranks = ranks
    node_bytes = network_bytes = size_bytes
    if operation == "all_to_all":
        node_ranks = inside
        node_bytes = np.maximum(size_bytes * inside / ranks, 1.0)
        network_ranks = np.ceil(ranks / inside)
    elif operation != "send":
        # A ring leaves a node through as many cards as it has ranks there.
        network_bytes = size_bytes / inside

    # 2. A group over nodes takes the longer of the two, or what a group like it was measured with.
    seconds = node_curve(np.maximum(node_ranks, 2), node_bytes)
    is_over_nodes = inside < ranks
    if network_curve is not None:
        network_s = network_curve(np.maximum(network_ranks, 2), network_bytes)
        seconds = np.where(is_over_nodes, np.maximum(seconds, network_s), seconds)
        for count, curve in cluster.over_nodes[operation].items():
            is_like_it = (inside == count) & is_over_nodes
            if np.any(is_like_it):
                group_s = curve(np.maximum(ranks, 2), size_bytes)
                seconds = np.where(is_like_it, group_s, seconds)
    elif "network" in cluster.links:
        seconds = np.where(is_over_nodes, np.maximum(seconds, by_constants), seconds)
    return np.where(ranks > 1, seconds, 0.0)
