"""A plan as plots in one HTML file that needs no network: where a step's seconds go, what each group takes, and every way's seconds
against its memory."""

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from longshift.errors import UsageError
from longshift.layout.layout import format_size
from longshift.trainer.auto_plan import Planned

GIB = 2**30


def write_html(plan: Planned, file: Path) -> None:
    """Write the plots. Raises UsageError where the file cannot be written."""
    task = plan.task
    best = plan.choice.best
    titles = ("seconds of the busiest stage, by lane", "seconds and tokens of each group", "ways: seconds against GiB a device")
    figure = make_subplots(rows=3, cols=1, subplot_titles=titles, vertical_spacing=0.1, specs=[[{}], [{"secondary_y": True}], [{}]])
    if best is not None:
        for lane, seconds in plan.lanes(best).items():
            figure.add_trace(go.Bar(x=[seconds], y=["step"], orientation="h", name=lane), row=1, col=1)
        rows = plan.groups(best)
        names = [f"up to {format_size(row.upto)}: {row.layout}, packs of {format_size(row.pack)}" for row in rows]
        figure.add_trace(go.Bar(x=names, y=[row.seconds for row in rows], name="seconds"), row=2, col=1)
        tokens = go.Scatter(x=names, y=[row.tokens for row in rows], mode="markers", name="tokens", marker={"size": 12})
        figure.add_trace(tokens, row=2, col=1, secondary_y=True)
    single = [way for way in plan.choice.ways if len(way.edges) == 1]
    grouped = [way for way in plan.choice.ways if len(way.edges) > 1]
    for name, ways in (("single layouts", single), ("groups", grouped)):
        points = go.Scatter(
            x=[way.bytes["device"] / GIB for way in ways],
            y=[way.seconds for way in ways],
            text=[str(way).replace("<", "&lt;") for way in ways],  # plotly reads it as HTML
            mode="markers",
            name=name,
            hovertemplate="%{text}<br>%{x:.1f} GiB, %{y:.3g} s",
        )
        figure.add_trace(points, row=3, col=1)

    # The axes, and what the cluster is.
    figure.add_vline(x=task.budget_bytes / GIB, line_dash="dash", row=3, col=1)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(title="seconds", row=1, col=1)
    figure.update_yaxes(title="seconds", rangemode="tozero", row=2, col=1, secondary_y=False)
    figure.update_yaxes(title="tokens", rangemode="tozero", row=2, col=1, secondary_y=True)
    figure.update_xaxes(title="GiB a device", row=3, col=1)
    figure.update_yaxes(title="seconds a step", row=3, col=1)
    where = f"{task.cluster.nodes} x {task.cluster.devices_per_node} {task.cluster.name}"
    figure.update_layout(title=f"longshift plan: {where}", barmode="stack", height=1200, template="plotly_white")
    try:
        file.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{file} cannot be written: {fault.strerror}") from None
