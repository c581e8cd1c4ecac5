"""What a step reports, and where it goes: one live line, `metrics.jsonl`, or JSON on standard
output. Needs no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from longshift.errors import UsageError
from longshift.files import rewrite, written
from longshift.print_result import fields_table, html_of


@dataclass(frozen=True)
class GroupMetrics:
    """One length group of a step, in visiting order.

    `upto` its longest possible document, in tokens; `balance` the replicas' mean work over their
    largest; `seconds` of the slowest rank, switches included, of which `switch_exposed_s` in
    switching alone; `switch_hidden_s` exchanges under way while the rank computed, each until the
    rank looked again; bytes that weights coming and gradients going home put on links, of all
    ranks.

    Of a layout that streams or offloads: bytes `put` into the tier and `fetched` from it, of all
    ranks; `waited_s` for either, of the rank that waited longest; `hidden_share` 1 - (seconds
    waited / seconds for which at least one copy was under way), both summed over ranks;
    `tier_peak_bytes` the most that waited on the fullest rank. Both seconds are None where the
    copies are a GPU's, the share also where nothing was copied.
    """

    layout: str
    upto: int
    documents: int
    packs: int
    tokens: int
    balance: float
    seconds: float
    tokens_per_s: float
    switch_exposed_s: float
    switch_hidden_s: float
    intra_node_bytes: int
    inter_node_bytes: int
    put_bytes: int = 0
    fetched_bytes: int = 0
    waited_s: float | None = None
    hidden_share: float | None = None
    tier_peak_bytes: int = 0


@dataclass(frozen=True)
class ValidMetrics:
    """Validation of documents in a range of lengths. `upto`: the longest, in tokens, a power of
    two, more than twice the shortest; `loss`: mean over their `targets`, in nats."""

    upto: int
    loss: float
    targets: int


@dataclass(frozen=True)
class HomeMetrics:
    """What a home on disk moved since the step before, saving included: bytes that all ranks read
    and wrote, and seconds that the rank waited for them which waited longest."""

    read_bytes: int
    written_bytes: int
    waited_s: float


@dataclass(frozen=True)
class StepMetrics:
    """One training step, the same on every rank.

    `loss` mean over the step's target tokens, in nats; `grad_norm` global, before clipping;
    `tokens` read, of which `target_tokens`
    are predicted; `seconds` wall time; `model_flops_per_s` forward and backward of the whole world,
    recomputation not counted; `memory_bytes` peak of the fullest rank; `cursor` documents drawn so
    far; `skipped` the update was left out (fp16 overflow); `groups` where the layout changes with
    the length, and where one streams or offloads; `layout` in the config's form; `first` of a
    process under its layout, in which memory is allocated; `home` where that is on disk. On rank 0,
    of a run with a calibrated plan, also what the clock said before the step: `predicted_seconds`
    and their `band`, a relative half-width. After a step that is followed by a validation:
    `valid_loss`, mean over all targets, `valid` of it by length, its seconds; `early` where the run
    ends because it has not become better. Of a run with `train.on_step`: `logged`, numbers that the
    function adds, which are in the row by their own names, and `stopped`, why it ends the run.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    target_tokens: int
    documents: int
    seconds: float
    tokens_per_s: float
    model_flops_per_s: float
    memory_bytes: int
    cursor: int
    skipped: bool = False
    groups: tuple[GroupMetrics, ...] = ()
    layout: Any = None
    first: bool = False
    home: HomeMetrics | None = None
    predicted_seconds: float | None = None
    band: float | None = None
    valid_loss: float | None = None
    valid: tuple[ValidMetrics, ...] = ()
    valid_seconds: float | None = None
    early: bool = False
    logged: Mapping[str, float] = field(default_factory=dict)
    stopped: str | None = None

    def __repr__(self) -> str:
        return (
            f"StepMetrics(step={self.step}, loss={self.loss:.4f},"
            f" tokens_per_s={self.tokens_per_s:.0f}, seconds={self.seconds:.3g})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each value that is known."""
        return html_of(fields_table("", json.loads(self.to_json()).items()))

    def to_json(self) -> str:
        """One line of strict JSON; a number that is not finite becomes null, and what is not known
        is left out."""
        known = {
            k: v
            for k, v in asdict(self).items()
            if v is not None and (k not in ("valid", "early") or v)
        }
        known |= known.pop("logged")
        row = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in known.items()
        }
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> "StepMetrics":
        """The step of a row. Raises ValueError where it is none."""
        # JSON has no word for a number that is not finite, so its row has null.
        values = {key: math.nan if value is None else value for key, value in row.items()}
        own = {metric.name for metric in fields(cls)}
        logged = {
            key: value
            for key, value in values.items()
            if key not in own and isinstance(value, int | float)
        }
        return _step_adapter().validate_python({**values, "logged": logged})


@cache
def _step_adapter() -> TypeAdapter[StepMetrics]:
    """Made once: it takes longer than a row."""
    return TypeAdapter(StepMetrics)


class MetricsLog:
    """Appends steps to `metrics.jsonl`. A resumed run computes again the steps after its
    checkpoint: their old rows leave the file, so that it holds every step once. Raises
    OutOfMemoryError and CheckpointError where the disk refuses."""

    def __init__(self, path: Path):
        self._path = path
        self._opened = False

    def write(self, step: StepMetrics) -> None:
        with written(str(self._path)):
            if not self._opened:
                rows = read_rows(self._path)
                lines = [json.dumps(row) + "\n" for row in rows if row["step"] < step.step]
                rewrite(self._path, "".join(lines))
                self._opened = True
            with self._path.open("a", encoding="utf-8") as file:
                file.write(step.to_json() + "\n")


def read_rows(path: Path) -> list[dict]:
    """The rows of a `metrics.jsonl`; none where there is no file. A last line cut short by a crash
    is left out. Raises UsageError for a damaged one before it."""
    # After the last newline is nothing, or a row that a crash has cut short.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UsageError(f"{path}:{number} is damaged: remove that line")
        rows.append(row)
    return rows


def faults_of_rows(path: Path, done: int, loss: float | None) -> str:
    """What is wrong with the rows of the steps that are done, the last of which had this loss in
    nats (None: not known): rows are missing, or are of another run. An empty text where nothing
    is."""
    losses = {row["step"]: row.get("loss") for row in read_rows(path)}
    missing = sorted(set(range(1, done + 1)) - losses.keys())
    if missing:
        several = f"the rows of {len(missing)} of the steps {missing[0]} to {missing[-1]}"
        return (
            f"lacks {several if len(missing) > 1 else f'the row of step {missing[0]}'}: it was cut,"
            " or is of another run"
        )
    # Both were written from one number, so they are equal to the bit.
    if loss is not None and done and losses[done] != loss:
        return (
            f"is of another run: it has loss {losses[done]} for step {done}, and the checkpoint has"
            f" {loss}"
        )
    return ""
