"""The token cache: every document's tokens end to end in one memory-mapped file, made once and then only read.

    <folder>/<key>/tokens.bin      uint16 or uint32, little-endian
                   offsets.bin     int64: document d is tokens[offsets[d] : offsets[d + 1]], end of text last
                   learned.bin     uint8: 1 for a token that is a target; not there where all are
                   manifest.json   what it was made from, what it holds, SHA-256 of the files

The key stands for the tokenizer and for path, size, time and some blocks of every source file, so that changed sources
make a new cache and never alter one that is in use. The fingerprint stands for the tokens alone: the same on every machine
and under any path.

Every token is compared with the SHA-256 in the manifest before a run uses it: by the process that makes the cache or, where the cache is
there already, by one rank for each file that ranks see; the others compare the file's identity and the fingerprint.
"""

import hashlib
import json
import platform
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from longshift.config_parts import Source
from longshift.documents.record_notes import RecordNotes
from longshift.documents.sources import File, Skipped, Text, files, read, unchanged
from longshift.documents.template import ChatTemplate, read_template
from longshift.documents.template_process import TemplateProcess
from longshift.documents.tokenizer import Tokenizer
from longshift.errors import DataError
from longshift.files import publish

Progress = Callable[[int, int], None]  # bytes of the sources done, bytes in all

FILES, MASK = ("tokens.bin", "offsets.bin"), "learned.bin"
_FORMAT = 3
_BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class CachedFile:
    """A source file and the documents it gave; `first` is the number of its first, `source` that of the source in data.train."""

    path: str
    format: str
    first: int
    documents: int
    source: int


