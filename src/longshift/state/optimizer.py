"""The update at home, by one of the rules of `spec.rule`, after one global clip, and the
learning-rate schedule.

torch's fused kernels, or a rule of the user's own, run over the flat vectors of home: norms and
biases do not decay. The gradient norm is one number for the whole model: every element counts once,
whatever the layout."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from longshift.layout.blocks import blocks_starting_in, scales_of
from longshift.layout.box import Box
from longshift.spec.formats import MomentFormat
from longshift.spec.model import ModelSpec
from longshift.spec.rule import Rule
from longshift.state.home import Home, Shard
from longshift.state.moments import SCALE, converted
from longshift.state.records import in_memory
from longshift.state.user_rule import RuleOptimizer, checked_rule, update_in_pieces

Read = Callable[[str, str, Box], Tensor]


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
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        factor = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.min_lr + (self.lr - self.min_lr) * factor


@dataclass(frozen=True)
class Part:
    """Elements of a shard that decay alike, and views of its vectors there. `updates`: how many
    AdamW has made of them, a scalar."""

    shard: Shard
    place: slice
    decay: float
    master: Tensor
    moments: Sequence[Tensor]
    updates: Tensor


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
        self._left: set[int] = set()  # units that the last update has not reached
        self._early: set[int] = set()  # units that were updated before this step's norm was known
        self._parts: list[Part] = []
        for shard in home.learning:
            for vector in shard.vectors.values():
                vector.hold()
            for moment in shard.packed.values():
                moment.memory.hold()
            for place, decay in _halves(shard, rule):
                moments = [shard.moment(name)[place] for name in rule.moments]
                updates = torch.tensor(0.0, device=shard.master.device)
                self._parts.append(Part(shard, place, decay, shard.master[place], moments, updates))
            for vector in shard.vectors.values():
                vector.evict()
            for moment in shard.packed.values():
                moment.memory.drop()

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
            self._begin(self._early)
            self._early = set()
        else:
            self.take_back()
            self._begin()

    @property
    def unclipped(self) -> bool:
        """Whether the last update took the gradients as they were."""
        return self._factor == 1.0

    def skip(self) -> None:
        """Drop the gradients at home, and change nothing."""
        self._factor = None
        self.take_back()
        self.home.drop_gradients()
        self._begin()

    def take_back(self) -> None:
        """Let early updates not have been."""
        shards = {id(shard) for shard in self._of(self._early)}
        for part in self._parts:
            if id(part.shard) in shards:
                part.updates.sub_(1)
        self._early = set()

    def _begin(self, updated: Collection[int] = ()) -> None:
        if self.home.by_unit:
            self._left = {shard.bucket.unit for shard in self.home.learning}.difference(updated)
        else:
            self._update(self.home.learning)

    def _of(self, units: Collection[int]) -> list[Shard]:
        return [shard for shard in self.home.learning if shard.bucket.unit in units]

    def update_early(self, unit: int, lr: float) -> None:
        """The part of the next update for a unit on disk, as if its factor were 1. Masters and
        moments are in memory, and go to second places in the file. Gradients stay, for an update
        with another factor would take them."""
        self._apply(self._of({unit}), lr, 1.0, self.steps + 1)
        self._early.add(unit)

    def update_unit(self, unit: int) -> None:
        """The part of the last update, or of what was skipped, for a unit of a home that is updated
        by unit; of one on disk, records have been read. Moments that are packed stay unpacked until
        `pack`."""
        if self._factor is not None and self.home.packed != "float32":
            self.home.unpack(unit, self.steps)
        self._update(self._of({unit}))
        self._left.remove(unit)

    def _update(self, shards: Sequence[Shard]) -> None:
        if self._factor is not None:
            self._apply(shards, self._lr, self._factor, self.steps)
        for shard in shards:
            shard.grad = None

    def _apply(self, shards: Sequence[Shard], lr: float, factor: float, step: int) -> None:
        """The update of number `step`, from 1, with the gradients of some shards times `factor`."""
        grads = {id(shard): shard.grad for shard in shards}
        if factor != 1.0 and not self._divides:
            for grad in grads.values():
                if grad is not None:
                    grad.mul_(factor)
            factor = 1.0
        # A fused kernel takes tensors of one device and one weight decay.
        groups: dict[tuple[float, torch.device], list[tuple[Part, Tensor]]] = {}
        for part in self._parts:
            grad = grads.get(id(part.shard))
            if grad is not None:
                key = (part.decay, part.master.device)
                groups.setdefault(key, []).append((part, grad[part.place]))
        for (decay, _), pairs in groups.items():
            if self.rule.is_user_rule:
                _own_update(self.rule, lr, decay, pairs, step)
            else:
                _fused(self.rule, lr, decay, pairs, factor)

    def resume(self, steps: int) -> None:
        """Take `steps` as done: AdamW's bias correction depends on it."""
        self.steps = steps
        for part in self._parts:
            part.updates.fill_(float(steps))

    def state(self, changing: bool = False) -> Iterator[tuple[str, Box, bool, dict[str, Tensor]]]:
        """Every trained weight and box at home, whether this rank speaks for it, and its views of
        "master" and of each moment; packed ones are codes, and their scales, "MOMENT.scale", follow
        with boxes of blocks. Of what is on disk they are copies that last; or, where it is for
        `changing` them, they last until the next is asked for. Scales are of blocks that begin in
        the shard's boxes; for `changing` them, of all that it has a part of."""
        assert not self._left | self._early, (
            f"units {sorted(self._left | self._early)} are not updated yet"
        )
        for shard in self.home.learning:
            flats = {kind: shard.vectors[kind].flat for kind in ("master", *self.home.saved)}
            with in_memory([shard.vectors[kind] for kind in flats], changing):
                if changing or not shard.on_disk:
                    yield from _views(shard, flats, changing)
                    continue
                copies = {kind: flat.clone() for kind, flat in flats.items()}
            yield from _views(shard, copies, changing)

    def restore(self, read: Read, was: MomentFormat) -> None:
        """Take the moments of a checkpoint that keeps them in this format; masters are there.
        `read`: values of a kind, weight and box."""
        for name, box, _, views in self.state(changing=True):
            for kind in self.home.moments if box else ():
                if was == self.home.packed:
                    values = read(kind, name, box)
                    scales = read(kind + SCALE, name, scales_of(box)) if was == "float8" else None
                else:
                    values, scales = converted(
                        read=partial(_of_weight, read, name),
                        kind=kind,
                        box=box,
                        shape=self.home.spec.by_name[name].shape,
                        was=was,
                        now=self.home.packed,
                        dtype=self.home.shards[0].master.dtype,
                    )
                views[kind].copy_(values)
                if scales is not None:
                    views[kind + SCALE].copy_(scales)


