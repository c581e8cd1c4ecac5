"""The benchmark of long documents: every method computes the same loss, tiers report what they moved, ratios and fits are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report():
    command = [sys.executable, str(BENCHMARKS / "long_context.py"), "--json", "--lengths", "1K", "2K", "--chunk", "512", "--rounds", "1"]
    methods = ["recompute", "selective", "selective tiled", "recompute+offload", "stream", "stream kv-offload"]
    done = subprocess.run([*command, "--threads", "1", "--methods", *methods], capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


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


def test_every_rung_of_the_ladder_trains():
    command = [sys.executable, str(BENCHMARKS / "long_ladder.py"), "--json", "--plain", "--ranks", "1", "--width", "64", "--layers", "1"]
    done = subprocess.run([*command, "--most", "2K", "--chunk", "512"], capture_output=True, text=True, timeout=240, check=True)
    found = json.loads(done.stdout)
    assert [row["rung"] for row in found["rows"]] == ["plain", "+AC", "+AC +OC", "fpdt", "stream"]
    assert all(row["longest_tokens"] == 2048 for row in found["rows"])
    assert found["summary"]["compared"]["1"]["times_longer"] == 1
