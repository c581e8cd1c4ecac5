"""A result of a command as a frozen value, and how it is shown: as JSON, as lines and tables, or in
a notebook."""

import errno
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from html import escape as html_escape
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 160  # where standard output is no terminal


class CommandResult(BaseModel):
    """A result of a command, or a part of one. `model_validate` reads what `to_json` gives."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_by_name=True)
    # Keys that are left out of JSON where they have no value.
    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """What the command prints with --json."""
        return self.model_dump(mode="json", by_alias=True)

    def parts(self) -> Iterator[RenderableType]:
        """Lines and tables for a person: the fields, where a result has nothing better."""
        yield fields_table("", self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}"
            f"({', '.join(f'{name}={short_repr(value)}' for name, value in self)})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `parts`, with tables as tables."""
        return "".join(html_of(part) for part in self.parts())

    @model_serializer(mode="wrap")
    def _without_optional(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            key: value
            for key, value in serialize(self).items()
            if value is not None or key not in self.OPTIONAL
        }


def short_repr(value: Any) -> str:
    """A value as Python writes it, a collection as how much it holds."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"<{len(value)} items>" if value else "()"
    return str(value) if isinstance(value, Path) else repr(value)


def size_text(size: float) -> str:
    """Bytes in three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:  # above, three digits would need an exponent
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def gib_text(size: float, digits: int = 1) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.{digits}f} GiB"


def fields_table(title: str, fields: Iterable[tuple[str, Any]]) -> Table:
    """A row for each field."""
    table = Table("", title, box=None, show_header=bool(title))
    for name, value in fields:
        table.add_row(name, escape(short_repr(value)))
    return table


def html_of(part: RenderableType) -> str:
    """A line or a table of `parts`."""
    if not isinstance(part, Table):
        return f'<div style="white-space: pre-wrap">{html_escape(str(part))}</div>'
    columns = [
        [html_escape(Text.from_markup(str(cell)).plain) for cell in column.cells]
        for column in part.columns
    ]
    names = [html_escape(str(column.header)) for column in part.columns]
    head = "".join(f"<th>{name}</th>" for name in names) if part.show_header else ""
    rows = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in zip(*columns)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def print_result(result: CommandResult, as_json: bool) -> None:
    """Print a result: as one line of JSON, or as lines and tables for a person."""
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
        return
    console = plain_console()
    for part in result.parts():
        # Text is printed as it stands: no markup, and lines as long as they are.
        console.print(
            Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str | Text)
        )


class OutputConsole(Console):
    """Standard output. That nobody reads it is an error, which `terminal.read_or_not` expects."""

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, where rich ends the process."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads standard output")


def plain_console() -> Console:
    """Standard output, for tables."""
    return OutputConsole(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
