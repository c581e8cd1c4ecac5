"""Is a layout the same training as one process? The comparison behind `longshift check`, the tests
and `benchmarks/parity.py`.

The reference is plain PyTorch: the decoder in one process, one document at a time, with attention,
adapters and the loss by their definitions, torch's clip and its unfused optimizer. Four things are
compared: the loss of every step, every weight's gradient (first and last step), the weights, and
the optimizer's moments.

A leak is a loss that depends on what it must not see. For some target positions, every token after
the position and every token of every other document is replaced; the loss at the position must stay
as it was: bit for bit, and up to rounding where a model has experts.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from longshift.documents.batch import Batches, Document, StepBatch
from longshift.documents.micro import micro_batch
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.model.decoder import Decoder, MicroBatch, Ops
from longshift.model.functions import Elementwise
from longshift.model.loss import IGNORE
from longshift.program.operations import Op
from longshift.spec.model import CROSS_ENTROPY, ModelSpec
from longshift.spec.rule import Rule
from longshift.state.home import Home, Source
from longshift.state.optimizer import Schedule, decay_groups, torch_optimizer
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.user_code import load_object
from longshift.workload.groups import LengthGroup

PROBES = 6
PROBED_TOKENS = 512
PIECES = 64  # of cut documents, whose labels are compared
# Relative. Other tokens give an expert's matmul another number of rows, and so another rounding:
# an ulp of 2e-16. A token that attention must not see changes a loss by far more.
EXPERTS_ROUNDING = 1e-11


@dataclass(frozen=True)
class Case:
    """What is trained, how, and on what; without a layout. `source`: of the initial weights;
    `batches`: the documents of each step; `clips`: the largest gradient norm of each."""

    spec: ModelSpec
    precision: Precision
    rule: Rule
    schedule: Schedule
    source: Source
    batches: Sequence[StepBatch]
    clips: Sequence[float | None]

    def gradient_kinds(self, step: int) -> list[str]:
        """Names of what the gradients of a step are compared as: of the first and the last one."""
        steps = {"grad-first": 0, "grad-last": len(self.batches) - 1}
        return [kind for kind, number in steps.items() if number == step]


class Definition(Ops):
    """Attention and the loss in torch's plain operations, so that the reference has no kernel,
    window or mask of the product. It is for one document at a time."""

    def attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        micro: MicroBatch,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention: [T, N, H]. To all tokens before, or where the block has a window to the
        model's last `sliding_window` tokens, a token's own included."""
        window = None if window is None else self.spec.sliding_window
        queries_a_key = q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH, v_TNH = (x.repeat_interleave(queries_a_key, dim=1) for x in (k_TKH, v_TKH))
        scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH) * self.spec.score_scale
        if self.spec.score_cap:
            scores_NTT = self.spec.score_cap * torch.tanh(scores_NTT / self.spec.score_cap)
        tokens = torch.arange(len(q_TNH))
        before_TT = tokens[:, None] - tokens[None, :]
        seen_TT = (before_TT >= 0) & (before_TT < (window or len(q_TNH)))
        return torch.einsum(
            "nqk,knh->qnh", scores_NTT.masked_fill(~seen_TT, -math.inf).softmax(dim=-1), v_TNH
        )

    def loss(self, logits_TV: Tensor, labels_T: Tensor, by: Elementwise) -> Tensor:
        """The sum of the losses of the target tokens; cross-entropies in nats."""
        if self.spec.loss != CROSS_ENTROPY:
            target = labels_T != IGNORE
            if not target.any():
                return 0.0 * logits_TV.sum()
            return load_object(self.spec.loss, "train.loss")(
                logits_TV[target], labels_T[target]
            ).sum()
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")


def with_adapters(model: Decoder) -> dict[str, Tensor]:
    """The weights that a model computes with, by the names of their parameters: W + alpha / rank B
    A where a weight has an adapter."""
    lora = model.spec.lora
    base = model.spec.base
    weights: dict[str, Tensor] = {}
    for number, unit in enumerate(model.units):
        for p in base.of_unit(number):
            weight = getattr(unit, p.role)
            a = getattr(unit, f"{p.role}_lora_a", None)
            b = getattr(unit, f"{p.role}_lora_b", None)
            if lora and a is not None and b is not None:
                adapter = lora.alpha / lora.rank * (b @ a)
                # Adapters are [out, in], whatever the weights are.
                weight = weight + (adapter.mT if unit.input_major else adapter)
            weights[f"units.{number}.{p.role}"] = weight
    return weights


