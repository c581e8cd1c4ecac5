"""Sliding windows against the mask that defines them: every pair of a query and a key in exactly one piece, wherever a rank holds them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.schedule import chunks
from longshift.schedule.sequence import Pair, TokenOrder, pairs, pairs_across, token_order
from longshift.schedule.windows import Mask, pieces
from longshift.spec.families import preset
from longshift.spec.model import attended
from longshift.workload.groups import cost

windows = st.integers(1, 40)
packs = st.lists(st.integers(0, 60), min_size=1, max_size=4)


def seen(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """Which key each query sees: the definition."""
    back = queries[:, None] - keys[None, :]
    return (back >= 0) & (back < (window or 1 << 30))


def of_mask(mask: Mask, queries: int, keys: int) -> np.ndarray:
    """What a kernel computes of a piece."""
    if mask == "all":
        return np.ones((queries, keys), bool)
    assert queries == keys > 0
    causal = np.tril(np.ones((queries, keys), bool))
    return causal if mask == "causal" else causal[::-1, ::-1]


@given(st.integers(0, 90), st.integers(1, 90), windows | st.none(), st.data())
def test_pieces_are_the_mask(first: int, length: int, window: int | None, data: st.DataObject):
    queries = (first, first + length)
    if data.draw(st.booleans()):
        keys = queries
    else:
        begin = data.draw(st.integers(0, first + 2 * length))
        end = data.draw(st.integers(begin + 1, first)) if begin < first else data.draw(st.integers(first + length, 400))
        keys = (begin, end) if end <= first else (max(begin, first + length), max(begin, first + length) + 5)
    found = np.zeros((length, keys[1] - keys[0]), int)
    for (a, b), (c, d), mask in pieces(queries, keys, window):
        found[a - queries[0] : b - queries[0], c - keys[0] : d - keys[0]] += of_mask(mask, b - a, d - c)
    np.testing.assert_array_equal(found, seen(np.arange(*queries), np.arange(*keys), window))


def computed(found: tuple[Pair, ...], queries: int, keys: int) -> np.ndarray:
    made = np.zeros((queries, keys), int)
    for rows, columns, mask in found:
        made[rows, columns] += of_mask(mask, rows.stop - rows.start, columns.stop - columns.start)
    return made


def places(order: TokenOrder, coord: int) -> tuple[np.ndarray, np.ndarray]:
    """The document of each local token (-1: padding), and its position."""
    documents = np.concatenate([np.full(run.length, run.document) for run in order.runs[coord]] or [np.zeros(0, int)])
    return documents, order.positions(coord)


@given(packs, st.integers(1, 4), st.integers(1, 3), windows | st.none())
def test_pairs_of_a_ring_are_the_mask(lengths: list[int], ring: int, multiple: int, window: int | None):
    order = token_order(lengths, ring, multiple)
    for mine in range(ring):
        reached = np.zeros(order.local_tokens, bool)
        for theirs in range(ring):
            found = pairs(order, mine, theirs, window)
            (own_documents, own), (other_documents, others) = places(order, mine), places(order, theirs)
            wanted = seen(own, others, window) & (own_documents[:, None] == other_documents[None, :])
            wanted &= (own_documents[:, None] >= 0) | (mine == theirs)
            np.testing.assert_array_equal(computed(found, len(own), len(others)), wanted)
            for rows, _, mask in found if mine == theirs else ():
                assert reached[rows].all() or mask == "causal", "what is folded first must reach every query"
                reached[rows] = True
        assert reached.all()


@given(packs, st.integers(1, 25), st.integers(1, 3), windows | st.none())
def test_chunks_see_what_the_window_reaches(lengths: list[int], tokens: int, ring: int, window: int | None):
    cut = chunks.cut_chunks([n for n in lengths if n] or [1], tokens)
    orders = [token_order([run.length for run in runs], ring, 1) for runs in cut]
    for c, first in enumerate(chunks.first_key_chunks(cut, window)):
        for j in range(c):
            own, others = cut[c][0], cut[j][-1]
            together = own.document == others.document
            wanted = seen(own.start + np.arange(own.length), others.start + np.arange(others.length), window) & together
            assert wanted.any() == (j >= first), f"chunk {c} and keys of {j}"
            if not together:
                continue
            found = np.zeros_like(wanted, int)
            for mine in range(ring):
                for theirs in range(ring):
                    rows, columns = (places(orders[n], coord) for n, coord in ((c, mine), (j, theirs)))
                    made = computed(
                        pairs_across(orders[c], mine, orders[j], theirs, own.start - others.start, window), len(rows[0]), len(columns[0])
                    )
                    last = len(cut[j]) - 1
                    inside = np.ix_(rows[0] == 0, columns[0] == last)
                    assert made.sum() == made[inside].sum()
                    found[np.ix_(rows[1][rows[0] == 0], columns[1][columns[0] == last])] += made[inside]
            np.testing.assert_array_equal(found, wanted)


@given(st.integers(1, 300), windows)
def test_pairs_attended_are_those_of_the_mask(length: int, window: int):
    at = np.arange(length)
    assert attended(length, window) == seen(at, at, window).sum() - min(length, window) / 2  # half of the diagonal of a window
    assert attended(np.array([length, 5]), None).tolist() == [length * length / 2, 12.5]


def test_a_models_attention_is_the_mean_of_its_blocks():
    spec = preset("gemma-3-1b")
    assert (spec.layers, len(spec.full_blocks), spec.sliding_window) == (26, 4, 512)
    assert spec.attended(4096) == pytest.approx((4 * attended(4096, None) + 22 * attended(4096, 512)) / 26)
    assert cost([4096], spec) == pytest.approx(4096 * spec.flops_per_token(spec.attended(4096) / 4096))
    assert [spec.like(block) for block in (1, 2, 6, 7, 12)] == [1, 1, 6, 1, 6]
