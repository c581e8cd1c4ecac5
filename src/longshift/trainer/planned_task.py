"""A plan and what is said of it: as values, in sentences, and as the trace of a predicted step."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from longshift.layout.axes import token_axes
from longshift.layout_plan import (
    LayoutPlan,
    PlannedCluster,
    PlannedGroup,
    PlannedHome,
    PlannedWay,
    Short,
)
from longshift.planner.plan_evaluator import PlanCandidate
from longshift.planner.search import SearchResult
from longshift.planner.task import CONTEXT_BYTES, FILLED, PlanTask
from longshift.print_result import gib_text, size_text
from longshift.program.operations import LANES as OP_LANES
from longshift.simulate.calibrate import BAND
from longshift.simulate.clock import in_visiting_order
from longshift.simulate.model_flops import mfu, model_flops
from longshift.simulate.sizes import sizes
from longshift.spec.formats import arithmetic
from longshift.stream.trace import Span, events_of, save

RIVALS = 5  # other ways that are told
TRIALS_NOTE = (
    "layout: auto trains some steps of each of these, and goes on with the fastest by these steps"
    " and the clock:"
)
AXES = tuple(axis.name for axis in token_axes())
# What is begun and awaited occupies the lanes of its operations; messages have a lane for each pair
# of stages.
LANES = ("compute", "attention", *AXES, *sorted({*OP_LANES.values()} - {"messages"}))


@dataclass(frozen=True)
class PlannedTask:
    """A task and the choice for it. `alternatives`: plans with the other homes that were
    compared."""

    task: PlanTask
    choice: SearchResult
    alternatives: tuple["PlannedTask", ...] = ()

    def _range_s(self, way: PlanCandidate) -> tuple[float, float]:
        """The seconds between which a step of a way is expected."""
        calibration = self.task.cluster.calibration
        band = BAND if calibration is None else calibration.band
        return way.seconds * (1 - band), way.seconds * (1 + band)

    def layout(self, way: PlanCandidate) -> Any:
        """A way in the form of the config's `layout`."""
        last = way.edges[-1]
        if len(way.edges) == 1 and last.pack == last.upto:
            return str(last.use)
        return [edge.told() for edge in way.edges]

    def groups(self, way: PlanCandidate) -> tuple[PlannedGroup, ...]:
        """What each group of a way has and takes, of the mean step, in the order of lengths."""
        documents = [0] * len(way.edges)
        tokens = [0] * len(way.edges)
        seconds = [0.0] * len(way.edges)
        ends = [edge.upto for edge in way.edges]
        for step, step_lengths in way.steps:
            # A step visits its groups one after another: one stops where the next starts.
            stops = [*step.starts[1:], step.seconds]
            visits = in_visiting_order(way.shape, step_lengths)
            for visit, stop, start in zip(visits, stops, [0.0, *stops]):
                packs = [pack for replica in visit.replicas for pack in replica]
                lengths = [length for pack in packs for length in pack]
                index = bisect_left(ends, max(lengths))
                documents[index] += len(lengths)
                tokens[index] += sum(lengths)
                seconds[index] += stop - start
        steps = len(way.steps)
        return tuple(
            PlannedGroup(
                upto=edge.upto,
                layout=str(edge.use),
                pack=edge.pack,
                documents=documents[index] / steps,
                tokens=tokens[index] / steps,
                seconds=seconds[index] / steps,
                tokens_per_s=tokens[index] / seconds[index] if seconds[index] else 0.0,
            )
            for index, edge in enumerate(way.edges)
        )

    def _mfu(self, way: PlanCandidate) -> dict[str, float]:
        """Model FLOP/s over the devices' peak, by convention, of the mean of the steps that a way
        was played on."""
        task = self.task
        spec = task.spec
        steps = len(way.steps)
        lengths = np.concatenate([step_lengths for _, step_lengths in way.steps]).astype(float)
        tokens = float(lengths.sum()) / steps
        pairs = float(spec.attended(lengths).sum()) / steps
        flops = model_flops(sizes(spec), tokens, pairs, spec.active)
        peak = task.cluster.device.flops_per_s[arithmetic(task.precision)]
        shares = mfu(flops, way.seconds, task.world, peak)
        return {name: float(share) for name, share in shares.items()}

    def result(self) -> LayoutPlan:
        """What is said of the plan, to a person and to programs."""
        task = self.task
        choice = self.choice
        best = choice.best
        cluster = task.cluster
        homes = [
            PlannedHome(home=plan.task.home.to_json(), seconds=plan.choice.seconds)
            for plan in (self, *self.alternatives)
        ]
        too_large = [
            Short(way=self.layout(way), bytes=lack, place=place)
            for way, lack, place in choice.short[:RIVALS]
        ]
        plan = LayoutPlan(
            cluster=PlannedCluster(
                name=cluster.name, nodes=cluster.nodes, devices_per_node=cluster.devices_per_node
            ),
            ranks=task.world,
            home=task.home.to_json(),
            homes=tuple(homes),
            tokens_per_step=task.tokens_per_step,
            documents=task.lengths.documents,
            longest=task.longest_document,
            candidates=choice.num_candidates,
            refused=choice.refused,
            budget_bytes=int(task.budget_bytes),
            fits=best is not None,
            changes=choice.changes,
            short=tuple(too_large),
            notes=tuple(self.lines()),
        )
        if best is None:
            return plan
        single = choice.single
        context = choice.context_parallel
        rivals = choice.plans[1 : 1 + RIVALS]
        ways = {
            "best": self._way(best, groups=self.groups(best), lanes=self.lanes(best)),
            "single": self._way(single) if single else None,
            "context_parallel": self._way(context) if context else None,
            "tried": tuple(map(self._way, choice.trial_plans())),
            "rivals": tuple(self._way(way, times=way.seconds / best.seconds) for way in rivals),
        }
        return plan.model_copy(update=ways | {"mfu": self._mfu(best)})

    def _way(self, way: PlanCandidate, **fields: Any) -> PlannedWay:
        least_s, most_s = self._range_s(way)
        return PlannedWay(
            layout=self.layout(way),
            seconds=way.seconds,
            least_s=least_s,
            most_s=most_s,
            bytes=way.bytes,
            peak=way.peak,
            **fields,
        )

    def lanes(self, way: PlanCandidate) -> dict[str, float]:
        """Seconds in which each lane of the busiest stage does something, of the mean step."""
        busy_s = {
            lane: float(np.mean([step.busy_s(lane) for step, _ in way.steps])) for lane in LANES
        }
        return {lane: seconds for lane, seconds in busy_s.items() if seconds}

    def lines(self) -> list[str]:
        """Sentences about the choice, after the table of its groups."""
        best = self.choice.best
        if best is None:
            return list(self._misfit_lines())
        return [*self._need_lines(best), *self._comparison_lines(best)]

    def _misfit_lines(self) -> Iterator[str]:
        """Sentences where no layout fits."""
        task = self.task
        if task.budget_bytes <= 0:
            memory = size_text(int((task.budget_bytes + CONTEXT_BYTES) / FILLED))
            needed = size_text(int(CONTEXT_BYTES / FILLED))
            yield f"a device has {memory} of memory, and torch and its context alone need {needed}"
            return
        room = f"{gib_text(task.budget_bytes)} a device"
        for tier in task.places[1:]:
            room += f" and {gib_text(task.limits[tier])} of {tier}"
        homes = ""
        if self.alternatives:
            others = " or ".join(str(plan.task.home) for plan in self.alternatives)
            homes = f", with home: {task.home}, nor with {others}"
        yield f"nothing fits in {room}{homes}"
        for way, lack, memory in self.choice.short[:RIVALS]:
            peak = f", at {way.peak}" if memory == "device" else ""
            yield f"  {way}: {_short(lack, memory)}{peak}"
        lacks_host = any(memory == "host" for _, _, memory in self.choice.short)
        if lacks_host and "host" in task.home.tiers:
            yield "home: disk, or a part of it, keeps less in host memory"
        yield from self.choice.changes

    def _need_lines(self, best: PlanCandidate) -> Iterator[str]:
        """Sentences about the seconds and the memory of the best way."""
        task = self.task
        min_s, max_s = self._range_s(best)
        calibration = task.cluster.calibration
        source = f", calibrated by {len(calibration.errors)} steps" if calibration else ""
        step = f"a step takes {best.seconds:.3g} s ({min_s:.3g} to {max_s:.3g})"
        yield f"{step}, on the clock{source}"
        device_bytes = best.bytes["device"]
        spare = task.budget_bytes - device_bytes
        needed = gib_text(device_bytes)
        yield f"a device needs {needed}: {gib_text(spare)} left; most at {best.peak}"
        for memory, where in (("host", "in host memory"), ("disk", "on disk")):
            size = best.bytes[memory]
            room = task.limits[memory]
            if size:
                # Host memory has no limit of its own where the host is the device.
                rest = f": {gib_text(room - size)} left" if room < inf else ""
                yield f"{where} a rank keeps {gib_text(size)}{rest}"
        if "disk" in task.home.tiers and not best.shape.early:
            yield "updates before the norm have no room there: all are made under the next forward"

    def _comparison_lines(self, best: PlanCandidate) -> Iterator[str]:
        """Sentences about other homes and other ways, beside the best."""
        choice = self.choice
        for plan in self.alternatives:
            seconds = plan.choice.seconds
            outcome = f"a step {_times(seconds / best.seconds)}" if seconds else "nothing fits"
            yield f"home: {self.task.home}; with home: {plan.task.home} {outcome}"
        single = choice.single
        context = choice.context_parallel
        if single is not None and single is not best:
            yield f"the best single layout, {single}, {_times(single.seconds / best.seconds)}"
        if context is not None and context not in (best, single):
            times = _times(context.seconds / best.seconds)
            yield f"the best by context parallelism alone, {context}, {times}"
        for way in choice.plans[1 : 1 + RIVALS]:
            yield f"  {way}: {way.seconds / best.seconds - 1:+.1%}"
        for way, lack, memory in choice.short[:RIVALS]:
            yield f"  {way}: {_short(lack, memory)}"
        for rival in choice.rivals:
            excess = f"{rival.times - 1:+.1%} over the best single layout (rate cards)"
            yield f"  {rival.layout}: {excess}, {gib_text(rival.short_bytes)} short"
        trials = choice.trial_plans()
        if len(trials) > 1:
            yield TRIALS_NOTE
            yield from (f"  {way}: {way.seconds:.3g} s" for way in trials)
        yield f"{choice.num_candidates:,} layouts were compared"
        for reason, count in choice.refused.items():
            yield f"  {count:,} refused: {reason}"


def _short(lack: float, place: str) -> str:
    return f"{gib_text(lack)} {'' if place == 'device' else f'of {place} '}short"


def _times(ratio: float) -> str:
    return f"takes {ratio:.2f} times as long"


def write_trace(way: PlanCandidate, path: Path) -> None:
    """Write the first of the steps that were played, in the Trace Event Format. Raises UsageError
    where the file cannot be written."""
    step, _ = way.steps[0]
    spans: dict[int, list[Span]] = {}
    for start, pieces in zip(step.starts, step.played):
        for piece in pieces:
            lane = piece.lane
            # Messages have a lane for each pair of stages, and a trace one for all.
            if lane.startswith("messages"):
                lane = "messages"
            kind = piece.key[0] if isinstance(piece.key, tuple) else piece.key
            span = Span(lane, str(kind), start + piece.start, start + piece.end, {})
            spans.setdefault(piece.rank, []).append(span)
    events = []
    for stage, stage_spans in sorted(spans.items()):
        name = f"stage {stage}, predicted"
        events += events_of(stage_spans, stage, name, [*LANES, "messages"], 0.0)
    save(path, events)
