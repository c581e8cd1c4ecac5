"""What a notebook shows, by cells that a real kernel runs: no escape sequences of terminals, one line for progress, tables."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import longshift as ls
from longshift.print_result import CommandResult, html_of
from longshift.trainer.metrics import StepMetrics

ROOT = Path(__file__).parents[2]
CELLS = """\
import sys
sys.path.insert(0, 'SRC')
import longshift as ls
---
ls.data('run.yaml')
---
steps = list(ls.train('run.yaml', 'layout=LAYOUT', 'save.dir=LAYOUT'))
---
steps
---
steps[-1]
---
(run,) = ls.report('LAYOUT')
run
"""
CONFIG = """\
model: {preset: tiny-llama}
data: {train: [{path: "*.txt"}], max_len: 64, overlong: split, cache: cache, tokenizer: tokenizer.json}
train: {tokens_per_step: 64, steps: 3, lr: 1e-3, warmup: 0, precision: float32}
layout: dp1
save: {dir: run}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    from longshift.documents.tokenizer import train as train_tokenizer

    place = tmp_path_factory.mktemp("notebook")
    text = Path(re.__file__).read_text()
    for n in range(4):
        (place / f"{n}.txt").write_text(text[500 * n : 500 * n + 100 + 100 * n])
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    (place / "run.yaml").write_text(CONFIG)
    return place


@pytest.mark.parametrize("layout", ["dp1", "dp2"])  # in the kernel, and in processes that it starts
def test_a_kernel_shows_one_line_of_progress_and_tables(place: Path, layout: str):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = CELLS.replace("SRC", str(Path(ls.__file__).parents[1])).replace("LAYOUT", layout).split("---\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    shown = [cell.outputs for cell in notebook.cells]
    assert "\x1b" not in str(shown)
    assert "\\x1b" not in str(shown)
    facts, training, steps, step, run = shown[1:]
    assert "<th>max_len</th>" in facts[-1].data["text/html"]
    bars = [output for output in training if output.output_type == "display_data"]
    assert len(bars) == 1
    assert '<progress value="3" max="3"></progress>' in bars[0].data["text/html"]
    assert bars[0].data["text/plain"].startswith("step 3/3  loss ")
    (listed,) = steps
    assert [len(line) < 100 for line in listed.data["text/plain"].splitlines()] == [True] * 3
    assert "<td>grad_norm</td>" in step[0].data["text/html"]
    assert "<td>&#x27;tiny-llama&#x27;</td>" in run[0].data["text/html"]
    assert len(run[0].data["text/plain"]) < 400


def test_a_result_is_short_in_words_and_a_table_in_html():
    """A result of its own; markup of terminals and of HTML in it is shown as it stands."""

    class Result(CommandResult):
        name: str
        loss: float
        rows: tuple[int, ...]

    result = Result(name="<b>[red]", loss=1.23456789, rows=tuple(range(1000)))
    assert repr(result) == "Result(name='<b>[red]', loss=1.23457, rows=<1000 items>)"
    assert "<td>name</td><td>&#x27;&lt;b&gt;[red]&#x27;</td>" in result._repr_html_()
    assert html_of("a < b") == '<div style="white-space: pre-wrap">a &lt; b</div>'


def test_a_step_is_short_in_words_and_a_table_in_html():
    step = StepMetrics(3, 4.98765, 0.7, 6e-4, 8000, 7900, 12, 1.25, 6935.2, 73e9, 562 << 20, 78)
    assert repr(step) == "StepMetrics(step=3, loss=4.9877, tokens_per_s=6935, seconds=1.25)"
    assert "<tr><td>loss</td><td>4.98765</td></tr>" in step._repr_html_()


def test_a_bar_shows_nothing_where_no_notebook_is(monkeypatch, capsys):
    from longshift import terminal

    for shell in (None, SimpleNamespace()):  # Python, and IPython in a terminal
        monkeypatch.setitem(terminal.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        terminal.NotebookBar().show("step", 1, 2)
    assert capsys.readouterr() == ("", "")
