"""Pipeline order: which forwards and backwards a pipeline coordinate runs, in which order, and what each receives and sends.

A model in `pp * virtual` virtual stages: stage s runs on coordinate s % pp as its model chunk s // pp. A micro-batch goes up the
stages forward and down them backward. An order is how many forwards a coordinate runs before its first backward; after them
forwards and backwards alternate until the forwards run out. With p = pp, v = virtual, m micro-batches, and the bubble as a share of
the ideal time:

    gpipe         all                             bubble (p - 1) / m         GPipe, arXiv 1811.06965
    1f1b          p - 1 - coord                   bubble (p - 1) / m         PipeDream-flush, in arXiv 2104.04473
    1f1b, v > 1   2 (p - 1 - coord) + (v - 1) p   bubble (p - 1) / (v m)     interleaved, arXiv 2104.04473

    1f1b, p = 2, m = 3      coord 0   F0 F1    B0 F2 B1    B2
                            coord 1      F0 B0 F1 B1 F2 B2

Backwards go through the micro-batches from the first to the last in all orders, so that a stage sums its gradients alike in all.
A transfer moves one micro-batch's boundary activation: tokens * width * element bytes, shared over the sequence axes.

[Note: micro counts that do not divide] The interleaved order goes through the micro-batches in groups of p. For other counts it is
the order of the next multiple of p without the events of the micro-batches that are not there. An event waits for events of its own
micro-batch only, so an order without deadlock stays without when whole micro-batches are left out.
"""

from dataclasses import dataclass
from typing import Literal

from longshift.layout.layout import Layout

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Event:
    """One pass of micro-batch `micro` through model chunk `chunk` of the coordinate whose list this is."""

    kind: Kind
    micro: int
    chunk: int


@dataclass(frozen=True)
class Transfer:
    """A boundary activation (up) or its gradient (down) from virtual stage `source` to its neighbour `target`.

    The coordinates are these modulo pp, and are the same one when pp is 1. `tag` is unique in a step. From one coordinate to
    another, transfers are received in the order in which they are sent. Where a backend runs the traffic of a pair one by one
    (NCCL), it needs a communicator each way: to higher coordinates and to lower ones. One for up and one for down is not enough:
    with two coordinates and several chunks, up goes both ways.
    """

    source: int
    target: int
    tag: int


def events(layout: Layout, pp_coord: int, micros: int) -> tuple[Event, ...]:
    """What coordinate `pp_coord` runs in a step of `micros` micro-batches: every (micro, chunk) forward and backward once."""
    p, v = layout.pp, layout.virtual
    groups = range(-(-micros // p))
    passes = [(group * p + i, chunk) for group in groups for chunk in range(v) for i in range(p)]
    if layout.order == "gpipe":
        ahead = len(passes)
    else:
        ahead = p - 1 - pp_coord if v == 1 else 2 * (p - 1 - pp_coord) + (v - 1) * p
    forwards = [Event("forward", micro, chunk) for micro, chunk in passes]
    backwards = [Event("backward", micro, v - 1 - chunk) for micro, chunk in passes]
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += (forward, backward)
    order += backwards[max(0, len(passes) - ahead) :]
    return tuple(event for event in order if event.micro < micros)


def receives(layout: Layout, pp_coord: int, event: Event) -> Transfer | None:
    """What an event waits for; None at the first stage forward and at the last stage backward."""
    stage = event.chunk * layout.pp + pp_coord
    return _transfer(layout, event, stage - 1 if event.kind == "forward" else stage + 1, stage)


def sends(layout: Layout, pp_coord: int, event: Event) -> Transfer | None:
    """What an event hands on; None at the last stage forward and at the first stage backward."""
    stage = event.chunk * layout.pp + pp_coord
    return _transfer(layout, event, stage, stage + 1 if event.kind == "forward" else stage - 1)


def _transfer(layout: Layout, event: Event, source: int, target: int) -> Transfer | None:
    stages = layout.pp * layout.virtual
    if not (0 <= source < stages and 0 <= target < stages):
        return None
    return Transfer(source, target, tag=(event.micro * stages + target) * 2 + (event.kind == "backward"))
