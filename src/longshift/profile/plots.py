"""Two plots in one HTML file that needs no network: matmul and attention rates, and what copies, links and disks carry."""

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from longshift.cluster.cluster import Cluster
from longshift.errors import UsageError
from longshift.profile.report import FAMILIES, rate

RATES = ("matmul", "attention")


def write_html(cluster: Cluster, file: Path) -> None:
    """Raises UsageError where the file cannot be written."""
    titles = ("Matmul (largest k, n) and attention", "Copies, elementwise, collectives and disk")
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, vertical_spacing=0.12)
    for name, curve in cluster.curves.items():
        family = name.split()[0]
        if family not in dict(FAMILIES):
            continue
        along = 0 if family in RATES else -1  # rows of a matmul, queries; bytes
        # The line where all other sizes are largest.
        largest = [axis.sizes[-1] for axis in curve.axes]
        x = []
        y = []
        for point, seconds in zip(curve.points, curve.seconds):
            line_point = list(largest)
            line_point[along] = point[along]
            if list(point) == line_point:
                x.append(point[along])
                y.append(rate(name, point, seconds)[0])
        hover = f"{name}<br>%{{x}}: %{{y:.3s}}"
        trace = go.Scatter(x=x, y=y, mode="lines+markers", name=name, hovertemplate=hover)
        figure.add_trace(trace, row=1 if family in RATES else 2, col=1)
    for row, (x, y) in enumerate((("rows or tokens", "FLOP/s"), ("bytes", "bytes/s")), start=1):
        figure.update_xaxes(type="log", title=x, row=row, col=1)
        figure.update_yaxes(type="log", title=y, row=row, col=1)
    figure.update_layout(title=f"{cluster.name}: {cluster.origin}", height=1100, template="plotly_white")
    try:
        file.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{file} cannot be written: {fault.strerror}") from None
