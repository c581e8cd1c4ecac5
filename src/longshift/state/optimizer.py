"""The update at home, by one of the rules of `spec.rule`, after one global clip, and the
learning-rate schedule.

torch's fused kernels, or a rule of the user's own, run over the flat vectors of home: norms and
biases do not decay. The gradient norm is one number for the whole model: every element counts once,
whatever the layout."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longshift.layout.blocks import blocks_starting_in
from longshift.layout.box import Box
from longshift.spec.formats import MomentFormat
from longshift.spec.model import ModelSpec
from longshift.spec.rule import Rule
from longshift.state.home import Home, Shard
from longshift.state.moments import SCALE, Read, converted
from longshift.state.records import in_memory
from longshift.state.user_rule import RuleOptimizer, checked_rule, update_in_pieces


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: `warmup` steps up to `lr`, then `kind` down to `min_lr` at `steps`,
    all counted from update `begin`."""

    lr: float
    steps: int
    min_lr: float = 0.0
    warmup: int = 0
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    begin: int = 0

    def at(self, step: int) -> float:
        """Rate of update number `step`, from 0."""
        step = max(0, step - self.begin)
        if step < self.warmup:
            # The first update has a rate above 0.
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        decay_steps = max(1, self.steps - self.warmup)
        progress = min(1.0, (step - self.warmup) / decay_steps)
        if self.kind == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            factor = 1 - progress
        return self.min_lr + (self.lr - self.min_lr) * factor


class StateSlice(NamedTuple):
    """Views of a shard's vectors, of the elements that decay alike."""

    master: Tensor
    grad: Tensor
    moments: Sequence[Tensor]


class Optimizer:
    """A rule over home, which was made for its moments. Mutable: holds the moments, and `steps`
    done."""

    def __init__(self, home: Home, rule: Rule):
        assert home.moments == rule.moments
        assert not rule.is_user_rule or checked_rule(rule.name).moments == rule.moments
        self.home = home
        self.rule = rule
        self.steps = 0
        self._lr = 0.0
        self._factor: float | None = None
        self._early: set[int] = set()  # units that were updated before this step's norm was known

    @property
    def _divides(self) -> bool:
        """Whether torch's kernels may apply the factor: they divide by a float32 number, which
        saves a pass over the gradients."""
        return not self.rule.is_user_rule and all(
            shard.master.dtype == torch.float32 for shard in self.home.learning
        )

    def update(self, lr: float, factor: float = 1.0) -> None:
        """One step with the gradients at home, times `factor`, which are dropped. Of a home that is
        updated by unit, the units follow."""
        self._lr = lr
        self._factor = factor
        self.steps += 1
        if factor == 1.0:
            # Early updates assumed this factor: they stand.
            for shard in self._of(self._early):
                shard.grad = None
                shard.take_second_places()
            self._early = set()
        else:
            self.take_back()
        if not self.home.by_unit:
            self._update(self.home.learning)

    @property
    def unclipped(self) -> bool:
        """Whether the last update took the gradients as they were."""
        return self._factor == 1.0

    def skip(self) -> None:
        """Drop the gradients at home, and change nothing."""
        self._factor = None
        self.take_back()
        self.home.drop_gradients()

    def take_back(self) -> None:
        """Let early updates not have been."""
        self._early = set()

    def _of(self, units: Collection[int]) -> list[Shard]:
        return [shard for shard in self.home.learning if shard.bucket.unit in units]

    def update_early(self, unit: int, lr: float) -> None:
        """The part of the next update for a unit on disk, as if its factor were 1. Masters and
        moments are in memory, and go to second places in the file. Gradients stay, for an update
        with another factor would take them."""
        # `update` counts the step later, when the norm is known.
        self._apply(self._of({unit}), lr, 1.0, self.steps + 1)
        self._early.add(unit)

    def update_unit(self, unit: int) -> None:
        """The part of the last update, or of what was skipped, for a unit of a home that is updated
        by unit; of one on disk, records have been read. Moments that are packed stay unpacked until
        `pack`."""
        # A step that was skipped changes no moment.
        if self._factor is not None and self.home.packed != "float32":
            self.home.unpack(unit, self.steps)
        self._update(self._of({unit}))

    def _update(self, shards: Sequence[Shard]) -> None:
        if self._factor is not None:
            self._apply(shards, self._lr, self._factor, self.steps)
        for shard in shards:
            shard.grad = None

    def _apply(self, shards: Sequence[Shard], lr: float, factor: float, step: int) -> None:
        """The update of number `step`, from 1, with the gradients of some shards times `factor`."""
        shards = [shard for shard in shards if shard.grad is not None]
        if factor != 1.0 and not self._divides:
            for shard in shards:
                shard.grad.mul_(factor)  # pyright: ignore[reportOptionalMemberAccess]
            factor = 1.0
        # A fused kernel takes tensors of one device and one weight decay.
        groups: dict[tuple[float, torch.device], list[StateSlice]] = {}
        for shard in shards:
            for decay, part in _parts(shard, self.rule):
                groups.setdefault((decay, part.master.device), []).append(part)

        rule = self.rule
        for (decay, _), parts in groups.items():
            if not rule.is_user_rule:
                _fused(rule, lr, decay, parts, factor, step)
                continue
            user_rule = checked_rule(rule.name)
            for part in parts:
                moments = dict(zip(rule.moments, part.moments))
                update_in_pieces(user_rule, part.master, part.grad, moments, step, lr, decay)

    def state(self) -> Iterator[tuple[str, Box, bool, dict[str, Tensor]]]:
        """Every trained weight and box at home, whether this rank speaks for it, and its views of
        "master" and of each moment; packed ones are codes, and their scales, "MOMENT.scale", follow
        with boxes of the blocks that begin in the weight's box. Of what is on disk they are copies
        that last."""
        for shard in self.home.learning:
            kinds = ("master", *self.home.saved)
            yield from _views(shard, {kind: self.home.flat(shard, kind) for kind in kinds})

    def restore(self, read: Read, was: MomentFormat, steps: int) -> None:
        """Take the moments of a checkpoint that keeps them in this format, and its steps as done;
        masters are there."""
        self.steps = steps
        for shard in self.home.learning:
            vectors = {kind: shard.vectors[kind] for kind in self.home.saved}
            # A vector on disk is read and written once for all its boxes.
            with in_memory(list(vectors.values()), changed=True):
                for placed, kind in product(shard.boxes, self.home.moments):
                    if not placed.box:
                        continue
                    values, scales = converted(
                        read=read,
                        kind=kind,
                        name=placed.name,
                        box=placed.box,
                        shape=self.home.spec.by_name[placed.name].shape,
                        was=was,
                        now=self.home.packed,
                        dtype=shard.master.dtype,
                    )
                    placed.values(vectors[kind].flat).copy_(values)
                    if scales is not None:
                        placed.scales(vectors[kind + SCALE].flat).copy_(scales)


