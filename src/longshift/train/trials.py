"""Trials: the best few choices of a plan are trained a few steps each, and the fastest goes on. The steps count: they are the run's own.

    plan.json   choices, dearest last   0: dp2 <= 1K, tp2     1: dp2.z3 ...     2: tp2 ...
    steps       1 2 3 4 │ 5 6 7 8 │ 9 10 11 12 │ 13 ...
    layout         0    │    1    │     2      │ the fastest; a checkpoint at each bar, which any layout loads

What is compared is model FLOP/s, since steps have different documents. The first step of a trial, in which memory is allocated and kernels
are chosen, is not counted.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from longshift.config import Config
from longshift.dist.world import World
from longshift.files import rewrite
from longshift.train.metrics import StepMetrics

STEPS = 4  # of a trial

PlaySteps = Callable[[Config, bool, int | None], Iterator[StepMetrics]]  # config, whether to resume, after how many steps to save and end


@dataclass(frozen=True)
class PlanFile:
    """A run's `plan.json`. `asked`: the config's `layout` as it was written; `choices`: layouts in the config's form, best first, all of
    which are tried; `facts`: what the planner said; `rates`: model FLOP/s of those that were tried; `chosen`: the one that goes on."""

    asked: Any
    choices: tuple[Any, ...]
    facts: Any = None
    rates: tuple[float, ...] = ()
    chosen: int | None = None

    @property
    def layout(self) -> Any:
        """What the next step is computed with, in the config's form."""
        return self.choices[len(self.rates) if self.chosen is None else self.chosen]

    def after(self, rate: float) -> "PlanFile":
        """With the rate of one more trial. The fastest is chosen after the last one."""
        rates = (*self.rates, rate)
        chosen = max(range(len(rates)), key=lambda number: (rates[number], -number)) if len(rates) == len(self.choices) else None
        return replace(self, rates=rates, chosen=chosen)

    def config(self, config: Config) -> Config:
        """The config with the layout of the next step."""
        return Config.model_validate(config.model_dump(mode="json") | {"layout": self.layout})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "PlanFile":
        found = json.loads(text)
        return cls(**found | {"choices": tuple(found["choices"]), "rates": tuple(found["rates"])})


def place(run: Path) -> Path:
    """The file of a run folder's plan."""
    return run / "plan.json"


def read(run: Path) -> PlanFile | None:
    """The plan of a run folder; None where there is none."""
    file = place(run)
    return PlanFile.from_json(file.read_text(encoding="utf-8")) if file.exists() else None


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
        plan = plan.after(float(world.gather_text(repr(median(rates[1:])))[0]))
        if world.rank == 0:
            rewrite(file, plan.to_json())
        resume = True
    yield from play(plan.config(config), resume, None)
