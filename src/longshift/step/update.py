"""One training step, on one screen.

The only divisor is the step's global count of target tokens, known before the first forward.
Micro-batch identity travels with the data: packs are a function of the batch alone, and a layout
decides only who computes which.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longshift.dist.world import World
from longshift.documents.batch import Document, StepBatch
from longshift.errors import NonFiniteError
from longshift.spec.model import ModelSpec
from longshift.state.home import Home
from longshift.state.moments import SCALE
from longshift.state.optimizer import Optimizer, Schedule
from longshift.state.precision import LossScale
from longshift.step.player import Player, Ready


@dataclass
class State:
    """All that a step changes. Mutable; what a checkpoint holds."""

    spec: ModelSpec
    home: Home
    optimizer: Optimizer
    schedule: Schedule
    clip: float | None
    scale: LossScale | None = None
    cursor: int = 0
    base: int | None = None  # of `state.initial_weights.fingerprint`


@dataclass(frozen=True)
class Outcome:
    """What a step did: mean loss over target tokens, global gradient norm before the clip, learning
    rate, and whether a float16 overflow made it leave the weights alone."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool


def train_step(
    state: State, batch: StepBatch, player: Player, ready: Ready | None = None, leave: bool = False
) -> Outcome:
    """Make one exact update from `batch`: each group of lengths under its layout, each layout
    visited once. `ready`: of the batch's documents, made here where not given. `leave`: leave what
    can be updated under the next forward to the next step, or to `player.finish`. Raises
    NonFiniteError; home is then as before."""
    outcome: Outcome | None = None
    scale = state.scale.scale if state.scale else 1.0
    program = player.take(
        ready or player.ready(batch.documents), scale / max(1, batch.target_tokens)
    )

    def update(unit: int, early: bool, loss_sum: float, squared_norm: float) -> bool:
        nonlocal outcome
        if early:
            state.optimizer.update_early(unit, state.schedule.at(state.optimizer.steps))
        elif unit < 0:
            outcome = _update(state, batch, player.world, scale, loss_sum, squared_norm)
        else:
            state.optimizer.update_unit(unit)
        return state.optimizer.unclipped

    player.play(program, update)
    if not leave:
        player.finish()
    assert outcome is not None
    return outcome


def score(documents: Sequence[Document], player: Player) -> float:
    """The loss sum of documents under their layouts, in nats; collective. Nothing is learned."""
    player.play(player.take(player.ready(documents, learns=False), None))
    return player.sums[0]


def _update(
    state: State, batch: StepBatch, world: World, scale: float, loss_sum: float, squared_norm: float
) -> Outcome:
    """Clip by the global norm and update home, or leave it where float16 has overflowed. Units on
    disk follow."""
    # 1. Loss and norm. A step without target tokens has no loss, and its gradients are zero.
    loss = loss_sum / max(1, batch.target_tokens)
    norm = squared_norm**0.5 / scale
    is_finite = math.isfinite(norm) and math.isfinite(loss)

    # 2. The update. A float16 overflow skips it, unless the loss scale can go no lower.
    lr = state.schedule.at(state.optimizer.steps)
    if is_finite:
        factor = min(1.0, state.clip / (norm + 1e-6)) if state.clip else 1.0
        state.optimizer.update(lr, factor / scale)
    elif state.scale is None or state.scale.scale == 1.0:
        state.optimizer.take_back()
        culprit = _culprit(state, world, batch, loss)
        state.home.drop_gradients()
        raise NonFiniteError(culprit)
    else:
        state.optimizer.skip()

    # 3. What the next step begins with.
    if state.scale:
        state.scale.update(is_finite)
    state.cursor = batch.next_cursor
    return Outcome(loss, norm, lr, skipped=not is_finite)


def not_finite(state: State, world: World) -> str | None:
    """The first of the weights, in canonical order, and then of their moments, that is not finite
    on some rank, in the same words on all ranks; collective. None where all are."""
    suspects = [
        f"{kind} of {p.name}"
        for kind in ("master", *state.home.moments)
        for p in state.spec.params
        if not p.frozen
    ]
    culprits = [
        f"{kind.removesuffix(SCALE)} of {name}"
        for name, box, _, views in state.optimizer.state()
        for kind, view in (views.items() if box else ())
        # Codes of eight bits are all finite; their scales say what they stand for.
        if view.itemsize > 1 and not view.isfinite().all()
    ]
    first = _first(world, suspects, culprits)
    return first and first[0]


def _culprit(state: State, world: World, batch: StepBatch, loss: float) -> str:
    """The first weight, in canonical order, and the lowest rank where a master is not finite, else
    a gradient; the same words on every rank."""
    names = [p.name for p in state.spec.params]
    first = _first(
        world,
        [*names, *(f"the gradient of {name}" for name in names)],
        [
            *state.home.not_finite("master"),
            *(f"the gradient of {name}" for name in state.home.not_finite("grad")),
        ],
    )
    culprit = f"{first[0]} at home on rank {first[1]}" if first else "nothing at home"
    return (
        f"loss {loss}; not finite: {culprit}. Documents {batch.cursor} to"
        f" {batch.next_cursor - 1} of the shuffled order. Nothing was updated. A lower train.lr,"
        " more train.warmup or train.precision=float32 are the usual cures."
    )


def _first(
    world: World, suspects: Sequence[str], culprits: Sequence[str]
) -> tuple[str, int] | None:
    """The first suspect that is a culprit on some rank, and the lowest such rank; collective."""
    number = min(map(suspects.index, culprits), default=len(suspects))
    code = torch.tensor(number * world.size + world.rank, device=world.device)
    number, rank = divmod(int(world.everyone.all_reduce(code, dist.ReduceOp.MIN)), world.size)
    return (suspects[number], rank) if number < len(suspects) else None
