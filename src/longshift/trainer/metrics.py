"""What a step reports, and where it goes: one live line, `metrics.jsonl`, or JSON on standard output. Needs no torch."""

import errno
import io
import json
import math
import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longshift.errors import UsageError, printable
from longshift.files import rewrite, written
from longshift.layout.layout import format_size

LABEL = 8  # columns of a line's name
FIRST = 10  # steps that stay above the live line; of later ones, one in LEAST_GAP_S seconds, and in GAP_SHARE of the seconds so far
LEAST_GAP_S, GAP_SHARE = 5.0, 0.01
MOST = ("valid", "skipped", "norm", "lr", "predicted", "flops", "groups", "offload")  # of a line, besides what is always there
UNREAD = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF)  # of a stream that nobody reads


@dataclass(frozen=True)
class GroupMetrics:
    """One length group of a step, in visiting order.

    `upto` its longest possible document, in tokens; `balance` the replicas' mean work over their largest; `seconds` of the slowest rank,
    switches included, of which `switch_exposed_s` in switching alone; `switch_hidden_s` exchanges under way while the rank computed, each
    until the rank looked again; bytes that weights coming and gradients going home put on links, of all ranks.

    Of a layout that streams or offloads: bytes `put` into the tier and `fetched` from it, of all ranks; `waited_s` for either, of the rank
    that waited longest; `hidden_share` 1 - (seconds waited / seconds for which at least one copy was under way), both summed over ranks;
    `tier_peak_bytes` the most that waited on the fullest rank. Both seconds are None where the copies are a GPU's, the share also where
    nothing was copied.
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
    """Validation of documents in a range of lengths. `upto`: the longest, in tokens, a power of two, more than twice the shortest; `loss`:
    mean over their `targets`, in nats."""

    upto: int
    loss: float
    targets: int


@dataclass(frozen=True)
class HomeMetrics:
    """What a home on disk moved since the step before, saving included: bytes that all ranks read and wrote, and seconds that the rank
    waited for them which waited longest."""

    read_bytes: int
    written_bytes: int
    waited_s: float


@dataclass(frozen=True)
class StepMetrics:
    """One training step, the same on every rank.

    `loss` mean over the step's target tokens, in nats; `grad_norm` global, before clipping; `tokens` read, of which `target_tokens`
    are predicted; `seconds` wall time; `model_flops_per_s` forward and backward of the whole world, recomputation not counted;
    `memory_bytes` peak of the fullest rank; `cursor` documents drawn so far; `skipped` the update was left out (fp16 overflow); `groups`
    where the layout changes with the length, and where one streams or offloads; `layout` in the config's form; `first` of a process under
    its layout, in which memory is allocated; `home` where that is on disk. On rank 0, of a run with a calibrated plan, also what the clock
    said before the step: `predicted_seconds` and their `band`, a relative half-width. After a step that is followed by a validation:
    `valid_loss`, mean over all targets, `valid` of it by length, its seconds; `early` where the run ends because it has not become better.
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

    def to_json(self) -> str:
        """One line of strict JSON; a number that is not finite becomes null, and what is not known is left out."""
        known = {k: v for k, v in asdict(self).items() if v is not None and (k not in ("valid", "early") or v)}
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in known.items()}
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> "StepMetrics":
        values = {k: math.nan if v is None else v for k, v in row.items()}
        groups = tuple(GroupMetrics(**group) for group in values.pop("groups", ()))  # pyright: ignore
        valid = tuple(ValidMetrics(**part) for part in values.pop("valid", ()))  # pyright: ignore
        home = {"home": HomeMetrics(**values.pop("home"))} if "home" in values else {}  # pyright: ignore
        return cls(groups=groups, valid=valid, **home, **values)  # pyright: ignore[reportArgumentType]


class MetricsLog:
    """Appends steps to `metrics.jsonl`. A resumed run computes again the steps after its checkpoint: their old rows leave the file,
    so that it holds every step once. Raises OutOfMemoryError and CheckpointError where the disk refuses."""

    def __init__(self, path: Path):
        self._path = path
        self._opened = False

    def write(self, step: StepMetrics) -> None:
        with written(str(self._path)):
            if not self._opened:
                keep = [row for row in read_rows(self._path) if row["step"] < step.step]
                rewrite(self._path, "".join(json.dumps(row) + "\n" for row in keep))
                self._opened = True
            with self._path.open("a", encoding="utf-8") as file:
                file.write(step.to_json() + "\n")


