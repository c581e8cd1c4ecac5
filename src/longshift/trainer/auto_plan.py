"""The best layouts for a run's documents on a cluster, what a step takes, and why not another way: what `longshift plan` says and writes,
and how `layout: auto` becomes layouts before the ranks start."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.cluster.host import core_count
from longshift.command_results import LayoutPlan, PlannedCluster, PlannedGroup, PlannedHome, PlannedWay, Short
from longshift.config import Config
from longshift.errors import OutOfMemoryError, UsageError
from longshift.forecast import layout_text, on_cluster
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import format_size
from longshift.planner.replay import Way
from longshift.planner.search import Choice, search
from longshift.planner.task import Task
from longshift.simulate.calibrate import BAND
from longshift.simulate.clock import in_visiting_order
from longshift.simulate.cost import sizes
from longshift.simulate.model_flops import mfu, model_flops
from longshift.spec.formats import arithmetic
from longshift.stream.trace import Span, events_of, save
from longshift.trainer.plan_file import PlanFile, place, read
from longshift.workload.given import Lengths
from longshift.workload.lengths import spans

Tell = Callable[[str], None]

RIVALS = 5  # other ways that are told
LANES = ("compute", "attention", "tp", "ulysses", "ring", "gather", "reduce", "switch", "tier in", "tier out")


def cut(lengths: Lengths, config: Config) -> Lengths:
    """The lengths of a corpus as the run cuts them. Raises UsageError where some are too long and the config does not say what to do."""
    longest, policy = config.data.max_len, config.data.overlong
    if int(lengths.lengths[-1]) <= longest:
        return lengths
    if policy is None:
        most, limit = f"{int(lengths.lengths[-1]):,}", format_size(longest)
        raise UsageError(
            f"data: documents have up to {most} tokens and data.max_len is {limit}; write data.overlong: split, or truncate, drop"
        )
    pieces = spans(lengths.lengths, longest, policy)
    sizes_, counts = pieces.stop - pieces.start, lengths.counts[pieces.document]
    if not len(sizes_):
        raise UsageError(f"data.overlong: drop leaves no document of at most {format_size(longest)} tokens; write data.overlong: split")
    known, where = np.unique(sizes_, return_inverse=True)
    return Lengths(known, np.bincount(where, counts).astype(np.int64))


def _coded_stages(config: Config, asked: AutoLayout, world: int) -> dict[str, tuple[int, ...]]:
    """The stages of ZeRO that a plan may choose under the config's `wire`: 1 to 3, of those asked for. Empty where it excludes none."""
    if world == 1 or not config.formats.wire.coded:
        return {}
    return {"z": tuple(zero for zero in dict(asked.fixed).get("z", (1, 2, 3)) if zero)}


def _homes(config: Config, cluster: Cluster) -> tuple[HomeTiers, ...]:
    """Homes that a plan may choose from. On a CPU the host is the device."""
    found = [HomeTiers()]
    if cluster.device.kind != "cpu":
        found.append(HomeTiers("host"))
    if cluster.disk is not None:
        found.append(HomeTiers("disk"))
    return tuple(found)


def other_ranks(config: Config, cluster: Cluster) -> str | None:
    """A sentence where a plan for all devices of a cluster has other ranks than the config's layout; None where it has as many."""
    ranks = None if isinstance(config.layout, AutoLayout) else config.world
    if ranks in (None, cluster.devices):
        return None
    return f"the config's layout has {ranks} rank{'s' * (ranks != 1)}; this plan is for all {cluster.devices} devices of the cluster"


