"""Every word of a layout at the width of Llama 3 8B, on a device that is not there: the ledger says what tensors take, what is sent and
what is computed."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]
DEFAULTS = {"1f1b", "z0"}  # a layout is written without them
REPLACED = {"chunk-auto", "recompute-auto"}  # become something else before ranks start


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot make up a device")
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "ledger_fake.py"), "--words"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def word(text: str) -> str:
    """Without its numbers."""
    return re.sub(r"\d+(K|:[\d-]+)?", "", text) if not re.fullmatch(r"z\d", text) else text


def test_every_word_of_the_reference_is_played(rows: list[dict[str, Any]]):
    table = (ROOT / "docs/reference/layout.md").read_text()
    explained = {word(text) for text in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)} - {word(text) for text in DEFAULTS}
    played = {word(one) for row in rows for one in row["layout"].split(".")}
    assert {"dp", "tp", "every", "fpdt", "z3"} <= explained
    assert explained - REPLACED <= played


def test_the_ledger_says_what_tensors_take(rows: list[dict[str, Any]]):
    ratios = {row["layout"]: row["ratio"] for row in rows}
    assert all(0.98 <= ratio <= 1.0 for ratio in ratios.values()), ratios


def test_the_ledger_says_what_is_sent_and_computed(rows: list[dict[str, Any]]):
    for row in rows:
        assert row["sent"] == row["sent_predicted"], row["layout"]
        assert row["flops"] == row["flops_predicted"] > 0, row["layout"]
