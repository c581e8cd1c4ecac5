"""Files to texts: JSON lines, parquet, plain text, folders of Hugging Face `datasets`, and the standard library's own sources.

A text is exactly what the file holds: nothing is stripped, joined, normalized or left out. What cannot be read stops with a
DataError that names the file and, as far as the format has them, line or row and byte. Records may hold conversations, or prompts and
completions, of which a part is learned (`data.chat`). Only `corpus: python` skips: the library has
files that are not UTF-8 on purpose and files that are empty; each is reported as Skipped.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from longshift.config_parts import Learn, Source
from longshift.documents.chat import TOOLS, BadRecord, completed, conversation
from longshift.documents.template import ChatTemplate, Span
from longshift.errors import DataError, nearest, shown

Format = Literal["jsonl", "parquet", "text", "dataset", "python"]

_SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # others are text
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_LINE_LIMIT_BYTES = 1 << 30
_ROWS = 1024


@dataclass(frozen=True)
class File:
    """What a source reads as one piece: a file, or a folder of `datasets`. Size and time tell whether it has changed. `fields`: of a
    record, what makes a document: a text, messages, or a prompt and a completion; `learn`: what of it is learned, None for a text."""

    path: str
    format: Format
    fields: tuple[str, ...]
    learn: Learn | None
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Text:
    """One document; `where` is its file and line or row. `learned`: the characters that are targets, None for all of them; `rendered`:
    whether a template has written all special tokens into the text."""

    text: str
    where: str
    learned: tuple[Span, ...] | None = None
    rendered: bool = False


@dataclass(frozen=True)
class Skipped:
    """A file that holds no document, and why."""

    where: str
    why: str


def files(source: Source) -> tuple[File, ...]:
    """The files of a source, sorted by path; `*`, `?`, `[...]` and `**` in it mean what they do in a shell. Raises DataError when there are
    none, naming what does exist, and for a match that is neither a file nor a folder on the way to one: nothing is left out silently."""
    if source.path is None:
        return tuple(_file(path, "python", (), None) for path in _library())
    pattern = os.path.expanduser(source.path)
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    found = [path for path in matches if os.path.isfile(path) or _is_dataset(path)]
    if not found:
        raise DataError(_nothing(source.path, pattern, matches))
    for path in sorted(set(matches) - set(found)):
        if not os.path.isdir(path):
            raise DataError(f"{path} is no file that can be read (a link to nothing, or a device): remove it, or name others")
        if "**" not in pattern:
            inside = f"{source.path.rstrip('*')}**/*"
            raise DataError(f"{path} is a folder; to read what is in it, write path: {inside}, else one that leaves it out")
    learn = source.learn if source.masked else None
    if learn and (whole := next((path for path in found if _format(path) == "text"), None)):
        raise DataError(f"{whole} is read as one text, and conversations are records: JSON lines, parquet, or a folder of `datasets`")
    return tuple(_file(path, _format(path), source.fields, learn) for path in found)


def read(file: File, template: ChatTemplate | None = None) -> Iterator[Text | Skipped]:
    """The documents of a file, in its order; `template` is for conversations. Raises DataError at the first that is bad: nothing after it
    is read."""
    try:
        if file.format == "text":
            yield from _read_text(file)
        elif file.format == "python":
            yield from _read_python(file)
        else:
            records = {"jsonl": _read_jsonl, "parquet": _read_parquet, "dataset": _read_dataset}[file.format]
            for record, where, at in records(file):
                yield _document(file, record, where, at, template)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # names of columns, too
        raise DataError(f"{file.path}: cannot be read as {file.format}: {error}") from error


def unchanged(file: File) -> bool:
    """Whether a file still has the size and time it had when it was listed."""
    return os.path.exists(file.path) and _file(file.path, file.format, file.fields, file.learn) == file


# Finding files


def _library() -> list[str]:
    """The `.py` files of the standard library, by their path in it."""
    root, found = sysconfig.get_path("stdlib"), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py") and name not in _NOT_LIBRARY]
    return sorted(found, key=lambda path: Path(os.path.relpath(path, root)).as_posix())


def _is_dataset(path: str) -> bool:
    return os.path.isdir(path) and any(os.path.exists(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def _format(path: str) -> Format:
    return "dataset" if os.path.isdir(path) else _SUFFIXES.get(os.path.splitext(path)[1].lower(), "text")


def _file(path: str, form: Format, fields: tuple[str, ...], learn: Learn | None) -> File:
    path = os.path.abspath(path)
    inside = [p for p in Path(path).rglob("*") if p.is_file()] if os.path.isdir(path) else [Path(path)]
    stats = [p.stat() for p in inside]
    return File(path, form, fields, learn, sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats))


def _nothing(given: str, pattern: str, matches: Sequence[str]) -> str:
    """Why a path gives no file: it names folders, or something on the way to it does not exist."""
    if matches:
        return f"{given} is a folder, and not one of `datasets`; to read the files in it, write path: {matches[0].rstrip('/')}/**/*"
    parent, rest = Path(pattern), []
    while not parent.exists():
        parent, rest = parent.parent, [parent.name, *rest]
    names = sorted(p.name for p in parent.iterdir()) if parent.is_dir() else []
    close = nearest(rest[0], names, 1, 0.5)
    if close:
        hint = f"did you mean {parent / close[0]}?"
    elif names:
        hint = f"it holds {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    else:
        hint = "it is an empty folder" if parent.is_dir() else "it is a file"
    return f"{given} matches no file. The nearest that exists is {parent.absolute()}; {hint}"


# Reading files


Record = tuple[dict[str, object], str, str]  # fields by name, where it is, and what is added to that for the byte


def _read_jsonl(file: File) -> Iterator[Record]:
    offset = 0
    with open(file.path, "rb") as lines:
        number = 0
        while line := lines.readline(_LINE_LIMIT_BYTES + 1):
            number += 1
            yield _json_line(line, file, number, offset), f"{file.path}, line {number}", f", byte {offset}"
            offset += len(line)
    if not number:
        raise DataError(f"{file.path}: the file is empty")


def _json_line(line: bytes, file: File, number: int, offset: int) -> dict[str, object]:
    where = f"{file.path}, line {number}"

    def bad(why: str, at: int = 0) -> DataError:
        return DataError(f"{where}, byte {offset + at}: {why}")

    if len(line) > _LINE_LIMIT_BYTES:
        raise bad(f"the line is longer than {_LINE_LIMIT_BYTES} bytes; is this a file of JSON lines?")
    if not line.strip():
        raise bad('the line is empty; each line is one JSON object such as {"text": "..."}')
    try:
        record = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8: {error.reason} (0x{line[error.start]:02x})", error.start) from None
    except json.JSONDecodeError as error:
        raise bad(f"not JSON: {error.msg}", len(error.doc[: error.pos].encode())) from None
    except (ValueError, RecursionError) as error:
        raise bad(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise bad(f'a JSON {type(record).__name__}, where one object a line is needed, such as {{"text": "..."}}')
    for field in file.fields:
        if field not in record:
            raise bad(_no_field(field, list(record)))
    return record


def _read_parquet(file: File) -> Iterator[Record]:
    with pq.ParquetFile(file.path) as table:
        columns = _columns(file, table.schema_arrow.names)
        yield from _rows(file, table.iter_batches(_ROWS, columns=columns))


def _read_dataset(file: File) -> Iterator[Record]:
    """A folder as `datasets` saves it: state.json names Arrow streams, in order."""
    folder = Path(file.path)
    if (folder / "dataset_dict.json").exists():
        splits = sorted((path.parent.name for path in folder.glob("*/state.json")), key=lambda name: (name != "train", name))
        name = splits[0] if splits else "train"
        raise DataError(f"{file.path}: holds splits ({', '.join(splits)}); name one, as in path: {file.path}/{name}")
    yield from _rows(file, (batch for name in _streams(folder / "state.json") for batch in _stream(file, folder / name)))


def _streams(state: Path) -> list[str]:
    """The files that a state.json names. Raises DataError for what is no file name."""
    try:
        names = [part["filename"] for part in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{state}: _data_files does not name the files of a dataset: {type(error).__name__}: {error}") from error
    for name in names:
        if not isinstance(name, str) or not name or name.startswith(".") or "\0" in name or Path(name).name != name:
            raise DataError(f"{state}: _data_files: {shown(name)} is no name of a file in the folder")
    return names


def _stream(file: File, path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream."""
    try:
        with pa.memory_map(str(path)) as data, pa.ipc.open_stream(data) as stream:
            columns = _columns(file, stream.schema.names)
            for batch in stream:
                chosen = batch.select(columns)
                for at in range(0, len(chosen), _ROWS):
                    yield chosen.slice(at, _ROWS)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as an Arrow stream: {error}") from error