class Reference:
    """Training in one process, step by step. Mutable: its weights, and the numbers of the steps so
    far."""

    def __init__(self, case: Case):
        self._case = case
        dtype = case.precision.home
        self.use(
            case.spec,
            {
                p.name: case.source(p.name, Box.whole(p.shape)).to(dtype).clone()
                for p in case.spec.params
            },
        )
        self._weights = {
            name: weight for name, weight in self.model.weights().items() if weight.requires_grad
        }
        groups = decay_groups(case.spec, case.rule, self._weights)
        self._optimizer = torch_optimizer(case.rule, groups, fused=False)
        self._losses: list[float] = []
        self._gradients: dict[str, Tensor] = {}

    def use(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        """Compute the steps that follow as a model with these weights, whose table of parameters is
        the case's."""
        self.model = Decoder(spec, self._case.precision.float8).load(dict(weights))
        self._definition = Definition(spec)
        # What is rounded to eight bits is the weight alone, without its adapter.
        has_merged_weights = spec.lora is not None and not self._case.precision.float8
        self._merged = Decoder(spec.base) if has_merged_weights else None

    def train(self, step: int) -> None:
        """Train a step, counted from 0."""
        batch = self._case.batches[step]
        self._optimizer.zero_grad()
        losses = [self._backward(batch, number) for number in range(len(batch.documents))]
        self._losses.append(sum(losses) / batch.target_tokens)
        for kind in self._case.gradient_kinds(step):
            self._gradients |= {
                f"{kind}/{name}": w.grad.clone()
                for name, w in self._weights.items()
                if w.grad is not None
            }

        if max_norm := self._case.clips[step]:
            torch.nn.utils.clip_grad_norm_(self._weights.values(), max_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._case.schedule.at(step)
        self._optimizer.step()

    def _backward(self, batch: StepBatch, number: int) -> float:
        """Add the gradients of a document. Returns its loss sum."""
        documents = [batch.documents[number]]
        micro = micro_batch(
            self.model.spec, documents, Layout(), 0, self._case.precision.home, torch.device("cpu")
        )
        if self._merged is not None:
            loss = functional_call(
                self._merged, with_adapters(self.model), (micro, self._definition)
            )
        else:
            loss = self.model(micro, self._definition)
        (loss / batch.target_tokens).backward()
        return float(loss.detach())

    def result(self) -> dict[str, Tensor]:
        """The truth after the last step: "loss" [steps], and "KIND/NAME" of gradients, masters and
        moments."""
        tensors = {"loss": torch.tensor(self._losses, dtype=torch.float64), **self._gradients}
        for name, weight in self._weights.items():
            tensors[f"master/{name}"] = weight.detach()
            tensors |= {
                f"{kind}/{name}": self._optimizer.state[weight][kind]
                for kind in self._case.rule.moments
            }
        return {key: tensor.contiguous() for key, tensor in tensors.items()}


class Comparison:
    """A layout's training beside the truth of a `Reference`, on one rank. Mutable: squared
    differences and squared references by kind and weight, which are additive over boxes and
    ranks."""

    def __init__(self, case: Case, truth: dict[str, Tensor]):
        self._case = case
        self._truth = truth
        self._rows = {p.name: row for row, p in enumerate(case.spec.params)}
        kinds = ("grad-first", "grad-last", "master", *case.rule.moments)
        self._squares = {
            kind: torch.zeros(2, len(self._rows), dtype=torch.float64) for kind in kinds
        }
        self._losses: list[float] = []

    def train(self, step: int, state: State, player: Player) -> None:
        """Train a step, counted from 0, and compare its gradients; collective."""

        # At the norm all gradients are at home, and none is clipped yet.
        def compare_gradients(op: Op) -> None:
            if op.kind == "norm":
                for kind in self._case.gradient_kinds(step):
                    self._add_gradients(kind, state.home, state.scale.scale if state.scale else 1.0)

        player.after = compare_gradients
        state.clip = self._case.clips[step]
        self._losses.append(train_step(state, self._case.batches[step], player, leave=True).loss)
        player.after = None

    def _add_gradients(self, kind: str, home: Home, scale: float) -> None:
        for shard in home.learning:
            for name, box, view in shard.views(home.flat(shard, "grad")):
                self._add(kind, name, box, view / scale)

    def _add(self, kind: str, name: str, box: Box, ours: Tensor) -> None:
        """Add a box of a weight to the sums."""
        if box:
            whole = Box.whole(self._case.spec.by_name[name].shape)
            truth = self._truth[f"{kind}/{name}"][box.within(whole)].double()
            squares = self._squares[kind][:, self._rows[name]]
            squares[0] += (ours.double().cpu() - truth).square().sum()
            squares[1] += truth.square().sum()

    def result(self, state: State, player: Player) -> dict[str, float]:
        """The largest relative differences after the last step: of losses, and of gradients,
        weights and moments ||ours - truth|| / ||truth|| of the worst weight, over all ranks;
        collective."""
        player.finish()
        for name, box, _, views in state.optimizer.state():
            for kind, view in views.items():
                self._add(kind, name, box, view)
        world = player.world
        worst = {}
        for kind, squares in self._squares.items():
            worst[kind] = _largest_ratio(world.everyone.all_reduce(squares.to(world.device)).cpu())
        world.forget()
        losses = torch.tensor(self._losses, dtype=torch.float64)
        true_losses = self._truth["loss"]
        return {
            "loss": float(((losses - true_losses) / true_losses).abs().max()),
            "grad": max(worst["grad-first"], worst["grad-last"]),
            "weight": worst["master"],
            "optimizer": max((worst[kind] for kind in self._case.rule.moments), default=0.0),
        }


def _largest_ratio(squares: Tensor) -> float:
    """The largest relative difference of a weight. A reference of zero must be met exactly."""
    difference, truth = squares
    zero_met = torch.where(difference > 0, math.inf, 0.0)
    return float(torch.where(truth > 0, difference / truth, zero_met).max().sqrt())


def leaks(player: Player, case: Case, seed: int) -> list[bool]:
    """For some target positions, whether their loss depends on what they must not see."""
    documents = sorted(case.batches[0].documents, key=lambda document: len(document.ids))
    documents = [documents[-1], *documents[:-1]]  # the longest, and short ones
    ends = list(accumulate(len(document.ids) for document in documents))
    documents = documents[: max(2, bisect_left(ends, PROBED_TOKENS))]

    targets = [
        (number, int(position))
        for number, document in enumerate(documents)
        for position in np.flatnonzero(document.labels != IGNORE)
    ]
    num_probes = min(PROBES, len(targets))
    probes = [targets[i] for i in np.linspace(0, len(targets) - 1, num_probes).astype(int)]

    random = np.random.default_rng(seed)
    has_leaked = []
    for number, position in probes:
        original = [
            Document(document.ids, np.full_like(document.labels, IGNORE)) for document in documents
        ]
        original[number].labels[position] = documents[number].labels[position]

        # Of the target's document, the tokens up to the target stay. All others are replaced.
        replaced = [
            Document(random.integers(0, case.spec.vocab, len(document.ids)), document.labels)
            for document in original
        ]
        replaced[number].ids[: position + 1] = documents[number].ids[: position + 1]
        rounding = EXPERTS_ROUNDING if case.spec.experts else 0.0
        losses = _loss(player, original), _loss(player, replaced)
        has_leaked.append(not math.isclose(*losses, rel_tol=rounding))
    return has_leaked


def _loss(player: Player, documents: Sequence[Document]) -> float:
    """Loss sum of one pack, over all ranks; every replica computes it."""
    ((layout, runner),) = player.runners.items()
    pack = tuple(range(len(documents)))
    num_tokens = sum(len(document.ids) for document in documents)
    group = LengthGroup(0, num_tokens, layout, (pack,), ((0,),) * layout.dp, (0.0,))
    program = player.take(player.ready(documents, [group]), 1.0)
    # The update, which begins with the norm, must not change the weights.
    norm = next(number for number, op in enumerate(program) if op.kind == "norm")
    player.play(program[:norm])
    player.home.drop_gradients()
    return float(player.world.everyone.all_reduce(runner.loss))


def wrong_labels(batches: Batches) -> int:
    """How many tokens and labels of a run's first documents, and of its first pieces of cut ones,
    are not what the tokens on disk say: a label is the token that follows in the whole document,
    where that is learned."""
    cache = batches.cache
    cuts = batches.spans
    is_piece = cuts.stop - cuts.start < cache.lengths[cuts.document]
    pieces = np.flatnonzero(is_piece)[:PIECES].tolist()
    first = batches.at(0)
    first_spans = [batches.order[cursor] for cursor in range(first.cursor, first.next_cursor)]

    wrong = 0
    for span in {*pieces, *first_spans}:
        number = int(cuts.document[span])
        start = int(cuts.start[span])
        stop = int(cuts.stop[span])

        # 1. Make the labels of the whole document again, from the tokens on disk alone.
        tokens = cache.tokens(number)
        labels = np.append(tokens[1:], IGNORE).astype(np.int64)
        learned = cache.learned(number)
        if learned is not None:
            labels[:-1][learned[1:] == 0] = IGNORE

        # 2. Compare the document that the run trains on with its part of them.
        document = batches.document(span)
        wrong += _num_different(document.ids, tokens[start:stop])
        wrong += _num_different(document.labels, labels[start:stop])
    return wrong


def _num_different(ours: np.ndarray, truth: np.ndarray) -> int:
    """How many values differ from the truth: all of them where the lengths differ."""
    return int((ours != truth).sum()) if len(ours) == len(truth) else len(truth)
