"""The benchmark against other systems runs, measures every layout and finds that all systems train the same."""

from pathlib import Path

import pytest
from common import give_all_back
from forked import Report
from static import LIKE

PEERS = {  # layouts that are run together: what they are compared with, besides DDP and OPTIONAL
    ("dp2",): set(),
    ("dp2.z1", "dp2.z2,host"): {("fsdp2", "z1")},
    ("dp2.z2", "dp2.z3"): {("fsdp2", "z2"), ("fsdp2", "z3")},
    ("tp2",): {("dtensor", "tp2")},
    ("pp2", "pp2:3-1"): {("pipelining", "pp2"), ("pipelining", "pp2:3-1")},
    ("u2", "ring2"): set(),
}
OPTIONAL = {  # what is not installed everywhere: layouts that are compared with it
    "deepspeed": {"dp2.z1", "dp2.z2", "dp2.z3", "dp2.z2,host"},
    "hf": {"dp2"},
}


def test_every_layout_is_run_in_some_case() -> None:
    assert {layout for layouts in PEERS for layout in layouts} == set(LIKE)


@pytest.mark.parametrize("layouts", PEERS, ids=" ".join)
def test_layouts_are_measured_beside_their_peers(layouts: tuple[str, ...], report_of: Report) -> None:
    give_all_back()  # what this process has free, ranks that it forks would not be seen to need
    report = report_of("static", "--quick", "--layouts", *layouts)
    every_system_is_measured(report, layouts)
    ratios_are_to_the_best_like_for_like_peer(report, set(layouts))
    assert 0 < report["summary"]["loss_difference"]["float32"] < 1e-4, "all systems train the same"


def every_system_is_measured(report: dict, layouts: tuple[str, ...]) -> None:
    rows = {(row["system"], row["layout"]): row for row in report["rows"]}
    assert {("longshift", layout) for layout in layouts} | {("ddp", "dp2")} | PEERS[layouts] <= set(rows)
    for system, alike in OPTIONAL.items():
        if alike & set(layouts):
            assert (system in report["summary"]["skipped"]) != any(name == system for name, _ in rows)
    for row in rows.values():
        assert row["dtype"] == "float32"
        assert row["tokens_per_s"] > 0
        assert row["peak_mib"] > row["base_mib"] > 0
        assert row["spread"] >= 0


def ratios_are_to_the_best_like_for_like_peer(report: dict, layouts: set[str]) -> None:
    rates = {f"{row['system']} {row['layout']}": row["tokens_per_s"] for row in report["rows"]}
    summary = report["summary"]
    alone = {"u2", "ring2"} | ({"dp2.z2,host"} if "deepspeed" in summary["skipped"] else set())
    assert set(summary["ratio_to_best_peer"]) == layouts - alone, "no system here cuts the sequence"
    assert set(summary["ratio_to_best_data_parallel"]) == layouts
    best = {layout: names["float32"] for layout, names in summary["best_peer"].items()}
    assert set(best) == layouts - alone
    for stage in ("z1", "z2", "z3"):
        assert best.get(f"dp2.{stage}", f"fsdp2 {stage}") in (f"fsdp2 {stage}", f"deepspeed {stage}")
    for layout in best.keys() & {"tp2", "pp2", "pp2:3-1"}:
        assert best[layout] == f"{'dtensor' if layout == 'tp2' else 'pipelining'} {layout}"
    if "dp2" in layouts:
        assert rates[best["dp2"]] == max(rates[name] for name in ("ddp dp2", "hf dp2") if name in rates)
    assert all(ratio["float32"] > 0 for ratio in summary["ratio_to_best_peer"].values())


def test_another_checkout_is_compared_in_its_own_processes(report_of: Report) -> None:
    root = Path(__file__).parents[2]
    report = report_of("static", "--quick", "--against", str(root), "--layouts", "u2")
    assert {(row["system"], row["layout"]) for row in report["rows"]} == {(name, "u2") for name in ("before", "longshift", "compiled")}
    assert report["summary"]["ratio_to_before"]["u2"]["float32"]["ratio"] > 0
    assert 0 <= report["summary"]["loss_difference"]["float32"] < 1e-5
