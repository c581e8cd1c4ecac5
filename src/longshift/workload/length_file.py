"""Lengths that a person gives to a plan: how many documents there are of each length, from a file.

    lengths.txt, lengths.txt.gz    one length a line, in tokens
    histogram.csv, .csv.gz         a header with the columns range and number; a row a bin, as in
                                   "[501, 1024]",3316785

Lines that are blank or begin with # are comments. In a bin, lengths are taken to be spread evenly
by their logarithm.
"""

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import numpy as np

from longshift.errors import DataError, UsageError, shown
from longshift.workload.groups import shares

BIN_POINTS = 64  # lengths that stand for a bin, at most
COUNTED = 20_000  # documents that are drawn to count how many a step has
MOST = 1 << 48  # tokens of a document, documents of a bin


@dataclass(frozen=True, eq=False)
class Lengths:
    """`lengths`: of documents in tokens, each once, ascending; `counts`: documents of each. Both
    int64 and not empty."""

    lengths: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        self.lengths.setflags(write=False)
        self.counts.setflags(write=False)

    @classmethod
    def from_array(cls, lengths: np.ndarray) -> "Lengths":
        """Of documents in any order, [documents]. Raises UsageError where there is none, or one
        without tokens."""
        if not len(lengths) or lengths.min() < 1:
            raise UsageError("lengths of documents: there must be one, and each is at least 1")
        unique_lengths, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        return cls(unique_lengths, counts)

    @classmethod
    def from_list(cls, lengths: Sequence[int]) -> "Lengths":
        """Of what a Python program gives. Raises UsageError, also for a value that is no length."""
        for length in lengths:
            if not isinstance(length, Integral) or not 1 <= length <= MOST:
                raise UsageError(
                    f"lengths: {shown(length)} is not a length in tokens, a whole number from 1 to"
                    f" {MOST}"
                )
        return cls.from_array(np.array(lengths, np.int64))

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.lengths @ self.counts)

    def documents_per_step(self, tokens_per_step: float) -> float:
        """Mean number of documents of a step, by drawing documents one after another.

        A step ends with the document that completes its tokens,
        which may be many more than `tokens_per_step`."""
        ends = np.cumsum(self.counts)
        mean_length = self.tokens / self.documents

        # 1. Draw documents for some steps, and a fifth more, as steps differ.
        max_steps = int(np.clip(COUNTED * mean_length / tokens_per_step, 4, 256))
        random = np.random.default_rng(0)
        indices = random.integers(
            0, ends[-1], int(1.2 * max_steps * (tokens_per_step / mean_length + 2))
        )
        total_tokens = np.cumsum(self.lengths[np.searchsorted(ends, indices, side="right")])

        # 2. Cut them into steps. One that the draw does not complete is left out.
        end = 0
        steps = 0
        for total in total_tokens.tolist():
            if total >= end + tokens_per_step and steps < max_steps:
                end = total
                steps += 1
        if not steps:
            return tokens_per_step / mean_length

        # Their tokens over the mean length are less noisy than the number of documents.
        return end / steps / mean_length

    def typical(self, steps: int, tokens_per_step: float) -> list[np.ndarray]:
        """Lengths of the documents of so many steps that together stand for all,
        int64 in random order.

        They are evenly spaced quantiles of the distribution, as many as steps have on average.
        """
        ends = np.cumsum(self.counts)
        num_documents = max(steps, round(steps * self.documents_per_step(tokens_per_step)))
        ranks = (np.arange(num_documents)[::-1] + 0.5) / num_documents * ends[-1]
        lengths = self.lengths[np.searchsorted(ends, ranks)]

        # From the longest on, each document goes to the step that has the fewest tokens yet.
        random = np.random.default_rng(0)
        dealt = shares(lengths.tolist(), steps)
        return [random.permutation(lengths[list(documents)]) for documents in dealt]


