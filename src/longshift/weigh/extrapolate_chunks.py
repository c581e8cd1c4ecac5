"""What a step needs whose packs have very many chunks, from steps with few.

A document of n chunks has n²/2 pairs of chunks: too many to weigh one by one before a run. What a
rank keeps at one *instant* of a step (an operation; in a chunked turn an event of the first, the
last or the middle chunks) is linear in the number of documents of a pack, in their chunks, and in
those of the shorter document that fills the pack up. What a rank sends and moves is linear in these
and in the pairs. So a few small packs tell what a large one needs, instant by instant. The peak is
the largest of all instants, which need not be the one of small packs.

    pack: [ document | document | ... | rest ]
    documents 3, 4 · chunks of each 9, 12, 15 · of the rest 5, 8

    bytes of a large pack = w1 · bytes of small pack 1 + w2 · bytes of small pack 2 + ...,
    w1 + w2 + ... = 1, with weights that make the measures of the small packs (documents, chunks,
    ..., pairs) those of the large one
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.program.turns import Visit
from longshift.schedule import chunks
from longshift.spec.model import ModelSpec
from longshift.weigh.allocations import Instant, Peak
from longshift.weigh.ledger import Ledger, StepEstimate

# Of small packs.
DOCUMENTS = (3, 4)
CHUNKS = (9, 12, 15)
REST_CHUNKS = (5, 8)

Pack = tuple[int, ...]
Windows = Mapping[int | None, float]


def full_pack(capacity: int, longest: int) -> Pack:
    """Lengths of the documents of a full pack, each as long as can be."""
    longest = max(1, min(capacity, longest))
    documents, rest = divmod(capacity, longest)
    return PackShape(documents, longest, rest).lengths


class PackShape(NamedTuple):
    """So many documents of `longest` tokens, and a shorter one of `rest`, if any."""

    documents: int
    longest: int
    rest: int

    @property
    def lengths(self) -> Pack:
        return (self.longest,) * self.documents + ((self.rest,) if self.rest else ())

    @classmethod
    def of(cls, pack: Pack) -> "PackShape":
        longest = pack[0]
        documents = pack.count(longest)
        return cls(documents, longest, sum(pack) - documents * longest)


def small_packs(layout: Layout, pack: Pack) -> tuple[Pack, list[Pack]]:
    """A full pack, and the small packs to extrapolate from; itself where it is small."""
    if not layout.chunk:
        return pack, [pack]
    shape = PackShape.of(pack)
    longest = shape.longest
    counts: Sequence[int] = [shape.documents]
    if longest * shape.documents > CHUNKS[-1] * layout.chunk and shape.documents > DOCUMENTS[-1]:
        counts = DOCUMENTS
        # Where documents do not end with a chunk, each is taken to fill all the chunks that it
        # may touch: an upper bound.
        if part := longest % layout.chunk:
            longest += 2 * layout.chunk - part

    small = []
    lengths = _small_lengths(longest, CHUNKS, layout.chunk)
    rests = _small_lengths(shape.rest, REST_CHUNKS, layout.chunk)
    for count, length, rest in product(counts, lengths, rests):
        small.append(PackShape(count, length, rest).lengths)
    return PackShape(shape.documents, longest, shape.rest).lengths, small


def _small_lengths(tokens: int, sizes: Sequence[int], chunk: int) -> list[int]:
    """Documents of so many chunks that end as one of `tokens` does; itself where it is small."""
    if tokens <= sizes[-1] * chunk:
        return [tokens]
    return [size * chunk + tokens % chunk for size in sizes]


@dataclass(frozen=True)
class StepRecord:
    """What a step needs at each of its instants.

    `visits`: of each operation, by its number.
    `traffic`: bytes by visit, kind ("sent" or "moved") and name.
    """

    visits: tuple[int, ...]
    snapshots: Mapping[Instant, Mapping[str, Peak]]
    traffic: Mapping[tuple[int, str, str], int]


def record_step(
    ledger: Ledger, visits: Sequence[Visit], packs: Sequence[Sequence[Pack]]
) -> StepRecord:
    """Play one more step, after one that has left all its updates.

    It tells instants apart, where `Ledger.play` tells the peak alone.
    """
    memory = ledger.memory
    ledger.pending_updates = ledger.steps.left()
    snapshots = ledger.allocations.track_instants()
    op_visits: list[int] = []
    traffic = Counter[tuple[int, str, str]]()
    previous = {"sent": Counter[str](), "moved": Counter[str]()}

    def record(op: Op) -> None:
        op_visits.append(op.visit)
        for kind, sizes in (("sent", memory.sent), ("moved", memory.moved)):
            for name, size in (sizes - previous[kind]).items():
                traffic[op.visit, kind, name] += size
            previous[kind] = sizes.copy()

    ledger.play(visits, packs, record, steps=1)
    return StepRecord(tuple(op_visits), snapshots, traffic)


def extrapolate(
    spec: ModelSpec,
    records: Sequence[StepRecord],
    small: Sequence[Sequence[Pack]],
    layouts: Sequence[Layout],
    packs: Sequence[Pack],
) -> StepEstimate:
    """What a step with large packs needs.

    `records`: steps with small packs.
    `small`: their packs, by visit. A visit with fewer packs than there are steps begins anew.
    `layouts`, `packs`: by visit.
    """
    # 1. Weights of the small packs. Pairs of chunks count in traffic alone.
    memory_weights = []
    traffic_weights = []
    for visit_packs, pack, layout in zip(small, packs, layouts):
        memory_weights.append(_pack_weights(visit_packs, pack, layout.chunk, {}))
        traffic_weights.append(_pack_weights(visit_packs, pack, layout.chunk, spec.windows))

    # 2. The peak of each place is the largest of all instants. An instant that a step has not
    #    raised a peak in is taken from the last one.
    last = records[-1]
    peaks: dict[str, Peak] = {}
    for instant, last_snapshots in last.snapshots.items():
        op_number, _ = instant
        weights = memory_weights[last.visits[op_number]]
        for place, snapshot in last_snapshots.items():
            snapshots = []
            for record in records:
                by_place = record.snapshots.get(instant, last_snapshots)
                snapshots.append(by_place.get(place, snapshot))
            total = _weighted_sum(weights, [each.total for each in snapshots])
            if place not in peaks or total > peaks[place].total:
                alive = _weighted_sizes(weights, snapshots, snapshot)
                peaks[place] = Peak.of(total, snapshot.op, alive)

    # 3. Traffic of all operations together.
    traffic = {"sent": Counter[str](), "moved": Counter[str]()}
    for key in last.traffic:
        visit, kind, name = key
        sizes = [record.traffic[key] for record in records]
        traffic[kind][name] += _weighted_sum(traffic_weights[visit], sizes)
    return StepEstimate(peaks, dict(traffic["sent"]), dict(traffic["moved"]))


def _weighted_sizes(
    weights: Sequence[float], snapshots: Sequence[Peak], last: Peak
) -> dict[str, int]:
    """Bytes by name, of the names of the last snapshot."""
    # A name that a snapshot lacks is taken to need there what it needs in the last.
    sizes_by_snapshot = [dict(snapshot.alive) for snapshot in snapshots]
    total = {}
    for name, last_size in last.alive:
        sizes = [by_name.get(name, last_size) for by_name in sizes_by_snapshot]
        total[name] = _weighted_sum(weights, sizes)
    return total


def _pack_weights(
    small: Sequence[Pack], pack: Pack, chunk: int, windows: Windows
) -> Sequence[float]:
    """How much of each small pack makes the large one; together 1."""
    if len(small) == 1:
        return [1.0]
    # Without the last pack's measures, weights of the others need not sum up to anything.
    measures = np.array([_measures(small_pack, chunk, windows) for small_pack in small])
    target = np.array(_measures(pack, chunk, windows))
    last = measures[-1]
    weights = np.linalg.lstsq((measures[:-1] - last).T, target - last, rcond=None)[0]
    return [*weights.tolist(), 1.0 - float(weights.sum())]


def _measures(pack: Pack, chunk: int, windows: Windows) -> list[float]:
    """What bytes are linear in.

    `windows`: those of the model's blocks with their shares, where pairs of chunks count.
    """
    # 1. Documents and chunks.
    shape = PackShape.of(pack)
    length_chunks = shape.longest / chunk
    rest_chunks = shape.rest / chunk
    total_chunks = shape.documents * shape.longest / chunk
    measures = [shape.documents, length_chunks, rest_chunks, total_chunks]

    # 2. Pairs of chunks, the mean of the blocks.
    if windows:
        pack_chunks = chunks.cut_chunks(pack, chunk)
        pairs = 0.0
        for window, share in windows.items():
            sees = chunks.first_key_chunks(pack_chunks, window)
            window_pairs = sum(number - first for number, first in enumerate(sees))
            pairs += share * window_pairs
        measures.append(pairs)
    return measures


def _weighted_sum(weights: Sequence[float], sizes: Sequence[int]) -> int:
    """Rounded up, but for what floating point adds."""
    total = sum(weight * size for weight, size in zip(weights, sizes))
    return math.ceil(round(total, 3))
