"""Recomputation (activation checkpointing): what a forward keeps for its backward.

Papers: Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), selective: arXiv 2205.05198.

A unit runs as segments; every segment is an autograd graph of its own, from a detached input to an output. A kept segment holds its
graph until backward; a recomputed one holds its input only and runs again. Numbers are the same bits.

    none        [       block       ] kept
    selective   [ attention half ] recomputed, [ MLP half ] kept
    full        [       block       ] recomputed

Bytes kept, per block and token: none about (6 D + 2 N H + 2 K H + 3 F) elements, full D. A segment with collectives repeats them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longshift.layout.layout import Recompute
from longshift.model.decoder import Block, MicroBatch, Ops, Unit

Function = Callable[[Tensor | None, MicroBatch, Ops], Tensor]


@dataclass
class Segment:
    """A forward waiting for its backward; `y` is None where it is to be computed again."""

    function: Function
    x: Tensor | None
    y: Tensor | None


def segments(unit: Unit, policy: Recompute) -> list[tuple[Function, bool]]:
    """(function, whether its graph is kept) in order. Embedding and head are cheap or used at once: kept."""
    if not isinstance(unit, Block) or policy == "none":
        return [(unit, True)]
    if policy == "full":
        return [(unit, False)]
    return [(unit.attention_half, False), (unit.mlp_half, True)]  # pyright: ignore[reportReturnType]


def forward(unit: Unit, x: Tensor | None, micro: MicroBatch, ops: Ops, policy: Recompute) -> tuple[Tensor, list[Segment]]:
    """Output of the unit, detached, and what its backward needs."""
    held = []
    for function, keep in segments(unit, policy):
        x = None if x is None else x.detach().requires_grad_()
        with torch.set_grad_enabled(keep):
            y = function(x, micro, ops)
        held.append(Segment(function, x, y if keep else None))
        x = y.detach()
    assert x is not None
    return x, held


def backward(held: list[Segment], grad: Tensor, micro: MicroBatch, ops: Ops) -> Tensor | None:
    """Gradient of the unit's input (None for tokens); leaves the weights' gradients on them and empties `held`."""
    while held:
        segment = held.pop()
        y = segment.y if segment.y is not None else segment.function(segment.x, micro, ops)
        torch.autograd.backward(y, grad)
        if segment.x is None:
            return None
        assert segment.x.grad is not None
        grad = segment.x.grad
    return grad
