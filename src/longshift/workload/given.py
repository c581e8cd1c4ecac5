"""Lengths that a person gives to a plan: how many documents there are of each length, from a file.

    lengths.txt, lengths.txt.gz    one length a line, in tokens
    histogram.csv, .csv.gz         a header with the columns range and number; a row a bin, as in "[501, 1024]",3316785

Lines that are blank or begin with # are comments. In a bin, lengths are taken to be spread evenly by their logarithm.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapreplace
from pathlib import Path

import numpy as np

from longshift.errors import DataError, UsageError

BIN_POINTS = 64  # lengths that stand for a bin, at most
COUNTED = 20_000  # documents, by whose steps it is known how many a step has
MOST = 1 << 48  # tokens of a document, documents of a bin


@dataclass(frozen=True, eq=False)
class Lengths:
    """`lengths`: of documents in tokens, each once, ascending; `counts`: documents of each. Both int64 and not empty."""

    lengths: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        self.lengths.setflags(write=False)
        self.counts.setflags(write=False)

    @classmethod
    def from_array(cls, lengths: np.ndarray) -> "Lengths":
        """Of documents in any order, [documents]. Raises UsageError where there is none, or one without tokens."""
        if not len(lengths) or lengths.min() < 1:
            raise UsageError("lengths of documents: there must be one, and each is at least 1")
        return cls(*np.unique(np.asarray(lengths, np.int64), return_counts=True))

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.lengths @ self.counts)

    def documents_per_step(self, tokens_per_step: float) -> float:
        """Mean number of documents of a step, of some that are drawn one after another: a step ends with the document that completes its
        tokens, which may be much more than was asked for."""
        ends, mean = np.cumsum(self.counts), self.tokens / self.documents
        steps = int(np.clip(COUNTED * mean / tokens_per_step, 4, 256))
        random = np.random.default_rng(0)
        drawn = random.integers(0, ends[-1], int(1.2 * steps * (tokens_per_step / mean + 2)))
        total = np.cumsum(self.lengths[np.searchsorted(ends, drawn, side="right")])
        stop = whole = 0
        while whole < steps:
            after = int(np.searchsorted(total, (total[stop - 1] if stop else 0) + tokens_per_step)) + 1
            if after > len(total):
                break
            stop, whole = after, whole + 1
        return float(total[stop - 1]) / whole / mean if whole else tokens_per_step / mean

    def typical(self, steps: int, tokens_per_step: float) -> list[np.ndarray]:
        """Lengths of the documents of so many steps that together stand for all, int64 in random order. They are evenly spaced quantiles of
        the distribution, from the longest on each in the step that has least tokens yet; as many as steps have on average."""
        ends = np.cumsum(self.counts)
        number = max(steps, round(steps * self.documents_per_step(tokens_per_step)))
        found = self.lengths[np.searchsorted(ends, (np.arange(number)[::-1] + 0.5) / number * ends[-1])]
        dealt: list[list[int]] = [[] for _ in range(steps)]
        least = [(0, step) for step in range(steps)]
        for length in found.tolist():
            tokens, step = least[0]
            dealt[step].append(length)
            heapreplace(least, (tokens + length, step))
        random = np.random.default_rng(0)
        return [random.permutation(np.array(some, np.int64)) for some in dealt]


def read_lengths(path: Path) -> Lengths:
    """The lengths in a file: a histogram where its name ends with .csv or .csv.gz, else one a line. Raises UsageError where it cannot be
    read, DataError with file and line where it holds something else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; it is a file with one length a line, or a histogram that ends with .csv") from None
    except OSError as fault:
        raise UsageError(f"{path} cannot be read: {fault.strerror}") from None
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as fault:
            raise DataError(f"{path} is damaged: not gzip to its end ({fault})") from None
    lines = content.splitlines()
    is_histogram = [suffix.lower() for suffix in path.suffixes[-2:] if suffix.lower() != ".gz"][-1:] == [".csv"]
    found = _histogram(lines, path) if is_histogram else _one_a_line(lines, path)
    if found is None:
        raise DataError(f"{path} holds no document")
    if found.lengths.astype(float) @ found.counts > 1 << 62:
        raise DataError(f"{path} has more tokens than can be counted")
    return found


