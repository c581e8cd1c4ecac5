"""The best layouts for a run's documents on a cluster, what a step takes, and why not another way:
what `longshift plan` says and writes, and how `layout: auto` becomes layouts."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.cluster.host import core_count
from longshift.config import Config
from longshift.errors import OutOfMemoryError, UsageError
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.axes import token_axes
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import format_size
from longshift.layout_plan import (
    LayoutPlan,
    PlannedCluster,
    PlannedGroup,
    PlannedHome,
    PlannedWay,
    Short,
)
from longshift.planner.plan_evaluator import PlanCandidate
from longshift.planner.search import SearchResult, search
from longshift.planner.task import PlanTask
from longshift.simulate.calibrate import BAND
from longshift.simulate.clock import in_visiting_order
from longshift.simulate.cost import sizes
from longshift.simulate.model_flops import mfu, model_flops
from longshift.spec.formats import arithmetic
from longshift.step_report import layout_text, on_cluster
from longshift.stream.trace import Span, events_of, save
from longshift.trainer.plan_file import PlanFile, place, read
from longshift.workload.length_file import Lengths
from longshift.workload.lengths import spans

Tell = Callable[[str], None]

RIVALS = 5  # other ways that are told
TRIALS_NOTE = (
    "layout: auto trains some steps of each of these, and goes on with the fastest by these steps"
    " and the clock:"
)
AXES = tuple(axis.name for axis in token_axes())
LANES = ("compute", "attention", *AXES, "gather", "reduce", "switch", "tier in", "tier out")


def cut(lengths: Lengths, config: Config) -> Lengths:
    """The lengths of a corpus as the run cuts them. Raises UsageError where some are too long and
    the config does not say what to do."""
    longest = config.data.max_len
    policy = config.data.overlong
    if int(lengths.lengths[-1]) <= longest:
        return lengths
    if policy is None:
        raise UsageError(
            f"data: documents have up to {int(lengths.lengths[-1]):,} tokens and data.max_len is"
            f" {format_size(longest)}; write data.overlong: split, or truncate, drop"
        )
    pieces = spans(lengths.lengths, longest, policy)
    piece_lengths = pieces.stop - pieces.start
    if not len(piece_lengths):
        raise UsageError(
            f"data.overlong: drop leaves no document of at most {format_size(longest)} tokens;"
            " write data.overlong: split"
        )

    # A document stands for as many of its length as were counted, and so does each of its pieces.
    counts = lengths.counts[pieces.document]
    distinct, index = np.unique(piece_lengths, return_inverse=True)
    return Lengths(distinct, np.bincount(index, counts).astype(np.int64))


def _coded_stages(config: Config, request: AutoLayout, world: int) -> dict[str, tuple[int, ...]]:
    """The stages of ZeRO, of those in `request`, that the config's `wire` allows: 1 to 3.

    Empty where it excludes none."""
    if world == 1 or not config.formats.wire.coded:
        return {}
    zero_stages = dict(request.fixed).get("z", (1, 2, 3))
    return {"z": tuple(zero for zero in zero_stages if zero)}


def _homes(cluster: Cluster) -> tuple[HomeTiers, ...]:
    """Homes that a plan may choose from. On a CPU the host is the device."""
    homes = [HomeTiers()]
    if cluster.device.kind != "cpu":
        homes.append(HomeTiers("host"))
    if cluster.disk is not None:
        homes.append(HomeTiers("disk"))
    return tuple(homes)


def other_ranks(config: Config, cluster: Cluster) -> str | None:
    """A sentence where a plan for all devices of a cluster has other ranks than the config's
    layout; None where it has as many."""
    ranks = None if isinstance(config.layout, AutoLayout) else config.world
    if ranks in (None, cluster.devices):
        return None
    return (
        f"the config's layout has {ranks} rank{'s' * (ranks != 1)}; this plan is for all"
        f" {cluster.devices} devices of the cluster"
    )


def task_of(
    config: Config,
    cluster: Cluster,
    lengths: Lengths,
    all_devices: bool = False,
) -> PlanTask:
    """What is planned for a config whose layout is chosen on a cluster. `all_devices`: for every
    device, however many ranks the config's own layout has."""
    request = config.layout
    if not isinstance(request, AutoLayout):
        request = AutoLayout(None if all_devices else config.world)
    world = request.ranks or cluster.devices
    return PlanTask(
        spec=config.spec,
        cluster=on_cluster(cluster, world, config.train.precision),
        lengths=cut(lengths, config),
        tokens_per_step=config.train.tokens_per_step,
        precision=config.train.precision,
        world=world,
        fixed=dict(request.fixed) | _coded_stages(config, request, world),
        switch=config.switch.options,
        moments=config.formats.moments,
        packed=config.formats.packed,
        wire=config.formats.wire,
        compile=config.train.compile,
        home=HomeTiers() if config.home.at.auto else config.home.at,
        homes=_homes(cluster) if config.home.at.auto else (),
    )


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

    def _mfu(self, seconds: float) -> dict[str, float]:
        """Model FLOP/s over the devices' peak, by convention, of a mean step."""
        task = self.task
        lengths = task.lengths.lengths.astype(float)
        counts = task.lengths.counts.astype(float)
        scale = task.tokens_per_step / (lengths @ counts)
        # Under a causal mask, half of a document's pairs of tokens attend.
        pairs = scale * float(lengths**2 @ counts) / 2
        flops = model_flops(sizes(task.spec), task.tokens_per_step, pairs, task.spec.parameters)
        peak = task.cluster.device.flops_per_s[arithmetic(task.precision)]
        shares = mfu(flops, seconds, task.world, peak)
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
            longest=task.longest,
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
        return plan.model_copy(update=ways | {"mfu": self._mfu(best.seconds)})

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
        limits = "".join(f" and {_gib(task.limits[place])} of {place}" for place in task.places[1:])
        alternatives = " or ".join(str(plan.task.home) for plan in self.alternatives)
        homes = f", with home: {task.home}, nor with {alternatives}" if alternatives else ""
        yield f"nothing fits in {_gib(task.budget_bytes)} a device{limits}{homes}"
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
        yield f"a device needs {_gib(device_bytes)}: {_gib(spare)} left; most at {best.peak}"
        for memory, where in (("host", "in host memory"), ("disk", "on disk")):
            if size := best.bytes[memory]:
                room = task.limits[memory]
                rest = f": {_gib(room - size)} left" if room < inf else ""
                yield f"{where} a rank keeps {_gib(size)}{rest}"
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
            yield f"  {rival.layout}: {excess}, {_gib(rival.short_bytes)} short"
        trials = choice.trial_plans()
        if len(trials) > 1:
            yield TRIALS_NOTE
            yield from (f"  {way}: {way.seconds:.3g} s" for way in trials)
        yield f"{choice.num_candidates:,} layouts were compared"
        for reason, count in choice.refused.items():
            yield f"  {count:,} refused: {reason}"


