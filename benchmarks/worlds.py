"""Where a benchmark's ranks run: forked processes, on this machine as it is or on its scale model of a cluster (`scale_model`).

Every world is a set of processes of its own, with its own peak memory and, on the model, its own control groups; all worlds share the
model's links. A world sleeps (SIGSTOP) between calls: every gloo group has a thread that wakes a hundred times a second, and what is not
being measured should take no time from what is.
"""

import ctypes
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import scale_model
from scale_model import Model

from longshift.dist.fork import ForkedWorld

NEW_NET = 0x40000000  # CLONE_NEWNET


class SleepingWorld(ForkedWorld):
    """Ranks on this machine as it is."""

    def call(self, function: str, deadline_s: float = 60.0, **arguments: object) -> list:
        self._signal(signal.SIGCONT)
        try:
            return super().call(function, deadline_s, **arguments)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, which: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, which)


class ModelWorld(SleepingWorld):
    """Ranks on a scale model whose network stands. Once closed it stays closed."""

    def __init__(self, model: Model, spaces: list[str], addresses: list[str]):
        super().__init__(model.ranks)
        self.model, self.spaces, self.addresses = model, spaces, addresses
        self.groups = ExitStack()
        name = secrets.token_hex(2)
        self.caps = [self.groups.enter_context(scale_model.capped(f"{s}-{name}", model.cpu, model.memory_bytes)) for s in spaces]

    def enter(self, rank: int) -> None:
        self.caps[rank].enter()
        _enter_network(f"/var/run/netns/{self.spaces[rank]}")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def listener(self) -> socket.socket:
        """In rank 0's network: a socket stays where it was made."""
        with open("/proc/self/ns/net") as home:
            _enter_network(f"/var/run/netns/{self.spaces[0]}")
            found = socket.socket()
            found.bind((self.addresses[0], 0))
            _enter_network(f"/proc/self/fd/{home.fileno()}")
        return found

    def close(self) -> None:
        super().close()
        self.groups.close()


def _enter_network(path: str) -> None:
    """Move this thread into a network namespace."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, NEW_NET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Machine:
    """`memory_bytes`: what a rank may need beyond what it shares with the process that forked it; 0: no limit. On a scale model the kernel
    sees to it."""

    ranks: int
    per_node: int
    memory_bytes: int
    model: Model | None = None
    links: tuple[list[str], list[str]] = ((), ())  # pyright: ignore[reportAssignmentType]  # namespaces, addresses

    @property
    def kind(self) -> str:
        return "scale-model" if self.model else "plain"

    def world(self) -> SleepingWorld:
        return ModelWorld(self.model, *self.links) if self.model else SleepingWorld(self.ranks)


@contextmanager
def machine(description: str) -> Iterator[Machine]:
    """From "ranks=2,memory=400M" or, for a scale model, "nodes=2,per_node=2,cpu=0.5,memory=400M,like=a800,shrink=6.5": the options of
    `scale_model.py`, and its needs."""
    given = dict(item.split("=", 1) for item in description.split(","))
    if "nodes" not in given:
        ranks = int(given["ranks"])
        yield Machine(ranks, ranks, scale_model.binary(given.get("memory", "0")))
        return
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    model = scale_model.model(scale_model.arguments().parse_args(words), sys.executable)
    name = secrets.token_hex(2)
    addresses = scale_model.addresses(model, name)
    with scale_model.ended_by_signals(), scale_model.network(model, name, addresses) as spaces:
        yield Machine(model.ranks, model.per_node, model.memory_bytes, model, (spaces, addresses))
