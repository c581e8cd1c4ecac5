"""What runs of before have written in layouts is read in today's words; in a new config it is an error."""

import json
from pathlib import Path

import pytest

from longshift.config_file import load_config
from longshift.errors import UsageError
from longshift.layout.auto_layout import current_words
from longshift.layout.layout import Layout
from longshift.trainer.plan_file import PlanFile

CONFIG = """
model: {preset: tiny-llama}
data: {train: [{corpus: python}], max_len: 2K}
train: {tokens_per_step: 4K, steps: 4, lr: 1e-3}
layout: [{upto: 1K, use: dp2.recompute-full.z1.keep-output}, {upto: 2K, use: u2.chunk1K.host.keep-input}]
save: {dir: run}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dp2.tp2", "dp2.tp2"),
        ("rows8K", "dp1"),
        ("dp4.z3.rows-auto", "dp4.z3"),
        ("u2.chunk64K.rows512.host", "u2.chunk64K.host"),
        ("dp2.recompute-full.z1.keep-output", "dp2.recompute-full.z1"),
        ("recompute-full.keep4.host.keep-output", "recompute-full.keep4.host"),
        ("pp2.recompute-attention.keep2.z1", "pp2.recompute-full.keep2.z1"),
        ("u2.chunk64K.host.keep-input.kv-offload", "u2.chunk64K.every1.host.kv-offload"),
        ("chunk-auto.disk.keep-input", "chunk-auto.every1.disk"),
        ("chunk64K.every4.host.keep-input", "chunk64K.every4.host"),
        ("chunk64K.host.keep-input.kv-offload.fpdt", "chunk64K.host.kv-offload.fpdt"),
    ],
)
def test_an_old_layout_is_read_as_its_successor(old: str, new: str):
    assert current_words(old) == new
    assert str(Layout.parse(new)) == new


def test_only_a_config_that_a_run_has_written_has_old_words(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    with pytest.raises(UsageError, match="'keep-output' is not a layout word; here it is recompute-full"):
        load_config(file)
    (tmp_path / "env.json").write_text('{"packages": {}}')
    assert [str(edge.use) for edge in load_config(file).edges] == ["dp2.recompute-full.z1", "u2.chunk1K.every1.host"]
    with pytest.raises(UsageError, match="'keep-input' is not a layout word; here it is every1"):
        load_config(file, ["layout=chunk1K.keep-input"])


def test_an_old_plan_is_read_in_the_words_of_today():
    old = {"asked": "auto", "choices": ["dp2.recompute-full.keep-output", [{"upto": 1024, "use": "dp2.recompute-attention"}]], "chosen": 0}
    plan = PlanFile.from_json(json.dumps(old))
    assert plan.layout == "dp2.recompute-full"
    assert plan.choices[1] == [{"upto": 1024, "use": "dp2.recompute-full"}]
