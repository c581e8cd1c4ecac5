"""What a run will do in a step, from the same placements and plans that do it: for each layout what is inserted, what is pruned because
another layout has done it already, in which order layouts are visited, and what switches put on the links.

HotSPa (SOSP 2024) calls this graph compilation: insert casts, communication and accumulation; prune what another graph does.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from longshift.cluster.cluster import Cluster
from longshift.command_results import CommandResult
from longshift.config import Config
from longshift.layout.axes import AXES
from longshift.layout.layout import Layout, format_size
from longshift.layout.placement import buckets
from longshift.spec.formats import EIGHT_BITS, Format
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.links import Links, links_of
from longshift.switch.plan import Plan
from longshift.switch.traffic import Traffic, traffic
from longshift.weigh.needs import Need, StepShape, most, needs
from longshift.weigh.recorder import Transport

INSERTED = {  # what a layout adds to a model, by communicator
    **{axis.name: axis.traffic for axis in AXES},
    "rising": "pipeline: to later stages",
    "falling": "pipeline: to earlier stages",
}
MOST_NAMES = 4  # of what is alive at a peak


class Explained(CommandResult):
    """One group of lengths. `upto`: its longest document, `pack`: the capacity of its packs, in tokens. `weights` and `gradients` say how
    copies come and sums go; the traffic is that of a switch, None where fused collectives do it; `pruned` what is not done because it is
    done. `need`: of the rank that needs most memory in a step of this group alone; for one full pack `sent`: bytes out of that rank, by
    communicator, and `moved`: bytes into tiers and back."""

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
    """A step that has documents of all lengths. `groups` in visiting order; `need`: of the rank that needs most memory in it;
    `home`: the layout that home is cut by, `home_in`: where it lies; `optimizer`: what updates it, and what becomes of its moments;
    `early`: whether units on disk are updated before the norm; `matmuls`: what becomes of their factors, where they are not taken as they
    are."""

    home: str
    home_in: str
    links: Links
    groups: tuple[Explained, ...]
    need: Need
    optimizer: str
    early: bool = False
    matmuls: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON, without seconds of a switch where links are assumed."""
        found = super().to_json()
        for group in found["groups"] if self.links.origin == "assumed" else ():
            for moved in filter(None, (group["weights_traffic"], group["gradients_traffic"])):
                del moved["bound_s"], moved["overlapped_s"], moved["in_order_s"]
        return found

    def parts(self) -> Iterator[RenderableType]:
        """The step in lines."""
        yield str(self)

    def __str__(self) -> str:
        lies = f", in {self.home_in}" * (self.home_in != "device")
        lines = [
            f"home is cut as {self.home}{lies}: every master weight, gradient sum and moment once; nodes of {self.links.per_node} ranks"
        ]
        lines += [f"links: {self.links}"]
        for number, group in enumerate(self.groups, 1):
            packs = f", in packs of up to {format_size(group.pack)}" if group.pack != group.upto else ""
            lines += ["", f"{number}. documents of up to {format_size(group.upto)} tokens{packs}: {group.layout}"]
            lines += [f"   weights    {group.weights}", *_moved(group.weights_traffic, self.links)]
            for name, what in INSERTED.items():
                if size := group.sent.get(name):
                    lines.append(f"   inserted   {what}: {_size(size)} out of rank {group.need.rank} for a pack")
            if moved := {way: size for way, size in group.moved.items() if not way.startswith("home")}:
                lines.append(f"   tiers      {_size(moved['put'])} out and {_size(moved['fetched'])} in, for a pack")
            lines += [f"   gradients  {group.gradients}", *_moved(group.gradients_traffic, self.links)]
            lines += [f"   pruned     {text}" for text in group.pruned]
            lines += told(group.need) if len(self.groups) > 1 else []
        late = ", unit by unit under the forward of the next step" * (self.home_in != "device")
        early = "; most of what is on disk, under the backward before the norm, and again where that clips" * self.early
        lines += ["", f"then one global norm, one clip, one {self.optimizer}, at home{late}{early}"]
        lines += [self.matmuls] if self.matmuls else []
        return "\n".join([*lines, *told(self.need)])


def told(need: Need) -> list[str]:
    """A rank's need of memory in lines: the peak of each place, the operation it is reached in, what is alive then."""
    lines = []
    for place, peak in sorted(need.weighed.peaks.items()):
        rows = ", ".join(f"{name} {_size(size)}" for name, size in peak.alive[:MOST_NAMES])
        name = "memory" if place == "device" else place
        lines.append(f"   {name:<10} rank {need.rank} needs most: {_size(peak.total)}, in {peak.op}: {rows}")
    return lines


