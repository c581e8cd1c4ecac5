"""Sources, tokenizer, token cache: what is in the files arrives, and what cannot is refused by name."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from longshift.config_parts import DocumentFormat, Source
from longshift.documents import record_reader
from longshift.documents.sources import SkippedFile, Text, files, read
from longshift.documents.tokenizer import END_OF_TEXT, Tokenizer, load, project_tokenizer, train
from longshift.documents.tokens import TokenCache, build
from longshift.errors import DataError
from longshift.files import publish

TEXTS = ["def f(x):\n    return x\n", "naïve — ünïcode 漢字 🙂\r\n\tend", " ", "a" * 500, "one\u2028line"]


def texts(source: Source) -> list[str]:
    return [item.text for file in files(source) for item in read(file) if isinstance(item, Text)]


def write_jsonl(path: Path, values, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: v}, ensure_ascii=i % 2 == 0) + "\n" for i, v in enumerate(values)))
    return path


# Sources


def test_every_format_gives_the_same_texts(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": pa.array(TEXTS, pa.large_string())}), tmp_path / "large.parquet")
    pq.write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), tmp_path / "categories.parquet")
    datasets.Dataset.from_dict({"n": range(len(TEXTS)), "text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "txt" / f"{i}.txt").write_bytes(text.encode())
    for path in ("a.jsonl", "a.parquet", "large.parquet", "categories.parquet", "saved", "txt/*"):
        assert texts(Source(path=str(tmp_path / path))) == TEXTS, path


def test_fields_and_globs(tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [name], "body")
    assert texts(Source(path=str(tmp_path / "**/*.jsonl"), format=DocumentFormat("text", ("body",)))) == ["a/1.jsonl", "b/2.jsonl"]
    (tmp_path / "[x].txt").write_text("brackets")
    assert texts(Source(path=str(tmp_path / "[x].txt"))) == ["brackets"]


BAD_LINES = [
    (b'{"text": "ok"\n', 13, "not JSON: Expecting ',' delimiter"),
    ('{"text": "ü" x}\n'.encode(), 14, "not JSON"),  # bytes, not characters
    (b'{"text": "ab\xff"}\n', 12, r"not UTF-8: invalid start byte \(0xff\)"),
    (b"\n", 0, "line is empty"),
    (b"   \n", 0, "line is empty"),
    (b'["text"]\n', 0, "a JSON list, where one object"),
    (b'{"txt": "a", "n": 1}\n', 0, r"no field 'text', only 'txt', 'n'; did you mean format: {text: txt}\?"),
    (b'{"text": null}\n', 0, "'text' holds NoneType, where a string"),
    (b'{"text": 3}\n', 0, "'text' holds int, where a string"),
    (b'{"text": ""}\n', 0, "'text' is empty"),
    (b'{"text": "x\\ud800"}\n', 0, "surrogate"),
    (b"[" * 100_000 + b"\n", 0, "not JSON"),
    (b'{"text": "a", "text": "b"}\n', 0, "an object has the key 'text' twice"),
    (b'{"text": "a", "more": [{"n": 1, "n": 1}]}\n', 0, "an object has the key 'n' twice"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_mark_at_the_beginning_counts_as_bytes_of_the_file(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b'\xef\xbb\xbf{"text": "ab\xff"}\n')
    with pytest.raises(DataError, match=r"byte 15: not UTF-8: invalid start byte \(0xff\)"):
        texts(Source(path=str(path)))


@pytest.mark.parametrize(("line", "at", "why"), BAD_LINES)
def test_a_bad_line_is_named_by_file_line_and_byte(tmp_path, line, at, why):
    good = '\ufeff{"text": "gut, sagt Frau Müller"}\n'.encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + good[3:] + line + good[3:])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3, byte {2 * len(good) - 3 + at}: .*{why}"):
        texts(Source(path=str(path)))


def test_a_line_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(record_reader, "_LINE_LIMIT_BYTES", 40)
    path = write_jsonl(tmp_path / "a.jsonl", ["short", "x" * 40])
    with pytest.raises(DataError, match="line 2, byte 27: the line is longer than 40 bytes"):
        texts(Source(path=str(path)))


def test_a_last_line_without_newline_is_a_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\r\n{"text": "b"}')
    assert texts(Source(path=str(tmp_path / "a.jsonl"))) == ["a", "b"]


def test_bad_tables_are_named_by_file_and_row(tmp_path):
    path = tmp_path / "a.parquet"

    def refused(table, why):
        pq.write_table(table, path)
        with pytest.raises(DataError, match=rf"a\.parquet.*{why}"):
            texts(Source(path=str(path)))

    refused(pa.table({"text": ["a", None]}), "row 1: 'text' holds NoneType")
    refused(pa.table({"text": ["a", "b", ""]}), "row 2: 'text' is empty")
    refused(pa.table({"text": [1, 2]}), "row 0: 'text' holds int64")
    refused(pa.table({"content": ["a"]}), r"no field 'text', .* did you mean format: {text: content}\?")
    refused(pa.table({"text": pa.array([], pa.string())}), "no rows")
    not_utf8 = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"ab\xff"))
    refused(pa.table({"text": not_utf8}), "row 1: 'text' is not UTF-8")
    whole = path.read_bytes()
    pq.write_table(pa.table({"text": ["a"], "zzzz": ["b"]}), path)
    for damaged in (whole[:-20], path.read_bytes().replace(b"zzzz", b"zzz\xf4")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet"):
            texts(Source(path=str(path)))


def test_bad_dataset_folders_are_refused(tmp_path):
    one = datasets.Dataset.from_dict({"text": ["a", None]})
    one.save_to_disk(tmp_path / "one")
    with pytest.raises(DataError, match="one, row 1: 'text' holds NoneType"):
        texts(Source(path=str(tmp_path / "one")))
    with pytest.raises(DataError, match="no field 'body'"):
        texts(Source(path=str(tmp_path / "one"), format=DocumentFormat("text", ("body",))))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"holds splits \(train, test\); name one, as in path: .*splits/train"):
        texts(Source(path=str(tmp_path / "splits")))
    arrow = next((tmp_path / "one").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(DataError, match=r"one/data-.*\.arrow: cannot be read as an Arrow stream"):
        texts(Source(path=str(tmp_path / "one")))
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"one/state\.json: _data_files does not name the files of a dataset"):
        texts(Source(path=str(tmp_path / "one")))


def test_bad_text_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nth\xe9ree")
    with pytest.raises(DataError, match=r"a\.txt, line 3, byte 10: not UTF-8: .*0xe9"):
        texts(Source(path=str(tmp_path / "a.txt")))
    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=rf"{name}: the file is empty"):
            texts(Source(path=str(tmp_path / name)))


def test_what_a_pattern_matches_and_cannot_be_read_is_not_left_out_silently(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/b.txt").write_text("text")
    assert len(files(Source(path=f"{tmp_path}/**/*"))) == 2
    with pytest.raises(DataError, match=rf"more is a folder, .*; to read what is in it, write path: {tmp_path}/\*\*/\*, else one"):
        files(Source(path=f"{tmp_path}/*"))
    for make in (lambda path: path.symlink_to(tmp_path / "nothing"), lambda path: os.mkfifo(path)):
        make(tmp_path / "odd")
        for pattern in ("[ao]*", "**/*"):
            with pytest.raises(DataError, match="odd is no file that can be read"):
                files(Source(path=f"{tmp_path}/{pattern}"))
        (tmp_path / "odd").unlink()


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    (tmp_path / "tree/sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / "tree" / name).write_text(name)
    (tmp_path / "tree/sub/loop").symlink_to("..")
    found = [Path(file.path).relative_to(tmp_path / "tree") for file in files(Source(path=f"{tmp_path}/tree/**/*.txt"))]
    assert list(map(str, found)) == ["a.txt", "sub/b.txt"]
    assert len(files(Source(path=f"{tmp_path}/tree/**/*"))) == 2


def test_a_path_that_matches_nothing_names_the_nearest(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.jsonl").touch()
    for path, why in [
        ("boks/*.jsonl", rf"boks/\*\.jsonl matches no file.*exists is {tmp_path}; did you mean {tmp_path}/books\?"),
        ("books/*.parquet", rf"exists is {tmp_path}/books; it holds a\.jsonl"),
        ("books/a.jsnl", rf"did you mean {tmp_path}/books/a\.jsonl\?"),
        ("books/a.jsonl/x", "it is a file"),
        ("books", r"is a folder, .* write path: .*/books/\*\*/\*"),
    ]:
        with pytest.raises(DataError, match=why):
            files(Source(path=str(tmp_path / path)))


@pytest.mark.parametrize("given", [{}, {"path": "a", "corpus": "python"}, {"corpus": "pyton"}])
def test_a_source_is_a_path_or_a_known_corpus(given):
    with pytest.raises(ValidationError, match="python"):
        Source(**given)


def test_the_python_corpus_is_the_whole_library_and_says_what_it_skips():
    found = files(Source(corpus="python"))
    items = [item for file in found for item in read(file)]
    assert len(items) == len(found)
    assert [f.path for f in found] == sorted(f.path for f in found)
    assert len(found) > 500
    assert not any("site-packages" in f.path or "__pycache__" in f.path for f in found)
    by_path = {item.where: item for item in items}
    argparse = next(p for p in by_path if p.endswith("/argparse.py"))
    assert by_path[argparse].text.encode() == Path(argparse).read_bytes()  # pyright: ignore[reportAttributeAccessIssue]
    for item in items:
        if isinstance(item, SkippedFile):
            data = Path(item.where).read_bytes()
            assert (item.why == "empty") == (not data)
            if data:
                with pytest.raises(UnicodeDecodeError):
                    data.decode()
    assert any(isinstance(item, SkippedFile) for item in items)


# Tokenizer


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Tokenizer:
    """A byte-level BPE of 300 tokens, on disk."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train(iter([Path(json.__file__).read_text()]), 300).save(str(folder / "tokenizer.json"))
    return load(folder)


