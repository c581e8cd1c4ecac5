"""Is a layout the same training as one process? The parity harness behind `longshift check`, the tests and `benchmarks/parity.py`.

The reference is plain PyTorch: the decoder in one process, one document at a time, with attention, adapters and the loss by their
definitions, torch's clip and its unfused optimizer. Four things are compared: the loss of every step, every weight's gradient (first and
last step), the weights, and the optimizer's moments.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from longshift.dist.world import World
from longshift.documents.batch import Document, StepBatch
from longshift.documents.micro import micro_batch
from longshift.layout.box import Box
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.model.decoder import Decoder, MicroBatch, Ops
from longshift.model.functions import Elementwise
from longshift.model.huggingface import WeightFolder
from longshift.model.loss import IGNORE
from longshift.program.operations import Op
from longshift.schedule.chunks import StreamOptions
from longshift.spec.formats import GradientWire, MomentFormat, PrecisionName, WeightWire, Wire
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.state.checkpoint import Checkpoint, save
from longshift.state.home import Home, Source, random_source
from longshift.state.optimizer import Optimizer, Schedule, decay_groups, torch_optimizer
from longshift.state.precision import LossScale, Precision
from longshift.step.player import Player
from longshift.step.update import State, score, train_step
from longshift.switch.itinerary import SwitchOptions, home_layout
from longshift.switch.planners import Planner
from longshift.workload.groups import Edge


@dataclass(frozen=True)
class Later:
    """A later stage of a trial: from step `begin` on, counted from 0, positions are by `rope` and packs hold `capacity` tokens."""

    begin: int
    rope: Rope | None
    capacity: int


@dataclass(frozen=True)
class Trial:
    """What is trained, how, and on what; without a layout. `lengths`: documents of each step, their tokens drawn from `seed`, or `given`:
    (ids, labels) of each document of each step. `folder`: a model folder to start from, else weights are drawn. `edges`: the lengths up to
    which each group but the last goes, where there are several; `packs`: capacities of their packs, their edges where not given, as
    `capacity` is the last group's; then how switches are planned. `ahead`: of streamed layouts;
    `stream_folder`: where their disk tier is, the system's temporary folder where not given. `masked`: drawn documents are conversations,
    of which turns are learned in part, and one document of each step not at all. `stages`: those after the first. `home`: where the
    training state is; on disk, in `stream_folder`. `packed`: the format of moments between updates; `gradients`, `weights`:
    of these on the wire. `compile`: whether layouts, and not the reference, compile their arithmetic. `float8`: whether matmuls of blocks
    take factors of eight bits, whatever the precision. `clips`: the largest norm in each step, `clip` in all where not given. `early`:
    whether units on disk may be updated before the norm."""

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
    folder: str | None = None
    edges: tuple[int, ...] = ()
    packs: tuple[int, ...] = ()
    planner: Planner = "fan_out"
    bucket_bytes: int = 32 << 20
    ahead_bytes: int = 256 << 20
    ahead: int = 1
    stream_folder: str | None = None
    masked: bool = False
    stages: tuple[Later, ...] = ()
    home: str = "device"  # of `HomeTiers`
    packed: MomentFormat = "float32"
    gradients: GradientWire = "float32"
    weights: WeightWire = "compute"
    compile: bool = False
    float8: bool = False
    clips: tuple[float | None, ...] = ()
    early: bool = True

    def clip_at(self, step: int) -> float | None:
        """The largest global norm of the gradient in a step, counted from 0."""
        return self.clips[step] if self.clips else self.clip

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

    def source(self) -> Source:
        """Initial weights, the same float32 numbers in every precision; drawn ones with norms, biases and adapters moved off their usual 1
        and 0, so that a wrong gradient of theirs shows."""
        base = self.spec.base
        folder = WeightFolder(Path(self.folder), base) if self.folder is not None else None
        drawn = random_source(self.spec, self.seed, torch.float32)

        def source(name: str, box: Box) -> Tensor:
            if folder and name in base.by_name:
                return folder.read(name, box)
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


@dataclass
class Differences:
    """Squared differences and squared references, by kind and weight; additive over boxes and ranks."""

    names: Sequence[str]
    squares: dict[str, Tensor] = field(default_factory=dict)  # [2, weights]

    def add(self, kind: str, name: str, ours: Tensor, truth: Tensor) -> None:
        both = self.squares.setdefault(kind, torch.zeros(2, len(self.names), dtype=torch.float64))
        at, truth = self.names.index(name), truth.double()
        both[0, at] += (ours.double().cpu() - truth).square().sum()
        both[1, at] += truth.square().sum()

    def worst(self, kind: str, reduce: Callable[[Tensor], Tensor]) -> float:
        """Largest ||ours - truth|| / ||truth|| of a weight, over all ranks. A reference of zero must be met exactly."""
        both = reduce(self.squares.get(kind, torch.zeros(2, len(self.names), dtype=torch.float64)).clone())
        ratio = torch.where(both[1] > 0, both[0] / both[1], torch.where(both[0] > 0, math.inf, 0.0))
        return float(ratio.max().sqrt())


class Definition(Ops):
    """Attention and the loss in torch's plain operations, so that the reference has no kernel, window or mask of the product. It is for one
    document at a time."""

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch, window: int | None = None) -> Tensor:
        """Causal attention: [T, N, H]. To all tokens before, or where the block has a window to the model's last `sliding_window` tokens, a
        token's own included."""
        window = None if window is None else self.spec.sliding_window
        queries_a_key = q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH, v_TNH = (x.repeat_interleave(queries_a_key, dim=1) for x in (k_TKH, v_TKH))
        scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH) * self.spec.score_scale
        if self.spec.score_cap:
            scores_NTT = self.spec.score_cap * torch.tanh(scores_NTT / self.spec.score_cap)
        tokens = torch.arange(len(q_TNH))
        before_TT = tokens[:, None] - tokens[None, :]
        seen_TT = (before_TT >= 0) & (before_TT < (window or len(q_TNH)))
        return torch.einsum("nqk,knh->qnh", scores_NTT.masked_fill(~seen_TT, -math.inf).softmax(dim=-1), v_TNH)

    def loss(self, logits_TV: Tensor, labels_T: Tensor, by: Elementwise) -> Tensor:
        """The sum of the cross-entropies of the target tokens, in nats."""
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")


