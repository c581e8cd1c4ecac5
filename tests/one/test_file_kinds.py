"""Files are read for what they are: by their content and their name together."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import TEXTS, small, texts  # noqa: F401  (small: a fixture)

from longshift.config_parts import DocumentFormat, Source
from longshift.documents.sources import files
from longshift.documents.tokens import build
from longshift.errors import DataError

LINES = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(TEXTS)).encode()


def zstd(data: bytes) -> bytes:
    out = io.BytesIO()
    with pa.CompressedOutputStream(pa.PythonFile(out, "w"), "zstd") as stream:
        stream.write(data)
        stream.flush()
        return bytes(pa.compress(data, "zstd", asbytes=True))


PACKERS = {"gz": gzip.compress, "zst": zstd, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("name", PACKERS)
def test_compressed_files_are_read(tmp_path, name):
    packed = PACKERS[name](LINES)
    for file in (f"a.jsonl.{name}", "a.jsonl", f"a.{name}"):  # whatever the name says
        (tmp_path / file).write_bytes(packed)
        assert texts(Source(path=str(tmp_path / file), format=DocumentFormat("text", ("text",)))) == TEXTS
    (tmp_path / f"b.txt.{name}").write_bytes(PACKERS[name](b"one\ntwo\n"))
    assert texts(Source(path=str(tmp_path / f"b.txt.{name}"))) == ["one\ntwo\n"]
    (tmp_path / f"c.jsonl.{name}").write_bytes(packed + packed)  # as `cat` joins them
    assert texts(Source(path=str(tmp_path / f"c.jsonl.{name}"))) == TEXTS + TEXTS
    (tmp_path / f"d.jsonl.{name}").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=rf"d\.jsonl\.{name}: cannot be read"):
        texts(Source(path=str(tmp_path / f"d.jsonl.{name}")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonlines", "a.JSONL", "a.json", "part-0", "a.txt", "a.data"])
def test_json_lines_have_many_names(tmp_path, name):
    (tmp_path / name).write_bytes(LINES)
    assert texts(Source(path=str(tmp_path / name), format=DocumentFormat("text", ("text",)))) == TEXTS
    if name not in ("a.txt", "a.data"):
        assert texts(Source(path=str(tmp_path / name))) == TEXTS


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_its_objects(tmp_path, indent):
    for name in ("a.json", "a.txt"):
        (tmp_path / name).write_text(json.dumps([{"text": text} for text in TEXTS], indent=indent))
        assert texts(Source(path=str(tmp_path / name), format=DocumentFormat("text", ("text",)))) == TEXTS
    for written, why in (
        ('{"data": [{"text": "a"}],\n "n": 1}', "one JSON object; records are an array of objects, such as what is in 'data'"),
        ('[{"text": "a"}, 3]', "entry 2: a JSON int, where an object"),
        ("[]", "holds an empty array"),
        ('[{"text": "a"},\n {"text" "b"}]', "line 2, column 10: not JSON"),
        ("", "the file is empty"),
    ):
        (tmp_path / "b.json").write_text(written)
        with pytest.raises(DataError, match=why):
            texts(Source(path=str(tmp_path / "b.json")))


def test_tables_of_text_are_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,body\r\n1,"a, ""b""\r\nand c"\r\n2,\xc3\xa9\r\n')
    assert texts(Source(path=str(tmp_path / "a.csv"), format=DocumentFormat("text", ("body",)))) == ['a, "b"\r\nand c', "é"]
    (tmp_path / "a.tsv").write_text("body\tid\none two\t1\nthree\t2")
    assert texts(Source(path=str(tmp_path / "a.tsv"), format=DocumentFormat("text", ("body",)))) == ["one two", "three"]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text\nx\n\ny\n"))
    assert texts(Source(path=str(tmp_path / "a.csv.gz"))) == ["x", "y"]
    for written, why in (
        ("id,body\n1,a\n2\n", "line 3: 1 fields, where the first line names 2"),
        ("id,txt\n1,a\n", r"no field 'body', only 'id', 'txt'"),
        ('id,body\n1,"a" b\n', "line 2: not CSV"),
        ("body,body\na,b\n", "'body' is the name of 2 columns"),
        ("body\n", "there are no rows"),
        ("body\na\n\udcff\n", "line 3, byte 7: not UTF-8"),
        ("body,id\n,1\n", "line 2: 'body' is empty"),
    ):
        (tmp_path / "b.csv").write_bytes(written.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=why):
            texts(Source(path=str(tmp_path / "b.csv"), format=DocumentFormat("text", ("body",))))


STRINGS = {
    "view": pa.array(TEXTS, pa.string_view()),
    "large": pa.array(TEXTS, pa.large_string()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("name", STRINGS)
def test_all_strings_of_arrow_are_strings(tmp_path, name):
    table = pa.table({"text": STRINGS[name]})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "part-0").write_bytes((tmp_path / "a.parquet").read_bytes())
    for file in ("file.arrow", "stream.arrow", "a.parquet", "part-0"):
        assert texts(Source(path=str(tmp_path / file))) == TEXTS, file


def test_a_text_may_begin_as_a_compressed_file_does(tmp_path):
    (tmp_path / "a.txt").write_text("BZhang wrote this.")
    assert texts(Source(path=str(tmp_path / "a.txt"))) == ["BZhang wrote this."]


def test_a_mark_at_the_beginning_and_blank_lines_at_the_end_are_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + LINES + b"\n \r\n\n")
    (tmp_path / "b.txt").write_bytes(mark + b"one\n\n")
    (tmp_path / "c.json").write_bytes(mark + b'[{"text": "x"}]')
    assert texts(Source(path=str(tmp_path / "a.jsonl"))) == TEXTS
    assert texts(Source(path=str(tmp_path / "b.txt"))) == ["one\n\n"]
    assert texts(Source(path=str(tmp_path / "c.json"))) == ["x"]
    (tmp_path / "a.jsonl").write_bytes(LINES + b"\n" + LINES)
    with pytest.raises(DataError, match=f"line {len(TEXTS) + 1}, byte {len(LINES)}: the line is empty"):
        texts(Source(path=str(tmp_path / "a.jsonl")))


def test_a_field_that_does_not_apply_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one text")
    for fields in ({"text": "body"}, {"text": "text"}, {"messages": "m"}, {"prompt": "p", "completion": "c"}):
        with pytest.raises(DataError, match=r"a\.txt is read as one text, and the source names a field of records"):
            files(Source(path=str(tmp_path / "a.txt"), format=DocumentFormat.parse(fields)))


def test_a_text_whose_first_line_is_a_record_is_named(small, tmp_path):  # noqa: F811
    (tmp_path / "a.txt").write_bytes(LINES)
    cache = build([Source(path=str(tmp_path / "a.txt"))], small, tmp_path / "cache")
    assert len(cache) == 1
    assert cache.notes[0].startswith(f"{tmp_path}/a.txt: read as one text, though its first line is a JSON object")


def test_archives_and_what_is_no_text_are_refused_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("a.jsonl", LINES)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.jsonl.zip", "a")
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "t.parquet")
    (tmp_path / "t.parquet.gz").write_bytes(gzip.compress((tmp_path / "t.parquet").read_bytes()))
    for name, why in (
        ("a.jsonl.zip", "a zip archive: unpack it"),
        ("a.tar.gz", "a tar archive: unpack it"),
        ("a.txt", "UTF-16: save it as UTF-8"),
        ("a.pdf", "a PDF"),
        ("t.parquet.gz", "a table that was compressed as a whole: unpack it"),
    ):
        with pytest.raises(DataError, match=rf"{name}: is {why}"):
            files(Source(path=str(tmp_path / name)))


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (450_000, 550_000), (999_990, 999_994)])
def test_a_file_that_changes_under_the_same_size_and_time_makes_a_new_cache(small, tmp_path, begin, end):  # noqa: F811
    path: Path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 200_000)
    source, stat = Source(path=str(path)), path.stat()
    first = build([source], small, tmp_path / "cache")
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(data[begin:end]).upper()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert build([source], small, tmp_path / "cache").fingerprint != first.fingerprint
