"""`longshift check`: a run's own model and documents under some layouts, against one process, in float64; and whether documents leak.

A leak is a loss that depends on what it must not see. For some target positions, every token after the position and every token of every
other document is replaced; the loss at the position must stay as it was.
"""

import math
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from longshift.config import Config, parse_config
from longshift.data.batch import Batches, Document
from longshift.dist.fork import ForkedWorld, SpawnedWorld
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.model.loss import IGNORE
from longshift.step.player import Player
from longshift.step.timeline import Timeline, predicted, rank_of, verdict
from longshift.step.update import train_step
from longshift.train.check import Trial, build
from longshift.train.corpus import open_corpus
from longshift.train.loop import build_player, build_state, open_data
from longshift.workload.groups import LengthGroup

MOST_TOKENS = 1024
LONGEST = 256
STEPS = 4  # from which documents are taken
PROBES = 6
ROWS = 8  # of differences that are shown
DEADLINE_S = 600.0


def check(config: Config, ways: Sequence[Sequence[Layout]], device: str = "cpu") -> dict:
    """Worst relative differences to one process, and leaked positions, over the ways to compute and for each: a layout, or those of the
    config's groups. Works on documents of the run's first steps, shortened to at most LONGEST and in all about MOST_TOKENS tokens, with the
    edges of the groups and the chunks in proportion, in processes on this machine: the reference on its CPU, the ways on devices of this
    type. What waits on disk does so in stream.folder, where that is given. Raises LongshiftError."""
    worlds = [_ranks(layouts[0].world, device, device) for layouts in ways]
    with tempfile.TemporaryDirectory(prefix="longshift-") as scratch:
        path = str(Path(scratch) / "truth.safetensors")
        with _ranks(1, "cpu", device) as alone:
            (trial,) = alone.call("longshift.train.check_run:trial_of", DEADLINE_S, config=config.to_yaml(), scratch=scratch)
            (loss,) = alone.call("longshift.train.check:write_reference", DEADLINE_S, trial=trial, path=path)
        rows = []
        for layouts, there in zip(ways, worlds):
            text, small = " > ".join(map(str, layouts)), [str(_in_proportion(layout, config.data.max_len)) for layout in layouts]
            with there as world:
                found = world.call("longshift.train.check:compare", DEADLINE_S, path=path, trial=trial, layout=" > ".join(small))
                leaks = [
                    world.call("longshift.train.check_run:leaks", DEADLINE_S, trial=trial, layout=layout)[0]
                    for layout in dict.fromkeys(small)
                ]
            worst = {kind: max(answer[kind] for answer in found) for kind in ("loss", "grad")}
            rows.append({"layout": text, **worst, **{what: sum(leak[what] for leak in leaks) for what in leaks[0]}})
    documents = trial["given"][0]
    return {
        "reference": "one process, float64",
        "documents": len(documents),
        "tokens": sum(len(ids) for ids, _ in documents),
        "reference_loss": loss,
        "loss": max(row["loss"] for row in rows),
        "grad": max(row["grad"] for row in rows),
        "leaked_positions": sum(row["leaked_positions"] for row in rows),
        "rows": rows,
    }


def _ranks(size: int, here: str, device: str) -> ForkedWorld:
    """A world on devices of type `here`; forked where no rank of the check uses a GPU."""
    return ForkedWorld(size) if device == "cpu" else SpawnedWorld(size, here)


def _in_proportion(layout: Layout, max_len: int) -> Layout:
    """The layout with a chunk that cuts the shortened documents in as many as its own cuts the run's."""
    if not layout.chunk or max_len <= LONGEST:
        return layout
    return replace(layout, chunk=max(layout.sequence, math.ceil(layout.chunk * LONGEST / max_len)))


def timeline(config: Config, device: str = "cpu") -> dict:
    """The first step of a run, played on devices of this type and recorded beside what the ledger predicts: peaks of every rank, and the
    largest differences in bytes after an operation. Raises LongshiftError."""
    with tempfile.TemporaryDirectory(prefix="longshift-") as scratch, _ranks(config.world, device, device) as world:
        found = world.call("longshift.train.check_run:recorded", DEADLINE_S, config=config.to_yaml(), scratch=scratch)
    rows = [{"rank": rank, **row} for rank, answer in enumerate(found) for row in answer.pop("differences")]
    rows.sort(key=rank_of)
    ranks = [{"rank": rank, **answer} for rank, answer in enumerate(found)]
    return {"within": all(answer["within"] for answer in found), "ranks": ranks, "differences": rows[:ROWS]}