def test_tokens_give_the_text_back(small):
    for text, ids in zip(TEXTS, small.encode(TEXTS)):
        assert ids[-1] == small.eos
        assert small.eos not in ids[:-1]
        assert small.core.decode(ids[:-1], skip_special_tokens=False) == text
        assert max(ids) < small.vocab == 300


def test_training_is_deterministic_and_gives_the_size_asked_for():
    text = [Path(os.__file__).read_text(), Path(json.__file__).read_text()]
    a, b = train(iter(text), 509), train(iter(text), 509)
    assert a.to_str() == b.to_str()
    assert a.get_vocab_size() == 509
    with pytest.raises(DataError, match="at least 257 tokens, not 256"):
        train(iter(text), 256)
    with pytest.raises(DataError, match=r"give only .* of 5000 tokens"):
        train(iter(["too little"]), 5000)


def test_the_project_tokenizer_is_trained_once(tmp_path):
    started = time.process_time()
    one = project_tokenizer(tmp_path, 4093)
    assert time.process_time() - started < 40  # two cores, 20 s
    stamp = one.file.stat().st_mtime_ns
    again = project_tokenizer(tmp_path, 4093)
    assert again.file.stat().st_mtime_ns == stamp
    assert (again.fingerprint, again.vocab, again.core.id_to_token(again.eos)) == (one.fingerprint, 4093, END_OF_TEXT)
    assert len(list(tmp_path.iterdir())) == 1
    source = Path(json.__file__).read_text()
    assert len(one.encode([source])[0]) < len(source) / 3

    peer = AutoTokenizer.from_pretrained(one.file.parent)
    assert peer.eos_token_id == one.eos
    assert [peer(text)["input_ids"] for text in [source, *TEXTS]] == [ids[:-1] for ids in one.encode([source, *TEXTS])]


