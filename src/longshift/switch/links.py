"""What moves cross: devices joined inside a node, nodes joined by every device's own share of the
network."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from longshift.cluster.cluster import Cluster

Origin = Literal["measured", "published", "assumed"]

FASTER_INSIDE = 8.0  # a link inside a node over one between nodes, where that is assumed


@dataclass(frozen=True)
class Links:
    """Two levels of full-duplex links. Rank r is on node `r // per_node`.

    `intra_bytes_s`: one way, of a device to its node's others together; `inter_bytes_s`: one way,
    of a device to other nodes together (its network card, or its share of one); `latency_s`: of one
    exchange. `origin`: where the rates come from; of assumed ones only the ratio means something.
    """

    per_node: int
    intra_bytes_s: float
    inter_bytes_s: float
    latency_s: float = 0.0
    origin: Origin = "assumed"

    def __post_init__(self) -> None:
        if (
            self.per_node < 1
            or min(self.intra_bytes_s, self.inter_bytes_s) <= 0
            or self.latency_s < 0
        ):
            raise ValueError(
                f"{self!r}: a node has at least one device, a link carries at least something"
            )

    def __str__(self) -> str:
        if self.origin == "assumed":
            return (
                f"assumed, inside a node {self.intra_bytes_s / self.inter_bytes_s:.3g} times what"
                " is between"
            )
        if self.intra_bytes_s == self.inter_bytes_s:
            return f"{self.origin}, {self.intra_bytes_s / 1e9:.3g} GB/s"
        return (
            f"{self.origin}, {self.intra_bytes_s / 1e9:.3g} GB/s inside a node,"
            f" {self.inter_bytes_s / 1e9:.3g} GB/s between"
        )


def assumed(per_node: int) -> Links:
    """Links where nothing was measured."""
    return Links(per_node, FASTER_INSIDE, 1.0)


def links_of(cluster: Cluster | None, per_node: int, nodes: int = 1) -> Links:
    """The links of `nodes` machines with `per_node` ranks each, at the bandwidths that are reached:
    the cluster's where it knows every level that is crossed, else assumed. A level that is not
    crossed is given the rate of the other."""
    if cluster is None:
        return assumed(per_node)
    rates = {
        level: link.bytes_per_s * cluster.shares[f"{level} link"]
        for level, link in cluster.links.items()
    }
    node_rate = rates.get("node")
    network_rate = rates.get("network")
    is_unknown = (per_node > 1 and node_rate is None) or (nodes > 1 and network_rate is None)
    if is_unknown or (node_rate or network_rate) is None:
        return assumed(per_node)

    # A level that is not crossed is given the rate of the other.
    intra = (node_rate if per_node > 1 else None) or network_rate or node_rate
    inter = (network_rate if nodes > 1 else None) or node_rate or network_rate
    assert intra is not None
    assert inter is not None
    latency_s = max(link.latency_s for level, link in cluster.links.items() if level != "device")
    return Links(per_node, intra, inter, latency_s, cluster.origin)


def agreed(links: Links, gather_text: Callable[[str], list[str]]) -> Links:
    """Rank 0's links, on every rank; collective. `gather_text` gives every rank's text, by rank.
    Ranks whose links differ would visit layouts in different orders."""
    return Links(**json.loads(gather_text(json.dumps(asdict(links)))[0]))
