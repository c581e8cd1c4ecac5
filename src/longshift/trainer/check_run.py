"""`longshift check`: a run's own model and documents under some layouts, against one process, in
float64; and whether documents leak.

The run is made small, all of it in proportion: the longest document, the edges of its groups, their
packs, chunks, windows and blocks of rows. Then every part of every layout has work: every group,
every replica several packs, every stage several micro-batches, every chunked layout documents of
several chunks, every window documents that are longer. The norm is clipped in every second step; of
a home on disk that is updated before the norm, such updates are kept in one step and taken back in
another. What a config has beyond that is named.

Each stage of `train.stages` is checked by itself. Labels of the run's first documents, and of
pieces of documents, are compared with the tokens that they were cut from.

A leak is a loss that depends on what it must not see. For some target positions, every token after
the position and every token of every other document is replaced; the loss at the position must stay
as it was.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from longshift.command_results import (
    CheckedLayout,
    LayoutCheck,
    MemoryCheck,
    MemoryDifference,
    RankPeak,
)
from longshift.config import Config, WireConfig
from longshift.config_file import parse_config
from longshift.dist.fork import ForkedWorld, SpawnedWorld
from longshift.dist.memory import host_memory
from longshift.dist.world import World
from longshift.documents.batch import Batches, Document, StepBatch
from longshift.documents.tokens import TokenCache
from longshift.errors import OutOfMemoryError
from longshift.files import temporary_folder
from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.model.loss import IGNORE
from longshift.spec.formats import EIGHT_BITS
from longshift.spec.model import ModelSpec
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.step_report import shape_of
from longshift.trainer.build_run import build_player, build_state, initial, open_data
from longshift.trainer.check import Case, Comparison, Reference
from longshift.trainer.corpus import open_corpus
from longshift.trainer.stages import schedule_of
from longshift.weigh.needs import largest_need, memory_needs
from longshift.weigh.timeline import Timeline, compare_step, difference_order, predict_step
from longshift.workload.groups import Edge, LengthGroup

Ways = Sequence[Sequence[Layout]]  # ways to compute a stage: a layout, or those of its groups

MOST_TOKENS = 8192  # of a group, where its documents need not be longer
# Tokens of the longest document, at the most, and LEAST for each rank that shares its sequence.
LONGEST = 128
LEAST = 8
CHUNKS = 4  # of the longest document, at the least
# Largest norm of each step: the first is not clipped, the second is, and shows what was not brought
# up to date.
NORMS = 1e9, 1e-3
# An update before the norm follows a step that was not clipped: it is taken back in the second
# step, kept in the fourth.
EARLY_NORMS = (*NORMS, 1e9, 1e9)
LR = 3e-3
PIECES = 64  # of cut documents, whose labels are compared
MOST_READ = 64  # steps of the run from which documents are taken, at the most
# Of relative differences: float64 rounds at 1e-16, and sums of a deep model's many terms differ by
# their order.
TOLERANCE = 1e-9
KINDS = ("loss", "grad", "weight", "optimizer")  # that are compared
PROBES = 6
PROBED_TOKENS = 512
ROWS = 8  # of differences that are shown
DEADLINE_S = 1800.0
# Files of a check.
DOCUMENTS = "documents.json"
TRUTH = "truth.safetensors"


@dataclass(frozen=True)
class SmallRun:
    """A run made small. `config`: of the run as it is; `longest`: tokens of the longest small
    document; `edges`, `packs`: of the groups, from short documents to long; `replicas` of a layout,
    and `micros` of each, at the most; `spec`: the model with its windows, and blocks of rows of
    logits, in proportion."""

    config: Config
    longest: int
    edges: tuple[int, ...]
    packs: tuple[int, ...]
    replicas: int
    micros: int
    spec: ModelSpec

    @classmethod
    def of(cls, config: Config, ways: Ways) -> "SmallRun":
        """A run in proportion, as long as all of these ways to compute need."""
        layouts = [layout for way in ways for layout in way]
        replicas = max(layout.dp for layout in layouts)
        micros = max(layout.pp + 1 for layout in layouts)
        sharing = max(layout.sequence * layout.weight_ranks for layout in layouts)
        longest = max(LEAST * sharing, min(LONGEST, MOST_TOKENS // (2 * replicas * micros)))
        longest = min(config.data.max_len, longest)

        # Groups in proportion. Rounding must not make one empty, so each edge is above the last.
        share = longest / config.data.max_len
        edges = [0]
        packs: list[int] = []
        for edge in config.edges[:-1]:
            edges.append(max(math.ceil(edge.upto * share), edges[-1] + 1))
            packs.append(max(math.ceil(edge.pack * share), edges[-1]))
        longest = max(longest, edges[-1] + 1)

        # A window that the longest document exceeds, as it does in the run.
        spec = config.spec
        window = spec.sliding_window
        if window is not None and window < config.data.max_len:
            small_window = min(math.ceil(window * share), longest - 1)
            spec = replace(spec, sliding_window=small_window)

        small = cls(
            config=config,
            longest=longest,
            edges=(*edges[1:], longest),
            packs=(*packs, 2 * longest),
            replicas=replicas,
            micros=micros,
            spec=spec,
        )
        loss_rows = min(small._loss_rows(ways), default=spec.loss_rows)
        return replace(small, spec=replace(spec, loss_rows=loss_rows))

    def groups(self, way: Sequence[Layout]) -> list[Edge]:
        """The groups of a way, with chunks that cut the longest documents as often as the run's
        own, CHUNKS times at the least. A single layout computes all documents."""
        share = self.longest / self.config.data.max_len
        small = zip(self.edges[-len(way) :], way, self.packs[-len(way) :])
        return [
            Edge(upto, _in_proportion(layout, share, upto), pack) for upto, layout, pack in small
        ]

    def _loss_rows(self, ways: Ways) -> Iterator[int]:
        """For each group whose loss the run computes in several blocks of rows: how many rows make
        a few blocks here."""
        for way in ways:
            run_edges = self.config.edges[-len(way) :]
            for layout, edge, group in zip(way, run_edges, self.groups(way)):
                run_rows = (layout.chunk or edge.pack) // layout.sequence
                if loss_blocks(self.spec, run_rows) > 1:
                    small_rows = (group.use.chunk or group.pack) // layout.sequence
                    yield max(1, small_rows // CHUNKS)

    @property
    def max_norms(self) -> tuple[float | None, ...]:
        """The largest gradient norm of each step."""
        if self.config.train.clip is None:
            return (None,) * len(NORMS)
        return EARLY_NORMS if "disk" in self.config.home.at.tiers else NORMS

    def lengths(self) -> list[int]:
        """Lengths of a step's documents, which give every replica `micros` packs of every group,
        the longest there may be among them."""
        lengths: list[int] = []
        low = 0
        for edge, pack in zip(self.edges, self.packs):
            group = [edge]
            while sum(group) < self.replicas * self.micros * pack:
                group += [low + 1 + (edge - low) // 2, edge, low + 1]
            lengths += group
            low = edge
        return lengths

    def documents(self, batches: Batches) -> list[list[tuple[list[int], list[int]]]]:
        """Token ids and labels of each document of each step: pieces of the run's first
        documents."""
        step_lengths = self.lengths()
        lengths = step_lengths * len(self.max_norms)
        num_tokens = sum(lengths)

        # 1. Read documents until there are enough tokens; too few are repeated.
        run_documents: list[Document] = []
        batch = batches.at(0)
        for _ in range(MOST_READ):
            run_documents += batch.documents
            if sum(len(document.ids) for document in run_documents) >= num_tokens:
                break
            batch = batches.at(batch.next_cursor)
        all_ids = np.concatenate([document.ids for document in run_documents])
        all_ids = np.resize(all_ids, num_tokens)
        all_labels = np.concatenate([document.labels for document in run_documents])
        all_labels = np.resize(all_labels, num_tokens)

        # 2. Cut them into documents of the small run's lengths.
        documents = []
        for length, end in zip(lengths, np.cumsum(lengths)):
            ids = all_ids[end - length : end]
            labels = all_labels[end - length : end].copy()
            labels[-1] = IGNORE
            if (labels == IGNORE).all():  # a piece of a prompt: any label will do
                labels[:-1] = ids[1:]
            documents.append((ids.tolist(), labels.tolist()))
        begins = range(0, len(documents), len(step_lengths))
        return [documents[begin : begin + len(step_lengths)] for begin in begins]

    def run(self, groups: Sequence[Edge]) -> Config:
        """The config of the small run under groups of lengths, in float64, with a short cosine of
        its own."""
        run = self.config
        precision = "float64-float8" if run.formats.float8 else "float64"
        rates = {"lr": LR, "min_lr": LR / 10, "warmup": 0, "schedule": "cosine"}
        sizes = {
            "steps": len(self.max_norms),
            "tokens_per_step": sum(self.lengths()),
        }
        return run.model_copy(
            update={
                "spec": self.spec,  # in place of that of run.model
                "layout": tuple(groups),
                "train": run.train.model_copy(update={"precision": precision, **rates, **sizes}),
                "data": run.data.model_copy(update={"max_len": self.longest}),
                "home": run.home.model_copy(update={"moments": "float32"}),
                "wire": WireConfig(),
            }
        )

    def case(self, scratch: Path) -> Case:
        """What is trained, with the documents that lie in `scratch`."""
        batches = []
        for step in json.loads((scratch / DOCUMENTS).read_text(encoding="utf-8")):
            documents = tuple(Document(np.array(ids), np.array(labels)) for ids, labels in step)
            targets = sum(int((document.labels != IGNORE).sum()) for document in documents)
            batches.append(StepBatch(documents, targets, 0, len(documents)))
        run = self.run([])
        return Case(
            spec=self.spec,
            precision=Precision.of(run.train.precision),
            rule=run.train.rule,
            schedule=schedule_of(run),
            source=initial(run, torch.float32),
            batches=batches,
            clips=self.max_norms,
        )

    def build(self, groups: Sequence[Edge], world: World, scratch: Path) -> tuple[State, Player]:
        """State and player under groups of lengths. What waits on disk does so in `scratch`, unless
        the run names a folder."""
        run = self.run(groups)
        state = build_state(run, world, scratch)
        return state, build_player(run, world, state, scratch, checked=True)


def check(stages: Sequence[tuple[Config, Ways]], device: str = "cpu") -> LayoutCheck:
    """Worst relative differences to one process, leaked positions and wrong labels, over the stages
    of a run and the ways to compute each: a layout, or those of the stage's groups; and whether all
    are within TOLERANCE. Works on documents of each stage's first steps, made small (`SmallRun`),
    in processes on this machine: the reference on its CPU, the ways on devices of this type. What
    waits on disk does so in stream.folder, where that is given. Raises LongshiftError,
    OutOfMemoryError where there is no room for it."""
    for config, ways in stages:
        _make_room(SmallRun.of(config, ways), ways, device)
    results = [_check_stage(config, ways, device) for config, ways in stages]
    references = []
    rows = []
    for number, (reference, stage_rows) in enumerate(results, 1):
        references.append(reference)
        rows += [CheckedLayout(stage=number, **row) for row in stage_rows]

    # A difference that is no number is worse than any.
    worst = {}
    for kind in KINDS:
        differences = [getattr(row, kind) for row in rows]
        worst[kind] = max(differences, key=lambda value: (math.isnan(value), value))
    leaked = sum(row.leaked_positions for row in rows)
    wrong = sum(reference["wrong_labels"] for reference in references)
    return LayoutCheck(
        reference="one process, float64" + f"; {EIGHT_BITS}" * stages[0][0].formats.float8,
        documents=sum(reference["documents"] for reference in references),
        tokens=sum(reference["tokens"] for reference in references),
        reference_loss=references[-1]["loss"],
        **worst,
        leaked_positions=leaked,
        wrong_labels=wrong,
        tolerance=TOLERANCE,
        passed=all(value <= TOLERANCE for value in worst.values()) and not leaked and not wrong,
        not_exercised=tuple(not_exercised(stages)),
        rows=tuple(rows),
    )


def _check_stage(
    config: Config, ways: Ways, device: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `write_reference` says of a stage, and a row for each way."""
    small = SmallRun.of(config, ways)
    worlds = [_ranks(way[0].world, device, device) for way in ways]
    with temporary_folder() as scratch:
        run = {
            "config": config.to_yaml(),
            "ways": [[str(layout) for layout in way] for way in ways],
            "scratch": str(scratch),
        }
        with _ranks(1, "cpu", device) as alone:
            (reference,) = alone.call(
                "longshift.trainer.check_run:write_reference", DEADLINE_S, **run
            )
        rows = []
        for number, (way, ranks) in enumerate(zip(ways, worlds)):
            with ranks as world:
                answers = world.call(
                    "longshift.trainer.check_run:compare", DEADLINE_S, **run, number=number
                )
            computed = _join_names(group.use for group in small.groups(way))
            worst = {kind: max(answer[kind] for answer in answers) for kind in KINDS}
            rows.append({"layout": _join_names(way), "computed": computed} | answers[0] | worst)
    return reference, rows


