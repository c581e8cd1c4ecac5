"""`benchmarks/plan_corpora.py --quick`: a plan is never slower than what it is compared with."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_plan_is_compared_with_single_layouts_and_padding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["plan_corpora.py", "--quick", "--json"])
    import plan_corpora

    plan_corpora.main()
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["candidates"] == 10_080
    assert row["single_over_auto"] >= 1
    assert row["context_parallel_over_auto"] >= 1
    assert row["padded_over_auto"] > 1.2
