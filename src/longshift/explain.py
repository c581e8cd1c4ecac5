"""What a run will do in a step, from the same placements and plans that do it: for each layout what is inserted, what is pruned because
another layout has done it already, in which order layouts are visited, and what switches put on the links.

HotSPa (SOSP 2024) calls this graph compilation: insert casts, communication and accumulation; prune what another graph does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from longshift.cluster.cluster import Cluster
from longshift.config import Config
from longshift.layout.layout import Layout, format_size
from longshift.layout.memory import LeastBytes, least_bytes
from longshift.layout.placement import buckets
from longshift.schedule.streamed import Footprint, Turn, footprint, lists_of
from longshift.spec.formats import FORMATS, Format
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut, Itinerary, home_layout
from longshift.switch.links import Links, links_of
from longshift.switch.plan import Plan
from longshift.switch.traffic import Traffic, traffic
from longshift.workload.groups import Edge

TENSOR = "tensor: all-gather and reduce-scatter of tokens"
ULYSSES = "Ulysses: all-to-all of tokens and heads"
RING = "ring: keys and values, and their gradients"
# By operation of a chunk: a backward of the tail begins with its forward.
TENSOR_MOVES = {"qkv": 1, "qkv_back": 1, "tail": 3, "tail_back": 6}


@dataclass(frozen=True)
class Insertion:
    """Communication that a layout adds. `count`: in a micro-batch, for each `of`, forward and backward together; `bytes_out`: of a rank,
    all of them, for a pack of the group's largest size."""

    what: str
    count: int
    of: str
    bytes_out: int


@dataclass(frozen=True)
class Explained:
    """One group of lengths. `weights` and `gradients` say how copies come and sums go; the traffic is that of a switch, None where fused
    collectives do it; `pruned` what is not done because it is done; `streamed` where the layout offloads or cuts packs in chunks."""

    layout: str
    upto: int
    weights: str
    weights_traffic: Traffic | None
    inserted: tuple[Insertion, ...]
    gradients: str
    gradients_traffic: Traffic | None
    pruned: tuple[str, ...]
    least: LeastBytes
    streamed: Footprint | None


@dataclass(frozen=True)
class Explanation:
    """A step that has documents of all lengths. `groups` in visiting order."""

    home: str
    links: Links
    groups: tuple[Explained, ...]

    def to_json(self) -> dict:
        """Without seconds of a switch where links are assumed."""
        found = asdict(self)
        for group in found["groups"] if self.links.origin == "assumed" else ():
            for moved in filter(None, (group["weights_traffic"], group["gradients_traffic"])):
                del moved["bound_s"], moved["overlapped_s"], moved["in_order_s"]
        return found

    def __str__(self) -> str:
        lines = [f"home is cut as {self.home}: every master weight, gradient sum and moment once; nodes of {self.links.per_node} ranks"]
        lines += [f"links: {self.links}"]
        for number, group in enumerate(self.groups, 1):
            lines += ["", f"{number}. documents of up to {format_size(group.upto)} tokens: {group.layout}"]
            lines += [f"   weights    {group.weights}", *_moved(group.weights_traffic, self.links)]
            lines += [
                f"   inserted   {i.what}: {i.count} a {i.of} and micro-batch, {_size(i.bytes_out)} out of a rank" for i in group.inserted
            ]
            lines += [f"   gradients  {group.gradients}", *_moved(group.gradients_traffic, self.links)]
            lines += [f"   pruned     {text}" for text in group.pruned]
            lines += _streamed(Layout.parse(group.layout), group.streamed)
            lines += [f"   memory     at least {group.least}"]
        return "\n".join([*lines, "", "then one global norm, one clip, one AdamW, at home"])