def itinerary(config: Config, per_node: int | None = None, cluster: Cluster | None = None) -> Itinerary:
    """The itinerary of a run. `per_node`: ranks on each machine, all where not given; `cluster`: whose links it crosses, assumed ones where
    not given."""
    formats = config.formats
    per_node = per_node or config.world
    links = links_of(cluster, per_node, -(-config.world // per_node))
    return Itinerary(config.spec, config.edges, links, formats.compute_bytes, formats.home_bytes, config.switch.options)


def shape_of(config: Config, per_node: int | None = None, cluster: Cluster | None = None) -> StepShape:
    """The shape of a run's steps."""
    return StepShape(
        itinerary(config, per_node, cluster),
        config.edges,
        config.formats,
        config.train.tokens_per_step,
        config.data.max_len,
        home_in=config.home.at,
    )


def explain(config: Config, per_node: int | None = None, cluster: Cluster | None = None, gpus: bool = True) -> Explanation:
    """Explain what one training step of `config` does, on machines with `per_node` ranks and the links of `cluster`, as `itinerary` takes
    them; on GPUs or, where not `gpus`, on CPUs. Seconds of a switch are said where links are known."""
    shape = shape_of(config, per_node, cluster)
    way, formats = shape.itinerary, shape.formats
    transport: Transport = "nccl" if gpus else "gloo"
    where = transport, not gpus
    edges = [config.edges[i] for i in way.order(tuple(edge.use for edge in config.edges))]
    groups = []
    for number, edge in enumerate(edges):
        cut = way.cuts[edge.use]
        before = edges[number - 1].use if number else None
        later = [e.use for e in edges[number + 1 :] if way.cuts[e.use] == cut]
        weights, coming, pruned = _weights(way, cut, before, formats, edge.use)
        gradients, going = _gradients(way, cut, later, formats, edge.use)
        if later:
            pruned += [f"no reduction yet: {later[-1]} adds to the same sums"]
        if number:
            pruned += ["no update: one at the end, at home", "no hand-over of gradients from layout to layout: each goes home once"]
        need = most(needs(shape, [edge], *where))
        pack = shape.of_one_pack(edge, need.rank, *where)
        explained = Explained(
            layout=str(edge.use),
            upto=edge.upto,
            pack=edge.pack,
            weights=weights,
            weights_traffic=coming,
            sent=pack.sent,
            moved=pack.moved,
            gradients=gradients,
            gradients_traffic=going,
            pruned=tuple(pruned),
            need=need,
        )
        groups.append(explained)
    whole = most(needs(shape, edges, *where)) if len(edges) > 1 else groups[0].need
    return Explanation(
        home=str(way.home),
        home_in=str(shape.home_in),
        links=way.links,
        groups=tuple(groups),
        need=whole,
        optimizer=_updating(config),
        early=bool(shape.steps(whole.rank).early),
        matmuls=EIGHT_BITS if formats.float8 else None,
    )


def _updating(config: Config) -> str:
    packed = config.home.moments
    return f"{config.train.rule}" + f", unit by unit, whose moments are {packed} before and after" * (packed != "float32")


def _weights(way: Itinerary, cut: Cut, before: Layout | None, formats: Format, layout: Layout) -> tuple[str, Traffic | None, list[str]]:
    cast = f", cast from {formats.home} to {formats.compute} at the source" if formats.compute != formats.home else ""
    coded = ", coded in float8 at the source" * (formats.wire.weights == "float8")
    if before is not None and way.cuts[before] == cut:
        return f"here already: the copies of {before}", None, ["no gather, no cast: the copies are shared"]
    if cut.at_home:
        sharded = [b for b in buckets(way.spec, way.home) if b.sharded]
        when = "each unit before its use, the next meanwhile, dropped after" if layout.zero == 3 else "once a step, unit by unit"
        if not sharded:
            return f"home's own{cast}", None, ["no gather: every rank keeps what it computes with"]
        return f"all-gather of {len(sharded)} fused buckets from home, {when}{coded or cast}", None, []
    source = way.source(before) if before is not None else None
    plan = way.weights(source, cut)
    origin = f"home and the copies of {before}" if source else "home"
    what = "rows, gathered unit by unit" if cut.side == "rows" else "copies"
    pruned = []
    if kept := _kept_bytes(plan):
        pruned = [f"{_size(kept)} of all ranks' wanted weights are where they are wanted already"]
    exchanges = f"{plan.exchanges} exchange{'s' * (plan.exchanges > 1)}"
    return f"switch: {what} from {origin}, {plan.planner}, {exchanges}{cast}", traffic(plan), pruned


def _gradients(way: Itinerary, cut: Cut, later: list[Layout], formats: Format, layout: Layout) -> tuple[str, Traffic | None]:
    home, sent = formats.home, formats.wire.gradients
    coded = f"all-to-all of pieces in {sent}, added in {home} at their owner" if sent != "float32" else ""
    when = "after every backward" if layout.zero >= 2 else "after the last backward"
    if later:
        return f"summed in {home} on each rank", None
    if cut.at_home:
        if way.home.world == 1:
            return f"added to home's in {home}, as they come", None
        sharded = any(b.sharded for b in buckets(way.spec, way.home))
        if coded and sharded:
            return f"{coded}, unit by unit {when}", None
        return f"{'reduce-scatter' if sharded else 'all-reduce'} into home in {home}, unit by unit {when}", None
    first = f"{coded or 'reduce-scatter to rows'} {when}, then " if cut.side == "rows" else ""
    kept = f"; wire is for reductions, a switch sends {home}" * formats.wire.coded
    return f"{first}home by the plan that would bring the weights, backwards, added in {home}{kept}", traffic(way.sums(cut))


def _kept_bytes(plan: Plan) -> int:
    return sum(int(w.slices.size_bytes @ (w.slices.has & w.slices.wants).sum(1)) for w in plan.weights)


def _moved(moved: Traffic | None, links: Links) -> list[str]:
    if moved is None:
        return []
    seconds = f", {moved.overlapped_s:.3g} s where nothing is computed meanwhile" if links.origin != "assumed" else ""
    return [f"              {_size(moved.intra_node_bytes)} inside nodes, {_size(moved.inter_node_bytes)} between them{seconds}"]


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
