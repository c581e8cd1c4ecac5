"""Pipeline parallelism: plays the event list of `schedule.pipeline` on one rank.

Papers: GPipe (arXiv 1811.06965), PipeDream-flush and interleaved 1F1B (arXiv 2104.04473).

Sharding over p pipeline ranks: blocks, not tensors. What crosses a boundary is the residual stream of one micro-batch, x[T', D], and its
gradient; T' is the receiving rank's share of the tokens, so micro-batches may differ in length. Receives are posted one event ahead. A
send is waited for p sends later, so that no more than p + 1 of what a rank sends lie here.

    rank 0   F0 ─ F1 ──────── B0 ─ F2 ...          bytes out of a rank, per micro-batch and chunk: T' D forward, T' D backward
               ╲    ╲       ╱
    rank 1      F0 ── B0 ──╱

[Note: two groups] Traffic to a higher and to a lower pipeline coordinate goes through groups of their own. NCCL runs the traffic of a
pair one by one: in one group, two ranks that first send and then receive would wait for each other. (gloo matches by tag.)
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longshift.dist.collectives import Group, Pending
from longshift.layout.layout import Layout
from longshift.schedule.pipeline import Event, Transfer, events, receives, sends

Forward = Callable[[int, int, Tensor | None], Tensor | None]  # micro, chunk, input -> output; None at the model's ends
Backward = Callable[[int, int, Tensor | None], Tensor | None]  # micro, chunk, gradient of output -> gradient of input


def play(
    layout: Layout,
    pp: int,
    rising: Group,
    falling: Group,
    shapes: Sequence[tuple[int, ...]],
    like: Tensor,
    forward: Forward,
    backward: Backward,
) -> None:
    """Run all micro-batches. `shapes[m]` is the boundary tensor's of micro-batch m on this rank (and on its peers); `like` gives its
    dtype and device. Groups are indexed by pipeline coordinate."""
    order = events(layout, pp, len(shapes))
    under_way: deque[Pending] = deque()

    def group_of(transfer: Transfer) -> Group:
        return rising if transfer.source % layout.pp < transfer.target % layout.pp else falling  # [Note: two groups]

    def post(event: Event) -> tuple[Pending, Tensor] | None:
        transfer = receives(layout, pp, event)
        if transfer is None:
            return None
        buffer = torch.empty(shapes[event.micro], dtype=like.dtype, device=like.device)
        return group_of(transfer).receive(buffer, transfer.source % layout.pp, transfer.tag), buffer

    posted = post(order[0]) if order else None
    for number, event in enumerate(order):
        arriving, posted = posted, post(order[number + 1]) if number + 1 < len(order) else None
        x = None
        if arriving is not None:
            arriving[0].wait()
            x = arriving[1]
        y = (forward if event.kind == "forward" else backward)(event.micro, event.chunk, x)
        transfer = sends(layout, pp, event)
        if transfer is not None:
            assert y is not None
            under_way.append(group_of(transfer).send(y.contiguous(), transfer.target % layout.pp, transfer.tag))
            if len(under_way) > layout.pp:
                under_way.popleft().wait()
    for pending in under_way:
        pending.wait()