def _of_weight(read: Read, name: str, kind: str, box: Box) -> Tensor:
    return read(kind, name, box)


def _fused(
    rule: Rule, lr: float, decay: float, pairs: Sequence[tuple[Part, Tensor]], factor: float
) -> None:
    """Update parts of one device that decay alike by their gradients times `factor`. These are the
    kernels of torch.optim, which imports torch's compiler: 1.3 s."""
    masters = [part.master for part, _ in pairs]
    grads = [grad for _, grad in pairs]
    moments = [list(column) for column in zip(*(part.moments for part, _ in pairs))]
    # The kernels divide gradients by this number.
    divisor = (
        None
        if factor == 1.0
        else torch.tensor(1.0 / factor, dtype=torch.float32, device=masters[0].device)
    )
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
        updates = [part.updates for part, _ in pairs]
        torch._foreach_add_(updates, 1)
        torch._fused_adamw_(
            masters,
            grads,
            first,
            second,
            [],  # largest second moments, of AMSGrad
            updates,
            lr=lr,
            weight_decay=decay,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )


def _own_update(
    rule: Rule, lr: float, decay: float, pairs: Sequence[tuple[Part, Tensor]], step: int
) -> None:
    """Update parts that decay alike by a rule of the user's own."""
    own_rule = checked_rule(rule.name)
    for part, grad in pairs:
        moments = dict(zip(rule.moments, part.moments))
        update_in_pieces(own_rule, part.master, grad, moments, step, lr, decay)


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
    decays: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, weight in weights.items():
        decays[spec.by_name[name].decay].append(weight)
    return [
        {"params": decays[True], "weight_decay": rule.weight_decay},
        {"params": decays[False], "weight_decay": 0.0},
    ]


def _halves(shard: Shard, rule: Rule) -> list[tuple[slice, float]]:
    """The elements that decay, and those that do not, as far as there are any, with their weight
    decay."""
    halves = [
        (slice(0, shard.decaying), rule.weight_decay),
        (slice(shard.decaying, shard.master.numel()), 0.0),
    ]
    return [(place, decay) for place, decay in halves if place.stop > place.start]


def _views(
    shard: Shard, flats: Mapping[str, Tensor], changing: bool
) -> Iterator[tuple[str, Box, bool, dict[str, Tensor]]]:
    """Of every box its views of these vectors; those of scales together with them where `changing`,
    else with a box of their own."""
    start = first = 0
    for name, box in shard.boxes:
        blocks = scales_of(box)
        views = {}
        scales = {}
        for kind, flat in flats.items():
            if kind.endswith(SCALE):
                scales[kind] = flat[first:][: blocks.elements].view(blocks.shape)
            else:
                views[kind] = flat[start:][: box.elements].view(box.shape)
        yield name, box, shard.owned, views | (scales if changing else {})
        if scales and not changing:
            # Two shards may have parts of a block: the one where it begins speaks for it.
            begun = blocks_starting_in(box)
            yield (
                name,
                begun,
                shard.owned,
                {kind: view[begun.within(blocks)] for kind, view in scales.items()},
            )
        start += box.elements
        first += blocks.elements