def _check_sound(column: pa.Array) -> None:
    """Raises ArrowInvalid where offsets of a column lead out of it: the file is damaged, and reading on would end the process. Whether
    strings are UTF-8 is seen later, row by row."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.cast(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _columns(file: File, known: Sequence[str]) -> list[str]:
    """The columns that are read. Raises DataError where one is not there."""
    for field in file.fields:
        if field not in known:
            raise DataError(f"{file.path}: {_no_field(field, known)}")
    return [*file.fields, *([TOOLS] if file.learn and TOOLS in known else [])]


def _rows(file: File, batches: Iterator[pa.RecordBatch]) -> Iterator[Record]:
    """The rows of a table; strings are decoded one by one so that a bad one can be named."""
    row = 0
    for batch in batches:
        columns = {name: _values(file, name, batch.column(name), row) for name in batch.schema.names}
        for values in zip(*columns.values(), strict=True):
            where, record = f"{file.path}, row {row}", dict[str, object]()
            for name, value in zip(columns, values):
                try:
                    record[name] = value.decode() if isinstance(value, bytes) else value
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}, byte {error.start} of {name!r}: not UTF-8: {error.reason}") from None
            yield record, where, ""
            row += 1
    if not row:
        raise DataError(f"{file.path}: there are no rows")


def _values(file: File, name: str, column: pa.Array, row: int) -> list[object]:
    """The values of a column from a row on; those of a column of strings as bytes."""
    _check_sound(column)
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary()).to_pylist()
    if file.learn is None:
        raise DataError(f"{file.path}, row {row}: {name!r} holds {column.type}, where a string is needed")
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path}, {name!r} in rows {row} to {row + len(column) - 1}: not UTF-8: {error.reason}") from None


def _document(file: File, record: dict[str, object], where: str, at: str, template: ChatTemplate | None) -> Text:
    """The document of a record. Raises DataError for one that is none."""
    first, *second = (record[field] for field in file.fields)
    if file.learn is None:
        return _text(first, where, file.fields[0], at)
    day, tools = file.mtime_ns / 1e9, record.get(TOOLS)
    try:
        if second:
            found = completed(first, second[0], tools, template, file.learn, day)
        else:
            assert template is not None
            found = conversation(first, tools, template, file.learn, day)
    except (BadRecord, RecursionError) as fault:
        raise DataError(f"{where}{at}: {' and '.join(map(repr, file.fields))}: {fault}") from None
    rendered = not isinstance(first, str)
    return replace(_text(found.text, where, file.fields[0], at), learned=found.learned, rendered=rendered)


def _read_text(file: File) -> Iterator[Text]:
    data = Path(file.path).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        why = f"not UTF-8: {error.reason} (0x{data[error.start]:02x})"
        raise DataError(f"{file.path}, line {line}, byte {error.start}: {why}") from None
    if not text:
        raise DataError(f"{file.path}: the file is empty")
    yield Text(text, file.path)


def _read_python(file: File) -> Iterator[Text | Skipped]:
    data = Path(file.path).read_bytes()
    try:
        yield Text(data.decode(), file.path) if data else Skipped(file.path, "empty")
    except UnicodeDecodeError:
        yield Skipped(file.path, "not UTF-8")


def _text(value: object, where: str, field: str, at: str = "") -> Text:
    """A document, if the value is a string that can be one."""
    if not isinstance(value, str):
        raise DataError(f"{where}{at}: {field!r} holds {type(value).__name__}, where a string is needed")
    if not value:
        raise DataError(f"{where}{at}: {field!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}{at}: character {error.start} of {field!r} is half of a surrogate pair, no Unicode") from None
    return Text(value, where)


def _no_field(field: str, known: Sequence[str]) -> str:
    close = nearest(field, known)
    name = close[0] if close else known[0] if len(known) == 1 else None
    if {"prompt", "completion"} <= set(known):
        hint = "; did you mean prompt: prompt, completion: completion?"
    elif chats := [name for name in known if name in ("messages", "conversation", "conversations", "chat")]:
        hint = f"; did you mean messages: {chats[0]}?"
    else:
        hint = f"; did you mean text: {name}?" if name else ""
    return f"there is no field {field!r} (data.train), only {', '.join(map(repr, known)) or 'none'}{hint}"
