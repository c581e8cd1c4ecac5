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
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from longshift.command_results import (
    CheckedLayout,
    LayoutCheck,
)
from longshift.config import Config, WireConfig
from longshift.config_file import parse_config
from longshift.dist.fork import local_world
from longshift.dist.memory import host_memory
from longshift.dist.world import World
from longshift.documents.batch import Batches, Document, StepBatch
from longshift.errors import OutOfMemoryError
from longshift.files import temporary_folder
from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.model.loss import IGNORE
from longshift.print_result import gib_text
from longshift.spec.formats import EIGHT_BITS
from longshift.spec.model import ModelSpec
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import State
from longshift.step_report import shape_of
from longshift.trainer.build_run import build_player, build_state, initial, open_data, schedule_of
from longshift.trainer.check import Case, Comparison, Reference, leaks, wrong_labels
from longshift.weigh.needs import largest_need, memory_needs
from longshift.workload.groups import Edge

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
MOST_READ = 64  # steps of the run from which documents are taken, at the most
# Of relative differences: float64 rounds at 1e-16, and sums of a deep model's many terms differ by
# their order.
TOLERANCE = 1e-9
KINDS = ("loss", "grad", "weight", "optimizer")  # that are compared
DEADLINE_S = 1800.0
TRUTH = "truth.safetensors"  # a file of a check


