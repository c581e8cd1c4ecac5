"""Files to documents: records of many formats, plain texts, the standard library's own sources, and
what a person's function returns.

A text is exactly what the file holds: nothing is stripped, joined or normalized but a byte order
mark. What cannot be read
stops with a DataError that names the file and its place. Records may hold conversations, or prompts
and completions, of which a part is learned (`chat.py`). What a record holds and no token shows is
counted in `RecordNotes`. Only `corpus: python` skips: the
library has files that are not UTF-8 on purpose and files that are empty; each is reported as
Skipped.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from longshift.config_parts import Learn, Source
from longshift.documents.chat import OPTIONAL, BadRecord, render_record
from longshift.documents.file_kind import (
    HEAD_BYTES,
    UNREADABLE,
    UTF8_MARK,
    Format,
    begins_with_record,
    format_of,
    not_utf8,
    open_unpacked,
)
from longshift.documents.function_reader import KEY, TokenIds, read_items
from longshift.documents.record_notes import ONE_TEXT, UNREAD, RecordNotes
from longshift.documents.record_reader import Fields, Record, read_records
from longshift.documents.template import Span
from longshift.errors import DataError, nearest
from longshift.user_code import source_digest

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}

# Of each file, for its digest.
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 1 << 14


@dataclass(frozen=True)
class File:
    """What a source reads as one piece: a file, a folder of `datasets`, or what a function returns.

    `path`: of a function, "module:name"; then `digest` is of its module's source file, whole.
    `fields`: of a record, what makes a document: a text, messages, or a prompt and a completion.
    `learn`: what of it is learned, None for a text; of a function, what is learned of its
    conversations. `size_bytes`, `mtime_ns`, `digest` (SHA-256 of its first, last and some more
    blocks) tell whether it has changed."""

    path: str
    format: Format
    fields: tuple[str, ...]
    learn: Learn | None
    size_bytes: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True)
class Text:
    """One document; `where` is its file and line or row. `learned`: the characters that are
    targets, None for all of them; `rendered`: whether a template has written all special tokens
    into the text."""

    text: str
    where: str
    learned: tuple[Span, ...] | None = None
    rendered: bool = False


@dataclass(frozen=True)
class SkippedFile:
    """A file that holds no document, and why."""

    where: str
    why: str


def files(source: Source) -> tuple[File, ...]:
    """The files of a source, sorted by path; `*`, `?`, `[...]` and `**` in it mean what they do in
    a shell.

    Raises DataError when there are none, naming what does exist. Raises it, too, for a match that
    is neither a file nor a folder on the way to one: nothing is left out silently.
    """
    if source.python is not None:
        return (_function(source.python, source.learn),)
    if source.path is None:
        return tuple(_file(path, "python", (), None) for path in _library())

    # A name that exists is taken as it is: it may have brackets.
    pattern = os.path.expanduser(source.path)
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    matches = _outside_loops(matches, pattern)
    paths = [path for path in matches if os.path.isfile(path) or _is_dataset(path)]
    for path in sorted(set(matches) - set(paths)):
        if not os.path.isdir(path):
            raise DataError(
                f"{path} is no file that can be read: it is a link to nothing, a pipe or a device;"
                " remove it, or name others"
            )
        if "**" not in pattern:
            contents = f"{source.path.rstrip('/*')}/**/*"
            raise DataError(
                f"{path} is a folder, and not one of `datasets`; to read what is in it, write path:"
                f" {contents}, else one that leaves it out"
            )
    if not paths:
        raise DataError(f"{source.path} matches no file. {_nearest_path(Path(pattern))}")

    learn = source.learn if source.format.is_masked else None
    fields = source.format.fields
    return tuple(
        _file(path, format_of(path, bool(fields)), fields or ("text",), learn) for path in paths
    )


def read(file: File, notes: RecordNotes | None = None) -> Iterator[Text | TokenIds | SkippedFile]:
    """The documents of a file, in its order. `notes` has the template of conversations.

    Counts in `notes` what no token shows. Raises DataError at the first document that is bad:
    nothing after it is read."""
    notes = notes or RecordNotes(None)
    try:
        if file.format == "text":
            yield from _read_text(file, notes)
        elif file.format == "python":
            yield from _read_python(file)
        elif file.format == "function":
            yield from _read_function(file, notes)
        else:
            fields = Fields(file.fields, nested=file.learn is not None)
            for record in read_records(file.path, file.format, fields):
                notes.add(UNREAD, record.unread)
                yield _document(file, record, notes)
    except (*UNREADABLE, UnicodeDecodeError) as error:  # names of columns, too
        raise DataError(f"{file.path}: cannot be read as {file.format}: {error}") from error


def unchanged(file: File) -> bool:
    """Whether a file still has the size, time and blocks that it had when it was listed."""
    if file.format == "function":
        return file.learn is not None and _function(file.path, file.learn) == file
    return (
        os.path.exists(file.path) and _file(file.path, file.format, file.fields, file.learn) == file
    )


# Finding files


def _library() -> list[str]:
    """The `.py` files of the standard library, by their path."""
    paths = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        # In place: os.walk leaves these out.
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


def _outside_loops(matches: list[str], pattern: str) -> list[str]:
    """Without what `**` finds again through a link to a folder above the link."""
    root, deep, _ = pattern.partition("**")
    if not deep:
        return matches

    def is_in_loop(folder: Path) -> bool:
        links = (p for p in (folder, *folder.parents) if Path(root) in p.parents and p.is_symlink())
        return any(link.parent.resolve().is_relative_to(os.path.realpath(link)) for link in links)

    folders = {os.path.dirname(path) for path in matches}
    loops = {folder for folder in folders if is_in_loop(Path(folder))}
    return [path for path in matches if os.path.dirname(path) not in loops]


def _is_dataset(path: str) -> bool:
    names = ("state.json", "dataset_dict.json")
    return os.path.isdir(path) and any(os.path.exists(os.path.join(path, name)) for name in names)


def _file(path: str, form: Format, fields: tuple[str, ...], learn: Learn | None) -> File:
    """A file, or a folder of `datasets`, with what tells whether it has changed."""
    path = os.path.abspath(path)
    parts = [Path(path)]
    if os.path.isdir(path):
        parts = sorted(part for part in Path(path).rglob("*") if part.is_file())
    stats = [part.stat() for part in parts]
    digest = hashlib.sha256()
    for part, stat in zip(parts, stats):
        _add_blocks(digest, part, stat.st_size)
    return File(
        path=path,
        format=form,
        fields=fields,
        learn=learn,
        size_bytes=sum(stat.st_size for stat in stats),
        mtime_ns=max(stat.st_mtime_ns for stat in stats),
        digest=digest.hexdigest(),
    )


def _function(text: str, learn: Learn) -> File:
    """A function that returns documents, with what tells whether its module has changed. Raises
    UsageError where there is none."""
    source, digest = source_digest(text, KEY)
    stat = source.stat()
    return File(text, "function", (), learn, stat.st_size, stat.st_mtime_ns, digest)


def _add_blocks(digest: "hashlib._Hash", path: Path, size: int) -> None:
    """Digest the first and the last block of a file, and some between: times alone miss what `cp
    -p` or `rsync` has replaced."""
    step = max(_BLOCK_BYTES, (size - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1))
    last_begin = max(0, size - _BLOCK_BYTES)
    begins = sorted({*range(0, size, step), last_begin})

    with open(path, "rb") as file:
        for begin in begins:
            file.seek(begin)
            digest.update(file.read(_BLOCK_BYTES))


def _nearest_path(path: Path) -> str:
    """What does exist of a path to no file."""
    # Go up to what exists; `missing` is the first name below it that does not.
    parent = path
    missing = ""
    while not parent.exists():
        missing = parent.name
        parent = parent.parent

    names = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
    close = nearest(missing, names, 0.5)
    if close:
        hint = f"did you mean {parent / close[0]}?"
    elif names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        hint = f"it holds {', '.join(names[:5])}{more}"
    else:
        hint = "it is an empty folder" if parent.is_dir() else "it is a file"
    return f"The nearest that exists is {parent.absolute()}; {hint}"


# Documents


def _document(file: File, record: Record, notes: RecordNotes) -> Text:
    """The document of a record. Raises DataError for one that is none."""
    values = [record.fields[field] for field in file.fields]
    if file.learn is None:
        return _text(values[0], record.where, file.fields[0])

    optional = {name: record.fields.get(name) for name in OPTIONAL}
    extra = {name: value for name, value in optional.items() if value is not None}
    day = file.mtime_ns / 1e9  # for templates that write the date: tokens must not depend on today
    try:
        rendered = render_record(values, extra, file.learn, day, notes)
    except (BadRecord, RecursionError) as fault:
        fields = " and ".join(map(repr, file.fields))
        raise DataError(f"{record.where}: {fields}: {fault}") from None

    # A template has written the special tokens of messages; text has none yet.
    text = _text(rendered.text, record.where, file.fields[0])
    return replace(text, learned=rendered.learned, rendered=not isinstance(values[0], str))


def _read_text(file: File, notes: RecordNotes) -> Iterator[Text]:
    with open_unpacked(file.path) as unpacked:
        whole = unpacked.read()
    data = whole.removeprefix(UTF8_MARK)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = error.start + len(whole) - len(data)
        raise DataError(f"{file.path}, line {line}, byte {byte}: {not_utf8(error)}") from None
    if not text:
        raise DataError(f"{file.path}: the file is empty")
    if begins_with_record(data[:HEAD_BYTES]):
        notes.add(ONE_TEXT, [os.path.basename(file.path)])
    yield Text(text, file.path)


def _read_python(file: File) -> Iterator[Text | SkippedFile]:
    data = Path(file.path).read_bytes()
    try:
        yield Text(data.decode(), file.path) if data else SkippedFile(file.path, "empty")
    except UnicodeDecodeError:
        yield SkippedFile(file.path, "not UTF-8")


def _read_function(file: File, notes: RecordNotes) -> Iterator[Text | TokenIds]:
    for item in read_items(file.path, file.digest):
        if isinstance(item, TokenIds):
            yield item
            continue
        # Each item says by its fields what it is, so that one function may return both.
        notes.add(UNREAD, item.unread)
        if "messages" in item.fields:
            form = replace(file, fields=("messages",))
        else:
            form = replace(file, fields=("text",), learn=None)
        yield _document(form, item, notes)


def _text(value: object, where: str, field: str) -> Text:
    """A document, if the value is a string that can be one."""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {field!r} holds {type(value).__name__}, where a string is needed"
        )
    if not value:
        raise DataError(f"{where}: {field!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} of {field!r} is half of a surrogate pair, no Unicode"
        ) from None
    return Text(value, where)
