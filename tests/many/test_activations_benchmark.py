"""The benchmark of what blocks keep measures every budget, and nothing chosen needs more than its own."""

from forked import Report


def test_every_budget_has_its_choice(report_of: Report) -> None:
    report = report_of("activations", "--quick")
    rows, summary = report["rows"], report["summary"]
    assert len(rows) == 10
    assert [row["budget_mib"] for row in rows] == sorted(row["budget_mib"] for row in rows)
    assert all(0 < row["peak_mib"] <= row["budget_mib"] for row in rows)
    assert rows[-1]["layout"] == summary["all_fit_layout"] == "dp1"
    assert len({row["layout"] for row in rows}) >= 3
    low, high = summary["peak_over_ledger"]
    assert 0.98 <= low <= high <= 1.0
    assert summary["half_over"] > 0
    assert summary["within_budget"]
