"""The operations that a training step is made of.

A step of one rank is a `Program`: the `Op`s in the order in which the rank begins them.
`program.step` makes it. Players on tensors (`step.player`), on bytes (`weigh.ledger`) and on
seconds (`simulate.clock`) take it. What happens in a step happens in one of these operations.

    kind               what it does                                         resource
    enter, leave       begins and ends a length group: what is measured     -
                       by group
    load, unload       makes and drops token ids, labels and rotary         host
                       angles of a micro-batch
    gather             starts to bring a unit's weights from home           communicator "gather"
    await gather       ends that: the working copies of the unit can be     -
                       used
    release            drops the storage of a unit's working copies         -
    receive, send      start to move a boundary activation, or its          communicator of the way
                       gradient
    await receive, await send
    compute            one turn of a unit on a micro-batch (below)          compute; tp, u and ring
                                                                            inside
    arrive, depart     cut a boundary activation into chunks, and put       compute, copies
                       chunks together
    put, fetch         start to move what waits for a backward to its       copies
                       tier, and back
    await fetch, drop  end a fetch; forget an object of a tier
    accumulate         adds the gradients that a backward left on a         compute
                       unit's weights to their sum
    reduce             starts to add a unit's sum to home                   communicator "reduce"
    await reduce       ends that: home holds the sum
    open               makes storage for what an exchange of a switch is    -
                       about to fill
    exchange           starts one exchange of a switch: weights here, or    communicator "weights"
                       sums home                                            or "sums"
    await exchange     ends that
    close              drops working copies, of one unit or all, of the     -
                       layout that is left
    arrived            a switch has brought all weights of the layout       -
    total, forget      makes home's sums where there are none; drops sums   -
                       that went home
    norm               loss and squared gradient norm of all ranks          communicator "everyone"
    update             clips and updates home: all at once, or one unit     compute
                       after another; a unit before the norm where its
                       part is "early"
    pack               packs the moments of a unit that was updated;        compute, communicator
                       owners of one block agree                            "scales"
    read, write        start to move a part of a unit's home from disk,     disk
                       or to it
    await read, await write
    evict              gives back the memory of what was read and has not   -
                       changed

Parts of a home on disk: `master`, the weights; `sums`, of gradients; `state`, weights and moments;
`record`, all three. A `state` is written to a second place:
see [Note: early updates] in `program.step`.

Turns of whole packs: `pass` is a forward without a graph, `forward` and `again` make one,
`backward` uses it up, `loss` is the forward and backward of the head on some rows. Where nothing is
learned, `pass on` is a forward that keeps nothing, and `score` the loss alone. A `pass` keeps the
output of attention beside the block's input; its `again` takes that and computes all else. The
`part` of both, and of their backward, is "block with output". In a chunked layout a turn is a list
of events, the same for every block (`schedule.unit_events`).
"""

from typing import Literal, NamedTuple

Kind = Literal[
    "enter", "leave", "load", "unload", "gather", "await gather", "release", "receive",
    "await receive", "send", "await send", "compute", "arrive", "depart", "put", "fetch",
    "await fetch", "drop", "accumulate", "reduce", "await reduce", "open", "exchange",
    "await exchange", "close", "arrived", "total", "forget", "norm", "update", "pack", "read",
    "await read", "evict", "write", "await write",
]  # fmt: skip

# The operation that ends another.
AWAITED = {
    "gather": "await gather", "reduce": "await reduce", "receive": "await receive",
    "send": "await send", "exchange": "await exchange", "fetch": "await fetch",
    "read": "await read", "write": "await write",
}  # fmt: skip

# By kind, the resource that an operation occupies; what is not here computes,
# or waits among what computes.
LANES = {
    "gather": "gather", "release": "gather", "reduce": "reduce",
    "receive": "messages", "send": "messages",
    "open": "switch", "exchange": "switch", "close": "switch", "arrived": "switch",
    "total": "switch", "forget": "switch",
    "put": "tier out", "fetch": "tier in", "drop": "tier in",
    "read": "home in", "evict": "home in", "write": "home out",
}  # fmt: skip


class Op(NamedTuple):
    """One operation. `visit`: number of the length group in visiting order. `unit`: as in
    `spec.model`, or all where -1. `chunk`: the model chunk of an interleaved pipeline. `turn`,
    `part`: what is computed, or waits. `number`: of an exchange, a block of rows, or the tag of a
    message. `peer`: the pipeline coordinate at the other end of a message. `way`: of a message
    "rising" or "falling", of an exchange "weights" or "sums"."""

    kind: Kind
    visit: int = 0
    unit: int = -1
    micro: int = -1
    chunk: int = -1
    turn: str = ""
    part: str = ""
    number: int = -1
    peer: int = -1
    way: str = ""

    def __str__(self) -> str:
        numbers = {"unit": self.unit, "micro-batch": self.micro, "no.": self.number}
        words = [self.kind, self.way, self.turn, self.part]
        words += [f"{name} {value}" for name, value in numbers.items() if value >= 0]
        return " ".join(filter(None, words))


Program = tuple[Op, ...]
START = Op("enter")  # before the first operation of a step
