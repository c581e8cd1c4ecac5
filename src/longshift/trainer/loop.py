"""The training loop of one rank: a generator of steps, stage by stage.

    train               joins the other ranks; for each stage:
      train_stage         opens the stage and trains its steps
        StageRun.train      one step: batch, update, metrics, callback
        StageRun.save       a checkpoint, at once or in the background

A stage whose plan is not decided is trained by `trials.train_trials`: a few steps of `train_stage`
under each candidate layout, then the rest under the best.

The loop trains and saves. What a person sees is its caller's.
"""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from longshift.background import in_background
from longshift.config import Config
from longshift.dist.cores import stay_near
from longshift.dist.launcher import own_rank
from longshift.dist.world import World, be_deterministic, own_device
from longshift.documents.batch import Batches, StepBatch
from longshift.errors import NonFiniteError
from longshift.state.checkpoint import Checkpoint
from longshift.state.saver import Saver
from longshift.step.player import Player, Ready
from longshift.step.update import Outcome, State, not_finite, train_step
from longshift.terminal import Say, say, silent
from longshift.trainer.admission import admit
from longshift.trainer.build_run import (
    Stage,
    StageStart,
    build_player,
    open_data,
    resume_or_build,
    stages_of,
)
from longshift.trainer.corpus import corpus_notes
from longshift.trainer.facts import (
    ChosenKernel,
    Fingerprints,
    changed_kernel,
    changed_moments,
    facts_of,
)
from longshift.trainer.gather_metrics import (
    RankStatus,
    gather_group_metrics,
    gather_home_metrics,
    gather_status,
    make_step_metrics,
)
from longshift.trainer.metrics import StepMetrics, faults_of_rows
from longshift.trainer.run_folder import RunFolder, adopt
from longshift.trainer.step_callback import OnStep, StepCallback
from longshift.trainer.step_measurements import StepForecast
from longshift.trainer.step_trace import StepTrace
from longshift.trainer.trials import train_trials, undecided_plan
from longshift.trainer.validation import Validator

NO_EARLY_UPDATES = (
    "the disk has no room for second places of masters and moments: none is updated before the norm"
    " (docs/home.md)"
)


@dataclass
class RunContext:
    """What all stages of a run share. `folder`: the run's; `callback`: of `train.on_step`; the
    other functions are those of `train`. Mutable: `is_ending`, whether the step in hand is the last
    one that is trained, of all stages."""

    folder: Path
    world: World
    trace: StepTrace
    stop: Callable[[], bool] = lambda: False
    record: Callable[[StepMetrics], None] = lambda metrics: None
    tell: Say = silent
    callback: StepCallback | None = None
    is_ending: bool = False


def train(
    config: Config,
    run: Path,
    resume: bool,
    stop: Callable[[], bool],
    trace: Path | None,
    record: Callable[[StepMetrics], None],
    tell: Say,
    on_step: OnStep | None,
) -> Generator[StepMetrics]:
    """Train as the rank that the environment says this process is. Yields each step's metrics.

    `run`: the folder that checkpoints are saved into.
    `resume`: whether to continue from the newest checkpoint there.
    `stop`: is asked after each step. A yes on any rank saves and ends the run on all ranks.
    `trace`: a file for a trace of the first step (`trainer.step_trace`).
    `record`: rank 0 calls it with each step before the step is yielded. What it raises ends the
        run, and the step is not saved.
    `tell`: is called with memory needed and available, before the first step under a layout.
    `on_step`: of a run of one process, what `train.on_step` names in others
    (`trainer.step_callback`).

    Raises LongshiftError.
    """
    if config.train.deterministic:
        be_deterministic()
    stages = list(stages_of(config))
    timeout_s = max(stage.config.timeout_s(own_device().type) for stage in stages)
    callback = StepCallback.of(config, own_rank(), on_step)
    world = World.from_environment(timeout_s)
    stay_near(world.device)

    # What can be known of later stages is checked now, not after hours of training.
    for stage in stages[1:]:
        admit(stage.config, world, run)
        open_data(stage.config, world)
        Validator.of(stage.config, world)

    last_step = _resumed_step(run, world) if resume else 0
    with StepTrace(trace, world) as step_trace:
        context = RunContext(run, world, step_trace, stop, record, tell, callback)
        for number, stage in enumerate(stages, 1):
            if last_step >= stage.end and stage is not stages[-1]:
                continue
            if len(stages) > 1 and world.rank == 0:
                say(f"stage {number} of {len(stages)}, {stage}")

            # Closed at once where the caller leaves, so that what the last save raises is seen.
            with closing(_stage_steps(context, stage, len(stages) == 1, resume)) as steps:
                for metrics in steps:
                    last_step = metrics.step
                    yield metrics
            if context.is_ending:
                break
            resume = True  # the next stage continues from this one's checkpoint

    # Nobody leaves while another rank still needs it.
    world.everyone.all_reduce(torch.zeros(1, device=world.device))
    world.close()


