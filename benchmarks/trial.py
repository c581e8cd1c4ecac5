"""A trial: training of a made-up model on drawn documents, which tests and benchmarks compare with `trainer.check`'s reference.

Trials travel to ranks, and to those of older checkouts (`static.py --against`), as JSON.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshift.dist.world import World
from longshift.documents.batch import Document, StepBatch
from longshift.layout.box import Box
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.model.loss import IGNORE
from longshift.schedule.chunks import StreamOptions
from longshift.spec.formats import GradientWire, MomentFormat, PrecisionName, WeightWire, Wire
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.state.checkpoint import Checkpoint, save
from longshift.state.home import Home, Source
from longshift.state.initial_weights import random_source
from longshift.state.optimizer import Optimizer, Schedule
from longshift.state.precision import LossScale, Precision
from longshift.step.player import Player
from longshift.step.update import State, score
from longshift.switch.options import Planner, SwitchOptions
from longshift.trainer.check import Case, Comparison, Reference
from longshift.workload.groups import Edge, home_layout


@dataclass(frozen=True)
class Later:
    """A later stage of a trial: from step `begin` on, counted from 0, positions are by `rope` and packs hold `capacity` tokens."""

    begin: int
    rope: Rope | None
    capacity: int


@dataclass(frozen=True)
class Trial:
    """What is trained, how, and on what; without a layout. `lengths`: documents of each step, their tokens drawn from `seed`, or `given`:
    (ids, labels) of each document of each step. `edges`: the lengths up to which each group but the last goes, where there are several;
    `packs`: capacities of their packs, their edges where not given, as `capacity` is the last group's; then how switches are planned.
    `stream_folder`: where the disk tier of streamed layouts is, the system's temporary folder where not given. `masked`: drawn
    documents are conversations, of which turns are learned in part, and one document of each step not at all. `stages`: those after the
    first. `home`: where the training state is; on disk, in `stream_folder`. `packed`: the format of moments between updates; `gradients`,
    `weights`: of these on the wire. `compile`: whether layouts, and not the reference, compile their arithmetic. `float8`: whether matmuls
    of blocks take factors of eight bits, whatever the precision."""

    spec: ModelSpec
    lengths: tuple[tuple[int, ...], ...]
    precision: PrecisionName = "float64"
    capacity: int = 64
    seed: int = 0
    lr: float = 3e-3
    warmup: int = 2
    clip: float | None = 1.0
    rule: Rule = Rule()  # noqa: RUF009  (frozen)
    given: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] = ()
    edges: tuple[int, ...] = ()
    packs: tuple[int, ...] = ()
    planner: Planner = "fan_out"
    bucket_bytes: int = 32 << 20
    ahead_bytes: int = 256 << 20
    stream_folder: str | None = None
    masked: bool = False
    stages: tuple[Later, ...] = ()
    home: str = "device"  # of `HomeTiers`
    packed: MomentFormat = "float32"
    gradients: GradientWire = "float32"
    weights: WeightWire = "compute"
    compile: bool = False
    float8: bool = False

    @property
    def formats(self) -> Precision:
        """The number formats of the trial."""
        named = Precision.of(self.precision, self.wire)
        return replace(named, float8=named.float8 or self.float8)

    @property
    def parts(self) -> list[tuple[int, "Trial"]]:
        """Each stage, the first first: the step that it begins with, and what it trains, on the documents of all."""
        own = [(later.begin, replace(self, spec=replace(self.spec, rope=later.rope), capacity=later.capacity)) for later in self.stages]
        return [(0, self), *own]

    @property
    def wire(self) -> Wire:
        return Wire(self.gradients, self.weights)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.lr, len(self.given or self.lengths), self.lr / 10, self.warmup)

    @property
    def case(self) -> Case:
        """The trial as a layout and the reference train it."""
        batches = self.batches()
        return Case(self.spec, self.formats, self.rule, self.schedule, self.source(), batches, [self.clip] * len(batches))

    def source(self) -> Source:
        """Initial weights, the same float32 numbers in every precision; drawn ones with norms, biases and adapters moved off their usual 1
        and 0, so that a wrong gradient of theirs shows."""
        drawn = random_source(self.spec, self.seed, torch.float32)

        def source(name: str, box: Box) -> Tensor:
            if self.spec.by_name[name].init not in ("zeros", "ones"):
                return drawn(name, box)
            places = (torch.arange(first, last, dtype=torch.float32) for first, last in zip(box.start, box.stop))
            phase = sum(at.mul_(7**dim).view(-1, *[1] * (len(box.shape) - dim - 1)) for dim, at in enumerate(places))
            return drawn(name, box) + 0.1 * torch.sin(torch.as_tensor(phase)).expand(box.shape)

        return source

    def batches(self) -> list[StepBatch]:
        """The steps' documents; of drawn ones the labels are the ids shifted, none at a document's end."""
        if self.given:
            return [self._batch([Document(np.array(ids), np.array(labels)) for ids, labels in step]) for step in self.given]
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for lengths in self.lengths:
            documents = []
            for length in lengths:
                ids = torch.randint(0, self.spec.vocab, (length,), generator=generator)
                documents.append(Document(ids.numpy(), torch.cat((ids[1:], torch.tensor([IGNORE]))).numpy()))
            if self.masked:
                documents = [_in_turns(document, number, generator) for number, document in enumerate(documents)]
            found.append(self._batch(documents))
        return found

    @staticmethod
    def _batch(documents: Sequence[Document]) -> StepBatch:
        targets = sum(int((d.labels != IGNORE).sum()) for d in documents)
        return StepBatch(tuple(documents), targets, 0, len(documents))

    def groups(self, layouts: Sequence[Layout]) -> list[Edge]:
        """The groups of these layouts, from short documents to long."""
        before = len(layouts) - 1
        ends, packs = ((*some[:before], self.capacity) for some in (self.edges, self.packs or self.edges))
        return [Edge(*each) for each in zip(ends, layouts, packs)]

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> "Trial":
        return TypeAdapter(cls).validate_python(value)


def _in_turns(document: Document, number: int, generator: torch.Generator) -> Document:
    """A document of which every second turn of 1 to 8 tokens is learned; nothing of the third document."""
    turns = torch.randint(1, 9, (len(document.ids),), generator=generator)
    learned = torch.repeat_interleave(torch.arange(len(turns)) % 2 == 1, turns)[: len(document.ids)].numpy()
    return Document(document.ids, np.where(learned & (number != 2), document.labels, IGNORE))


def write_reference(world: World, trial: dict, path: str) -> float:
    """Write the truth of a trial into a safetensors file, for a forked world of one; returns the last loss."""
    what = Trial.from_json(trial)
    case, stages = what.case, dict(what.parts)
    reference = Reference(case)
    for step in range(len(case.batches)):
        if step in stages:
            reference.use(stages[step].spec, reference.model.weights())
        reference.train(step)
    truth = reference.result()
    save_file(truth, path)
    return float(truth["loss"][-1])


def build(
    trial: Trial, layouts: Sequence[Layout], world: World, home_cut: Layout | None = None, source: Source | None = None
) -> tuple[State, Player]:
    """State and player of a trial under layouts, from short documents to long, home cut as another one cuts it where that is given.
    `source`: of the weights, the trial's own where not given."""
    precision = trial.formats
    edges = trial.groups(layouts)
    home_cut = home_cut or home_layout(edges)
    home = Home(
        trial.spec,
        home_cut,
        world,
        precision,
        source or trial.source(),
        home_in=HomeTiers.parse(trial.home),
        folder=trial.stream_folder,
        rule=trial.rule,
        packed=trial.packed,
    )
    optimizer = Optimizer(home, trial.rule)
    state = State(trial.spec, home, optimizer, trial.schedule, trial.clip, LossScale() if precision.scaled else None)
    options = SwitchOptions(trial.planner, trial.bucket_bytes, trial.ahead_bytes)
    stream = StreamOptions(trial.stream_folder or tempfile.gettempdir(), checked=True)
    return state, Player(trial.spec, edges, world, home, precision, options, stream, home_cut, compile=trial.compile)


