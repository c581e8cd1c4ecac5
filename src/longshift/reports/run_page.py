"""The page of `longshift report`: the loss first, then small charts of everything else, then facts
and settings, folded."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longshift.layout.layout import format_size
from longshift.print_result import size_text
from longshift.reports.page import (
    Series,
    Style,
    bars,
    chart,
    folded,
    grid,
    paragraphs,
    table,
    write_page,
)
from longshift.reports.read import GroupSums, RunReport

STRETCHES = 250  # of a long run, in which the lowest and the highest point of each curve are drawn
BY_STEP = (  # title, sentence, series of a report, title of its axis, whether its axis begins at 0
    ("Tokens a second", "Of all ranks.", "tokens_per_s", "tokens/s", True),
    ("Gradient norm", "Global, before clipping.", "grad_norm", "norm", False),
    ("Learning rate", "Of each update.", "lr", "learning rate", True),
    (
        "Model FLOP/s",
        "Forward and backward of all ranks; recomputation is not counted.",
        "model_flops_per_s",
        "FLOP/s",
        True,
    ),
)
TIMES = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
SHARES = ("seconds", "tokens", "documents")

Column = Sequence[float | None]  # a value for each step of a run


class _Drawn(NamedTuple):
    """A run as it is drawn. `name`: short, of a run beside others, else empty; `kept`: places of
    the steps that are drawn."""

    run: RunReport
    number: int
    name: str
    kept: np.ndarray

    def series(self, what: str, column: Column, colour: int, style: Style = "line") -> Series:
        """A curve of the steps that are drawn."""
        name = ", ".join(filter(None, (self.name, what)))
        y = [column[place] for place in self.kept]
        return Series(name, y, colour, self.number, style=style)

    def column(self, rows: Sequence[Mapping[str, Any]], key: str) -> Column:
        """What rows of some steps have under a key."""
        by_step = {row["step"]: row[key] for row in rows}
        return [by_step.get(step) for step in self.run.steps]

    def along(self, unit_s: float) -> list[list[float]]:
        """Steps, tokens so far and the time so far."""
        tokens, seconds = (
            np.cumsum([value or 0.0 for value in self.run.series[name]])
            for name in ("tokens", "seconds")
        )
        return [
            values[self.kept].tolist()
            for values in (np.array(self.run.steps), tokens, seconds / unit_s)
        ]


def write(runs: Sequence[RunReport], file: Path) -> None:
    """Write the page. Raises UsageError where the file cannot be written."""
    names = [Path(run.name).name for run in runs]
    # Folders of one name are told apart by their paths.
    if len(set(names)) < len(runs):
        names = [run.name for run in runs]
    drawn = [
        _Drawn(run, number, name * (len(runs) > 1), kept_steps(run))
        for number, (run, name) in enumerate(zip(runs, names))
    ]
    longest_s = max(run.facts["seconds"] for run in runs)
    unit, unit_s = next((time for time in TIMES if longest_s >= time[1]), TIMES[-1])
    is_thinned = any(len(entry.kept) < len(entry.run.steps) for entry in drawn)
    parts = (
        paragraphs(map(_sentence, drawn)),
        grid(_charts(drawn, is_thinned)),
        *_tables(drawn, names),
    )
    data = {
        "by": ("steps", "tokens", unit),
        "x": [entry.along(unit_s) for entry in drawn],
        "smooth": 0.9 * is_thinned,
    }
    write_page(file, f"longshift report: {', '.join(names)}", parts, data)


def kept_steps(run: RunReport) -> np.ndarray:
    """Places of the steps that are drawn: all of a short run, else of each stretch those where a
    series has its least or most."""
    places = np.arange(len(run.steps))
    if len(places) <= 8 * STRETCHES:
        return places
    kept = {
        0,
        len(places) - 1,
        *np.flatnonzero(np.isin(run.steps, [row["step"] for row in run.valid])).tolist(),
    }
    columns = np.array(list(run.series.values()), dtype=float)  # None becomes nan
    for stretch in np.array_split(places, STRETCHES):
        for column in columns[:, stretch]:
            if np.isfinite(column).any():
                kept |= {int(stretch[np.nanargmin(column)]), int(stretch[np.nanargmax(column)])}
    return np.array(sorted(kept))


def _sentence(drawn: _Drawn) -> str:
    facts = drawn.run.facts
    ended = f"finished {facts['steps']:,} steps" if facts["ended"] == "finished" else facts["ended"]
    loss = (
        ""
        if facts["last losses"] is None
        else f"loss {facts['first losses']:.3f} to {facts['last losses']:.3f}; "
    )
    speed = (
        f"{facts['median tokens per second']:,.0f} tokens/s; {size_text(facts['memory'])} on the"
        " fullest rank"
    )
    begin = f"{drawn.name}: {ended}" if drawn.name else ended.capitalize()
    return f"{begin}; {loss}{speed}; layout {facts['layout']}"


def _charts(drawn: Sequence[_Drawn], is_thinned: bool) -> Iterator[str]:
    """The loss, then what is small."""
    note = "Mean over the step's target tokens; validation is of documents that are not trained on."
    note += (
        f" Of a long run, the lowest and the highest of each of {STRETCHES} stretches are drawn,"
        " and smoothed." * is_thinned
    )
    has_valid = any(entry.run.valid for entry in drawn)
    losses = _series(drawn, "loss", "training" * has_valid)
    for entry in drawn:
        if entry.run.valid:
            column = entry.column(entry.run.valid, "loss")
            losses.append(entry.series("validation", column, len(drawn) + entry.number, "dash"))
    yield chart("Loss", note, losses, "nats a token", wide=True)
    for title, sentence, key, axis, zero in BY_STEP:
        yield chart(title, sentence, _series(drawn, key), axis, zero=zero)
    memory = _series(drawn, "memory_bytes", "process")
    for entry in drawn:
        tensors = [entry.run.memory["device"]["total"]] * len(entry.run.steps)
        memory.append(
            entry.series("tensors, as forecast", tensors, len(drawn) + entry.number, "dash")
        )
    yield chart(
        "Memory",
        "Of the fullest rank: its process at the most, and its tensors.",
        memory,
        "bytes",
        zero=True,
    )

    by_length = {}
    for entry in drawn:
        for upto, loss in entry.run.valid[-1]["by_length"].items() if entry.run.valid else ():
            by_length.setdefault(f"to {format_size(int(upto))}", {})[entry.name] = loss or 0.0
    if by_length:
        yield bars(
            "Validation by length",
            "Nats a token of the last validation, by how long a document is.",
            by_length,
            "{:.4f}".format,
        )
    for entry in drawn:
        yield from _charts_of_run(entry)


def _series(drawn: Sequence[_Drawn], key: str, what: str = "") -> list[Series]:
    """A curve of every run."""
    return [entry.series(what, entry.run.series[key], entry.number) for entry in drawn]


def _charts_of_run(drawn: _Drawn) -> Iterator[str]:
    """What is drawn of each run alone."""
    run = drawn.run
    owner = f" of {drawn.name}" * bool(drawn.name)
    peaks = "; ".join(
        f"{place}: {size_text(peak['total'])} in {peak['during']}"
        for place, peak in run.memory.items()
    )
    alive: dict[str, dict[str, float]] = {}
    for place, peak in run.memory.items():
        for what, size in sorted(peak["alive"].items(), key=lambda item: -item[1]):
            alive.setdefault(what, {})[place] = size
    note = (
        f"What tensors of rank {run.memory['device']['rank']} are alive at the peak of each place,"
        f" as forecast. {peaks}."
    )
    yield bars(f"Memory by place{owner}", note, alive, size_text)
    if run.groups:
        rows = {f"to {format_size(group.upto)}: {group.layout}": group for group in run.groups}
        note = "Shares of the run; seconds of the slowest rank."
        yield bars(f"Groups of lengths{owner}", note, shares_of(rows), "{:.1%}".format)
    if run.predicted:
        measured, predicted, bands = (
            drawn.column(run.predicted, key) for key in ("seconds", "predicted_seconds", "band")
        )
        forecast = drawn.series("predicted", predicted, 1, "dash")._replace(
            band=drawn.series("", bands, 1).y
        )
        series = (forecast, drawn.series("measured", measured, 0))
        yield chart(
            f"Predicted seconds{owner}",
            "What the clock said before each step.",
            series,
            "seconds",
            zero=True,
        )


def shares_of(rows: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What each row has of the seconds, tokens and documents of all."""
    totals = {name: sum(getattr(row, name) for row in rows.values()) or 1 for name in SHARES}
    return {
        label: {name: getattr(row, name) / total for name, total in totals.items()}
        for label, row in rows.items()
    }


