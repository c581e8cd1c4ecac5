"""`longshift check`: a run's own model and documents under some layouts, against one process, in float64; and whether documents leak.

The run is made small, all of it in proportion: the longest document, the edges of its groups, their packs, chunks, windows and blocks of
rows. Then every part of every layout has work: every group, every replica several packs, every stage several micro-batches, every chunked
layout documents of several chunks, every window documents that are longer. The norm is clipped in every second step; of a home on disk
that is updated before the norm, such updates are kept in one step and taken back in another. What a config has beyond that is named.

Each stage of `train.stages` is checked by itself. Labels of the run's first documents, and of pieces of documents, are compared with the
tokens that they were cut from.

A leak is a loss that depends on what it must not see. For some target positions, every token after the position and every token of every
other document is replaced; the loss at the position must stay as it was.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longshift.command_results import Checked, CheckedLayout, MemoryCheck, MemoryDifference, RankPeak
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.dist.fork import ForkedWorld, SpawnedWorld
from longshift.dist.memory import host_memory
from longshift.dist.world import World
from longshift.documents.batch import Batches, Document
from longshift.errors import OutOfMemoryError
from longshift.files import temporary_folder
from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.model.loss import IGNORE
from longshift.spec.formats import EIGHT_BITS, FORMATS
from longshift.spec.model import ModelSpec
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.switch.itinerary import Itinerary, SwitchOptions
from longshift.switch.links import Links
from longshift.trainer.build_run import build_player, build_state, open_data
from longshift.trainer.check import Trial, build
from longshift.trainer.corpus import open_corpus
from longshift.weigh.needs import StepShape, most, needs
from longshift.weigh.timeline import Timeline, predicted, rank_of, verdict
from longshift.workload.groups import Edge, LengthGroup

MOST_TOKENS = 8192  # of a group, where its documents need not be longer
LONGEST = 128  # tokens of the longest document, at the most, and LEAST for each rank that shares its sequence
LEAST = 8
CHUNKS = 4  # of the longest document, at the least
NORMS = 1e9, 1e-3  # largest norm of each step: the first is not clipped, the second is, and shows what was not brought up to date
EARLY_NORMS = (
    *NORMS,
    1e9,
    1e9,
)  # an update before the norm follows a step that was not clipped: taken back in the second, kept in the fourth
PIECES = 64  # of cut documents, whose labels are compared
MOST_READ = 64  # steps of the run from which documents are taken, at the most
TOLERANCE = 1e-9  # relative: float64 rounds at 1e-16, and sums of a deep model's many terms differ by their order
KINDS = ("loss", "grad", "weight", "optimizer")  # that are compared
PROBES = 6
PROBED_TOKENS = 512
ROWS = 8  # of differences that are shown
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Small:
    """A run made small. `longest`: tokens of its longest document; `edges`, `packs`: of its groups, from short documents to long;
    `replicas` of a layout, and `micros` of each, at the most; `loss_rows` that have logits at one time; `window` of its blocks."""

    longest: int
    edges: tuple[int, ...]
    packs: tuple[int, ...]
    replicas: int
    micros: int
    loss_rows: int
    window: int | None = None

    @classmethod
    def of(cls, config: Config, ways: Sequence[Sequence[Layout]]) -> "Small":
        """A run in proportion, as long as all of these ways to compute need."""
        layouts = [layout for way in ways for layout in way]
        replicas = max(layout.dp for layout in layouts)
        micros = max(layout.pp + 1 for layout in layouts)
        sharing = max(layout.sequence * layout.tp for layout in layouts)
        longest = max(LEAST * sharing, min(LONGEST, MOST_TOKENS // (2 * replicas * micros)))
        longest = min(config.data.max_len, longest)
        share, edges, packs = longest / config.data.max_len, [0], list[int]()
        for edge in config.edges[:-1]:
            edges.append(max(math.ceil(edge.upto * share), edges[-1] + 1))
            packs.append(max(math.ceil(edge.pack * share), edges[-1]))
        longest = max(longest, edges[-1] + 1)
        window = config.spec.sliding_window
        if window is not None and window < config.data.max_len:
            window = min(math.ceil(window * share), longest - 1)
        small = cls(longest, (*edges[1:], longest), (*packs, 2 * longest), replicas, micros, config.spec.loss_rows, window)
        return replace(small, loss_rows=min(small._loss_rows(config, ways), default=small.loss_rows))

    def spec(self, config: Config) -> ModelSpec:
        """The run's model, with its windows, and blocks of rows of logits, in proportion."""
        return replace(config.spec, sliding_window=self.window, loss_rows=self.loss_rows)

    def layouts(self, config: Config, way: Sequence[Layout]) -> list[Layout]:
        """The layouts of a way with chunks that cut the longest documents of their groups as often as the run's own, CHUNKS times at the
        least. A single layout computes all groups."""
        longest = [edge.upto for edge in config.edges] if len(way) > 1 else [config.data.max_len]
        small_edges = self.edges[-len(way) :]  # a single layout has the last group's
        return [_in_proportion(*each) for each in zip(way, small_edges, longest, strict=True)]

    def _loss_rows(self, config: Config, ways: Sequence[Sequence[Layout]]) -> Iterator[int]:
        """For each group whose loss the run computes in several blocks of rows: how many rows make a few blocks here."""
        for way in ways:
            first = len(config.edges) - len(way)
            groups = zip(way, config.edges[first:], self.layouts(config, way), self.packs[first:])
            for layout, edge, small_layout, small_pack in groups:
                if loss_blocks(config.spec, (layout.chunk or edge.pack) // layout.sequence) > 1:
                    yield max(1, (small_layout.chunk or small_pack) // small_layout.sequence // CHUNKS)

    def lengths(self) -> list[int]:
        """Lengths of documents that give every replica `micros` packs of every group, the longest there may be among them."""
        found, low = list[int](), 0
        for edge, pack in zip(self.edges, self.packs):
            own = [edge]
            while sum(own) < self.replicas * self.micros * pack:
                own += [low + 1 + (edge - low) // 2, edge, low + 1]
            found, low = [*found, *own], edge
        return found


class StageCheck(NamedTuple):
    """What is known of a stage: a row for each way, the documents and tokens of its first step, the loss of the reference's last step, and
    how many labels of the stage's own documents are wrong."""

    rows: list[dict]
    documents: int
    tokens: int
    loss: float
    wrong_labels: int


def check(stages: Sequence[tuple[Config, Sequence[Sequence[Layout]]]], device: str = "cpu") -> Checked:
    """Worst relative differences to one process, leaked positions and wrong labels, over the stages of a run and the ways to compute each:
    a layout, or those of the stage's groups; and whether all are within TOLERANCE. Works on documents of each stage's first steps, made
    small (`Small`), in processes on this machine: the reference on its CPU, the ways on devices of this type. What waits on disk does so in
    stream.folder, where that is given. Raises LongshiftError, OutOfMemoryError where there is no room for it."""
    for config, ways in stages:
        _make_room(config, Small.of(config, ways), ways, device)
    results = [_check_stage(config, ways, device) for config, ways in stages]
    rows = [CheckedLayout(stage=number, **row) for number, result in enumerate(results, 1) for row in result.rows]
    worst = {kind: max((getattr(row, kind) for row in rows), key=lambda value: (math.isnan(value), value)) for kind in KINDS}
    leaked = sum(row.leaked_positions for row in rows)
    wrong = sum(result.wrong_labels for result in results)
    run = stages[0][0]
    return Checked(
        reference="one process, float64" + f"; {EIGHT_BITS}" * run.formats.float8,
        documents=sum(result.documents for result in results),
        tokens=sum(result.tokens for result in results),
        reference_loss=results[-1].loss,
        **worst,
        leaked_positions=leaked,
        wrong_labels=wrong,
        tolerance=TOLERANCE,
        passed=all(value <= TOLERANCE for value in worst.values()) and not leaked and not wrong,
        not_exercised=tuple(not_exercised(stages)),
        rows=tuple(rows),
    )


def _check_stage(config: Config, ways: Sequence[Sequence[Layout]], device: str) -> StageCheck:
    small = Small.of(config, ways)
    texts = [" > ".join(map(str, small.layouts(config, way))) for way in ways]
    worlds = [_ranks(layouts[0].world, device, device) for layouts in ways]
    with temporary_folder() as scratch:
        path = str(scratch / "truth.safetensors")
        with _ranks(1, "cpu", device) as alone:
            here = {"config": config.to_yaml(), "scratch": str(scratch), "small": asdict(small)}
            (trial,) = alone.call("longshift.trainer.check_run:trial_of", DEADLINE_S, **here)
            (wrong,) = alone.call("longshift.trainer.check_run:wrong_labels", DEADLINE_S, config=config.to_yaml())
            (loss,) = alone.call("longshift.trainer.check:write_reference", DEADLINE_S, trial=trial, path=path)
        rows = []
        for layouts, text, there in zip(ways, texts, worlds):
            with there as world:
                found = world.call("longshift.trainer.check:compare", DEADLINE_S, path=path, trial=trial, layout=text)
                leaks = [
                    world.call("longshift.trainer.check_run:leaks", DEADLINE_S, trial=trial, layout=layout)[0]
                    for layout in dict.fromkeys(text.split(" > "))
                ]
            row = {"layout": " > ".join(map(str, layouts)), "computed": text}
            row |= {kind: max(answer[kind] for answer in found) for kind in KINDS}
            rows.append(row | {what: sum(leak[what] for leak in leaks) for what in leaks[0]})
    documents = trial["given"][0]
    return StageCheck(rows, len(documents), sum(len(ids) for ids, _ in documents), loss, wrong)


def not_exercised(stages: Sequence[tuple[Config, Sequence[Sequence[Layout]]]]) -> list[str]:
    """What a run has that its check does not compute, with the reason where it is not plain, a line each."""
    run = stages[0][0]
    train, home = run.train, run.home
    lines = [
        (train.precision not in ("float64", "float8"), f"train.precision: {train.precision} (float64 instead)"),
        (train.precision == "float8", "train.precision: float8's bf16 (float64 instead, with factors of eight bits)"),
        (home.moments != "float32", f"home.moments: {home.moments} (kept whole)"),
        (run.wire.gradients != "float32", f"wire.gradients: {run.wire.gradients} (sent whole)"),
        (run.wire.weights != "compute", f"wire.weights: {run.wire.weights} (sent whole)"),
        (len(stages) > 1, "train.stages: the checkpoint between two stages (each begins with weights of its own)"),
        (True, "train.lr, train.warmup, train.schedule (a short cosine of its own)"),
        (bool(run.model.lora and run.model.lora.init_from), "model.lora.init_from (adapters are drawn)"),
        (run.data.valid is not None or run.data.held_out is not None, "validation"),
    ]
    found = [line for there, line in lines if there]
    for number, (config, _) in enumerate(stages, 1):
        where = f"stage {number}: " if len(stages) > 1 else ""
        window = config.spec.sliding_window
        if window is not None and window >= config.data.max_len:
            found.append(f"{where}windows of {window} tokens (documents have {config.data.max_len} at the most)")
    return list(dict.fromkeys(found))


def wrong_labels(world: World, config: str) -> int:
    """How many tokens and labels of a run's first documents, and of its first pieces of cut ones, are not what the tokens on disk say: a
    label is the token that follows in the whole document, where that is learned."""
    run = parse_config(config)
    _, cache = open_corpus(run)
    batches = Batches.of(run, cache)
    cuts = batches.spans
    pieces = np.flatnonzero(cuts.stop - cuts.start < cache.lengths[cuts.document])[:PIECES]
    first = batches.at(0)
    wrong = 0
    for span in {*pieces.tolist(), *(batches.order[cursor] for cursor in range(first.cursor, first.next_cursor))}:
        number, start, stop = (int(of[span]) for of in (cuts.document, cuts.start, cuts.stop))
        whole, learned, found = cache.tokens(number), cache.learned(number), batches.document(span)
        labels = np.append(whole[1:], IGNORE).astype(np.int64)
        if learned is not None:
            labels[:-1][learned[1:] == 0] = IGNORE
        pairs = ((found.ids, whole[start:stop]), (found.labels, labels[start:stop]))
        wrong += sum(int((ours != truth).sum()) if len(ours) == len(truth) else len(truth) for ours, truth in pairs)
    return wrong


def _ranks(size: int, here: str, device: str) -> ForkedWorld:
    """A world on devices of type `here`; forked where no rank of the check uses a GPU."""
    return ForkedWorld(size) if device == "cpu" else SpawnedWorld(size, here)


def _in_proportion(layout: Layout, longest: int, of_run: int) -> Layout:
    """The layout with a chunk that cuts the longest small document in as many as its own cuts the run's, and in CHUNKS at the least."""
    if not layout.chunk:
        return layout
    chunk = min(math.ceil(layout.chunk * longest / of_run), longest // CHUNKS)
    return replace(layout, chunk=max(layout.sequence, chunk))


def _make_room(config: Config, small: Small, ways: Sequence[Sequence[Layout]], device: str) -> None:
    """Raises OutOfMemoryError where this machine's memory does not hold the reference, or what the ranks of a way have together."""
    asked: list[tuple[str, Sequence[Layout], int]] = [("one process", [Layout()], 1)]
    if device == "cpu":
        asked += [(" > ".join(map(str, way)), small.layouts(config, way), way[0].world) for way in ways]
    free = host_memory()[1]
    for name, layouts, ranks in asked:
        ends, packs = (small.edges, small.packs) if len(layouts) > 1 else (small.edges[-1:], small.packs[-1:])
        edges = tuple(Edge(*each) for each in zip(ends, layouts, packs))
        links = Links(ranks, 1.0, 1.0)
        way = Itinerary(small.spec(config), edges, links, 8, 8, SwitchOptions())
        formats = replace(FORMATS["float64"], float8=config.formats.float8)
        shape = StepShape(way, edges, formats, sum(small.lengths()), small.longest)
        need = ranks * most(needs(shape, edges, "gloo", True)).device.total
        if need > free:
            raise OutOfMemoryError(
                f"check computes in float64 and without a GPU for its reference: {name} needs {need / 2**30:.1f} GiB for tensors, and "
                f"{free / 2**30:.1f} GiB of this machine's memory are free; check a model of the same family with fewer layers"
            )


def timeline(config: Config, device: str = "cpu") -> MemoryCheck:
    """The first step of a run, played on devices of this type and recorded beside what the ledger predicts: peaks of every rank, and the
    largest differences in bytes after an operation. Raises LongshiftError."""
    with temporary_folder() as scratch, _ranks(config.world, device, device) as world:
        found = world.call("longshift.trainer.check_run:recorded", DEADLINE_S, config=config.to_yaml(), scratch=str(scratch))
    differences = [{"rank": rank, **row} for rank, answer in enumerate(found) for row in answer.pop("differences")]
    return MemoryCheck(
        within=all(answer["within"] for answer in found),
        ranks=tuple(RankPeak(rank=rank, **answer) for rank, answer in enumerate(found)),
        differences=tuple(MemoryDifference(**row) for row in sorted(differences, key=rank_of)[:ROWS]),
    )


def recorded(world: World, config: str, scratch: str) -> dict:
    """What `weigh.timeline.verdict` says of a run's first step on this rank."""
    run = parse_config(config)
    with Timeline(world.device) as seen:
        state = build_state(run, world, Path(scratch))
        player = build_player(run, world, state, Path(scratch))
        batches, _ = open_data(run, world)
        batch = batches.at(state.cursor)
        seen.watch(player)
        train_step(state, batch, player)
        player.after = None
    return verdict(seen, predicted(player), ROWS)


def trial_of(world: World, config: str, scratch: str, small: dict) -> dict:
    """Steps of a run made small, as a Trial in JSON: their documents are pieces of the run's first ones. `scratch`: where the disk
    tier is, unless the run names a folder."""
    run, size = parse_config(config), Small(**small)
    is_early = "disk" in run.home.at.named and run.train.clip is not None
    norms = EARLY_NORMS if is_early else NORMS
    steps = len(norms)
    _, cache = open_corpus(run)
    batches = Batches.of(run, cache)
    lengths, batch = size.lengths() * steps, batches.at(0)
    ids, labels = [document.ids for document in batch.documents], [document.labels for document in batch.documents]
    for _ in range(MOST_READ - 1):
        if sum(map(len, ids)) >= sum(lengths):
            break
        batch = batches.at(batch.next_cursor)
        ids += [document.ids for document in batch.documents]
        labels += [document.labels for document in batch.documents]
    all_ids, all_labels = (np.resize(np.concatenate(parts), sum(lengths)) for parts in (ids, labels))
    documents = []
    for length, end in zip(lengths, np.cumsum(lengths)):
        own = all_labels[end - length : end].copy()
        own[-1] = IGNORE
        if (own == IGNORE).all():  # a piece of a prompt: any label will do
            own[:-1] = all_ids[end - length + 1 : end]
        documents.append((tuple(all_ids[end - length : end].tolist()), tuple(own.tolist())))
    count = len(documents) // steps
    return Trial(
        size.spec(run),
        (),
        given=tuple(tuple(documents[step * count : (step + 1) * count]) for step in range(steps)),
        capacity=size.packs[-1],
        seed=run.train.seed,
        warmup=0,
        clips=norms if run.train.clip is not None else (None,) * steps,
        rule=run.train.rule,
        folder=run.model.path if run.model.init == "pretrained" else None,
        edges=tuple(size.edges[:-1]),
        packs=tuple(size.packs[:-1]),
        bucket_bytes=run.switch.bucket,
        ahead_bytes=run.switch.ahead,
        stream_folder=run.stream.folder or scratch,
        home=str(run.home.at),
        compile=run.train.compile,
        float8=run.formats.float8,
    ).to_json()


def leaks(world: World, trial: dict, layout: str) -> dict[str, int]:
    """How many of some target positions see what they must not, under a layout."""
    what = Trial.from_json(trial)
    _, player = build(what, [Layout.parse(layout)], world)
    documents = sorted(what.batches()[0].documents, key=lambda document: len(document.ids))
    documents = [documents[-1], *documents[:-1]]  # the longest, and short ones
    documents = documents[: max(2, bisect_left(list(accumulate(len(d.ids) for d in documents)), PROBED_TOKENS))]
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
    group = LengthGroup(0, sum(len(d.ids) for d in documents), layout, (pack,), ((0,),) * layout.dp, (0.0,))
    program = player.take(player.ready(documents, [group]), 1.0)
    player.play(program[: next(number for number, op in enumerate(program) if op.kind == "norm")])
    player.home.drop_gradients()
    return float(player.world.everyone.all_reduce(runner.loss))
