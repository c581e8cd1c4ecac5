"""What was measured, as tables that a person can read."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longshift.cluster.cluster import Cluster, Heads
from longshift.cluster.curves import Curve
from longshift.layout.layout import format_size
from longshift.print_result import gib_text
from longshift.terminal import short_number
from longshift.weigh.recorder import AttentionCall

FAMILIES = (  # (first word of the curves' names, title)
    ("matmul", "matmul: [m, k] @ [k, n]"),
    ("attention", "attention, by tokens or keys"),
    ("elementwise", "elementwise, by bytes read and written"),
    ("copy", "copies, by bytes"),
    ("all_gather", ""),
    ("reduce_scatter", ""),
    ("all_reduce", ""),
    ("all_to_all", ""),
    ("send", "collectives, by bytes of the whole buffer"),
    ("cores", "cores of a rank that sends and receives, by bytes"),
    ("disk", "disk, by bytes of a block"),
)


def show(cluster: Cluster, console: Console) -> None:
    """Print constants, kernels and rates."""
    console.print(_summary(cluster))
    if cluster.backends:
        console.print(_backends(cluster))

    # Families without a title stand in the table of the next one that has it.
    rows: list[tuple[str, Curve]] = []
    for word, title in FAMILIES:
        rows += [(name, curve) for name, curve in cluster.curves.items() if name.split()[0] == word]
        if title and rows:
            console.print("", _rates(title, rows))
            rows = []


def rate(name: str, sizes: Sequence[float], seconds: float) -> tuple[float, str]:
    """Work a second at a point of a curve, and its unit."""
    words = name.split()
    if words[0] == "matmul":
        rows, inner, columns = sizes
        return 2 * rows * inner * columns / seconds, "FLOP/s"
    if words[0] == "attention":
        direction, shape, heads = words[3:6]
        rows = int(sizes[0])
        keys = int(sizes[-1])
        # A causal square computes half of its pairs.
        pairs = rows * keys * (0.5 if shape == "causal" else 1.0)
        call = AttentionCall(direction == "backward", rows, keys, pairs, Heads.parse(heads))
        return call.flops / seconds, "FLOP/s"
    return sizes[-1] / seconds, "B/s"


def _summary(cluster: Cluster) -> Table:
    device = cluster.device
    table = Table("", "", box=None, show_header=False)
    nodes = f"{cluster.nodes} x {cluster.devices_per_node}" if cluster.devices > 1 else "1"
    threads = f", {cluster.facts['threads']} threads" if "threads" in cluster.facts else ""
    cores = f", {device.cores:.2f} cores granted" if device.cores else ""
    table.add_row("device", f"{device.name}, {nodes}{threads}{cores}")

    table.add_row(
        "origin",
        f"{cluster.origin} ({cluster.facts.get('measured', 'constants')}), torch"
        f" {cluster.facts.get('torch', '-')}",
    )
    table.add_row(
        "arithmetic",
        ", ".join(
            f"{name} {short_number(flops)}FLOP/s" for name, flops in device.flops_per_s.items()
        ),
    )
    table.add_row(
        "memory",
        f"{gib_text(device.memory_bytes)}, {short_number(device.memory_bytes_per_s)}B/s",
    )
    table.add_row("launch floor", f"{device.launch_s * 1e6:.2f} us")
    for level, link in cluster.links.items():
        table.add_row(
            f"{level} link",
            f"{short_number(link.bytes_per_s)}B/s one way, {link.latency_s * 1e6:.0f} us",
        )
    if late := cluster.curves.get("late"):
        table.add_row(
            "late",
            f"{late.axes[0].sizes[-1]:.0f} ranks that have computed wait"
            f" {late.seconds[-1] * 1e3:.2g} ms at a collective",
        )
    if cluster.disk:
        table.add_row(
            "disk",
            f"reads {short_number(cluster.disk.read_bytes_per_s)}B/s, writes"
            f" {short_number(cluster.disk.write_bytes_per_s)}B/s",
        )
    return table


def _backends(cluster: Cluster) -> Table:
    table = Table(
        "attention kernel",
        "dtype",
        "log-sum-exp",
        "takes a global one",
        "error fwd",
        "bwd",
        "",
        title="kernels",
        box=None,
    )
    for backend in cluster.backends:
        runs = not backend.why_not
        errors = backend.forward_error, backend.backward_error
        table.add_row(
            backend.name,
            backend.dtype,
            "yes" if backend.lse else "no" if runs else "",
            "yes" if backend.global_lse else "no" if runs else "",
            *("" if error is None else f"{error:.1e}" for error in errors),
            "" if runs else escape(f"not here: {backend.why_not}"),
        )
    return table


def _rates(title: str, rows: Sequence[tuple[str, Curve]]) -> Table:
    """A row for each curve and each choice of its leading sizes; a column for each last size."""
    sizes = sorted({size for _, curve in rows for size in curve.axes[-1].sizes})
    unit = rate(rows[0][0], rows[0][1].points[0], 1.0)[1]
    table = Table(
        "",
        "",
        *(format_size(int(size)) for size in sizes),
        "spread",
        title=escape(f"{title} ({unit})"),
        box=None,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, curve in rows:
        cells_of: dict[tuple[float, ...], dict[float, str]] = {}  # by leading sizes and last size
        for point, seconds in zip(curve.points, curve.seconds):
            cells_of.setdefault(point[:-1], {})[point[-1]] = short_number(
                rate(name, point, seconds)[0]
            )
        spread = f"{sorted(curve.spread)[len(curve.spread) // 2]:.0%}" if curve.spread else ""
        for leading_sizes, cells in cells_of.items():
            labels = (
                f"{axis.name} {format_size(int(size))}"
                for axis, size in zip(curve.axes, leading_sizes)
            )
            table.add_row(name, ", ".join(labels), *(cells.get(size, "") for size in sizes), spread)
    return table
