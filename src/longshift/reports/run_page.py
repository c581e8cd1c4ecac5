"""The page of `longshift report`: the loss first, then small charts of everything else, then facts and settings, folded."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longshift.layout.layout import format_size
from longshift.reports.page import Series, bars, chart, folded, grid, paragraphs, table, toolbar, write_page
from longshift.reports.read import RunReport

MIB = 2**20
MOST_SETTINGS = 200
STRETCHES = 250  # of a long run, in which the lowest and the highest point of each curve are drawn
BY_STEP = (  # title, sentence, series of a report, title of its axis, whether its axis begins at 0
    ("Tokens a second", "Of all ranks.", "tokens_per_s", "tokens/s", True),
    ("Gradient norm", "Global, before clipping.", "grad_norm", "norm", False),
    ("Learning rate", "Of each update.", "lr", "learning rate", True),
    ("Model FLOP/s", "Forward and backward of all ranks; recomputation is not counted.", "model_flops_per_s", "FLOP/s", True),
)
TIMES = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class _Drawn:
    """Runs as they are drawn. `names`: short; `kept`: places of the steps that are drawn, by run."""

    def __init__(self, runs: Sequence[RunReport]):
        self.runs = runs
        short = [Path(run.name).name for run in runs]
        self.names = short if len(set(short)) == len(runs) else [run.name for run in runs]
        self.kept = [kept_steps(run) for run in runs]
        longest_s = max(sum(value or 0.0 for value in run.series["seconds"]) for run in runs)
        self.unit, self.unit_s = next((time for time in TIMES if longest_s >= time[1]), TIMES[-1])

    @property
    def is_thinned(self) -> bool:
        """Whether some steps are not drawn."""
        return any(len(kept) < len(run.steps) for run, kept in zip(self.runs, self.kept))

    @property
    def axes(self) -> tuple[str, ...]:
        """What the toolbar offers."""
        return ("steps", "tokens", self.unit)

    def along(self) -> list[list[list[float]]]:
        """Of each run its steps, its tokens so far, and the time so far."""
        found = []
        for run, kept in zip(self.runs, self.kept):
            tokens, seconds = (np.cumsum([value or 0.0 for value in run.series[name]]) for name in ("tokens", "seconds"))
            found.append([values[kept].tolist() for values in (np.array(run.steps), tokens, seconds / self.unit_s)])
        return found

    def name(self, number: int, what: str) -> str:
        """Of a curve beside others of the run."""
        return what if len(self.runs) == 1 else f"{self.names[number]}, {what}"

    def series(self, key: str, scale: float = 1.0, name: str = "") -> list[Series]:
        """A curve of every run. `name`: where a run has others beside it."""
        found = []
        for number, (run, kept) in enumerate(zip(self.runs, self.kept)):
            y = [None if (value := run.series[key][place]) is None else value / scale for place in kept]
            found.append(Series(self.name(number, name) if name else self.names[number], y, number, number))
        return found

    def of_rows(self, name: str, rows: Sequence[Mapping[int, float | None]]) -> list[Series]:
        """A dashed curve of every run that has values by step, in colours of its own."""
        found = []
        for number, (run, kept, values) in enumerate(zip(self.runs, self.kept, rows)):
            if values:
                y = [values.get(run.steps[place]) for place in kept]
                found.append(Series(self.name(number, name), y, len(rows) + number, number, style="dash"))
        return found


def write(runs: Sequence[RunReport], file: Path) -> None:
    """Write the page. Raises UsageError where the file cannot be written."""
    drawn = _Drawn(runs)
    parts = [
        paragraphs(_sentence(run, name if len(runs) > 1 else "") for run, name in zip(runs, drawn.names)),
        toolbar(drawn.axes, 0.9 if drawn.is_thinned else 0.0),
    ]
    parts.append(grid(_charts(drawn)))
    parts += _tables(drawn)
    write_page(file, "longshift report: " + ", ".join(drawn.names), parts, drawn.axes, drawn.along())


def kept_steps(run: RunReport) -> np.ndarray:
    """Places of the steps that are drawn: all of a short run, else of each stretch those where a series has its least or most."""
    number = len(run.steps)
    if number <= 8 * STRETCHES:
        return np.arange(number)
    validated = {row["step"] for row in run.valid}
    kept = {0, number - 1, *(place for place, step in enumerate(run.steps) if step in validated)}
    columns = [np.array([np.nan if value is None else value for value in values], float) for values in run.series.values()]
    for stretch in np.array_split(np.arange(number), STRETCHES):
        for column in columns:
            if np.isfinite(part := column[stretch]).any():
                kept |= {int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])}
    return np.array(sorted(kept))


def _sentence(run: RunReport, name: str) -> str:
    facts = run.facts
    loss = "" if facts["last losses"] is None else f"loss {facts['first losses']:.3f} to {facts['last losses']:.3f}; "
    speed = f"{facts['tokens per second']:,.0f} tokens/s; {size_text(facts['memory'])} on the fullest rank"
    ended = facts["ended"] if facts["ended"] != "finished" else f"finished {facts['steps']:,} steps"
    return f"{name}: " * bool(name) + f"{ended if name else ended.capitalize()}; {loss}{speed}; layout {facts['layout']}"


def _charts(drawn: _Drawn) -> Iterator[str]:
    """The loss, then what is small."""
    runs = drawn.runs
    note = "Mean over the step's target tokens; validation is of documents that are not trained on."
    if drawn.is_thinned:
        note += f" Of a long run, the lowest and the highest of each of {STRETCHES} stretches are drawn, and smoothed."
    losses = drawn.series("loss", name="training" if any(run.valid for run in runs) else "")
    losses += drawn.of_rows("validation", [{row["step"]: row["loss"] for row in run.valid} for run in runs])
    yield chart("Loss", note, losses, "nats a token", wide=True)
    for title, sentence, key, axis, zero in BY_STEP:
        yield chart(title, sentence, drawn.series(key), axis, zero=zero)

    tensors = [dict.fromkeys(run.steps, run.memory["device"]["total"] / MIB) for run in runs]
    memory = drawn.series("memory_bytes", MIB, "process") + drawn.of_rows("tensors, as forecast", tensors)
    yield chart("Memory", "Of the fullest rank: its process at the most, and its tensors.", memory, "MiB", zero=True)
    by_length = {}
    for run, name in zip(runs, drawn.names):
        for upto, loss in run.valid[-1]["by_length"].items() if run.valid else ():
            by_length.setdefault(f"to {format_size(int(upto))}", {})[name] = loss or 0.0
    if by_length:
        yield bars("Validation by length", "Nats a token of the last validation, by how long a document is.", by_length, "{:.4f}".format)
    for number, run in enumerate(runs):
        yield from _charts_of_run(drawn, number, run)


def _charts_of_run(drawn: _Drawn, number: int, run: RunReport) -> Iterator[str]:
    """What is drawn of each run alone."""
    owner = "" if len(drawn.runs) == 1 else f" of {drawn.names[number]}"
    peaks = "; ".join(f"{place}: {size_text(peak['total'])} in {peak['during']}" for place, peak in run.memory.items())
    alive: dict[str, dict[str, float]] = {}
    for place, peak in run.memory.items():
        for what, size in sorted(peak["alive"].items(), key=lambda item: -item[1]):
            alive.setdefault(what, {})[place] = size
    note = f"What tensors of rank {run.memory['device']['rank']} are alive at the peak of each place, as forecast. {peaks}."
    yield bars(f"Memory by place{owner}", note, alive, size_text)
    if run.groups:
        totals = {name: sum(getattr(group, name) for group in run.groups) or 1 for name in ("seconds", "tokens", "documents")}
        shares = {}
        for group in run.groups:
            row = {name: getattr(group, name) / total for name, total in totals.items()}
            shares[f"to {format_size(group.upto)}: {group.layout}"] = row
        yield bars(f"Groups of lengths{owner}", "Shares of the run; seconds of the slowest rank.", shares, "{:.1%}".format)
    if run.predicted:
        by_step = {row["step"]: row for row in run.predicted}
        rows = [by_step.get(run.steps[place]) for place in drawn.kept[number]]
        predicted_s = [row and row["predicted_seconds"] for row in rows]
        widths = [row["predicted_seconds"] * (row["band"] or 0.0) if row else 0.0 for row in rows]
        high_s = [row and row["predicted_seconds"] + width for row, width in zip(rows, widths)]
        low_s = [row["predicted_seconds"] - width if row else 0.0 for row, width in zip(rows, widths)]
        series = [
            Series("band", high_s, 2, number, style="band", low=low_s),
            Series("predicted", predicted_s, 1, number, style="dash"),
            Series("measured", [row and row["seconds"] for row in rows], 0, number),
        ]
        yield chart(f"Predicted seconds{owner}", "What the clock said before each step.", series, "seconds", zero=True)


def _tables(drawn: _Drawn) -> Iterator[str]:
    """Facts, settings and sums, each folded."""
    runs = drawn.runs
    head = ("", *drawn.names)
    keys = [key for key in runs[0].facts if any(run.facts[key] is not None for run in runs)]
    rows = [("folder", *(run.name for run in runs)), *((key, *(_shown(key, run.facts[key]) for run in runs)) for key in keys)]
    if len(runs) > 1:
        yield folded("Settings that differ", *_differences(runs, head))
    yield folded("Facts", table([head, *rows]))
    for run, name in zip(runs, drawn.names):
        if run.groups:
            yield folded("Groups of lengths in numbers" + f": {name}" * (len(runs) > 1), _group_table(run))
    absent = []
    if not any(run.valid for run in runs):
        absent.append("Validation is not drawn: no run has validated (data.valid, or data.held_out).")
    if not any(run.groups for run in runs):
        absent.append("Groups of lengths are not drawn: one layout computed all documents.")
    if not any(run.predicted for run in runs):
        absent.append("Predicted seconds are not drawn: the clock was not calibrated; layout: auto does so in its trials.")
    if absent:
        yield folded("What is not drawn", paragraphs(absent))


def _differences(runs: Sequence[RunReport], head: tuple[str, ...]) -> Iterator[str]:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [json.dumps(run.config.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append((key, *values))
    yield table([head, *rows[:MOST_SETTINGS]]) if rows else paragraphs(["None."])
    if len(rows) > MOST_SETTINGS:
        yield paragraphs([f"and {len(rows) - MOST_SETTINGS} more"])


def _group_table(run: RunReport) -> str:
    head = ("up to", "layout", "steps", "documents", "tokens", "seconds", "tokens/s")
    head += ("switch hidden s", "exposed s", "to tiers", "from tiers", "waited s")
    rows = [
        (
            format_size(group.upto),
            group.layout,
            f"{group.steps:,}",
            f"{group.documents:,}",
            f"{group.tokens:,}",
            f"{group.seconds:.2f}",
            f"{group.tokens / group.seconds:,.0f}" if group.seconds else "",
            f"{group.switch_hidden_s:.2f}",
            f"{group.switch_exposed_s:.2f}",
            size_text(group.put_bytes),
            size_text(group.fetched_bytes),
            f"{group.waited_s:.2f}",
        )
        for group in run.groups
    ]
    return table([head, *rows])


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "memory":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else ", ".join(value) if isinstance(value, list) else str(value)


def size_text(size: float) -> str:
    """Bytes in the largest unit of which there is one."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
