"""What a run will take: its steps on the clock of a cluster, before anything starts."""

from collections.abc import Sequence
from dataclasses import replace

from longshift.cluster.cluster import Cluster
from longshift.config import Config
from longshift.explain import shape_of
from longshift.simulate.clock import Clock, GroupPacks, StepTime
from longshift.simulate.cost import Cost, sizes
from longshift.simulate.rates import Constants, rates
from longshift.workload.groups import length_groups


class RunForecast:
    """The steps of a run on a cluster. Mutable: its clock keeps what it has computed. `constants`: what a step reaches of the cluster's
    figures, where they were calibrated."""

    def __init__(self, config: Config, cluster: Cluster, constants: Constants | None = None):
        cpu = cluster.device.kind == "cpu"
        cluster = cluster.shared(-(-config.world // cluster.nodes)) if cpu else cluster
        self.config, self.cluster = config, replace(cluster, nodes=-(-config.world // cluster.devices_per_node))
        self.shape = shape_of(config, cluster.devices_per_node, self.cluster)
        cost = Cost(sizes(config.spec), rates(self.cluster, config.train.precision, constants))
        self.clock = Clock(self.shape, self.cluster, cost, config.train.precision)

    def step(self, lengths: Sequence[int]) -> StepTime:
        """A step of documents of these lengths."""
        groups = length_groups(lengths, self.config.edges, self.config.spec)
        order = self.shape.itinerary.order(tuple(group.layout for group in groups))
        found = []
        for group in (groups[i] for i in order):
            packs = [tuple(lengths[d] for d in pack) for pack in group.packs]
            found.append(GroupPacks(group.layout, tuple(tuple(packs[p] for p in share) for share in group.shares)))
        return self.clock.step(found)
