"""The tables and charts of README.md and docs are those of the results that are kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import charts  # noqa: E402
import tables  # noqa: E402


def test_pages_say_what_the_results_say():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_a_number_that_was_changed_by_hand_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.md"
    page.write_text(tables.rewritten("before\n<!-- table: static -->\n<!-- end -->\nafter\n").replace("1.0", "1.5"))
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0
    assert page.read_text() == f"before\n<!-- table: static -->\n{tables.static()}\n<!-- end -->\nafter\n"


def test_every_table_is_on_one_page():
    shown = [name for page in tables.PAGES for _, name, _ in tables.BLOCK.findall(page.read_text())]
    assert sorted(shown) == sorted(tables.TABLES)


def test_charts_are_drawn_from_the_results_and_each_is_on_one_page():
    assert {path.stem: path.read_text() for path in charts.ASSETS.glob("*.svg")} == {
        name: charts.svg(chart()) for name, chart in charts.CHARTS.items()
    }
    shown = [name for page in tables.PAGES for name in re.findall(r"assets/(\S+)\.svg\)", page.read_text())]
    assert sorted(shown) == sorted(charts.CHARTS)


@pytest.mark.parametrize("section", [None, "by length"])
def test_a_report_is_kept_with_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str | None):
    printed = {"benchmark": "gpu/some", "commit": "1a2b", "summary": {"a": 1}, "rows": [{"x": 1}, {"x": 2}]}
    (tmp_path / "report.json").write_text(json.dumps(printed))
    monkeypatch.setattr(tables.kept, "RESULTS", tmp_path)
    tables.keep(tmp_path / "report.json", section)
    found = tables.result("gpu_some", section)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.pop("date"))
    assert found == {key: value for key, value in printed.items() if section is None or key != "benchmark"}
