"""Trials: a few choices of a plan are trained a few steps each, and one goes on. The steps count: they are the run's own.

    plan.json   choices in order        0: dp2 <= 1K, tp2     1: dp2.z3 ...     2: tp2 ...
    steps       1 2 3 4 │ 5 6 7 8 │ 9 10 11 12 │ 13 ...
    layout         0    │    1    │     2      │ one of them; a checkpoint at each bar, which any layout loads

What is compared is model FLOP/s, since steps have different documents: another choice than the first goes on where it is faster by more
than the steps vary. The first step of a trial, in which memory is allocated and kernels are chosen, is not counted. The others are steps of
known layouts: they calibrate what is known of the machine, by which the steps that follow are predicted (`train.foretold`).
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from longshift.cluster.cluster import Calibration
from longshift.config import Config
from longshift.dist.world import World
from longshift.errors import UsageError
from longshift.files import rewrite, written
from longshift.trainer.measured import calibrated, profile_here
from longshift.trainer.metrics import StepMetrics
from longshift.trainer.plan_file import PlanFile, place

STEPS = 4  # of a trial

PlaySteps = Callable[[Config, bool, int | None], Iterator[StepMetrics]]  # config, whether to resume, after how many steps to save and end


def tried(config: Config, run: Path, resume: bool, world: World, play: PlaySteps) -> Iterator[StepMetrics]:
    """The steps of a run: of the trials that are left, then of the layout that goes on. Collective; rank 0's file and times count."""
    file = place(run)
    text = world.gather_text(file.read_text(encoding="utf-8") if world.rank == 0 and file.exists() else "")[0]
    plan = PlanFile.from_json(text) if text else None
    if plan is None or plan.chosen is not None or config.model_dump(mode="json")["layout"] not in plan.choices:
        yield from play(config, resume, None)
        return
    while plan.chosen is None:
        rates = []
        for metrics in play(plan.config(config), resume, STEPS):
            rates.append(metrics.model_flops_per_s)
            yield metrics
        if len(rates) < STEPS:  # stopped, or the run's last step
            return
        plan = plan.after(json.loads(world.gather_text(json.dumps(rates[1:]))[0]))
        if world.rank == 0:
            kept = plan if plan.chosen is None else replace(plan, calibration=_calibration(run, config, world))
            with written(str(file)):
                rewrite(file, kept.to_json())
        resume = True
    yield from play(plan.config(config), resume, None)


def _calibration(run: Path, config: Config, world: World) -> Calibration | None:
    """What the steps of the trials say of this machine; None where it was not measured, and where they are too few, which is said."""
    profile = profile_here(world)
    try:
        return None if profile is None else calibrated(run, config, profile).calibration
    except UsageError as fault:
        print(f"longshift: not calibrated: {fault}", file=sys.stderr)
        return None
