"""Recomputation (activation checkpointing): what a forward keeps for its backward.

Papers: Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), selective: arXiv 2205.05198.

A unit runs as segments; every segment is an autograd graph of its own, from a detached input to an output. A kept segment holds its
graph until backward; a recomputed one holds its input only and runs again. Numbers are the same bits.

    none        [       block       ] kept
    selective   [ attention half ] recomputed, [ MLP half ] kept
    full        [       block       ] recomputed

With a tier (`offload`), inputs of recomputed segments wait there, and come back one unit ahead of their use.

Bytes kept, per block and token: none about (6 D + 2 N H + 2 K H + 3 F) elements, full D. A segment with collectives repeats them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshift.layout.layout import Recompute
from longshift.model.decoder import Block, MicroBatch, Ops, Unit
from longshift.stream.tiers import Key, Tensors, Tier

Function = Callable[[Tensor | None, MicroBatch, Ops], Tensor]


@dataclass
class Segment:
    """A forward waiting for its backward; `y` is None where it is to be computed again. `stored`: the tier's key of `x` where that is not
    here, `arriving` what brings it. Mutable."""

    function: Function
    x: Tensor | None
    y: Tensor | None
    stored: Key | None = None
    arriving: Callable[[], Tensors] | None = None


def segments(unit: Unit, policy: Recompute) -> list[tuple[Function, bool]]:
    """(function, whether its graph is kept) in order. The embedding is cheap: kept. (The head has no forward of its own: `stream.loss`.)"""
    if not isinstance(unit, Block) or policy == "none":
        return [(unit, True)]
    if policy == "full":
        return [(unit, False)]
    return [(unit.attention_half, False), (unit.mlp_half, True)]  # pyright: ignore[reportReturnType]


def forward(
    unit: Unit, x: Tensor | None, micro: MicroBatch, ops: Ops, policy: Recompute, tier: Tier | None = None, key: tuple = ()
) -> tuple[Tensor, list[Segment]]:
    """Output of the unit, detached, and what its backward needs. Inputs of recomputed segments wait in `tier` where there is one."""
    held = []
    for number, (function, keep) in enumerate(segments(unit, policy)):
        x = None if x is None else x.detach().requires_grad_()
        with torch.set_grad_enabled(keep):
            y = function(x, micro, ops)
        segment = Segment(function, x, y if keep else None)
        if tier is not None and not keep and x is not None:
            segment.stored, segment.x = (*key, number), None
            tier.put(segment.stored, x.detach())
        held.append(segment)
        x = y.detach()
    assert x is not None
    return x, held


def fetch(held: Sequence[Segment], tier: Tier) -> None:
    """Start bringing what a backward is about to need."""
    for segment in held:
        if segment.stored is not None:
            segment.arriving = tier.fetch(segment.stored)


def backward(held: list[Segment], grad: Tensor, micro: MicroBatch, ops: Ops, tier: Tier | None = None) -> Tensor | None:
    """Gradient of the unit's input (None for tokens); leaves the weights' gradients on them and empties `held`."""
    while held:
        segment, fetched = held.pop(), None
        if tier is not None and segment.stored is not None:
            fetched = (segment.arriving or tier.fetch(segment.stored))()
            segment.x = fetched[0].detach().requires_grad_()
        y = segment.y if segment.y is not None else segment.function(segment.x, micro, ops)
        torch.autograd.backward(y, grad)
        if segment.x is None:
            return None
        assert segment.x.grad is not None
        grad = segment.x.grad
        if fetched is not None and tier is not None:
            tier.recycle(fetched)
            tier.drop(segment.stored)
    return grad
