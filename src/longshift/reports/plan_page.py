"""A plan as a page: the choice in words, where a step's seconds go, what each group takes, and
every way's seconds against its memory. A machine's profile, by which it was planned, as another:
rates of matmul and attention, and what memory, copies, links and disks carry."""

import re
from collections.abc import Iterator
from pathlib import Path

from longshift.cluster.cluster import Cluster
from longshift.layout.layout import Layout, format_size
from longshift.profile.report import FAMILIES, rate
from longshift.reports.page import Series, bars, chart, folded, grid, paragraphs, write_page
from longshift.reports.run_page import shares_of
from longshift.trainer.planned_task import PlannedTask

GIB = 2**30
WORDS = {  # of a layout, before their number
    "dp": "{} data-parallel replicas",
    "tp": "tensor parallelism over {} ranks",
    "u": "Ulysses sequence parallelism over {} ranks",
    "ring": "ring attention over {} ranks",
    "pp": "{} pipeline stages",
    "v": "{} model chunks a rank",
    "z": "ZeRO-{}",
    "chunk": "chunks of {} tokens",
    "keep": "{} blocks of each stage keep all",
    "recompute-full": "gradient checkpointing",
    "recompute-selective": "gradient checkpointing of attention",
    "host": "activations in host memory",
    "disk": "activations on disk",
}
# Of a profile: curves of FLOP/s, and titles of the charts of others.
RATES = ("matmul", "attention")
TITLES = {"matmul": "Matmul", "elementwise": "Elementwise", "copy": "Copies", "disk": "Disk"}


def write_plan(plan: PlannedTask, file: Path) -> None:
    """Write the page. Raises UsageError where the file cannot be written."""
    cluster = plan.task.cluster
    lines = plan.lines()
    # Indented lines are items of a list, and a line that ends with a colon is its title.
    sentences = [line for line in lines if not line.startswith(" ") and not line.endswith(":")]
    summary = [line[:1].upper() + line[1:] for line in (*_choice(plan), *sentences)]
    compared = folded("What else was compared", paragraphs(lines))
    title = f"longshift plan: {cluster.nodes} x {cluster.devices_per_node} {cluster.name}"
    write_page(file, title, [paragraphs(summary), grid(_charts(plan)), compared])


def in_words(layout: Layout) -> str:
    """What the words of a layout mean."""
    meanings = []
    for word in str(layout).split("."):
        name, number, _ = re.fullmatch(r"([a-z-]+)(\d+\w*)?(.*)", word).groups()  # pyright: ignore
        meanings.append(WORDS.get(name, word).format(number))
    return ", ".join(meanings)


def _choice(plan: PlannedTask) -> Iterator[str]:
    best = plan.choice.best
    if best is None:
        return
    tokens = format_size(plan.task.tokens_per_step)
    yield (
        f"For {plan.task.lengths.documents:,} documents of up to"
        f" {format_size(plan.task.longest_document)} tokens, {tokens} tokens a step:"
    )
    for edge in best.edges:
        yield (
            f"documents to {format_size(edge.upto)} with {edge.use}: {in_words(edge.use)}, in packs"
            f" of {format_size(edge.pack)}."
        )


def _charts(plan: PlannedTask) -> Iterator[str]:
    best = plan.choice.best
    if best is not None:
        rows = plan.groups(best)
        shares = shares_of({f"to {format_size(row.upto)}: {row.layout}": row for row in rows})
        yield bars(
            "Groups",
            "Shares of a step: seconds, tokens and documents of each layout.",
            shares,
            "{:.1%}".format,
        )
        lanes = {lane: {"seconds": seconds} for lane, seconds in plan.lanes(best).items()}
        yield bars(
            "Where the seconds go",
            "Of the busiest stage, by lane; lanes run beside one another.",
            lanes,
            "{:.3g} s".format,
        )
    kinds = {
        "chosen": [best] if best is not None else [],
        "one layout": [],
        "a layout for each length": [],
    }
    for way in plan.choice.plans:
        if way is not best:
            kinds["one layout" if len(way.edges) == 1 else "a layout for each length"].append(way)
    series = []
    for name, ways in kinds.items():
        if ways:
            x = [way.bytes["device"] / GIB for way in ways]
            y = [way.seconds for way in ways]
            series.append(
                Series(name, y, len(series), x=x, style="dots", texts=[str(way) for way in ways])
            )
    note = (
        "Every way that was played: seconds of a step and memory. The dashed line is what a device"
        " has."
    )
    yield chart(
        "Ways",
        note,
        series,
        "seconds a step",
        "GiB a device",
        limit=plan.task.budget_bytes / GIB,
        wide=True,
    )


def write_profile(cluster: Cluster, file: Path) -> None:
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
