"""Lengths from files: every document counted, every fault with its line, draws that repeat."""

import gzip
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshift.errors import DataError, UsageError
from longshift.workload.length_file import Lengths, read_lengths

EXAMPLES = Path(__file__).parents[2] / "examples" / "lengths"


def draw(found: Lengths, seed: int, tokens_per_step: int) -> np.ndarray:
    """Lengths of the documents of one step in random order: whole documents until there are enough tokens."""
    random, ends = np.random.default_rng(seed), np.cumsum(found.counts)
    numbers = random.integers(0, ends[-1], 16 + 2 * tokens_per_step // int(found.lengths.min()))
    drawn = found.lengths[np.searchsorted(ends, numbers, side="right")]
    return drawn[: int(np.searchsorted(np.cumsum(drawn), tokens_per_step)) + 1]


def rows(found: Lengths) -> list[tuple[int, int]]:
    return list(zip(found.lengths.tolist(), found.counts.tolist()))


@given(st.lists(st.integers(1, 50), min_size=1))
def test_lengths_ascend_and_count_every_document(lengths) -> None:
    found = Lengths.from_array(np.array(lengths))
    assert sorted(lengths) == np.repeat(found.lengths, found.counts).tolist()
    assert (found.documents, found.tokens) == (len(lengths), sum(lengths))
    assert (np.diff(found.lengths) > 0).all()
    assert found.lengths.dtype == found.counts.dtype == np.int64
    assert not found.lengths.flags.writeable


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_lengths_that_cannot_be_are_refused(lengths) -> None:
    with pytest.raises(UsageError, match="each is at least 1"):
        Lengths.from_array(np.array(lengths))


@pytest.mark.parametrize("name", ["lengths.txt", "lengths", "lengths.csv.txt", "lengths.txt.gz", "lengths.gz"])
def test_one_length_a_line(tmp_path, name) -> None:
    text = b"# tokens\n7\n12 \r\n\n  7\n0003\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert rows(read_lengths(tmp_path / name)) == [(3, 1), (7, 2), (12, 1)]


def test_a_million_lengths_take_less_than_a_second(tmp_path) -> None:
    drawn = np.random.default_rng(0).lognormal(6.5, 1.65, 1_000_000).astype(np.int64) + 1
    (tmp_path / "many.txt.gz").write_bytes(gzip.compress("\n".join(map(str, drawn.tolist())).encode(), 1))
    began = time.process_time()
    found = read_lengths(tmp_path / "many.txt.gz")
    assert time.process_time() - began < 1
    assert (found.documents, found.tokens) == (1_000_000, int(drawn.sum()))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        *((text.encode(), text) for text in ("0", "-4", "+4", "1.5", "1_000", "5 7", "4K", "9" * 30, "٣")),
        (b"\xff\xfe", "\ufffd"),
    ],
)
def test_a_bad_length_has_file_and_line(tmp_path, line, word) -> None:
    (tmp_path / "lengths.txt").write_bytes(b"# tokens\n5\n\n" + line + b"\n6\n")
    with pytest.raises(DataError) as caught:
        read_lengths(tmp_path / "lengths.txt")
    assert f"lengths.txt:4: '{word}" in str(caught.value)
    assert "is not a length in tokens, a whole number from 1" in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("a.txt", b""), ("a.txt", b"# none\n\n"), ("a.csv", b"range,number\n"), ("a.csv", b"")])
def test_a_file_without_documents_is_refused(tmp_path, name, text) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=rf"{name} holds no document"):
        read_lengths(tmp_path / name)


def test_a_file_that_cannot_be_read_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="does not exist; it is a file with one length a line"):
        read_lengths(tmp_path / "none.txt")
    with pytest.raises(UsageError, match="cannot be read"):
        read_lengths(tmp_path)
    whole = gzip.compress(b"5\n" * 1000)
    for damaged in (whole[:-9], whole[:12] + b"\x00\x01\x02" + whole[15:]):
        (tmp_path / "cut.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"cut\.gz is damaged"):
            read_lengths(tmp_path / "cut.gz")


HEADER = "range,number,percentage(%)\n"


def histogram(tmp_path: Path, *lines: str, header: str = HEADER) -> Lengths:
    (tmp_path / "h.csv").write_text(header + "".join(f"{line}\n" for line in lines))
    return read_lengths(tmp_path / "h.csv")


def test_a_histogram_keeps_every_document_in_its_bin(tmp_path) -> None:
    found = histogram(tmp_path, '"[0, 1]",4,9', "# a comment", '"[2,3]",7,9', '"[100, 200]",1000,9', '"[201, 400]",0,9', '"[500, 500]",1,9')
    assert found.documents == 1012
    assert rows(found)[:3] == [(1, 4), (2, 3), (3, 4)]
    assert rows(found)[-1] == (500, 1)
    middle = (found.lengths >= 100) & (found.lengths <= 200)
    assert int(found.counts[middle].sum()) == 1000
    assert int(middle.sum()) == len(found.lengths) - 4 == 64
    assert np.ptp(found.counts[middle]) <= 1
    mean = 100 / np.log(2)  # of a density that falls as 1 / length
    assert found.lengths[middle] @ found.counts[middle] / 1000 == pytest.approx(mean, rel=0.005)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=300), st.floats(1.1, 3))
