"""Memory that the ranks of a run need for the largest step that its config allows, before anything
starts.

The largest step has, for every length group, as many full packs of the longest documents as its
tokens can fill. On a GPU, where what attention keeps depends on lengths, they are the documents of
which it keeps most. Ranks that compute and keep alike are weighed once: of the ranks of one stage
and tensor-parallel coordinate the first keeps most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from longshift.cluster.cluster import Number
from longshift.layout import axes
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.placement import rank_heads
from longshift.model.packed_attention import LONG
from longshift.program.step import Steps
from longshift.program.turns import Visit, visit_of
from longshift.schedule.sequence import pack_order
from longshift.spec.formats import Format
from longshift.spec.model import ModelSpec
from longshift.spec.param import share
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import Links
from longshift.switch.options import SwitchOptions
from longshift.weigh.allocations import Peak, RankMemory
from longshift.weigh.extrapolate_chunks import (
    Pack,
    extrapolate,
    full_pack,
    record_step,
    small_packs,
)
from longshift.weigh.ledger import Ledger, StepEstimate
from longshift.weigh.recorder import Transport
from longshift.weigh.turn_profile import RankSetup, unit_turn
from longshift.workload.groups import Edge


@dataclass(frozen=True, eq=False)
class StepShape:
    """What decides how large the steps of a run are.

    `tokens`: of a step, at least.
    `longest`: document, in tokens.
    `home_in`: where the training state lies.
    `early`: whether units on disk may be updated before the norm.
    """

    itinerary: Itinerary
    edges: tuple[Edge, ...]
    formats: Format
    tokens: int
    longest: int
    home_in: HomeTiers = HomeTiers()  # noqa: RUF009  (frozen)
    early: bool = True

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        edges: tuple[Edge, ...],
        links: Links,
        formats: Format,
        tokens: int,
        longest: int,
        home_in: HomeTiers = HomeTiers(),  # noqa: B008  (frozen)
        early: bool = True,
    ) -> "StepShape":
        """The shape of steps whose switches cross `links`."""
        compute_bytes, home_bytes = formats.compute_bytes, formats.home_bytes
        itinerary = Itinerary(spec, edges, links, compute_bytes, home_bytes, SwitchOptions())
        return cls(itinerary, edges, formats, tokens, longest, home_in, early)

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

    def ledger(self, rank: int, transport: Transport, with_peaks: bool = True) -> Ledger:
        memory = RankMemory(
            self.steps(rank),
            transport,
            same_format=self.formats.compute == self.formats.home,
            float8=self.formats.float8,
            with_peaks=with_peaks,
        )
        return Ledger(memory)

    def heaviest_pack(self, edge: Edge, rank: int, transport: Transport) -> Pack:
        """Lengths of the documents of the full pack of a group for which a rank needs most."""
        layout = edge.use
        longest = min(edge.upto, self.longest)
        pack = full_pack(edge.pack, longest)
        if transport != "nccl" or layout.chunk or longest < LONG:
            return pack

        # A GPU may need more for shorter documents: those that attention's kernel is cut for
        # (`model.cut`), and the longest of which a whole pack is one call
        # (`model.packed_attention`).
        spec = self.itinerary.spec
        setup = RankSetup(
            spec=spec,
            layout=layout,
            coord=layout.coord(rank),
            compute_bytes=self.formats.compute_bytes,
            transport=transport,
            float8=self.formats.float8,
        )

        def attention_peak(pack: Pack) -> int:
            order = pack_order(layout, pack)
            # Blocks with a window compute a pack in one call, whatever its lengths: the sum is
            # largest where blocks without one need most.
            kinds = {spec.like(block) for block in range(1, spec.layers + 1)}
            return sum(
                unit_turn(setup, order, "attention half", "backward", kind).peak for kind in kinds
            )

        shorter_packs = [full_pack(edge.pack, length) for length in (longest - 1, LONG - 1)]
        return max([pack, *shorter_packs], key=attention_peak)

    def pack_estimate(self, edge: Edge, rank: int, transport: Transport) -> StepEstimate:
        """What a rank needs and sends for one full pack of a group on each replica."""
        return replace(self, tokens=1).estimate([edge], rank, transport)

    def estimate(self, edges: Sequence[Edge], rank: int, transport: Transport) -> StepEstimate:
        """What a rank needs and sends in the largest step with documents for these groups, in
        visiting order."""
        # 1. Choose packs that are small enough to weigh. A step has one of each group, and groups
        #    that have fewer of them than others begin theirs anew.
        packs: list[Pack] = []
        small: list[list[Pack]] = []
        for edge in edges:
            pack, edge_packs = small_packs(edge.use, self.heaviest_pack(edge, rank, transport))
            packs.append(pack)
            small.append(edge_packs)
        steps = []
        for number in range(max(len(edge_packs) for edge_packs in small)):
            step_packs = [edge_packs[number % len(edge_packs)] for edge_packs in small]
            steps.append(largest_step(self, edges, step_packs))

        # 2. Weigh them, and extrapolate where they are not the packs themselves. A first step
        #    leaves working copies, with one micro-batch as well as with all.
        ledger = self.ledger(rank, transport)
        if len(steps) == 1:
            return ledger.play(steps[0].visits, steps[0].packs)
        first = largest_step(
            replace(self, tokens=1), edges, [edge_packs[0] for edge_packs in small]
        )
        ledger.play(first.visits, first.packs, steps=1)
        records = [record_step(ledger, step.visits, step.packs) for step in steps]
        layouts = [edge.use for edge in edges]
        return extrapolate(self.itinerary.spec, records, small, layouts, packs)


@dataclass(frozen=True)
class Need:
    """What one rank needs, and ranks like it."""

    rank: int
    estimate: StepEstimate

    @property
    def device(self) -> Peak:
        return self.estimate.peaks["device"]

    def of(self, place: str) -> int:
        """Bytes at the peak of a place."""
        return self.estimate.peaks[place].total if place in self.estimate.peaks else 0


def memory_needs(shape: StepShape, edges: Sequence[Edge], transport: Transport) -> tuple[Need, ...]:
    """Memory needs of the largest step with documents for these groups, one for each kind of
    rank."""
    # A switch takes from the copies of the visit before: the order decides what moves.
    order = shape.itinerary.order(tuple(edge.use for edge in edges))
    visited_edges = [edges[index] for index in order]
    needs = []
    for rank in representative_ranks(shape):
        estimate = shape.estimate(visited_edges, rank, transport)
        needs.append(Need(rank, estimate))
    return tuple(needs)


def largest_need(needs: Sequence[Need], place: str = "device") -> Need:
    return max(needs, key=lambda need: need.of(place))


class GroupedStep(NamedTuple):
    """Visits of a step, and the lengths of the documents of each micro-batch, by visit."""

    visits: tuple[Visit, ...]
    packs: list[list[Pack]]


def largest_step(shape: StepShape, edges: Sequence[Edge], packs: Sequence[Pack]) -> GroupedStep:
    """The largest step that visits these groups. `packs`: one of each group, repeated as often as
    the tokens of full ones can fill them."""
    spec = shape.itinerary.spec
    visits: list[Visit] = []
    packs_by_visit: list[list[Pack]] = []
    for edge, pack in zip(edges, packs):
        micro_packs = [pack] * micro_count(shape.tokens, edge, shape.longest)
        packs_by_visit.append(micro_packs)
        visits.append(visit_of(spec, edge.use, micro_packs))
    return GroupedStep(tuple(visits), packs_by_visit)


def micro_count(tokens: int, edge: Edge, longest: int) -> int:
    """How many micro-batches of a group are weighed of a step with so many tokens. `longest`:
    document of the run."""
    layout = edge.use
    round_tokens = edge.pack * layout.dp
    stage_chunks = layout.pp * layout.virtual
    longest = min(longest, edge.upto)
    return int(micro_counts(tokens, longest, round_tokens, stage_chunks, layout.order == "1f1b"))


def micro_counts(
    tokens: int,
    longest: Number,
    round_tokens: Number,
    chunks: Number,
    is_1f1b: np.ndarray | bool,
) -> np.ndarray:
    """`micro_count` of numbers or arrays.

    `longest`: document of the group, in tokens.
    `round_tokens`: of a full pack on every replica.
    `chunks`: model chunks of all stages.
    """
    # Documents are drawn until a step has its tokens, so the last one may begin before its end.
    most_tokens = np.asarray(tokens - 1 + longest)
    full = np.maximum(1, np.ceil(most_tokens / round_tokens)).astype(np.int64)

    # More micro-batches than a pipeline has under way change no peak. Under gpipe and vertical
    # all are under way.
    under_way = 2 * np.asarray(chunks) + 1
    return np.where(is_1f1b, np.minimum(full, under_way), full)


def representative_ranks(shape: StepShape) -> list[int]:
    """One rank of each kind, the one that needs most: of all replicas the first, by stage, and by
    the heads and columns that it has."""
    spec = shape.itinerary.spec
    layouts = [edge.use for edge in shape.edges]

    # 1. The first ranks along all axes whose other ranks keep no more.
    uneven_axes = [axis.name for axis in (*axes.weight_axes(), *axes.neighbor_axes())]
    firsts = set[int]()
    for layout in layouts:
        firsts.update(layout.ranks(*uneven_axes, "pp", of=0))

    # 2. Of those that have equally much under all layouts, the first.
    ranks: dict[tuple, int] = {}
    for rank in sorted(firsts):
        key = []
        for layout in layouts:
            coord = layout.coord(rank)
            place = layout.place(coord, axes.weight_axes())
            sizes = []
            for count in (spec.heads, spec.ffn, spec.vocab):
                first, last = share(count, layout.weight_ranks, place)
                sizes.append(last - first)
            heads = rank_heads(spec, layout, coord)
            key.append((coord.pp, coord.dp == 0, heads, tuple(sizes)))
        ranks.setdefault(tuple(key), rank)
    return list(ranks.values())
