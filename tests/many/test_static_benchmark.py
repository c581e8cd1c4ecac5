"""The benchmark against other systems runs, measures every layout and finds that all systems train the same."""

from pathlib import Path

import pytest
from forked import Report

LAYOUTS = {"dp2", "dp2.z1", "dp2.z2", "dp2.z3", "dp2.z2,host", "tp2", "pp2", "pp2:3-1", "u2", "ring2"}


@pytest.fixture(scope="module")
def report(report_of: Report) -> dict:
    return report_of("static", "--quick")


def test_every_layout_and_peer_is_measured(report: dict) -> None:
    rows = {(row["system"], row["layout"]): row for row in report["rows"]}
    expected = {("longshift", layout) for layout in LAYOUTS} | {("fsdp2", f"z{stage}") for stage in (1, 2, 3)}
    expected |= {("ddp", "dp2"), ("dtensor", "tp2"), ("pipelining", "pp2"), ("pipelining", "pp2:3-1")}
    assert expected <= set(rows)
    for system in ("deepspeed", "hf"):
        assert (system in report["summary"]["skipped"]) != any(name == system for name, _ in rows)
    for row in rows.values():
        assert row["dtype"] == "float32"
        assert row["tokens_per_s"] > 0
        assert row["peak_mib"] > row["base_mib"] > 0
        assert row["spread"] >= 0


def test_ratios_are_to_the_best_like_for_like_peer(report: dict) -> None:
    rates = {f"{row['system']} {row['layout']}": row["tokens_per_s"] for row in report["rows"]}
    summary = report["summary"]
    alone = {"u2", "ring2"} | ({"dp2.z2,host"} if "deepspeed" in summary["skipped"] else set())
    assert set(summary["ratio_to_best_peer"]) == LAYOUTS - alone, "no system here cuts the sequence"
    assert set(summary["ratio_to_best_data_parallel"]) == LAYOUTS
    assert summary["best_peer"]["dp2.z2"]["float32"] in ("fsdp2 z2", "deepspeed z2")
    assert summary["best_peer"]["dp2.z3"]["float32"] in ("fsdp2 z3", "deepspeed z3")
    assert summary["best_peer"]["tp2"]["float32"] == "dtensor tp2"
    dense = summary["best_peer"]["dp2"]["float32"]
    assert rates[dense] == max(rates[name] for name in ("ddp dp2", "hf dp2") if name in rates)
    assert all(ratio["float32"] > 0 for ratio in summary["ratio_to_best_peer"].values())


def test_all_systems_train_the_same(report: dict) -> None:
    assert 0 < report["summary"]["loss_difference"]["float32"] < 1e-4


@pytest.mark.long
def test_another_checkout_is_compared_in_its_own_processes(report_of: Report) -> None:
    root = Path(__file__).parents[2]
    report = report_of("static", "--quick", "--against", str(root), "--layouts", "u2")
    assert {(row["system"], row["layout"]) for row in report["rows"]} == {(name, "u2") for name in ("before", "longshift", "compiled")}
    assert report["summary"]["ratio_to_before"]["u2"]["float32"]["ratio"] > 0
    assert 0 <= report["summary"]["loss_difference"]["float32"] < 1e-5
