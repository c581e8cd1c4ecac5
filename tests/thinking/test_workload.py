"""Lengths, order, packs, shares: exactly once, deterministic, the same on any machine."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.spec.model import ModelSpec
from longshift.workload import order as room
from longshift.workload.groups import cost, pack, shares
from longshift.workload.lengths import cap_loss, histogram, quantiles, spans
from longshift.workload.order import Mixture, Order, shares_of

seeds = st.integers(0, 2**63)
documents = st.lists(st.integers(2, 300), min_size=1, max_size=60).map(lambda x: np.array(x, np.int64))


# Order


@given(st.integers(1, 400), seeds, st.integers(0, 5))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    order = Order(n, seed)
    assert sorted(order[epoch * n + i] for i in range(n)) == list(range(n))


def test_order_is_the_same_on_every_machine():
    """Fixed numbers: a change of hash, word size or library would show."""
    assert [Order(10, 0)[i] for i in range(20)] == [3, 8, 5, 1, 4, 0, 6, 7, 9, 2, 3, 8, 7, 6, 5, 2, 9, 4, 1, 0]
    assert [Order(10**12, 7)[i] for i in (0, 1, 10**12, 10**15)] == [877219362408, 6499975493, 321843310801, 311089610929]


def test_epochs_and_seeds_differ():
    def epoch(seed, number, n=50):
        return tuple(Order(n, seed)[number * n + i] for i in range(n))

    assert len({epoch(seed, number) for seed in range(5) for number in range(5)}) == 25


@pytest.mark.parametrize("n", [2, 3, 5, 7, 16, 17])
def test_order_is_even(n):
    """Over many epochs each document comes equally often first and equally often right after document 0: within 5 sigma."""
    epochs = 3000
    order = Order(n, 3)
    runs = [[order[e * n + i] for i in range(n)] for e in range(epochs)]
    first = Counter(run[0] for run in runs)
    after = Counter(run[run.index(0) + 1] for run in runs if run[-1] != 0)
    for counts, choices in ((first, n), (after, n - 1)):
        total = sum(counts.values())
        assert len(counts) == choices
        sigma = (total / choices * (1 - 1 / choices)) ** 0.5
        assert max(abs(c - total / choices) for c in counts.values()) <= 5 * sigma


def test_a_far_seek_costs_what_a_near_one_does(monkeypatch):
    """Steps are counted, not seconds: no epoch is enumerated on the way."""
    steps = Counter()
    feistel = room._feistel
    monkeypatch.setattr(room, "_feistel", lambda *a: steps.update(["walk"]) or feistel(*a))
    order = Order(10**9 + 7, 1)
    for cursor in range(10**17, 10**17 + 200):
        order[cursor]
    assert steps["walk"] / 200 < 4


SOURCES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 1000)), min_size=1, max_size=9)


@given(SOURCES, seeds, st.integers(1, 400))
def test_a_mixture_reads_every_document_before_one_again(sources, seed, length):
    """After any number of documents, counts within a source differ by at most one, and each source has its share of them."""
    sizes, shares = zip(*sources)
    mixture = Mixture(sizes, shares, seed)
    of = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.bincount([mixture[cursor] for cursor in range(length)], minlength=len(of))
    for number in range(len(sizes)):
        assert np.ptp(counts[of == number]) <= 1
    read = np.bincount(of, weights=counts)
    assert np.abs(read - length * np.array(shares) / sum(shares)).max() < 1 + len(sizes).bit_length()


def test_a_mixture_is_the_same_on_every_machine():
    mixture = Mixture((3, 1, 2), (3, 1, 4), 7)
    assert [mixture[cursor] for cursor in range(16)] == [5, 1, 4, 4, 0, 3, 5, 2, 4, 2, 5, 4, 1, 3, 5, 0]
    assert len({tuple(Mixture((3, 3, 3), (2**90, 2**91, 2**92 + 1), seed)[n] // 3 for n in range(9)) for seed in range(20)}) > 3
    far = 10**15
    assert sorted(Counter(int(mixture[far + n] >= 3) for n in range(8)).values()) == [3, 5]


def test_shares_are_not_rounded():
    """Of tiny sources beside large ones too: shares of documents are whole numbers in the very proportion."""
    assert shares_of([100, 100], [1, 1000], [0.5, None], [None, None]) == (1, 2000)
    assert shares_of([100, 100], [1, 1000], [1.4, None], [None, None]) == (7, 5000)
    tokens, documents, weights = [7, 1_000_000], [1, 1000], [0.3, 0.7]
    shares = shares_of(tokens, documents, [None, None], weights)
    read = [Fraction(share * t, n) for share, t, n in zip(shares, tokens, documents)]
    assert read[0] / sum(read) == Fraction(3, 10)


# Packs and shares


@given(st.lists(st.integers(1, 100), max_size=80), st.integers(100, 300))
def test_every_document_is_in_one_pack_that_holds_it(lengths, capacity):
    packs = pack(lengths, capacity)
    assert sorted(i for p in packs for i in p) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in p) <= capacity for p in packs)
    assert packs == pack(lengths, capacity)
    fill = sorted(sum(lengths[i] for i in p) for p in packs)
    assert all(a + b > capacity for a, b in pairwise(fill))  # no two packs could have been one


def test_packs_are_best_fit_decreasing():
    assert pack([2, 5, 4, 7, 1, 3, 8], 10) == ((6, 0), (3, 5), (1, 2, 4))
    assert pack([5, 5, 5, 5], 10) == ((0, 1), (2, 3))
    assert pack([6, 7, 3], 10) == ((1, 2), (0,))  # the fullest that holds it, not the first
    assert pack([], 10) == ()


@given(st.lists(st.floats(0, 1e15), max_size=60), st.integers(1, 9))
def test_every_pack_is_in_one_share_and_shares_are_balanced(costs, replicas):
    dealt = shares(costs, replicas)
    assert len(dealt) == replicas
    assert sorted(i for s in dealt for i in s) == list(range(len(costs)))
    loads = [sum(costs[i] for i in s) for s in dealt]
    bound = max([sum(costs) / replicas, *costs])
    assert max(loads) <= 2 * bound * (1 + 1e-9)
    for s, load in zip(dealt, loads):  # without its last pack, no replica has more than the least loaded one
        assert not s or load - costs[s[-1]] <= min(loads) + 1e-9 * bound


def test_shares_may_be_uneven_and_empty():
    assert shares([1, 9, 4, 4], 2) == ((1,), (2, 3, 0))
    assert shares([3.0], 3) == ((0,), (), ())
    assert shares([], 2) == ((), ())


def test_cost_is_the_models_flops():
    sizes = {"vocab": 257, "width": 64, "layers": 5, "heads": 4, "kv_heads": 2, "head_width": 16, "ffn": 128, "max_positions": 4096}
    full, window = ModelSpec("llama", **sizes), ModelSpec("mistral", **sizes, sliding_window=100)
    assert cost([300, 50], full) == 300 * full.flops_per_token(150) + 50 * full.flops_per_token(25)
    assert cost([600], full) > cost([300, 300], full)
    attended = sum(min(i + 0.5, 100) for i in range(300))  # token i attends to i others and half of itself, at most the window
    assert cost([300], window) == pytest.approx(300 * window.flops_per_token(attended / 300), rel=1e-3)


# Lengths


@given(documents, st.integers(2, 120))
def test_split_has_every_target_once(lengths, cap):
    s = spans(lengths, cap, "split")
    targets = Counter((int(d), t) for d, a, b in zip(s.document, s.start, s.stop) for t in range(a + 1, min(b + 1, lengths[d])))
    assert targets == {(d, t): 1 for d, n in enumerate(lengths) for t in range(1, n)}
    assert ((s.stop - s.start >= 1) & (s.stop - s.start <= cap) & (s.start + 1 < lengths[s.document])).all()
    assert cap_loss(lengths, cap).split_pieces == (lengths[s.document] > cap).sum()


@given(documents, st.integers(2, 120))
def test_truncate_and_drop_lose_what_is_announced(lengths, cap):
    loss = cap_loss(lengths, cap)
    cut, kept = spans(lengths, cap, "truncate"), spans(lengths, cap, "drop")
    assert loss.documents == (lengths > cap).sum() == len(lengths) - len(kept)
    assert loss.truncate_tokens == lengths.sum() - (cut.stop - cut.start).sum()
    assert loss.drop_tokens == lengths.sum() - (kept.stop - kept.start).sum()
    assert cut.document.tolist() == list(range(len(lengths)))
    assert kept.document.tolist() == np.flatnonzero(lengths <= cap).tolist()
    assert not cut.start.any()
    assert (cut.stop <= cap).all()


def test_no_piece_is_without_a_target():
    s = spans(np.array([9, 5, 3]), 4, "split")
    assert list(zip(s.document.tolist(), s.start.tolist(), s.stop.tolist())) == [(0, 0, 4), (0, 4, 8), (1, 0, 4), (2, 0, 3)]


@given(documents)
def test_histogram_counts_every_document(lengths):
    bins = histogram(lengths)
    for b in bins:
        inside = lengths[(lengths > b.low) & (lengths <= b.high)]
        assert (b.documents, b.tokens) == (len(inside), inside.sum())
    assert sum(b.documents for b in bins) == len(lengths)
    assert bins[0].documents
    assert bins[-1].documents
    assert all(a.high == b.low for a, b in pairwise(bins))


def test_histogram_and_quantiles_by_hand():
    lengths = np.array([1, 2, 3, 4, 5, 8, 9, 100])
    assert [b.documents for b in histogram(lengths)] == [1, 1, 2, 2, 1, 0, 0, 1]
    assert [(b.low, b.high) for b in histogram(lengths)][:4] == [(0, 1), (1, 2), (2, 4), (4, 8)]
    assert histogram(np.array([], np.int64)) == ()
    assert quantiles(lengths, (0, 0.5, 0.51, 0.99, 1)) == (1, 4, 5, 100, 100)