@dataclass(frozen=True)
class SmallRun:
    """A run made small. `config`: of the run as it is; `ways`: to compute it; `longest`: tokens of
    the longest small document; `edges`, `packs`: of the groups, from short documents to long;
    `replicas` of a layout, and `micros` of each, at the most; `spec`: the model with its windows,
    and blocks of rows of logits, in proportion."""

    config: Config
    ways: Ways
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
            ways=ways,
            longest=longest,
            edges=(*edges[1:], longest),
            packs=(*packs, 2 * longest),
            replicas=replicas,
            micros=micros,
            spec=spec,
        )
        loss_rows = min(small._loss_rows(), default=spec.loss_rows)
        return replace(small, spec=replace(spec, loss_rows=loss_rows))

    def groups(self, way: Sequence[Layout]) -> list[Edge]:
        """The groups of a way, with chunks that cut the longest documents as often as the run's
        own, CHUNKS times at the least. A single layout computes all documents."""
        share = self.longest / self.config.data.max_len
        small = zip(self.edges[-len(way) :], way, self.packs[-len(way) :])
        return [
            Edge(upto, _in_proportion(layout, share, upto), pack) for upto, layout, pack in small
        ]

    def _loss_rows(self) -> Iterator[int]:
        """For each group whose loss the run computes in several blocks of rows: how many rows make
        a few blocks here."""
        for way in self.ways:
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
            # A middle document, the longest and the shortest that belong to the group.
            while sum(group) < self.replicas * self.micros * pack:
                group += [low + 1 + (edge - low) // 2, edge, low + 1]
            lengths += group
            low = edge
        return lengths

    def batches(self, run_batches: Batches) -> list[StepBatch]:
        """The documents of each step: pieces of the run's first documents."""
        lengths = self.lengths()
        shape = (len(self.max_norms), sum(lengths))

        # 1. Read documents until there are enough tokens; too few are repeated.
        documents: list[Document] = []
        batch = run_batches.at(0)
        for _ in range(MOST_READ):
            documents += batch.documents
            if sum(len(document.ids) for document in documents) >= math.prod(shape):
                break
            batch = run_batches.at(batch.next_cursor)
        ids = np.resize(np.concatenate([document.ids for document in documents]), shape)
        labels = np.resize(np.concatenate([document.labels for document in documents]), shape)

        # 2. Cut them into documents of the small run's lengths.
        cuts = np.cumsum(lengths)[:-1]
        batches = []
        for step_ids, step_labels in zip(ids, labels):
            documents = list(map(_piece, np.split(step_ids, cuts), np.split(step_labels, cuts)))
            targets = sum(int((document.labels != IGNORE).sum()) for document in documents)
            batches.append(StepBatch(tuple(documents), targets, 0, len(documents)))
        return batches

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

    def case(self, run_batches: Batches) -> Case:
        """What is trained, with documents of the run."""
        run = self.run([])
        return Case(
            spec=self.spec,
            precision=Precision.of(run.train.precision),
            rule=run.train.rule,
            schedule=schedule_of(run),
            source=initial(run, torch.float32),
            batches=self.batches(run_batches),
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
    small_runs = [SmallRun.of(config, ways) for config, ways in stages]
    for small in small_runs:
        _make_room(small, device)
    references = []
    rows: list[CheckedLayout] = []
    for number, small in enumerate(small_runs, 1):
        reference, differences = _check_stage(small, device)
        references.append(reference)
        rows += [CheckedLayout(stage=number, **row) for row in differences]

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


def _check_stage(small: SmallRun, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `write_reference` says of a stage, and a row for each way."""
    worlds = [local_world(way[0].world, device, device) for way in small.ways]
    with temporary_folder() as scratch:
        run = {
            "config": small.config.to_yaml(),
            "ways": [[str(layout) for layout in way] for way in small.ways],
            "scratch": str(scratch),
        }
        with local_world(1, "cpu", device) as alone:
            (reference,) = alone.call(f"{__name__}:write_reference", DEADLINE_S, **run)
        rows = []
        for number, (way, ranks) in enumerate(zip(small.ways, worlds)):
            with ranks as world:
                answers = world.call(f"{__name__}:compare", DEADLINE_S, **run, number=number)
            computed = _join_names(group.use for group in small.groups(way))
            # All ranks have the same answer.
            rows.append({"layout": _join_names(way), "computed": computed} | answers[0])
    return reference, rows


def not_exercised(stages: Sequence[tuple[Config, Ways]]) -> list[str]:
    """What a run has that its check does not compute, with the reason where it is not plain, a line
    each."""
    run = stages[0][0]
    precision = run.train.precision
    features = {
        "train.precision: float8's bf16 (float64 instead, with factors of eight bits)": (
            precision == "float8"
        ),
        f"train.precision: {precision} (float64 instead)": precision not in ("float8", "float64"),
        f"home.moments: {run.home.moments} (kept whole)": run.home.moments != "float32",
        f"wire.gradients: {run.wire.gradients} (sent whole)": run.wire.gradients != "float32",
        f"wire.weights: {run.wire.weights} (sent whole)": run.wire.weights != "compute",
        "train.stages: the checkpoint between two stages (each begins with weights of its own)": (
            len(stages) > 1
        ),
        "train.lr, train.warmup, train.schedule (a short cosine of its own)": True,
        "validation": run.data.valid is not None or run.data.held_out is not None,
    }
    for number, (config, _) in enumerate(stages, 1):
        where = f"stage {number}: " if len(stages) > 1 else ""
        window = config.spec.sliding_window
        longest = config.data.max_len
        line = f"{where}windows of {window} tokens (documents have {longest} at the most)"
        features[line] = window is not None and window >= longest
    return [line for line, applies in features.items() if applies]


def _join_names(layouts: Iterable[Layout]) -> str:
    return " > ".join(map(str, layouts))


def _piece(ids: np.ndarray, labels: np.ndarray) -> Document:
    """A piece of documents as a document, which learns something. Changes `labels`."""
    labels[-1] = IGNORE
    if (labels == IGNORE).all():  # a piece of a prompt: any label will do
        labels[:-1] = ids[1:]
    return Document(ids, labels)


def _in_proportion(layout: Layout, share: float, longest: int) -> Layout:
    """The layout with a chunk that is this share of its own, and cuts the longest small document in
    CHUNKS at the least."""
    if not layout.chunk:
        return layout
    # Each rank that shares the sequence needs a token of a chunk.
    chunk = min(math.ceil(layout.chunk * share), longest // CHUNKS)
    return replace(layout, chunk=max(layout.sequence, chunk))


def _make_room(small: SmallRun, device: str) -> None:
    """Raises OutOfMemoryError where this machine's memory does not hold the reference, or what the
    ranks of a way have together."""
    # The reference is on the CPU wherever the layouts are.
    on_cpu: dict[str, Sequence[Layout]] = {"one process": [Layout()]}
    if device == "cpu":
        on_cpu |= {_join_names(way): way for way in small.ways}
    free = host_memory()[1]
    for name, way in on_cpu.items():
        shape = shape_of(small.run(small.groups(way)))
        need = way[0].world * largest_need(memory_needs(shape, shape.edges, "gloo")).device.total
        if need > free:
            raise OutOfMemoryError(
                f"check computes in float64 and without a GPU for its reference: {name} needs"
                f" {gib_text(need)} for tensors, and {gib_text(free)} of this machine's"
                " memory are free; check a model of the same family with fewer layers"
            )


def _parse(config: str, ways: Sequence[Sequence[str]]) -> SmallRun:
    layouts = [[Layout.parse(word) for word in way] for way in ways]
    return SmallRun.of(parse_config(config), layouts)


def write_reference(
    world: World, config: str, ways: Sequence[Sequence[str]], scratch: str
) -> dict[str, Any]:
    """Write the truth of the steps of a run made small into the folder `scratch`. Returns documents
    and tokens of a step, the loss of the last, and how many labels of the run's own documents are
    wrong."""
    small = _parse(config, ways)
    batches, _ = open_data(small.config, world)
    case = small.case(batches)
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
        "wrong_labels": wrong_labels(batches),
    }


def compare(
    world: World, config: str, ways: Sequence[Sequence[str]], scratch: str, number: int
) -> dict[str, Any]:
    """Differences of a way to the truth in `scratch`, and how many of some target positions see
    what they must not; collective."""
    small = _parse(config, ways)
    case = small.case(open_data(small.config, world)[0])
    groups = small.groups(small.ways[number])

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
