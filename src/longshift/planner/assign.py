"""Assignments: which documents of a step go to which layout, by dynamic programming over length
edges and layouts.

    edges     0 ────── 512 ────── 1K ────── 4K ────── 32K   from powers of two and quantiles of the
                                                            lengths, by tokens
    groups    │ dp8, packs of 16K │ dp4.tp2 │   tp8   │     an assignment: some of the edges, a
                                                            layout for each
    cost      (i, j, k): the documents of (edge i, edge j] under layout k, in the packs that suit it
              best
    switch    (k, l): what layout l pays to be entered where k computes the next longer group;
              0 where they share a cut

Home is cut as the longest group's layout cuts it (`switch.itinerary`), so the program goes from the
longest group to the shortest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longshift.planner.group_seconds import GroupLoad
from longshift.spec.model import ModelSpec
from longshift.workload.length_file import Lengths

MAX_EDGES = 64
MAX_GROUPS = 6  # of an assignment
SHORTEST_EDGE = 256  # tokens
EDGE_MULTIPLE = 64  # tokens: edges at quantiles are rounded up to multiples
QUANTILES = 12  # edges that divide the tokens evenly, beside the powers of two


@dataclass(frozen=True, eq=False)
class Tally:
    """Documents of one mean step by length.

    edges    int64 [E], ascending
    sums     float64 [E + 1, 4]: documents, tokens, squares and fourths of `GroupLoad`, of documents
             of up to each edge; row 0 is of no documents
    longest  float64 [E + 1]: that of `GroupLoad`, of the same documents
    """

    edges: np.ndarray
    sums: np.ndarray
    longest: np.ndarray

    def between(self, i: np.ndarray | int, j: np.ndarray | int) -> GroupLoad:
        """Documents longer than edge i - 1 and of up to edge j - 1; edge -1 is 0."""
        # Rows are sums of all shorter documents, so a difference is of those between.
        sums = self.sums[j] - self.sums[i]
        return GroupLoad(
            documents=sums[..., 0],
            tokens=sums[..., 1],
            squares=sums[..., 2],
            fourths=sums[..., 3],
            longest=self.longest[j],
        )


def tally_lengths(
    spec: ModelSpec, corpus: Lengths, tokens_per_step: float, last_edge: int
) -> Tally:
    """Count the documents of a mean step by length.

    Edges are at powers of two, at quantiles of the tokens and at `last_edge`, which no document
    exceeds.
    """
    lengths = corpus.lengths
    counts = corpus.counts
    longest = int(lengths[-1])
    tokens = np.cumsum(lengths * counts)

    # 1. List the edges.
    first_power = (SHORTEST_EDGE - 1).bit_length()
    last_power = max(SHORTEST_EDGE, longest).bit_length()
    powers = 1 << np.arange(first_power, last_power)
    quantile_tokens = tokens[-1] * np.arange(1, QUANTILES) / QUANTILES
    quantiles = lengths[np.searchsorted(tokens, quantile_tokens)]
    quantiles = -(-quantiles // EDGE_MULTIPLE) * EDGE_MULTIPLE
    edges = np.unique(np.concatenate([powers, np.maximum(quantiles, SHORTEST_EDGE)]))
    edges = np.append(edges[edges < longest], longest)

    # 2. Drop those that add no document.
    num_lengths = np.searchsorted(lengths, edges, side="right")
    has_documents = np.diff(num_lengths, prepend=0) > 0
    edges = edges[has_documents][-MAX_EDGES:]
    num_lengths = num_lengths[has_documents][-MAX_EDGES:]
    edges[-1] = last_edge

    # 3. Sum the documents up to each.
    scale = tokens_per_step / tokens[-1]
    seen = 2.0 * spec.attended(lengths)
    columns = [counts, lengths * counts, seen * counts, seen * seen * counts]
    sums = np.cumsum(np.stack(columns, 1), 0)[num_lengths - 1] * scale
    sums = np.concatenate([np.zeros((1, 4)), sums])

    # 4. The median of a step's longest document: of documents that are longer, a step has ln 2 on
    #    average, and none with a probability of one half.
    documents = np.cumsum(counts) * scale
    median = np.searchsorted(documents, sums[:, 0] - np.log(2), side="right")
    median = np.minimum(median, len(lengths) - 1)
    return Tally(edges, sums, longest=lengths[median].astype(float))


@dataclass(frozen=True)
class Assignment:
    """Groups from short to long.

    `ends`: index of each group's last edge, 1 to E.
    `layouts`: index of each group's layout.
    `seconds`: of a step, without what it takes once.
    """

    ends: tuple[int, ...]
    layouts: tuple[int, ...]
    seconds: float


def best_assignments(
    cost: np.ndarray,
    present: np.ndarray,
    switch: np.ndarray,
    last: np.ndarray | None = None,
    limit: int = 8,
) -> list[Assignment]:
    """The best assignments, cheapest first, `limit` at most.

    They are the best of each number of groups and of each layout of the shortest group. A step
    takes the sum of all seconds. Takes O(G E^2 K^2) operations.

    `cost`: float64 [E, E + 1, K], seconds of documents between edges i and j under layout k; inf
    where it is impossible. `present`: float64 [E, E + 1], how often a step has such documents.
    `switch`: float64 [K, K], seconds to enter layout l where k computes the next longer group.
    `last`: float64 [K], seconds that the longest group's layout adds.
    """
    num_edges, _, num_layouts = cost.shape

    # 1. Table g has the least seconds of documents above each edge in g + 1 groups, by the layout
    #    of the shortest: [E, K].
    tables = [cost[:, num_edges, :] + (0.0 if last is None else last)]
    choices: list[np.ndarray] = []
    switch_s = present[:, :, None, None] * switch.T[None, None]  # [i, j, l, k]: l shorter, k longer
    for _ in range(1, min(MAX_GROUPS, num_edges)):
        longer = np.full((num_edges + 1, num_layouts), np.inf)
        longer[:num_edges] = tables[-1]
        through = longer[None, :, None, :] + switch_s
        best_k = through.argmin(3)
        least_s = np.take_along_axis(through, best_k[..., None], 3)[..., 0]
        total = cost + least_s
        best_j = total.argmin(1)[:, None, :]  # [i, 1, l]
        tables.append(np.take_along_axis(total, best_j, 1)[:, 0])
        best_k = np.take_along_axis(best_k, best_j, 1)
        choices.append(np.stack([best_j[:, 0], best_k[:, 0]], -1))

    # 2. Follow the choices of the best.
    firsts = []
    for g, table in enumerate(tables):
        for k in np.flatnonzero(np.isfinite(table[0])).tolist():
            firsts.append((float(table[0, k]), g, k))
    return [
        _follow_choices(choices[:g], k, num_edges, seconds)
        for seconds, g, k in sorted(firsts)[:limit]
    ]


def _follow_choices(
    choices: Sequence[np.ndarray],
    layout: int,
    num_edges: int,
    seconds: float,
) -> Assignment:
    """The assignment whose shortest group has this layout.

    `choices`: for each further group int64 [E, K, 2], where the next longer one begins
    and its layout."""
    i = 0
    ends = []
    layouts = [layout]
    for choice in reversed(choices):
        i, layout = map(int, choice[i, layout])
        ends.append(i)
        layouts.append(layout)
    return Assignment((*ends, num_edges), tuple(layouts), seconds)
