"""What a terminal shows of steps: one live line, plain lines, or JSON lines."""

import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longshift.layout.layout import format_size
from longshift.print_result import OutputConsole, gib_text
from longshift.terminal import read_or_not, short_number
from longshift.trainer.metrics import GroupMetrics, StepMetrics

LABEL = 8  # columns of a line's name
# Steps that stay above the live line; of later ones, one in LEAST_GAP_S seconds, and in GAP_SHARE
# of the seconds so far.
FIRST = 10
LEAST_GAP_S = 5.0
GAP_SHARE = 0.01
LEAST = ("flops", "offload", "predicted", "lr", "norm")  # that a line can lack, the first one first
# The same, where what is left is said in few letters.
LEAST_BRIEF = ("memory", "groups", "skipped", "valid")


class Display:
    """Shows steps as they come: on a terminal one live line, above which some of the steps before
    stay; plain lines elsewhere; JSON lines where asked for. `latest`: the file that names the
    newest checkpoint, so that a line says when there is a new one. `clock`: seconds. Mutable: what
    it has shown."""

    def __init__(
        self,
        steps: int,
        as_json: bool = False,
        console: Console | None = None,
        latest: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._steps = steps
        self._as_json = as_json
        self._latest = latest
        self._clock = clock
        self._console = console or OutputConsole(file=sys.stdout, highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False)
            if self._console.is_terminal and not as_json
            else None
        )
        self._step: StepMetrics | None = None  # on the live line
        self._saved = self._newest()
        self._num_kept = 0
        self._begin_s = clock()
        self._kept_s = clock()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._live.update(Text("waiting for the first step"), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with read_or_not():
                # A run without a step must not leave "waiting for the first step".
                if self._step is None:
                    self._live.update(Text(""), refresh=True)
                self._live.stop()
                if saved := self._saved_now():
                    self._print(saved)

    def memory(self, text: str) -> None:
        """What memory the steps that follow need; on a terminal alone."""
        with read_or_not():
            if self._live:
                self._console.print(
                    Text("\n".join(named_lines("memory", text, self._console.width))), ""
                )

    def show(self, step: StepMetrics) -> None:
        with read_or_not():
            if self._live is None:
                print(
                    step.to_json() if self._as_json else describe(step, self._steps),
                    file=self._console.file,
                    flush=True,
                )
                return
            saved = self._saved_now()
            if self._step and (saved or self._stays(self._step)):
                self._print(fitted(self._step, self._steps, self._console.width))
                self._num_kept += 1
                self._kept_s = self._clock()
            if saved:
                self._print(saved)
            self._step = step
            self._live.update(
                Text(
                    fitted(step, self._steps, self._console.width),
                    no_wrap=True,
                    overflow="ellipsis",
                ),
                refresh=True,
            )

    def _stays(self, step: StepMetrics) -> bool:
        """Whether a step that is over stays above the live line: the first ones, then fewer as the
        run grows old, and what is not usual."""
        gap_s = max(LEAST_GAP_S, GAP_SHARE * (self._clock() - self._begin_s))
        unusual = step.valid_loss is not None or step.skipped or not math.isfinite(step.loss)
        return self._num_kept < FIRST or unusual or self._clock() - self._kept_s >= gap_s

    def _print(self, line: str) -> None:
        self._console.print(Text(line, no_wrap=True, overflow="ellipsis"))

    def _newest(self) -> str | None:
        with suppress(OSError):
            return (
                self._latest.read_text(encoding="utf-8", errors="replace").strip()
                if self._latest
                else None
            )
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
    return textwrap.wrap(
        f"{name:<{LABEL}}{text}", width, subsequent_indent=" " * LABEL, break_on_hyphens=False
    )


def describe(step: StepMetrics, steps: int) -> str:
    """A step as one line; `steps` is the length of the run."""
    return "  ".join(_words(step, steps).values())


def fitted(step: StepMetrics, steps: int, width: int) -> str:
    """As much of `describe` as has room in `width` columns, in few letters where it must. Step,
    loss, tokens/s and ETA stay; the seconds of each layout do before memory, which the header
    says."""
    words = _words(step, steps)
    for lacking in ("", *LEAST):
        words.pop(lacking, None)
        if len(line := "  ".join(words.values())) <= width:
            return line
    words["rate"] = f"{short_number(step.tokens_per_s).replace(' ', '')} tok/s"
    words["memory"] = _memory(step.memory_bytes)
    if step.skipped:
        words["skipped"] = "skipped"
    if "groups" in words:
        words["groups"] = _brief_group_words(step.groups)
    for lacking in ("", *LEAST_BRIEF):
        words.pop(lacking, None)
        if len(line := " ".join(words.values())) <= width:
            return line
    return f"{step.step}/{steps} loss {step.loss:.4g} {words['rate']} {words['eta']}"


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
        "flops": f"{short_number(step.model_flops_per_s)}FLOP/s",
        "memory": f"{step.memory_bytes / 2**20:.0f} MiB",
    }
    if step.predicted_seconds is not None and step.band is not None:
        words["predicted"] = (
            f"{step.seconds:.3g} s of {step.predicted_seconds:.3g} predicted, within"
            f" {step.band:.0%}"
        )
    if len(step.groups) > 1:
        words["groups"] = _group_words(step.groups)
    if any(group.put_bytes for group in step.groups):
        words["offload"] = _offload_words(step.groups)
    words["eta"] = f"ETA {_clock((steps - step.step) * step.seconds)}"
    if step.skipped:
        words["skipped"] = "update skipped (fp16 overflow)"
    return words


def _group_words(groups: Sequence[GroupMetrics]) -> str:
    """Seconds of each group, by length where one layout computes all, and of switches otherwise."""
    if len({group.layout for group in groups}) == 1:
        return ", ".join(f"<= {format_size(group.upto)} {group.seconds:.2f} s" for group in groups)
    by_group = ", ".join(f"{group.layout} {group.seconds:.2f} s" for group in groups)
    hidden_s = sum(group.switch_hidden_s for group in groups)
    exposed_s = sum(group.switch_exposed_s for group in groups)
    return f"{by_group}; switch {hidden_s:.2f} s hidden, {exposed_s:.2f} s exposed"


def _brief_group_words(groups: Sequence[GroupMetrics]) -> str:
    if len({group.layout for group in groups}) == 1:
        return (
            " ".join(f"<={format_size(group.upto)} {group.seconds:.2f}" for group in groups) + " s"
        )
    by_group = " ".join(f"{group.layout} {group.seconds:.2f}" for group in groups)
    return f"{by_group} switch {sum(group.switch_exposed_s for group in groups):.2f} s"


def _offload_words(groups: Sequence[GroupMetrics]) -> str:
    put = sum(group.put_bytes for group in groups) / 2**20
    fetched = sum(group.fetched_bytes for group in groups) / 2**20
    text = f"offload {put:.0f} MiB out, {fetched:.0f} MiB in"
    waited_s = [group.waited_s for group in groups if group.waited_s is not None]
    return text + (f", {sum(waited_s):.2f} s waited" if waited_s else "")


def _memory(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 10 * 2**30 else gib_text(size)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