def recorded(world: World, config: str, scratch: str) -> dict:
    """What `step.timeline.verdict` says of a run's first step on this rank."""
    run = parse_config(config)
    with Timeline(world.device) as seen:
        state = build_state(run, world)
        player = build_player(run, world, state, Path(scratch))
        batches, _ = open_data(run, world)
        batch = batches.at(state.cursor)
        seen.watch(player)
        train_step(state, batch, player)
        player.after = None
    return verdict(seen, predicted(player), ROWS)


def trial_of(world: World, config: str, scratch: str) -> dict:
    """One step of a run as a Trial, in JSON: documents of the first steps, shortened in proportion, one of every group if there is one.
    `scratch`: where the disk tier is, unless the run names a folder."""
    run = parse_config(config)
    _, cache = open_corpus(run)
    longest = min(run.data.max_len, LONGEST)
    share = longest / run.data.max_len
    edges, packs = [0], list[int]()
    for edge in run.edges[:-1]:
        edges.append(max(math.ceil(edge.upto * share), edges[-1] + 1))
        packs.append(max(math.ceil(edge.pack * share), edges[-1]))
    batches = Batches(cache, run.train.seed, run.train.tokens_per_step, run.data.max_len, run.data.overlong)
    batch = batches.at(0)
    documents = list(batch.documents)
    for _ in range(STEPS - 1):
        batch = batches.at(batch.next_cursor)
        documents += batch.documents
    documents = [_shorten(d, max(1, math.ceil(len(d.ids) * share))) for d in documents]
    firsts = {bisect_left(edges, len(d.ids)): d for d in reversed(documents)}
    step, tokens = [], 0
    for document in (*firsts.values(), *(d for d in documents if not any(d is first for first in firsts.values()))):
        if tokens < min(run.train.tokens_per_step, MOST_TOKENS):
            step.append((tuple(document.ids.tolist()), tuple(document.labels.tolist())))
            tokens += len(document.ids)
    options = {"planner": run.switch.planner, "bucket_bytes": run.switch.bucket, "ahead_bytes": run.switch.ahead}
    folder = run.model.path if run.model.init == "pretrained" else None
    how = {"capacity": 2 * longest, "seed": run.train.seed, "warmup": 0, "folder": folder, "edges": tuple(edges[1:])}
    how["packs"] = tuple(packs)
    how["stream_folder"] = run.stream.folder or scratch
    return Trial(run.spec, (), given=(tuple(step),), **how, **options).to_json()  # pyright: ignore[reportArgumentType]


def _shorten(document: Document, length: int) -> Document:
    labels = document.labels[:length].copy()
    labels[-1] = IGNORE
    return Document(document.ids[:length], labels)


def leaks(world: World, trial: dict, layout: str) -> dict[str, int]:
    """How many of some target positions see what they must not, under a layout."""
    what = Trial.from_json(trial)
    _, player = build(what, [Layout.parse(layout)], world)
    documents = what.batches()[0].documents
    random = np.random.default_rng(what.seed)
    targets = [(d, int(p)) for d, document in enumerate(documents) for p in np.flatnonzero(document.labels != IGNORE)]
    chosen = [targets[i] for i in np.linspace(0, len(targets) - 1, min(PROBES, len(targets))).astype(int)]
    leaked = 0
    for document, position in chosen:
        before, after = ([], [])
        for number, other in enumerate(documents):
            seen = position + 1 if number == document else 0
            labels = np.full_like(other.labels, IGNORE)
            if number == document:
                labels[position] = other.labels[position]
            noise = random.integers(0, what.spec.vocab, len(other.ids))
            before.append(Document(other.ids, labels))
            after.append(Document(np.where(np.arange(len(other.ids)) < seen, other.ids, noise), labels))
        leaked += _loss(player, before) != _loss(player, after)
    return {"leaked_positions": leaked, "probed_positions": len(chosen)}


def _loss(player: Player, documents: Sequence[Document]) -> float:
    """Loss sum of one pack, over all ranks; every replica computes it."""
    ((layout, runner),) = player.runners.items()
    pack = tuple(range(len(documents)))
    program = player.program(
        documents, [LengthGroup(0, sum(len(d.ids) for d in documents), layout, (pack,), ((0,),) * layout.dp, (0.0,))], 1.0
    )
    player.play(tuple(op for op in program if op.kind not in ("norm", "update")))
    player.home.drop_gradients()
    return float(player.world.everyone.all_reduce(runner.loss))
