"""The benchmark of what is done in the background measures every scheme on one state."""

from forked import Report

SCHEMES = ["first, none", "ahead, none", "ahead, at once", "ahead, background"]


def test_every_scheme_is_measured_and_saves_where_it_says(report_of: Report) -> None:
    report = report_of("background", "--quick")
    assert [(row["layout"], row["scheme"]) for row in report["rows"]] == [(layout, s) for layout in ("dp1", "dp2.z2") for s in SCHEMES]
    for row in report["rows"]:
        assert row["step_s"] >= row["least_step_s"] > 0
        assert row["checkpoint_mib"] > 1
        saves = row["scheme"].endswith(("at once", "background"))
        assert (row["save_s"] is not None) == saves
        assert not saves or row["save_s"] > 0
    summary = report["summary"]
    for key in ("background_over_at_once", "ahead_over_first"):
        assert all(summary[key][layout] > 0 for layout in ("dp1", "dp2.z2"))
    assert all(share < 1 for share in summary["save_hidden_share"].values())