def with_adapters(model: Decoder) -> dict[str, Tensor]:
    """The weights that a model computes with, by the names of their parameters: W + alpha / rank B A where a weight has an adapter."""
    lora, base, weights = model.spec.lora, model.spec.base, dict[str, Tensor]()
    for number, unit in enumerate(model.units):
        for p in base.of_unit(number):
            weight = getattr(unit, p.role)
            a, b = (getattr(unit, f"{p.role}_lora_{which}", None) for which in "ab")
            if lora and a is not None and b is not None:
                adapter = lora.alpha / lora.rank * (b @ a)
                weight = weight + (adapter.mT if unit.input_major else adapter)
            weights[f"units.{number}.{p.role}"] = weight
    return weights


def reference(trial: Trial) -> dict[str, Tensor]:
    """The truth, in one process: "loss" [steps], and "KIND/NAME" for the kinds above."""
    spec, dtype, float8, device = trial.spec, trial.formats.home, trial.formats.float8, torch.device("cpu")
    source = trial.source()
    model = Decoder(spec, float8).load({p.name: source(p.name, Box.whole(p.shape)).to(dtype).clone() for p in spec.params})
    weights = {name: weight for name, weight in model.weights().items() if weight.requires_grad}
    optimizer = torch_optimizer(trial.rule, decay_groups(spec, trial.rule, weights), fused=False)
    alone, schedule, batches, stages = Layout(), trial.schedule, trial.batches(), dict(trial.parts)
    out: dict[str, Tensor] = {}
    losses = []
    for step, batch in enumerate(batches):
        if step in stages:
            spec = stages[step].spec
            ops, model = Definition(spec), Decoder(spec, float8).load(model.weights())
            merges = spec.lora is not None and not float8  # what is rounded to eight bits is the weight alone
            plain = Decoder(spec.base) if merges else model
        optimizer.zero_grad()
        total = 0.0
        for document in batch.documents:
            micro = micro_batch(spec, [document], alone, 0, dtype, device)
            loss = functional_call(plain, with_adapters(model), (micro, ops)) if merges else model(micro, ops)
            (loss / batch.target_tokens).backward()
            total += float(loss.detach())
        losses.append(total / batch.target_tokens)
        for kind, when in (("grad-first", 0), ("grad-last", len(batches) - 1)):
            if step == when:
                out |= {f"{kind}/{name}": w.grad.clone() for name, w in weights.items() if w.grad is not None}
        if clip := trial.clip_at(step):
            torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        optimizer.step()
    out["loss"] = torch.tensor(losses, dtype=torch.float64)
    for name, weight in weights.items():
        out[f"master/{name}"] = weight.detach()
        out |= {f"{kind}/{name}": optimizer.state[weight][kind] for kind in trial.rule.moments}
    return out


def write_reference(world: World, trial: dict, path: str) -> float:
    """Write `reference` into a safetensors file, for a forked world of one; returns the last loss."""
    truth = reference(Trial.from_json(trial))
    save_file({key: value.contiguous() for key, value in truth.items()}, path)
    return float(truth["loss"][-1])


