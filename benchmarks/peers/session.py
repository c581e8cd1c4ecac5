"""What every system is given and how it is timed.

A system is a module of this package with `build(world, trial, variant) -> Step`. It lives in its own pair of forked processes from its
first block to its last, and only one pair computes at a time.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import psutil
import torch
from torch import Tensor, nn
from trial import Trial

from longshift.dist.world import World
from longshift.documents.batch import StepBatch
from longshift.documents.micro import micro_batch
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.model.decoder import MicroBatch
from longshift.spec.model import ModelSpec
from longshift.state.optimizer import decay_groups, torch_optimizer
from longshift.workload.groups import cost, pack, shares

Step = Callable[[int], float]  # update number -> mean loss over the target tokens of all ranks, before the update
MIB = 2**20


@dataclass(frozen=True)
class Session:
    """One rank of one system, built. `base_mib`: resident before it was, the imports of all systems included."""

    step: Step
    base_mib: float


@cache
def session(world: World, system: str, variant: str, trial: str) -> Session:
    """The rank's session: made on the first block, kept by the process."""
    os.dup2(2, 1)  # standard output belongs to the benchmark's result; some systems print
    base_mib = psutil.Process().memory_info().rss / MIB
    build = importlib.import_module(f"peers.{system}").build
    return Session(build(world, Trial.from_json(json.loads(trial)), variant), base_mib)


def block(world: World, system: str, variant: str, trial: str, first: int, steps: int) -> dict:
    """Updates `first` to `first + steps - 1`: their seconds, all ranks done, this rank's processor seconds, their losses, and the rank's
    peak memory so far."""
    here = session(world, system, variant, trial)
    ready = torch.zeros(1)
    world.everyone.all_reduce(ready)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    losses = [here.step(first + i) for i in range(steps)]
    cpu_s = time.process_time() - begin_cpu
    world.everyone.all_reduce(ready)
    seconds = time.perf_counter() - begin
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
    return {"seconds": seconds, "cpu_s": cpu_s, "losses": losses, "peak_mib": peak, "base_mib": here.base_mib}


def pose_as_launched(world: World) -> None:
    """Set this process's environment as torchrun would have, for systems that insist on reading it."""
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})


def weights(trial: Trial) -> dict[str, Tensor]:
    """Initial float32 weights by canonical name, the same for all systems."""
    source = trial.source()
    return {p.name: source(p.name, Box.whole(p.shape)).float().clone() for p in trial.spec.params}


def adamw(trial: Trial, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """torch's fused AdamW; norms do not decay, as in Longshift."""
    groups = [{**group, "lr": trial.lr} for group in decay_groups(trial.spec, trial.rule, params)]
    return torch_optimizer(trial.rule, groups, fused=True)


def micro_batches(trial: Trial, batch: StepBatch, world: World, dtype: torch.dtype) -> Iterator[MicroBatch]:
    """This data-parallel rank's packs of a step: those that Longshift gives to the same rank of dp2, as many on every rank; where there
    are no more, a token without a target."""
    lengths = [len(document.ids) for document in batch.documents]
    packs = pack(lengths, trial.capacity)
    deal = shares([cost([lengths[i] for i in p], trial.spec) for p in packs], world.size)
    own = [packs[p] for p in deal[world.rank]]
    for documents in (*own, *[()] * (max(map(len, deal)) - len(own))):
        yield micro_batch(trial.spec, [batch.documents[i] for i in documents], Layout(), 0, dtype, world.device)


def small_llama(width: int, layers: int, vocab: int) -> ModelSpec:
    """A Llama with grouped queries: heads of 32, two query heads to a key/value head, feed-forward width 11/4 of the model's."""
    heads = width // 32
    return ModelSpec("llama", vocab, width, layers, heads, heads // 2, 32, width * 11 // 4, 4096, norm_eps=1e-5)
