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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
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
from longshift.documents.token_counts import TokenCounts
from longshift.documents.tokenizer import Tokenizer
from longshift.errors import DataError
from longshift.files import file_digest, publish

Progress = Callable[[int, int], None]  # bytes of the sources done, bytes in all

FILES = ("tokens.bin", "offsets.bin")
MASK = "learned.bin"
_FORMAT = 3
_BATCH_CHARACTERS = 4 << 20
# By format of a file, what a document is called in it, and the number of the first: editors count
# lines from 1. A text or a Python file is one document, without a number.
_UNITS: Mapping[str, tuple[str, int]] = {
    "jsonl": ("line", 1),
    "json": ("entry", 1),
    "csv": ("record", 1),
    "tsv": ("record", 1),
    "function": ("item", 1),
    "parquet": ("row", 0),
    "arrow": ("row", 0),
    "dataset": ("row", 0),
}


@dataclass(frozen=True)
class CachedFile:
    """A source file and how many documents it gave; `source`: the number of its source."""

    path: str
    format: str
    documents: int
    source: int


@dataclass(frozen=True, eq=False)
class TokenCache:
    """Documents of a corpus as tokens.

    `lengths` int64 [documents], end of text included; `fingerprint` of the tokens; `skipped` (path,
    reason) of each file that gave none; `notes`: what of the sources no token shows, a sentence
    each.
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
        tokens = _open_array(folder / "tokens.bin", body["tokens"], body["dtype"])
        offsets = _open_array(folder / "offsets.bin", body["documents"] + 1, "<i8")
        learned = None
        if MASK in body["sha256"]:
            learned = _open_array(folder / MASK, body["tokens"], "u1")
        cache = cls(
            folder=folder,
            lengths=np.diff(offsets).astype(np.int64, copy=False),
            fingerprint=_digest(body["tokenizer"], body["sha256"]),
            files=tuple(
                CachedFile(row["path"], row["format"], row["documents"], row["source"])
                for row in body["files"]
            ),
            skipped=tuple((path, why) for path, why in body["skipped"]),
            notes=tuple(body["notes"]),
            _offsets=offsets,
            _tokens=tokens,
            _learned=learned,
            _sha256=body["sha256"],
        )
        if verify:
            cache.verify()
        return cache

    def __len__(self) -> int:
        return len(self.lengths)

    def verify(self) -> None:
        """Read every token. Raises DataError where a file is not what the manifest describes."""
        for name, digest in self._sha256.items():
            if file_digest(self.folder / name) != digest:
                fault = "damaged: its contents do not give its SHA-256"
                raise _damage(self.folder / name, fault)

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
        """The number of each document's source, int64 [documents]."""
        return np.repeat([f.source for f in self.files], [f.documents for f in self.files])

    def where(self, document: int) -> str:
        """The file a document came from, and its line or row there."""
        ends = list(accumulate(file.documents for file in self.files))
        number = bisect_right(ends, document)
        file = self.files[number]
        if file.format not in _UNITS:
            return file.path
        unit, first = _UNITS[file.format]
        first_document = ends[number] - file.documents
        return f"{file.path}, {unit} {document - first_document + first}"


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

    # The template is in the key only where there is one: caches of plain texts keep their key.
    file_facts = [(source, asdict(file)) for source, file in inputs]
    template_facts = [asdict(chat)] if chat else []
    key = _digest(_FORMAT, tokenizer.fingerprint, file_facts, *template_facts)

    target = Path(folder).expanduser() / key[:16]
    is_new = not target.exists()
    if is_new:
        report = progress or (lambda bytes_done, total_bytes: None)
        try:
            publish(target, partial(_write, sources, inputs, tokenizer, chat, report))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(
                f"{target}: cannot write the token cache: {reason}; choose another folder with"
                " data.cache=..."
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


def _write(
    sources: Sequence[Source],
    inputs: Sequence[tuple[int, File]],
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    progress: Progress,
    folder: Path,
) -> None:
    """Write all files of a cache into `folder`."""
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")

    # 1. Tokens and masks of all documents.
    skipped: list[tuple[str, str]] = []
    with TemplateProcess(chat) if chat else nullcontext() as template:
        notes = [RecordNotes(template) for _ in sources]
        documents = _texts(inputs, notes, skipped, progress)
        counts = _write_documents(folder, inputs, documents, tokenizer, dtype)

    # 2. Checks that need all of them.
    if not counts.lengths:
        raise DataError("the sources hold no document")
    if counts.masked:
        counts.check_masks(inputs)
    else:
        (folder / MASK).unlink()

    # 3. The manifest comes last: it has the hashes of the other files.
    np.array([0, *accumulate(counts.lengths)], "<i8").tofile(folder / "offsets.bin")
    names = [*FILES, MASK] if counts.masked else FILES
    body = {
        "format": _FORMAT,
        "dtype": dtype.str,
        "documents": len(counts.lengths),
        "tokens": sum(counts.lengths),
        "tokenizer": tokenizer.fingerprint,
        "skipped": skipped,
        "notes": [
            f"{source.name}: {sentence}"
            for source, source_notes in zip(sources, notes)
            for sentence in source_notes.sentences()
        ],
        "sha256": {name: file_digest(folder / name) for name in names},
        "files": [
            {**asdict(file), "source": source, "documents": counts.documents[file_index]}
            for file_index, (source, file) in enumerate(inputs)
        ],
    }
    text = json.dumps({"sha256": _digest(body), "body": body}, indent=1)
    (folder / "manifest.json").write_text(text + "\n")


def _write_documents(
    folder: Path,
    inputs: Sequence[tuple[int, File]],
    documents: Iterable[tuple[int, Text | TokenIds]],
    tokenizer: Tokenizer,
    dtype: np.dtype,
) -> TokenCounts:
    """Write the tokens of documents, and a mask where a file may have one. Raises DataError for a
    text without tokens."""
    counts = TokenCounts()
    # A tokenizer adds its special tokens to an empty text, too.
    empty_tokens = len(tokenizer.encode([""])[0])
    may_have_mask = any(file.learn for _, file in inputs)
    with open(folder / "tokens.bin", "wb") as token_file, open(folder / MASK, "wb") as mask_file:
        for batch in _batches(documents):
            encoded = tokenizer.encode_documents([document for _, document in batch])
            for (file_index, document), (ids, mask) in zip(batch, encoded):
                source, _ = inputs[file_index]
                if isinstance(document, Text) and len(ids) == empty_tokens:
                    reason = f"the tokenizer finds no token in {_size(document)} characters of text"
                    raise DataError(f"{document.where}: {reason}")
                token_file.write(np.array(ids, dtype).tobytes())

                # A file of masks has one for every document, so others get ones.
                if mask is None:
                    mask = np.ones(len(ids), bool)
                else:
                    counts.masked.add(source)
                if may_have_mask:
                    mask_file.write(mask.astype("u1").tobytes())
                counts.add(file_index, source, mask)
    return counts


def _size(document: Text | TokenIds) -> int:
    """Characters of a text, or tokens."""
    return len(document.text if isinstance(document, Text) else document.ids)


def _texts(
    inputs: Sequence[tuple[int, File]],
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
        for item in read(file, notes[source]):
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


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        body = manifest["body"]
        digest = manifest["sha256"]
    except FileNotFoundError:
        raise _damage(path, "missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damage(path, f"damaged: {error}") from error
    if _digest(body) != digest:
        raise _damage(path, "damaged: its contents do not give its SHA-256")
    if body["format"] != _FORMAT:
        raise _damage(path, f"of format {body['format']}, where {_FORMAT} is read")
    return body


def _open_array(path: Path, length: int, dtype: str) -> np.ndarray:
    if not path.exists():
        raise _damage(path, "missing")
    size = length * np.dtype(dtype).itemsize
    if path.stat().st_size != size:
        raise _damage(path, f"damaged: it has {path.stat().st_size} bytes, not {size}")
    return np.memmap(path, dtype, "r")


def _damage(path: Path, fault: str) -> DataError:
    """What is wrong with a file of a cache, and what to do."""
    return DataError(f"{path} is {fault}; to make it again: rm -r '{path.parent}'")


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
