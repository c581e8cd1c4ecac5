"""`longshift check`: a run's own model and documents under some layouts, against one process, in float64; and whether documents leak.

A leak is a loss that depends on what it must not see. For some target positions, every token after the position and every token of every
other document is replaced; the loss at the position must stay as it was.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longshift.config import Config, parse_config
from longshift.data.batch import Batches, Document
from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.model.loss import IGNORE
from longshift.train.check import Trial, build
from longshift.train.corpus import open_corpus
from longshift.train.team import Team

MOST_TOKENS = 1024
LONGEST = 256
PROBES = 6
DEADLINE_S = 600.0


def check(config: Config, ways: Sequence[Sequence[Layout]]) -> dict:
    """Worst relative differences to one process, and leaked positions, over the ways to compute and for each: a layout, or those of the
    config's groups. Works on the first documents of the run, pieces of at most LONGEST and in all about MOST_TOKENS tokens, with the edges
    of the groups in proportion, in forked processes on this machine. Raises LongshiftError."""
    with tempfile.TemporaryDirectory(prefix="longshift-") as scratch:
        path = str(Path(scratch) / "truth.safetensors")
        with ForkedWorld(1) as alone:
            (trial,) = alone.call("longshift.train.check_run:trial_of", DEADLINE_S, config=config.to_yaml())
            (loss,) = alone.call("longshift.train.check:write_reference", DEADLINE_S, trial=trial, path=path)
        rows = []
        for layouts in ways:
            text = " > ".join(map(str, layouts))
            with ForkedWorld(layouts[0].world) as world:
                found = world.call("longshift.train.check:compare", DEADLINE_S, path=path, trial=trial, layout=text)
                leaks = [
                    world.call("longshift.train.check_run:leaks", DEADLINE_S, trial=trial, layout=str(layout))[0]
                    for layout in dict.fromkeys(layouts)
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


def trial_of(world: World, config: str) -> dict:
    """One step of a run as a Trial, in JSON."""
    run = parse_config(config)
    _, cache = open_corpus(run)
    longest = min(run.data.max_len, LONGEST)
    tokens = min(run.train.tokens_per_step, MOST_TOKENS)
    batch = Batches(cache, run.train.seed, tokens, longest, "split", run.spec.vocab).at(0)
    step = tuple((tuple(d.ids.tolist()), tuple(d.labels.tolist())) for d in batch.documents)
    folder = run.model.path if run.model.init == "pretrained" else None
    edges: list[int] = []
    for edge in run.edges[:-1]:
        edges.append(max(-(-edge.upto * longest // run.data.max_len), edges[-1] + 1 if edges else 1))
    options = {"planner": run.switch.planner, "bucket_bytes": run.switch.bucket, "ahead_bytes": run.switch.ahead}
    how = {"capacity": 2 * longest, "seed": run.train.seed, "warmup": 0, "folder": folder, "edges": tuple(edges)}
    return Trial(run.spec, (), given=(step,), **how, **options).to_json()  # pyright: ignore[reportArgumentType]


def leaks(world: World, trial: dict, layout: str) -> dict[str, int]:
    """How many of some target positions see what they must not, under a layout."""
    what = Trial.from_json(trial)
    _, team = build(what, [Layout.parse(layout)], world)
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
        leaked += _loss(team, before) != _loss(team, after)
    return {"leaked_positions": leaked, "probed_positions": len(chosen)}


def _loss(team: Team, documents: Sequence[Document]) -> float:
    """Loss sum of one pack, over all ranks; every replica computes it."""
    (worker,) = team.workers.values()
    team.begin()
    return float(team.world.everyone.all_reduce(worker.run([documents], 1.0)))
