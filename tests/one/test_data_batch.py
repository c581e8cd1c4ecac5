"""A step's documents: every target once an epoch, a pure function of (data, seed, cursor)."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from longshift.config_parts import Source
from longshift.documents.batch import Batches, document_from_ids
from longshift.documents.tokenizer import load, train
from longshift.documents.tokens import TokenCache, build
from longshift.errors import DataError
from longshift.model.loss import IGNORE
from longshift.workload.lengths import Overlong

LENGTHS = [3, 40, 1, 7, 120, 17, 16, 15, 33, 2, 60, 5]


def make_cache(folder: Path, lengths: list[int]) -> TokenCache:
    """Documents of lengths[d] + 1 tokens; every token but the last is a byte."""
    train(iter([Path(json.__file__).read_text()]), 257).save(str(folder / "tokenizer.json"))
    words = np.random.default_rng(0).integers(ord("!"), ord("~"), (len(lengths), max(lengths)))
    lines = (json.dumps({"text": bytes(row[:n].tolist()).decode()}) for row, n in zip(words, lengths))
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    made = build([Source(path=str(folder / "a.jsonl"))], load(folder), folder / "cache")
    assert made.lengths.tolist() == [n + 1 for n in lengths]
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> TokenCache:
    return make_cache(tmp_path_factory.mktemp("batch"), LENGTHS)


def pairs(documents) -> Counter:
    """(token, its target) over documents."""
    return Counter(pair for d in documents for pair in zip(d.ids.tolist(), d.labels.tolist()))


def test_whole_documents_and_their_labels(cache):
    batches = Batches(cache, 5, 1, 200)
    n = len(LENGTHS)
    for number in range(3):
        steps = [batches.at(cursor) for cursor in range(number * n, (number + 1) * n)]
        assert all(len(s.documents) == 1 and s.next_cursor == s.cursor + 1 for s in steps)
        documents = {tuple(s.documents[0].ids.tolist()): s.documents[0] for s in steps}
        assert set(documents) == {tuple(cache.tokens(d).tolist()) for d in range(n)}
        for ids, document in documents.items():
            assert document.labels.tolist() == [*ids[1:], IGNORE]
            assert document.ids.dtype == document.labels.dtype == np.int64


@pytest.mark.parametrize("max_len", [2, 16, 17, 33, 120])
def test_splitting_loses_no_label(cache, max_len):
    batches = Batches(cache, 1, 1, max_len, "split")
    documents = [batches.at(cursor).documents[0] for cursor in range(len(batches.spans))]
    expected = Counter()
    for d in range(len(cache)):
        ids = cache.tokens(d).tolist()
        expected.update(pairwise(ids))
    found = pairs(documents)
    assert Counter({pair: n for pair, n in found.items() if pair[1] != IGNORE}) == expected
    assert max(len(d.ids) for d in documents) == max_len
    assert all((d.labels[:-1] == d.ids[1:]).all() for d in documents)
    cut_without_next = pairs([document_from_ids(d.ids) for d in documents])  # a mutant: the label at a cut is lost
    assert Counter({pair: n for pair, n in cut_without_next.items() if pair[1] != IGNORE}) != expected


def test_truncating_keeps_the_first_tokens_and_dropping_the_short_documents(cache):
    cut = Batches(cache, 1, 1, 16, "truncate")
    documents = [cut.at(cursor).documents[0] for cursor in range(len(LENGTHS))]
    assert sorted(tuple(d.ids) for d in documents) == sorted(tuple(cache.tokens(d, 0, 16).tolist()) for d in range(len(LENGTHS)))
    assert sum((d.labels != IGNORE).sum() for d in documents) == sum(min(n, 16) for n in LENGTHS)
    kept = Batches(cache, 1, 1, 16, "drop")
    assert len(kept.spans) == sum(n + 1 <= 16 for n in LENGTHS)


def test_a_step_ends_with_the_document_that_reaches_its_size(cache):
    batches = Batches(cache, 3, 100, 64, "split")
    cursor = 0
    for _ in range(40):
        step = batches.at(cursor)
        assert step.cursor == cursor
        assert step.next_cursor == cursor + len(step.documents)
        assert step.tokens >= 100 > step.tokens - len(step.documents[-1].ids)
        assert step.target_tokens == sum((d.labels != IGNORE).sum() for d in step.documents) > 0
        cursor = step.next_cursor
    assert cursor > 3 * len(batches.spans)  # epochs were crossed
    whole = Batches(cache, 3, 1, 64, "split")
    singly = [whole.at(c).documents[0].ids.tolist() for c in range(cursor)]
    stepwise, at = [], 0
    while at < cursor:
        step = batches.at(at)
        stepwise += [d.ids.tolist() for d in step.documents]
        at = step.next_cursor
    assert stepwise == singly


def test_a_step_is_a_function_of_seed_and_cursor(cache):
    def ids(seed, cursor):
        return [d.ids.tolist() for d in Batches(cache, seed, 150, 200).at(cursor).documents]

    assert ids(1, 10**15) == ids(1, 10**15)
    assert ids(1, 0) != ids(2, 0)
    assert ids(1, 0) != ids(1, len(LENGTHS))


def test_the_fingerprint_says_when_a_cursor_means_the_same(cache):
    def fingerprint(seed=1, tokens=100, max_len=64, overlong: Overlong | None = "split"):
        return Batches(cache, seed, tokens, max_len, overlong).fingerprint

    assert fingerprint() == fingerprint(tokens=7)
    assert fingerprint(max_len=200) == fingerprint(max_len=300, overlong="drop") == fingerprint(max_len=200, overlong=None)
    assert len({fingerprint(), fingerprint(seed=2), fingerprint(max_len=32), fingerprint(overlong="drop"), fingerprint(max_len=200)}) == 5


def test_a_document_is_named_as_a_person_finds_it(cache):
    batches = Batches(cache, 1, 1, 64, "split")
    names = {batches.where(cursor).rsplit("/", 1)[1] for cursor in range(len(batches.spans))}
    assert {"a.jsonl, line 1", "a.jsonl, line 5, tokens 0 to 64", "a.jsonl, line 5, tokens 64 to 121"} <= names
    assert len(names) == len(batches.spans)


def test_long_documents_need_a_policy(cache):
    with pytest.raises(DataError) as refused:
        Batches(cache, 1, 100, 41)
    text = str(refused.value)
    assert "2 of 12 documents are longer than data.max_len: 41 tokens; the longest has 121 (" in text
    assert "a.jsonl, line 5)" in text
    assert "\n  overlong: split      # 5 pieces" in text
    assert "\n  overlong: truncate   # loses 100 of 331 tokens (30.2%)" in text
    assert "\n  overlong: drop       # loses 182 of 331 tokens (55.0%)" in text
    assert Batches(cache, 1, 100, 121).at(0)  # the longest fits exactly


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"drop leaves nothing: all 2 documents are longer than max_len: 16"):
        Batches(make_cache(tmp_path, [20, 17]), 1, 100, 16, "drop")
    (tmp_path / "held").mkdir()
    with pytest.raises(DataError, match=r"data.held_out: 0.999 leaves no document to train on"):
        Batches(make_cache(tmp_path / "held", [20, 3]), 1, 100, 16, "drop", held=0.999)


def test_document_from_ids():
    ids = np.array([5, 6, 7, 8], np.uint16)
    assert document_from_ids(ids).labels.tolist() == [6, 7, 8, IGNORE]
    assert document_from_ids(ids, 2).ids.tolist() == [5, 6]
    assert document_from_ids(ids, 2).labels.tolist() == [6, 7]
    assert document_from_ids(ids, 9).labels.tolist() == [6, 7, 8, IGNORE]
    assert document_from_ids(ids[:0]).ids.tolist() == []
