"""The benchmark of homes measures each of them, and a state that memory has no room for trains on disk."""

from forked import Report


def test_homes_are_compared(report_of: Report) -> None:
    report = report_of("state_tiers", "--quick", "--parts", "speed", "vertical", "adam", "file")
    rows = {row.get("home") or row.get("order") or row["part"]: row for row in report["rows"]}
    orders = ["dp1.z3.recompute-full", "dp1.z3.vertical.recompute-full"]
    assert list(rows) == ["device", "host", "disk", "split", "clipped", *orders, "adam", "file"]
    assert rows["device"]["moved_mib"] == rows["host"]["moved_mib"] == 0
    assert rows["disk"]["step_s"] >= rows["disk"]["moved_mib"] * 2**20 / report["summary"]["bandwidth"] > 0
    assert 0 < rows["split"]["moved_mib"] < rows["disk"]["moved_mib"]
    assert rows[orders[0]]["moved_mib"] > 1.2 * rows[orders[1]]["moved_mib"] > 0
    assert report["summary"]["vertical_ratio"] > 0
    assert min(rows["adam"][key] for key in ("ours_s", "clipped_s", "torch_s")) > 0
    assert min(rows["file"][key] for key in ("ours", "plain")) > 0


def test_formats_of_moments_learn_the_same(report_of: Report) -> None:
    rows = {row["format"]: row for row in report_of("state_tiers", "--quick", "--parts", "moments")["rows"]}
    formats = ["float32", "bf16", "float8"]
    assert list(rows) == [*formats, "again"]
    assert [round(rows[name]["state_bytes"], 1) for name in formats] == [12.0, 8.0, 6.1]
    assert rows["float8"]["state_bytes"] <= 6.1
    assert 0 < abs(rows["again"]["over_float32"] - 1) < abs(rows["float8"]["over_float32"] - 1) <= 0.005


def test_a_state_beyond_memory_trains_on_disk(report_of: Report) -> None:
    (limited,) = report_of("state_tiers", "--quick", "--parts", "memory")["rows"]
    assert limited["part"] == "memory"
    assert limited["state_mib"] == 4 * limited["limit_mib"]
    assert limited["capped_grew_mib"] <= limited["limit_mib"] < limited["whole_grew_mib"]
    assert limited["same_bits"]
    assert limited["host_fails"]