def _one_a_line(lines: list[bytes], path: Path) -> Lengths | None:
    kept = [line for line in lines if line[:1].isdigit()]  # quick, where nothing is wrong
    if len(kept) < len(lines):
        kept = [line for line in lines if not _is_comment(line)]
    if not kept:
        return None
    try:
        if b"".join(kept).translate(None, b"0123456789 \t"):
            raise ValueError("something that is no number")
        lengths = np.array(kept).astype(np.int64)
        if lengths.min() < 1 or lengths.max() > MOST:
            raise ValueError("a number out of range")
    except (ValueError, OverflowError):
        found = [(line.decode(errors="replace").strip(), number) for number, line in enumerate(lines, 1) if not _is_comment(line)]
        lengths = np.array([_whole(text, 1, f"{path}:{number}", "a length in tokens") for text, number in found])
    return Lengths.from_array(lengths)


def _is_comment(line: bytes) -> bool:
    return not line.strip() or line.startswith(b"#")


def _whole(text: str, least: int, place: str, what: str) -> int:
    """A whole number. Raises DataError with its place."""
    if not (re.fullmatch("[0-9]{1,30}", text) and least <= int(text) <= MOST):
        raise DataError(f"{place}: {text[:40]!r} is not {what}, a whole number from {least} to {MOST}")
    return int(text)


def _histogram(lines: list[bytes], path: Path) -> Lengths | None:
    """Every bin's documents, shared among lengths that stand for it."""
    sums, before = dict[int, int](), (0, "")
    for place, low, high, documents in sorted(_bins(lines, path), key=lambda found: found[1:3]):
        if low <= before[0]:
            raise DataError(f"{place}: the bin from {low} to {high} begins inside another ({before[1]})")
        before = high, place
        for length, count in zip(*_spread(low, high, documents)):
            sums[length] = sums.get(length, 0) + count
    ordered = np.array(sorted(sums.items()), np.int64).reshape(-1, 2)
    return Lengths(ordered[:, 0], ordered[:, 1]) if len(ordered) else None


def _bins(lines: list[bytes], path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Place, shortest and longest length, and documents of each bin."""
    columns: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if _is_comment(line):
            continue
        place, row = f"{path}:{number}", [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig", errors="replace")]))]
        if columns is None:
            columns = row
            if missing := [name for name in ("range", "number") if name not in columns]:
                raise DataError(f"{place}: no column {' and '.join(missing)}; a histogram begins with the line range,number")
            continue
        if len(row) != len(columns):
            raise DataError(f'{place}: {len(row)} columns, and the header has {len(columns)}; a range is quoted, as in "[501, 1024]"')
        cells = dict(zip(columns, row))
        match = re.fullmatch(r"\[\s*(\S+)\s*,\s*(\S+)\s*\]", cells["range"])
        if not match:
            raise DataError(f'{place}: {cells["range"]!r} is not a range of lengths, both ends included, such as "[501, 1024]"')
        low, high = (_whole(match[1], 0, place, "a length in tokens"), _whole(match[2], 1, place, "a length in tokens"))
        if low > high:
            raise DataError(f"{place}: the range from {low} to {high} is empty")
        yield place, max(1, low), high, _whole(cells["number"], 0, place, "a number of documents")


def _spread(low: int, high: int, documents: int) -> tuple[list[int], list[int]]:
    """Lengths that stand for a bin, and documents of each: the middles of equal parts of the range's logarithm, shared as evenly as whole
    numbers can be."""
    points = min(BIN_POINTS, high - low + 1, documents)
    if not points:
        return [], []
    middles = (np.arange(points) + 0.5) / points
    lengths = np.clip(np.rint(low * ((high + 1) / low) ** middles - 0.5), low, high)
    counts = np.diff(np.arange(points + 1) * documents // points)
    return lengths.astype(int).tolist(), counts.tolist()