def _resumed_step(run: Path, world: World) -> int:
    """The step that a run continues from; collective.

    Says so if newer checkpoints exist, as after a kill before LATEST moved, or if a person went
    back; and if the metrics are not those of its steps.
    """
    saved = Checkpoint.latest(run, world)
    if world.rank > 0:
        return saved.step
    folder = RunFolder(run)
    if saved.newer:
        say(
            f"{folder.shown}/LATEST names step-{saved.step}, and newer checkpoints are there, up to"
            f" step-{saved.newer[-1]}: the run goes on from step {saved.step} and replaces them as"
            " it comes to them"
        )
    if faults := faults_of_rows(folder.metrics, saved.step, saved.facts.get("loss")):
        say(f"{folder.shown}/metrics.jsonl {faults}")
    return saved.step


def _stage_steps(
    context: RunContext, stage: Stage, is_only_stage: bool, resume: bool
) -> Generator[StepMetrics]:
    """The steps of a stage, under the candidates of its plan where that is not decided."""
    plan = undecided_plan(stage.config, context.folder, context.world)
    if plan is None:
        return train_stage(stage, context, resume)
    train_with = partial(_train_with, context, stage, is_only_stage)
    return train_trials(plan, stage.config, context.folder, resume, context.world, train_with)


def _train_with(
    context: RunContext,
    stage: Stage,
    is_only_stage: bool,
    config: Config,
    resume: bool,
    max_steps: int | None,
) -> Generator[StepMetrics]:
    """Train a stage under the layout of `config`, which trials have chosen. No step, if the run
    ended with a trial's last."""
    if context.is_ending:
        return
    run_config = config if is_only_stage else stage.run
    stage = replace(stage, config=config, run=run_config)
    yield from train_stage(stage, context, resume, max_steps)


def train_stage(
    stage: Stage, context: RunContext, resume: bool, max_steps: int | None = None
) -> Generator[StepMetrics]:
    """Train the steps of a stage that are left, at most `max_steps`. Yields each step's metrics."""
    with open_stage(stage, context, resume, max_steps) as stage_run:
        for step in stage_run.remaining_steps:
            metrics, status = stage_run.train(step)
            callback = context.callback
            context.is_ending = bool(
                status.stop_requested or metrics.early or (callback and callback.ends_run)
            )
            try:
                yield metrics
            except GeneratorExit:
                # The caller leaves the loop. Alone, this rank saves first, unless somebody has
                # removed the run; among others it would wait for them here.
                if context.world.size > 1 or not RunFolder(context.folder).env.exists():
                    raise
                context.is_ending = True

            if context.is_ending or stage_run.is_save_due(step):
                is_last = context.is_ending or step == stage_run.last_step
                stage_run.save(step, metrics, is_last=is_last)
            elif not status.is_saving:
                stage_run.saver.finish()
            if callback:
                callback.check(step)
            if context.is_ending:
                return