def folder_with(small: Tokenizer, folder: Path, change=lambda core: None, **configs) -> Path:
    """A tokenizer folder: the small tokenizer, changed, with the given JSON files beside it."""
    core = tokenizers.Tokenizer.from_str(small.core.to_str())
    change(core)
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_end_of_text_is_found_where_model_folders_keep_it(small, tmp_path):
    word = small.core.id_to_token(270)
    for i, configs in enumerate(
        (
            {"tokenizer_config": {"eos_token": word}},
            {"tokenizer_config": {"eos_token": {"content": word}}, "special_tokens_map": {"eos_token": END_OF_TEXT}},
            {"tokenizer_config": {}, "special_tokens_map": {"eos_token": word}},
        )
    ):
        found = load(folder_with(small, tmp_path / str(i), **configs))
        assert found.eos == 270
        assert found.fingerprint != small.fingerprint
    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token 'nope' is not a token"):
        load(folder_with(small, tmp_path / "nope", tokenizer_config={"eos_token": "nope"}))


def test_the_tokenizers_own_template_is_kept_and_closed_once(small, tmp_path):
    def template(single):
        special = [(small.core.id_to_token(t), t) for t in (0, 260)]
        return lambda core: setattr(core, "post_processor", TemplateProcessing(single=single, special_tokens=special))

    begin = small.core.id_to_token(260)
    plain = small.encode(["x = 1"])[0]
    for name, single, expected in (
        ("begin", f"{begin} $A", [260, *plain]),
        ("both", f"{begin} $A {END_OF_TEXT}", [260, *plain]),
    ):
        assert load(folder_with(small, tmp_path / name, template(single))).encode(["x = 1"]) == [expected]


