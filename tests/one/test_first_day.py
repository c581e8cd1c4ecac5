"""The script of a GPU's first day, where there is none: it foretells its figures, writes them as it goes, and goes on where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "first_day.py"
ABSENT = "pydantic", "yaml", "rich", "psutil", "datasets", "pyarrow", "tokenizers", "cyclopts"


def first_day(out: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The results, and what was printed."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--out", str(out), "--commit", "one", *words]
    beside = {**os.environ, "PYTHONPATH": str(out.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=beside)
    return json.loads(out.read_text()), done.stdout + done.stderr


def test_without_a_gpu_it_foretells_and_counts_and_goes_on_where_it_was(tmp_path: Path):
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot make up a device")
    out = tmp_path / "day.json"
    found, said = first_day(out, "--device", "fake", "--layers", "1", "--parts", "home", "profiles")
    assert found["parts"]["home"]["state"] == found["parts"]["profiles"]["state"] == "done", said
    device, host = found["parts"]["home"]["rows"]
    for row in (device, host):
        foretold, counted = row["forecast"], row["counted"]
        assert 0.98 <= row["over_ledger"] <= 1.0
        assert foretold["seconds"] > 0
        computed = foretold["flops_per_s"]["computed"] * foretold["seconds"]
        assert computed == pytest.approx(counted["matmul_flops"] + counted["attention_flops"], rel=1e-6)
        assert foretold["flops_per_s"]["causal"] < foretold["flops_per_s"]["full"]
    assert host["counted"]["device_peak_gib"] < device["counted"]["device_peak_gib"] - 5
    assert found["versions"]["torch"]
    assert found["commit"] == "one"
    assert {row["layout"] for row in found["parts"]["profiles"]["rows"]} == {"recompute-full"}
    assert all(row["forecast"]["lanes"]["compute"] > 0 for row in found["parts"]["profiles"]["rows"])
    out.write_text(json.dumps(found | {"parts": {**found["parts"], "profiles": found["parts"]["profiles"] | {"commit": "zero"}}}))
    again, said = first_day(out, "--device", "fake", "--layers", "1", "--parts", "home", "profiles")
    assert "== home: done before" in said
    assert "== profiles\n" in said
    assert again["parts"]["home"] == found["parts"]["home"]


def test_a_part_that_does_not_end_is_ended_and_one_that_fails_says_why(tmp_path: Path):
    """It measures on a small model, and finds little beside torch; what was found before stays."""
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    found, said = first_day(tmp_path / "a.json", "--device", "cpu", "--layers", "1", "--parts", "profiles", "--deadline", "0.01")
    assert found["parts"]["profiles"]["state"] == "deadline", said
    found, said = first_day(tmp_path / "a.json", "--device", "cpu", "--machine", "h900", "--parts", "home")
    assert found["parts"]["home"]["state"] == "fault"
    assert any("h900" in line for line in found["parts"]["home"]["why"])
    assert found["parts"]["profiles"]["state"] == "deadline"
    found, said = first_day(tmp_path / "a.json", "--device", "cpu", "--layers", "1", "--parts", "home")
    device, host = found["parts"]["home"]["rows"]
    assert found["parts"]["home"]["state"] == "done", said
    assert all(row["measured"]["tokens_per_s"] > 0 and row["forecast"]["seconds"] > 0 for row in (device, host))
    assert device["measured"]["loss"] == host["measured"]["loss"]
