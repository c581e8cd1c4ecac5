"""`longshift report`: what a run's folder says, in one page that a browser opens without a network."""

import argparse
import collections
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_pages import BROWSER, is_too_wide, opened, visible

import longshift as ls
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import CheckpointError, UsageError
from longshift.reports.read import SERIES, RunReport, read_run
from longshift.reports.run_page import kept_steps
from longshift.trainer.metrics import read_rows
from longshift.trainer.run_folder import Cause

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
    shown = visible(opened(page, "--dump-dom"))
    for word in ("Settings that differ", "train.lr", "0.003", "Validation by length", "chunk128.disk", "a&lt;b&gt;&amp;c"):
        assert word in shown, word
    assert "a<b>" not in shown
    assert re.findall("<h2>(.*?)</h2>", shown)[0] == "Loss"
    assert "Predicted seconds are not drawn" in shown
    assert "no run has validated" not in shown
    assert shown.count("<svg") == 6
    assert "NaN" not in shown
    assert not is_too_wide(page)
    pictures = []
    for scheme in (0, 1):  # dark, light
        picture = tmp_path / f"{scheme}.png"
        opened(page, f"--screenshot={picture}", "--window-size=1100,2400", f"--blink-settings=preferredColorScheme={scheme}")
        pictures.append(picture.read_bytes())
    assert all(len(picture) > 40_000 for picture in pictures)  # a blank page has 8 KB
    assert pictures[0] != pictures[1]


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_curves_of_a_chart_have_colours_of_their_own(runs: tuple[Path, Path], tmp_path: Path):
    """Two runs, of which one has validated: three curves of the loss, and four of the memory, whose hues are 30 degrees apart at least."""
    page = tmp_path / "page.html"
    assert longshift("report", *runs, "--to", page).returncode == 0
    answer = """<script>document.title = JSON.stringify([...document.querySelectorAll('figure')].map(figure => [
      ...figure.querySelectorAll('.keys button')].map(key => getComputedStyle(key, '::before').backgroundColor
        + getComputedStyle(key, '::before').backgroundImage)))</script>"""
    page.write_text(page.read_text() + answer)
    (title,) = re.findall("<title>(.*?)</title>", opened(page, "--dump-dom"))
    hues = [[float(re.findall(r"oklch\(\S+ \S+ ([0-9.]+)", key)[0]) for key in keys] for keys in json.loads(title) if keys]
    assert [len(keys) for keys in hues] == [3, 2, 2, 2, 2, 4]
    for keys in hues:
        for first, second in itertools.combinations(keys, 2):
            assert 30 <= (first - second) % 360 <= 330


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_the_toolbar_changes_every_chart(runs: tuple[Path, Path], tmp_path: Path):
    """Tokens in place of steps, a logarithm, smoothing, then the half of a chart that is dragged over."""
    page = tmp_path / "page.html"
    assert longshift("report", runs[0], "--to", page).returncode == 0
    answer = """<script>
    const seen = {}
    function see(name) {
      const texts = [...document.querySelector('figure svg').querySelectorAll('text')].map(text => text.textContent)
      seen[name] = { texts, raw: document.querySelectorAll('svg .raw').length, units: document.querySelectorAll('svg').length,
        points: document.querySelector('figure svg .line:not(.raw)').getAttribute('d').split('L').length,
        line: document.querySelector('figure svg .line:not(.raw)').getAttribute('d') }
    }
    function put(name, change) {
      const input = Object.assign(document.querySelector(name), change)
      input.dispatchEvent(new Event('input', { bubbles: true }))
    }
    see('steps')
    put('[value="1"]', { checked: true }); see('tokens')
    put('[name=logy]', { checked: true }); see('log')
    put('[name=smooth]', { value: 0.9 }); see('smooth')
    const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect()
    function point(type, share) {
      plot.dispatchEvent(new PointerEvent(type, { clientX: box.left + share * box.width, pointerType: 'mouse' }))
    }
    point('pointerdown', .5)
    point('pointermove', .9)
    seen.tip = document.querySelector('.tip').textContent
    point('pointerup', 1)
    see('part')
    document.querySelector('.tools button').click(); see('whole')
    document.title = JSON.stringify(seen)
    </script>"""
    page.write_text(page.read_text() + answer)
    (title,) = re.findall("<title>(.*?)</title>", opened(page, "--dump-dom"))
    seen = json.loads(title)
    assert [seen[name]["texts"][-2] for name in ("steps", "tokens")] == ["steps", "tokens"]
    assert seen["log"]["line"] != seen["tokens"]["line"] != seen["steps"]["line"]
    assert (seen["log"]["raw"], seen["smooth"]["raw"]) == (0, 6)
    assert [seen[name]["points"] for name in ("smooth", "part", "whole")] == [6, 3, 6]
    assert seen["whole"]["line"] == seen["smooth"]["line"]
    assert re.match(r"tokens: \S+training: \d", seen["tip"])


def test_a_long_run_is_thinned_and_its_spikes_stay():
    """40,000 steps with a spike at step 12,345, and an update that was skipped: under 2 MB."""
    steps = list(range(1, 40_001))
    series = {name: [2.0 + step % 7 for step in steps] for name in SERIES}
    series["loss"][12_344] = 99.0
    series["grad_norm"][777] = None
    run = RunReport(name="long", facts={}, config={}, steps=steps, series=series, groups=[], predicted=[], valid=[], memory={})
    kept = kept_steps(run)
    assert {0, 12_344, 39_999} <= set(kept.tolist())
    assert len(kept) < 3_000
    assert (kept_steps(run.model_copy(update={"steps": steps[:900]})) == range(900)).all()


def test_nothing_in_the_page_is_fetched(runs: tuple[Path, Path]):
    assert longshift("report", runs[0]).returncode == 0
    text = (runs[0] / "report.html").read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=|@import|url\(|fetch\(", text)
    assert 'name="viewport"' in text
    assert len(text) < 100_000


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
    (cut / "errors" / "rank-1.json").write_text(Cause(rank=1, kind="Exit", message="no room", exit_code=7, time_s=0.0).to_json())
    assert read_run(cut).facts["ended"] == "failed after step 3: no room"
    (cut / "metrics.jsonl").write_text('{"step": 1, "what": 2}\n')
    with pytest.raises(CheckpointError, match="has a row that no step has written"):
        read_run(cut)
    done = longshift("report", tmp_path / "none")
    assert done.returncode == 4
    assert "is not a run folder" in done.stderr
    assert "Traceback" not in done.stderr
