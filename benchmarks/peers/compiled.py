"""Longshift under the layout named by `variant`, with `train.compile`."""

from dataclasses import replace

from trial import Trial

from longshift.dist.world import World
from peers import longshift
from peers.session import Step


def build(world: World, trial: Trial, variant: str) -> Step:
    return longshift.build(world, replace(trial, compile=True), variant)
