"""The way of a step through its layouts: which cut of the model each computes with, what moves between cuts, and in which order they are
visited.

    groups    dp4 <= 1K        u4 <= 4K         tp4 <= 16K
    cuts      ──── one: the same copies ─────   ─── home ───
    weights   home ══> gather or switch         gather          each cut once a step, in the order that moves least
    gradients                     ══> home          ══> home    when the last group of a cut is done

Home is cut as the longest group's layout would cut it, under ZeRO-1 at least: every element is kept once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from longshift.layout.layout import Layout
from longshift.layout.placement import buckets
from longshift.spec.model import ModelSpec
from longshift.switch.links import Links
from longshift.switch.options import Planner, SwitchOptions
from longshift.switch.placed import Placed, Side, placed, plainest, together, turn_about
from longshift.switch.plan import Plan, switch_plan
from longshift.switch.traffic import least_s, traffic
from longshift.workload.groups import Edge, home_layout, visiting_order

MOST_PLANNED = 4  # cuts: n of them are n * n plans to compare, a second each for a large model; of more, estimates are compared


@dataclass(frozen=True)
class Cut:
    """One way to cut the model. `layout`: the first of those that compute with it. `side`: what switches bring, working copies or, under
    ZeRO-2 and 3 away from home, rows of them. `at_home`: home is cut so, nothing switches."""

    layout: Layout
    side: Side
    at_home: bool


def cuts(spec: ModelSpec, edges: Sequence[Edge], home: Layout) -> dict[Layout, Cut]:
    """The cut of every layout; layouts with equal placements share theirs."""
    if len(edges) == 1 and edges[0].use == home:  # a run of one layout asks for no placement of all ranks
        return {home: Cut(home, "copies", True)}
    found: dict[tuple, Cut] = {}
    result = {}
    for layout in dict.fromkeys(edge.use for edge in edges):
        how = layout if len(edges) == 1 else replace(layout, zero=max(1, layout.zero))
        own = buckets(spec, how)
        at_home = own == buckets(spec, home)
        side: Side = "rows" if how.zero >= 2 and not at_home else "copies"
        result[layout] = found.setdefault((own, side), Cut(how, side, at_home))
    return result


class Itinerary:
    """What moves between the cuts of a run. Mutable: plans are made when they are first asked for, and kept."""

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
        """`weight_bytes`, `sum_bytes`: of an element on the wire. `home`: the layout that cuts it; `home_layout(edges)` by itself."""
        self.spec, self.links, self.options = spec, links, options
        self.home = home or home_layout(edges)
        self.cuts = cuts(spec, edges, self.home)
        self._bytes = weight_bytes, sum_bytes
        self._weights: dict[tuple[Cut | None, Cut], Plan] = {}
        self._sums: dict[Cut, Plan] = {}
        self._hops: dict[tuple[Cut | None, Cut], float] = {}
        self._orders: dict[tuple[Layout, ...], tuple[int, ...]] = {}

    def weights(self, source: Cut | None, target: Cut) -> Plan:
        """The plan of the weights of `target`, from home and, where given, from what `source` holds."""
        if (source, target) not in self._weights:
            self._weights[source, target] = self._plan(source, target, self._bytes[0], False)
        return self._weights[source, target]

    def sums(self, source: Cut) -> Plan:
        """The plan of the gradient sums of `source`, to home."""
        if source not in self._sums:
            self._sums[source] = self._plan(None, source, self._bytes[1], True)
        return self._sums[source]

    def source(self, layout: Layout) -> Cut | None:
        """What a switch can take from besides home when `layout` has computed: at home, ZeRO-3 has released its copies."""
        cut = self.cuts[layout]
        return None if cut.at_home and layout.zero == 3 else cut

    def order(self, layouts: tuple[Layout, ...]) -> tuple[int, ...]:
        """In which order to visit these, of one step: the one whose switches take least. Layouts that share a cut follow one another, as
        nothing moves between them; the last of them is one whose copies the next switch can take from, where there is one."""
        if layouts not in self._orders:
            members: dict[Cut, list[int]] = {}
            for index, layout in enumerate(layouts):
                members.setdefault(self.cuts[layout], []).append(index)
            for some in members.values():
                some.sort(key=lambda index: (self.source(layouts[index]) is not None, index))
            sources = [self.source(layouts[some[-1]]) for some in members.values()]
            first = [self._seconds(None, cut) for cut in members]
            hop = [[self._seconds(source, cut) for cut in members] for source in sources]
            visited = visiting_order(first, hop)
            nodes = list(members.values())
            self._orders[layouts] = tuple(index for node in visited for index in nodes[node])
        return self._orders[layouts]

    def _seconds(self, source: Cut | None, target: Cut) -> float:
        if len(set(self.cuts.values())) == 1 or source == target:
            return 0.0
        key = (None if target.at_home else source), target
        if key not in self._hops:
            if len(set(self.cuts.values())) <= MOST_PLANNED:
                self._hops[key] = traffic(self.weights(*key)).bound_s
            else:
                held = _held(self.spec, (self.home, "rows"), key[0] and (key[0].layout, key[0].side))
                self._hops[key] = least_s(held, placed(self.spec, target.layout, target.side), self.links, self._bytes[0])
        return self._hops[key]

    def _plan(self, source: Cut | None, target: Cut, itemsize: int, sums: bool) -> Plan:
        options, cuts = self.options, (cut and (plainest(cut.layout), cut.side) for cut in (source, target))
        return _plan(self.spec, (plainest(self.home), "rows"), *cuts, self.links, itemsize, options.planner, options.bucket_bytes, sums)


def _held(spec: ModelSpec, home: tuple[Layout, Side], source: tuple[Layout, Side] | None) -> Placed:
    """What home and `source` have."""
    rows = placed(spec, *home)
    return together(rows, placed(spec, *source)) if source else rows


@lru_cache(maxsize=64)  # a planner asks for the same switches in many assignments
def _plan(
    spec: ModelSpec,
    home: tuple[Layout, Side],
    source: tuple[Layout, Side] | None,
    target: tuple[Layout, Side],
    links: Links,
    itemsize: int,
    planner: Planner,
    bucket_bytes: int,
    sums: bool,
) -> Plan:
    """The plan of all weights; or, the other way, of the gradient sums of those that are trained."""
    held, wanted = _held(spec, home, source), placed(spec, *target)
    if sums:
        wanted = {name: spread for name, spread in wanted.items() if not spec.by_name[name].frozen}
    plan = switch_plan(held, turn_about(held, wanted), links, itemsize, planner, bucket_bytes)
    return plan.reversed() if sums else plan