@contextmanager
def open_stage(
    stage: Stage, context: RunContext, resume: bool, max_steps: int | None = None
) -> Iterator["StageRun"]:
    """Build or load what the steps of a stage need, and close it at the end; collective."""
    run = context.folder
    world = context.world

    # 1. Refuse a stage whose largest step does not fit, before anything is built.
    admitted = admit(stage.config, world, run)
    config = stage.config
    context.tell(admitted.told)

    # 2. Open the data; build the state, or load it from the newest checkpoint.
    batches, fingerprints = open_data(config, world)
    validator = Validator.of(config, world)
    start = resume_or_build(stage, world, fingerprints, run, resume, admitted.early)
    if validator:
        validator.remember(run, world, stage.begin, start.step)
    if resume and world.rank == 0:
        adopt(RunFolder(run), stage.run)

    # 3. Build the player, which computes the steps.
    player = build_player(config, world, start.state, run)
    kernel = ChosenKernel.of(player.kernel, world.device)
    if world.rank == 0:
        _tell_data(batches, config, is_first=start.step == stage.begin)
        _tell_changes(player, kernel, start, config)

    # 4. Build what accompanies the steps: predictions, the trace, batches ahead, checkpoints.
    predictor = StepForecast.of(run, config, world)
    context.trace.watch(player)
    prefetcher = BatchPrefetcher(batches, player)
    saver = Saver(run, world, config.save.keep, admitted.background)
    last_step = config.train.steps
    if max_steps is not None:
        last_step = min(last_step, start.step + max_steps)

    with closing(start.state.home), closing(player), closing(prefetcher), saver:
        yield StageRun(
            config=config,
            context=context,
            state=start.state,
            player=player,
            batches=batches,
            prefetcher=prefetcher,
            saver=saver,
            validator=validator,
            predictor=predictor,
            fingerprints=fingerprints,
            kernel=kernel,
            first_step=start.step + 1,
            last_step=last_step,
        )


def _tell_data(batches: Batches, config: Config, is_first: bool) -> None:
    """Tell the person which tokens are learned; where the stage begins, also what of its documents
    training does not learn."""
    for note in corpus_notes(config, batches.cache) if is_first else ():
        say(f"note: {note}")
    if batches.learned_share < 1:
        share = f"{batches.learned_share:.1%} of the tokens are learned"
        say(f"{share}; longshift data CONFIG shows which")


def _tell_changes(player: Player, kernel: ChosenKernel, start: StageStart, config: Config) -> None:
    """Tell the person what computes attention, and what is not as the checkpoint had it."""
    if player.world.device.type != "cpu":
        say(f"attention by {player.kernel.name}: {player.why_kernel}")
    for warning in (changed_kernel(start.facts, kernel), changed_moments(start.facts, config)):
        if warning:
            say(warning)
    if start.state.home.no_room:
        say(NO_EARLY_UPDATES)


class BatchPrefetcher:
    """Batches of steps, each with what the player needs of it. The next step's is made while this
    one computes:

        this thread   │ step 1          │ step 2          │ step 3 ...
        another       │ draw and pack 2 │ draw and pack 3 │

    What is made is a function of the data, the seed and the cursor, so that it is the same as
    without. A checkpoint's cursor is the state's, which only a trained step moves. Mutable: the one
    that is being made."""

    def __init__(self, batches: Batches, player: Player):
        self._batches = batches
        self._player = player
        self._coming: tuple[int, Future[tuple[StepBatch, Ready]]] | None = None

    def take(self, cursor: int, more: bool) -> tuple[StepBatch, Ready]:
        """The step that begins at a cursor. `more`: whether another follows, which is begun in the
        background. Raises what drawing this step raised."""
        coming = self._coming
        self._coming = None
        if coming and coming[0] == cursor:
            batch, ready = coming[1].result()
        else:
            batch, ready = self._make(cursor)
        if more:
            next_cursor = batch.next_cursor
            self._coming = next_cursor, in_background(lambda: self._make(next_cursor))
        return batch, ready

    def close(self) -> None:
        """Wait for what is being made. Nobody wants it any more."""
        if self._coming:
            wait([self._coming[1]])

    def _make(self, cursor: int) -> tuple[StepBatch, Ready]:
        batch = self._batches.at(cursor)
        return batch, self._player.ready(batch.documents)


