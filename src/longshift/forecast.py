"""Seconds of a run's steps on a cluster, before they are trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longshift.cluster.cluster import Cluster
from longshift.config import Config
from longshift.simulate.clock import Clock, StepTime, in_visiting_order
from longshift.simulate.cost import Cost, habits
from longshift.simulate.rates import rates
from longshift.spec.formats import arithmetic
from longshift.step_report import shape_of
from longshift.weigh.needs import StepShape


def on_cluster(cluster: Cluster, world: int, precision: str = "bf16") -> Cluster:
    """The cluster as so many ranks reach it in a run of this precision: with as many nodes as they
    need, and by its calibration where there is one. CPU ranks share the machine that was
    measured."""
    cluster = cluster.calibrated.with_arithmetic(arithmetic(precision))
    if cluster.device.kind == "cpu":
        return cluster.shared(-(-world // cluster.nodes))
    per_node = min(world, cluster.devices_per_node)
    return replace(cluster, nodes=-(-world // per_node), devices_per_node=per_node)


class RunForecast:
    """The steps of a run on a cluster. Mutable: its clock keeps what it has computed. `shape`: of
    the run's steps, where it is known."""

    def __init__(self, config: Config, cluster: Cluster, shape: StepShape | None = None):
        cluster = on_cluster(cluster, config.world, config.train.precision)
        self.shape = shape or shape_of(config, cluster.devices_per_node, cluster)
        habit = habits(config.train.compile, config.train.precision, cluster.device)
        cost = Cost(config.spec, rates(cluster, config.train.precision), habit)
        self.clock = Clock(self.shape, cluster, cost, config.train.precision)

    def step(self, lengths: Sequence[int]) -> StepTime:
        """A step of documents of these lengths."""
        return self.clock.step(in_visiting_order(self.shape, lengths))


def layout_text(layout: Any) -> str:
    """A layout in the config's form, in one line: `dp2 <= 8K in 32K > tp2 <= 64K`."""
    if isinstance(layout, str):
        return layout
    return " > ".join(
        f"{group['use']} <= {group['upto']}" + (f" in {group['pack']}" if "pack" in group else "")
        for group in layout
    )
