"""Bytes of the switches between layouts on a rank: see `weigh.ledger`."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longshift.switch.plan import Plan
from longshift.switch.traffic import bytes_by_exchange
from longshift.weigh.allocations import Allocation, RankMemory


class SwitchMemory:
    """`state.transfer.SwitchTransfer` on bytes. Mutable.

    The fused buffer has the size of the largest exchange. What passes through this rank, to others
    of its node, stays for all rounds of its bucket.
    """

    def __init__(self, memory: RankMemory, plan: Plan, way: str):
        self.memory = memory
        self.way = way
        self.rounds = plan.rounds
        self.exchanges = exchange_bytes(plan, memory.steps.rank)
        self.fused: Allocation | None = None
        self.passing: dict[int, Allocation] = {}  # by exchange

    def post(self, number: int) -> None:
        self.memory.send(self.way, self.exchanges.sent[number])
        if number == 0:
            self.fused = self.memory.allocate("exchanges of a switch", self.exchanges.largest)
        if size := self.exchanges.passing[number]:
            self.passing[number] = self.memory.allocate("passing through", size)
        self.passing.pop(number - self.rounds + 1, None)

    def take_in(self, number: int) -> None:
        if number == len(self.exchanges.sent) - 1:
            self.fused = None


@dataclass(frozen=True)
class ExchangeBytes:
    """Bytes of a switch on one rank, by exchange: that it sends, and that begin to pass through.

    `largest`: that it sends and receives in the largest exchange.
    """

    sent: tuple[int, ...]
    passing: tuple[int, ...]
    largest: int


@lru_cache(maxsize=64)  # a planner weighs many candidates with the same switches
def exchange_bytes(plan: Plan, rank: int) -> ExchangeBytes:
    """What `state.transfer.SwitchTransfer` moves on a rank."""
    # 1. What comes and goes in each exchange, inside nodes and between them.
    inside_out, inside_in, between_out, between_in = bytes_by_exchange(plan)[:, :, rank].T
    sent = inside_out + between_out

    # 2. What this rank receives for others: it is sent on in a later round.
    passing = np.zeros(plan.exchanges, np.int64)
    for weight in plan.weights:
        moves = weight.moves
        is_received = moves.target == rank
        is_early = moves.round < plan.rounds - 1
        is_unwanted = ~weight.slices.wants[moves.slice, rank]
        through = np.unique(moves.slice[is_received & is_early & is_unwanted])
        np.add.at(passing, weight.bucket[through], weight.slices.size_bytes[through])
    return ExchangeBytes(
        sent=tuple(sent.tolist()),
        passing=tuple(passing.tolist()),
        largest=int((sent + inside_in + between_in).max()),
    )
