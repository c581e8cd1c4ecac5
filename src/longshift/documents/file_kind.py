"""What a file is, by its first bytes and its name: JSON lines, an array, a table, a text;
compressed or not.

chats.jsonl.gz     JSON lines, unpacked while they are read: gzip, zstd, bz2, xz
part-0             parquet, whatever its name, if it begins as parquet does
train              JSON lines, if its first line is a JSON object and its name has no suffix
notes.txt          one text; records where the source names a field of them
                   (text:, messages:, prompt:)
"""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zlib
from typing import BinaryIO, Literal, cast

import pyarrow as pa

from longshift.errors import DataError

Format = Literal[
    "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "dataset", "python", "function"
]

UTF8_MARK = b"\xef\xbb\xbf"
# What damaged files raise.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)
HEAD_BYTES = 1 << 16  # of an unpacked file: its first line, as a rule
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
}
# "BZh" alone may begin a text: a block, or the end of an empty file, follows it.
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")
_PACKED_SUFFIXES = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_BEGINNINGS: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1\0\0": "arrow"}
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_REFUSED = {
    b"PK\x03\x04": "a zip archive: unpack it and name the files in it",
    b"%PDF-": "a PDF: convert it to text",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
    b"SQLite format 3\0": "a database: write its rows as JSON lines",
}


def not_utf8(fault: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are not UTF-8, and what to do."""
    byte = fault.object[fault.start]
    return f"not UTF-8: {fault.reason} (0x{byte:02x}); convert it, as with iconv -f latin1 -t utf-8"


def open_unpacked(path: str) -> BinaryIO:
    """The bytes of a file without its compression, seekable only where it has none. Raises one of
    `UNREADABLE`, later too."""
    compression = _compression_of(path)
    if compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(path, "zstd")))
    opener = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open, None: open}[compression]
    return cast(BinaryIO, opener(path, "rb"))


def _compression_of(path: str) -> str | None:
    with open(path, "rb") as file:
        head = file.read(10)
    if _BZIP2.match(head):
        return "bz2"
    return next(
        (name for beginning, name in _COMPRESSIONS.items() if head.startswith(beginning)), None
    )


def format_of(path: str, names_field: bool) -> Format:
    """How a file is read. `names_field`: the source names a field of records,
    so that a text is none.

    Raises DataError for an archive, and for a text where records are needed.
    """
    if os.path.isdir(path):
        return "dataset"
    try:
        with open_unpacked(path) as file:
            head = file.read(HEAD_BYTES)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for beginning, reason in _REFUSED.items():
        if head.startswith(beginning):
            raise DataError(f"{path}: is {reason}")
    if head[257:262] == b"ustar":
        raise DataError(f"{path}: is a tar archive: unpack it and name the files in it")

    # 1. Binary tables say so themselves; one that is compressed as a whole cannot be
    # read in pieces.
    binary: Format | None = next(
        (form for beginning, form in _BEGINNINGS.items() if head.startswith(beginning)), None
    )
    name = os.path.basename(path).lower()
    while name.endswith(_PACKED_SUFFIXES):
        name = os.path.splitext(name)[0]
    suffix = os.path.splitext(name)[1]
    form = binary or _SUFFIXES.get(suffix)
    if form in ("parquet", "arrow") and _compression_of(path):
        raise DataError(f"{path}: is a table that was compressed as a whole: unpack it")

    # 2. JSON is lines or an array. A name that says nothing of records leaves it to the first line.
    head = head.removeprefix(UTF8_MARK)
    if form == "json":
        return "jsonl" if begins_with_record(head) or not head.strip() else "json"
    if form is not None:
        return form
    if (names_field or not suffix) and begins_with_record(head):
        return "jsonl"
    if names_field and head.lstrip()[:1] == b"[" and head.lstrip()[1:].lstrip()[:1] == b"{":
        return "json"
    if names_field:
        raise DataError(
            f"{path} is read as one text, and the source names a field of records: JSON lines or an"
            " array, CSV, TSV, parquet, or a folder of `datasets`; leave format out to learn the"
            " file as it is"
        )
    return "text"


def begins_with_record(head: bytes) -> bool:
    """Whether the first line is a JSON object. A line that is longer than the head counts if it
    begins as one."""
    line, end, _ = head.partition(b"\n")
    if not line.lstrip().startswith(b"{"):
        return False
    if not end and len(head) >= HEAD_BYTES:
        return line.lstrip()[1:].lstrip().startswith(b'"')
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