def test_truncation_and_padding_kept_in_the_file_do_not_apply(small, tmp_path):
    def change(core):
        core.enable_truncation(4)
        core.enable_padding(length=64)

    assert load(folder_with(small, tmp_path / "t", change)).encode(TEXTS) == small.encode(TEXTS)


def test_bad_tokenizers_are_refused(small, tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*there is no tokenizer"):
        load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(DataError, match="cannot be read as a tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(small.core.to_str().replace(END_OF_TEXT, "<end>"))
    with pytest.raises(DataError, match="which token ends a text is not known"):
        load(tmp_path)
    small.check_model(300)
    with pytest.raises(DataError, match=r"largest id is 299, but the model's vocabulary has 299 tokens \(ids 0 to 298\)"):
        small.check_model(299)


# Token cache


@pytest.fixture
def corpus(tmp_path) -> Source:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("the last document")
    return Source(path=str(tmp_path / "[ab].*"))


def test_the_cache_holds_every_token_of_every_document(small, corpus, tmp_path):
    seen = []
    cache = build([corpus, Source(path=str(tmp_path / "b.txt"))], small, tmp_path / "cache", lambda *at: seen.append(at))
    expected = small.encode([*TEXTS, "the last document", "the last document"])
    assert [cache.tokens(d).tolist() for d in range(len(cache))] == expected
    assert cache.lengths.tolist() == [len(ids) for ids in expected]
    assert cache.lengths.dtype == np.int64
    assert cache.tokens(3, 2, 5).tolist() == expected[3][2:5]
    assert cache.tokens(0, 2, 10**9).tolist() == expected[0][2:]
    assert not cache.tokens(0).flags.writeable
    assert [cache.where(d).rsplit("/", 1)[1] for d in (0, 4, 5, 6)] == ["a.jsonl, line 1", "a.jsonl, line 5", "b.txt", "b.txt"]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in (tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "b.txt"))


def test_large_vocabularies_take_four_bytes(small, corpus, tmp_path):
    def widen(core):
        core.add_special_tokens([f"<{i}>" for i in range(1 << 16)])

    (tmp_path / "b.txt").write_text("<65500>")
    cache = build([corpus], load(folder_with(small, tmp_path / "wide", widen)), tmp_path / "cache")
    assert cache.tokens(5).tolist() == [300 + 65500, small.eos]


def test_a_cache_is_reused_until_something_changes(small, corpus, tmp_path):
    one = build([corpus], small, tmp_path / "cache")
    stamp = (one.folder / "tokens.bin").stat().st_mtime_ns
    assert build([corpus], small, tmp_path / "cache").folder == one.folder
    assert (one.folder / "tokens.bin").stat().st_mtime_ns == stamp
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    touched = build([corpus], small, tmp_path / "cache")
    assert touched.folder != one.folder
    assert touched.fingerprint == one.fingerprint  # the tokens are the same
    (tmp_path / "b.txt").write_text("the LAST document")
    assert build([corpus], small, tmp_path / "cache").fingerprint != one.fingerprint
    other = load(folder_with(small, tmp_path / "other", tokenizer_config={"eos_token": small.core.id_to_token(270)}))
    assert build([corpus], other, tmp_path / "cache").folder not in (one.folder, touched.folder)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "manifest.json"])