def not_exercised(stages: Sequence[tuple[Config, Ways]]) -> list[str]:
    """What a run has that its check does not compute, with the reason where it is not plain, a line
    each."""
    run = stages[0][0]
    features = []
    if run.train.precision == "float8":
        features.append(
            "train.precision: float8's bf16 (float64 instead, with factors of eight bits)"
        )
    elif run.train.precision != "float64":
        features.append(f"train.precision: {run.train.precision} (float64 instead)")
    if run.home.moments != "float32":
        features.append(f"home.moments: {run.home.moments} (kept whole)")
    if run.wire.gradients != "float32":
        features.append(f"wire.gradients: {run.wire.gradients} (sent whole)")
    if run.wire.weights != "compute":
        features.append(f"wire.weights: {run.wire.weights} (sent whole)")
    if len(stages) > 1:
        features.append(
            "train.stages: the checkpoint between two stages (each begins with weights of its own)"
        )
    features.append("train.lr, train.warmup, train.schedule (a short cosine of its own)")
    if run.data.valid is not None or run.data.held_out is not None:
        features.append("validation")
    for number, (config, _) in enumerate(stages, 1):
        where = f"stage {number}: " if len(stages) > 1 else ""
        window = config.spec.sliding_window
        if window is not None and window >= config.data.max_len:
            features.append(
                f"{where}windows of {window} tokens (documents have {config.data.max_len} at the"
                " most)"
            )
    return list(dict.fromkeys(features))


