"""The events that a rank played, by its clock, as a trace that Perfetto (ui.perfetto.dev) and
chrome://tracing show.

One lane for each of `schedule.event.LANES`. What computes or is sent: from its beginning to its
end in the player, a wait for a fetch as a span inside. What is fetched or stored: from when it was
asked for until it was done; where several are under way, in further lanes of that name. Where
copies are a GPU's, these are the times of its host: when work was handed to the device.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from longshift.errors import UsageError
from longshift.schedule.event import LANES, Buffer, Event

Result = TypeVar("Result")


@dataclass
class Span:
    """Seconds of the clock. Mutable: a copy ends later."""

    lane: str
    name: str
    start: float
    end: float
    facts: dict[str, int]


class Recorder:
    """Mutable. `playing` around every event; `copying` sees what a tier's threads do for it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.now: Span | None = None

    @contextmanager
    def playing(self, event: Event, unit: int, number: int) -> Iterator[None]:
        """Event of a unit's list, in micro-batch `number`."""
        # 1. Name the span.
        name = f"{event.name} {event.chunk}"
        if event.kind not in ("compute", "send"):
            name = f"{event.kind} {name}"
        if event.keys >= 0:
            name += f", {'rows' if event.name == 'loss' else 'keys'} {event.keys}"

        # 2. Measure it. A copy that the event has begun ends it.
        facts = {"unit": unit, "micro-batch": number, "bytes": event.bytes}
        span = Span(LANES.get(event.kind, ""), name, time.perf_counter(), 0.0, facts)
        self.now = span if span.lane else None
        try:
            yield
        finally:
            span.end = span.end or time.perf_counter()
            self.spans += [span] if span.lane else []
            self.now = None

    def waiting(self, buffer: Buffer, wait: Callable[[], Result]) -> Result:
        """The result of a wait for a buffer, which is a span of its own."""
        start = time.perf_counter()
        result = wait()
        if self.now is not None:
            name, chunk = buffer
            self.spans.append(
                Span(self.now.lane, f"wait for {name} {chunk}", start, time.perf_counter(), {})
            )
        return result

    def copying(self, copy: Future) -> None:
        """A copy began for the event that is played."""
        span = self.now
        if span is not None:
            copy.add_done_callback(lambda _: setattr(span, "end", time.perf_counter()))


def save(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write a trace. Raises UsageError where the file cannot be written."""
    try:
        path.write_text(
            json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}), encoding="utf-8"
        )
    except OSError as fault:
        raise UsageError(f"the trace {path} cannot be written: {fault.strerror}") from None


def writable(trace: Path) -> Path:
    """Made absolute. Raises UsageError where it cannot be written."""
    # Asked before a run begins, which would else end without its trace.
    if not trace.absolute().parent.is_dir() or trace.is_dir():
        raise UsageError(f"--trace {trace}: name a file in a folder that exists")
    if trace.exists() and trace.suffix != ".json":
        raise UsageError(
            f"--trace {trace} is there already; only files that end in .json are written over"
        )
    if not os.access(trace if trace.exists() else trace.absolute().parent, os.W_OK):
        raise UsageError(f"--trace {trace} cannot be written")
    return trace.absolute()


def origin(spans: Iterable[Span]) -> float:
    """When the first of them starts."""
    return min((span.start for span in spans), default=0.0)


def counter_events(
    name: str, process: int, values: Iterable[tuple[float, int]], from_s: float
) -> Iterator[dict[str, Any]]:
    """A number that changes: (seconds of the clock, value)."""
    for when, value in values:
        yield {
            "ph": "C",
            "name": name,
            "pid": process,
            "ts": (when - from_s) * 1e6,
            "args": {name: value},
        }


def events_of(
    spans: Iterable[Span], process: int, name: str, shown: Sequence[str], from_s: float
) -> Iterator[dict[str, Any]]:
    """In the Trace Event Format, microseconds from `from_s`. `shown`: lanes, from the top."""
    # Of spans that begin together the outer one comes first.
    spans = sorted(spans, key=lambda span: (span.start, -span.end))
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    rows: list[list[Span]] = []
    for lane in shown:
        lane_spans = [span for span in spans if span.lane == lane]
        rows += _rows(lane_spans, nested=lane in ("compute", "link"))
    for thread, row in enumerate(rows):
        place = {"pid": process, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": row[0].lane}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}
        for span in row:
            start_us = (span.start - from_s) * 1e6
            times = {"ts": start_us, "dur": (span.end - span.start) * 1e6}
            yield {"ph": "X", "name": span.name, **place, **times, "args": span.facts}


def _rows(spans: Iterable[Span], nested: bool) -> list[list[Span]]:
    """Spans of one lane, in rows without overlap, as few as there can be;
    spans that nest need one row."""
    # A viewer draws slices of a row that overlap without nesting wrongly.
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if nested or row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows
