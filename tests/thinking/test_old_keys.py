"""Keys of earlier versions: who writes one is told what it is now, and the config of an older run reads as what it means today."""

from pathlib import Path

import pytest

from longshift.config_file import load_config, parse_config
from longshift.errors import UsageError
from longshift.other_tools import FORMATS, PACK, REMOVED, RENAMED

GOOD = """\
model: {preset: tiny-llama}
data: {train: [{corpus: python}], max_len: 1K, overlong: split}
train: {tokens_per_step: 4K, steps: 4, lr: 1e-3}
save: {dir: runs/demo}
"""


@pytest.mark.parametrize("key", [*RENAMED, *REMOVED])
def test_an_old_key_is_refused_with_its_successor(key: str):
    successor = f"it is {RENAMED[key]} now" if key in RENAMED else REMOVED[key].instead
    with pytest.raises(UsageError) as caught:
        parse_config(GOOD, [f"{key}=1"])
    place = key.replace("data.valid", "data.valid.0")
    assert f"command line: {place}: no such key; {successor}" in str(caught.value)


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("sources", ["train", "valid"])
def test_a_field_of_a_source_is_part_of_its_format(sources: str, key: str):
    with pytest.raises(UsageError) as caught:
        parse_config(GOOD, [f"data.{sources}=[{{path: a.jsonl, {key}: body}}]"])
    assert f"data.{sources}.0.{key}: no such key; it is format now, as in format: {{{FORMATS[key]}}}" in str(caught.value)


@pytest.mark.parametrize("key", ["train.pack_tokens=8K", "train.stages=[{steps: 4, train.pack_tokens: 8K}]"])
def test_packs_are_of_a_group(tmp_path: Path, key: str):
    """Told to whoever writes the key; of an older run, each part has the packs that it had."""
    with pytest.raises(UsageError) as caught:
        parse_config(GOOD, [key])
    assert f"pack_tokens: no such key; {PACK}" in str(caught.value)
    file = tmp_path / "config.yaml"
    (tmp_path / "env.json").write_text('{"packages": {}}')
    single = "layout: dp2\n" + GOOD.replace("lr: 1e-3", "lr: 1e-3, pack_tokens: 4K")
    file.write_text(single)
    (edge,) = load_config(file).edges
    assert (edge.upto, str(edge.use), edge.pack) == (1024, "dp2", 4096)
    file.write_text(
        single.replace("4K, steps: 4", "4K, stages: [{steps: 1}, {steps: 3, data.max_len: 2K, layout: tp2, train.pack_tokens: 8K}]")
    )
    assert [(str(part.edges[0].use), part.edges[0].pack) for part in load_config(file).parts] == [("dp2", 4096), ("tp2", 8192)]


def test_the_config_of_an_older_run_is_translated(tmp_path: Path):
    said: list[str] = []
    file = tmp_path / "config.yaml"
    file.write_text(GOOD.replace("runs/demo", str(tmp_path)).replace("lr: 1e-3", "lr: 1e-3, frozen: 45, crowded: true"))
    with pytest.raises(UsageError, match="2 faults"):
        load_config(file)
    (tmp_path / "env.json").write_text('{"packages": {}}')
    assert load_config(file, say=said.append).train.stall_timeout == 45
    assert said == [f"train.crowded was True in the run: {REMOVED['train.crowded'].instead}"]
