"""A step on one rank, recorded: every operation with its times and the bytes alive after it, beside what the ledger says of the same step.

A `Timeline` is entered before the state is built, so that it has seen every tensor. Bytes are those of all tensors on a CPU
(`dist.held`), those that the allocator has given out on a GPU, where times are its host's: when work was handed to the device.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longshift.dist.held import HeldBytes, prompt_release
from longshift.program.operations import AWAITED, LANES, Op
from longshift.step.player import Player
from longshift.stream.trace import Recorder, Span, counter_events, events_of, origin, save
from longshift.weigh.ledger import Ledger

LEAST, MOST = 0.98, 1.0  # recorded peak over predicted peak
SHOWN = ("compute", "gather", "reduce", "switch", "messages", "tier out", "tier in", "link")  # from the top


class Played(NamedTuple):
    """An operation, its seconds of the clock, and the bytes that were alive on the device after it."""

    op: Op
    start: float
    end: float
    held: int


class Timeline(ExitStack):
    """Records what a player plays while it is watched. Mutable. `played`: the operations so far; `peak`: the most bytes meanwhile."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.played = device, list[Played]()
        self._held = HeldBytes() if device.type == "cpu" else None
        self._since = 0.0

    def __enter__(self) -> "Timeline":
        if self._held is not None:
            self.enter_context(prompt_release())
            self.enter_context(self._held)
        return self

    def watch(self, player: Player) -> None:
        """Begin to record a player. What was recorded before is forgotten."""
        self.played = []
        if self._held is not None:
            self._held.restart()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
        player.after = self._after
        self._since = time.perf_counter()

    def _after(self, op: Op) -> None:
        end = time.perf_counter()
        self.played.append(Played(op, self._since, end, self.held))
        self._since = time.perf_counter()

    @property
    def held(self) -> int:
        """Bytes now."""
        if self._held is None:
            return torch.cuda.memory_allocated(self.device)
        self._held.refresh()  # a storage that was resized
        return self._held.now[self.device.type]

    @property
    def peak(self) -> int:
        return self._held.most[self.device.type] if self._held is not None else torch.cuda.max_memory_allocated(self.device)


@dataclass(frozen=True)
class Predicted:
    """What the ledger says of a step: each operation with the bytes that are alive on the device after it, and the most."""

    after: tuple[tuple[Op, int], ...]
    peak: int


def predicted(player: Player) -> Predicted:
    """The ledger's prediction for the step whose program the player made last."""
    precision, cpu = player.precision, player.world.device.type == "cpu"
    same = precision.compute == precision.home
    ledger = Ledger(player.steps, "gloo" if cpu else "nccl", same, host_is_device=cpu, ahead=player.stream.ahead, float8=precision.float8)
    visits, packs = player.steps.visits(player.groups_here, player.lengths)
    after: list[tuple[Op, int]] = []
    lengths = [[[player.lengths[d] for d in pack] for pack in some] for some in packs]
    found = ledger.play(visits, lengths, lambda op: after.append((op, ledger.book.now["device"])), steps=1, last=player.how)
    return Predicted(tuple(after), found.device)


def differences(played: Sequence[Played], told: Predicted) -> list[dict[str, Any]]:
    """Bytes after operations, largest difference first: of those that differ by the same, the first one, and how many `alike` there are.
    Where another operation was played than was predicted, the row says so."""
    rows = []
    for number in range(max(len(played), len(told.after))):
        one = played[number] if number < len(played) else None
        op, size = told.after[number] if number < len(told.after) else (None, None)
        same = one is not None and one.op == op
        name = str(op) if same else f"{one.op if one else 'nothing'} was played for {op or 'nothing'}"
        recorded = one.held if one else None
        rows.append({"number": number, "op": name, "recorded": recorded, "predicted": size, "same": same})
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        row["difference"] = (row["recorded"] or 0) - (row["predicted"] or 0)
        first = found.setdefault((row["same"], row["difference"]), row)
        first["alike"] = first.get("alike", 0) + 1
    return sorted(found.values(), key=rank_of)


def rank_of(row: Mapping[str, Any]) -> tuple[bool, int]:
    """The sort key of a row of `differences`: what should not have been played comes first, in its order, then the largest difference."""
    return row["same"], -abs(row["difference"]) if row["same"] else row["number"]


def verdict(timeline: Timeline, told: Predicted, rows: int = 8) -> dict[str, Any]:
    """Peaks, and the largest differences. `within`: whether what was played is the program, and the recorded peak is between LEAST and MOST
    of the predicted one."""
    found = differences(timeline.played, told)
    ratio = timeline.peak / told.peak
    within = all(row["same"] for row in found) and LEAST <= ratio <= MOST
    peaks = {"recorded": timeline.peak, "predicted": told.peak, "ratio": ratio}
    return {"operations": len(timeline.played), **peaks, "within": within, "differences": found[:rows]}


def write(path: Path, rank: int, played: Sequence[Played], told: Predicted, recorder: Recorder | None = None) -> None:
    """A trace of both: two processes with the same lanes, and bytes on the device as a counter of each. What is predicted has no times of
    its own: an operation is shown when the one of its place in the program was played. Raises UsageError where the file cannot be
    written."""
    spans = list(_spans(played))
    chunks = [Span(_renamed(span.lane), span.name, span.start, span.end, span.facts) for span in recorder.spans] if recorder else []
    beside = [Played(op, one.start, one.end, size) for one, (op, size) in zip(played, told.after)]
    from_s = origin(spans)
    both = (("recorded", [*spans, *chunks], played), ("predicted", list(_spans(beside)), beside))
    events: list[dict[str, Any]] = []
    for process, (name, shown, rows) in enumerate(both):
        events += events_of(shown, 2 * rank + process, f"rank {rank}, {name}", SHOWN, from_s)
        events += counter_events("device bytes", 2 * rank + process, [(one.end, one.held) for one in rows], from_s)
    save(path, events)


def _spans(played: Iterable[Played]) -> Iterator[Span]:
    """A span for each operation. What is awaited later lasts until then, in its own lane; waiting for it is a slice among what computes."""
    under_way: dict[tuple, deque[Span]] = defaultdict(deque)
    for one in played:
        begun = under_way[one.op] if one.op.kind in AWAITED.values() else None
        if begun:
            begun.popleft().end = one.end
        span = Span(LANES.get(one.op.kind, "compute"), str(one.op), one.start, one.end, {"bytes after": one.held})
        if one.op.kind in AWAITED:
            under_way[(AWAITED[one.op.kind], *one.op[1:])].append(span)
        yield span


def _renamed(lane: str) -> str:
    """A lane of chunks' events among those of operations."""
    return {"in": "tier in", "out": "tier out"}.get(lane, lane)
