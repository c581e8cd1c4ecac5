"""What the ranks of a run need for the largest step that its config allows, before anything starts.

The largest step has, for every length group, as many full packs of the longest documents as its tokens can fill. Ranks that compute and
keep alike are weighed once: of the ranks of one stage and tensor-parallel coordinate the first keeps most.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from longshift.layout.heads import own_heads
from longshift.layout.layout import Coord
from longshift.program.book import Peak
from longshift.program.ledger import Ledger, Weighed
from longshift.program.step import Steps, Windows
from longshift.program.turns import Visit, visit_of
from longshift.schedule.inside_rank import Transport
from longshift.spec.formats import Format
from longshift.switch.itinerary import Itinerary
from longshift.workload.groups import Edge

MOST_CHUNKS = 32  # of a pack that are weighed one by one
STRIDE = 8  # chunks between three weighings, from which more follow


@dataclass(frozen=True, eq=False)
class StepShape:
    """What of a run decides how large its steps are. `tokens`: of a step, at least; `longest`: document, in tokens; `ahead`: of streams."""

    itinerary: Itinerary
    edges: tuple[Edge, ...]
    formats: Format
    tokens: int
    longest: int
    ahead: int = 1
    windows: Windows = Windows()  # noqa: RUF009  (frozen)

    def steps(self, rank: int) -> Steps:
        return Steps(self.itinerary, rank, self.formats.compute_bytes, self.formats.home_bytes, self.windows)

    def ledger(self, rank: int, transport: Transport, host_is_device: bool) -> Ledger:
        same = self.formats.compute == self.formats.home
        return Ledger(self.steps(rank), transport, same, host_is_device, self.ahead)

    def of_one_pack(self, edge: Edge, rank: int, transport: Transport, host_is_device: bool) -> Weighed:
        """What a rank needs and sends for one full pack of a group on each replica."""
        visits, packs = largest_step(replace(self, tokens=1), [edge])
        return self.ledger(rank, transport, host_is_device).play(visits, packs)


@dataclass(frozen=True)
class Need:
    """What one rank needs, and ranks like it."""

    rank: int
    weighed: Weighed

    @property
    def device(self) -> Peak:
        return self.weighed.peaks["device"]

    def of(self, place: str) -> int:
        """Bytes at the most in a place."""
        return self.weighed.peaks[place].total if place in self.weighed.peaks else 0


def needs(shape: StepShape, edges: Sequence[Edge], transport: Transport, host_is_device: bool) -> tuple[Need, ...]:
    """Of a largest step that has documents for these groups, in visiting order; one for each kind of rank."""
    order = shape.itinerary.order(tuple(edge.use for edge in edges))
    edges = [edges[i] for i in order]
    chunks = max((-(-edge.upto // edge.use.chunk) for edge in edges if edge.use.chunk), default=0)

    def weighed(rank: int, most_chunks: int) -> Weighed:
        return shape.ledger(rank, transport, host_is_device).play(*largest_step(shape, edges, most_chunks))

    found = []
    for rank in kinds_of_rank(shape):
        one = weighed(rank, MOST_CHUNKS)
        if chunks > MOST_CHUNKS:
            first, second = (weighed(rank, MOST_CHUNKS - number * STRIDE) for number in (2, 1))
            one = extended((first, second, one), (chunks - MOST_CHUNKS) / STRIDE)
        found.append(Need(rank, one))
    return tuple(found)


def extended(known: tuple[Weighed, Weighed, Weighed], times: float) -> Weighed:
    """What a step needs with more chunks than are weighed, so many strides beyond the last of three numbers of chunks. Peaks grow with the
    chunks, what moves with their pairs: the quadratic through the three. No upper bound: too low
    where another group or operation sets the peak of few chunks."""
    last = known[-1]

    def on(numbers: Sequence[int]) -> int:
        a, b, c = numbers
        return c + max(0, math.ceil((c - b) * times + (c - 2 * b + a) * times * (times + 1) / 2))

    def all_of(names: Mapping[str, int], sides: Sequence[Mapping[str, int]]) -> dict[str, int]:
        return {name: on([side.get(name, size) for side in sides]) for name, size in names.items()}

    peaks = {}
    for place, peak in last.peaks.items():
        sides = [one.peaks.get(place, peak) for one in known]
        alive = all_of(dict(peak.alive), [dict(side.alive) for side in sides])
        total = on([side.total for side in sides])
        peaks[place] = Peak(total, peak.op, tuple(sorted(alive.items(), key=lambda row: -row[1])))
    return Weighed(peaks, all_of(last.sent, [one.sent for one in known]), all_of(last.moved, [one.moved for one in known]))


def most(found: Sequence[Need], place: str = "device") -> Need:
    """The one that needs most in a place."""
    return max(found, key=lambda need: need.of(place))


def largest_step(
    shape: StepShape, edges: Sequence[Edge], most_chunks: int = 1 << 62
) -> tuple[tuple[Visit, ...], list[list[tuple[int, ...]]]]:
    """Visits of these groups, and the lengths of the documents of each micro-batch. A pack of a chunked layout has no more than
    `most_chunks` chunks. More micro-batches than a pipeline has under way change no peak, but under gpipe, where all are under way."""
    spec, visits, packs = shape.itinerary.spec, [], []
    for edge in edges:
        layout = edge.use
        capacity = min(edge.upto, layout.chunk * most_chunks) if layout.chunk else edge.upto
        longest = max(1, min(capacity, shape.longest))
        whole, rest = divmod(capacity, longest)
        pack = (longest,) * whole + ((rest,) if rest else ())
        micros = max(1, -(-shape.tokens // (edge.upto * layout.dp)))
        if layout.order != "gpipe":
            micros = min(micros, 2 * layout.pp * layout.virtual + 2)
        packs.append([pack] * micros)
        visits.append(visit_of(spec, layout, packs[-1]))
    return tuple(visits), packs


def kinds_of_rank(shape: StepShape) -> list[int]:
    """One rank of each kind, the heaviest of it: first of all replicas, by stage and by what heads and columns it has."""
    spec, found = shape.itinerary.spec, dict[tuple, int]()
    layouts = [edge.use for edge in shape.edges]
    firsts = {
        layout.rank(Coord(tp, ulysses, 0, 0, pp))
        for layout in layouts
        for pp in range(layout.pp)
        for tp in range(layout.tp)
        for ulysses in range(layout.ulysses)
    }
    for rank in sorted(firsts):
        key = []
        for layout in layouts:
            at = layout.coord(rank)
            parts = tuple(count * (at.tp + 1) // layout.tp - count * at.tp // layout.tp for count in (spec.heads, spec.ffn, spec.vocab))
            key.append((at.pp, at.dp == 0, own_heads(spec, layout, at), parts))
        found.setdefault(tuple(key), rank)
    return list(found.values())