def read_lengths(path: Path) -> Lengths:
    """The lengths in a file: a histogram where its name ends with .csv or .csv.gz, else one a line.

    Raises UsageError where it cannot be read, DataError with file and line
    where it holds something else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist; it is a file with one length a line, or a histogram that ends"
            " with .csv"
        ) from None
    except OSError as fault:
        raise UsageError(f"{path} cannot be read: {fault.strerror}") from None
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as fault:
            raise DataError(f"{path} is damaged: not gzip to its end ({fault})") from None
    lines = content.splitlines()
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:] if suffix.lower() != ".gz"]
    is_histogram = suffixes[-1:] == [".csv"]
    lengths = _read_histogram(lines, path) if is_histogram else _read_list(lines, path)
    if lengths is None:
        raise DataError(f"{path} holds no document")
    # In floats, as the sum may overflow.
    if lengths.lengths.astype(float) @ lengths.counts > 1 << 62:
        raise DataError(f"{path} has more tokens than can be counted")
    return lengths


def _read_list(lines: list[bytes], path: Path) -> Lengths | None:
    """Lengths, one a line. Raises DataError with the line that is none."""
    values = []
    for number, line in enumerate(lines, 1):
        if not _is_comment(line):
            text = line.decode(errors="replace").strip()
            values.append(_parse_whole(text, 1, f"{path}:{number}", "a length in tokens"))
    return Lengths.from_array(np.array(values, np.int64)) if values else None


def _is_comment(line: bytes) -> bool:
    return not line.strip() or line.startswith(b"#")


def _parse_whole(text: str, minimum: int, place: str, noun: str) -> int:
    """A whole number. Raises DataError with its place."""
    is_short = len(text) <= len(str(MOST))
    if not (is_short and text.isascii() and text.isdigit() and minimum <= int(text) <= MOST):
        raise DataError(
            f"{place}: {text[:40]!r} is not {noun}, a whole number from {minimum} to {MOST}"
        )
    return int(text)


def _read_histogram(lines: list[bytes], path: Path) -> Lengths | None:
    """Every bin's documents, shared among lengths that stand for it.
    Raises DataError for bins that overlap."""
    count_by_length = Counter[int]()
    previous_high = 0
    previous_place = ""
    for place, low, high, documents in sorted(_bins(lines, path), key=lambda row: row[1:3]):
        if low <= previous_high:
            raise DataError(
                f"{place}: the bin from {low} to {high} begins inside another ({previous_place})"
            )
        previous_high = high
        previous_place = place
        for length, count in zip(*_spread(low, high, documents)):
            count_by_length[length] += count
    rows = np.array(sorted(count_by_length.items()), np.int64).reshape(-1, 2)
    return Lengths(rows[:, 0], rows[:, 1]) if len(rows) else None


def _bins(lines: list[bytes], path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Place, shortest and longest length, and documents of each bin."""
    columns: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if _is_comment(line):
            continue
        place = f"{path}:{number}"
        text = line.decode("utf-8-sig", errors="replace")
        row = [cell.strip() for cell in next(csv.reader([text]))]
        if columns is None:
            columns = row
            if missing := [name for name in ("range", "number") if name not in columns]:
                raise DataError(
                    f"{place}: no column {' and '.join(missing)}; a histogram begins with the line"
                    " range,number"
                )
            continue
        if len(row) != len(columns):
            raise DataError(
                f"{place}: {len(row)} columns, and the header has {len(columns)}; a range is"
                ' quoted, as in "[501, 1024]"'
            )
        cells = dict(zip(columns, row))
        match = re.fullmatch(r"\[\s*(\S+)\s*,\s*(\S+)\s*\]", cells["range"])
        if not match:
            raise DataError(
                f"{place}: {cells['range']!r} is not a range of lengths, both ends included, such"
                ' as "[501, 1024]"'
            )
        low = _parse_whole(match[1], 0, place, "a length in tokens")
        high = _parse_whole(match[2], 1, place, "a length in tokens")
        if low > high:
            raise DataError(f"{place}: the range from {low} to {high} is empty")
        documents = _parse_whole(cells["number"], 0, place, "a number of documents")
        yield place, max(1, low), high, documents


def _spread(low: int, high: int, documents: int) -> tuple[list[int], list[int]]:
    """Lengths that stand for a bin, and documents of each, as even as whole numbers can be.

    The lengths are the middles of equal parts of the range's logarithm.
    """
    points = min(BIN_POINTS, high - low + 1, documents)
    if not points:
        return [], []
    # Whole lengths from low to high stand for [low - 0.5, high + 0.5].
    middles = (np.arange(points) + 0.5) / points
    continuous_lengths = low * ((high + 1) / low) ** middles - 0.5
    lengths = np.clip(np.rint(continuous_lengths), low, high)
    counts = np.diff(np.arange(points + 1) * documents // points)
    return lengths.astype(int).tolist(), counts.tolist()
