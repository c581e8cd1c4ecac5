"""Trackers: where the rows of a run go besides `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio, MLflow. Needs no torch.

    save: {trackers: [wandb, mlflow], project: my-project}

Each is a file of its own, beside this one, and an optional extra. Rank 0 alone has them. A process that trains is one run of the tracker: a
run that was resumed is there in parts, named by their first steps, for trackers do not take a step again that they have already.

    start   once, with the config, before the first row
    log     a row of numbers for each step
    finish  once, with whether the run has ended without an error
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Protocol, TextIO

from longshift.errors import UsageError
from longshift.trainer.metrics import StepMetrics, say

PLAIN = ("step", "groups", "layout", "valid", "resumed")  # of a step's fields, those that are no number of their own
PATIENCE_S = 30.0  # for servers, at the end of a run


class Tracker(Protocol):
    """Takes the rows of one process of a run, in a thread. Any method may raise: the run goes on without the tracker then."""

    def start(self, config: Mapping[str, Any], first: int) -> None:
        """Begin with a resolved config. `first`: the step of the first row."""
        ...

    def log(self, step: int, row: Mapping[str, float]) -> None: ...

    def finish(self, ok: bool) -> None: ...


def expect(names: Sequence[str]) -> None:
    """Raises UsageError for the first tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"save.trackers: {name} is not installed: pip install 'longshift[{name}]', or leave it out")


def part_name(folder: Path, first: int) -> str:
    """What a tracker calls a process of a run that begins with step `first`."""
    return folder.name if first == 1 else f"{folder.name} from step {first}"


def numbers(step: StepMetrics) -> dict[str, float]:
    """The row of a step: its numbers by name, those of validations by length and of length groups with theirs before a slash."""
    row = {name: float(value) for name, value in asdict(step).items() if name not in PLAIN and value is not None}
    row |= {f"valid/to {part.upto}": part.loss for part in step.valid}
    for group in step.groups:
        for name, value in asdict(group).items():
            if name not in ("layout", "upto") and value is not None:
                row[f"{group.layout} to {group.upto}/{name}"] = float(value)
    return row


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what is no mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


class Trackers:
    """The trackers of a run, each in a thread of its own: the run never waits for a server, and goes on without a tracker that fails, which
    is said once on standard error. Mutable. What trackers print goes to standard error too, for standard output is the run's."""

    def __init__(self, trackers: Mapping[str, Tracker], config: Mapping[str, Any]):
        self._trackers, self._config = trackers, config
        self._followers: list[_Follower] = []
        self._aside: _Aside | None = None

    def write(self, step: StepMetrics) -> None:
        if self._trackers and not self._followers:
            sys.stdout = self._aside = _Aside(sys.stdout)  # pyright: ignore[reportAttributeAccessIssue]
            self._followers = [_Follower(name, tracker, self._config, step.step) for name, tracker in self._trackers.items()]
        row = numbers(step) if self._followers else {}
        for follower in self._followers:
            follower.rows.put((step.step, row))

    def finish(self, ok: bool, patience_s: float = PATIENCE_S) -> None:
        """End those that have begun. `ok`: whether the run has ended without an error; `patience_s`: how long to wait for all of them."""
        for follower in self._followers:
            follower.rows.put(ok)
        until = time.monotonic() + patience_s
        for follower in self._followers:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                follower.say(f"has not taken all rows {patience_s:g} s after the last step, and is left")
        if self._aside is not None and sys.stdout is self._aside:
            sys.stdout = self._aside.out
        self._trackers, self._followers, self._aside = {}, [], None


class _Follower(Thread):
    """The thread of a tracker. Takes rows until it is told whether the run has ended well. Mutable."""

    def __init__(self, tracker_name: str, tracker: Tracker, config: Mapping[str, Any], first: int):
        super().__init__(name=f"longshift tracker {tracker_name}", daemon=True)
        self.rows: SimpleQueue[tuple[int, dict[str, float]] | bool] = SimpleQueue()
        self._tracker_name, self._tracker, self._config, self._first = tracker_name, tracker, config, first
        self._said = False
        self.start()

    def run(self) -> None:
        when = f"before step {self._first}"
        try:
            self._tracker.start(self._config, self._first)
            while not isinstance(row := self.rows.get(), bool):
                when = f"at step {row[0]}"
                self._tracker.log(*row)
            when = "at the end"
            self._tracker.finish(row)
        except BaseException as fault:  # of a package that may do anything; what would end the process ends this thread
            why = str(fault).strip().splitlines()[:1]
            self.say(f"failed {when}, and the run goes on without it: {': '.join([type(fault).__name__, *why])}")

    def say(self, what: str) -> None:
        """Once."""
        if not self._said:
            self._said = True
            say(f"{self._tracker_name} {what}")


class _Aside:
    """Standard output, but what the threads of trackers print goes to standard error."""

    def __init__(self, out: TextIO):
        self.out = out

    def write(self, text: str) -> int:
        return (sys.stderr if isinstance(current_thread(), _Follower) else self.out).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)