def test_a_histogram_of_lengths_stands_for_them(tmp_path_factory, lengths, ratio) -> None:
    highs = [1]
    while highs[-1] < max(lengths):
        highs.append(max(highs[-1] + 1, int(highs[-1] * ratio)))
    counts = np.bincount(np.searchsorted(highs, lengths), minlength=len(highs))
    lines = [f'"[{low + 1}, {high}]",{count},0' for low, high, count in zip([0, *highs], highs, counts)]
    found = histogram(tmp_path_factory.mktemp("h"), *reversed(lines))
    assert found.documents == len(lengths)
    assert (np.diff(found.lengths) > 0).all()
    again = np.bincount(np.searchsorted(highs, found.lengths), weights=found.counts, minlength=len(highs))
    assert again.tolist() == counts.tolist()
    assert found.tokens <= ratio * sum(lengths) + len(lengths)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[501, 1024],5,1", '4 columns, and the header has 3; a range is quoted, as in "[501, 1024]"'),
        ('"501-1024",5,1', "'501-1024' is not a range of lengths"),
        ('"[a, 1024]",5,1', "'a' is not a length in tokens"),
        ('"[-5, 1024]",5,1', "'-5' is not a length in tokens, a whole number from 0"),
        ('"[0, 0]",5,1', "'0' is not a length in tokens, a whole number from 1"),
        ('"[9, 5]",5,1', "the range from 9 to 5 is empty"),
        ('"[9, 50]",-5,1', "'-5' is not a number of documents"),
        ('"[9, 50]",0.5,1', "'0.5' is not a number of documents"),
        ('"[3, 50]",5,1', "the bin from 3 to 50 begins inside another"),
    ],
)
def test_a_bad_bin_has_file_and_line(tmp_path, line, reason) -> None:
    with pytest.raises(DataError) as caught:
        histogram(tmp_path, '"[1, 4]",1,9', line)
    assert "h.csv:3: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_histogram_begins_with_its_columns(tmp_path) -> None:
    with pytest.raises(DataError, match=r"h\.csv:1: no column range and number; a histogram begins with the line range,number"):
        histogram(tmp_path, header="low,high,documents\n")
    with pytest.raises(DataError, match="more tokens than can be counted"):
        histogram(tmp_path, f'"[1, {1 << 45}]",{1 << 45},9')


@pytest.mark.parametrize(("tokens", "documents"), [(1000, 1), (999, 1), (1001, 2), (10_000, 10), (1, 1)])
def test_typical_steps_of_equal_documents_have_as_many_as_draws(tokens, documents) -> None:
    found = Lengths.from_array(np.array([1000, 1000]))
    assert len(draw(found, 0, tokens)) == documents
    assert [step.tolist() for step in found.typical(4, tokens)] == [[1000] * documents] * 4


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 9), st.integers(1, 50_000))
def test_typical_steps_stand_for_the_distribution(lengths, steps, tokens) -> None:
    found = Lengths.from_array(np.array(lengths))
    typical = found.typical(steps, tokens)
    together = np.sort(np.concatenate(typical))
    assert len(typical) == steps
    assert all(len(step) for step in typical)
    tokens_of = [int(step.sum()) for step in typical]
    assert max(tokens_of) - min(tokens_of) <= max(lengths)
    for length in lengths:  # as many up to each length as there should be, to a document
        share = sum(one <= length for one in lengths) / len(lengths)
        assert abs((together <= length).sum() - share * len(together)) <= 1


def test_typical_steps_have_the_tokens_and_documents_of_draws() -> None:
    found = Lengths(np.array([10, 100, 3000]), np.array([600, 300, 20]))
    draws, typical = [draw(found, seed, 20_000) for seed in range(2000)], found.typical(8, 20_000)
    for of_step in (len, np.sum, lambda step: (step == 3000).sum()):
        assert np.mean([of_step(step) for step in typical]) == pytest.approx(np.mean([of_step(step) for step in draws]), rel=0.03)
    tokens, of_draws = ([int(step.sum()) for step in some] for some in (typical, draws[:8]))
    assert max(tokens) - min(tokens) <= 10 < 1000 < max(of_draws) - min(of_draws)
    longest, of_draws = ([int((step == 3000).sum()) for step in some] for some in (typical, draws[:8]))
    assert max(longest) - min(longest) <= 1 < max(of_draws) - min(of_draws)


@pytest.mark.parametrize(
    ("name", "documents", "tokens", "beyond_32k"),
    [
        ("wikipedia", 1_000_000, 1_013_648_780, 0.0755),  # the lengths themselves
        ("github", 1_000_000, 2.6e9, 0.24),
        ("pretraining", 13_463_214, 2.31e10, 0.25),
    ],
)
def test_the_examples_are_what_they_say(name, documents, tokens, beyond_32k) -> None:
    found = read_lengths(EXAMPLES / f"{name}.csv")
    assert found.documents == documents
    assert found.tokens == pytest.approx(tokens, rel=0.005)
    long = found.lengths > 32768
    assert found.lengths[long] @ found.counts[long] / found.tokens == pytest.approx(beyond_32k, rel=0.04)
    assert name in (EXAMPLES / "README.md").read_text()


def test_the_examples_are_all_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.csv")} == {"wikipedia", "github", "pretraining"}
