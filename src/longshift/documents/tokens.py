"""The token cache: every document's tokens end to end in one memory-mapped file, made once and then
only read.

    <folder>/<key>/tokens.bin      uint16 or uint32, little-endian
                   offsets.bin     int64: document d is tokens[offsets[d] : offsets[d + 1]],
                                   end of text last
                   learned.bin     uint8: 1 for a token that is a target; not there where all are
                   manifest.json   what it was made from, what it holds, SHA-256 of the files

The key stands for the tokenizer and for path, size, time and some blocks of every source file, so
that changed sources make a new cache and never alter one that is in use. The fingerprint stands for
the tokens alone: the same on every machine and under any path.

Every token is compared with the SHA-256 in the manifest before a run uses it: by the process that
makes the cache or, where the cache is there already, by one rank for each file that ranks see; the
others compare the file's identity and the fingerprint.
"""

import hashlib
import json
import platform
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from longshift.config_parts import Source
from longshift.documents.function_reader import TokenIds
from longshift.documents.record_notes import RecordNotes
from longshift.documents.sources import File, SkippedFile, Text, files, read, unchanged
from longshift.documents.template import ChatTemplate, read_template
from longshift.documents.template_process import TemplateProcess
from longshift.documents.tokenizer import Tokenizer
from longshift.errors import DataError
from longshift.files import publish

Progress = Callable[[int, int], None]  # bytes of the sources done, bytes in all

FILES = ("tokens.bin", "offsets.bin")
MASK = "learned.bin"
_FORMAT = 3
_BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class CachedFile:
    """A source file and the documents it gave; `first` is the number of its first, `source` that of
    the source in data.train."""

    path: str
    format: str
    first: int
    documents: int
    source: int