def read_rows(path: Path) -> list[dict]:
    """The rows of a `metrics.jsonl`; none where there is no file. A last line cut short by a crash is left out. Raises UsageError for a
    damaged one before it."""
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
    """What is wrong with the rows of the steps that are done, the last of which had this loss in nats (None: not known): rows are missing,
    or are of another run. An empty text where nothing is."""
    losses = {row["step"]: row.get("loss") for row in read_rows(path)}
    missing = sorted(set(range(1, done + 1)) - losses.keys())
    if missing:
        several = f"the rows of {len(missing)} of the steps {missing[0]} to {missing[-1]}"
        return f"lacks {several if len(missing) > 1 else f'the row of step {missing[0]}'}: it was cut, or is of another run"
    if loss is not None and done and losses[done] != loss:
        return f"is of another run: it has loss {losses[done]} for step {done}, and the checkpoint has {loss}"
    return ""


def open_streams() -> None:
    """Give a process that was started without standard streams those of /dev/null, before files take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):  # a terminal of another encoding shows question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def read_or_not(files: bool = False) -> Iterator[None]:
    """Let what is printed inside go on without a reader: a pipe that was closed, as by `head`, a full device or a terminal that is gone
    becomes /dev/null. `files`: other files are written inside too, and what they refuse is raised; so is a full device, since what a
    command prints is its product."""
    try:
        yield
    except OSError as fault:
        told = fault.filename or fault.errno == errno.ENOSPC or all(map(_takes, (sys.stdout, sys.stderr)))
        if fault.errno not in UNREAD or (files and told):
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
                continue
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line: str) -> None:
    """Tell the person a line, on standard error, whether somebody reads it or not."""
    with read_or_not():
        print(f"longshift: {printable(line)}", file=sys.stderr, flush=True)


def _takes(stream: TextIO) -> bool:
    """Whether somebody reads a stream, or it is a file. That its disk is full does not show."""
    try:
        os.write(stream.fileno(), b"")
        seen = select.poll()
        seen.register(stream.fileno(), select.POLLOUT)
        return not any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in seen.poll(0))
    except OSError:
        return False


class Display:
    """Shows steps as they come: on a terminal one live line, above which some of the steps before stay; plain lines elsewhere; JSON lines
    where asked for. `latest`: the file that names the newest checkpoint, so that a line says when there is a new one. `clock`: seconds.
    Mutable: what it has shown."""

    def __init__(
        self,
        steps: int,
        as_json: bool = False,
        console: Console | None = None,
        latest: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._steps, self._as_json, self._latest, self._clock = steps, as_json, latest, clock
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal and not as_json else None
        self._step: StepMetrics | None = None  # on the live line
        self._saved = self._newest()
        self._kept, self._began_s, self._kept_s = 0, clock(), clock()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._live.update(Text("waiting for the first step"), refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            with read_or_not():
                if self._step is None:
                    self._live.update(Text(""), refresh=True)
                self._live.stop()
                if saved := self._saved_now():
                    self._print(saved)

    def memory(self, told: str) -> None:
        """What memory the steps that follow need; on a terminal alone."""
        with read_or_not():
            if self._live:
                self._console.print(Text("\n".join(named_lines("memory", told, self._console.width))), "")

    def show(self, step: StepMetrics) -> None:
        with read_or_not():
            if self._live is None:
                print(step.to_json() if self._as_json else describe(step, self._steps), file=self._console.file, flush=True)
                return
            saved = self._saved_now()
            if self._step and (saved or self._stays(self._step)):
                self._print(fitted(self._step, self._steps, self._console.width))
                self._kept, self._kept_s = self._kept + 1, self._clock()
            if saved:
                self._print(saved)
            self._step = step
            self._live.update(Text(fitted(step, self._steps, self._console.width), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _stays(self, step: StepMetrics) -> bool:
        """Whether a step that is over stays above the live line: the first ones, then fewer as the run grows old, and what is not usual."""
        gap_s = max(LEAST_GAP_S, GAP_SHARE * (self._clock() - self._began_s))
        unusual = step.valid_loss is not None or step.skipped or not math.isfinite(step.loss)
        return self._kept < FIRST or unusual or self._clock() - self._kept_s >= gap_s

    def _print(self, line: str) -> None:
        self._console.print(Text(line, no_wrap=True, overflow="ellipsis"))

    def _newest(self) -> str | None:
        with suppress(OSError):
            return self._latest.read_text(encoding="utf-8", errors="replace").strip() if self._latest else None
        return None

    def _saved_now(self) -> str | None:
        """A line about the newest checkpoint, the first time that it is seen."""
        newest = self._newest()
        if newest == self._saved or newest is None or self._latest is None:
            return None
        self._saved = newest
        return f"saved   checkpoints/{newest}"


def named_lines(name: str, text: str, width: int) -> list[str]:
    """A text under a name, in lines of at most so many columns."""
    return textwrap.wrap(f"{name:<{LABEL}}{text}", width, subsequent_indent=" " * LABEL, break_on_hyphens=False)


def describe(step: StepMetrics, steps: int) -> str:
    """A step as one line; `steps` is the length of the run."""
    return "  ".join(_words(step, steps).values())


def fitted(step: StepMetrics, steps: int, width: int) -> str:
    """As much of `describe` as has room in `width` columns. Step, loss, tokens/s, memory and ETA stay, in fewer letters where they must."""
    words, chosen = _words(step, steps), {"step", "loss", "rate", "memory", "eta"}
    line = ""
    for name in ("step", *MOST):
        more = "  ".join(word for key, word in words.items() if key in {*chosen, name})
        if len(more) <= width:
            line, chosen = more, {*chosen, name}
    if line:
        return line
    count, left = f"{step.step}/{steps}", _clock((steps - step.step) * step.seconds)
    rate, memory = f"{_short(step.tokens_per_s).replace(' ', '')} tok/s", _memory(step.memory_bytes)
    brief = f"step {count}  loss {step.loss:.4f}  {rate}  {memory}  ETA {left}"
    return brief if len(brief) <= width else f"{count} loss {step.loss:.4g} {rate} {memory} ETA {left}"


def _words(step: StepMetrics, steps: int) -> dict[str, str]:
    """What a line says of a step, by name, in the order in which it is said."""
    words = {
        "step": f"step {step.step}/{steps}",
        "loss": f"loss {step.loss:.4f}",
    }
    if step.valid_loss is not None:
        words["valid"] = f"valid {step.valid_loss:.4f}" + " (stops: no better)" * step.early
    words |= {
        "norm": f"norm {step.grad_norm:.3g}",
        "lr": f"lr {step.lr:.2e}",
        "rate": f"{step.tokens_per_s:,.0f} tokens/s",
        "flops": f"{_short(step.model_flops_per_s)}FLOP/s",
        "memory": f"{step.memory_bytes / 2**20:.0f} MiB",
    }
    if step.predicted_seconds is not None and step.band is not None:
        words["predicted"] = f"{step.seconds:.3g} s of {step.predicted_seconds:.3g} predicted, within {step.band:.0%}"
    if len(step.groups) > 1:
        exposed, hidden = (sum(getattr(g, f"switch_{what}_s") for g in step.groups) for what in ("exposed", "hidden"))
        alone = len({g.layout for g in step.groups}) == 1
        by_group = ", ".join((f"<= {format_size(g.upto)}" if alone else g.layout) + f" {g.seconds:.2f} s" for g in step.groups)
        words["groups"] = by_group if alone else f"{by_group}; switch {hidden:.2f} s hidden, {exposed:.2f} s exposed"
    if any(group.put_bytes for group in step.groups):
        out, back = (sum(getattr(g, f"{what}_bytes") for g in step.groups) / 2**20 for what in ("put", "fetched"))
        waited = [g.waited_s for g in step.groups if g.waited_s is not None]
        words["offload"] = f"offload {out:.0f} MiB out, {back:.0f} MiB in" + (f", {sum(waited):.2f} s waited" if waited else "")
    words["eta"] = f"ETA {_clock((steps - step.step) * step.seconds)}"
    return words | ({"skipped": "update skipped (fp16 overflow)"} if step.skipped else {})


def _memory(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:.1f} GiB"


def _short(value: float) -> str:
    """A number in powers of a thousand: `"12.3 k"` of `12345.0`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} E"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