def itinerary(config: Config, per_node: int | None = None, cluster: Cluster | None = None) -> Itinerary:
    """The itinerary of a run. `per_node`: ranks on each machine, all where not given; `cluster`: whose links it crosses, assumed ones where
    not given."""
    formats = FORMATS[config.train.precision]
    per_node = per_node or config.world
    links = links_of(cluster, per_node, -(-config.world // per_node))
    return Itinerary(config.spec, config.edges, links, formats.compute_bytes, formats.home_bytes, config.switch.options)


def needs_of(config: Config, edge: Edge) -> tuple[LeastBytes, Footprint | None]:
    """The least memory of a group, for its longest document, and what that takes where it is offloaded or cut in chunks."""
    formats = FORMATS[config.train.precision]
    layout, longest, streamed = edge.use, min(edge.upto, config.data.max_len), None
    if layout.chunk or layout.offload != "device":
        streamed = footprint(config.spec, layout, [longest], formats.compute_bytes, config.stream.ahead)
    buffers = streamed.buffers if streamed else 0
    return least_bytes(
        config.spec, layout, home_layout(config.edges), longest, formats.compute_bytes, formats.home_bytes, buffers
    ), streamed


def explain(config: Config, per_node: int | None = None, cluster: Cluster | None = None) -> Explanation:
    """Explain what one training step of `config` does, on machines with `per_node` ranks and the links of `cluster`, as `itinerary` takes
    them. Seconds of a switch are said where links are known."""
    spec, way = config.spec, itinerary(config, per_node, cluster)
    formats = FORMATS[config.train.precision]
    edges = [config.edges[i] for i in way.order(tuple(edge.use for edge in config.edges))]
    groups = []
    for number, edge in enumerate(edges):
        cut = way.cuts[edge.use]
        before = edges[number - 1].use if number else None
        here = [e.use for e in edges[:number] if way.cuts[e.use] == cut]
        later = [e.use for e in edges[number + 1 :] if way.cuts[e.use] == cut]
        weights, coming, pruned = _weights(way, cut, before, bool(here), formats, edge.use)
        gradients, going = _gradients(way, cut, later, formats.home, edge.use)
        if later:
            pruned += [f"no reduction yet: {later[-1]} adds to the same sums"]
        if number:
            pruned += ["no update: one at the end, at home", "no hand-over of gradients from layout to layout: each goes home once"]
        least, streamed = needs_of(config, edge)
        inserted = tuple(i for i in insertions(spec, edge.use, edge.upto, formats.compute_bytes) if i.count)
        groups.append(Explained(str(edge.use), edge.upto, weights, coming, inserted, gradients, going, tuple(pruned), least, streamed))
    return Explanation(str(way.home), way.links, tuple(groups))


def _weights(
    way: Itinerary, cut: Cut, before: Layout | None, here: bool, formats: Format, layout: Layout
) -> tuple[str, Traffic | None, list[str]]:
    cast = f", cast from {formats.home} to {formats.compute} at the source" if formats.compute != formats.home else ""
    if here and before is not None and way.cuts[before] == cut:
        return f"here already: the copies of {before}", None, ["no gather, no cast: the copies are shared"]
    if cut.at_home:
        sharded = [b for b in buckets(way.spec, way.home) if b.sharded]
        when = "each unit before its use, the next meanwhile, dropped after" if layout.zero == 3 else "once a step, unit by unit"
        if not sharded:
            return f"home's own{cast}", None, ["no gather: every rank keeps what it computes with"]
        return f"all-gather of {len(sharded)} fused buckets from home, {when}{cast}", None, []
    source = way.source(before) if before is not None else None
    plan = way.weights(source, cut)
    origin = f"home and the copies of {before}" if source else "home"
    what = "rows, gathered unit by unit" if cut.side == "rows" else "copies"
    pruned = []
    if kept := _kept_bytes(plan):
        pruned = [f"{_size(kept)} of all ranks' wanted weights are where they are wanted already"]
    exchanges = plan.buckets + plan.rounds - 1 if plan.bytes_by_pair.any() else 0
    return f"switch: {what} from {origin}, {plan.planner}, {exchanges} exchanges{cast}", traffic(plan), pruned


def _gradients(way: Itinerary, cut: Cut, later: list[Layout], home: str, layout: Layout) -> tuple[str, Traffic | None]:
    when = "after every backward" if layout.zero >= 2 else "after the last backward"
    if later:
        return f"summed in {home} on each rank", None
    if cut.at_home:
        sharded = any(b.sharded for b in buckets(way.spec, way.home))
        return f"{'reduce-scatter' if sharded else 'all-reduce'} into home in {home}, unit by unit {when}", None
    first = f"reduce-scatter to rows {when}, then " if cut.side == "rows" else ""
    return f"{first}home by the plan that would bring the weights, backwards, added in {home}", traffic(way.sums(cut))


def _kept_bytes(plan: Plan) -> int:
    return sum(int(w.slices.size_bytes @ (w.slices.has & w.slices.wants).sum(1)) for w in plan.weights)


def insertions(spec: ModelSpec, layout: Layout, tokens: int, itemsize: int) -> Iterator[Insertion]:
    """Forward and backward, of the first rank."""
    yield from (_of_chunks if layout.chunk else _of_packs)(spec, layout, tokens, itemsize)
    if layout.pp > 1:
        boundary = tokens / layout.sequence * spec.width * itemsize
        yield Insertion("pipeline: residual stream and its gradient", 2, "boundary of stages", int(2 * boundary))


def _of_packs(spec: ModelSpec, layout: Layout, tokens: int, itemsize: int) -> Iterator[Insertion]:
    """The formulas of `parallel`, for a block."""
    tp, u, ring = layout.tp, layout.ulysses, layout.ring
    halves = {"attention": 3, "full": 4}.get(layout.recompute, 2)  # forwards of half a block; the backwards are two
    share = tokens / (u * ring)
    if tp > 1:
        size = share * spec.width * (tp - 1) / tp * itemsize
        yield Insertion(TENSOR, 2 * (halves + 2), "block", int(2 * (halves + 2) * size))
    exchanges = 1 if layout.recompute in ("none", "selective") else 2
    attends = 1 if layout.recompute == "none" or layout.keep_output else 2
    if u > 1:
        heads = (2 * spec.heads + 2 * max(spec.kv_heads, u * tp)) / tp
        size = share * heads * spec.head_width * (u - 1) / u * itemsize
        yield Insertion(ULYSSES, 2 * (exchanges + 1), "block", int((exchanges + 1) * size))
    if ring > 1:
        kv = 2 * tokens / ring * spec.kv_heads / (tp * u) * spec.head_width
        size = kv * (ring - 1) * itemsize * (attends + 1) + kv * ring * 4
        yield Insertion(RING, (attends + 1) * (ring - 1) + ring, "block", int(size))


def _of_chunks(spec: ModelSpec, layout: Layout, tokens: int, itemsize: int) -> Iterator[Insertion]:
    """By the events of a block; where some are played again, of one that is."""
    made = lists_of(spec, layout, layout.coord(0), [tokens], itemsize)
    turns: Sequence[Turn] = ("pass on", "forward", "backward") if layout.every > 1 else ("forward", "backward")
    of = "replayed block" if layout.every > 1 else "block"
    events = [event for turn in turns for event in made.of[turn]]
    moves = [(TENSOR_MOVES[e.name], made.orders[e.chunk].local_tokens) for e in events if e.kind == "compute" and e.name in TENSOR_MOVES]
    if layout.tp > 1:
        row = spec.width * (layout.tp - 1) / layout.tp / layout.ulysses * itemsize
        yield Insertion(TENSOR, sum(n for n, _ in moves), of, int(sum(n * length for n, length in moves) * row))
    if layout.ulysses > 1:
        sends = [e.bytes for e in events if e.kind == "send"]
        yield Insertion(ULYSSES, len(sends), of, sum(sends))
    if layout.ring > 1:
        kv, dkv, hops = made.sizes["kv"], made.sizes["dkv"], layout.ring - 1
        pairs = [(e.name == "attend_back", e.keys) for e in events if e.name in ("attend", "attend_back")]
        size = sum(kv[j] * hops + dkv[j] * layout.ring * back for back, j in pairs)
        yield Insertion(RING, sum(hops + layout.ring * back for back, _ in pairs), of, size)


def _streamed(layout: Layout, found: Footprint | None) -> list[str]:
    if found is None:
        return []
    what = f"the input of every block{' and the output of its attention' if layout.keep_output else ''} waits"
    if layout.chunk:
        kept = "x, o and kv wait for the backward" if layout.keep == "output" else "x waits for the backward, o and kv are made again"
        pairs = "stay on the device" if layout.kv == "device" else "come and go"
        kept += f", of every {layout.every} blocks the first one's x alone" if layout.every > 1 else ""
        what = f"{found.chunks} chunks of {format_size(layout.chunk)} for the longest document; {kept}; pairs' operands {pairs}"
    sizes = f"at most {_size(found.tier)} of a rank; {_size(found.put)} out and {_size(found.fetched)} in for the longest document"
    return [f"   streamed   {what}", f"   {layout.offload:<10} {sizes}"]


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
