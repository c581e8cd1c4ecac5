"""Assignments: which documents of a step go to which layout, by dynamic programming over length edges and layouts.

    edges     0 ──── 512 ──── 1K ──── 4K ───────── 32K         from powers of two and quantiles of the lengths, by tokens
    groups     dp8, packs of 16K │ dp4.tp2 │   tp8             an assignment: some of the edges, a layout for each
    cost       (i, j, k): the documents of (edge i, edge j] under layout k in the packs that suit it best
    switch     (k, l): what layout l pays to be entered where k computes the next longer group; 0 where they share a cut

Home is cut as the longest group's layout cuts it (`switch.itinerary`), so the program goes from the longest group to the shortest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longshift.planner.group_seconds import Load
from longshift.spec.model import ModelSpec
from longshift.workload.given import Lengths

MOST_EDGES = 64
MOST_GROUPS = 6  # of an assignment
SHORTEST_EDGE = 256  # tokens
QUANTILES = 12  # edges that divide the tokens evenly, beside the powers of two


@dataclass(frozen=True, eq=False)
class Tally:
    """Documents of one mean step by length. `edges`: int64 [E] ascending; `sums`: float64 [E + 1, 4], documents, tokens, squares and
    fourths of `Load` of documents of up to each edge, of none first; `longest`: float64 [E + 1], of `Load` of the same."""

    edges: np.ndarray
    sums: np.ndarray
    longest: np.ndarray

    def between(self, i: np.ndarray | int, j: np.ndarray | int) -> Load:
        """Those longer than edge i - 1 and of up to edge j - 1; edge -1 is 0."""
        documents, tokens, squares, fourths = np.moveaxis(self.sums[j] - self.sums[i], -1, 0)
        return Load(documents=documents, tokens=tokens, squares=squares, fourths=fourths, longest=self.longest[j])


def tally(spec: ModelSpec, corpus: Lengths, tokens_per_step: float) -> Tally:
    """Documents of a step by length: edges at powers of two and at quantiles of the tokens, the last one at the longest document; none
    without a document."""
    lengths, counts = corpus.lengths, corpus.counts
    longest = int(lengths[-1])
    tokens = np.cumsum(lengths * counts)
    powers = 1 << np.arange((SHORTEST_EDGE - 1).bit_length(), max(SHORTEST_EDGE, longest).bit_length())
    at = np.searchsorted(tokens, tokens[-1] * np.arange(1, QUANTILES) / QUANTILES)
    quantiles = -(-lengths[at] // 64) * 64
    edges = np.unique(np.concatenate([powers, np.maximum(quantiles, SHORTEST_EDGE)]))
    edges = np.append(edges[edges < longest], longest)
    upto = np.searchsorted(lengths, edges, side="right")
    has_documents = np.diff(upto, prepend=0) > 0
    edges, upto = edges[has_documents][-MOST_EDGES:], upto[has_documents][-MOST_EDGES:]
    scale = tokens_per_step / tokens[-1]
    seen = 2.0 * spec.attended(lengths)
    values = np.stack([counts, lengths * counts, seen * counts, seen * seen * counts], 1)
    sums = np.concatenate([np.zeros((1, 4)), np.cumsum(values, 0)[upto - 1] * scale])
    longer = np.searchsorted(np.cumsum(counts) * scale, sums[:, 0] - np.log(2), side="right")
    return Tally(edges, sums, longest=lengths[np.minimum(longer, len(lengths) - 1)].astype(float))


@dataclass(frozen=True)
class Assignment:
    """Groups from short to long: `ends`, indices of their last edge (1 to E); `layouts`, theirs; `seconds` as the program has them."""

    ends: tuple[int, ...]
    layouts: tuple[int, ...]
    seconds: float


def assignments(
    cost: np.ndarray, present: np.ndarray, switch: np.ndarray, last: np.ndarray | None = None, groups: int = MOST_GROUPS, most: int = 8
) -> list[Assignment]:
    """The best assignments, cheapest first: the best of each number of groups and of each layout of the shortest group.

    `cost`: float64 [E, E + 1, K], seconds of documents between edges i and j under layout k, inf where it cannot; `present`: [E, E + 1],
    how often a step has such documents; `switch`: [K, K], seconds to enter layout l where k computes the next longer group; `last`: [K],
    seconds that the longest group's layout adds. A step takes the sum of all. O(G E^2 K^2).
    """
    count, _, number = cost.shape
    least = cost[:, count, :] + (0.0 if last is None else last)
    tables, chosen = [least], list[np.ndarray]()
    entered = present[:, :, None, None] * switch.T[None, None]  # [i, j, l, k]: l shorter, k longer
    for _ in range(1, min(groups, count)):
        longer = np.full((count + 1, number), np.inf)
        longer[:count] = tables[-1]
        through = longer[None, :, None, :] + entered
        best_k = through.argmin(3)
        total = cost + np.take_along_axis(through, best_k[..., None], 3)[..., 0]
        best_j = total.argmin(1)  # [i, l]
        tables.append(np.take_along_axis(total, best_j[:, None, :], 1)[:, 0])
        k = np.take_along_axis(best_k, best_j[:, None, :], 1)[:, 0]
        chosen.append(np.stack([best_j, k], -1))
    ends = [(float(tables[g][0, k]), g, k) for g in range(len(tables)) for k in range(number) if np.isfinite(tables[g][0, k])]
    found: list[Assignment] = []
    for seconds, g, k in sorted(ends)[:most]:
        found.append(_followed(chosen, g, k, count, seconds))
    return found


def _followed(chosen: Sequence[np.ndarray], groups: int, layout: int, count: int, seconds: float) -> Assignment:
    """The assignment behind an entry of the table of `groups` + 1 groups."""
    i, ends, layouts = 0, list[int](), [layout]
    for table in range(groups - 1, -1, -1):
        i, layout = map(int, chosen[table][i, layout])
        ends.append(i)
        layouts.append(layout)
    return Assignment((*ends, count), tuple(layouts), seconds)
