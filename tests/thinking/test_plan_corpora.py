"""`benchmarks/plan_corpora.py --quick`: a plan is never slower than what it is compared with."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_plan_is_compared_with_single_layouts_and_padding():
    command = [sys.executable, str(ROOT / "benchmarks" / "plan_corpora.py"), "--quick", "--json"]
    (row,) = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)["rows"]
    assert row["candidates"] == 16_800
    assert row["single_over_auto"] >= 1
    assert row["context_parallel_over_auto"] >= 1
    assert row["padded_over_auto"] > 1.2
