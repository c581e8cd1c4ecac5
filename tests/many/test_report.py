"""`longshift report`: what a run's folder says, in one page that a browser opens without a network."""

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_pages import BROWSER, opened

import longshift as ls
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import UsageError
from longshift.reports.read import read_run
from longshift.trainer.metrics import read_rows

CONFIG = """
model: {preset: tiny-llama}
data: {train: [{path: PLACE/*.txt}], tokenizer: PLACE/tokenizer.json, max_len: 256, overlong: split, held_out: 0.05, cache: PLACE/cache}
train: {tokens_per_step: 512, steps: 4, lr: 3e-3, precision: float32}
validation: {every: 2, tokens: 256}
layout: [{upto: 240, use: dp1}, {upto: 256, use: chunk128.disk}]
save: {dir: RUN, every: 2}
"""


def longshift(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "longshift.cli", *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A run that was resumed, and one with another learning rate, on one rank."""
    place = tmp_path_factory.mktemp("runs")
    source = Path(argparse.__file__).read_text()
    for n in range(200):
        (place / f"{n}.txt").write_text(source[300 * n :][: 20 * n + 20])
    train_tokenizer(iter([source]), 300).save(str(place / "tokenizer.json"))
    text = CONFIG.replace("PLACE", str(place)).replace("RUN", str(place / "first"))
    (place / "run.yaml").write_text(text)
    (place / "plain.yaml").write_text(re.sub(r"validation: .*|held_out: 0.05, ", "", text))
    collections.deque(ls.train(place / "run.yaml"), maxlen=0)
    collections.deque(ls.train(place / "run.yaml", "train.steps=6", resume=True), maxlen=0)
    collections.deque(ls.train(place / "plain.yaml", f"save.dir={place}/a<b>&c", "train.lr=1e-3", "layout=dp1"), maxlen=0)
    return place / "first", place / "a<b>&c"


def test_the_numbers_are_those_of_the_metrics(runs: tuple[Path, Path]):
    done = longshift("report", *runs, "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["runs"]
    rows = read_rows(runs[0] / "metrics.jsonl")
    assert first["steps"] == [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for name, values in first["series"].items():
        assert values == [row[name] for row in rows]
    assert [row["loss"] for row in first["valid"]] == [row["valid_loss"] for row in rows if "valid_loss" in row]
    assert first["facts"]["starts"] == 2
    assert first["facts"]["ended"] == "finished"
    for group in first["groups"]:
        own = [g for row in rows for g in row["groups"] if g["upto"] == group["upto"]]
        assert group["tokens"] == sum(g["tokens"] for g in own)
        assert group["seconds"] == pytest.approx(sum(g["seconds"] for g in own))
    assert [group["layout"] for group in first["groups"]] == ["dp1", "chunk128.disk"]
    assert sum(group["tokens"] for group in first["groups"]) == first["facts"]["tokens"] == sum(row["tokens"] for row in rows)
    assert first["memory"]["disk"]["total"] > 0
    assert second["groups"] == second["valid"] == []


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_shows_it_in_light_and_dark(runs: tuple[Path, Path], tmp_path: Path):
    page = tmp_path / "page.html"
    done = longshift("report", *runs, "--to", page)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {page}\n"
    shown = re.sub(r"<script.*?</script>", "", opened(page, "--dump-dom"), flags=re.DOTALL)
    for word in ("Settings that differ", "train.lr", "0.003", "Validation by length", "chunk128.disk", "a&lt;b&gt;&amp;c"):
        assert word in shown, word
    assert "a<b>" not in shown
    assert "One layout computed all documents." in shown
    assert "No run has validated" not in shown
    assert shown.count('class="main-svg"') >= 8
    assert "Something went wrong" not in shown
    pictures = []
    for scheme in (0, 1):  # dark, light
        picture = tmp_path / f"{scheme}.png"
        opened(page, f"--screenshot={picture}", "--window-size=1100,2400", f"--blink-settings=preferredColorScheme={scheme}")
        pictures.append(picture.read_bytes())
    assert all(len(picture) > 40_000 for picture in pictures)  # a blank page has 8 KB
    assert pictures[0] != pictures[1]


def test_nothing_in_the_page_is_fetched(runs: tuple[Path, Path]):
    assert longshift("report", runs[0]).returncode == 0
    text = (runs[0] / "report.html").read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)


def test_a_run_that_was_cut_off_is_told_and_what_is_none_is_refused(runs: tuple[Path, Path], tmp_path: Path):
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("config.yaml", "env.json"):
        (cut / name).write_bytes((runs[0] / name).read_bytes())
    with pytest.raises(UsageError, match="has no step yet"):
        read_run(cut)
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    assert read_run(cut).facts["ended"] == "stands at step 3 of 6"
    (cut / "errors").mkdir()
    (cut / "errors" / "rank-1.json").write_text('{"message": "no room"}')
    assert read_run(cut).facts["ended"] == "failed after step 3: no room"
    (cut / "metrics.jsonl").write_text('{"step": 1, "what": 2}\n')
    with pytest.raises(UsageError, match="has a row that no step has written"):
        read_run(cut)
    done = longshift("report", tmp_path / "none")
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr
    assert "Traceback" not in done.stderr
