"""Whole runs of papers and talks, as the simulator and the planner see them: the bars that are met stay met."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import anchors


def test_hotspa_totals_follow_from_one_factor():
    found = anchors.hotspa(with_search=False)
    assert {row["law"] for row in found["rows"]} == {"GitHub", "CommonCrawl"}
    assert found["worst_total"] <= 0.15
    assert found["worst_ratio"] <= 0.10


def test_documents_are_packed_longest_first():
    assert anchors.packs([600, 500, 400, 400, 100], 1024) == 2
    assert anchors.packs([1024] * 3, 1024) == 3
    assert anchors.packs([], 1024) == 0


def test_strategies_of_the_talk_fit_their_devices():
    found = anchors.talk()
    assert len(found["rows"]) == 10
    assert found["all_fit"]
    assert found["within_0.15"] >= 2


def test_llama_3_has_the_planner_s_mesh():
    assert anchors.llama3()["worst"] <= 0.03
