"""`benchmarks/plan_choice.py --quick`: ways are trained beside their forecasts, and the planner's choice beside the best single layout."""

import json
from pathlib import Path

import pytest
from common import give_all_back
from forked import Report

ROOT = Path(__file__).parents[2]


def test_ways_are_trained_beside_their_forecasts(report_of: Report):
    give_all_back()  # what this process has free, ranks that it forks would not be seen to need
    found = report_of("plan_choice", "--quick")
    ways = {row["way"]: row for row in found["rows"]}
    assert {"dp2", "tp2", "pp2", "dp2 <= 32 in 256 > tp2 <= 256"} <= set(ways)
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in ways.values())
    assert all(row["forecast"] > -0.2 for row in ways.values())
    assert all(ways[name]["forecast"] < 0.2 for name in ("dp2", "tp2", "pp2"))  # others may have had no step that fills their packs
    (budget,) = found["summary"]["budgets"]
    assert set(budget["tried"]) <= set(ways)
    assert budget["auto"] in budget["tried"]
    assert budget["auto_over_best_static"] > 0  # of one round, on a machine with other work


@pytest.mark.parametrize("case", ["plain", "2x2", "2x4"])
def test_kept_rounds_are_judged_by_the_rule_of_a_run(case: str, report_of: Report):
    """Where this fails after a change of the rule: judge the kept report with `--judge`, and keep what that prints."""
    kept = ROOT / "benchmarks" / "results" / f"plan_choice{'' if case == 'plain' else '_' + case}.json"
    again = report_of("plan_choice", "--case", case, "--judge", str(kept))
    for budget, known in zip(again["summary"]["budgets"], json.loads(kept.read_text())["summary"]["budgets"], strict=True):
        assert budget["auto"] in budget["tried"]
        assert budget == known
