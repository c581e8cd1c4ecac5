"""Uneven stages: the blocks of a pipeline, assigned to its ranks by the seconds that units take.

A full pipeline is as fast as its busiest rank. The first rank has the embeddings besides its
blocks, and the last one the head, which takes as long as several blocks where the vocabulary is
large: Llama 3 had a block less in both stages (arXiv 2407.21783, 3.3.2).

    pp4          8     8     8     8 + head        the last rank is the busiest
    pp4:8-9-9-6  8     9     9     6 + head

Seconds are those of a step on the clock, which then plays the step again and says which layout is
faster."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from longshift.layout.axes import token_axes
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.simulate.lanes import TimedWork
from longshift.spec.param import share


def balance_stages(layers: int, layout: Layout, pieces: Sequence[TimedWork]) -> Layout:
    """The layout with stages balanced by seconds; unchanged if even stages are as good.

    `pieces`: a step's work, of one rank of each stage.
    """
    unit_s = seconds_by_unit(pieces)
    block_s = sum(unit_s[unit] for unit in range(1, layers + 1)) / layers
    if layout.pp == 1 or not block_s:
        return layout
    extra_blocks = [0.0] * layout.pp
    extra_blocks[0] += unit_s[0] / block_s
    extra_blocks[-1] += unit_s[layers + 1] / block_s
    balanced = replace(layout, stages=stage_sizes(layers, layout.virtual, extra_blocks))
    balanced_load = largest_load(layers, balanced, extra_blocks)
    # The margin keeps even stages where rounding alone makes the others better.
    is_better = balanced_load < largest_load(layers, layout, extra_blocks) - 1e-6
    return balanced if is_better else layout


def seconds_by_unit(pieces: Sequence[TimedWork]) -> Counter[int]:
    """Seconds of computing each unit, tensor parallelism and Ulysses included."""
    hidden_axes = [axis.name for axis in token_axes() if axis.overlaps]
    seconds: Counter[int] = Counter()
    for piece in pieces:
        op = piece.key[0] if isinstance(piece.key, tuple) else None
        # What overlaps goes on under attention.
        if isinstance(op, Op) and op.kind == "compute" and piece.lane not in hidden_axes:
            seconds[op.unit] += piece.end - piece.start  # pyright: ignore[reportArgumentType]
    return seconds


def stage_sizes(layers: int, virtual: int, extra_blocks: Sequence[float]) -> tuple[int, ...]:
    """Blocks of every virtual stage, in model order, such that the busiest rank has least. Each
    stage has one at least.

    `extra_blocks`: what each rank computes besides, in blocks.
    """
    ranks = range(len(extra_blocks))
    blocks = [virtual for _ in ranks]
    for _ in range(layers - virtual * len(ranks)):
        # Of equal ranks the last one gets the block: the first ones keep more for backwards.
        least_busy = min(ranks, key=lambda rank: (blocks[rank] + extra_blocks[rank], -rank))
        blocks[least_busy] += 1

    sizes = []
    for chunk in range(virtual):
        for rank in ranks:
            start, stop = share(blocks[rank], virtual, chunk)
            sizes.append(stop - start)
    return tuple(sizes)


def largest_load(layers: int, layout: Layout, extra_blocks: Sequence[float]) -> float:
    """What the busiest rank computes, in blocks."""
    sizes = [stop - start for start, stop in layout.layers_of(layers)]
    return max(sum(sizes[rank :: layout.pp]) + extra for rank, extra in enumerate(extra_blocks))