def task_of(config: Config, cluster: Cluster, lengths: Lengths, memory_bytes: float | None = None, all_devices: bool = False) -> Task:
    """What is planned for a config whose layout is chosen on a cluster. `all_devices`: for every device, however many ranks the config's
    own layout has."""
    asked = config.layout if isinstance(config.layout, AutoLayout) else AutoLayout(None if all_devices else config.world)
    world = asked.ranks or cluster.devices
    return Task(
        spec=config.spec,
        cluster=on_cluster(cluster, world, config.train.precision),
        lengths=cut(lengths, config),
        tokens_per_step=config.train.tokens_per_step,
        precision=config.train.precision,
        world=world,
        fixed=dict(asked.fixed) | _coded_stages(config, asked, world),
        memory_bytes=memory_bytes,
        switch=config.switch.options,
        moments=config.formats.moments,
        packed=config.formats.packed,
        wire=config.formats.wire,
        compile=config.train.compile,
        home=HomeTiers() if config.home.at.auto else config.home.at,
        homes=_homes(config, cluster) if config.home.at.auto else (),
    )


@dataclass(frozen=True)
class Planned:
    """A plan: what was asked and what was found. `others`: the same with other homes that were compared."""

    task: Task
    choice: Choice
    others: tuple["Planned", ...] = ()

    @property
    def band(self) -> float:
        """Relative half-width of its seconds."""
        calibration = self.task.cluster.calibration
        return BAND if calibration is None else calibration.band

    def layout(self, way: Way) -> Any:
        """A way in the form of the config's `layout`."""
        last = way.edges[-1]
        if len(way.edges) == 1 and last.pack == last.upto:
            return str(last.use)
        return [edge.told() for edge in way.edges]

    def groups(self, way: Way) -> tuple[PlannedGroup, ...]:
        """What each group of a way has and takes, of the mean step, in the order of lengths."""
        documents, tokens, seconds = Counter[int](), Counter[int](), defaultdict[int, float](float)  # by a group's longest document
        ends = [edge.upto for edge in way.edges]
        for step, lengths in way.steps:
            for length in lengths:
                end = ends[bisect_left(ends, length)]
                documents[end] += 1
                tokens[end] += length
            visited = in_visiting_order(way.shape, lengths)
            for group, start, stop in zip(visited, [0.0, *step.starts[1:]], [*step.starts[1:], step.seconds]):
                longest = max(max(pack, default=1) for replica in group.replicas for pack in replica)
                seconds[ends[bisect_left(ends, longest)]] += stop - start
        steps = len(way.steps)
        return tuple(
            PlannedGroup(
                upto=edge.upto,
                layout=str(edge.use),
                pack=edge.pack,
                documents=documents[edge.upto] / steps,
                tokens=tokens[edge.upto] / steps,
                seconds=seconds[edge.upto] / steps,
                tokens_per_s=tokens[edge.upto] / seconds[edge.upto] if seconds[edge.upto] else 0.0,
            )
            for edge in way.edges
        )

    @cached_property
    def flops(self) -> dict[str, float]:
        """Model FLOP of a mean step, by convention."""
        task = self.task
        lengths, counts = task.lengths.lengths.astype(float), task.lengths.counts.astype(float)
        scale = task.tokens_per_step / (lengths @ counts)
        found = model_flops(sizes(task.spec), task.tokens_per_step, scale * float(lengths**2 @ counts) / 2, task.spec.parameters)
        return {name: float(value) for name, value in found.items()}

    def result(self) -> LayoutPlan:
        """What is said of the plan, to a person and to programs."""
        task, choice, best = self.task, self.choice, self.choice.best
        plan = LayoutPlan(
            cluster=PlannedCluster(name=task.cluster.name, nodes=task.cluster.nodes, devices_per_node=task.cluster.devices_per_node),
            ranks=task.world,
            home=task.home.to_json(),
            homes=tuple(PlannedHome(home=plan.task.home.to_json(), seconds=plan.choice.seconds) for plan in (self, *self.others)),
            tokens_per_step=task.tokens_per_step,
            documents=task.lengths.documents,
            longest=task.longest,
            candidates=choice.candidates,
            refused=choice.refused,
            budget_bytes=int(task.budget_bytes),
            fits=best is not None,
            changes=choice.changes,
            short=tuple(Short(way=self.layout(way), bytes=lack, place=place) for way, lack, place in choice.short[:RIVALS]),
            notes=tuple(self.lines()),
        )
        if best is None:
            return plan
        peak = task.cluster.device.flops_per_s[arithmetic(task.precision)]
        shares = mfu({name: np.asarray(flops) for name, flops in self.flops.items()}, best.seconds, task.world, peak)
        return plan.model_copy(
            update={
                "best": self._way(best, groups=self.groups(best), lanes=self.lanes(best)),
                "mfu": {name: float(share) for name, share in shares.items()},
                "single": self._way(choice.single) if choice.single else None,
                "context_parallel": self._way(choice.context_parallel) if choice.context_parallel else None,
                "tried": tuple(self._way(way) for way in choice.worth_trying()),
                "rivals": tuple(self._way(way, times=way.seconds / best.seconds) for way in choice.ways[1 : 1 + RIVALS]),
            }
        )

    def _way(self, way: Way, **more: Any) -> PlannedWay:
        return PlannedWay(
            layout=self.layout(way),
            seconds=way.seconds,
            least_s=way.seconds * (1 - self.band),
            most_s=way.seconds * (1 + self.band),
            bytes=way.bytes,
            peak=way.peak,
            **more,
        )

    def lanes(self, way: Way) -> dict[str, float]:
        """Seconds in which each lane of the busiest stage does something, of the mean step."""
        found = {lane: float(np.mean([step.busy_s(lane) for step, _ in way.steps])) for lane in LANES}
        return {lane: seconds for lane, seconds in found.items() if seconds}

    def lines(self) -> Iterator[str]:
        """Sentences about the choice, after the table of its groups."""
        task, choice, best = self.task, self.choice, self.choice.best
        if best is None:
            others = "".join(f" and {_gib(task.limits[place])} of {place}" for place in task.places[1:])
            homes = [str(one.task.home) for one in self.others]
            tried = f", with home: {task.home}, nor with {' or '.join(homes)}" if homes else ""
            yield f"nothing fits in {_gib(task.budget_bytes)} a device{others}{tried}"
            for way, lack, place in choice.short[:RIVALS]:
                yield f"  {way}: {_short(lack, place)}" + f", at {way.peak}" * (place == "device")
            if any(place == "host" for _, _, place in choice.short) and "host" in task.home.named:
                yield "home: disk, or a part of it, keeps less in host memory"
            yield from choice.changes
            return
        left = task.budget_bytes - best.bytes["device"]
        least_s, most_s = best.seconds * (1 - self.band), best.seconds * (1 + self.band)
        told = task.cluster.calibration
        by = f", calibrated by {told.steps} steps" if told else ""
        yield f"a step takes {best.seconds:.3g} s ({least_s:.3g} to {most_s:.3g}), on the clock{by}"
        yield f"a device needs {_gib(best.bytes['device'])}: {_gib(left)} left; most at {best.peak}"
        for place, where in (("host", "in host memory"), ("disk", "on disk")):
            if size := best.bytes[place]:
                room = task.limits[place]
                yield f"{where} a rank keeps {_gib(size)}" + (f": {_gib(room - size)} left" if room < float("inf") else "")
        if "disk" in task.home.named and not best.shape.early:
            yield "updates before the norm have no room there: all are made under the next forward"
        for other in self.others:
            seconds = other.choice.seconds
            found = "nothing fits" if seconds is None else f"a step takes {seconds / best.seconds:.2f} times as long"
            yield f"home: {task.home}; with home: {other.task.home} {found}"
        single, context = choice.single, choice.context_parallel
        if single is not None and single is not best:
            yield f"the best single layout, {single}, takes {single.seconds / best.seconds:.2f} times as long"
        if context is not None and context not in (best, single):
            yield f"the best by context parallelism alone, {context}, takes {context.seconds / best.seconds:.2f} times as long"
        for way in choice.ways[1 : 1 + RIVALS]:
            yield f"  {way}: {way.seconds / best.seconds - 1:+.1%}"
        for way, lack, place in choice.short[:RIVALS]:
            yield f"  {way}: {_short(lack, place)}"
        for rival in choice.rivals:
            yield f"  {rival.layout}: {rival.times - 1:+.1%} over the best single layout (rate cards), {_gib(rival.short_bytes)} short"
        if len(tried := choice.worth_trying()) > 1:
            yield "layout: auto trains some steps of each of these, and goes on with the fastest by these steps and the clock:"
            yield from (f"  {way}: {way.seconds:.3g} s" for way in tried)
        yield f"{choice.candidates:,} layouts were compared"
        for reason, count in choice.refused.items():
            yield f"  {count:,} refused: {reason}"