@dataclass(frozen=True, eq=False)
class TokenCache:
    """Documents of a corpus as tokens.

    `lengths` int64 [documents], end of text included; `fingerprint` of the tokens; `skipped` (path, reason) of each file that gave none;
    `notes`: what of the sources no token shows, a sentence each.
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
        """Open a finished cache. Raises DataError with the reason when it is damaged; `verify` reads every token to be sure. Without it the
        manifest and the sizes of files are checked, and `verify` may be called later."""
        folder = Path(folder)
        body = _read_manifest(folder)
        masked = MASK in body["sha256"]
        parts = [("tokens.bin", body["tokens"], body["dtype"]), ("offsets.bin", body["documents"] + 1, "<i8")]
        for name, items, dtype in [*parts, *([(MASK, body["tokens"], "u1")] if masked else [])]:
            _check_size(folder / name, items * np.dtype(dtype).itemsize)
        if verify:
            _check_contents(folder, body["sha256"])
        offsets = np.memmap(folder / "offsets.bin", "<i8", "r")
        counts = [f["documents"] for f in body["files"]]
        return cls(
            folder=folder,
            lengths=np.diff(offsets).astype(np.int64, copy=False),
            fingerprint=_digest(body["tokenizer"], body["sha256"]),
            files=tuple(
                CachedFile(f["path"], f["format"], end - n, n, f["source"]) for f, n, end in zip(body["files"], counts, accumulate(counts))
            ),
            skipped=tuple((path, why) for path, why in body["skipped"]),
            notes=tuple(body["notes"]),
            _offsets=offsets,
            _tokens=np.memmap(folder / "tokens.bin", body["dtype"], "r"),
            _learned=np.memmap(folder / MASK, "u1", "r") if masked else None,
            _sha256=body["sha256"],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def verify(self) -> None:
        """Read every token. Raises DataError where the files are not those that the manifest describes."""
        _check_contents(self.folder, self._sha256)

    @property
    def identity(self) -> str:
        """The files as this machine sees them, without reading them: equal for processes that have the same files open, of the same
        contents."""
        stats = ((self.folder / name).stat() for name in self._sha256)
        return json.dumps([platform.node(), *((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats), self.fingerprint])

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens `start` to `stop` of a document, cut at its end: a read-only view of the file, uint16 or uint32."""
        return self._tokens[self._span(document, start, stop)]

    def learned(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        """Which of the tokens that `tokens` gives are targets, uint8; None where all are."""
        return None if self._learned is None else self._learned[self._span(document, start, stop)]

    def _span(self, document: int, start: int, stop: int | None) -> slice:
        begin, end = int(self._offsets[document]), int(self._offsets[document + 1])
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
        nth = document - file.first
        if file.format in ("parquet", "arrow", "dataset"):
            return f"{file.path}, row {nth}"
        words = {"jsonl": "line", "json": "entry", "csv": "record", "tsv": "record"}
        return f"{file.path}, {words[file.format]} {nth + 1}" if file.format in words else file.path


def build(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    folder: Path | str,
    progress: Progress | None = None,
    verify: bool = True,
    template: Path | None = None,
) -> TokenCache:
    """The token cache of these sources under `folder`: the one that is there if nothing changed, else a new one.

    Any number of processes may do this at once: each writes aside, the first to finish provides. `progress` is called after every
    document; `verify` is as in `TokenCache.open`; `template`, of conversations, is the tokenizer's own where not given. Raises DataError
    for bad input, for a damaged cache, and when the folder cannot be written.
    """
    inputs = [(nth, file) for nth, source in enumerate(sources) for file in files(source)]
    chat = _template(sources, tokenizer, template)
    key = _digest(_FORMAT, tokenizer.fingerprint, [(nth, asdict(file)) for nth, file in inputs], *([asdict(chat)] if chat else []))
    target = Path(folder).expanduser() / key[:16]
    new = not target.exists()
    if new:
        try:
            publish(target, lambda scratch: _write(inputs, tokenizer, chat, scratch, progress or (lambda done, total: None)))
        except OSError as error:
            raise DataError(f"{target}: cannot write the token cache: {error.strerror or error}") from error
    return TokenCache.open(target, verify and not new)  # the hash of a new one was made from what was written


# Writing


def _template(sources: Sequence[Source], tokenizer: Tokenizer, given: Path | None) -> ChatTemplate | None:
    """The chat template where a source needs one, or may need it."""
    if not any(source.format.is_masked for source in sources):
        return None
    try:
        return read_template(given, tokenizer.file, tokenizer.special)
    except DataError:
        if given is None and all(source.format.kind != "messages" for source in sources):
            return None  # prompts and completions may be plain text
        raise


def _write(inputs: Sequence[tuple[int, File]], tokenizer: Tokenizer, chat: ChatTemplate | None, folder: Path, progress: Progress) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    nothing, masked = len(tokenizer.encode([""])[0]), any(file.learn for _, file in inputs)
    lengths: list[int] = []
    counts, skipped = [0] * len(inputs), []
    sources = 1 + max(nth for nth, _ in inputs)
    learned, seen = np.zeros(sources, np.int64), np.zeros(sources, np.int64)
    renders = TemplateProcess(chat) if chat else nullcontext()
    with open(folder / "tokens.bin", "wb") as out, open(folder / MASK, "wb") as mask_out, renders as template:
        notes = [RecordNotes(template) for _ in range(sources)]
        for batch in _batches(_texts(inputs, template, notes, skipped, progress)):
            for (nth, text), (ids, mask) in zip(batch, _encoded(tokenizer, [text for _, text in batch])):
                if len(ids) == nothing:
                    raise DataError(f"{text.where}: the tokenizer finds no token in this text of {len(text.text)} characters")
                out.write(np.array(ids, dtype).tobytes())
                mask = np.ones(len(ids), bool) if mask is None else mask
                if masked:
                    mask_out.write(mask.astype("u1").tobytes())
                lengths.append(len(ids))
                counts[nth] += 1
                learned[inputs[nth][0]] += int(mask[1:].sum())
                seen[inputs[nth][0]] += len(ids) - 1
    if not lengths:
        raise DataError("the sources of data.train hold no document")
    if masked:
        _check_masks(inputs, learned, seen)
    else:
        (folder / MASK).unlink()
    np.array([0, *accumulate(lengths)], "<i8").tofile(folder / "offsets.bin")
    body = {
        "format": _FORMAT,
        "dtype": dtype.str,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "tokenizer": tokenizer.fingerprint,
        "sha256": {name: _sha256(folder / name) for name in (*FILES, *([MASK] if masked else []))},
        "files": [{**asdict(file), "source": nth, "documents": count} for (nth, file), count in zip(inputs, counts)],
        "skipped": skipped,
        "notes": [f"{_source_name(inputs, nth)}: {sentence}" for nth, of_source in enumerate(notes) for sentence in of_source.sentences()],
    }
    (folder / "manifest.json").write_text(json.dumps({"sha256": _digest(body), "body": body}, indent=1) + "\n")


def _encoded(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[tuple[list[int], np.ndarray | None]]:
    """Token ids of each text, in order, and which of them are targets; None for all."""
    plain = iter(tokenizer.encode([text.text for text in texts if text.learned is None]))
    parts = iter(tokenizer.encode_learned([text for text in texts if text.learned is not None]))
    for text in texts:
        yield (next(plain), None) if text.learned is None else next(parts)


def _check_masks(inputs: Sequence[tuple[int, File]], learned: np.ndarray, seen: np.ndarray) -> None:
    """Raises DataError for a source of conversations of which nothing is learned, or everything."""
    for nth, file in dict(reversed(inputs)).items():
        if file.learn and learned[nth] == 0:
            raise DataError(f"{file.path}: not one of {seen[nth]} tokens would be learned; look at them with longshift data CONFIG")
        if file.learn in ("assistant", "last") and learned[nth] == seen[nth]:
            raise DataError(
                f"{file.path}: all {seen[nth]} tokens would be learned, not only what the assistant says: the template marks everything; "
                "to mean that, write learn: all"
            )


def _source_name(inputs: Sequence[tuple[int, File]], source: int) -> str:
    """The file of a source, or its first of several."""
    paths = [file.path for nth, file in inputs if nth == source]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _texts(
    inputs: Sequence[tuple[int, File]],
    chat: TemplateProcess | None,
    notes: Sequence[RecordNotes],
    skipped: list[tuple[str, str]],
    progress: Progress,
) -> Iterator[tuple[int, Text]]:
    """The documents of all files, each with the number of its file; files that give none are added to `skipped`, and what of a source no
    token shows to its `notes`."""
    total, before = sum(file.size_bytes for _, file in inputs), 0
    for nth, (source, file) in enumerate(inputs):
        done = 0
        for item in read(file, chat, notes[source]):
            if isinstance(item, Skipped):
                skipped.append((item.where, item.why))
            else:
                done += len(item.text)
                yield nth, item
            progress(before + min(done, file.size_bytes), total)
        if not unchanged(file):
            raise DataError(f"{file.path}: changed while it was read; start again when nothing writes to it")
        before += file.size_bytes
        progress(before, total)


def _batches(texts: Iterable[tuple[int, Text]]) -> Iterator[list[tuple[int, Text]]]:
    """Runs of documents that the tokenizer takes at once."""
    batch, characters = [], 0
    for nth, text in texts:
        batch.append((nth, text))
        characters += len(text.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# Checking


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        body, digest = manifest["body"], manifest["sha256"]
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {_again(folder)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; {_again(folder)}") from error
    if _digest(body) != digest:
        raise DataError(f"{path} is damaged: its contents do not give its SHA-256; {_again(folder)}")
    if body["format"] != _FORMAT:
        raise DataError(f"{path}: format {body['format']}, where {_FORMAT} is read; {_again(folder)}")
    return body


def _check_size(path: Path, size: int) -> None:
    if not path.exists():
        raise DataError(f"{path} is missing; {_again(path.parent)}")
    if path.stat().st_size != size:
        raise DataError(f"{path} is damaged: it has {path.stat().st_size} bytes, not {size}; {_again(path.parent)}")


def _check_contents(folder: Path, sha256: Mapping[str, str]) -> None:
    for name in sha256:
        if _sha256(folder / name) != sha256[name]:
            raise DataError(f"{folder / name} is damaged: its contents do not give its SHA-256; {_again(folder)}")


def _again(folder: Path) -> str:
    return f"to make it again: rm -r '{folder}'"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
