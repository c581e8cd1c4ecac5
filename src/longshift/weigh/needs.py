"""What the ranks of a run need for the largest step that its config allows, before anything starts.

The largest step has, for every length group, as many full packs of the longest documents as its tokens can fill; on a GPU, where what
attention holds depends on lengths, of those in which it holds most. Ranks that compute and keep alike are weighed once: of the ranks of one
stage and tensor-parallel coordinate the first keeps most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from longshift.cluster.cluster import Number
from longshift.layout import axes
from longshift.layout.heads import own_heads
from longshift.layout.home_tiers import HomeTiers
from longshift.model.kernel_calls import LONG
from longshift.program.step import Steps
from longshift.program.turns import Visit, visit_of
from longshift.schedule.sequence import pack_order
from longshift.spec.formats import Format
from longshift.spec.model import share
from longshift.switch.itinerary import Itinerary
from longshift.weigh.book import Peak
from longshift.weigh.ledger import Ledger, Weighed
from longshift.weigh.many_chunks import Pack, extended, full_pack, moments_of, small_packs
from longshift.weigh.recorder import Transport
from longshift.weigh.turn_profile import RankSetup, unit_turn
from longshift.workload.groups import Edge


@dataclass(frozen=True, eq=False)
class StepShape:
    """What of a run decides how large its steps are. `tokens`: of a step, at least; `longest`: document, in tokens; `ahead`: of streams;
    `home_in`: where the training state lies; `early`: whether units on disk
    may be updated before the norm."""

    itinerary: Itinerary
    edges: tuple[Edge, ...]
    formats: Format
    tokens: int
    longest: int
    ahead: int = 1
    home_in: HomeTiers = HomeTiers()  # noqa: RUF009  (frozen)
    early: bool = True

    def steps(self, rank: int) -> Steps:
        formats = self.formats
        return Steps(
            self.itinerary,
            rank,
            formats.compute_bytes,
            formats.home_bytes,
            self.home_in,
            moments=formats.moments,
            packed=formats.packed,
            wire=formats.wire,
            doubled=self.early and not formats.scaled,
        )

    def ledger(self, rank: int, transport: Transport, host_is_device: bool, inside: bool = True) -> Ledger:
        same = self.formats.compute == self.formats.home
        return Ledger(self.steps(rank), transport, same, host_is_device, self.ahead, self.formats.float8, inside)

    def heaviest_pack(self, edge: Edge, rank: int, transport: Transport) -> Pack:
        """Lengths of the documents of a group's full pack with which a rank needs most: the longest; or on a GPU those just below, which
        attention's kernel is cut for (`model.cut`), or the longest of which a whole pack is one call (`model.kernel_calls`)."""
        longest, layout = min(edge.upto, self.longest), edge.use
        full = full_pack(edge.pack, longest)
        if transport != "nccl" or layout.chunk or longest < LONG:
            return full
        formats = self.formats
        setup = RankSetup(self.itinerary.spec, layout, layout.coord(rank), formats.compute_bytes, transport, formats.float8)

        def held(pack: Pack) -> int:
            return unit_turn(setup, pack_order(layout, pack), "attention half", "backward").peak

        return max((full, full_pack(edge.pack, longest - 1), full_pack(edge.pack, LONG - 1)), key=held)

    def of_one_pack(self, edge: Edge, rank: int, transport: Transport, host_is_device: bool) -> Weighed:
        """What a rank needs and sends for one full pack of a group on each replica."""
        return replace(self, tokens=1).weighed([edge], rank, transport, host_is_device)

    def weighed(self, edges: Sequence[Edge], rank: int, transport: Transport, host_is_device: bool) -> Weighed:
        """What a rank needs and sends in the largest step with documents for these groups, in visiting order."""
        packs, small = zip(*(small_packs(edge.use, self.heaviest_pack(edge, rank, transport)) for edge in edges))
        steps = [largest_step(self, edges, [few[step % len(few)] for few in small]) for step in range(max(map(len, small)))]
        ledger = self.ledger(rank, transport, host_is_device)
        if len(steps) == 1:
            return ledger.play(*steps[0])
        ledger.play(*steps[0], steps=1)
        known = [moments_of(ledger, *step) for step in steps]
        return extended(self.itinerary.spec, known, small, [edge.use for edge in edges], packs)


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
    """Memory needs of the largest step with documents for these groups, one for each kind of rank."""
    order = shape.itinerary.order(tuple(edge.use for edge in edges))
    edges = [edges[i] for i in order]
    return tuple(Need(rank, shape.weighed(edges, rank, transport, host_is_device)) for rank in kinds_of_rank(shape))


def most(found: Sequence[Need], place: str = "device") -> Need:
    """The one that needs most in a place."""
    return max(found, key=lambda need: need.of(place))


def largest_step(shape: StepShape, edges: Sequence[Edge], packs: Sequence[Pack]) -> tuple[tuple[Visit, ...], list[list[Pack]]]:
    """Visits of these groups, and the lengths of the documents of each micro-batch, `packs` as often as the tokens of full ones can fill
    them. More micro-batches than a pipeline has under way change no peak, but under gpipe and vertical, where all are under way."""
    spec, visits, micros = shape.itinerary.spec, [], []
    for edge, pack in zip(edges, packs):
        micros.append([pack] * micros_of(shape.tokens, edge))
        visits.append(visit_of(spec, edge.use, micros[-1]))
    return tuple(visits), micros


def micros_of(tokens: int, edge: Edge) -> int:
    """How many micro-batches of a group are weighed of a step with so many tokens."""
    layout = edge.use
    return int(micros_weighed(tokens, edge.pack * layout.dp, layout.pp * layout.virtual, layout.order == "1f1b"))


def micros_weighed(tokens: int, round_tokens: Number, chunks: Number, is_1f1b: np.ndarray | bool) -> np.ndarray:
    """The same for numbers or arrays. `round_tokens`: of a full pack on every replica; `chunks`: model chunks of all stages."""
    full = np.maximum(1, -(-tokens // np.asarray(round_tokens))).astype(np.int64)
    return np.where(is_1f1b, np.minimum(full, 2 * np.asarray(chunks) + 1), full)


def kinds_of_rank(shape: StepShape) -> list[int]:
    """One rank of each kind, the heaviest of it: first of all replicas, by stage and by what heads and columns it has."""
    spec, found = shape.itinerary.spec, dict[tuple, int]()
    layouts = [edge.use for edge in shape.edges]
    uneven_axes = [axis.name for axis in (*axes.weight_axes(), *axes.neighbor_axes())]
    firsts = {rank for layout in layouts for rank in layout.ranks(*uneven_axes, "pp", of=0)}
    for rank in sorted(firsts):
        key = []
        for layout in layouts:
            at = layout.coord(rank)
            cut = layout.place(at, axes.weight_axes())
            shares = [share(count, layout.weight_ranks, cut) for count in (spec.heads, spec.ffn, spec.vocab)]
            sizes = tuple(last - first for first, last in shares)
            key.append((at.pp, at.dp == 0, own_heads(spec, layout, at), sizes))
        found.setdefault(tuple(key), rank)
    return list(found.values())