@dataclass(frozen=True, eq=False)
class TokenCache:
    """Documents of a corpus as tokens.

    `lengths` int64 [documents], end of text included; `fingerprint` of the tokens; `skipped` (path,
    reason) of each file that gave none; `notes`: what of the sources no token shows,
    a sentence each.
    """

    folder: Path
    lengths: np.ndarray
    fingerprint: str
    files: tuple[CachedFile, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    _offsets: np.ndarray
    _tokens: np.ndarray
    _learned: np.ndarray | None
    _sha256: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path | str, verify: bool = True) -> "TokenCache":
        """Open a finished cache. `verify`: read every token to be sure.

        Without `verify`, the manifest and the sizes of files are checked, and the method `verify`
        may be called later. Raises DataError with the reason where the cache is damaged.
        """
        folder = Path(folder)
        body = _read_manifest(folder)
        has_mask = MASK in body["sha256"]

        _check_size(folder / "tokens.bin", body["tokens"] * np.dtype(body["dtype"]).itemsize)
        _check_size(folder / "offsets.bin", (body["documents"] + 1) * np.dtype("<i8").itemsize)
        if has_mask:
            _check_size(folder / MASK, body["tokens"] * np.dtype("u1").itemsize)
        if verify:
            _check_contents(folder, body["sha256"])

        offsets = np.memmap(folder / "offsets.bin", "<i8", "r")
        return cls(
            folder=folder,
            lengths=np.diff(offsets).astype(np.int64, copy=False),
            fingerprint=_digest(body["tokenizer"], body["sha256"]),
            files=_cached_files(body["files"]),
            skipped=tuple((path, why) for path, why in body["skipped"]),
            notes=tuple(body["notes"]),
            _offsets=offsets,
            _tokens=np.memmap(folder / "tokens.bin", body["dtype"], "r"),
            _learned=np.memmap(folder / MASK, "u1", "r") if has_mask else None,
            _sha256=body["sha256"],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def verify(self) -> None:
        """Read every token. Raises DataError where the files are not those
        that the manifest describes."""
        _check_contents(self.folder, self._sha256)

    @property
    def identity(self) -> str:
        """The files as this machine sees them, without reading them: equal for processes that have
        the same files open, of the same contents."""
        stats = [(self.folder / name).stat() for name in self._sha256]
        inodes = [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
        return json.dumps([platform.node(), *inodes, self.fingerprint])

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens `start` to `stop` of a document, cut at its end: a read-only view of the file,
        uint16 or uint32."""
        return self._tokens[self._span(document, start, stop)]

    def learned(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        """Which of the tokens that `tokens` gives are targets, uint8; None where all are."""
        return None if self._learned is None else self._learned[self._span(document, start, stop)]

    def _span(self, document: int, start: int, stop: int | None) -> slice:
        begin = int(self._offsets[document])
        end = int(self._offsets[document + 1])
        return slice(begin + start, end if stop is None else min(begin + stop, end))

    @property
    def learned_tokens(self) -> int | None:
        """How many tokens are targets; None where all are."""
        return None if self._learned is None else int(np.sum(self._learned, dtype=np.int64))

    @property
    def source_of(self) -> np.ndarray:
        """The number of each document's source in data.train, int64 [documents]."""
        return np.repeat([f.source for f in self.files], [f.documents for f in self.files])

    def where(self, document: int) -> str:
        """The file a document came from, and its line or row there."""
        file = self.files[bisect_right(self.files, document, key=lambda f: f.first) - 1]
        index = document - file.first
        if file.format in ("parquet", "arrow", "dataset"):
            return f"{file.path}, row {index}"

        # Editors count lines from 1. A text or a Python file is one document: it has no number.
        units = {
            "jsonl": "line",
            "json": "entry",
            "csv": "record",
            "tsv": "record",
            "function": "item",
        }
        return (
            f"{file.path}, {units[file.format]} {index + 1}" if file.format in units else file.path
        )


def build(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    folder: Path | str,
    progress: Progress | None = None,
    verify: bool = True,
    template: Path | None = None,
) -> TokenCache:
    """The token cache of these sources under `folder`: the one that is there if nothing changed,
    else a new one.

    Any number of processes may do this at once: each writes aside, the first to finish provides.
    `progress` is called after every document; `verify` is as in `TokenCache.open`; `template`, of
    conversations, is the tokenizer's own where not given. Raises DataError for bad input, for a
    damaged cache, and when the folder cannot be written.
    """
    inputs = [(index, file) for index, source in enumerate(sources) for file in files(source)]
    chat = _template(sources, tokenizer, template)

    # The template is in the key only where there is one, so that caches of plain texts
    # keep their key.
    file_facts = [(source, asdict(file)) for source, file in inputs]
    template_facts = [asdict(chat)] if chat else []
    key = _digest(_FORMAT, tokenizer.fingerprint, file_facts, *template_facts)

    target = Path(folder).expanduser() / key[:16]
    is_new = not target.exists()
    if is_new:
        report = progress or (lambda bytes_done, total_bytes: None)
        try:
            publish(target, lambda scratch: _write(inputs, tokenizer, chat, scratch, report))
        except OSError as error:
            raise DataError(
                f"{target}: cannot write the token cache: {error.strerror or error}"
            ) from error
    # The hash of a new one was made from what was written.
    return TokenCache.open(target, verify and not is_new)


# Writing


def _template(
    sources: Sequence[Source], tokenizer: Tokenizer, path: Path | None
) -> ChatTemplate | None:
    """The chat template where a source needs one, or may need it. `path`: its file, None for the
    tokenizer's own."""
    if not any(source.may_be_masked for source in sources):
        return None
    try:
        return read_template(path, tokenizer.file, tokenizer.special)
    except DataError:
        if path is None and all(source.format.kind != "messages" for source in sources):
            # Prompts and completions may be plain text, and a function may return no conversation.
            return None
        raise


@dataclass
class _Counts:
    """What is counted while tokens are written. Mutable.

    `lengths`: of each document. `documents`: of each file. `learned`, `targets`: tokens of each
    source, of those that have a target. `masked`: sources whose documents have masks.
    """

    documents: list[int]
    learned: np.ndarray
    targets: np.ndarray
    lengths: list[int] = field(default_factory=list)
    masked: set[int] = field(default_factory=set)

    def add(self, file_index: int, source: int, mask: np.ndarray) -> None:
        """Count a document. Its first token is no target."""
        self.lengths.append(len(mask))
        self.documents[file_index] += 1
        self.learned[source] += int(mask[1:].sum())
        self.targets[source] += len(mask) - 1


def _write(
    inputs: Sequence[tuple[int, File]],
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    folder: Path,
    progress: Progress,
) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    empty_tokens = len(tokenizer.encode([""])[0])
    may_have_mask = any(file.learn for _, file in inputs)
    num_sources = 1 + max(source for source, _ in inputs)

    # 1. Tokens and masks of all documents.
    learned, targets = np.zeros((2, num_sources), np.int64)
    counts = _Counts([0] * len(inputs), learned, targets)
    skipped: list[tuple[str, str]] = []
    with (
        open(folder / "tokens.bin", "wb") as token_file,
        open(folder / MASK, "wb") as mask_file,
        TemplateProcess(chat) if chat else nullcontext() as template,
    ):
        notes = [RecordNotes(template) for _ in range(num_sources)]
        for batch in _batches(_texts(inputs, template, notes, skipped, progress)):
            encoded = _encoded(tokenizer, [document for _, document in batch])
            for (file_index, document), (ids, mask) in zip(batch, encoded):
                source, _ = inputs[file_index]
                if isinstance(document, Text) and len(ids) == empty_tokens:
                    reason = f"the tokenizer finds no token in {_size(document)} characters of text"
                    raise DataError(f"{document.where}: {reason}")
                token_file.write(np.array(ids, dtype).tobytes())
                if mask is None:
                    mask = np.ones(len(ids), bool)
                else:
                    counts.masked.add(source)
                if may_have_mask:
                    mask_file.write(mask.astype("u1").tobytes())
                counts.add(file_index, source, mask)

    # 2. Checks that need all of them.
    if not counts.lengths:
        raise DataError("the sources of data.train hold no document")
    if counts.masked:
        _check_masks(inputs, counts.masked, counts.learned, counts.targets)
    else:
        (folder / MASK).unlink()

    # 3. The manifest comes last: it has the hashes of the other files.
    np.array([0, *accumulate(counts.lengths)], "<i8").tofile(folder / "offsets.bin")
    body = {
        "format": _FORMAT,
        "dtype": dtype.str,
        "documents": len(counts.lengths),
        "tokens": sum(counts.lengths),
        "tokenizer": tokenizer.fingerprint,
        "skipped": skipped,
        "notes": _note_sentences(inputs, notes),
    }
    _write_manifest(folder, body, inputs, counts)


def _write_manifest(
    folder: Path, body: dict[str, Any], inputs: Sequence[tuple[int, File]], counts: _Counts
) -> None:
    """Write what the tokens were made from, with the hashes of the files that hold them."""
    names = [*FILES, MASK] if counts.masked else FILES
    body["sha256"] = {name: _sha256(folder / name) for name in names}
    body["files"] = []
    for (source, file), documents in zip(inputs, counts.documents):
        body["files"].append({**asdict(file), "source": source, "documents": documents})
    text = json.dumps({"sha256": _digest(body), "body": body}, indent=1)
    (folder / "manifest.json").write_text(text + "\n")


def _size(document: Text | TokenIds) -> int:
    """Characters of a text, or tokens."""
    return len(document.text if isinstance(document, Text) else document.ids)


def _encoded(
    tokenizer: Tokenizer, documents: Sequence[Text | TokenIds]
) -> Iterator[tuple[Sequence[int], np.ndarray | None]]:
    """Token ids of each document, in order, and which of them are targets; None for all. Raises
    DataError for an id that is no token."""
    texts = [document for document in documents if isinstance(document, Text)]
    plain = iter(tokenizer.encode([text.text for text in texts if text.learned is None]))
    parts = iter(tokenizer.encode_learned([text for text in texts if text.learned is not None]))
    for document in documents:
        if isinstance(document, TokenIds):
            _check_ids(document, tokenizer)
            yield document.ids.tolist(), document.learned
        else:
            yield (next(plain), None) if document.learned is None else next(parts)


def _check_ids(document: TokenIds, tokenizer: Tokenizer) -> None:
    wrong = document.ids[(document.ids < 0) | (document.ids >= tokenizer.vocab)]
    if len(wrong):
        raise DataError(
            f"{document.where}: ids has {wrong[0]}, and tokens of {tokenizer.file} are 0 to"
            f" {tokenizer.vocab - 1}"
        )


def _check_masks(
    inputs: Sequence[tuple[int, File]], masked: Set[int], learned: np.ndarray, targets: np.ndarray
) -> None:
    """Raises DataError for a source of conversations of which nothing is learned, or everything.

    `masked`: sources of which some documents say what is learned; `learned`, `targets`: of each
    source, tokens that are learned and those that could be.
    """
    # Reversed, the first file of each source is the one that the dict keeps.
    for source, file in dict(reversed(inputs)).items():
        total = targets[source]
        if source not in masked:
            continue
        if learned[source] == 0:
            raise DataError(
                f"{file.path}: not one of {total} tokens would be learned; look at them with"
                " longshift data CONFIG"
            )
        if (
            file.format != "function"
            and file.learn in ("assistant", "last")
            and learned[source] == total
        ):
            raise DataError(
                f"{file.path}: all {total} tokens would be learned, not only what the assistant"
                " says: the template marks everything; to mean that, write learn: all"
            )


def _note_sentences(inputs: Sequence[tuple[int, File]], notes: Sequence[RecordNotes]) -> list[str]:
    """The notes of all sources, each with the name of its source."""
    sentences = list[str]()
    for source, source_notes in enumerate(notes):
        name = _source_name(inputs, source)
        sentences += [f"{name}: {sentence}" for sentence in source_notes.sentences()]
    return sentences


def _source_name(inputs: Sequence[tuple[int, File]], source: int) -> str:
    """The file of a source, or its first of several."""
    paths = [file.path for file_source, file in inputs if file_source == source]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _texts(
    inputs: Sequence[tuple[int, File]],
    chat: TemplateProcess | None,
    notes: Sequence[RecordNotes],
    skipped: list[tuple[str, str]],
    progress: Progress,
) -> Iterator[tuple[int, Text | TokenIds]]:
    """The documents of all files, each with the number of its file.

    Adds files that give none to `skipped`, and what of a source no token shows to its `notes`.
    """
    total_bytes = sum(file.size_bytes for _, file in inputs)
    finished_bytes = 0
    for file_index, (source, file) in enumerate(inputs):
        characters = 0
        for item in read(file, chat, notes[source]):
            if isinstance(item, SkippedFile):
                skipped.append((item.where, item.why))
            else:
                characters += _size(item)
                yield file_index, item

            # Characters stand for bytes; templates write more of them than the file has.
            progress(finished_bytes + min(characters, file.size_bytes), total_bytes)
        if not unchanged(file):
            raise DataError(
                f"{file.path}: changed while it was read; start again when nothing writes to it"
            )
        finished_bytes += file.size_bytes
        progress(finished_bytes, total_bytes)


def _batches(
    documents: Iterable[tuple[int, Text | TokenIds]],
) -> Iterator[list[tuple[int, Text | TokenIds]]]:
    """Runs of documents that the tokenizer takes at once."""
    batch = []
    characters = 0
    for file_index, document in documents:
        batch.append((file_index, document))
        characters += _size(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


# Reading


def _cached_files(rows: Sequence[Mapping[str, Any]]) -> tuple[CachedFile, ...]:
    """The files of a manifest, each with the number of its first document."""
    cached = list[CachedFile]()
    first = 0
    for row in rows:
        cached.append(
            CachedFile(row["path"], row["format"], first, row["documents"], row["source"])
        )
        first += row["documents"]
    return tuple(cached)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        body = manifest["body"]
        digest = manifest["sha256"]
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {_again(folder)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; {_again(folder)}") from error
    if _digest(body) != digest:
        raise DataError(
            f"{path} is damaged: its contents do not give its SHA-256; {_again(folder)}"
        )
    if body["format"] != _FORMAT:
        raise DataError(
            f"{path}: format {body['format']}, where {_FORMAT} is read; {_again(folder)}"
        )
    return body


def _check_size(path: Path, size: int) -> None:
    if not path.exists():
        raise DataError(f"{path} is missing; {_again(path.parent)}")
    if path.stat().st_size != size:
        raise DataError(
            f"{path} is damaged: it has {path.stat().st_size} bytes, not {size};"
            f" {_again(path.parent)}"
        )


def _check_contents(folder: Path, sha256: Mapping[str, str]) -> None:
    for name in sha256:
        if _sha256(folder / name) != sha256[name]:
            raise DataError(
                f"{folder / name} is damaged: its contents do not give its SHA-256;"
                f" {_again(folder)}"
            )


def _again(folder: Path) -> str:
    return f"to make it again: rm -r '{folder}'"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
