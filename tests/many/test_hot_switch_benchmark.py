"""The two benchmarks of hot switching run, and their numbers hang together."""

import pytest
from common import give_all_back
from forked import Report
from hot_ranks import stratified
from hot_switch import in_papers_family, padded


@pytest.fixture(scope="module")
def hot(report_of: Report) -> dict:
    give_all_back()  # what this process has free, ranks that it forks would not be seen to need
    return report_of("hot_switch", "--quick")


@pytest.fixture(scope="module")
def cost(report_of: Report) -> dict:
    return report_of("switch_cost", "--quick")


def test_hot_switching_is_beside_every_static_layout(hot: dict) -> None:
    rows = {row["scheme"]: row for row in hot["rows"]}
    assert {"static:dp2.z1", "static:tp2.z1", "static:u2.z1", "fsdp2:z3"} <= set(rows)
    assert any(scheme.startswith("static-padded:") for scheme in rows)
    for row in hot["rows"]:
        assert row["machine"] == "plain"
        assert row["tokens_per_s"] > 0
        assert row["peak_mib"] > 0
        assert 0 <= row["switch_exposed_share"] < 1


def test_hot_switching_is_never_worse_than_the_best_static_layout(hot: dict) -> None:
    (found,) = hot["summary"]["compared"]["plain 2, python"]
    assert found["budget_mib"] is None
    for kind in ("static_all", "static_tp_pp"):
        mine, theirs = found[kind]["chosen_by_tokens_per_s"]
        assert mine >= theirs > 0
        assert found[kind]["ratio"] > 0


def test_every_switch_is_measured_and_bounded(cost: dict) -> None:
    rows = {(row["src"], row["dst"], row["planner"]): row for row in cost["rows"]}
    pairs = {key[:2] for key in rows}
    assert all((*pair, planner) in rows for pair in pairs for planner in ("fan_out", "algorithm1", "first_owner"))
    assert ("tp4", "dp4") in pairs
    assert ("dp4", "tp4") not in pairs, "every rank has its part already"
    for row in cost["rows"]:
        assert row["bytes"] > 0
        assert min(row["measured_s"], row["bound_s"], row["ready_s"]) > 0
    for pair in pairs:
        assert len({rows[(*pair, planner)]["bytes"] for planner in ("fan_out", "algorithm1", "first_owner")}) == 1, (
            "one node: the same bytes"
        )
    assert set(cost["summary"]["fraction_of_bound_median"]) == {"fan_out", "algorithm1", "first_owner"}


def test_padding_goes_to_the_end_of_the_bucket() -> None:
    documents = [([7] * n, [7] * n) for n in (3, 8, 9, 16, 17)]
    found = padded(documents, (8, 16, 32))
    assert [len(ids) for ids, _ in found] == [3, 8, 16, 16, 32]
    assert [labels.count(-100) for _, labels in found] == [0, 0, 7, 0, 15]


def test_the_papers_family() -> None:
    assert in_papers_family("pp2.dp2.tp2.z3")
    assert not in_papers_family("dp2.u2.z1")
    assert in_papers_family("tp4.z1.recompute-full")
    assert not in_papers_family("ring4")


def test_a_small_draw_has_the_long_documents_of_a_large_one() -> None:
    import numpy as np

    lengths = np.sort(np.random.default_rng(0).lognormal(5, 1.5, 10_000).astype(np.int64)) + 2
    drawn = lengths[stratified(lengths, 50_000, np.random.default_rng(1))]
    assert sum(drawn) == pytest.approx(50_000, rel=0.2)
    assert np.quantile(drawn, 0.95) == pytest.approx(np.quantile(lengths, 0.95), rel=0.1)