def test_a_damaged_cache_is_refused(small, corpus, tmp_path, name):
    folder = build([corpus], small, tmp_path / "cache").folder
    good = (folder / name).read_bytes()
    for i in range(0, len(good), max(1, len(good) // 40)):  # one flipped bit
        (folder / name).write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        try:
            TokenCache.open(folder)
        except DataError as error:
            assert f"{name} is damaged" in str(error)  # noqa: PT017
            assert f"rm -r '{folder}'" in str(error)  # noqa: PT017
        else:  # white space of the manifest means nothing
            assert name == "manifest.json"
            assert json.loads((folder / name).read_bytes()) == json.loads(good)
    (folder / name).write_bytes(good[:-2])
    with pytest.raises(DataError, match=f"{name} is damaged"):
        build([corpus], small, tmp_path / "cache")
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        TokenCache.open(folder, verify=False)


def test_a_bad_document_leaves_no_cache_behind(small, corpus, tmp_path):
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b'{"text": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 6"):
        build([corpus], small, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_text_without_tokens_is_refused(small, corpus, tmp_path):
    def strip(core):
        core.normalizer = tokenizers.normalizers.Strip()

    with pytest.raises(DataError, match=r"a\.jsonl, line 3, byte 110: the tokenizer finds no token"):
        build([corpus], load(folder_with(small, tmp_path / "strip", strip)), tmp_path / "cache")


def test_a_file_that_changes_while_it_is_read_is_refused(small, corpus, tmp_path):
    def append(done, total):
        with open(tmp_path / "b.txt", "a") as file:
            file.write("more")

    with pytest.raises(DataError, match=r"b\.txt: changed while it was read"):
        build([corpus], small, tmp_path / "cache", append)


def test_a_full_disk_leaves_nothing_behind(small, corpus, tmp_path):
    (tmp_path / "b.txt").write_text("x y z " * 50_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot write the token cache"):
            build([corpus], small, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "cache").iterdir())


def test_a_folder_that_cannot_be_written_is_refused(small, corpus, tmp_path):
    with pytest.raises(DataError, match="cannot write the token cache"):
        build([corpus], small, tmp_path / "b.txt")
    with pytest.raises(DataError, match="cannot write the tokenizer"):
        project_tokenizer(tmp_path / "b.txt", 257)


BUILD = """
import os, sys, time
from longshift.config_parts import Source
from longshift.documents import tokenizer, tokens
small = tokenizer.load(sys.argv[1])
print("ready", flush=True)
while not os.path.exists(sys.argv[3] + ".go"):
    time.sleep(0.001)
cache = tokens.build([Source(path=sys.argv[2])], small, sys.argv[3], lambda *at: time.sleep(0.05))
print(cache.folder, cache.fingerprint)
"""


def test_two_processes_building_one_cache_both_end_well(small, corpus, tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", BUILD, str(small.file), str(corpus.path), str(cache)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [w.stdout.readline() for w in workers if w.stdout] == ["ready\n"] * 2
    Path(f"{cache}.go").touch()
    ended = [w.communicate(timeout=60) for w in workers]
    assert [w.returncode for w in workers] == [0, 0], ended
    (one, _), (other, _) = ended
    assert one == other
    assert len(list(cache.iterdir())) == 1
    assert build([corpus], small, cache).fingerprint == one.split()[1]


def test_the_second_to_publish_keeps_the_first_ones_folder(tmp_path):
    target = tmp_path / "x" / "whole"

    def first(folder: Path) -> None:
        (folder / "by").write_text("first")

    def slow(folder: Path) -> None:
        publish(target, first)
        (folder / "by").write_text("second")

    publish(target, slow)
    assert (target / "by").read_text() == "first"
    assert list(target.parent.iterdir()) == [target]
