"""The way of a step through its layouts: which cut of the model each computes with, what moves
between cuts, and in which order they are visited.

    groups    dp4 <= 1K        u4 <= 4K         tp4 <= 16K
    cuts      ──── one: the same copies ─────   ─── home ───
    weights   home ══> gather or switch         gather          each cut once a step, in the order
                                                                that moves least
    gradients                     ══> home          ══> home    when the last group of a cut is done

Home is cut as the longest group's layout would cut it, under ZeRO-1 at least: every element is
kept once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from longshift.layout.layout import Layout
from longshift.layout.placement import buckets
from longshift.spec.model import ModelSpec
from longshift.switch.links import Links
from longshift.switch.options import Planner, SwitchOptions
from longshift.switch.plan import Plan, switch_plan
from longshift.switch.spread import (
    BoxesByWeight,
    Side,
    plainest,
    spread_weights,
    together,
    turn_about,
)
from longshift.switch.traffic import least_s, traffic
from longshift.workload.groups import (
    Edge,
    LengthGroup,
    home_layout,
    length_groups,
    visiting_order,
)

# Plans of up to so many cuts are compared: n cuts are n * n plans, a second each for a large model.
# Of more cuts, estimates are compared.
MOST_PLANNED = 4


@dataclass(frozen=True)
class Cut:
    """One way to cut the model. `layout`: the first of those that compute with it. `side`: what
    switches bring, working copies or, under ZeRO-2 and 3 away from home, rows of them. `at_home`:
    home is cut so, nothing switches."""

    layout: Layout
    side: Side
    at_home: bool


def cuts(spec: ModelSpec, edges: Sequence[Edge], home: Layout) -> dict[Layout, Cut]:
    """The cut of every layout; layouts with equal placements share theirs."""
    # A run of one layout asks for no placement of all ranks.
    if len(edges) == 1 and edges[0].use == home:
        return {home: Cut(home, "copies", True)}
    shared: dict[tuple, Cut] = {}
    result = {}
    home_buckets = buckets(spec, home)
    for layout in dict.fromkeys(edge.use for edge in edges):
        # Beside other layouts each is compared as it is under ZeRO-1, as home is.
        sharded = layout
        if len(edges) > 1:
            sharded = replace(layout, zero=max(1, layout.zero))
        layout_buckets = buckets(spec, sharded)
        at_home = layout_buckets == home_buckets
        side: Side = "rows" if sharded.zero >= 2 and not at_home else "copies"
        key = layout_buckets, side
        result[layout] = shared.setdefault(key, Cut(sharded, side, at_home))
    return result


class Itinerary:
    """What moves between the cuts of a run. Mutable: plans are made when they are first asked for,
    and kept."""

    def __init__(
        self,
        spec: ModelSpec,
        edges: Sequence[Edge],
        links: Links,
        weight_bytes: int,
        sum_bytes: int,
        options: SwitchOptions,
        home: Layout | None = None,
    ):
        """`weight_bytes`, `sum_bytes`: of an element on the wire. `home`: the layout that cuts it;
        `home_layout(edges)` by itself."""
        self.spec = spec
        self.links = links
        self.options = options
        self.home = home or home_layout(edges)
        self.cuts = cuts(spec, edges, self.home)
        self._weight_bytes = weight_bytes
        self._sum_bytes = sum_bytes
        self._plans: dict[tuple[Cut | None, Cut, bool], Plan] = {}
        self._hops: dict[tuple[Cut | None, Cut], float] = {}
        self._orders: dict[tuple[Layout, ...], tuple[int, ...]] = {}

    def weights(self, source: Cut | None, target: Cut) -> Plan:
        """The plan of the weights of `target`, from home and, where given,
        from what `source` holds."""
        return self._plan(source, target, sums=False)

    def sums(self, source: Cut) -> Plan:
        """The plan of the gradient sums of `source`, to home."""
        return self._plan(None, source, sums=True)

    def plan_of(self, way: str, previous: Layout | None, layout: Layout) -> Plan:
        """The plan of the gradient sums of `layout`, way "sums", or of its weights after `previous`
        has computed."""
        cut = self.cuts[layout]
        return self.sums(cut) if way == "sums" else self.weights(self.source(previous), cut)

    def source(self, layout: Layout | None) -> Cut | None:
        """What a switch can take from besides home when `layout` has computed: at home, ZeRO-3 has
        released its copies."""
        if layout is None:
            return None
        cut = self.cuts[layout]
        return None if cut.at_home and layout.zero == 3 else cut

    def groups(self, lengths: Sequence[int], edges: Sequence[Edge]) -> tuple[LengthGroup, ...]:
        """The groups of a step of documents of these lengths, in the order of their visits."""
        groups = length_groups(lengths, edges, self.spec)
        return tuple(groups[i] for i in self.order(tuple(group.layout for group in groups)))

    def order(self, layouts: tuple[Layout, ...]) -> tuple[int, ...]:
        """Order in which a step visits these layouts: the one whose switches take the least time.

        Layouts that share a cut follow one another, as nothing moves between them. The last of them
        is one whose copies the next switch can take from, where there is one.
        """
        if layouts in self._orders:
            return self._orders[layouts]

        # 1. Group the layouts by their cut, the one to take from last.
        members: dict[Cut, list[int]] = {}
        for index, layout in enumerate(layouts):
            members.setdefault(self.cuts[layout], []).append(index)
        groups = list(members.values())
        for group in groups:
            group.sort(key=lambda index: (self.source(layouts[index]) is not None, index))

        # 2. Compare the orders of the cuts.
        sources = [self.source(layouts[group[-1]]) for group in groups]
        first = [self._seconds(None, cut) for cut in members]
        hop = [[self._seconds(source, cut) for cut in members] for source in sources]
        visits = visiting_order(first, hop)
        order = tuple(index for visit in visits for index in groups[visit])
        self._orders[layouts] = order
        return order

    def _seconds(self, source: Cut | None, target: Cut) -> float:
        num_cuts = len(set(self.cuts.values()))
        if num_cuts == 1 or source == target:
            return 0.0
        # Copies at home are gathered from home alone.
        if target.at_home:
            source = None
        if (source, target) not in self._hops:
            if num_cuts <= MOST_PLANNED:
                seconds = traffic(self.weights(source, target)).bound_s
            else:
                held = _held(self.spec, self.home, source and (source.layout, source.side))
                target_side = spread_weights(self.spec, target.layout, target.side)
                seconds = least_s(held, target_side, self.links, self._weight_bytes)
            self._hops[source, target] = seconds
        return self._hops[source, target]

    def _plan(self, source: Cut | None, target: Cut, sums: bool) -> Plan:
        key = source, target, sums
        if key not in self._plans:
            # The plainest layouts that place alike are the keys, so that more calls meet in the
            # cache.
            self._plans[key] = _plan(
                spec=self.spec,
                home=plainest(self.home),
                source=source and (plainest(source.layout), source.side),
                target=(plainest(target.layout), target.side),
                links=self.links,
                itemsize=self._sum_bytes if sums else self._weight_bytes,
                planner=self.options.planner,
                bucket_bytes=self.options.bucket_bytes,
                sums=sums,
            )
        return self._plans[key]


def _held(spec: ModelSpec, home: Layout, source: tuple[Layout, Side] | None) -> BoxesByWeight:
    """The boxes that home and `source` have."""
    # Every element once, whatever home keeps: a sum must have one path there.
    rows = spread_weights(spec, home, "rows")
    if source is None:
        return rows
    layout, side = source
    return together(rows, spread_weights(spec, layout, side))


@lru_cache(maxsize=64)  # a planner asks for the same switches in many assignments
def _plan(
    spec: ModelSpec,
    home: Layout,
    source: tuple[Layout, Side] | None,
    target: tuple[Layout, Side],
    links: Links,
    itemsize: int,
    planner: Planner,
    bucket_bytes: int,
    sums: bool,
) -> Plan:
    """The plan of all weights; or, the other way, of the gradient sums of those
    that are trained."""
    held = _held(spec, home, source)
    layout, side = target
    copies = spread_weights(spec, layout, side)
    if sums:
        copies = {name: spread for name, spread in copies.items() if not spec.by_name[name].frozen}
    plan = switch_plan(held, turn_about(held, copies), links, itemsize, planner, bucket_bytes)
    return plan.reversed() if sums else plan