def wrong_labels(batches: Batches, cache: TokenCache) -> int:
    """How many tokens and labels of a run's first documents, and of its first pieces of cut ones,
    are not what the tokens on disk say: a label is the token that follows in the whole document,
    where that is learned."""
    cuts = batches.spans
    is_piece = cuts.stop - cuts.start < cache.lengths[cuts.document]
    pieces = np.flatnonzero(is_piece)[:PIECES].tolist()
    first = batches.at(0)
    first_spans = [batches.order[cursor] for cursor in range(first.cursor, first.next_cursor)]

    wrong = 0
    for span in {*pieces, *first_spans}:
        number = int(cuts.document[span])
        start = int(cuts.start[span])
        stop = int(cuts.stop[span])

        # 1. Make the labels of the whole document again, from the tokens on disk alone.
        tokens = cache.tokens(number)
        labels = np.append(tokens[1:], IGNORE).astype(np.int64)
        learned = cache.learned(number)
        if learned is not None:
            labels[:-1][learned[1:] == 0] = IGNORE

        # 2. Compare the document that the run trains on with its part of them.
        document = batches.document(span)
        wrong += _num_different(document.ids, tokens[start:stop])
        wrong += _num_different(document.labels, labels[start:stop])
    return wrong


def _num_different(ours: np.ndarray, truth: np.ndarray) -> int:
    """How many values differ from the truth: all of them where the lengths differ."""
    return int((ours != truth).sum()) if len(ours) == len(truth) else len(truth)


