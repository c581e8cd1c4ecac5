"""Uneven stages: the blocks of a pipeline, dealt to its ranks by what they take.

A full pipeline is as fast as the rank with most to do. The first rank has the embeddings besides its blocks, and the last one the head,
which takes as long as several blocks where the vocabulary is large: Llama 3 had a block less in both stages (arXiv 2407.21783, 3.3.2).

    pp4          8     8     8     8 + head        the last rank has most to do
    pp4:8-9-9-6  8     9     9     6 + head

Seconds are those of a step on the clock, which then plays the step again and says which way is faster.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.simulate.lanes import Timed
from longshift.spec.model import share


def evened(layers: int, layout: Layout, pieces: Sequence[Timed]) -> Layout:
    """The layout with stages by the seconds that units took in `pieces`, of a rank of each stage; as it is where even ones are as good."""
    taken = seconds_by_unit(pieces)
    block_s = sum(taken[unit] for unit in range(1, layers + 1)) / layers
    if layout.pp == 1 or not block_s:
        return layout
    besides = [0.0] * layout.pp
    besides[0] += taken[0] / block_s
    besides[-1] += taken[layers + 1] / block_s
    sizes = balanced(layers, layout.virtual, besides)
    better = replace(layout, stages=sizes)
    return better if most(layers, better, besides) < most(layers, layout, besides) - 1e-6 else layout


def seconds_by_unit(pieces: Sequence[Timed]) -> Counter[int]:
    """What computing each unit took, tensor parallelism and Ulysses included. The ring goes on under attention."""
    found: Counter[int] = Counter()
    for piece in pieces:
        op = piece.key[0] if isinstance(piece.key, tuple) else None
        if isinstance(op, Op) and op.kind == "compute" and piece.lane != "ring":
            found[op.unit] += piece.end - piece.start  # pyright: ignore[reportArgumentType]
    return found


def balanced(layers: int, virtual: int, besides: Sequence[float]) -> tuple[int, ...]:
    """Blocks of every virtual stage, in model order: each has one at least, and the rank with most to do has least. `besides`: what each
    rank computes besides, in blocks."""
    ranks = range(len(besides))
    blocks = [virtual for _ in ranks]
    for _ in range(layers - virtual * len(besides)):  # of equal ranks the last one: the first ones keep more for backwards
        blocks[min(ranks, key=lambda rank: (blocks[rank] + besides[rank], -rank))] += 1
    spans = [[share(blocks[rank], virtual, chunk) for rank in ranks] for chunk in range(virtual)]
    return tuple(stop - start for chunk in spans for start, stop in chunk)


def most(layers: int, layout: Layout, besides: Sequence[float]) -> float:
    """What the rank with most to do computes, in blocks."""
    sizes = [stop - start for start, stop in layout.layers_of(layers)]
    return max(sum(sizes[rank :: layout.pp]) + more for rank, more in enumerate(besides))
