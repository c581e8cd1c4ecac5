"""What a run will do in a step, from the same placements and plans that do it: for each layout what
is inserted, what is pruned because another layout has done it already, in which order layouts are
visited, what switches put on the links, and what a step takes on the clock.

HotSPa (SOSP 2024) calls this graph compilation: insert casts, communication and accumulation; prune
what another graph does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from longshift.cluster.cluster import Cluster
from longshift.config import Config
from longshift.layout.axes import AXES
from longshift.layout.layout import Layout, format_size
from longshift.layout.placement import buckets
from longshift.print_result import CommandResult, size_text
from longshift.simulate.clock import Clock, StepTime, in_visiting_order
from longshift.simulate.cost import Cost
from longshift.simulate.habits import habits
from longshift.simulate.rates import rates
from longshift.spec.formats import EIGHT_BITS, Format, arithmetic
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.links import Links, links_of
from longshift.switch.traffic import Traffic, traffic
from longshift.weigh.needs import Need, StepShape, largest_need, memory_needs
from longshift.weigh.recorder import transport_on
from longshift.workload.groups import parse_edges

INSERTED = {  # by communicator, what a layout adds to a model
    **{axis.name: axis.traffic for axis in AXES},
    "rising": "pipeline: to later stages",
    "falling": "pipeline: to earlier stages",
}
MAX_NAMES = 4  # of what is alive at a peak


class LayoutExplanation(CommandResult):
    """One group of lengths. `upto`: its longest document, `pack`: the capacity of its packs, in
    tokens. `weights` and `gradients` say how copies come and sums go; the traffic is that of a
    switch, None where fused collectives do it; `pruned` what is not done because it is done.
    `need`: of the rank that needs most memory in a step of this group alone; for one full pack
    `sent`: bytes out of that rank, by communicator, and `moved`: bytes into tiers and back."""

    layout: str
    upto: int
    pack: int
    weights: str
    weights_traffic: Traffic | None
    sent: dict[str, int]
    moved: dict[str, int]
    gradients: str
    gradients_traffic: Traffic | None
    pruned: tuple[str, ...]
    need: Need


class Explanation(CommandResult):
    """A step that has documents of all lengths. `groups` in visiting order; `need`: of the rank
    that needs most memory in it;
    `home`: the layout that home is cut by, `home_in`: where it lies; `optimizer`: what updates it,
    and what becomes of its moments; `early`: whether units on disk are updated before the norm;
    `matmuls`: what becomes of their factors, where they are not taken as they are."""

    home: str
    home_in: str
    links: Links
    groups: tuple[LayoutExplanation, ...]
    need: Need
    optimizer: str
    early: bool = False
    matmuls: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON, without seconds of a switch where links are assumed."""
        # Assumed links have rates too, but seconds by them would look like a measurement.
        values = super().to_json()
        if self.links.origin == "assumed":
            for group in values["groups"]:
                for group_traffic in filter(
                    None, (group["weights_traffic"], group["gradients_traffic"])
                ):
                    del (
                        group_traffic["bound_s"],
                        group_traffic["overlapped_s"],
                        group_traffic["in_order_s"],
                    )
        return values

    def parts(self) -> Iterator[RenderableType]:
        """The step in lines."""
        yield str(self)

    def __str__(self) -> str:
        is_away = self.home_in != "device"
        tiers = f", in {self.home_in}" if is_away else ""
        lines = [
            (
                f"home is cut as {self.home}{tiers}: every master weight, gradient sum and moment"
                f" once; nodes of {self.links.per_node} ranks"
            ),
            f"links: {self.links}",
        ]
        for number, group in enumerate(self.groups, 1):
            lines += ["", *self._group_lines(number, group)]
        late = ", unit by unit under the forward of the next step" if is_away else ""
        early = (
            "; most of what is on disk, under the backward before the norm, and again where that"
            " clips"
            if self.early
            else ""
        )
        lines += ["", f"then one global norm, one clip, one {self.optimizer}, at home{late}{early}"]
        if self.matmuls:
            lines.append(self.matmuls)
        return "\n".join([*lines, *_need_lines(self.need)])

    def _group_lines(self, number: int, group: LayoutExplanation) -> Iterator[str]:
        """What a layout inserts, prunes, moves and needs."""
        packs = f", in packs of up to {format_size(group.pack)}" if group.pack != group.upto else ""
        yield (
            f"{number}. documents of up to {format_size(group.upto)} tokens{packs}: {group.layout}"
        )
        yield f"   weights    {group.weights}"
        yield from _traffic_lines(group.weights_traffic, self.links)
        for name, collective in INSERTED.items():
            if size := group.sent.get(name):
                yield (
                    f"   inserted   {collective}: {size_text(size)} out of rank"
                    f" {group.need.rank} for a pack"
                )
        if "put" in group.moved:
            yield (
                f"   tiers      {size_text(group.moved['put'])} out and"
                f" {size_text(group.moved['fetched'])} in, for a pack"
            )
        yield f"   gradients  {group.gradients}"
        yield from _traffic_lines(group.gradients_traffic, self.links)
        yield from (f"   pruned     {text}" for text in group.pruned)
        if len(self.groups) > 1:
            yield from _need_lines(group.need)