def _join_names(layouts: Iterable[Layout]) -> str:
    return " > ".join(map(str, layouts))


def _ranks(size: int, type: str, device: str) -> ForkedWorld:
    """A world on devices of a type; forked where no rank of the check uses a GPU."""
    return ForkedWorld(size) if device == "cpu" else SpawnedWorld(size, type)


def _in_proportion(layout: Layout, share: float, longest: int) -> Layout:
    """The layout with a chunk that is this share of its own, and cuts the longest small document in
    CHUNKS at the least."""
    if not layout.chunk:
        return layout
    chunk = min(math.ceil(layout.chunk * share), longest // CHUNKS)
    return replace(layout, chunk=max(layout.sequence, chunk))


def _make_room(small: SmallRun, ways: Ways, device: str) -> None:
    """Raises OutOfMemoryError where this machine's memory does not hold the reference, or what the
    ranks of a way have together."""
    on_cpu: dict[str, Sequence[Layout]] = {"one process": [Layout()]}
    if device == "cpu":
        on_cpu |= {_join_names(way): way for way in ways}
    free = host_memory()[1]
    for name, way in on_cpu.items():
        shape = shape_of(small.run(small.groups(way)))
        need = (
            way[0].world * largest_need(memory_needs(shape, shape.edges, "gloo", True)).device.total
        )
        if need > free:
            raise OutOfMemoryError(
                f"check computes in float64 and without a GPU for its reference: {name} needs"
                f" {need / 2**30:.1f} GiB for tensors, and {free / 2**30:.1f} GiB of this machine's"
                " memory are free; check a model of the same family with fewer layers"
            )


def timeline(config: Config, device: str = "cpu") -> MemoryCheck:
    """The first step of a run, played on devices of this type and recorded beside what the ledger
    predicts: peaks of every rank, and the largest differences in bytes after an operation. Raises
    LongshiftError."""
    with temporary_folder() as scratch, _ranks(config.world, device, device) as world:
        answers = world.call(
            "longshift.trainer.check_run:recorded",
            DEADLINE_S,
            config=config.to_yaml(),
            scratch=str(scratch),
        )
    differences = []
    for rank, answer in enumerate(answers):
        differences += [{"rank": rank, **row} for row in answer.pop("differences")]
    largest = sorted(differences, key=difference_order)[:ROWS]
    return MemoryCheck(
        within=all(answer["within"] for answer in answers),
        ranks=tuple(RankPeak(rank=rank, **answer) for rank, answer in enumerate(answers)),
        differences=tuple(MemoryDifference(**row) for row in largest),
    )


def recorded(world: World, config: str, scratch: str) -> dict:
    """What `weigh.timeline.compare_step` says of a run's first step on this rank."""
    run = parse_config(config)
    with Timeline(world.device) as memory:
        state = build_state(run, world, Path(scratch))
        player = build_player(run, world, state, Path(scratch))
        batches, _ = open_data(run, world)
        batch = batches.at(state.cursor)
        memory.watch(player)
        train_step(state, batch, player)
        player.after = None
    return compare_step(memory, predict_step(player), ROWS)


def _parse(config: str, ways: Sequence[Sequence[str]]) -> tuple[SmallRun, list[list[Layout]]]:
    layouts = [[Layout.parse(word) for word in way] for way in ways]
    return SmallRun.of(parse_config(config), layouts), layouts


def write_reference(
    world: World, config: str, ways: Sequence[Sequence[str]], scratch: str
) -> dict[str, Any]:
    """Write the documents of a run made small, and the truth of their steps, into the folder
    `scratch`. Returns documents and tokens of a step, the loss of the last, and how many labels of
    the run's own documents are wrong."""
    small, _ = _parse(config, ways)
    _, cache = open_corpus(small.config)
    batches = Batches.of(small.config, cache)
    documents = json.dumps(small.documents(batches))
    (Path(scratch) / DOCUMENTS).write_text(documents, encoding="utf-8")
    case = small.case(Path(scratch))
    reference = Reference(case)
    for step in range(len(case.batches)):
        reference.train(step)
    truth = reference.result()
    save_file(truth, Path(scratch) / TRUTH)
    first = case.batches[0]
    return {
        "documents": len(first.documents),
        "tokens": first.tokens,
        "loss": float(truth["loss"][-1]),
        "wrong_labels": wrong_labels(batches, cache),
    }


def compare(
    world: World, config: str, ways: Sequence[Sequence[str]], scratch: str, number: int
) -> dict[str, Any]:
    """Differences of a way to the truth in `scratch`, and how many of some target positions see
    what they must not; collective."""
    small, layouts = _parse(config, ways)
    case = small.case(Path(scratch))
    groups = small.groups(layouts[number])

    # 1. Train the steps beside the truth.
    state, player = small.build(groups, world, Path(scratch))
    comparison = Comparison(case, load_file(Path(scratch) / TRUTH))
    for step in range(len(case.batches)):
        comparison.train(step, state, player)
    differences = comparison.result(state, player)
    del state, player  # the next players need their memory

    # 2. Probe each layout alone, with all documents in one group.
    leaked = 0
    probed = 0
    for layout in dict.fromkeys(group.use for group in groups):
        group = Edge(small.longest, layout, small.packs[-1])
        _, player = small.build([group], world, Path(scratch))
        has_leaked = leaks(player, case, small.config.train.seed)
        leaked += sum(has_leaked)
        probed += len(has_leaked)
    return differences | {"leaked_positions": leaked, "probed_positions": probed}


def leaks(player: Player, case: Case, seed: int) -> list[bool]:
    """For some target positions, whether their loss depends on what they must not see."""
    documents = sorted(case.batches[0].documents, key=lambda document: len(document.ids))
    documents = [documents[-1], *documents[:-1]]  # the longest, and short ones
    ends = list(accumulate(len(document.ids) for document in documents))
    documents = documents[: max(2, bisect_left(ends, PROBED_TOKENS))]

    targets = [
        (number, int(position))
        for number, document in enumerate(documents)
        for position in np.flatnonzero(document.labels != IGNORE)
    ]
    num_probes = min(PROBES, len(targets))
    probes = [targets[i] for i in np.linspace(0, len(targets) - 1, num_probes).astype(int)]

    random = np.random.default_rng(seed)
    has_leaked = []
    for target_number, target_position in probes:
        original = list[Document]()
        replaced = list[Document]()
        for number, document in enumerate(documents):
            is_target = number == target_number
            labels = np.full_like(document.labels, IGNORE)
            if is_target:
                labels[target_position] = document.labels[target_position]

            # Of the target's document, the tokens up to the target stay. All others are replaced.
            stays = target_position + 1 if is_target else 0
            noise = random.integers(0, case.spec.vocab, len(document.ids))
            ids = np.where(np.arange(len(document.ids)) < stays, document.ids, noise)
            original.append(Document(document.ids, labels))
            replaced.append(Document(ids, labels))
        has_leaked.append(_loss(player, original) != _loss(player, replaced))
    return has_leaked


def _loss(player: Player, documents: Sequence[Document]) -> float:
    """Loss sum of one pack, over all ranks; every replica computes it."""
    ((layout, runner),) = player.runners.items()
    pack = tuple(range(len(documents)))
    num_tokens = sum(len(document.ids) for document in documents)
    group = LengthGroup(0, num_tokens, layout, (pack,), ((0,),) * layout.dp, (0.0,))
    program = player.take(player.ready(documents, [group]), 1.0)
    # The update, which begins with the norm, must not change the weights.
    norm = next(number for number, op in enumerate(program) if op.kind == "norm")
    player.play(program[:norm])
    player.home.drop_gradients()
    return float(player.world.everyone.all_reduce(runner.loss))
