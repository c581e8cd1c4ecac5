"""Trials: a few choices of a plan are trained a few steps each, and one goes on. The steps count:
they are the run's own.

    plan.json   choices in order        0: dp2 <= 1K, tp2     1: dp2.z3 ...     2: tp2 ...
    steps       1 2 3 4 │ 5 6 7 8 │ 9 10 11 12 │ 13 ...
    layout         0    │    1    │     2      │ one of them
                a checkpoint at each bar, which any layout loads

Steps have different documents, so each is compared with what the clock has for its own
(`trainer.plan_file` says which choice goes on). The first step of a trial, in which memory is
allocated and kernels are chosen, is not counted. The others are steps of known layouts: they
calibrate what is known of the machine, by which the steps that follow are predicted
(`trainer.step_measurements`).
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from longshift.cluster.cluster import Calibration, Cluster
from longshift.config import Config
from longshift.config_parts import layout_out
from longshift.dist.world import World
from longshift.errors import UsageError
from longshift.terminal import say
from longshift.trainer.metrics import StepMetrics
from longshift.trainer.plan_file import PlanFile, keep, parse, place
from longshift.trainer.step_measurements import clock_steps, fit_measurements, profile_here

STEPS = 4  # of a trial

# Arguments: config, whether to resume, after how many steps to save and end.
PlaySteps = Callable[[Config, bool, int | None], Generator[StepMetrics]]


def undecided_plan(config: Config, run: Path, world: World) -> PlanFile | None:
    """The plan of a run folder, if a choice of it is still to be tried; collective. `config`: what
    the ranks were started with. Raises CheckpointError if the file cannot be read."""
    file = place(run)
    text = ""
    if world.rank == 0 and file.exists():
        text = file.read_text(encoding="utf-8", errors="replace")
    text = world.gather_text(text)[0]
    plan = parse(text, file) if text else None
    if plan is None or plan.chosen is not None or layout_out(config.layout) not in plan.choices:
        return None
    return plan


def train_trials(
    plan: PlanFile, config: Config, run: Path, resume: bool, world: World, play: PlaySteps
) -> Generator[StepMetrics]:
    """The steps of a run: of the trials that are left, then of the layout that goes on. Collective;
    rank 0's times count."""
    profile = profile_here(world)
    while plan.chosen is None:
        # 1. Train the trial's steps.
        trial_config = plan.config(config)
        steps: list[StepMetrics] = []
        with closing(play(trial_config, resume, STEPS)) as trial_steps:
            for metrics in trial_steps:
                steps.append(metrics)
                yield metrics
        if len(steps) < STEPS:  # stopped, or the run's last step
            return

        # 2. Add its seconds to the plan, alike on all ranks, since each decides what goes on.
        seconds = _trial_seconds(trial_config, steps, profile) if world.rank == 0 else None
        measured_s, clock_s = json.loads(world.gather_text(json.dumps(seconds))[0])
        plan = plan.after(measured_s, clock_s)

        # 3. Save the plan; after the last trial, with what the steps say of the machine.
        if world.rank == 0:
            saved = plan
            if plan.chosen is not None and profile is not None:
                saved = replace(plan, calibration=_calibration(run, config, profile))
            keep(saved, run, resume)
        resume = True
    yield from play(plan.config(config), resume, None)


def _trial_seconds(
    config: Config, steps: Sequence[StepMetrics], profile: Cluster | None
) -> tuple[list[float], list[float]]:
    """What the steps of a trial but the first took, and what the clock has for their documents;
    where this machine was not measured, no seconds of the clock, which is said."""
    measured_s = [step.seconds for step in steps[1:]]
    if profile is None:
        say(
            "this machine has no profile any more: what the trials took is not compared with the"
            " clock"
        )
        return measured_s, []
    # A step begins at the cursor at which the step before it ended.
    return measured_s, clock_steps(config, profile, [step.cursor for step in steps[:-1]])


def _calibration(run: Path, config: Config, profile: Cluster) -> Calibration | None:
    """What the steps of the trials say of this machine; None where they are too few, which is
    said."""
    try:
        return fit_measurements(run, config, profile).calibration
    except UsageError as fault:
        say(f"not calibrated: {fault}")
        return None
