"""Pipeline order: which forwards and backwards a pipeline coordinate runs, in which order, and what
each receives and sends.

A model in `pp * virtual` virtual stages: stage s runs on coordinate s % pp as its model chunk
s // pp. A micro-batch goes up the stages forward and down them backward. An order is how many
forwards a coordinate runs before its first backward; after them forwards and backwards alternate
until the forwards run out. With p = pp, v = virtual, m micro-batches, and the bubble as a share
of the ideal time:

                 forwards first                 bubble           paper
    gpipe        all                            (p - 1) / m      arXiv 1811.06965, GPipe
    1f1b         p - 1 - coord                  (p - 1) / m      arXiv 2104.04473, PipeDream-flush
    1f1b, v > 1  2 (p - 1 - coord) + (v - 1) p  (p - 1) / (v m)  arXiv 2104.04473, interleaved

    1f1b, p = 2, m = 3      coord 0   F0 F1    B0 F2 B1    B2
                            coord 1      F0 B0 F1 B1 F2 B2

Backwards go through the micro-batches from the first to the last in all orders, so that a stage
sums its gradients alike in all. A transfer moves one micro-batch's boundary activation, of
tokens * width * element bytes, shared over the sequence axes.

[Note: micro counts that do not divide] The interleaved order goes through the micro-batches in
groups of p. For other counts it is the order of the next multiple of p without the passes of the
micro-batches that are not there. A pass waits for passes of its own micro-batch only, so an order
without deadlock stays without when whole micro-batches are left out.
"""

from dataclasses import dataclass
from typing import Literal

from longshift.layout.layout import Layout

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class StagePass:
    """A forward or backward of micro-batch `micro` through model chunk `chunk` of a coordinate."""

    kind: Kind
    micro: int
    chunk: int


@dataclass(frozen=True)
class Transfer:
    """A boundary activation (up) or its gradient (down) from virtual stage `source` to its
    neighbour `target`.

    The coordinates are these modulo pp, and are the same one when pp is 1. `tag` is unique in a
    step. From one coordinate to another, transfers are received in the order in which they are
    sent. Where a backend runs the traffic of a pair one by one (NCCL), it needs a communicator each
    way: to higher coordinates and to lower ones. One for up and one for down is not enough: with
    two coordinates and several chunks, up goes both ways.
    """

    source: int
    target: int
    tag: int


def stage_passes(layout: Layout, pp_coord: int, micros: int) -> tuple[StagePass, ...]:
    """What coordinate `pp_coord` runs in a step of `micros` micro-batches, in order: each of its
    model chunks forward and backward once for each."""
    p = layout.pp
    v = layout.virtual

    # 1. In groups of p micro-batches, each model chunk in turn.
    forwards: list[StagePass] = []
    backwards: list[StagePass] = []
    for group_start in range(0, micros, p):
        for chunk in range(v):
            for micro in range(group_start, group_start + p):
                forwards.append(StagePass("forward", micro, chunk))
                backwards.append(StagePass("backward", micro, v - 1 - chunk))

    # 2. Some forwards run ahead. Then forwards and backwards alternate.
    if layout.order == "gpipe":
        ahead = len(forwards)
    elif v == 1:
        ahead = p - 1 - pp_coord
    else:
        ahead = 2 * (p - 1 - pp_coord) + (v - 1) * p
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += (forward, backward)
    order += backwards[max(0, len(forwards) - ahead) :]

    # 3. The last group may have fewer than p. [Note: micro counts that do not divide]
    return tuple(stage_pass for stage_pass in order if stage_pass.micro < micros)


def receives(layout: Layout, pp_coord: int, stage_pass: StagePass) -> Transfer | None:
    """What a pass waits for; None at the first stage forward and at the last stage backward."""
    stage = stage_pass.chunk * layout.pp + pp_coord
    source = stage - 1 if stage_pass.kind == "forward" else stage + 1
    return _transfer(layout, stage_pass, source, target=stage)


def sends(layout: Layout, pp_coord: int, stage_pass: StagePass) -> Transfer | None:
    """What a pass hands on; None at the last stage forward and at the first stage backward."""
    stage = stage_pass.chunk * layout.pp + pp_coord
    target = stage + 1 if stage_pass.kind == "forward" else stage - 1
    return _transfer(layout, stage_pass, source=stage, target=target)


def _transfer(layout: Layout, stage_pass: StagePass, source: int, target: int) -> Transfer | None:
    num_stages = layout.pp * layout.virtual
    if not (0 <= source < num_stages and 0 <= target < num_stages):
        return None
    number = stage_pass.micro * num_stages + target
    return Transfer(source, target, tag=2 * number + (stage_pass.kind == "backward"))
