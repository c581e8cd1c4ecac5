"""A machine's profile as two charts: matmul and attention rates, and what copies, links and disks
carry."""

from pathlib import Path

from longshift.cluster.cluster import Cluster
from longshift.profile.report import FAMILIES, rate
from longshift.reports.page import Series, chart, grid, paragraphs, write_page

RATES = ("matmul", "attention")


def write_html(cluster: Cluster, file: Path) -> None:
    """Raises UsageError where the file cannot be written."""
    rates: list[Series] = []
    carried: list[Series] = []
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
        series = rates if family in RATES else carried
        series.append(Series(name, y, len(series), x=x))
    charts = (
        chart(
            "Arithmetic",
            "Matmul (largest k, n) and attention.",
            rates,
            "FLOP/s",
            "rows or tokens",
            log=True,
            wide=True,
        ),
        chart(
            "Bytes",
            "Copies, elementwise, collectives and disk.",
            carried,
            "bytes/s",
            "bytes",
            log=True,
            wide=True,
        ),
    )
    origin = f"{cluster.origin}, {cluster.nodes} x {cluster.devices_per_node}"
    write_page(file, f"longshift profile: {cluster.name}", [paragraphs([origin]), grid(charts)])
