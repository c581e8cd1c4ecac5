"""What a rank does to compare homes: it trains a trial, and answers with the bits of its training state."""

import hashlib

import torch
from torch import Tensor

from longshift.dist.world import World
from longshift.state.home import Home
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.trainer.check import Trial, build, parse_layouts


def made(world: World, trial: Trial, layout: str) -> tuple[State, Player]:
    """State and player of a trial, whose switches are planned for nodes of two ranks."""
    world.per_node = min(2, world.size)
    return build(trial, parse_layouts(layout), world)


def bits(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def state_bits(state: State) -> dict[str, str]:
    """A digest of every master and moment that this rank has, by kind, name and box."""
    return {f"{kind} {name} {box}": bits(view) for name, box, _, views in state.optimizer.state() for kind, view in views.items() if box}


def in_memory(home: Home) -> int:
    """Bytes of what is on disk that are in memory."""
    vectors = (vector for shard in home.shards for vector in shard.vectors.values())
    return sum(vector.flat.nbytes for vector in vectors if vector.users or vector.memory.held)


def trained(world: World, trial: dict, layout: str) -> dict:
    """What a rank's home has after all steps; what the steps answered; how much of a home on disk was in memory after a step at the most;
    the bytes that the last step read and wrote."""
    state, player = made(world, what := Trial.from_json(trial), layout)
    outcomes, left = [], 0
    for batch in what.batches():
        outcomes.append(train_step(state, batch, player))
        left = max(left, in_memory(state.home))
    found = state_bits(state) | {"steps": str([(one.loss.hex(), one.grad_norm.hex(), one.skipped) for one in outcomes])}
    records = state.home.records
    moved = (records.read_bytes, records.written_bytes) if records else ()
    state.home.close()
    return {"bits": found, "left": left, "moved": moved}