@dataclass
class StageRun:
    """A stage that is being trained on this rank. Made by `open_stage`. Mutable: its parts are.

    All methods are collective.
    """

    config: Config
    context: RunContext
    state: State
    player: Player
    batches: Batches
    prefetcher: BatchPrefetcher
    saver: Saver
    validator: Validator | None
    predictor: StepForecast | None
    fingerprints: Fingerprints
    kernel: ChosenKernel
    first_step: int
    last_step: int

    @property
    def remaining_steps(self) -> range:
        return range(self.first_step, self.last_step + 1)

    def train(self, step: int) -> tuple[StepMetrics, RankStatus]:
        """Train one step. Returns its metrics, and what ranks tell each other at its end."""
        world = self.context.world

        # 1. Take the batch. The next one is prepared while this step computes.
        begin_s = world.now()
        batch, ready = self.prefetcher.take(self.state.cursor, more=step < self.last_step)
        data_s = world.now() - begin_s

        # 2. Predict the step. This takes time on rank 0 that is no part of the step's seconds.
        if self.predictor:
            self.predictor.predict(ready.lengths)

        # 3. Compute gradients and update the weights.
        begin_s = world.now()
        outcome = self._update(step, batch, ready)
        seconds = data_s + (world.now() - begin_s)
        self.context.trace.write(self.player)

        # 4. Gather the metrics of all ranks.
        status = gather_status(world, self.context.stop(), self.saver.busy)
        metrics = replace(
            make_step_metrics(self.config, step, batch, outcome, seconds, status.memory_bytes),
            groups=gather_group_metrics(self.player),
            home=gather_home_metrics(self.state.home, world),
            first=step == self.first_step,
        )
        if self.predictor:
            metrics = self.predictor.beside(metrics)

        # 5. Validate, if this step is one to validate after.
        if self.validator:
            metrics = self.validator.after(metrics, self.player)

        # 6. Call the user's own function, which sees all of it.
        if self.context.callback:
            metrics = self.context.callback.after(metrics, world)

        if world.rank == 0:
            self.context.record(metrics)
        return metrics, status

    def _update(self, step: int, batch: StepBatch, ready: Ready) -> Outcome:
        """Make the update of a step, and say which documents it had if it is not finite."""
        try:
            return train_step(self.state, batch, self.player, ready, leave=True)
        except NonFiniteError as fault:
            document = self.batches.where(batch.cursor)
            message = f"step {step}: {fault}\n  first document: {document}"
            raise NonFiniteError(message) from None

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss; None without a validation."""
        return self.validator.best if self.validator else None

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is saved, though the run goes on."""
        is_asked_for = self.context.callback is not None and self.context.callback.request.save
        return (
            is_asked_for
            or step in (self.last_step, self.best_step)
            or step % self.config.save.every == 0
        )

    def save(self, step: int, metrics: StepMetrics, is_last: bool) -> None:
        """Save a checkpoint: at once if it is the last, else as the config says. Raises
        NonFiniteError where the state is not finite."""
        # Some updates may be left to the next step. The checkpoint needs them.
        self.player.finish()
        if fault := not_finite(self.state, self.context.world):
            raise NonFiniteError(
                f"step {step}: the {fault} is not finite after an update with lr {metrics.lr:.3g}. "
                "Nothing is saved: the checkpoint before it stays the newest. A lower train.lr or "
                "more train.warmup are the usual cures."
            )
        facts = facts_of(self.config, self.state, self.fingerprints, self.kernel, metrics.loss)
        self.saver.save(step, self.state.optimizer, facts, self.best_step, last=is_last)