def _fused(
    rule: Rule, lr: float, decay: float, parts: Sequence[StateSlice], factor: float, step: int
) -> None:
    """Update parts of one device that decay alike by their gradients times `factor`. These are the
    kernels of torch.optim, which imports torch's compiler: 1.3 s."""
    masters = [part.master for part in parts]
    grads = [part.grad for part in parts]
    moments = [list(column) for column in zip(*(part.moments for part in parts))]
    device = masters[0].device
    divisor = None
    if factor != 1.0:
        # The kernels divide gradients by this number.
        divisor = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)
    if rule.name == "sgd":
        [momenta] = moments or [[]]
        torch._fused_sgd_(
            masters,
            grads,
            momenta,
            lr=lr,
            weight_decay=decay,
            momentum=rule.momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=divisor,
        )
    else:
        [first, second] = moments
        torch._fused_adamw_(
            masters,
            grads,
            first,
            second,
            [],  # largest second moments, of AMSGrad
            [torch.full((), float(step), device=device)] * len(parts),
            lr=lr,
            weight_decay=decay,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )


def torch_optimizer(rule: Rule, params: Iterable, fused: bool) -> torch.optim.Optimizer:
    """torch's optimizer of a rule, or a rule of the user's own as one, over parameters or groups of
    them with a weight decay of their own; its kernels fused, or one operation after another."""
    if rule.is_user_rule:
        return RuleOptimizer(
            checked_rule(rule.name), params, lr=0.0, weight_decay=rule.weight_decay
        )
    # Both take the same words; `foreach` beside `fused` would be refused.
    options = {"lr": 0.0, "weight_decay": rule.weight_decay, "fused": fused}
    if not fused:
        options["foreach"] = False
    if rule.name == "sgd":
        return torch.optim.SGD(params, momentum=rule.momentum, **options)
    return torch.optim.AdamW(params, betas=rule.betas, eps=rule.eps, **options)


def decay_groups(spec: ModelSpec, rule: Rule, weights: Mapping[str, Tensor]) -> list[dict]:
    """torch's groups of parameters: matrices decay, norms and biases do not. `weights` by canonical
    name."""
    groups = []
    for has_decay, weight_decay in ((True, rule.weight_decay), (False, 0.0)):
        params = [w for name, w in weights.items() if spec.by_name[name].decay == has_decay]
        groups.append({"params": params, "weight_decay": weight_decay})
    return groups


def _parts(shard: Shard, rule: Rule) -> Iterator[tuple[float, StateSlice]]:
    """The elements of a shard that decay, and those that do not, as far as there are any, after
    their weight decay."""
    assert shard.grad is not None
    # Weights that decay come first in a shard.
    halves = (
        (rule.weight_decay, slice(0, shard.decaying)),
        (0.0, slice(shard.decaying, shard.master.numel())),
    )
    for decay, place in halves:
        if place.stop > place.start:
            moments = [shard.moment(name)[place] for name in rule.moments]
            yield decay, StateSlice(shard.master[place], shard.grad[place], moments)


def _views(
    shard: Shard, flats: Mapping[str, Tensor]
) -> Iterator[tuple[str, Box, bool, dict[str, Tensor]]]:
    """Of every box its views of these vectors; those of scales with a box of their own."""
    scale_kinds = [kind for kind in flats if kind.endswith(SCALE)]
    value_kinds = [kind for kind in flats if kind not in scale_kinds]
    for placed in shard.boxes:
        views = {kind: placed.values(flats[kind]) for kind in value_kinds}
        yield placed.name, placed.box, shard.owned, views

        if scale_kinds:
            # Two shards may have parts of a block: the one where it begins speaks for it.
            begun = blocks_starting_in(placed.box)
            place = begun.within(placed.blocks)
            scales = {kind: placed.scales(flats[kind])[place] for kind in scale_kinds}
            yield placed.name, begun, shard.owned, scales