def parse_layouts(text: str) -> list[Layout]:
    """The layouts of the groups, from short documents to long, of a text such as `"dp4 > tp4"`."""
    return [Layout.parse(word) for word in text.split(" > ")]


def compare(
    world: World, trial: dict, layout: str, path: str, home_cut: str | None = None, per_node: int | None = None
) -> dict[str, float]:
    """Worst relative differences of this layout, or of groups of lengths under layouts joined by " > ", to the reference in `path`: those
    of `Comparison`, and score (the loss computed alone, before the first step and the last). Of a trial with stages, the layouts of
    each are joined by " | ". `per_node`: ranks that count as one node where switches are planned."""
    what = Trial.from_json(trial)
    world.per_node = per_node or world.size
    truth, cut = load_file(Path(path)), Layout.parse(home_cut) if home_cut else None
    stages = {begin: (part, parse_layouts(text)) for (begin, part), text in zip(what.parts, layout.split(" | "), strict=True)}
    state, player = build(*stages.pop(0), world, cut)
    case = what.case
    comparison, scores = Comparison(case, truth), []
    for step, batch in enumerate(case.batches):
        if step in stages:
            player.finish()
            state, player = _later(state, *stages[step], world, Path(path).parent, cut)
        if step in (0, len(case.batches) - 1):
            scores.append(score(batch.documents, player) / batch.target_tokens - truth["loss"][step])
        comparison.train(step, state, player)
    differences = comparison.result(state, player)
    return differences | {"score": float((torch.stack(scores).abs() / truth["loss"][[0, -1]]).max())}


def _later(state: State, trial: Trial, layouts: Sequence[Layout], world: World, folder: Path, cut: Layout | None) -> tuple[State, Player]:
    """State and player of a stage that begins with the checkpoint of the one before it, which is saved below `folder` for that alone."""
    steps = state.optimizer.steps
    run = folder / f"{world.gather_text(str(os.getpid()))[0]}-{steps}"
    save(run, steps, state.optimizer.state(), {}, world, keep=1)
    saved = Checkpoint.latest(run, world)
    own, read = trial.source(), saved.source()
    state, player = build(trial, layouts, world, cut, lambda name, box: (own if trial.spec.by_name[name].frozen else read)(name, box))
    state.optimizer.restore(saved.read, trial.packed, steps)
    world.gather_text("")
    if world.rank == 0:
        shutil.rmtree(run)
    return state, player
