"""The script of a GPU's first day, where there is none: it foretells its figures, writes them as it goes, and goes on where it was."""

import json
import os
import runpy
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
    again, said = first_day(out, "--device", "fake", "--layers", "1", "--parts", "home", "profiles")
    assert said == "== home: done before\n== profiles: done before\n"
    assert again == found


@pytest.mark.parametrize(
    ("code", "rows", "state"),
    [
        ("print('{\"a\": 1}'); print('other words')", [{"a": 1}], "done"),
        ("import time; print('{\"a\": 1}', flush=True); time.sleep(60)", [{"a": 1}], "deadline"),
        ("print('{\"a\": 1}'); raise ValueError('of this')", [{"a": 1}], "fault"),
    ],
)
def test_rows_are_kept_however_a_part_ends(tmp_path: Path, code: str, rows: list, state: str):
    deadline_s = 3.0 if state == "deadline" else 60.0
    *found, last = runpy.run_path(str(SCRIPT))["rows_of"]([sys.executable, "-c", code], deadline_s, tmp_path / "errors")
    assert found == rows
    assert last["state"] == state
    assert ("ValueError: of this" in last.get("why", ())) == (state == "fault")


def test_what_there_is_is_measured_with_little_beside_torch(tmp_path: Path):
    """On the CPU, a small model. A part that was not done is played again."""
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    out = tmp_path / "day.json"
    out.write_text(
        json.dumps({"device": "cpu", "parts": {"home": {"state": "fault", "commit": "one", "rows": []}, "law": {"state": "done"}}})
    )
    found, said = first_day(out, "--device", "cpu", "--layers", "1", "--parts", "home", "rows")
    assert found["parts"]["home"]["state"] == found["parts"]["rows"]["state"] == "done", said
    assert found["parts"]["law"] == {"state": "done"}
    device, host = found["parts"]["home"]["rows"]
    assert all(row["measured"]["tokens_per_s"] > 0 and row["forecast"]["seconds"] > 0 for row in (device, host))
    assert device["measured"]["loss"] == host["measured"]["loss"]
    first, *others = (row["measured"]["loss"] for row in found["parts"]["rows"]["rows"])
    assert others == pytest.approx([first] * 2, rel=1e-6)