def _short(lack: float, place: str) -> str:
    return f"{_gib(lack)} {'' if place == 'device' else f'of {place} '}short"


def _times(ratio: float) -> str:
    return f"takes {ratio:.2f} times as long"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def plan(task: PlanTask, tell: Callable[[str], None] = lambda line: None) -> PlannedTask:
    """The plan of a task. Where homes are compared, it has the fastest.

    `tell`: is called with the home that is searched next."""
    plans: list[PlannedTask] = []
    for home in task.homes or (task.home,):
        # A disk is the slowest home, so it is searched only if nothing fits without it.
        if home.last == "disk" and any(plan.choice.best for plan in plans):
            continue
        if task.homes:
            tell(f"home: {home}")
        home_task = replace(task, home=home, homes=())
        plans.append(PlannedTask(home_task, search(home_task, tell)))

    best = plans[-1]
    if any(plan.choice.best for plan in plans):
        best = min(plans, key=lambda plan: plan.choice.seconds or inf)
    return replace(best, alternatives=tuple(plan for plan in plans if plan is not best))


def resolve_layout(
    config: Config,
    request: AutoLayout,
    cluster: Callable[[int], Cluster],
    lengths: Callable[[], Lengths],
    tell: Tell,
) -> tuple[Config, PlanFile]:
    """The config with its `layout: auto`, the `request`, chosen before ranks start, and the plan
    that is kept in the run's folder. A run that has a plan for what is asked goes on with it.
    `cluster`: this machine, for a number of ranks; `lengths`: of the run's corpus. Raises
    OutOfMemoryError where nothing fits."""
    # 1. Keep the plan that the run has, if it answers the same request.
    run = Path(config.save.dir)
    saved = read(run)
    is_auto_home = config.home.at.auto
    if saved and saved.asked == request.to_json() and (saved.home is not None) == is_auto_home:
        tell(f"layout: auto: as {place(run)} says")
        return saved.config(config), saved

    # 2. Plan.
    task = task_of(config, cluster(request.ranks or core_count()), lengths())
    result = plan(task, tell)
    if result.choice.best is None:
        raise OutOfMemoryError("\n  ".join(["layout: auto:", *result.lines()]))

    # 3. Take the best choice; among several, the trials decide.
    ways = result.choice.trial_plans()
    choices = tuple(map(result.layout, ways))
    file = PlanFile(
        asked=request.to_json(),
        choices=choices,
        facts=result.result().to_json(),
        chosen=None if len(choices) > 1 else 0,
        home=result.task.home.to_json() if is_auto_home else None,
    )
    if file.home is not None:
        tell(f"home: auto: {result.task.home}")
    for number, (choice, way) in enumerate(zip(choices, ways)):
        order = "first" if number == 0 else "then"
        tell(f"layout: auto: {order} {layout_text(choice)}, {way.seconds:.3g} s a step")
    return file.config(config), file


def write_config(config: Config, plan: PlannedTask, path: Path) -> None:
    """Write the config with the best choice. Raises UsageError where there is none or the file
    cannot be written."""
    best = plan.choice.best
    if best is None:
        raise UsageError("--emit: nothing fits, so there is no layout to write")
    try:
        home = plan.task.home.to_json() if config.home.at.auto else None
        text = config.with_layout(plan.layout(best), home).to_yaml()
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{path} cannot be written: {fault.strerror}") from None


def write_trace(way: PlanCandidate, path: Path) -> None:
    """Write the first of the steps that were played, in the Trace Event Format. Raises UsageError
    where the file cannot be written."""
    step, _ = way.steps[0]
    spans: dict[int, list[Span]] = {}
    for start, pieces in zip(step.starts, step.played):
        for piece in pieces:
            lane = "messages" if piece.lane.startswith("messages") else piece.lane
            name = str(piece.key[0] if isinstance(piece.key, tuple) else piece.key)
            span = Span(lane, name, start + piece.start, start + piece.end, {})
            spans.setdefault(piece.rank, []).append(span)
    events = []
    for stage, stage_spans in sorted(spans.items()):
        name = f"stage {stage}, predicted"
        events += events_of(stage_spans, stage, name, [*LANES, "messages"], 0.0)
    save(path, events)
