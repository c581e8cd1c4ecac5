"""What moves cross: devices joined inside a node, nodes joined by every device's own share of the network."""

from dataclasses import dataclass

from longshift.cluster.cluster import Cluster


@dataclass(frozen=True)
class Links:
    """Two levels of full-duplex links. Rank r is on node `r // per_node`.

    `intra_bytes_s`: one way, of a device to its node's others together; `inter_bytes_s`: one way, of a device to other nodes together (its
    network card, or its share of one); `latency_s`: of one exchange.
    """

    per_node: int
    intra_bytes_s: float
    inter_bytes_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.per_node < 1 or min(self.intra_bytes_s, self.inter_bytes_s) <= 0 or self.latency_s < 0:
            raise ValueError(f"{self}: a node has at least one device, a link carries at least something")

    @classmethod
    def of(cls, cluster: Cluster) -> "Links":
        """A cluster's, at the bandwidths that are reached. Where all ranks are on one node, or each on its own, its one level is both."""
        reached = [(link, cluster.shares[f"{level} link"]) for level in ("node", "network") if (link := cluster.links.get(level))]
        if not reached:
            return ONE_NODE
        (near, near_share), (far, far_share) = reached[0], reached[-1]
        latency_s = max(link.latency_s for link, _ in reached)
        return cls(cluster.devices_per_node, near.bytes_per_s * near_share, far.bytes_per_s * far_share, latency_s)


ONE_NODE = Links(per_node=1 << 20, intra_bytes_s=1.0, inter_bytes_s=1.0)  # where only the order of moves matters


def assumed(per_node: int) -> Links:
    """Where nothing was measured: inside a node eight times what is between nodes; only ratios mean something."""
    return Links(per_node, 8.0, 1.0)
