"""What runs on each device of a Ray cluster: an actor that starts a rank, passes on what it prints,
and ends it. Needs neither torch nor ray.

    driver -> RankActor, which holds a device -> longshift worker RUN, one rank

The rank is a process of its own, so that its actor answers while the rank computes, and outlives
it: where a rank fails because another was lost, its actor keeps the device for the next start. A
rank ends with its actor, however that ends.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from signal import Signals
from threading import Thread
from typing import NamedTuple

from longshift.cluster.host import core_count
from longshift.dist.ranks import RankProcesses
from longshift.errors import UsageError

# To read what a rank that has ended has printed: a process that it started may hold its streams
# open.
LAST_LINES_S = 2.0


class RankOutput(NamedTuple):
    """What a rank has printed since it was last asked: lines, and whether each is for standard
    error. `code`: its exit code, negative for a signal; None while it runs."""

    lines: list[tuple[str, bool]]
    code: int | None


class RankActor:
    """Starts one rank at a time. Its methods are called through Ray, one after another. Mutable:
    the rank, and what it has printed."""

    def __init__(self) -> None:
        self._lines = SimpleQueue[tuple[str, bool]]()
        self._rank: RankProcesses | None = None
        self._readers: list[Thread] = []

    def free_port(self) -> int:
        """A port of this machine where nobody listens now. It is taken for a moment, without
        listening."""
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> int:
        """Start `longshift` with these words in a folder; its process. Raises UsageError where this
        machine has no such folder."""
        if not os.path.isdir(folder):
            raise UsageError(
                f"{socket.gethostname()} has no folder {folder}: all machines of a run need a file"
                " system that they share"
            )
        self._rank = None
        outputs = [os.pipe() for _ in range(2)]
        try:
            command = [sys.executable, "-m", "longshift.cli", *words]
            # Ray gives actors without processors one thread, which ranks would inherit.
            threads = max(1, core_count() // int(environment.get("LOCAL_WORLD_SIZE", 1)))
            place = {
                "OMP_NUM_THREADS": str(threads),
                **environment,
                "LONGSHIFT_PARENT": str(os.getpid()),
            }
            self._rank = RankProcesses(
                command,
                [place],
                held=True,
                folder=folder,
                stdout=outputs[0][1],
                stderr=outputs[1][1],
            )
        finally:
            # A reader ends when the rank, and what it has started, have closed the other ends.
            for _, write_end in outputs:
                os.close(write_end)
            self._readers = [
                Thread(target=self._read, args=(outputs[i][0], i == 1), daemon=True)
                for i in range(2)
            ]
            for reader in self._readers:
                reader.start()
        return self._rank.pids[0]

    def poll(self, within_s: float) -> RankOutput:
        """What the rank has printed, after it has ended or `within_s` are over."""
        code = None
        if self._rank is not None:
            self._rank.wait(within_s)
            code = self._rank.codes().get(0)
        if code is not None:
            for reader in self._readers:
                reader.join(LAST_LINES_S)
        # A reader may still add lines: only those that are there now are taken.
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        return RankOutput(lines, code)

    def send(self, number: int) -> None:
        """Send the rank a signal, if it runs."""
        if self._rank is not None:
            self._rank.send(Signals(number))

    def end(self) -> RankOutput:
        """End the rank, and what it has started; what it has printed last."""
        if self._rank is not None:
            self._rank.end()
        return self.poll(0.0)

    def _read(self, stream: int, is_error: bool) -> None:
        with os.fdopen(stream, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.put((line, is_error))
