"""The best layouts for a run's documents on a cluster: how `longshift plan` finds and writes them,
and how `layout: auto` becomes layouts."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.cluster.host import core_count
from longshift.config import Config
from longshift.errors import OutOfMemoryError, UsageError
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import format_size
from longshift.planner.search import search
from longshift.planner.task import PlanTask
from longshift.step_report import layout_text, on_cluster
from longshift.terminal import Say, silent
from longshift.trainer.plan_file import PlanFile, place, read
from longshift.trainer.planned_task import PlannedTask
from longshift.workload.length_file import Lengths
from longshift.workload.lengths import cap_loss, spans

MOST_PIECES = 1 << 24  # of different lengths: each takes tens of bytes


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
    num_pieces = cap_loss(lengths.lengths, longest).split_pieces
    if policy == "split" and num_pieces > MOST_PIECES:
        raise UsageError(
            f"data.overlong: split makes {num_pieces:,} pieces of documents of up to"
            f" {int(lengths.lengths[-1]):,} tokens, more than a plan has room for; raise"
            " data.max_len"
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


def unplanned_stages(config: Config) -> str | None:
    """A sentence that says what is planned of a run with stages, and how to plan its last one; None
    without stages."""
    if not config.train.stages:
        return None
    last = config.model_dump(mode="json", exclude_none=True)["train"]["stages"][-1]
    steps = {"train.stages": [], "train.steps": last["steps"]}
    keys = {key: value for key, value in last.items() if key not in ("steps", "layout")}
    words = [f"{key}={json.dumps(value)}" for key, value in (steps | keys).items()]
    return (
        "train.stages: this plan is for what the config says outside its stages, documents to"
        f" {format_size(config.data.max_len)}; stages keep their layouts. To plan the last one, add"
        f" {shlex.join(words)}"
    )


def task_of(
    config: Config,
    cluster: Cluster,
    lengths: Lengths,
    all_devices: bool = False,
) -> PlanTask:
    """What is planned for a config whose layout is chosen on a cluster. `all_devices`: for every
    device, however many ranks the config's own layout has. Raises UsageError where these GPUs are
    fewer than the ranks that are asked for."""
    request = config.layout
    if not isinstance(request, AutoLayout):
        request = AutoLayout(None if all_devices else config.world)
    world = request.ranks or cluster.devices
    # CPU ranks share the machine.
    if all_devices and world > cluster.devices and cluster.device.kind != "cpu":
        raise UsageError(
            f"layout asks for {world} ranks, and {cluster.name} has {cluster.devices}: name a"
            f" cluster of {world} devices with --on, or ask for {cluster.devices}"
        )
    return PlanTask(
        spec=config.spec,
        cluster=on_cluster(cluster, world, config.train.precision),
        lengths=cut(lengths, config),
        tokens_per_step=config.train.tokens_per_step,
        precision=config.train.precision,
        world=world,
        fixed=dict(request.fixed) | _coded_stages(config, request, world),
        moments=config.formats.moments,
        packed=config.formats.packed,
        wire=config.formats.wire,
        compile=config.train.compile,
        max_len=config.data.max_len,
        home=HomeTiers() if config.home.at.auto else config.home.at,
        homes=_homes(cluster) if config.home.at.auto else (),
    )


def plan(task: PlanTask, tell: Say = silent) -> PlannedTask:
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
    tell: Say,
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
