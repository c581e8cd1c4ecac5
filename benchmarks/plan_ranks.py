"""What `plan_choice.py` calls in its ranks."""

import json
import resource
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import torch
from common import give_all_back, give_freed_memory_back
from trial import Trial, build

from longshift.dist.world import World
from longshift.documents.batch import StepBatch
from longshift.layout.layout import Layout
from longshift.step.player import Player
from longshift.step.update import State, train_step


@cache
def built(world: World, edges: tuple[tuple[int, str, int], ...], trial: str) -> tuple[State, Player, int]:
    """State and player of length groups, as (upto, layout, pack), and the bytes that the process had before."""
    base_bytes = psutil.Process().memory_info().rss
    packs = tuple(pack for _, _, pack in edges)
    what = replace(Trial.from_json(json.loads(trial)), capacity=packs[-1], edges=tuple(upto for upto, _, _ in edges), packs=packs)
    return *build(what, [Layout.parse(layout) for _, layout, _ in edges], world), base_bytes


@cache
def steps(trial: str, path: str) -> list[StepBatch]:
    return replace(Trial.from_json(json.loads(trial)), given=json.loads(Path(path).read_text())).batches()


def update(world: World, edges: list, trial: str, path: str, number: int, per_node: int, give_back: int) -> dict[str, float]:
    """One update from step `number` of a file: seconds until all ranks are done, and this rank's peak beyond what it began with. Freed
    memory of `give_back` bytes and more goes back at once, all else after the update: two hundred ranks sleep beside each other."""
    give_freed_memory_back(give_back)
    world.per_node = per_node
    state, player, base_bytes = built(world, tuple(tuple(edge) for edge in edges), trial)
    ready = torch.zeros(1)
    world.everyone.all_reduce(ready)
    began = time.perf_counter()
    train_step(state, steps(trial, path)[number], player)
    world.everyone.all_reduce(ready)
    seconds = time.perf_counter() - began
    give_all_back()
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - base_bytes}
