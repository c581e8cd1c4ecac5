"""Records of a file, one by one, each with its place: JSON lines and arrays, CSV and TSV, parquet,
Arrow, folders of `datasets`.

A fault names the file and, as far as the format has them, line or row and byte. In tables every row
has every field, so that what is null there was not written: such fields are left out, also inside
structs. JSON says null where it means it."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from longshift.documents.chat import OPTIONAL
from longshift.documents.file_kind import UTF8_MARK, Format, not_utf8, open_unpacked
from longshift.errors import DataError, nearest, shown

_LINE_LIMIT_BYTES = 1 << 30
_ROWS = 1024


@dataclass(frozen=True)
class Fields:
    """Which fields of records are read: all of `needed`, and where they are `nested`, so that they
    may hold more than strings, those of `chat.OPTIONAL` that are there."""

    needed: tuple[str, ...]
    nested: bool

    def split(self, names: list[str], where: str) -> tuple[list[str], tuple[str, ...]]:
        """Of the names of a record's fields, those that are read, and those that are not. Raises
        DataError where one that is read is not there, or is there twice."""
        for field in self.needed:
            if field not in names:
                raise DataError(f"{where}: {_no_field(field, names)}")

        optional = OPTIONAL if self.nested else ()
        present = [field for field in optional if field in names]
        selected = [*self.needed, *present]
        # Tables may have two columns of one name, and which one is meant is not known.
        for field in selected:
            count = names.count(field)
            if count > 1:
                raise DataError(f"{where}: {field!r} is the name of {count} columns")

        unread = tuple(name for name in names if name not in selected)
        return selected, unread


class Record(NamedTuple):
    """Fields by name; `where`: file and line or row; `unread`: names of fields that no one
    reads."""

    fields: dict[str, Any]
    where: str
    unread: tuple[str, ...]


def read_records(path: str, form: Format, fields: Fields) -> Iterator[Record]:
    """The records of a file, in its order. Raises DataError, and what `file_kind.UNREADABLE`
    lists."""
    is_empty = True
    for record in _READERS[form](path, fields):
        is_empty = False
        yield record
    if is_empty:
        raise DataError(f"{path}: there are no rows")


# Text


def _lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, first byte and contents of each line, without a byte order mark."""
    offset = 0
    with open_unpacked(path) as file:
        # A limit, as the memory of the machine may not hold a file without line breaks.
        lines = iter(lambda: file.readline(_LINE_LIMIT_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > _LINE_LIMIT_BYTES:
                reason = (
                    f"the line is longer than {_LINE_LIMIT_BYTES} bytes; is this a file of JSON"
                    " lines?"
                )
                raise DataError(f"{path}, line {number}, byte {offset}: {reason}")
            mark = len(UTF8_MARK) if number == 1 and line.startswith(UTF8_MARK) else 0
            yield number, offset + mark, line[mark:]
            offset += len(line)
    if not offset:
        raise DataError(f"{path}: the file is empty")


def _decode(line: bytes, where: str, offset: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise DataError(f"{where}, byte {byte}: {not_utf8(error)}") from None


def _read_lines(path: str, fields: Fields) -> Iterator[Record]:
    blank_error = None
    for number, offset, line in _lines(path):
        line_place = f"{path}, line {number}"
        where = f"{line_place}, byte {offset}"
        # An empty line is read over at the end alone: elsewhere a record may be lost.
        is_blank = not line.strip()
        if blank_error is None and is_blank:
            blank_error = DataError(
                f'{where}: the line is empty; each line is one JSON object such as {{"text":'
                ' "..."}'
            )
        if blank_error and (number == 1 or not is_blank):
            raise blank_error
        if is_blank:
            continue
        text = _decode(line, line_place, offset).rstrip("\r\n")
        values = _parse_json(text, line_place, offset)
        yield _record(values, "one object a line", fields, where)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where a key is there twice, of which one would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return values


_JSON = json.JSONDecoder(object_pairs_hook=_object_of)


def _parse_json(text: str, where: str, offset: int | None) -> Any:
    """What JSON says. `offset`: of the text's first byte where it is a line of a file; else it is
    the whole file."""
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        if offset is not None:  # `pos` counts characters
            position = f"byte {offset + len(text[: error.pos].encode())}"
        raise DataError(f"{where}, {position}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        place = where if offset is None else f"{where}, byte {offset}"
        raise DataError(f"{place}: not JSON that can be read: {error}") from None


def _record(values: object, needed: str, fields: Fields, where: str) -> Record:
    if not isinstance(values, dict):
        raise DataError(
            f'{where}: a JSON {type(values).__name__}, where {needed} is needed, such as {{"text":'
            ' "..."}'
        )
    _, unread = fields.split(list(values), where)
    return Record(values, where, unread)


def _read_array(path: str, fields: Fields) -> Iterator[Record]:
    """The objects of a JSON array, which is read as a whole."""
    with open_unpacked(path) as file:
        data = file.read(_LINE_LIMIT_BYTES + 1)
    if len(data) > _LINE_LIMIT_BYTES:
        raise DataError(
            f"{path}: has more than {_LINE_LIMIT_BYTES} bytes; write such an array as JSON lines"
        )

    text = data.removeprefix(UTF8_MARK)
    text = _decode(text, path, len(data) - len(text))
    entries = _parse_json(text, path, None)
    if isinstance(entries, dict):
        lists = [name for name, value in entries.items() if isinstance(value, list)]
        hint = f", such as what is in {lists[0]!r}" if lists else ""
        raise DataError(
            f"{path}: holds one JSON object; records are an array of objects{hint}, or one object a"
            " line"
        )

    if not isinstance(entries, list) or not entries:
        kind = "an empty array" if entries == [] else type(entries).__name__
        raise DataError(f"{path}: holds {kind}, where an array of objects is needed")
    for number, values in enumerate(entries, 1):
        yield _record(values, "an object", fields, f"{path}, entry {number}")


def _read_delimited(path: str, fields: Fields, delimiter: str) -> Iterator[Record]:
    """Rows of CSV or TSV below a line of names; a quoted field may hold line breaks."""
    csv.field_size_limit(_LINE_LIMIT_BYTES)
    lines = (
        _decode(line, f"{path}, line {number}", offset) for number, offset, line in _lines(path)
    )
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names = None
    previous_line = 0
    while True:
        # A row begins below the last line of the row before: a quoted field may hold line breaks.
        where = f"{path}, line {previous_line + 1}"
        try:
            values = next(rows, None)
        except csv.Error as error:
            kind = "CSV" if delimiter == "," else "TSV"
            raise DataError(f"{where}: not {kind}: {error}") from None
        if values is None:
            return
        previous_line = rows.line_num
        if names is None:
            names = values
            _, unread = fields.split(names, path)
        elif values:
            if len(values) != len(names):
                raise DataError(
                    f"{where}: {len(values)} fields, where the first line names {len(names)}"
                )
            yield Record(dict(zip(names, values)), where, unread)


# Tables


def _read_parquet(path: str, fields: Fields) -> Iterator[Record]:
    with pq.ParquetFile(path) as table:
        names = table.schema_arrow.names
        selected, _ = fields.split(names, path)
        batches = table.iter_batches(_ROWS, columns=selected)
        yield from _read_batches(path, names, fields, batches)


def _read_arrow(path: str, fields: Fields) -> Iterator[Record]:
    """An Arrow file, or a stream as `datasets` keeps it in its cache."""
    try:
        with pa.memory_map(path) as data, pa.ipc.open_file(data) as table:
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
            yield from _read_batches(path, table.schema.names, fields, batches)
            return
    except pa.ArrowInvalid as error:
        # A stream has no mark of its own, so what is no file is read as one.
        if "Not an Arrow file" not in str(error):
            raise
    yield from _read_streams(path, [Path(path)], fields)


def _read_dataset(path: str, fields: Fields) -> Iterator[Record]:
    """A folder as `datasets` saves it: state.json names Arrow streams, in order."""
    folder = Path(path)
    if (folder / "dataset_dict.json").exists():
        names = [state.parent.name for state in folder.glob("*/state.json")]
        splits = sorted(names, key=lambda name: (name != "train", name))  # train first
        name = splits[0] if splits else "train"
        raise DataError(
            f"{path}: holds splits ({', '.join(splits)}); name one, as in path: {path}/{name}"
        )
    streams = [folder / name for name in _stream_names(folder / "state.json")]
    yield from _read_streams(path, streams, fields)


def _stream_names(state: Path) -> list[str]:
    """The files that a state.json names. Raises DataError for what is no file name."""
    try:
        names = [part["filename"] for part in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{state}: _data_files does not name the files of a dataset: {type(error).__name__}:"
            f" {error}"
        ) from error
    for name in names:
        # A name that leads out of the folder would read files of the machine.
        if not isinstance(name, str) or not re.fullmatch(r"[^./\0][^/\0]*", name):
            raise DataError(
                f"{state}: _data_files: {shown(name)} is no name of a file in the folder"
            )
    return names


def _read_streams(path: str, streams: Sequence[Path], fields: Fields) -> Iterator[Record]:
    row = 0  # rows are counted over all streams

    for stream in streams:
        try:
            with pa.memory_map(str(stream)) as data, pa.ipc.open_stream(data) as batches:
                for record in _read_batches(path, batches.schema.names, fields, batches, row):
                    yield record
                    row += 1
        # Names of columns that are not UTF-8 are a UnicodeDecodeError.
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{stream}: cannot be read as an Arrow stream: {error}") from error


def _read_batches(
    path: str, names: list[str], fields: Fields, batches: Iterable[pa.RecordBatch], row: int = 0
) -> Iterator[Record]:
    """Rows from number `row` on, of the columns that are read of these `names`."""
    selected, unread = fields.split(names, path)
    for batch in batches:
        # In slices, as a batch may be a whole file, and Python objects are many times as large.
        for begin in range(0, len(batch), _ROWS):
            part = batch.select(selected).slice(begin, _ROWS)
            columns = {
                name: _values(path, fields, name, part.column(name), row) for name in selected
            }
            for index in range(len(part)):
                record = {name: _without_nulls(values[index]) for name, values in columns.items()}
                yield Record(record, f"{path}, row {row}", unread)
                row += 1


def _values(path: str, fields: Fields, name: str, column: pa.Array, row: int) -> list[Any]:
    """The values of a column from a row on.

    Raises DataError for what is not UTF-8, ArrowInvalid where offsets lead out of the column.
    """
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    kind = column.type
    is_text = (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )

    # Offsets of a damaged file would end the process when they are read.
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        index = re.search(r"Invalid UTF8 sequence at string index (\d+)", str(error))
        if index is None:
            raise
        # Of a nested column, the index counts strings, not rows.
        where = (
            f"row {row + int(index[1])}" if is_text else f"rows {row} to {row + len(column) - 1}"
        )
        raise DataError(f"{path}, {where}: {name!r} is not UTF-8") from None
    if not is_text and not fields.nested:
        raise DataError(
            f"{path}, row {row}: {name!r} holds {column.type}, where a string is needed"
        )
    return column.to_pylist()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _no_field(field: str, names: Sequence[str]) -> str:
    """Message: a record with these `names` has no such field, and what the source may have
    meant."""
    chats = [
        name for name in names if name in ("messages", "conversation", "conversations", "chat")
    ]
    texts = nearest(field, names) or (names if len(names) == 1 else [])
    if {"prompt", "completion"} <= set(names):
        hint = "; did you mean format: {prompt: prompt, completion: completion}?"
    elif chats:
        hint = f"; did you mean format: {{messages: {chats[0]}}}?"
    elif texts and texts[0]:
        hint = f"; did you mean format: {{text: {texts[0]}}}?"
    else:
        hint = ""
    return f"there is no field {field!r}, only {', '.join(map(repr, names)) or 'none'}{hint}"


_READERS: Mapping[Format, Callable[[str, Fields], Iterator[Record]]] = {
    "jsonl": _read_lines,
    "json": _read_array,
    "csv": partial(_read_delimited, delimiter=","),
    "tsv": partial(_read_delimited, delimiter="\t"),
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "dataset": _read_dataset,
}
