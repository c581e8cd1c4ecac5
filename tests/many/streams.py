"""What forked ranks do for test_streamed.py and test_boundaries.py."""

import weakref
from dataclasses import asdict

import torch
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.parallel.pipeline import play
from longshift.schedule.streamed import footprint
from longshift.train.check import Trial, build
from longshift.train.step import train_step


def moved_and_predicted(world: World, trial: dict, layout: str) -> tuple[dict, dict]:
    """What this rank's tier did in a step of one document, and the footprint of that document under the layout."""
    what = Trial.from_json(trial)
    state, team = build(what, [Layout.parse(layout)], world)
    (worker,), (batch,) = team.workers.values(), what.batches()
    assert worker.tier is not None
    train_step(state, batch, team)
    world.forget()
    predicted = footprint(what.spec, worker.layout, what.lengths[0], 8, what.ahead)
    return asdict(worker.tier.moved), asdict(predicted)


def pipelined(world: World, layout: str, micros: int) -> tuple[int, bool]:
    """Plays that many micro-batches. The most tensors of this rank's making that were alive at one time, and whether what arrived was what
    had been sent."""
    how = Layout.parse(layout)
    ranks = tuple(range(world.size))
    for direction in ("rising", "falling"):
        world.prepare([ranks], direction)
    made: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, right = 0, True

    def turn(micro: int, chunk: int, arrived: Tensor | None) -> Tensor:
        nonlocal most, right
        right = right and (arrived is None or bool((arrived == micro).all()))
        out = torch.full((3, 5), float(micro))
        made.add(out)
        most = max(most, len(made))
        return out

    up, down = (world.group(ranks, direction) for direction in ("rising", "falling"))
    play(how, how.coord(world.rank).pp, up, down, [(3, 5)] * micros, torch.zeros(1), turn, turn)
    world.forget()
    return most, right
