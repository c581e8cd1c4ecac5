"""A machine's profile as charts: rates of matmul and attention, and what memory, copies, links
and disks carry."""

from pathlib import Path

from longshift.cluster.cluster import Cluster
from longshift.profile.report import FAMILIES, rate
from longshift.reports.page import Series, chart, grid, paragraphs, write_page

RATES = ("matmul", "attention")
TITLES = {"matmul": "Matmul", "elementwise": "Elementwise", "copy": "Copies", "disk": "Disk"}


def write_html(cluster: Cluster, file: Path) -> None:
    """Write the page. Raises UsageError where the file cannot be written."""
    drawn: dict[tuple[str, bool], list[Series]] = {}  # by title, and whether it is of FLOP/s
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
        title, label = _title_and_label(name)
        series = drawn.setdefault((title, family in RATES), [])
        series.append(Series(label, y, len(series), x=x))
    charts = []
    for (title, is_rate), series in drawn.items():
        heads = "Query heads / key heads x width. " * title.startswith("Attention")
        note = f"{heads}Other sizes are the largest." if is_rate else ""
        y_axis, x_axis = ("FLOP/s", "rows or tokens") if is_rate else ("bytes/s", "bytes")
        charts.append(chart(title, note, series, y_axis, x_axis, log=True))
    origin = f"{cluster.origin}, {cluster.nodes} x {cluster.devices_per_node}"
    write_page(file, f"longshift profile: {cluster.name}", [paragraphs([origin]), grid(charts)])


def _title_and_label(name: str) -> tuple[str, str]:
    """The chart that a curve is drawn in, and what it is called there."""
    words = name.split()
    if words[0] == "attention":
        _, kernel, dtype, direction, mask, heads = words
        return f"Attention {direction}, {heads} heads", f"{kernel} {dtype} {mask}"
    if words[0] in TITLES:
        return TITLES[words[0]], " ".join(words[1:])
    return "Collectives", name
