"""The charts of docs/benchmarks, from the results that are kept: `python benchmarks/charts.py` writes docs/assets/*.svg anew.

A chart has groups of horizontal bars, one bar a series, with its number. It follows the reader's light or dark, and has paper of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kept import result, size

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 560, 168, 64, 16, 10, 62
STYLE = """text{font:14px system-ui,sans-serif;fill:#1b1f24}.t{font-weight:600}.p{fill:#fff}.l{stroke:#57606a;stroke-dasharray:4 3}
.s0{fill:#2867c7}.s1{fill:#c26a12}.s2{fill:#4b8b5b}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.p{fill:#161b22}.l{stroke:#9aa4af}.s0{fill:#6ba1f5}.s1{fill:#e59a4c}.s2{fill:#79bd8b}}"""


class Chart(NamedTuple):
    """Groups of bars. A value may be missing; `mark` is where a line stands."""

    title: str
    series: Sequence[str]
    groups: Mapping[str, Sequence[float | None]]
    form: str
    mark: float | None = None


def svg(chart: Chart) -> str:
    """The chart as a picture."""
    most = max(value for values in chart.groups.values() for value in values if value is not None)
    scale = (WIDTH - LEFT - RIGHT) / most
    parts, y = [f'<text class="t" x="12" y="24">{escape(chart.title)}</text>'], TOP
    x = 12.0
    for number, name in enumerate(chart.series):
        parts.append(f'<rect class="s{number}" x="{x:g}" y="37" width="12" height="12"/><text x="{x + 18:g}" y="48">{escape(name)}</text>')
        x += 38 + 7.6 * len(name)
    for name, values in chart.groups.items():
        shown = [(number, value) for number, value in enumerate(values) if value is not None]
        middle = y + BAR * len(shown) / 2 + 5
        parts.append(f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">{escape(name)}</text>')
        for number, value in shown:
            length = value * scale
            parts.append(f'<rect class="s{number}" x="{LEFT}" y="{y + 1}" width="{length:.1f}" height="{BAR - 2}"/>')
            end = max(length, scale * (chart.mark or 0))  # numbers stand behind the line
            parts.append(f'<text x="{LEFT + end + 6:.1f}" y="{y + 13}">{chart.form.format(value)}</text>')
            y += BAR
        y += GAP
    if chart.mark is not None:
        at = LEFT + chart.mark * scale
        parts.append(f'<line class="l" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{y - GAP + 4}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 2}" width="{WIDTH}" height="{y + 2}" role="img">'
    paper = f'<rect class="p" width="{WIDTH}" height="{y + 2}" rx="6"/>'
    return "\n".join((head, f"<title>{escape(chart.title)}</title><style>{STYLE}</style>{paper}", *parts, "</svg>\n"))


def peers() -> Chart:
    ratios = result("static")["summary"]["ratio_to_best_peer"]
    groups = {layout: [row["float32"], row["bf16"]] for layout, row in ratios.items()}
    return Chart("Speed over the fastest peer, two CPU ranks", ("float32", "bf16"), groups, "{:.2f}", 1)


def one_gpu() -> Chart:
    rows = [row for row in result("gpu_first_day", "H200, later")["rows"] if row["part"] == "rivals"]
    seconds = {(row["system"], row["layout"]): row["measured"]["seconds"] for row in rows}
    groups = {
        "plain": [seconds["longshift", "dp1"], seconds["fsdp2", "dp1"]],
        "compiled": [seconds["longshift compiled", "dp1"], seconds["fsdp2 compiled", "dp1"]],
        "checkpointing": [seconds["longshift", "recompute-full"], seconds["fsdp2 checkpoint", "recompute-full"]],
    }
    return Chart("Seconds a step of 8K tokens, one H200", ("Longshift", "torch FSDP2"), groups, "{:.3f}")


def hot_switching() -> Chart:
    found = {}
    for number, section in enumerate(("2 nodes of 2 ranks, python", "2 nodes of 2 ranks, text")):
        (budgets,) = result("hot_switch", section)["summary"]["compared"].values()
        for budget in budgets:
            if budget.get("static_all"):
                found.setdefault(budget["budget_mib"], [None, None])[number] = budget["static_all"]["ratio"]
    groups = {f"{budget:.0f} MiB a rank": found[budget] for budget in sorted(found)}
    return Chart("Speed over the best single layout, by memory", ("Python's sources", "Wikipedia's lengths"), groups, "{:.2f}", 1)


def long_documents() -> Chart:
    sections = [result("long_context", name)["rows"] for name in ("by length", "256K")]
    peaks = {(row["method"], row["tokens"]): row["peak_mib"] for rows in sections for row in rows}
    methods = ("recompute", "stream", "stream kv-offload")
    groups = {f"{size(n)} tokens": [peaks.get((method, n)) for method in methods] for n in sorted({n for _, n in peaks})}
    return Chart("MiB of a training step, by document length", ("gradient checkpointing", "chunks", "chunks, kv-offload"), groups, "{:.0f}")


def training_state() -> Chart:
    rows = {(row["home"], row["tokens"]): row["step_s"] for row in result("state_tiers")["rows"] if row["part"] == "speed"}
    homes = ("device", "host", "disk")
    groups = {f"{n:,} tokens": [rows[home, n] / rows["device", n] for home in homes] for n in sorted({n for _, n in rows})}
    return Chart("Seconds of a step, over those with state on the device", homes, groups, "{:.2f}", 1)


def planning() -> Chart:
    found = [result(name)["summary"]["auto_over_best_static_by_corpus"] for name in ("plan_choice_2x2", "plan_choice_2x4")]
    groups = {corpus: [case[corpus] for case in found] for corpus in found[0]}
    return Chart("Plan over best single layout, at its best budget", ("four CPU ranks", "eight CPU ranks"), groups, "{:.2f}", 1)


CHARTS: Mapping[str, Callable[[], Chart]] = {
    **{"peers": peers, "one-gpu": one_gpu, "hot-switching": hot_switching, "long-documents": long_documents},
    **{"training-state": training_state, "planning": planning},
}

if __name__ == "__main__":
    for name, chart in CHARTS.items():
        (ASSETS / f"{name}.svg").write_text(svg(chart()))
