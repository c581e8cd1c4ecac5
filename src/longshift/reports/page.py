"""Runs as one HTML file that needs no network, legible in light and dark."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from longshift.errors import UsageError
from longshift.layout.layout import format_size
from longshift.reports import figures
from longshift.reports.read import RunReport

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d0d7de; --paper: #ffffff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --line: #3d444d; --paper: #0d1117 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1060px; margin: 2em auto }
body { padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .3em } p { color: var(--soft); margin: .3em 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { text-align: left; padding: .2em .9em .2em 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 600 }
"""
SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)')
function draw() {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim()
  const axis = { gridcolor: of('--line'), zerolinecolor: of('--line'), linecolor: of('--line') }
  for (const data of document.querySelectorAll('script.figure')) {
    const { data: traces, layout } = JSON.parse(data.textContent)
    const clear = { paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: { color: of('--ink') } }
    const axes = { xaxis: { ...layout.xaxis, ...axis, automargin: true }, yaxis: { ...layout.yaxis, ...axis, automargin: true } }
    const modebar = { bgcolor: 'rgba(0,0,0,0)', color: of('--soft') }
    const all = { ...layout, ...clear, ...axes, modebar, template: null }
    Plotly.react(data.previousElementSibling, traces, all, { responsive: true, displaylogo: false })
  }
}
dark.addEventListener('change', draw)
draw()
"""
BYTES = ("memory",)
BY_STEP = (  # title, sentence, series of a report, title of its axis, and what its values are divided by
    ("Gradient norm", "Global, before clipping.", "grad_norm", "norm", 1.0),
    ("Learning rate", "Of each update.", "lr", "learning rate", 1.0),
    ("Tokens a second", "Of all ranks.", "tokens_per_s", "tokens/s", 1.0),
    ("Model FLOP/s", "Forward and backward of all ranks; recomputation is not counted.", "model_flops_per_s", "GFLOP/s", 1e9),
)
MOST_SETTINGS = 200


def write(runs: Sequence[RunReport], file: Path) -> None:
    """Write the page. Raises UsageError where the file cannot be written."""
    title = "longshift report: " + ", ".join(run.name for run in runs)
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
    body = "\n".join(part for run_part in _sections(runs) for part in run_part)
    text = f"{head}<body><h1>{escape(title)}</h1>\n{body}\n<script>{get_plotlyjs()}</script><script>{SCRIPT}</script></body></html>\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{file} cannot be written: {fault.strerror}") from None


def _sections(runs: Sequence[RunReport]) -> Iterator[list[str]]:
    is_single = len(runs) == 1
    head = ("", *(run.name for run in runs))
    keys = [key for key in runs[0].facts if any(run.facts[key] is not None for run in runs)]
    rows = [(key, *(_shown(key, run.facts[key]) for run in runs)) for key in keys]
    yield [_table([head, *rows])]
    if not is_single:
        yield ["<h2>Settings that differ</h2>", *_differences(runs)]
    yield _drawn("Loss", "Mean over the step's target tokens; validation is of documents that are not trained on.", figures.losses(runs))
    by_length = figures.valid_by_length(runs)
    if by_length:
        yield _drawn("Validation by length", "The last validation, by how long a document is.", by_length)
    else:
        yield _missing("Validation by length", "No run has validated (data.valid, or data.held_out).")
    for title, sentence, series, axis, scale in BY_STEP:
        yield _drawn(title, sentence, figures.over_steps(runs, series, axis, scale))
    yield _drawn(
        "Memory", "What the process of the fullest rank had at the most, and what its tensors were forecast to need.", figures.memory(runs)
    )
    for run in runs:
        owner = "" if is_single else f" of {run.name}"
        peaks = "; ".join(f"{place}: {_size(peak['total'])} in {peak['during']}" for place, peak in run.memory.items())
        yield _drawn(
            f"Memory by place{owner}",
            f"What the ledger says is alive at each peak of rank {run.memory['device']['rank']}. {peaks}.",
            figures.alive(run),
        )
        if run.groups:
            yield [
                *_drawn(f"Groups of lengths{owner}", "Sums over the run; seconds of the slowest rank.", figures.groups(run)),
                _group_table(run),
            ]
        else:
            yield _missing(f"Groups of lengths{owner}", "One layout computed all documents.")
        if run.predicted:
            yield _drawn(f"Predicted seconds{owner}", "What the clock said before each step.", figures.predicted(run))
        else:
            yield _missing(f"Predicted seconds{owner}", "The clock was not calibrated for this run: layout: auto does so in its trials.")


def _drawn(title: str, sentence: str, figure: go.Figure) -> list[str]:
    # "</script>" inside the data would end its element.
    data = json.dumps(json.loads(figure.to_json() or "{}"), allow_nan=False).replace("<", "\\u003c")
    return [
        f"<h2>{escape(title)}</h2><p>{escape(sentence)}</p>",
        f'<div></div><script type="application/json" class="figure">{data}</script>',
    ]


def _missing(title: str, reason: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2><p>{escape(reason)}</p>"]


def _differences(runs: Sequence[RunReport]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [json.dumps(run.config.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append((key, *values))
    if not rows:
        return ["<p>None.</p>"]
    head = ("", *(run.name for run in runs))
    parts = [_table([head, *rows[:MOST_SETTINGS]])]
    if len(rows) > MOST_SETTINGS:
        parts.append(f"<p>and {len(rows) - MOST_SETTINGS} more</p>")
    return parts


def _group_table(run: RunReport) -> str:
    head = (
        "documents up to",
        "layout",
        "steps",
        "documents",
        "tokens",
        "seconds",
        "tokens/s",
        "switch hidden s",
        "exposed s",
        "to tiers",
        "from tiers",
        "waited s",
    )
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
            _size(group.put_bytes),
            _size(group.fetched_bytes),
            f"{group.waited_s:.2f}",
        )
        for group in run.groups
    ]
    return _table([head, *rows])


def _table(rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in BYTES:
        return _size(value)
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else ", ".join(value) if isinstance(value, list) else str(value)


def _size(size: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
