"""A step on one rank, recorded: every operation with its times and the bytes alive after it, beside
what the ledger predicts of the same step.

A `Timeline` is entered before the state is built, so that it has seen every tensor. Bytes are those
of all tensors on a CPU (`dist.live_bytes`). On a GPU they are those that the allocator has given
out, and times are the host's: when work was handed to the device.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longshift.dist.live_bytes import HeldBytes, prompt_release
from longshift.program.operations import AWAITED, LANES, Op
from longshift.step.player import Player
from longshift.stream.trace import Recorder, Span, counter_events, events_of, origin, save
from longshift.weigh.allocations import RankMemory
from longshift.weigh.ledger import Ledger
from longshift.weigh.recorder import transport_on

# Recorded peak over predicted peak: what a step may have.
MIN_RATIO = 0.98
MAX_RATIO = 1.0

# Lanes of a trace, from the top.
ROWS = 8  # of differences that are shown
SHOWN_LANES = ("compute", *dict.fromkeys(LANES.values()), "link")


class PlayedOp(NamedTuple):
    """An operation, its seconds of the clock, and bytes alive on the device after it."""

    op: Op
    start: float
    end: float
    device_bytes: int


class Timeline(ExitStack):
    """Records what a player plays while it is watched. Mutable.

    `ops`: the operations so far.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.ops: list[PlayedOp] = []
        self._tensors = HeldBytes() if device.type == "cpu" else None
        self._op_start = 0.0

    def __enter__(self) -> "Timeline":
        if self._tensors is not None:
            self.enter_context(prompt_release())
            self.enter_context(self._tensors)
        return self

    def watch(self, player: Player) -> None:
        """Begin to record a player. Earlier records are forgotten."""
        self.ops = []
        if self._tensors is not None:
            self._tensors.restart()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
        player.after = self._record
        self._op_start = time.perf_counter()

    def _record(self, op: Op) -> None:
        end = time.perf_counter()
        self.ops.append(PlayedOp(op, self._op_start, end, self._device_bytes()))
        self._op_start = time.perf_counter()  # measuring bytes is not the next operation's

    def _device_bytes(self) -> int:
        if self._tensors is None:
            return torch.cuda.memory_allocated(self.device)
        return self._tensors.now[self.device.type]

    @property
    def peak(self) -> int:
        """The most bytes since the player is watched."""
        if self._tensors is None:
            return torch.cuda.max_memory_allocated(self.device)
        return self._tensors.most[self.device.type]


class PredictedOp(NamedTuple):
    """An operation, and bytes alive on the device after it."""

    op: Op
    device_bytes: int


@dataclass(frozen=True)
class PredictedStep:
    """What the ledger predicts of a step: its operations, and the peak of the device."""

    ops: tuple[PredictedOp, ...]
    peak: int


def predict_step(player: Player) -> PredictedStep:
    """The ledger's prediction of the step whose program the player made last."""
    precision = player.precision
    memory = RankMemory(
        player.steps,
        transport_on(player.world.device.type != "cpu"),
        same_format=precision.compute == precision.home,
        float8=precision.float8,
    )
    ledger = Ledger(memory)
    visits, packs_by_visit = player.steps.visits(player.groups_here, player.lengths)
    lengths = [[[player.lengths[d] for d in pack] for pack in packs] for packs in packs_by_visit]
    ops: list[PredictedOp] = []

    def record(op: Op) -> None:
        ops.append(PredictedOp(op, ledger.allocations.now["device"]))

    estimate = ledger.play(visits, lengths, record, steps=1, last=player.how)
    return PredictedStep(tuple(ops), estimate.device)


