"""Whole runs of papers and talks, as the simulator and the planner see them: the bars that are met stay met, what is beyond them stays
where it is."""

import json
import sys
from pathlib import Path

import pytest

from longshift.layout.layout import Layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import anchors  # noqa: E402
import other_trainer  # noqa: E402

GIB = 2**30


def test_hotspa_totals_follow_from_one_factor():
    found = anchors.hotspa(with_search=False)
    assert {row["law"] for row in found["rows"]} == {"GitHub", "CommonCrawl"}
    assert found["worst"]["predicted"]["total"] <= 0.15
    assert found["worst"]["predicted"]["ratio"] <= 0.10
    assert found["worst"]["modelled"]["total"] == pytest.approx(0.184, abs=0.01)
    assert found["worst"]["modelled"]["ratio"] == pytest.approx(0.150, abs=0.01)


def test_stage_times_of_the_cost_model():
    found = anchors.stages()
    assert len(found["rows"]) == 21
    assert found["median"] <= 0.05
    assert found["worst"] == pytest.approx(0.216, abs=0.01)
    assert max(found["by_length"][str(end)]["worst"] for end in anchors.BUCKETS[1:4]) <= 0.10


def test_a_stage_that_was_not_measured_is_a_share_of_the_whole_model():
    assert anchors.measured_s("32B", 16, 1, 1000) == pytest.approx(0.249518)
    assert anchors.measured_s("32B", 16, 2, 1000) == pytest.approx(0.249518 / 2)
    assert anchors.measured_s("32B", 8, 2, 1000) == pytest.approx(0.133928)


def test_documents_are_packed_longest_first():
    assert anchors.packs([600, 500, 400, 400, 100], 1024) == 2
    assert anchors.packs([1024] * 3, 1024) == 3
    assert anchors.packs([], 1024) == 0


def test_strategies_of_the_talk_fit_their_devices():
    found = anchors.talk(with_clock=False)
    assert len(found["rows"]) == 10
    assert found["all_fit"]
    assert found["within_0.15"] == {"over": 2, "as_theirs_over": 8}
    beyond = {row["strategy"]: row["as_theirs_over"] for row in found["rows"] if abs(row["as_theirs_over"]) > 0.15}
    assert beyond == pytest.approx({"tp8.recompute-full.host": -0.226, "u8.z3.chunk64K.host": -0.414}, abs=0.01)


def test_what_the_other_trainer_keeps():
    def gib(text: str, tokens: int) -> float:
        return other_trainer.device_bytes(Layout.parse(text), tokens) / GIB

    assert gib("tp8.recompute-full", 1 << 17) - gib("tp8.recompute-full.host", 1 << 17) == pytest.approx(32)  # an input of 1 GiB a block
    assert gib("tp8", 1 << 15) - gib("tp8.recompute-full", 1 << 15) == pytest.approx(32 * 0.25 * 4.375)
    assert gib("u8.z1", 1 << 16) == gib("u8.z2", 1 << 16)
    elements = 32 * (4 * 4096**2 + 2 * 4096 * 14336) + 50304 * 4096
    assert gib("u8.z2", 1 << 16) - gib("u8.z3", 1 << 16) == pytest.approx((2 * elements * 7 / 8 - 2e9) / GIB)


def test_llama_3_has_the_planner_s_mesh():
    found = anchors.llama3()
    assert found["worst"] <= 0.04  # the goal is 0.03: at 128K tokens a mesh of pp8 that recomputes is 3.8 % faster
    assert [row["without_recompute_over_published"] for row in found["rows"]] == pytest.approx([0.023, 0.031, 0.019], abs=0.01)


def test_the_plan_that_was_kept_beats_the_published_set():
    found = json.loads((BENCHMARKS / "results" / "anchors.json").read_text())["hotspa"]
    assert found["search_over_c1"] <= 0.9
    assert found["padded_search_over_c1"] <= 0.9
    assert found["search_gib"] < 80
    assert found["worst"]["predicted"]["total"] <= 0.15
    assert found["worst"]["predicted"]["ratio"] <= 0.10