def build(
    trial: Trial, layouts: Sequence[Layout], world: World, home_cut: Layout | None = None, source: Source | None = None
) -> tuple[State, Player]:
    """State and player of a trial under layouts, from short documents to long, home cut as another one cuts it where that is given.
    `source`: of the weights, the trial's own where not given."""
    precision = trial.formats
    edges = trial.groups(layouts)
    home_cut = home_cut or home_layout(edges)
    source = source or trial.source()
    home = Home.made(
        trial.spec,
        home_cut,
        world,
        precision,
        source,
        HomeTiers.parse(trial.home),
        trial.stream_folder,
        trial.rule,
        trial.packed,
        trial.early,
    )
    optimizer = Optimizer(home, trial.rule)
    state = State(trial.spec, home, optimizer, trial.schedule, trial.clip_at(0), LossScale() if precision.scaled else None)
    options = SwitchOptions(trial.planner, trial.bucket_bytes, trial.ahead_bytes)
    stream = StreamOptions(trial.stream_folder or tempfile.gettempdir(), trial.ahead, checked=True)
    return state, Player(trial.spec, edges, world, home, precision, options, stream, home_cut, compile=trial.compile)


def parse_layouts(text: str) -> list[Layout]:
    """The layouts of the groups, from short documents to long, of a text such as `"dp4 > tp4"`."""
    return [Layout.parse(word) for word in text.split(" > ")]


def compare(
    world: World, trial: dict, layout: str, path: str, home_cut: str | None = None, per_node: int | None = None
) -> dict[str, float]:
    """Worst relative differences of this layout, or of groups of lengths under layouts joined by " > ", to the reference in `path`: loss,
    score (the loss computed alone, before the first step and the last), grad, weight, optimizer. Of a trial with stages, the layouts of
    each are joined by " | ". `per_node`: ranks that count as one node where switches are planned."""
    what = Trial.from_json(trial)
    world.per_node = per_node or world.size
    truth, cut = load_file(Path(path)), Layout.parse(home_cut) if home_cut else None
    stages = {begin: (part, parse_layouts(text)) for (begin, part), text in zip(what.parts, layout.split(" | "), strict=True)}
    state, player = build(*stages.pop(0), world, cut)
    found = Differences([p.name for p in what.spec.params])
    losses, scores, batches = [], [], what.batches()
    for step, batch in enumerate(batches):
        if step in stages:
            state, player = _later(state, *stages[step], world, Path(path).parent, cut)

        def after(op: Op, step: int = step, home: Home = state.home, scale: float = state.scale.scale if state.scale else 1.0) -> None:
            for kind, when in (("grad-first", 0), ("grad-last", len(batches) - 1)):
                if op.kind == "norm" and step == when:
                    _compare_gradients(found, kind, home, scale, truth)

        if step in (0, len(batches) - 1):
            player.after = None
            scores.append(score(batch.documents, player) / batch.target_tokens - truth["loss"][step])
        player.after, state.clip = after, what.clip_at(step)
        losses.append(train_step(state, batch, player, leave=step + 1 not in stages).loss)
    player.after = None
    player.finish()
    for name, box, _, views in state.optimizer.state():
        for kind, view in views.items():
            if box:
                found.add(kind, name, view, truth[f"{kind}/{name}"][box.within(Box.whole(what.spec.by_name[name].shape))])
    group, kinds = world.everyone, ("grad-first", "grad-last", "master", *what.rule.moments)
    worst = {kind: found.worst(kind, lambda both: group.all_reduce(both.to(world.device)).cpu()) for kind in kinds}
    world.forget()
    ours = torch.tensor(losses, dtype=torch.float64)
    return {
        "loss": float(((ours - truth["loss"]) / truth["loss"]).abs().max()),
        "score": float((torch.stack(scores).abs() / truth["loss"][[0, -1]]).max()),
        "grad": max(worst["grad-first"], worst["grad-last"]),
        "weight": worst["master"],
        "optimizer": max((worst[kind] for kind in what.rule.moments), default=0.0),
    }


def _later(state: State, trial: Trial, layouts: Sequence[Layout], world: World, folder: Path, cut: Layout | None) -> tuple[State, Player]:
    """State and player of a stage that begins with the checkpoint of the one before it, which is saved below `folder` for that alone."""
    steps = state.optimizer.steps
    run = folder / f"{world.gather_text(str(os.getpid()))[0]}-{steps}"
    save(run, steps, state.optimizer.state(), {}, world, keep=1)
    saved = Checkpoint.latest(run, world)
    own, read = trial.source(), saved.source()
    state, player = build(trial, layouts, world, cut, lambda name, box: (own if trial.spec.by_name[name].frozen else read)(name, box))
    state.optimizer.restore(saved.read, trial.packed)
    state.optimizer.resume(steps)
    world.gather_text("")
    if world.rank == 0:
        shutil.rmtree(run)
    return state, player


def _compare_gradients(found: Differences, kind: str, home: Home, scale: float, truth: dict[str, Tensor]) -> None:
    for shard in home.learning:
        for name, box, view in shard.views(home.flat(shard, "grad")):
            if box:
                found.add(kind, name, view / scale, truth[f"{kind}/{name}"][box.within(Box.whole(home.spec.by_name[name].shape))])