def compare_ops(played: Sequence[PlayedOp], prediction: PredictedStep) -> list[dict[str, Any]]:
    """Differences in bytes after operations, in the order of `difference_order`.

    Of operations that differ by the same there is the first one, and how many are `alike`. A row
    says where another operation was played than was predicted.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for number, pair in enumerate(zip_longest(played, prediction.ops)):
        # Where another operation was played, one of the lists may be longer.
        played_name, predicted_name = (str(each.op) if each else "nothing" for each in pair)
        recorded_bytes, predicted_bytes = (each.device_bytes if each else None for each in pair)
        is_same = None not in pair and pair[0].op == pair[1].op
        name = played_name if is_same else f"{played_name} was played for {predicted_name}"
        difference = (recorded_bytes or 0) - (predicted_bytes or 0)
        row = {
            "number": number,
            "op": name,
            "recorded": recorded_bytes,
            "predicted": predicted_bytes,
            "same": is_same,
            "difference": difference,
            "alike": 0,
        }
        rows.setdefault((is_same, difference), row)["alike"] += 1
    return sorted(rows.values(), key=difference_order)


def difference_order(row: Mapping[str, Any]) -> tuple[bool, int]:
    """The sort key of a row of `compare_ops`: first what should not have been played, in its order,
    then the largest difference."""
    return row["same"], -abs(row["difference"]) if row["same"] else row["number"]


def compare_step(timeline: Timeline, prediction: PredictedStep) -> dict[str, Any]:
    """Compare peaks, and bytes after operations.

    `within`: whether the program was played, and the ratio of the peaks is within MIN_RATIO and
    MAX_RATIO.
    """
    differences = compare_ops(timeline.ops, prediction)
    ratio = timeline.peak / prediction.peak
    is_program = all(row["same"] for row in differences)
    return {
        "operations": len(timeline.ops),
        "recorded": timeline.peak,
        "predicted": prediction.peak,
        "ratio": ratio,
        "within": is_program and MIN_RATIO <= ratio <= MAX_RATIO,
        "differences": differences[:ROWS],
    }


def write_timeline(
    path: Path,
    rank: int,
    played: Sequence[PlayedOp],
    prediction: PredictedStep,
    recorder: Recorder | None = None,
) -> None:
    """Write a trace: two processes with the same lanes, and bytes on the device as a counter of
    each. Raises UsageError where the file cannot be written.

    `recorder`: has seen the events of chunks.
    """
    recorded_spans = list(_spans(played))
    from_s = origin(recorded_spans)
    if recorder:
        for span in recorder.spans:
            lane = {"in": "tier in", "out": "tier out"}.get(span.lane, span.lane)
            recorded_spans.append(Span(lane, span.name, span.start, span.end, span.facts))

    # A prediction has no times: an operation is shown when the one of its place was played.
    predicted = []
    for played_op, (op, device_bytes) in zip(played, prediction.ops):
        predicted.append(played_op._replace(op=op, device_bytes=device_bytes))
    predicted_spans = list(_spans(predicted))

    events: list[dict[str, Any]] = []
    processes = (("recorded", recorded_spans, played), ("predicted", predicted_spans, predicted))
    for index, (name, spans, ops) in enumerate(processes):
        process = 2 * rank + index
        events += events_of(spans, process, f"rank {rank}, {name}", SHOWN_LANES, from_s)
        values = [(played_op.end, played_op.device_bytes) for played_op in ops]
        events += counter_events("device bytes", process, values, from_s)
    save(path, events)


def _spans(ops: Iterable[PlayedOp]) -> Iterator[Span]:
    """A span of each operation. What is awaited later lasts until then, in its own lane; waiting
    for it is a slice in the lane that computes."""
    under_way: dict[tuple, deque[Span]] = defaultdict(deque)
    for op, start, end, device_bytes in ops:
        # Several of one name may be under way; they end in their order.
        if op.kind in AWAITED.values() and under_way[op]:
            under_way[op].popleft().end = end
        lane = LANES.get(op.kind, "compute")
        span = Span(lane, str(op), start, end, {"bytes after": device_bytes})
        if op.kind in AWAITED:
            await_op = (AWAITED[op.kind], *op[1:])
            under_way[await_op].append(span)
        yield span
