"""Token order: exactly once, in order, balanced."""

from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from longshift.schedule.sequence import PADDING, Run, token_order

packs = st.lists(st.integers(0, 70), max_size=12)
rings = st.integers(1, 6)
multiples = st.integers(1, 8)


@given(packs, rings, multiples)
@example([1], 4, 3)
@example([], 2, 2)
def test_every_token_lies_on_one_place_in_document_order(lengths, ring, multiple):
    order = token_order(lengths, ring, multiple)
    index = [order.index(i) for i in range(ring)]
    real = [x[x != PADDING] for x in index]
    np.testing.assert_array_equal(np.sort(np.concatenate(real)), np.arange(sum(lengths)))
    for x, kept in zip(index, real):
        assert len(x) == order.local_tokens
        assert (np.diff(kept) > 0).all()
        np.testing.assert_array_equal(x[: len(kept)], kept)  # padding last


@given(packs, rings, multiples)
def test_positions_are_offsets_inside_the_document(lengths, ring, multiple):
    order = token_order(lengths, ring, multiple)
    position_of = np.concatenate([np.empty(0, int), *(np.arange(n) for n in lengths)])
    for i in range(ring):
        index, positions = order.index(i), order.positions(i)
        assert index.dtype == positions.dtype == np.int64
        real = index != PADDING
        np.testing.assert_array_equal(positions[real], position_of[index[real]])
        np.testing.assert_array_equal(positions[~real], np.arange((~real).sum()))


@given(packs, rings, multiples)
def test_coordinates_hold_equally_many_tokens_up_to_one_and_padding_is_the_least(lengths, ring, multiple):
    order = token_order(lengths, ring, multiple)
    held = [sum(r.length for r in order.runs[i] if r.document != PADDING) for i in range(ring)]
    assert max(held) - min(held) <= 1
    assert order.local_tokens % multiple == 0
    assert 0 <= order.local_tokens - max(held) < multiple


@given(packs, rings, multiples)
def test_runs_are_maximal_and_those_of_other_coordinates_lie_wholly_before_or_after(lengths, ring, multiple):
    order = token_order(lengths, ring, multiple)
    for i in range(ring):
        runs = order.runs[i]
        assert all(run.length > 0 for run in runs)
        for a, b in pairwise(runs):
            assert a.document != b.document or a.start + a.length < b.start
        for mine in runs:
            for j in set(range(ring)) - {i}:
                for other in order.runs[j]:
                    if mine.document == other.document != PADDING:
                        assert mine.start + mine.length <= other.start or other.start + other.length <= mine.start


@given(st.lists(st.integers(2000, 9000), min_size=1, max_size=4), st.integers(2, 8))
def test_causal_work_of_long_documents_is_even(lengths, ring):
    order = token_order(lengths, ring, 1)
    work = np.zeros((len(lengths), ring))
    for i in range(ring):
        for run in order.runs[i]:
            if run.document != PADDING:
                work[run.document, i] += run.length * (run.start + (run.length + 1) / 2)  # sum of position + 1
    assert np.allclose(work.sum(1), [n * (n + 1) / 2 for n in lengths])
    assert (work.max(1) / work.mean(1)).max() < 1.01


def test_contiguous_halves_would_fail_the_balance():
    """The power of the test above: two contiguous halves of one document differ threefold."""
    n = 4000
    low, high = (n // 2) * (n // 2 + 1) / 2, n * (n + 1) / 2 - (n // 2) * (n // 2 + 1) / 2
    assert high / ((low + high) / 2) > 1.4


def test_one_coordinate_holds_one_run_a_document():
    order = token_order([5, 0, 3], 1, 4)
    assert order.runs[0] == (Run(0, 0, 5), Run(2, 0, 3))
    assert token_order([5, 4], 1, 4).runs[0] == (Run(0, 0, 5), Run(1, 0, 4), Run(PADDING, 0, 3))
    assert token_order([5, 4], 1, 4).positions(0).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]


def test_the_zigzag_of_the_docstring():
    order = token_order([8, 4], 2, 1)
    assert order.runs[0] == (Run(0, 0, 2), Run(0, 6, 2), Run(1, 0, 1), Run(1, 3, 1))
    assert order.runs[1] == (Run(0, 2, 4), Run(1, 1, 2))
    assert order.index(1).tolist() == [2, 3, 4, 5, 9, 10]


def test_remainders_are_dealt_on_from_document_to_document():
    held = [sum(r.length for r in token_order([1] * 8, 4, 1).runs[i]) for i in range(4)]
    assert held == [2, 2, 2, 2]