def _tables(drawn: Sequence[_Drawn], names: Sequence[str]) -> Iterator[str]:
    """Facts, settings and sums, each folded."""
    runs = [entry.run for entry in drawn]
    head = ("", *names)
    if len(runs) > 1:
        yield folded("Settings that differ", _differences(runs, head))
    keys = [key for key in runs[0].facts if any(run.facts[key] is not None for run in runs)]
    facts = [(key, *(_shown(key, run.facts[key]) for run in runs)) for key in keys]
    yield folded("Facts", table([head, ("folder", *(run.name for run in runs)), *facts]))
    for run, name in zip(runs, names):
        if run.groups:
            rows = ([_shown(key, value) for key, value in group] for group in run.groups)
            columns = [key.replace("_", " ") for key in GroupSums.model_fields]
            yield folded(f"Groups of lengths in numbers: {name}", table([columns, *rows]))
    absent = {
        "Validation is not drawn: no run has validated (data.valid, or data.held_out).": any(
            run.valid for run in runs
        ),
        "Groups of lengths are not drawn: one layout computed all documents.": any(
            run.groups for run in runs
        ),
        "Predicted seconds are not drawn: the clock was not calibrated; layout: auto does so.": any(
            run.predicted for run in runs
        ),
    }
    yield folded(
        "What is not drawn",
        paragraphs(sentence for sentence, is_drawn in absent.items() if not is_drawn),
    )


def _differences(runs: Sequence[RunReport], head: tuple[str, ...]) -> str:
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [json.dumps(run.config.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return table([head, *rows]) if rows else paragraphs(["None."])


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "memory" or key.endswith("_bytes"):
        return size_text(value)
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(value) if isinstance(value, list) else str(value)
