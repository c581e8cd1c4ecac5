"""Groups, packs, shares and their order: every document once, nothing dropped."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec
from longshift.workload.groups import Edge, check_edges, cost, length_groups, visiting_order

SPEC = ModelSpec("llama", 257, 40, 5, 6, 2, 10, 37, 4096)
LAYOUTS = [Layout.parse(text) for text in ("dp8", "dp4.tp2", "dp3", "u4", "pp2.dp2", "tp8")]

lengths = st.lists(st.integers(1, 1000), max_size=80)
edges = st.lists(st.tuples(st.integers(1, 999), st.sampled_from(LAYOUTS), st.integers(0, 2000)), max_size=5, unique_by=lambda e: e[0]).map(
    lambda some: [Edge(upto, use, upto + more) for upto, use, more in sorted(some, key=lambda e: e[0])] + [Edge(1000, LAYOUTS[-1])]
)


@settings(max_examples=300)
@given(lengths, edges)
def test_every_document_is_in_one_pack_and_every_pack_in_one_share(sizes, at) -> None:
    groups = length_groups(sizes, at, SPEC)
    assert Counter(i for g in groups for p in g.packs for i in p) == Counter(range(len(sizes)))
    for group in groups:
        assert group.documents
        assert len(group.shares) == group.layout.dp
        assert Counter(p for share in group.shares for p in share) == Counter(range(len(group.packs)))
        assert all(group.lo < sizes[i] <= group.hi for i in group.documents)
        (capacity,) = (edge.pack for edge in at if edge.upto == group.hi)
        fill = [[sum(sizes[i] for i in group.packs[p]) for p in share] for share in group.shares]
        assert all(tokens <= capacity for share in fill for tokens in share)
        assert all(a + b > capacity for share in fill for a, b in combinations(share, 2)), "two packs that could have been one"
        assert group.costs == tuple(cost([sizes[i] for i in p], SPEC) for p in group.packs)
    assert [g.hi for g in groups] == sorted({next(e.upto for e in at if n <= e.upto) for n in sizes})


@given(lengths, edges, st.randoms(use_true_random=False))
def test_of_a_layout_only_its_replicas_have_a_say(sizes, at, random) -> None:
    other = [replace(edge, use=random.choice(LAYOUTS)) for edge in at]
    ours, theirs = length_groups(sizes, at, SPEC), length_groups(sizes, other, SPEC)
    assert [(g.lo, g.hi, g.documents) for g in ours] == [(g.lo, g.hi, g.documents) for g in theirs]
    alike = [replace(edge, use=Layout(tp=2, dp=edge.use.dp)) for edge in at]
    assert [(g.packs, g.shares, g.costs) for g in ours] == [(g.packs, g.shares, g.costs) for g in length_groups(sizes, alike, SPEC)]


@given(lengths, edges)
def test_shares_are_balanced_by_cost(sizes, at) -> None:
    """No replica could give its cheapest document to the least loaded one and both be better off: the promise of the longest first."""
    for group in length_groups(sizes, at, SPEC):
        loads = [sum(group.costs[p] for p in share) for share in group.shares]
        for share, load in zip(group.shares, loads):
            least = min((cost([sizes[i]], SPEC) for p in share for i in group.packs[p]), default=load)
            assert load - least <= min(loads) * (1 + 1e-12)
        assert 0 < group.balance <= 1
        assert group.balance == pytest.approx(sum(group.costs) / group.layout.dp / max(loads))


def test_attention_is_quadratic_in_the_balance() -> None:
    """One long document costs more than as many tokens in short ones: the replicas' shares differ in tokens."""
    spec = ModelSpec("llama", 257, 8, 2, 2, 2, 4, 8, 65536)
    (group,) = length_groups([4000, *[100] * 120], [Edge(4000, Layout(dp=2))], spec)
    tokens = [sum([4000, *[100] * 120][i] for p in share for i in group.packs[p]) for share in group.shares]
    assert tokens[0] < tokens[1]


def test_a_known_step() -> None:
    at = [Edge(10, Layout(dp=2)), Edge(20, Layout(dp=4)), Edge(100, Layout(ulysses=4))]
    short, long = length_groups([4, 90, 6, 10, 1, 5, 3], at, SPEC)
    assert (short.lo, short.hi, short.layout.dp, short.documents) == (0, 10, 2, (0, 2, 3, 4, 5, 6))
    assert short.packs == ((3,), (0,), (2, 6, 4), (5,))
    assert short.shares == ((0, 1), (2, 3))
    assert (long.lo, long.hi, long.packs, long.shares) == (20, 100, ((1,),), ((0,),))


def test_a_pack_of_its_own_holds_more_documents() -> None:
    at = [Edge(10, Layout(dp=2), 25), Edge(100, Layout(ulysses=4))]
    short, long = length_groups([4, 90, 6, 10, 1, 5, 3, 10], at, SPEC)
    assert (short.lo, short.hi, long.packs) == (0, 10, ((1,),))
    assert short.packs == ((3, 2, 6), (7, 5, 0, 4))
    assert short.shares == ((0,), (1,))


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ([Edge(10, Layout(), 9)], "pack 9 of upto 10 .* write pack: 10 or more"),
        ([], "at least one group"),
        ([Edge(10, Layout()), Edge(10, Layout(dp=2))], "from short to long"),
        ([Edge(10, Layout()), Edge(5, Layout(dp=2))], "upto 5 \\(dp2\\) comes after 10 \\(dp1\\)"),
    ],
)
def test_edges_that_cannot_work_are_refused(at, words) -> None:
    with pytest.raises(UsageError, match=words):
        check_edges(at)


# The visiting order

costs = st.integers(0, 6).map(float)


def price(order, first, hop) -> float:
    if not order:
        return 0.0
    return first[order[0]] + sum(hop[a][b] for a, b in pairwise(order))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 7))
def test_the_visiting_order_is_the_best_of_all(data, n) -> None:
    def row() -> list[float]:
        return data.draw(st.lists(costs, min_size=n, max_size=n))

    first, hop = row(), [row() for _ in range(n)]
    best = min(permutations(range(n)), key=lambda order: (price(order, first, hop), order))
    assert visiting_order(first, hop) == best


def test_the_layout_at_home_is_visited_first_and_one_layout_twice_in_a_row() -> None:
    """Groups 0 and 2 lie alike, and as home does: no switch to them, none between them."""
    switch = [[0.0, 5.0, 0.0], [5.0, 0.0, 5.0], [0.0, 5.0, 0.0]]
    assert visiting_order([0.0, 5.0, 0.0], switch) == (0, 2, 1)


def test_equal_orders_go_by_number() -> None:
    assert visiting_order([0.0] * 10, [[1.0] * 10] * 10) == tuple(range(10))
    assert visiting_order([0.0] * 17, [[0.0] * 17] * 17) == tuple(range(17))
