"""`benchmarks/gpu/nccl.py` on a CPU: rows as they come, one that is wrong, and ranks that do not answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longshift.dist.fork import SpawnedWorld

DEADLINE_S = 200.0  # for seconds: the machine may be busy
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "nccl.py"
# What Python runs in each process when it starts.
MISTAKES = """
import time
from longshift.dist.collectives import Group, Pending
Group.reduce_scatter = lambda group, out, x: Pending(finish=lambda: out.copy_(x[group.index]))  # it sums nothing
meet = Group.meet
Group.meet = lambda group, device: time.sleep(1000) if group.index else meet(group, device)
"""


def nccl(out: Path, *words: str, mistakes: str = "") -> tuple[int, list[dict]]:
    """Exit code, and the rows that were printed; those of the report are the same."""
    (out.parent / "sitecustomize.py").write_text(mistakes)
    paths = [str(out.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(SCRIPT), "--backend", "gloo", "--out", str(out), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    *rows, summary = [json.loads(line) for line in done.stdout.splitlines()]
    report = json.loads(out.read_text())
    assert report["rows"] == rows, done.stderr
    assert report["summary"] == summary
    assert report["commit"]
    return done.returncode, rows


def test_collectives_bring_the_right_numbers_and_a_run_ends_with_its_rank(tmp_path: Path):
    code, rows = nccl(tmp_path / "nccl.json", "--parts", "collectives", "ends")
    assert code == 0, rows
    assert len(rows) == 8
    assert all(row["state"] == "right" for row in rows)
    assert [row["code"] for row in rows[-2:]] == [6, 6]


def test_wrong_numbers_and_a_hang_are_named_and_the_row_after_is_played(tmp_path: Path):
    words = ("--rows", "reduce_scatter", "send_both_ways", "uneven_exchanges", "--deadline", "15")
    code, rows = nccl(tmp_path / "nccl.json", "--parts", "collectives", *words, mistakes=MISTAKES)
    assert code == 1
    assert [row["state"] for row in rows] == ["wrong", "fault", "right"]
    hang = rows[1]["why"]
    assert "no answer from ranks [0, 1]" in hang
    assert "rank 1 stood in sitecustomize.py" in hang
    assert "in send_both_ways" in hang


def test_no_row_is_begun_without_time(tmp_path: Path):
    code, rows = nccl(tmp_path / "nccl.json", "--parts", "two", "--limit", "0")
    assert code == 1
    assert {row["state"] for row in rows} == {"no time"}


def test_ranks_that_are_no_forks_find_what_they_are_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ranks on a GPU are processes of their own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with SpawnedWorld(2) as world:
        watch = {"stacks": str(tmp_path), "stack_s": 100.0}
        for found in world.call("nccl_ranks:watched", DEADLINE_S, name="collective", kind="uneven_exchanges", **watch):
            assert found == {"difference": 0.0, "messages": 10}