def _need_lines(need: Need) -> Iterator[str]:
    """A rank's need of memory: the peak of each place, the operation it is reached in, what is
    alive then."""
    for place, peak in sorted(need.estimate.peaks.items()):
        alive = ", ".join(f"{name} {size_text(size)}" for name, size in peak.alive[:MAX_NAMES])
        name = "memory" if place == "device" else place
        yield (
            f"   {name:<10} rank {need.rank} needs most: {size_text(peak.total)}, in {peak.op}:"
            f" {alive}"
        )


def shape_of(
    config: Config, per_node: int | None = None, cluster: Cluster | None = None
) -> StepShape:
    """The shape of a run's steps. `per_node`: ranks on each machine, all where not given;
    `cluster`: whose links switches cross, assumed ones where not given."""
    per_node = per_node or config.world
    return StepShape.of(
        config.spec,
        config.edges,
        links_of(cluster, per_node, -(-config.world // per_node)),
        config.formats,
        config.train.tokens_per_step,
        config.data.max_len,
        home_in=config.home.at,
    )


def explain(
    config: Config, per_node: int | None = None, cluster: Cluster | None = None, gpus: bool = True
) -> Explanation:
    """Explain what one training step of `config` does, on machines with `per_node` ranks and the
    links of `cluster`, as `shape_of` takes them; on GPUs or, where not `gpus`, on CPUs. Seconds of
    a switch are said where links are known."""
    shape = shape_of(config, per_node, cluster)
    itinerary = shape.itinerary
    formats = shape.formats
    transport = transport_on(gpus)
    edges = [config.edges[i] for i in itinerary.order(tuple(edge.use for edge in config.edges))]
    groups = []
    for number, edge in enumerate(edges):
        # 1. How weights come and sums go, and what another group makes unnecessary.
        cut = itinerary.cuts[edge.use]
        previous = edges[number - 1].use if number else None
        later = [e.use for e in edges[number + 1 :] if itinerary.cuts[e.use] == cut]
        weights, weights_traffic, pruned = _weights(itinerary, cut, previous, formats, edge.use)
        gradients, gradients_traffic = _gradients(itinerary, cut, bool(later), formats, edge.use)
        if later:
            pruned += [f"no reduction yet: {later[-1]} adds to the same sums"]
        if number:
            pruned += [
                "no update: one at the end, at home",
                "no hand-over of gradients from layout to layout: each goes home once",
            ]

        # 2. What the rank that needs most memory needs and sends.
        need = largest_need(memory_needs(shape, [edge], transport))
        pack = shape.pack_estimate(edge, need.rank, transport)
        groups.append(
            LayoutExplanation(
                layout=str(edge.use),
                upto=edge.upto,
                pack=edge.pack,
                weights=weights,
                weights_traffic=weights_traffic,
                sent=pack.sent,
                moved=pack.moved,
                gradients=gradients,
                gradients_traffic=gradients_traffic,
                pruned=tuple(pruned),
                need=need,
            )
        )
    step_need = (
        largest_need(memory_needs(shape, edges, transport)) if len(edges) > 1 else groups[0].need
    )
    return Explanation(
        home=str(itinerary.home),
        home_in=str(shape.home_in),
        links=itinerary.links,
        groups=tuple(groups),
        need=step_need,
        optimizer=_optimizer_text(config),
        early=bool(shape.steps(step_need.rank).early),
        matmuls=EIGHT_BITS if formats.float8 else None,
    )


def _optimizer_text(config: Config) -> str:
    """What updates home, and what becomes of its moments."""
    packed = config.home.moments
    if packed == "float32":
        return str(config.train.rule)
    return f"{config.train.rule}, unit by unit, whose moments are {packed} before and after"


def _weights(
    itinerary: Itinerary, cut: Cut, previous: Layout | None, formats: Format, layout: Layout
) -> tuple[str, Traffic | None, list[str]]:
    """How the weights of a group come, the traffic of a switch, and what is not done because layout
    `previous` has done it."""
    if previous is not None and itinerary.cuts[previous] == cut:
        return (
            f"here already: the copies of {previous}",
            None,
            ["no gather, no cast: the copies are shared"],
        )
    cast = (
        f", cast from {formats.home} to {formats.compute} at the source"
        if formats.compute != formats.home
        else ""
    )

    # 1. From home, by gathers.
    if cut.at_home:
        num_sharded = sum(bucket.sharded for bucket in buckets(itinerary.spec, itinerary.home))
        if not num_sharded:
            return f"home's own{cast}", None, ["no gather: every rank keeps what it computes with"]
        when = (
            "each unit before its use, the next meanwhile, dropped after"
            if layout.zero == 3
            else "once a step, unit by unit"
        )
        conversion = ", coded in float8 at the source" if formats.wire.weights == "float8" else cast
        return f"all-gather of {num_sharded} fused buckets from home, {when}{conversion}", None, []

    # 2. By a switch.
    source = itinerary.source(previous)
    plan = itinerary.weights(source, cut)
    origin = f"home and the copies of {previous}" if source else "home"
    copies = "rows, gathered unit by unit" if cut.side == "rows" else "copies"
    pruned = []
    if present_bytes := sum(
        int(w.slices.size_bytes @ (w.slices.has & w.slices.wants).sum(1)) for w in plan.weights
    ):
        pruned = [
            f"{size_text(present_bytes)} of all ranks' wanted weights are where they are wanted"
            " already"
        ]
    exchanges = f"{plan.exchanges} exchange{'s' * (plan.exchanges > 1)}"
    return (
        f"switch: {copies} from {origin}, {plan.planner}, {exchanges}{cast}",
        traffic(plan),
        pruned,
    )


def _gradients(
    itinerary: Itinerary, cut: Cut, stays: bool, formats: Format, layout: Layout
) -> tuple[str, Traffic | None]:
    """How the gradient sums of a group go home, and the traffic of a switch. `stays`: whether a
    later group adds to them."""
    home = formats.home
    if stays:
        return f"summed in {home} on each rank", None
    sent = formats.wire.gradients
    coded = (
        f"all-to-all of pieces in {sent}, added in {home} at their owner"
        if sent != "float32"
        else ""
    )
    when = "after every backward" if layout.zero >= 2 else "after the last backward"
    if cut.at_home:
        if itinerary.home.world == 1:
            return f"added to home's in {home}, as they come", None
        is_sharded = any(bucket.sharded for bucket in buckets(itinerary.spec, itinerary.home))
        if coded and is_sharded:
            return f"{coded}, unit by unit {when}", None
        return (
            (
                f"{'reduce-scatter' if is_sharded else 'all-reduce'} into home in {home}, unit by"
                f" unit {when}"
            ),
            None,
        )
    reduction = f"{coded or 'reduce-scatter to rows'} {when}, then " if cut.side == "rows" else ""
    note = f"; wire is for reductions, a switch sends {home}" if formats.wire.coded else ""
    return (
        (
            f"{reduction}home by the plan that would bring the weights, backwards, added in"
            f" {home}{note}"
        ),
        traffic(itinerary.sums(cut)),
    )


def _traffic_lines(switch: Traffic | None, links: Links) -> Iterator[str]:
    """Bytes that a switch puts on the links, and its seconds where these are known; nothing without
    a switch."""
    if switch is not None:
        seconds = (
            f", {switch.overlapped_s:.3g} s where nothing is computed meanwhile"
            if links.origin != "assumed"
            else ""
        )
        yield (
            f"              {size_text(switch.intra_node_bytes)} inside nodes,"
            f" {size_text(switch.inter_node_bytes)} between them{seconds}"
        )


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
    """The steps of a run on a cluster. Mutable: its clock keeps what it has computed."""

    def __init__(self, config: Config, cluster: Cluster):
        cluster = on_cluster(cluster, config.world, config.train.precision)
        self.shape = shape_of(config, cluster.devices_per_node, cluster)
        habit = habits(config.train.compile, config.train.precision, cluster.device)
        cost = Cost(config.spec, rates(cluster, config.train.precision), habit)
        self.clock = Clock(self.shape, cluster, cost)

    def step(self, lengths: Sequence[int]) -> StepTime:
        """A step of documents of these lengths."""
        return self.clock.step(in_visiting_order(self.shape, lengths))


def layout_text(layout: Any) -> str:
    """A layout in the config's form, in one line: `dp2 <= 8K in 32K > tp2 <= 64K`."""
    return layout if isinstance(layout, str) else " > ".join(map(str, parse_edges(layout)))
