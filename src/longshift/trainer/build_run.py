"""The stages of a run, and what each is built from: its documents, its state from a checkpoint, a
model folder or the seed, and the player.

Documents, lengths, layout, positions or learning rate may change after so many steps, as in
training from 8K to 128K:

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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from longshift.config import Config
from longshift.dist.world import World
from longshift.documents.batch import Batches
from longshift.errors import CheckpointError
from longshift.layout.box import Box
from longshift.layout.layout import format_size
from longshift.model.weight_folder import AdapterFolder, WeightFolder
from longshift.state.checkpoint import Checkpoint
from longshift.state.home import Home, Source
from longshift.state.initial_weights import fingerprint, random_source
from longshift.state.optimizer import Optimizer, Schedule
from longshift.state.precision import LossScale, Precision
from longshift.step.player import Player
from longshift.step.update import State, not_finite
from longshift.switch.links import agreed, links_of
from longshift.switch.options import SwitchOptions
from longshift.trainer.corpus import open_on_ranks
from longshift.trainer.facts import Facts, Fingerprints, expect
from longshift.trainer.step_measurements import profile_here
from longshift.workload.groups import home_layout


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
        train = self.config.train
        data = self.config.data
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


class StageStart(NamedTuple):
    """Where a stage starts: steps done, the state after them, and what its checkpoint says."""

    step: int
    state: State
    facts: Facts | None


def resume_or_build(
    stage: Stage,
    world: World,
    fingerprints: Fingerprints,
    run: Path,
    resume: bool,
    early: bool = True,
) -> StageStart:
    """Load the state from the newest checkpoint of `run`, or build it if the run is not resumed.
    Raises CheckpointError where it is of another run, or holds what is not finite.

    The newest checkpoint may be the one that the stage before has left. `early`: of `build_state`.
    """
    if not resume:
        state = build_state(stage.config, world, run, early=early)
        state.schedule = stage.schedule
        return StageStart(0, state, None)

    # 1. Check that the config can go on from the checkpoint. One of the stage before must match
    #    that stage's config, and may have been trained on other data.
    saved = Checkpoint.latest(run, world)
    facts = Facts.of(saved)
    previous = stage.before if saved.step == stage.begin else None
    if previous is None:
        expect(facts, stage.config, fingerprints, run, saved)
    else:
        expected = fingerprints.model_copy(update={"data": facts.fingerprints.data})
        expect(facts, previous, expected, run, saved)

    # 2. Load it.
    state = build_state(stage.config, world, run, saved, facts, early)
    if fault := not_finite(state, world):
        raise CheckpointError(f"{saved.folder}: the {fault} is not finite. {saved.older}")
    state.schedule = stage.schedule

    # 3. A stage with other data begins with its first document.
    if previous is not None and facts.fingerprints.data != fingerprints.data:
        state.cursor = 0
    return StageStart(saved.step, state, facts)


def build_state(
    config: Config,
    world: World,
    folder: Path,
    saved: Checkpoint | None = None,
    facts: Facts | None = None,
    early: bool = True,
) -> State:
    """Build home, optimizer and cursor, from a checkpoint with its facts, a model folder or the
    seed. Raises CheckpointError where frozen weights are others.

    `folder`: where a home on disk lies, unless the config names a folder for it. `early`: whether
    its units may be updated before the norm.
    """
    spec = config.spec
    rule = config.train.rule
    precision = Precision.of(config.train.precision)
    source = continued(config, saved, precision.home) if saved else initial(config, precision.home)
    home = Home(
        spec,
        home_layout(config.edges),
        world,
        precision,
        source,
        home_in=config.home.at,
        folder=config.stream.folder or folder,
        rule=rule,
        packed=config.home.moments,
        early=early,
    )
    optimizer = Optimizer(home, rule)
    state = State(
        spec=spec,
        home=home,
        optimizer=optimizer,
        schedule=schedule_of(config),
        clip=config.train.clip,
        scale=LossScale() if precision.scaled else None,
    )
    state.base = fingerprint(home, world)
    if saved and facts:
        if state.base != facts.base:
            raise CheckpointError(
                f"the weights that are not trained are others than {saved.folder} was trained "
                "beside: put the old model folder back, and the train.precision and train.seed "
                "that it began with"
            )
        optimizer.restore(saved.read, facts.packed, facts.updates)
        state.cursor = facts.cursor
        if state.scale and facts.loss_scale:
            state.scale.scale, state.scale.good_steps = facts.loss_scale
    return state


def build_player(
    config: Config, world: World, state: State, run: Path, checked: bool = False
) -> Player:
    """Build what plays the steps of a run; collective, since ranks agree on the speed of links.

    `run`: the run's folder, for what is streamed to disk. `checked`: what comes back is compared.
    """
    links = links_of(profile_here(world), world.per_node, world.nodes)
    return Player(
        config.spec,
        config.edges,
        world,
        state.home,
        Precision.of(config.train.precision, config.formats.wire),
        SwitchOptions(),
        replace(config.stream.options(run), checked=checked),
        links=agreed(links, world.gather_text),
        compile=config.train.compile,
    )


def open_data(config: Config, world: World) -> tuple[Batches, Fingerprints]:
    """Open the token cache of a config. Returns its batches, and what identifies them."""
    tokenizer, cache = open_on_ranks(config, world)
    batches = Batches.of(config, cache)
    fingerprints = Fingerprints(tokenizer=tokenizer.fingerprint, data=batches.fingerprint)
    return batches, fingerprints


def initial(config: Config, dtype: torch.dtype) -> Source:
    """Weights to begin with: of the model folder, and adapters of the folder of PEFT that the
    config names, or drawn. The adapters' folder is opened for the first of them: a run that goes on
    needs none. Raises CheckpointError for a folder that does not hold them."""
    drawn = random_source(config.spec, config.train.seed, dtype)
    base = config.spec.base
    model = config.model
    folder = (
        WeightFolder(Path(model.path), base) if model.path and model.init == "pretrained" else None
    )
    adapter_path = model.lora.init_from if model.lora else None
    adapters = (
        cache(lambda: AdapterFolder(Path(adapter_path or ""), config.spec))
        if adapter_path
        else None
    )

    def read(name: str, box: Box) -> torch.Tensor:
        if name in base.by_name:
            return folder.read(name, box) if folder else drawn(name, box)
        return adapters().read(name, box) if adapters else drawn(name, box)

    return read


def continued(config: Config, saved: Checkpoint, dtype: torch.dtype) -> Source:
    """Weights after a checkpoint: its own, and those that are not trained from where they came
    from."""
    trained = saved.source()
    if config.spec.learned == config.spec.parameters:
        return trained
    first = initial(config, dtype)
    return lambda name, box: (
        first(name, box) if config.spec.by_name[name].frozen else trained(name, box)
    )
