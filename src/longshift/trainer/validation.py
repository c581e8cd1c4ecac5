"""Validation while a run trains: when, which checkpoint is best, and whether the run ends because
none becomes better."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from longshift.config import Config, ValidationConfig
from longshift.dist.world import World
from longshift.documents.validation_set import ValidSet
from longshift.errors import NonFiniteError
from longshift.step.player import Player
from longshift.step.update import score
from longshift.trainer.corpus import open_on_ranks
from longshift.trainer.metrics import StepMetrics, ValidMetrics, read_rows
from longshift.trainer.run_folder import RunFolder


class Validator:
    """The validations of a stage. Mutable: `losses` so far, by step, of all stages, the same on all
    ranks; `begin`: the run's steps before the stage."""

    def __init__(self, settings: ValidationConfig, documents: ValidSet, last_step: int):
        self.documents = documents
        self.settings = settings
        self.last_step = last_step
        self.losses: dict[int, float] = {}
        self.begin = 0

    @classmethod
    def of(cls, config: Config, world: World) -> "Validator | None":
        """Of a run that validates, else None; collective. Raises LongshiftError."""
        data = config.data
        if data.valid is None and data.held_out is None:
            return None
        _, cache = open_on_ranks(config, world, data.valid)
        settings = config.validation or ValidationConfig()
        documents = ValidSet.of(
            cache,
            data.max_len,
            data.overlong,
            settings.tokens,
            config.train.tokens_per_step,
            data.held_out or 0.0,
        )
        return cls(settings, documents, config.train.steps)

    def remember(self, run: Path, world: World, begin: int, last_step: int) -> None:
        """Take the losses of the run's steps up to `last_step` from its metrics; collective: rank
        0's count.

        `begin`: the step that the stage follows."""
        rows = read_rows(RunFolder(run).metrics) if world.rank == 0 else []
        # Pairs, since keys of a JSON object are texts, and steps are numbers.
        losses = []
        for row in rows:
            loss = row.get("valid_loss")
            if row["step"] <= last_step and loss is not None:
                losses.append((row["step"], loss))
        self.losses = dict(json.loads(world.gather_text(json.dumps(losses))[0]))
        self.begin = begin

    @property
    def best(self) -> int | None:
        """The step with the lowest loss of the run, the first of equals; None before the first
        validation."""
        return min(self.losses, key=self.losses.__getitem__, default=None)

    @property
    def patience_is_over(self) -> bool:
        """Whether the stage's newest losses, as many as validation.patience, are all above its
        lowest. Another stage's losses do not count: they are of documents that are cut
        otherwise."""
        losses = {step: loss for step, loss in self.losses.items() if step > self.begin}
        lowest = min(losses, key=losses.__getitem__)
        patience = self.settings.patience
        return patience is not None and sum(step > lowest for step in losses) >= patience

    def after(self, metrics: StepMetrics, player: Player) -> StepMetrics:
        """A step with the validation that follows it, if one does; collective. Raises
        NonFiniteError."""
        if metrics.step % self.settings.every and metrics.step != self.last_step:
            return metrics
        begin_s = player.world.now()
        rows = self.documents.losses(partial(score, player=player))
        parts = tuple(ValidMetrics(*row) for row in rows)
        loss = sum(part.loss * part.targets for part in parts) / sum(part.targets for part in parts)
        # The loss is the same on all ranks, so none is left waiting.
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {metrics.step}: the loss of the validation is {loss}; a lower train.lr is"
                " the usual cure"
            )
        self.losses[metrics.step] = loss
        seconds = player.world.now() - begin_s
        return replace(
            metrics,
            valid_loss=loss,
            valid=parts,
            valid_seconds=seconds,
            early=self.patience_is_over,
        )
