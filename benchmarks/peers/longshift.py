"""Longshift under the layout named by `variant`; after a comma, where home lies."""

from dataclasses import replace

from trial import Trial
from trial import build as build_trial

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.step.update import train_step
from peers.session import Step


def build(world: World, trial: Trial, variant: str) -> Step:
    layout, _, home = variant.partition(",")
    state, player = build_trial(replace(trial, home=home) if home else trial, [Layout.parse(layout)], world)
    batches = trial.batches()

    def step(number: int) -> float:
        return train_step(state, batches[number % len(batches)], player, leave=True).loss

    return step
