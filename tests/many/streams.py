"""What forked ranks do for test_streamed.py."""

from dataclasses import asdict

from longshift.dist.world import World
from longshift.layout.layout import Layout
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
