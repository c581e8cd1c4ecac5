"""The best layouts for the documents of a run: one for all, or one for each group of lengths.

    1  every layout of the world (`planner.meshes`), without those that cannot fit (`planner.bounds`)
    2  of each bin of lengths the fastest few in closed form (`simulate.closed`): the layouts that are compared from here on
    3  groups: dynamic programming over the bins' ends. A group is a run of bins, a layout and a capacity of packs; between groups with
       other weights there is a switch
    4  the best of 3, the best single layouts among them, weighed by the ledger and played on the clock, on real draws of a step

Draws are of documents as a run draws them, dealt and packed as a run does. So what is chosen is, on the clock, never worse than the best
single layout that was played.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longshift.layout import legal
from longshift.layout.layout import Layout
from longshift.planner.bounds import device_bytes
from longshift.planner.meshes import Layouts, layouts_of
from longshift.planner.replay import Replay, Task, Way, without_cuts
from longshift.simulate.closed import closed_form
from longshift.workload.groups import Edge

SHORTEST = 512  # the least end of a bin, in tokens
LARGEST_PACK = 1 << 16  # tokens, beyond which a pack of several documents gains nothing
A_BIN = 6  # layouts that are kept of a bin
MOST_GROUPS = 4
PLAYED = 6  # choices of groups, and as many single layouts
PARTS_OF_BUDGET = (1.0, 0.9, 0.8, 0.65)  # that layouts may take by their bounds: groups together need more than each
CHUNKS = (1 << 14, 1 << 16)  # of streamed layouts, which are tried where nothing else fits


@dataclass(frozen=True)
class Choice:
    """What a search found. `ways`: all that were played and fit, fastest first; `single`: the best of one layout; `context_parallel`: the
    best of those whose layouts differ in Ulysses, ring and replicas only; `short`: ways that do not fit, with the bytes that each lacks;
    `refused`: layouts by reason; `candidates`: how many layouts there were."""

    ways: tuple[Way, ...]
    single: Way | None
    context_parallel: Way | None
    short: tuple[tuple[Way, int], ...]
    refused: Mapping[str, int]
    candidates: int

    @property
    def best(self) -> Way | None:
        return next(iter(self.ways), None)


def search(task: Task, tell: Callable[[str], None] = lambda line: None) -> Choice:
    """The best ways of a task. `tell`: what is being done."""
    return _Search(task, tell).run()


class _Search:
    """A search while it goes on. Mutable: what has been played."""

    def __init__(self, task: Task, tell: Callable[[str], None]):
        self.task, self.tell = task, tell
        self.replay = Replay(task)
        self.formats, self.transport, self.cost = self.replay.formats, self.replay.transport, self.replay.cost
        self.ends = self._ends()
        self.bins = self._bins()
        self.part = 1.0

    def run(self) -> Choice:
        candidates = 0
        every, refused = layouts_of(self.task.spec, self.task.world, self.task.fixed)
        self.tell(f"{len(every):,} layouts of {self.task.world} ranks")
        groups: dict[tuple[Edge, ...], None] = {}
        fitting = 0
        for self.part in PARTS_OF_BUDGET:
            kept, possible = self._kept(every)
            if self.part == PARTS_OF_BUDGET[0]:
                refused = refused + Counter({"more memory than there is, for any document": len(every) - possible})
                candidates = sum(refused.values()) + possible
            if not kept:
                break
            layouts = [every.layout(index) for index in kept]
            table = _Table(self, every.take(np.array(kept, int)), layouts)
            context = [k for k, one in enumerate(layouts) if one.tp == one.pp == 1]
            some = [*table.best(range(len(layouts)), MOST_GROUPS, PLAYED), *table.best(range(len(layouts)), 1, PLAYED)]
            some += [*table.best(context, MOST_GROUPS, 2), *table.best(context, 1, 1)]
            groups |= dict.fromkeys(some)
            fitting += sum(self.replay.fits(edges) for edges in dict.fromkeys(some))
            if fitting >= PLAYED:
                break
        if not fitting:
            groups |= dict.fromkeys(self._streamed())
        ways = self.replay.fastest(groups)
        lacking = [self.replay.way(edges) for edges in groups if not self.replay.fits(edges)]
        return Choice(
            tuple(ways),
            next((way for way in ways if len(way.edges) == 1), None),
            next((way for way in ways if without_cuts(way.edges)), None),
            tuple(sorted(((way, int(way.bytes["device"] - self.task.budget_bytes)) for way in lacking), key=lambda row: row[1])),
            dict(refused),
            candidates,
        )

    def _ends(self) -> list[int]:
        """Ends of bins: powers of two with documents between them, and the longest document."""
        lengths, longest = self.task.lengths.lengths, self.task.longest
        powers = [1 << n for n in range(SHORTEST.bit_length() - 1, longest.bit_length()) if 1 << n < longest]
        counts = np.searchsorted(lengths, [0, *powers], side="right")
        return [end for end, low, high in zip(powers, counts, counts[1:]) if high > low] + [longest]

    def _bins(self) -> np.ndarray:
        """What a step has of each bin: documents, tokens, causal pairs, tokens * length; float64 [bins, 4]."""
        lengths, counts = (values.astype(float) for values in (self.task.lengths.lengths, self.task.lengths.counts))
        cuts = np.searchsorted(lengths, [0, *self.ends], side="right")
        rows = np.stack([counts, counts * lengths, counts * lengths**2 / 2, counts * lengths**2], 1)
        sums = np.concatenate([np.zeros((1, 4)), rows.cumsum(0)])[cuts]
        return np.diff(sums, axis=0) * (self.task.tokens_per_step / (counts @ lengths))

    def load(self, some: np.ndarray, dp: np.ndarray, pack: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Micro-batches of a replica, tokens and pairs of each, [layouts]: as even as whole documents can be dealt. `some`: a row of bins'
        sums."""
        documents, tokens, pairs, weighted = some
        typical = weighted / tokens  # of the document that a token is in
        micros = np.maximum(1.0, np.ceil(tokens / (dp * pack)))
        each = np.maximum(tokens / (dp * micros), min(typical, tokens / max(documents, 1e-9) if documents < 1 else typical))
        return micros, each, each * pairs / tokens

    def packs(self, upto: int) -> list[int]:
        """Capacities that are tried for packs of documents up to so many tokens."""
        found = [upto]
        while found[-1] * 2 <= LARGEST_PACK:
            found.append(found[-1] * 2)
        return found

    def fits(self, some: Layouts, pack: int, micros: np.ndarray) -> np.ndarray:
        least = device_bytes(self.task.spec, some, np.full(len(some), float(pack)), micros, self.formats, self.transport)  # pyright: ignore[reportArgumentType]
        return least <= self.part * self.task.budget_bytes

    def _kept(self, every: Layouts) -> tuple[list[int], int]:
        """Layouts that are among the fastest for a bin and may fit it, and how many may fit any."""
        kept: dict[int, None] = {}
        any_fits = np.zeros(len(every), bool)
        everything = self.bins.sum(0)
        for row, end in [*zip(self.bins, self.ends), (everything, self.ends[-1])]:
            for pack in {end, max(end, min(LARGEST_PACK, 1 << 14))}:
                load = self.load(row, every.dp, pack)
                fits = self.fits(every, pack, load[0])
                any_fits |= fits
                index = np.flatnonzero(fits)
                if len(index):
                    some = every.take(index)
                    seconds = closed_form(self.cost, some.candidates(*(value[index] for value in load))).total
                    kept |= dict.fromkeys(index[np.argsort(seconds, kind="stable")[:A_BIN]].tolist())
        return list(kept), int(any_fits.sum())

    def _streamed(self) -> list[tuple[Edge, ...]]:
        """Single streamed layouts, which need least: sequences over all ranks that heads allow."""
        task, found = self.task, []
        ulysses = max(n for n in range(1, task.spec.heads + 1) if task.world % n == 0 and task.spec.heads % n == 0)
        for chunk in CHUNKS:
            for offload in ("device", "host"):
                layout = Layout(ulysses=ulysses, ring=task.world // ulysses, zero=3 if task.world > 1 else 0, chunk=chunk, offload=offload)
                if not legal.faults(task.spec, layout, task.world, task.longest):
                    found.append((Edge(task.longest, layout),))
        return found


class _Table:
    """Seconds of groups under the layouts that were kept."""

    def __init__(self, search: _Search, some: Layouts, layouts: Sequence[Layout]):
        self.search, self.layouts, self.ends = search, layouts, search.ends
        count = len(self.ends)
        sums = np.concatenate([np.zeros((1, 4)), search.bins.cumsum(0)])
        self.seconds = np.full((count, count, len(layouts)), np.inf)  # of bins i to j
        self.pack = np.zeros((count, count, len(layouts)), int)
        for i in range(count):
            for j in range(i, count):
                row = sums[j + 1] - sums[i]
                for pack in search.packs(self.ends[j]):
                    load = search.load(row, some.dp, pack)
                    found = closed_form(search.cost, some.candidates(*load))
                    seconds = np.where(search.fits(some, pack, load[0]), found.total - found.parts["optimizer"], np.inf)
                    better = seconds < self.seconds[i, j] * (1 - 1e-9)
                    self.seconds[i, j, better], self.pack[i, j, better] = seconds[better], pack
        self.switch = np.array([[self._switch_s(one, other) for other in layouts] for one in layouts])

    def _switch_s(self, one: Layout, other: Layout) -> float:
        """Seconds of a switch: weights come and sums go, of a rank's share, on its link; nothing where both have the same."""
        cut = [(layout.tp, layout.pp, layout.virtual, layout.stages) for layout in (one, other)]
        if cut[0] == cut[1]:
            return 0.0
        task, links = self.search.task, self.search.replay.links
        size = task.spec.parameters / (other.tp * other.pp) * (self.search.formats.compute_bytes + self.search.formats.home_bytes)
        return size / (links.inter_bytes_s if task.cluster.nodes > 1 else links.intra_bytes_s)

    def best(self, allowed: Sequence[int], groups: int, count: int) -> list[tuple[Edge, ...]]:
        """The best `count` ways with at most so many groups, best first: dynamic programming over the bins' ends, which keeps the best few
        of each end and last layout."""
        allowed, size = list(allowed), len(self.ends)
        if not allowed:
            return []
        states: list[dict[int, list[tuple[float, tuple[tuple[int, int], ...]]]]] = [{} for _ in range(size + 1)]
        states[0] = {-1: [(0.0, ())]}
        for j in range(size):
            found: dict[int, list[tuple[float, tuple[tuple[int, int], ...]]]] = {}
            for i in range(j + 1):
                for last, ways in states[i].items():
                    for k in allowed:
                        own = self.seconds[i, j, k]
                        if not np.isfinite(own) or k == last:
                            continue
                        hop = self.switch[last, k] if last >= 0 else 0.0
                        rows = [(cost + own + hop, (*way, (j, k))) for cost, way in ways if len(way) < groups]
                        found.setdefault(k, []).extend(rows)
            states[j + 1] = {k: sorted(rows)[:3] for k, rows in found.items()}
        ended = sorted(row for rows in states[size].values() for row in rows)[:count]
        return [tuple(self._edges(way)) for _, way in ended]

    def _edges(self, way: Sequence[tuple[int, int]]) -> Iterator[Edge]:
        for (before, _), (end, k) in pairwise([(-1, -1), *way]):
            yield Edge(self.ends[end], self.layouts[k], int(self.pack[before + 1, end, k]))
