"""HTML files that need no network: charts that `charts.js` draws, bars, tables; legible in light
and dark, and on a telephone."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longshift.errors import UsageError

DIGITS = 6  # of a number in a chart
Style = Literal["line", "dash", "dots"]


class Series(NamedTuple):
    """A curve of a chart. `colour`: its number, which no other of the chart has; `x`: None where it
    is of the steps of a `run`; `band`: the relative half-width around it;
    `texts`: of each point."""

    name: str
    y: Sequence[float | None]
    colour: int
    run: int = 0
    x: Sequence[float] | None = None
    style: Style = "line"
    band: Sequence[float | None] | None = None
    texts: Sequence[str] | None = None


def chart(
    title: str,
    note: str,
    series: Sequence[Series],
    y: str,
    x: str | None = None,
    log: bool = False,
    zero: bool = False,
    limit: float | None = None,
    wide: bool = False,
) -> str:
    """Curves. `x`, `y`: what the axes say, None: what the toolbar chooses; `zero`: where `y`
    begins; `limit`: a line at this x."""
    data = {
        "series": [curve._asdict() for curve in series],
        "x": x,
        "y": y,
        "logx": log,
        "logy": log,
        "zero": zero,
        "limit": limit,
    }
    text = (
        '<div class="keys"></div><div class="plot"></div><script type="application/json"'
        f' class="chart">{_json(data)}</script>'
    )
    return _figure(title, note, text, wide)


def bars(
    title: str, note: str, rows: Mapping[str, Mapping[str, float]], show: Callable[[float], str]
) -> str:
    """Bars by row and name."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    largest = max((value for row in rows.values() for value in row.values()), default=0) or 1
    parts = []
    for label, row in rows.items():
        for number, (name, value) in enumerate(row.items()):
            bar = (
                f'<i style="--c:{names.index(name)};width:{100 * value / largest:.2f}%"'
                f' title="{escape(name)}"></i>'
            )
            parts.append(
                f"<span>{escape(label) * (number == 0)}</span>"
                f"<div>{bar}</div><b>{escape(show(value))}</b>"
            )
    keys = "".join(
        f'<span style="--c:{number}">{escape(name)}</span>'
        for number, name in enumerate(names)
        if len(names) > 1
    )
    return _figure(
        title,
        note,
        f'<div class="keys">{keys}</div><div class="bars">{"".join(parts)}</div>',
        wide=False,
    )


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows, of which the first is the head."""
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows[1:]
    )
    return (
        "<div"
        f' class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def folded(title: str, *parts: str) -> str:
    """Parts that open under their title."""
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def paragraphs(texts: Iterable[str]) -> str:
    """A paragraph of each text."""
    return '<div class="words">' + "".join(f"<p>{escape(text)}</p>" for text in texts) + "</div>"


def grid(parts: Iterable[str]) -> str:
    """Charts and bars beside one another, as many as there is room for."""
    return f'<div class="charts">{"".join(parts)}</div>'


def write_page(
    file: Path, title: str, parts: Iterable[str], runs: Mapping[str, Any] | None = None
) -> None:
    """Write a page. `runs`: what its toolbar offers: the axes `by` which runs are drawn, of each
    run the numbers of its points along them, `x`, and the weight that smoothing gives to the points
    before. Raises UsageError where the file cannot be written."""
    style, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("charts.css", "charts.js")
    )
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{style}</style>'
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    data = f'<script type="application/json" id="runs">{_json(runs or {})}</script>'
    text = (
        '<!doctype html><html lang="en">'
        f"<head>{head}</head><body>{body}\n{data}<script>{script}</script></body></html>\n"
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise UsageError(f"{file} cannot be written: {fault.strerror}") from None


def _figure(title: str, note: str, text: str, wide: bool) -> str:
    return (
        f"<figure{' class=wide' * wide}><h2>{escape(title)}</h2>"
        f"<p>{escape(note)}</p>{text}</figure>"
    )


def _json(data: Any) -> str:
    """JSON inside HTML, where "</script>" would end the element."""
    short = json.loads(
        json.dumps(data, allow_nan=False),
        parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"),
    )
    return json.dumps(short, separators=(",", ":")).replace("<", "\\u003c")
