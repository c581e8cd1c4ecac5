"""What commands compute, as frozen values: the Python API returns them, and
`print_result.print_result` prints them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from longshift.errors import shown
from longshift.layout.layout import format_size
from longshift.print_result import CommandResult
from longshift.workload.lengths import Bin, CapLoss

BAR_COLUMNS = 40  # of a bar that stands for all tokens


class CorpusFacts(CommandResult):
    """The documents of a config. `skipped`: path and reason of each file that gave none; `notes`:
    what the sources hold and no token shows; `quantiles`: lengths in tokens, by name, as in p50;
    `histogram`: between powers of two; `caps`: what each cap on the length would lose; `max_len`:
    the config's cap; `cache`: where the tokens are. Where a part is `learned`: how many tokens, and
    of a `sample` document runs of text, with whether they are learned."""

    OPTIONAL = ("learned", "sample")

    documents: int
    tokens: int
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    quantiles: Mapping[str, int]
    histogram: tuple[Bin, ...]
    caps: tuple[CapLoss, ...]
    max_len: int
    cache: Path
    learned: int | None = None
    sample: tuple[tuple[str, bool], ...] | None = None

    def parts(self) -> Iterator[RenderableType]:
        """Sentences, the share of each range of lengths, the cost of each cap, and what is learned
        of a sample."""
        spread = ", ".join(f"{name} {tokens:,}" for name, tokens in self.quantiles.items())
        yield f"{self.documents:,} documents, {self.tokens:,} tokens; length {spread}"
        if self.skipped:
            reasons = Counter(reason for _, reason in self.skipped)
            yield (
                "skipped files:"
                f" {', '.join(f'{count} {reason}' for reason, count in reasons.items())} (--json"
                " names them)"
            )
        for note in self.notes:
            yield f"note: {note}"
        yield self._length_table()
        yield ""
        yield self._cap_table()
        if self.sample is not None and self.learned is not None:
            is_terminal = Console().is_terminal
            mark = "in green" if is_terminal else "in [[ ]]"
            yield (
                f"\n{self.learned:,} tokens are learned ({self.learned / self.tokens:.1%}), here"
                f" {mark}:\n"
            )
            sample = Text()
            for text, is_learned in self.sample:
                if is_learned and not is_terminal:  # where nobody sees colors
                    text = f"[[{text}]]"
                sample.append(text, "green" if is_learned else "dim")
            yield sample

    def _length_table(self) -> Table:
        """Documents and tokens by ranges of length."""
        table = Table("length", "documents", "tokens", "share of tokens", box=None)
        for bin in self.histogram:
            share = bin.tokens / self.tokens
            bar = "█" * round(BAR_COLUMNS * share)
            table.add_row(
                f"to {format_size(bin.high)}",
                f"{bin.documents / self.documents:.1%}",
                f"{share:.1%}",
                bar,
            )
        return table

    def _cap_table(self) -> Table:
        """What caps on the length would lose."""
        table = Table(
            "max_len", "longer documents", "split: pieces", "truncate: lost", "drop: lost", box=None
        )
        for loss in self.caps:
            mark = " (this config)" if loss.cap == self.max_len else ""
            table.add_row(
                format_size(loss.cap) + mark,
                f"{loss.documents:,}",
                f"{loss.split_pieces:,}",
                f"{loss.truncate_tokens / self.tokens:.1%}",
                f"{loss.drop_tokens / self.tokens:.1%}",
            )
        return table


class CheckedLayout(CommandResult):
    """A layout beside one process: the largest relative differences of losses, gradients, weights
    and moments of the optimizer. `stage`: of the run, from 1; `computed`: the layout made small, as
    it was computed; `leaked_positions`: of `probed_positions` targets,
    how many see what they must not."""

    stage: int
    layout: str
    computed: str = Field(validation_alias="as", serialization_alias="as")
    loss: float
    grad: float
    weight: float
    optimizer: float
    leaked_positions: int
    probed_positions: int


class LayoutCheck(CommandResult):
    """Layouts beside `reference`: the worst of `rows`, and whether all are within `tolerance`,
    nothing leaks and no label is wrong. `documents` and `tokens` of a step of each stage;
    `reference_loss`: of the reference's last step, in nats. `not_exercised`: what the config has
    that was not computed, a line each."""

    reference: str
    documents: int
    tokens: int
    reference_loss: float
    loss: float
    grad: float
    weight: float
    optimizer: float
    leaked_positions: int
    wrong_labels: int
    tolerance: float
    passed: bool = Field(validation_alias="pass", serialization_alias="pass")
    not_exercised: tuple[str, ...]
    rows: tuple[CheckedLayout, ...]

    def parts(self) -> Iterator[RenderableType]:
        """A row for each layout, and the verdict."""
        yield (
            f"{self.documents} documents, {self.tokens:,} tokens; loss {self.reference_loss:.4f} in"
            f" {self.reference}"
        )
        # Most runs have one stage: a column of ones would say nothing.
        has_stages = len({row.stage for row in self.rows}) > 1
        table = Table(
            *["stage"] * has_stages,
            "layout",
            "as",
            "loss",
            "gradients",
            "weights",
            "moments",
            "leaked",
            box=None,
        )
        for row in self.rows:
            cells = [str(row.stage)] * has_stages
            cells += [row.layout, row.computed]
            cells += [
                f"{difference:.1e}"
                for difference in (row.loss, row.grad, row.weight, row.optimizer)
            ]
            cells.append(f"{row.leaked_positions} of {row.probed_positions}")
            table.add_row(*cells)
        yield table
        for line in self.not_exercised:
            yield f"not exercised: {line}"
        worst = (
            f"loss {self.loss:.1e}, gradients {self.grad:.1e}, weights {self.weight:.1e}, moments"
            f" {self.optimizer:.1e}"
        )
        faults = f"{self.leaked_positions} leaked positions, {self.wrong_labels} wrong labels"
        yield (
            f"{'PASS' if self.passed else 'FAIL'}: {worst}, {faults}; the tolerance of float64 is"
            f" {self.tolerance:.0e}"
        )


class RankPeak(CommandResult):
    """The peak of a rank's bytes in a step of so many operations, and whether it is near enough to
    the predicted one."""

    rank: int
    operations: int
    recorded: int
    predicted: int
    ratio: float
    within: bool


class MemoryDifference(CommandResult):
    """Bytes of a rank after an operation, recorded and predicted; None where it was not played, or
    not predicted. `same`: whether it is the predicted operation;
    `alike`: how many differ by as much."""

    rank: int
    number: int
    op: str
    recorded: int | None
    predicted: int | None
    same: bool
    difference: int
    alike: int


class MemoryCheck(CommandResult):
    """A recorded step beside the predicted one: peaks by rank, and the operations after which bytes
    differ most. `within`: whether all are near enough."""

    within: bool
    ranks: tuple[RankPeak, ...]
    differences: tuple[MemoryDifference, ...]

    def parts(self) -> Iterator[RenderableType]:
        """Two tables."""
        peaks = Table("rank", "operations", "peak recorded", "predicted", "ratio", box=None)
        for row in self.ranks:
            ratio = f"{row.ratio:.4f}" + "  differs" * (not row.within)
            peaks.add_row(
                str(row.rank),
                f"{row.operations:,}",
                f"{row.recorded:,}",
                f"{row.predicted:,}",
                ratio,
            )
        yield peaks
        yield ""
        differences = Table(
            "rank", "no.", "bytes after", "recorded", "predicted", "difference", "alike", box=None
        )
        for row in self.differences:
            differences.add_row(
                str(row.rank),
                str(row.number),
                row.op,
                f"{row.recorded or 0:,}",
                f"{row.predicted or 0:,}",
                f"{row.difference:,}",
                f"{row.alike:,}",
            )
        yield differences


class ExportedFolder(CommandResult):
    """A Hugging Face folder that was written of a run, and the names of its files."""

    run: Path
    folder: Path
    files: tuple[str, ...]

    def parts(self) -> Iterator[RenderableType]:
        """One line."""
        yield f"exported {self.run} to {self.folder}"


class CalibrationStep(CommandResult):
    """A step of a run: what it took, and how far off it was predicted, `before` and by the
    constants of the other steps (`held_back`)."""

    step: int
    layout: Any
    seconds: float
    before: float
    held_back: float


class CalibrationResult(CommandResult):
    """What the steps of a run showed of a cluster, and `file`, which holds the cluster with it:
    `constants` and `band` as in `cluster.Calibration`; `errors`: mean absolute ones, `before` and
    of steps that were `held_back`."""

    cluster: str
    constants: Mapping[str, float]
    band: float
    fingerprint: str
    layouts: tuple[str, ...]
    errors: Mapping[str, float]
    rows: tuple[CalibrationStep, ...]
    file: Path

    def parts(self) -> Iterator[RenderableType]:
        """Sentences."""
        span = f"{self.rows[0].step} to {self.rows[-1].step}"
        yield f"{len(self.rows)} steps, {span}, under {', '.join(self.layouts)}, on {self.cluster}"
        for name, value in self.constants.items():
            quantity = "seconds that it takes" if name == "launch" else "rate"
            yield f"  {name:<10} {value:.2f} times the {quantity} alone"
        errors = self.errors
        yield (
            f"a step is off by {errors['before']:.1%} without these, by"
            f" {errors['held_back']:.1%} with those of the other steps"
        )
        yield f"band: {self.band:.1%} either way"
        yield f"wrote {self.file}; plan by it with: longshift plan CONFIG --on {self.file}"


class RunSummary(CommandResult):
    """Where a run is after its last step, and the commands that go on from there. `early`: whether
    validation ended it; `first_loss`, `last_loss`: of its steps, in nats, None where that is not
    finite; of the lowest validation, its step and loss; `stopped`: why the function of
    `train.on_step` ended it."""

    OPTIONAL = ("best_step", "best_loss", "stopped")

    run: Path
    shown: str
    steps: int
    planned_steps: int
    finished: bool
    early: bool
    first_loss: float | None
    last_loss: float | None
    export: str
    resume: str
    best_step: int | None = None
    best_loss: float | None = None
    stopped: str | None = None

    def parts(self) -> Iterator[RenderableType]:
        """Lines under names, as the header has them."""
        status = (
            "ended early, for validation becomes no better,"
            if self.early
            else "finished"
            if self.finished
            else "stopped"
        )
        if self.stopped is not None:
            status = f"ended by train.on_step ({shown(self.stopped)})"
        # A loss that was not finite is None in JSON, which has no word for it.
        first_loss, last_loss = (
            math.nan if loss is None else loss for loss in (self.first_loss, self.last_loss)
        )
        yield (
            f"run     {self.shown}: {status} at step {self.steps} of {self.planned_steps}, loss"
            f" {first_loss:.3f} -> {last_loss:.3f}"
        )
        if self.best_step is not None:
            yield (
                f"valid   loss {self.best_loss:.4f} after step {self.best_step} is the lowest;"
                " export that step with --best"
            )
        yield f"export  {self.export}"
        yield f"resume  {self.resume}"
