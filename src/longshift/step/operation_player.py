"""One table from kinds of operations to what they do on a rank: on its tensors (`step.player`), or
on bytes alone (`weigh.ledger`). The clock has no such table: `simulate.stage_actions` makes
pieces of work on lanes of what the ledger counts by operation."""

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
            "gather": self._by_copies("gather"),
            "await gather": self._by_copies("ready"),
            "release": self._by_copies("release"),
            "receive": self._receive,
            "await receive": self._await_receive,
            "send": self._send,
            "await send": self._await_send,
            "compute": self._by_runner("compute"),
            "arrive": self._by_runner("arrive"),
            "depart": self._by_runner("depart"),
            "put": self._by_runner("put"),
            "fetch": self._by_runner("fetch"),
            "await fetch": self._by_runner("await_fetch"),
            "drop": self._by_runner("drop"),
            "accumulate": self._by_copies("accumulate"),
            "reduce": self._by_copies("reduce"),
            "await reduce": self._by_copies("reduced"),
            "open": self._by_copies("open"),
            "exchange": self._exchange,
            "await exchange": lambda op: self._transfers[op.visit, op.way].take_in(op.number),
            "close": self._by_copies("close"),
            "arrived": lambda op: self._count(op, "weights"),
            "total": self._total,
            "forget": self._forget,
            "norm": self._norm,
            "update": self._update,
            "pack": lambda op: self.home.pack(op.unit, self.world),
            "read": self._by_home("read"),
            "await read": self._by_home("ready"),
            "evict": self._by_home("evict"),
            "write": self._by_home("write"),
            "await write": self._by_home("written"),
        }

    # What the table calls. Who does it is known when an operation is played.

    def _by_runner(self, method: str) -> Callable[[Op], object]:
        return lambda op: getattr(self._runner_of(op), method)(op)

    def _by_copies(self, method: str) -> Callable[[Op], object]:
        return lambda op: getattr(self._copies(op), method)(op.unit)

    def _by_home(self, method: str) -> Callable[[Op], object]:
        return lambda op: getattr(self.home, method)(op.unit, op.part)

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
        pending = self._group(op).receive(buffer, op.peer, op.number)
        self._receiving[op.number] = pending, buffer

    def _await_receive(self, op: Op) -> None:
        pending, buffer = self._receiving.pop(op.number)
        pending.wait()
        self._runner_of(op).received(op, buffer)

    def _send(self, op: Op) -> None:
        x = self._runner_of(op).to_send(op).contiguous()
        self._sending[op.number] = self._group(op).send(x, op.peer, op.number)

    def _await_send(self, op: Op) -> None:
        self._sending.pop(op.number).wait()

    # Switches, and the state

    @abstractmethod
    def _transfer(self, op: Op) -> Any:
        """The switch that an exchange begins: a `state.transfer.SwitchTransfer`."""

    def _exchange(self, op: Op) -> None:
        # A switch begins with its first exchange; the others go on with the same transfer.
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