def _short(lack: float, place: str) -> str:
    return f"{_gib(lack)} {'' if place == 'device' else f'of {place} '}short"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def plan(task: Task, tell: Callable[[str], None] = lambda line: None) -> Planned:
    """The plan of a task, with the home that makes it fastest where several are compared; on disk only where nothing fits otherwise.
    `tell`: what is being done."""
    found: list[Planned] = []
    for home in task.homes or (task.home,):
        if home.last == "disk" and any(one.choice.best for one in found):
            continue
        if task.homes:
            tell(f"home: {home}")
        one = replace(task, home=home, homes=())
        found.append(Planned(one, search(one, tell)))
    best = min(found, key=lambda one: one.choice.seconds or inf) if any(one.choice.best for one in found) else found[-1]
    return replace(best, others=tuple(one for one in found if one is not best))


def resolve_layout(
    config: Config, cluster: Callable[[int], Cluster], lengths: Callable[[], Lengths], tell: Tell
) -> tuple[Config, PlanFile | None]:
    """The config with `layout: auto` chosen, and the plan that is kept in the run's folder. A run that has a plan for what is asked goes on
    with it. `cluster`: this machine, for a number of ranks; `lengths`: of the run's corpus. Raises OutOfMemoryError where nothing fits."""
    asked = config.layout
    if not isinstance(asked, AutoLayout):
        return config, None
    kept = read(Path(config.save.dir))
    if kept is not None and kept.asked == asked.to_json() and (kept.home is not None) == config.home.at.auto:
        tell(f"layout: auto: as {place(Path(config.save.dir))} says")
        return kept.config(config), kept
    found = plan(task_of(config, cluster(asked.ranks or core_count()), lengths()), tell)
    if found.choice.best is None:
        raise OutOfMemoryError("\n  ".join(["layout: auto:", *found.lines()]))
    ways = found.choice.worth_trying()
    choices = tuple(found.layout(way) for way in ways)
    home = found.task.home.to_json() if config.home.at.auto else None
    file = PlanFile(asked.to_json(), choices, found.result().to_json(), chosen=None if len(choices) > 1 else 0, home=home)
    if home is not None:
        tell(f"home: auto: {found.task.home}")
    for number, (choice, way) in enumerate(zip(choices, ways)):
        tell(f"layout: auto: {'first' if number == 0 else 'then'} {layout_text(choice)}, {way.seconds:.3g} s a step")
    return file.config(config), file


def write_config(config: Config, found: Planned, path: Path) -> None:
    """Write the config with the best choice. Raises UsageError where there is none or the file cannot be written."""
    if found.choice.best is None:
        raise UsageError("--emit: nothing fits, so there is no layout to write")
    try:
        home = found.task.home.to_json() if config.home.at.auto else None
        path.write_text(config.with_layout(found.layout(found.choice.best), home).to_yaml(), encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{path} cannot be written: {fault.strerror}") from None


def write_trace(way: Way, path: Path) -> None:
    """Write the first of the steps that were played, in the Trace Event Format. Raises UsageError where the file cannot be written."""
    step, _ = way.steps[0]
    spans: dict[int, list[Span]] = {}
    for start, pieces in zip(step.starts, step.played):
        for piece in pieces:
            lane = "messages" if piece.lane.startswith("messages") else piece.lane
            name = str(piece.key[0] if isinstance(piece.key, tuple) else piece.key)
            spans.setdefault(piece.rank, []).append(Span(lane, name, start + piece.start, start + piece.end, {}))
    events = []
    for stage, some in sorted(spans.items()):
        events += events_of(some, stage, f"stage {stage}, predicted", (*LANES, "messages"), 0.0)
    save(path, events)
