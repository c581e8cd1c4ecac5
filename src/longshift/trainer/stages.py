"""Stages: a run whose documents, lengths, layout, positions or learning rate change after so many
steps, as in training from 8K to 128K.

    train.stages                                        steps
    {steps: 300}                                        1 ... 300      a checkpoint
    {steps: 200, data.max_len: 32K}                     301 ... 500    a checkpoint
    {steps: 100, data.max_len: 128K, layout: u4, ...}   501 ... 600

Each stage is trained under a config of its own (`Config.parts`) and begins with the checkpoint that
the one before it left: weights, moments and the number of updates go on, in any layout. A stage
with the documents of the one before it, cut alike and in the same order, goes on where that
stopped; with others, it begins with their first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longshift.config import Config
from longshift.layout.layout import format_size
from longshift.state.optimizer import Schedule


@dataclass(frozen=True)
class Stage:
    """A part of a run. `run`: the config of all; `config`: what this part is trained under;
    `begin`: the run's steps before it; `schedule`: of its learning rate, by the run's updates;
    `before`: the config of the stage before it."""

    run: Config
    config: Config
    begin: int
    schedule: Schedule
    before: Config | None = None

    @property
    def end(self) -> int:
        """The run's steps after it."""
        return self.config.train.steps

    def __str__(self) -> str:
        train, data = self.config.train, self.config.data
        layout = " > ".join(f"{edge.use} to {format_size(edge.upto)}" for edge in self.config.edges)
        sizes = (
            f"documents to {format_size(data.max_len)}, {format_size(train.tokens_per_step)} tokens"
            " a step"
        )
        return f"steps {self.begin + 1} to {self.end}: {sizes}, {layout}"


def stages_of(config: Config) -> Iterator[Stage]:
    """The stages of a run, in order; one where `train.stages` names none."""
    begin = 0
    previous = None
    run_schedule = schedule_of(config)
    for number, part in enumerate(config.parts):
        # A stage that names a learning rate has a schedule of its own.
        has_rate = bool(config.train.stages) and "train.lr" in config.train.stages[number]
        schedule = schedule_of(part, begin) if has_rate else run_schedule
        yield Stage(config, part, begin, schedule, previous)
        begin = part.train.steps
        previous = part


def schedule_of(config: Config, begin: int = 0) -> Schedule:
    """The learning rate of the steps of `config` after `begin`."""
    train = config.train
    return Schedule(
        train.lr, train.steps - begin, train.min_lr, train.warmup, train.schedule, begin
    )
