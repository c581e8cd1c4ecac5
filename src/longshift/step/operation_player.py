"""One table from kinds of operations to what they do on a rank: on its tensors (`step.player`), or
on bytes alone (`weigh.ledger`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from longshift.dist.collectives import Pending
from longshift.program.operations import Op


class OperationPlayer(ABC):
    """A rank's runners, cuts of the model and home, and the messages and switches that are under
    way. Mutable. `home` and `packs`, by visit and micro-batch, are set by who plays."""

    home: Any
    world: Any = None
    packs: Mapping[tuple[int, int], Any]

    def __init__(self) -> None:
        self._receiving: dict[int, tuple[Pending, Any]] = {}  # by tag
        self._sending: dict[int, Pending] = {}
        self._transfers: dict[tuple[int, str], Any] = {}  # by visit and way
        self.table: dict[str, Callable[[Op], object]] = {
            "enter": self._enter,
            "leave": self._leave,
            "load": lambda op: self._runner_of(op).load(op.micro, self.packs[op.visit, op.micro]),
            "unload": lambda op: self._runner_of(op).unload(op.micro),
            "gather": lambda op: self._copies(op).gather(op.unit),
            "await gather": lambda op: self._copies(op).ready(op.unit),
            "release": lambda op: self._copies(op).release(op.unit),
            "receive": self._receive,
            "await receive": self._await_receive,
            "send": self._send,
            "await send": self._await_send,
            "compute": lambda op: self._runner_of(op).compute(op),
            "arrive": lambda op: self._runner_of(op).arrive(op),
            "depart": lambda op: self._runner_of(op).depart(op),
            "put": lambda op: self._runner_of(op).put(op),
            "fetch": lambda op: self._runner_of(op).fetch(op),
            "await fetch": lambda op: self._runner_of(op).await_fetch(op),
            "drop": lambda op: self._runner_of(op).drop(op),
            "accumulate": lambda op: self._copies(op).accumulate(op.unit),
            "reduce": lambda op: self._copies(op).reduce(op.unit),
            "await reduce": lambda op: self._copies(op).reduced(op.unit),
            "open": lambda op: self._copies(op).open(op.unit),
            "exchange": self._exchange,
            "await exchange": lambda op: self._transfers[op.visit, op.way].take_in(op.number),
            "close": lambda op: self._copies(op).close(op.unit),
            "arrived": lambda op: self._count(op, "weights"),
            "total": self._total,
            "forget": self._forget,
            "norm": self._norm,
            "update": self._update,
            "pack": lambda op: self.home.pack(op.unit, self.world),
            "read": lambda op: self.home.read(op.unit, op.part),
            "await read": lambda op: self.home.ready(op.unit, op.part),
            "evict": lambda op: self.home.evict(op.unit, op.part),
            "write": lambda op: self.home.write(op.unit, op.part),
            "await write": lambda op: self.home.written(op.unit, op.part),
        }

    @abstractmethod
    def _runner_of(self, op: Op) -> Any:
        """What keeps the packs of an operation's layout: a `step.runner.Runner`."""

    @abstractmethod
    def _copies(self, op: Op) -> Any:
        """What keeps the working copies of an operation's layout: of `state.copies.Copies`."""

    def _enter(self, op: Op) -> None:  # noqa: B027  (bytes are not timed)
        """Begin to measure a length group."""

    def _leave(self, op: Op) -> None:  # noqa: B027
        """End that."""

    # Messages between stages

    @abstractmethod
    def _group(self, op: Op) -> Any:
        """The group that a message goes through: a `dist.collectives.Group`."""

    def _receive(self, op: Op) -> None:
        buffer = self._runner_of(op).boundary(op.micro)
        self._receiving[op.number] = self._group(op).receive(buffer, op.peer, op.number), buffer

    def _await_receive(self, op: Op) -> None:
        pending, buffer = self._receiving.pop(op.number)
        pending.wait()
        self._runner_of(op).received(op, buffer)

    def _send(self, op: Op) -> None:
        self._sending[op.number] = self._group(op).send(
            self._runner_of(op).to_send(op).contiguous(), op.peer, op.number
        )

    def _await_send(self, op: Op) -> None:
        self._sending.pop(op.number).wait()

    # Switches, and the state

    @abstractmethod
    def _transfer(self, op: Op) -> Any:
        """The switch that an exchange begins: a `state.transfer.SwitchTransfer`."""

    def _exchange(self, op: Op) -> None:
        if op.number == 0:
            self._transfers[op.visit, op.way] = self._transfer(op)
        self._transfers[op.visit, op.way].post(op.number)

    def _forget(self, op: Op) -> None:
        self._copies(op).forget_totals()
        self._count(op, "sums")

    def _count(self, op: Op, way: str) -> None:
        """Forget a switch that has ended."""
        del self._transfers[op.visit, way]

    @abstractmethod
    def _total(self, op: Op) -> None:
        """Make home's gradient sums where there are none."""

    @abstractmethod
    def _norm(self, op: Op) -> None:
        """Sum the loss and the squared gradient norm over all ranks."""

    @abstractmethod
    def _update(self, op: Op) -> None:
        """Clip and update home, all of it or a unit."""
