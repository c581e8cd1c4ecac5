"""What `hot_switch.py` calls in its ranks, and in a process that draws documents."""

import gzip
import importlib
import json
import resource
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from common import GIVE_BACK, give_freed_memory_back
from trial import Trial, build

from longshift.config_parts import Source
from longshift.dist.world import World
from longshift.documents.batch import StepBatch, document_from_ids
from longshift.layout.layout import Layout
from longshift.step.player import Player
from longshift.step.update import train_step

MIB = 2**20
CACHE = "~/.cache/longshift"  # as `data.cache`
REAL_LONGEST = 32768
STEP = 32  # tokens: CPU matmuls keep code for every shape, half a gigabyte for the documents of one step

Pairs = list[tuple[list[int], list[int]]]  # ids and labels of each document


# Documents


def documents(world: World, vocab: int, quick: bool, lengths: str | None, shrink: float, tokens: int, steps: int, seed: int) -> list[Pairs]:
    """Of each step: texts of the standard library, or of lengths that a file lists, cut to 1/shrink of at most REAL_LONGEST tokens and down
    to multiples of STEP."""
    from longshift.documents.tokenizer import (
        project_tokenizer,  # here: it starts threads, and the process that forks the ranks must have none
    )
    from longshift.documents.tokens import build as build_cache

    source = Source(path=f"{sysconfig.get_path('stdlib')}/[a-d]*.py") if quick else Source(corpus="python")
    texts = build_cache([source], project_tokenizer(CACHE, vocab), CACHE)
    own = texts.lengths if lengths is None else np.array(_read(Path(lengths)).split(), np.int64)
    wanted = np.maximum(2, np.minimum(own, REAL_LONGEST) / shrink).astype(np.int64)
    wanted -= np.where(wanted < STEP, 0, wanted % STEP)
    by_length = np.argsort(texts.lengths, kind="stable")
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        pairs = []
        for index in stratified(wanted, tokens, generator):
            length, text = int(wanted[index]), int(index)
            if lengths is not None:
                enough = int(np.searchsorted(texts.lengths[by_length], length))
                text = int(by_length[generator.integers(min(enough, len(by_length) - 1), len(by_length))])
            document = document_from_ids(texts.tokens(text, 0, length + 1).astype(np.int64), length)
            pairs.append((document.ids.tolist(), document.labels.tolist()))
        found.append(pairs)
    return found


def stratified(lengths: np.ndarray, tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Indices of documents, of about `tokens` together: one from each of equal parts of all, by length; shuffled."""
    count = max(1, round(tokens / lengths.mean()))
    places = ((np.arange(count) + generator.random(count)) / count * len(lengths)).astype(int)
    return generator.permutation(np.argsort(lengths, kind="stable")[places])


def _read(file: Path) -> str:
    return gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()


# Updates


@dataclass
class Session:
    """The one scheme of this process: `run` makes an update from a step of a file. Mutable."""

    base_mib: float
    run: Callable[[str, int], object]
    player: Player | None = None


@cache
def session(world: World, system: str, groups: tuple[tuple[int, str], ...], trial: str, give_back: int) -> Session:
    """Built on the first call; `trial` without documents."""
    give_freed_memory_back(give_back)
    base_mib = psutil.Process().memory_info().rss / MIB
    what = replace(Trial.from_json(json.loads(trial)), capacity=groups[-1][0], edges=tuple(upto for upto, _ in groups))
    if system == "longshift":
        state, player = build(what, [Layout.parse(layout) for _, layout in groups], world)
        return Session(base_mib, lambda path, number: train_step(state, steps(trial, path)[number], player), player)
    build_peer = importlib.import_module(f"peers.{system}").build
    made: dict[str, Callable[[int], float]] = {}

    def run(path: str, number: int) -> float:
        if path not in made:
            made[path] = build_peer(world, replace(what, given=json.loads(Path(path).read_text())), groups[-1][1])
        return made[path](number)

    return Session(base_mib, run)


@cache
def steps(trial: str, path: str) -> list[StepBatch]:
    return replace(Trial.from_json(json.loads(trial)), given=json.loads(Path(path).read_text())).batches()


def update(world: World, system: str, groups: list, trial: str, path: str, number: int, per_node: int, give_back: int = GIVE_BACK) -> dict:
    """One update from step `number` of a file: seconds until all ranks are done, this rank's peak memory above what it began with, seconds
    of switching with nothing else going on, and the groups as this rank saw them. `give_back`: see `give_freed_memory_back`."""
    world.per_node = per_node
    here = session(world, system, tuple((upto, layout) for upto, layout in groups), trial, give_back)
    ready = torch.zeros(1)
    world.everyone.all_reduce(ready)
    began = time.perf_counter()
    here.run(path, number)
    world.everyone.all_reduce(ready)
    seconds = time.perf_counter() - began
    unit = 1 if sys.platform == "darwin" else 1024
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB - here.base_mib
    visited = here.player.visited if here.player else []
    return {
        "seconds": seconds,
        "peak_mib": peak_mib,
        "exposed_s": sum(v.exposed_s for v in visited),
        "visited": [
            {"upto": v.group.hi, "layout": str(v.group.layout), "tokens": v.tokens, "seconds": v.seconds, "exposed_s": v.exposed_s}
            | {"hidden_s": v.hidden_s, "inter_node_mib": v.inter_node_bytes / MIB, "balance": v.group.balance}
            for v in visited
        ],
    }
