"""What a step needs whose packs have very many chunks, from steps with few.

A document of n chunks has n²/2 pairs of chunks: too many to weigh one by one before a run. What a rank keeps at one *moment* of a step (an
operation; in a chunked turn an event of the first, the last or the middle chunks) is linear in the number of documents of a pack, in their
chunks, and in those of the shorter document that fills the pack up. What a rank sends and moves is linear in these and in the pairs. So
a few small packs tell what a large one needs, moment by moment. The peak is the most of all moments, and not always that of small packs.

    pack: [ document | document | ... | rest ]        documents 3, 4 · chunks of each 9, 12, 15 · of the rest 5, 8

    bytes of a large pack = w1 · bytes of small pack 1 + w2 · bytes of small pack 2 + ...,  w1 + w2 + ... = 1,
    with weights that make the measures of the small packs (documents, chunks, ..., pairs) those of the large one
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.program.turns import Visit
from longshift.schedule import chunks
from longshift.spec.model import ModelSpec
from longshift.weigh.book import Mark, Moment, Peak, peak_of
from longshift.weigh.ledger import Ledger, Weighed

DOCUMENTS, CHUNKS, REST = (3, 4), (9, 12, 15), (5, 8)  # of small packs
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
        documents = pack.count(pack[0])
        return cls(documents, pack[0], sum(pack) - documents * pack[0])


def small_packs(layout: Layout, pack: Pack) -> tuple[Pack, list[Pack]]:
    """A full pack, and small packs that tell what it needs; itself where it is small. Of many documents that do not end with a chunk, each
    is taken to fill all the chunks that it may touch: an upper bound."""
    documents, longest, rest = PackShape.of(pack)
    if not layout.chunk:
        return pack, [pack]

    def few(tokens: int, sizes: Sequence[int]) -> list[int]:
        return [tokens] if tokens <= sizes[-1] * layout.chunk else [size * layout.chunk + tokens % layout.chunk for size in sizes]

    numbers: Sequence[int] = [documents]
    if documents * longest > CHUNKS[-1] * layout.chunk and documents > DOCUMENTS[-1]:
        numbers, part = DOCUMENTS, longest % layout.chunk
        longest += 2 * layout.chunk - part if part else 0
    shapes = product(numbers, few(longest, CHUNKS), few(rest, REST))
    return PackShape(documents, longest, rest).lengths, [PackShape(*shape).lengths for shape in shapes]


@dataclass(frozen=True)
class Moments:
    """What a step needs at each of its moments. `visits`: of each operation, by number; `traffic`: bytes by visit, kind and name; `name`:
    of an operation."""

    visits: tuple[int, ...]
    marks: Mapping[Moment, Mapping[str, Mark]]
    traffic: Mapping[tuple[int, str, str], int]
    name: Callable[[Op], str]


def moments_of(ledger: Ledger, visits: Sequence[Visit], packs: Sequence[Sequence[Pack]]) -> Moments:
    """What one more step on a ledger needs, where `Ledger.play` tells the most alone; after one that has left all updates."""
    ledger.left = ledger.steps.left()
    moments = ledger.book.watch()
    order, traffic, before = list[int](), Counter[tuple[int, str, str]](), Counter[tuple[str, str]]()

    def after(op: Op) -> None:
        nonlocal before
        order.append(op.visit)
        ways = ("sent", ledger.account.sent), ("moved", ledger.account.moved)
        now = Counter({(way, name): size for way, sizes in ways for name, size in sizes.items()})
        traffic.update({(op.visit, *key): size for key, size in (now - before).items()})
        before = now

    ledger.play(visits, packs, after, steps=1)
    return Moments(tuple(order), moments, traffic, ledger.name)


def extended(
    spec: ModelSpec, known: Sequence[Moments], small: Sequence[Sequence[Pack]], layouts: Sequence[Layout], packs: Sequence[Pack]
) -> Weighed:
    """What a step with these packs needs. `known`: steps with small packs; `small`: their packs, by visit, each list as long as it is and
    then begun again; `layouts`, `packs`: by visit."""
    last = known[-1]
    memory, pairs = (
        [_weights(few, pack, layout.chunk, windows) for few, pack, layout in zip(small, packs, layouts)] for windows in ({}, spec.windows)
    )
    peaks = dict[str, Peak]()
    for moment, found in last.marks.items():
        weights = memory[last.visits[moment[0]]]
        for place, mark in found.items():
            sides = [one.marks.get(moment, found).get(place, mark) for one in known]
            total = _sum(weights, [side.total for side in sides])
            if place not in peaks or total > peaks[place].total:
                alive = [side.alive for side in sides]
                sizes = {name: _sum(weights, [side.get(name, size) for side in alive]) for name, size in mark.alive.items()}
                peaks[place] = peak_of(total, last.name(mark.op), sizes)
    traffic = {"sent": Counter[str](), "moved": Counter[str]()}
    for visit, what, name in last.traffic:
        traffic[what][name] += _sum(pairs[visit], [one.traffic[visit, what, name] for one in known])
    return Weighed(peaks, dict(traffic["sent"]), dict(traffic["moved"]))


def _weights(few: Sequence[Pack], pack: Pack, chunk: int, windows: Windows) -> list[float]:
    """How much of each small pack makes the large one; together 1."""
    if len(few) == 1:
        return [1.0]
    *others, last = (np.array(_measures(one, chunk, windows)) for one in few)
    wanted = np.array(_measures(pack, chunk, windows)) - last
    found = np.linalg.lstsq(np.array([one - last for one in others]).T, wanted, rcond=None)[0]
    return [*map(float, found), 1.0 - float(found.sum())]


def _measures(pack: Pack, chunk: int, windows: Windows) -> list[float]:
    """`windows`: those of the model's blocks with their shares, where pairs of chunks count."""
    documents, longest, rest = PackShape.of(pack)
    found = [documents, longest / chunk, rest / chunk, documents * longest / chunk]
    if windows:
        cut = chunks.cut(pack, chunk)
        sees = [(share, enumerate(chunks.reach(cut, window))) for window, share in windows.items()]
        found.append(sum(share * sum(number - first for number, first in seen) for share, seen in sees))
    return found


def _sum(weights: Sequence[float], sizes: Sequence[int]) -> int:
    """Rounded up, but for what floating point adds."""
    return math.ceil(round(sum(weight * size for weight, size in zip(weights, sizes)), 3))
