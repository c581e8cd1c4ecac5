"""Curves and bars of runs, as plotly figures without colours of text, which the page sets by the reader's colour scheme."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from longshift.layout.layout import format_size
from longshift.reports.read import RunReport

MIB = 2**20
PALETTE = ("#4c8bf5", "#e8710a", "#1e9e6a", "#b54ad1", "#d0402b", "#8c7a2f")  # legible on white and on black


def losses(runs: Sequence[RunReport]) -> go.Figure:
    """Training loss by step, and validation where there is one."""
    figure = go.Figure()
    for run, colour in _coloured(runs):
        figure.add_trace(_line(run.steps, run.series["loss"], f"{_named(run)}training", colour))
        if run.valid:
            steps = [row["step"] for row in run.valid]
            valid_losses = [row["loss"] for row in run.valid]
            figure.add_trace(_line(steps, valid_losses, f"{_named(run)}validation", colour, "dash", "lines+markers"))
    return _titled(figure, "step", "loss, nats a token")


def valid_by_length(runs: Sequence[RunReport]) -> go.Figure | None:
    """The last validation, by length of the documents."""
    figure = go.Figure()
    for run, colour in _coloured(runs):
        if run.valid and run.valid[-1]["by_length"]:
            by_length = run.valid[-1]["by_length"]
            names = [f"up to {format_size(int(upto))}" for upto in by_length]
            figure.add_trace(go.Bar(x=names, y=list(by_length.values()), name=_said(run.name), marker_color=colour))
    return _titled(figure, "tokens of a document", "loss, nats a token") if figure.data else None


def over_steps(runs: Sequence[RunReport], name: str, title: str, scale: float = 1.0) -> go.Figure:
    """A series of the runs by step."""
    figure = go.Figure()
    for run, colour in _coloured(runs):
        figure.add_trace(_line(run.steps, [None if y is None else y / scale for y in run.series[name]], _said(run.name), colour))
    return _titled(figure, "step", title)


def memory(runs: Sequence[RunReport]) -> go.Figure:
    """The most that a rank had, by step, and the ledger's peak of its tensors on the device."""
    figure = over_steps(runs, "memory_bytes", "MiB of the fullest rank", MIB)
    for run, colour in _coloured(runs):
        ends = [run.steps[0], run.steps[-1]]
        figure.add_trace(_line(ends, [run.memory["device"]["total"] / MIB] * 2, f"{_named(run)}tensors, as forecast", colour, "dot"))
    return figure


def alive(run: RunReport) -> go.Figure:
    """What is alive at the ledger's peak of each place."""
    figure = go.Figure()
    names = dict.fromkeys(name for peak in run.memory.values() for name in peak["alive"])
    for name in names:
        sizes = [peak["alive"].get(name, 0) / MIB for peak in run.memory.values()]
        figure.add_trace(go.Bar(y=list(run.memory), x=sizes, name=name, orientation="h"))
    figure.update_layout(barmode="stack")
    return _titled(figure, "MiB", "")


def groups(run: RunReport) -> go.Figure:
    """Shares of seconds and of tokens by group of lengths."""
    figure = go.Figure()
    names = [f"up to {format_size(group.upto)}: {group.layout}" for group in run.groups]
    for quantity in ("seconds", "tokens", "documents"):
        values = [getattr(group, quantity) for group in run.groups]
        total = sum(values) or 1
        shares = [value / total for value in values]
        figure.add_trace(go.Bar(x=names, y=shares, name=quantity))
    figure.update_yaxes(tickformat=".0%")
    return _titled(figure, "", "share of the run")


def predicted(run: RunReport) -> go.Figure:
    """Seconds of each step beside those that were predicted before it, with the band."""
    rows = run.predicted
    steps = [row["step"] for row in rows]
    predicted_s = [row["predicted_seconds"] for row in rows]
    measured_s = [row["seconds"] for row in rows]
    bands = [row["band"] or 0.0 for row in rows]
    low_s = [seconds * (1 - band) for seconds, band in zip(predicted_s, bands)]
    high_s = [seconds * (1 + band) for seconds, band in zip(predicted_s, bands)]

    # The lower edge fills up to the trace before it, which is the upper edge without a line.
    figure = go.Figure()
    figure.add_trace(go.Scatter(x=steps, y=high_s, line={"width": 0}, showlegend=False, hoverinfo="skip"))
    grey = "rgba(128,128,128,0.25)"
    figure.add_trace(go.Scatter(x=steps, y=low_s, line={"width": 0}, fill="tonexty", fillcolor=grey, name="band"))
    figure.add_trace(_line(steps, predicted_s, "predicted", PALETTE[1], "dash"))
    figure.add_trace(_line(steps, measured_s, "measured", PALETTE[0]))
    return _titled(figure, "step", "seconds")


def _coloured(runs: Sequence[RunReport]) -> list[tuple[RunReport, str]]:
    return [(run, PALETTE[number % len(PALETTE)]) for number, run in enumerate(runs)]


def _named(run: RunReport) -> str:
    return f"{_said(run.name)}: "


def _said(text: str) -> str:
    """Text as plotly shows it, which takes tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, dash: str = "solid", mode: str = "lines") -> go.Scatter:
    mode = "lines+markers" if len(x) == 1 else mode
    return go.Scatter(x=list(x), y=list(y), name=name, mode=mode, line={"color": colour, "dash": dash})


def _titled(figure: go.Figure, x: str, y: str) -> go.Figure:
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    return figure.update_layout(height=360, margin={"l": 70, "r": 20, "t": 20, "b": 50}, legend={"orientation": "h", "y": -0.25})
