"""The benchmark of long documents: every method computes the same loss, tiers report what they moved, ratios and fits are there."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Report

import longshift

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report(report_of: Report) -> dict:
    methods = ["recompute", "selective", "selective tiled", "recompute+offload", "stream", "stream kv-offload"]
    sizes = ["--lengths", "1K", "2K", "--chunk", "512", "--rounds", "1", "--threads", "1"]
    return report_of("long_context", *sizes, "--methods", *methods)


def test_all_methods_train_the_same_model(report):
    assert len(report["rows"]) == 12
    for tokens in (1024, 2048):
        losses = [row["loss"] for row in report["rows"] if row["tokens"] == tokens]
        assert max(losses) - min(losses) < 1e-3 * losses[0]


def test_what_moves_is_told(report):
    moved = {(row["method"], row["tokens"]): row.get("fetched_mib") for row in report["rows"]}
    assert moved["recompute", 2048] is None
    assert moved["stream kv-offload", 2048] > moved["stream", 2048] > moved["recompute+offload", 2048] > 0


def test_the_summary_compares_at_every_length(report):
    assert set(report["summary"]["stream / recompute"]) == set(report["summary"]["stream / selective"]) == {"1024", "2048"}


def test_every_rung_of_the_ladder_trains(report_of: Report):
    sizes = ["--plain", "--ranks", "1", "--width", "64", "--layers", "1", "--most", "2K", "--chunk", "512"]
    found = report_of("long_ladder", *sizes)
    assert [row["rung"] for row in found["rows"]] == ["plain", "+AC", "+AC +OC", "fpdt", "stream"]
    assert all(row["longest_tokens"] == 2048 for row in found["rows"])
    assert found["summary"]["compared"]["1"]["times_longer"] == 1


ABSENT = "pydantic", "yaml", "rich", "psutil", "datasets", "pyarrow", "tokenizers", "cyclopts"


def test_the_script_for_gpus_needs_little_beside_torch(tmp_path):
    """On the CPU, where nothing moves and no kernel is a GPU's."""
    script, trace = BENCHMARKS / "gpu" / "long_context.py", tmp_path / "trace.json"
    without = f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT})); runpy.run_path({str(script)!r}, run_name='__main__')"
    sizes = ["--device", "cpu", "--lengths", "512", "--chunks", "128", "--layers", "1", "--json", "--trace", str(trace)]
    done = subprocess.run([sys.executable, "-c", without, *sizes], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    losses = [row["loss"] for row in rows]
    assert len({row["method"] for row in rows}) == len(rows) == 7
    assert max(losses) - min(losses) < 1e-3 * losses[0]
    assert all(row["tokens_per_s"] > 0 and row["host_resident_gib"] > 0 for row in rows)
    assert json.loads(trace.read_text())["traceEvents"]


def test_copies_are_hidden_where_they_lie_under_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "longshift", longshift)  # the script's own takes its place till the test ends
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = runpy.run_path(str(BENCHMARKS / "gpu" / "steps.py"))
    spans = [("kernel", "a", 0, 10), ("kernel", "b", 5, 10), ("kernel", "c", 30, 5), ("gpu_memcpy", "Memcpy HtoD", 10, 10)]
    spans += [("gpu_memcpy", "Memcpy DtoH", 18, 14), ("gpu_memcpy", "Memcpy DtoD", 40, 10), ("cpu_op", "Memcpy HtoD", 0, 50)]
    events = [{"cat": cat, "name": name, "ts": start, "dur": length} for cat, name, start, length in spans]
    assert found["hidden"]({"traceEvents": [*events, {"ph": "M"}]}) == pytest.approx(7 / 22)  # 10 to 15 and 30 to 32, of 10 to 32
    assert found["hidden"]({"traceEvents": events[:3]}) is None


def test_a_device_that_is_not_there_holds_no_more_for_twice_the_tokens_and_computes_what_arithmetic_says():
    """Of attention a forward is 2 matmuls of half the scores, a backward 5: its output is kept. Of a block's weights the forward is
    computed twice."""
    script = str(BENCHMARKS / "gpu" / "long_context.py")
    sizes = ["--device", "fake", "--lengths", "16384", "32768", "--chunks", "4096", "--layers", "1", "--json", "--methods", "recompute"]
    command = [sys.executable, "-W", "ignore", script, *sizes, "stream kv-offload"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = {(row["method"], row["tokens"]): row for row in json.loads(done.stdout)["rows"]}
    block, head, width = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 4096 * 128256, 4096
    for (_, tokens), row in rows.items():
        assert row["matmul_flops"] == tokens * (8 * block + 6 * head)
        assert row["attention_flops"] == 7 * tokens**2 * width
        assert row["other_bytes"] > 2 * 4 * (block + head)  # the update alone reads that
    held = {key: row["device_peak_gib"] for key, row in rows.items()}
    assert held["stream kv-offload", 32768] < 1.001 * held["stream kv-offload", 16384]
    assert held["recompute", 32768] > 1.05 * held["recompute", 16384]
