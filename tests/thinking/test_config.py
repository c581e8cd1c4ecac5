"""The config: read once, refused whole. Every fault is named with its file, line and key, all of them at once."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from longshift.config import Config
from longshift.config_file import load_config, parse_config
from longshift.errors import UsageError
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import UNITS, Layout, format_size, parse_size
from longshift.spec.families import PRESETS, to_hugging_face
from longshift.spec.formats import Wire
from longshift.starter import starter

GOOD = """\
model: {preset: tiny-llama}
data:
  train: [{corpus: python}, {path: "books/*.parquet", format: {text: body}}]
  max_len: 4K
  overlong: split
train: {tokens_per_step: 16K, steps: 100, lr: 3e-4}
layout: dp2.tp2
save: {dir: runs/demo}
"""


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse_config(text, overrides, name="run.yaml")
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"run.yaml: {len(lines)} fault{'s' * (len(lines) > 1)} in the config"
    return lines


@pytest.mark.parametrize(
    ("written", "paths"),
    [("a.txt", ["a.txt"]), ("{path: a.txt}", ["a.txt"]), ("[a.txt, {path: b.txt}]", ["a.txt", "b.txt"]), ("{corpus: python}", [None])],
)
def test_a_source_may_stand_alone_and_a_text_is_a_path(written, paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(GOOD)
    config = load_config("run.yaml", [f"data.train={written}"])
    assert [source.path for source in config.data.train] == [path and str(tmp_path / path) for path in paths]


def test_reads_what_is_written_and_fills_in_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(GOOD)
    config = load_config("run.yaml")
    assert config.layout == Layout(dp=2, tp=2)
    assert config.data.max_len == config.edges[0].pack == 4096
    assert config.train.tokens_per_step == 16384
    assert config.train.lr == 3e-4
    assert config.train.min_lr == pytest.approx(3e-5)
    assert "min_lr: null" in config.to_yaml()
    assert config.model.init == "scratch"
    assert config.spec is PRESETS["tiny-llama"]
    assert config.data.train[1].path == str(tmp_path / "books/*.parquet")
    assert config.save.dir == str(tmp_path / "runs/demo")


@given(
    lr=st.floats(1e-9, 1.0),
    steps=st.integers(1, 10**9),
    pack=st.none() | st.integers(4096, 2**40),
    clip=st.none() | st.floats(1e-3, 1e3),
    layout=st.sampled_from(["dp1", "pp2:3-1.dp2.tp2.z3", "u2.ring2", "pp2.gpipe.recompute-full"]),
)
def test_the_resolved_config_reads_back_as_itself(lr, steps, pack, clip, layout):
    groups = layout if pack is None else f"[{{upto: 4K, use: {layout}, pack: {pack}}}]"
    changes = [f"train.lr={lr!r}", f"train.steps={steps}", f"layout={groups}", f"train.clip={json.dumps(clip)}"]
    config = parse_config(GOOD, changes)
    assert (config.train.lr, config.train.steps, config.train.clip) == (lr, steps, clip)
    assert parse_config(config.to_yaml()) == config


@pytest.mark.parametrize("key", ["lr", "clip", "eps", "weight_decay", "min_lr"])
def test_yes_is_no_number(key):
    (line,) = faults(GOOD, f"train.{key}=yes")
    assert line.endswith(f"train.{key}: a number is needed, and YAML reads this as true")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["train.optimizer=adam"], "'adam' is not one of adamw, sgd; did you mean 'adamw'?"),
        (["train.momentum=0.8"], "momentum is of train.optimizer=sgd; adamw has train.betas: leave momentum out"),
        (["train.optimizer=sgd", "train.momentum=1"], "train.momentum: input should be less than 1"),
        (["train.optimizer=sgd", "train.betas=[0.8, 0.9]"], "betas is of train.optimizer=adamw; sgd has train.momentum: leave betas out"),
        (["train.optimizer=sgd", "train.eps=1e-6"], "eps is of train.optimizer=adamw"),
        (["train.optimizer=muon"], "'muon' is not one of adamw, sgd, nor package.module:name of your own code"),
        (["train.optimizer=my_rules:Lion", "train.eps=1e-6"], "eps is of train.optimizer=adamw; my_rules:Lion has numbers"),
        (["train.optimizer=my_rules:Lion", "train.momentum=0.8"], "momentum is of train.optimizer=sgd; my_rules:Lion has numbers"),
        (["train.optimizer=my_rules:Lion", "home.moments=float8"], "float8 keeps second moments as their roots"),
        (["train.loss=entropy"], "'entropy' is not one of cross-entropy; did you mean 'cross-entropy'?"),
        (["train.loss=my.losses"], "'my.losses' is not one of cross-entropy, nor package.module:name of your own code"),
    ],
)
def test_numbers_of_another_optimizer_are_refused(changes, told):
    (line,) = faults(GOOD, *changes)
    assert told in line


def test_config_of_a_users_own_code_is_read_without_it():
    """As for an export. Only what needs the moments, or plays the loss, loads it."""
    config = parse_config(GOOD, ["train.loss=gone:loss", "train.optimizer=gone:Rule", "home.moments=bf16"])
    assert config.spec == replace(config.model.spec, loss="gone:loss")
    with pytest.raises(UsageError, match="gone:Rule: there is no module gone"):
        _ = config.formats


def test_a_moment_is_there_where_its_optimizer_has_it():
    given = ([], ["train.optimizer=sgd"], ["train.optimizer=sgd", "train.momentum=0"])
    configs = [parse_config(GOOD, changes) for changes in given]
    assert [config.train.rule.moments for config in configs] == [("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ()]
    assert [config.formats.moments for config in configs] == [2, 1, 0]
    assert [parse_config(config.to_yaml()) for config in configs] == configs


def test_home_is_a_word_or_a_section():
    split = ["home={device: 8G, disk: rest}", "home.moments=float8"]
    changes = ["home=disk"], ["home=disk", "home.moments=float8"], [], split, ["home.device=1M", "home.host=2M", "home.disk=rest"]
    word, section, *_ = configs = [parse_config(GOOD, some) for some in changes]
    assert [(str(config.home.at), config.home.moments) for config in configs] == [
        ("disk", "float32"),
        ("disk", "float8"),
        ("device", "float32"),
        ("device 8G, disk rest", "float8"),
        ("device 1M, host 2M, disk rest", "float32"),
    ]
    assert [config.formats.moment_bytes for config in (word, section)] == [4, 1 + 4 / 128]
    assert [parse_config(config.to_yaml()) for config in configs] == configs


@given(st.integers(1, 2**50))
def test_sizes_read_back(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(("text", "size"), [("4K", 4096), ("1.5k", 1536), ("1M", 2**20), ("2G", 2**31), ("1e6", 10**6), ("7", 7)])
def test_sizes_are_binary(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "4KB", "0.3K", "four", "1/2", "nan", "inf"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="not a whole number"):
        parse_size(text)


def test_units_are_powers_of_1024():
    assert [UNITS[k] for k in "KMG"] == [1024, 1024**2, 1024**3]


def test_overrides_change_one_key_and_are_checked_like_the_file():
    config = parse_config(GOOD, ["train.lr=2e-5", "train.betas=[0.8, 0.99]", "data.max_len=8K", "save.trackers=tensorboard"])
    assert (config.train.lr, config.train.betas, config.data.max_len) == (2e-5, (0.8, 0.99), 8192)
    assert config.save.trackers == ("tensorboard",)
    assert config.train.steps == 100
    lines = faults(GOOD, "train.lrr=1", "trian.lr=1", "train.steps=many", "layout", "data.train.0.path=x", "data.overlong=[")
    assert [line.split(": ")[0] for line in lines] == ["command line"] * 6
    assert lines[0] == "command line: 'layout': an override is key=value, as in train.lr=2e-5"
    assert lines[1] == "command line: data.train.0.path: data.train.0 is not a section"
    assert any("train.lrr: no such key; did you mean 'lr'?" in line for line in lines)
    assert any("trian: no such key; did you mean 'train'?" in line for line in lines)


def test_all_faults_at_once_with_file_line_and_nearest_key():
    text = """\
model: {preset: tiny-lama}
data:
  train: [{corpus: python, pth: x}, 5]
  overlong: splitt
  max_len: 0
train:
  steps: 10
  tokens_per_step: 1.5
  lr: -1
  lr: 2
layout: dp2.zz2
sve: {dir: x}
"""
    lines = faults(text)
    expected = [
        "run.yaml:10: train.lr: given twice",
        "run.yaml:1: model: preset 'tiny-lama' does not exist; did you mean 'tiny-llama'?",
        "run.yaml:3: data.train.0.pth: no such key; did you mean 'path'?",
        "run.yaml:3: data.train.1: must be a section with the keys path, corpus, python, format, learn, epochs, weight",
        "run.yaml:4: data.overlong: 'splitt' is not one of split, truncate, drop; did you mean 'split'?",
        "run.yaml:5: data.max_len: input should be greater than or equal to 1, not 0",
        "run.yaml:8: train.tokens_per_step: input should be a valid integer, not 1.5",
        "run.yaml:12: sve: no such key; did you mean 'save'?",
        "run.yaml:1: save: must be given",
    ]
    assert set(expected) <= set(lines), "\n".join(lines)
    [layout] = [line for line in lines if line.startswith("run.yaml:11: layout: ")]
    assert "'zz2' is not a layout word" in layout
    assert len(lines) == len(expected) + 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("train.warmup=101", "warmup 101 is longer than the run of 100 steps"),
        ("train.min_lr=1", "min_lr 1 is above lr 0.0003"),
        ("train.steps=true", "train.steps: input should be a valid integer"),
        ("train.lr=nan", "train.lr: input should be a finite number"),
        ("model.init=pretrained", "a preset has no pretrained weights"),
        ("model.path=/", "exactly one of preset and path"),
        ("data.train=[]", "name at least one source"),
        ("data.train=[{}]", "exactly one of path, corpus and python"),
        ("data.tokenizer=/no/such", "tokenizer /no/such does not exist"),
        ("layout=[]", "layout: an empty list; name at least one group"),
        ("layout=7", "auto, one layout such as dp2.tp2, or groups of lengths"),
        ("layout=[dp4]", "'dp4': a group needs upto and use"),
        ("layout=[{upto: 4K, use: dp4, us: 1}]", "us: no such key of a group; did you mean 'use'?"),
        ("layout=[{use: dp4}]", "a group needs upto"),
        ("layout=[{upto: 4K, use: dp4, pack: 2K}]", "pack 2K of upto 4K (dp4) does not hold the group's longest document; write pack: 4K"),
        ("layout=[{upto: 4K, use: dp4, pack: 0}]", "pack: 0 is not a number of tokens"),
        ("layout=[{upto: 4K, use: dp4, pack: true}]", "pack: True is not a number of tokens"),
        ("layout=[{upto: 4K, use: dp4, pack: 8.3K}]", "pack: '8.3K' is"),
        ("layout=[{upto: 4K, use: dp4, packs: 8K}]", "packs: no such key of a group; did you mean 'pack'?"),
        ("layout=[{upto: 4K, use: dp4.chunk8, pack: 1M}]", "in packs of 1048576 of 131072, whose pairs are too many"),
        ("layout=[{upto: 1.5, use: dp4}]", "upto: 1.5 is not a number of tokens"),
        ("layout=[{upto: 4K, use: dq4}]", "'dq4' is not a layout word"),
        ("layout=[{upto: 4K, use: tp4}, {upto: 1K, use: dp4}]", "upto 1024 (dp4) comes after 4096 (tp4)"),
        ("layout=[{upto: 1K, use: dp4}]", "the last group, dp4, ends at 1K tokens and data.max_len is 4K; write its upto: 4K"),
        ("layout=[{upto: 1K, use: dp4}, {upto: 4K, use: tp2}]", "the same number of ranks: dp4 has 4, tp2 has 2"),
        ("layout=[{upto: 1K, use: dp4}, {upto: 4K, use: pp4.v2}]", "layout (upto 4K): pp4.v2 makes 4 x 2 = 8 stages"),
        ("layout=pp8", "pp8 makes 8 stages of at least one block, the model has 4: at most pp4"),
        ("train=3", "must be a section with the keys tokens_per_step"),
    ],
)
def test_each_fault_says_what_is_wrong(change, fault):
    lines = faults(GOOD, change)
    assert any(fault in line for line in lines), lines


def test_groups_of_lengths_read_back():
    groups = "layout=[{upto: 1K, use: dp4}, {upto: 4K, use: tp2.u2}]"
    config = parse_config(GOOD, [groups])
    assert [(edge.upto, str(edge.use)) for edge in config.edges] == [(1024, "dp4"), (4096, "u2.tp2")]
    assert config.world == 4
    assert parse_config(config.to_yaml()) == config
    assert [edge.pack for edge in parse_config(GOOD).edges] == [4096]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (["home=memory"], "home.at: 'memory' is not one of device, host, disk"),
        (["home={device: 8G}"], "home.at: say where the rest lies, as in host: rest"),
        (["home={device: rest, host: 8G}"], "home.at: the rest goes to the last of device, host: write host: rest"),
        (["home={device: much, host: rest}"], "home.at: device: 'much' is not a whole number"),
        (["layout=auto", "home={device: 8G, host: auto}"], "home.at: say where the rest lies, as in disk: rest"),
        (["home=auto"], "home: auto is chosen with layout: auto; write home: device, host or disk"),
        (["home.at=disk", "home.moments=int8"], "home.moments: 'int8' is not one of float32, bf16, float8"),
        (["home.moments=float8", "train.optimizer=sgd", "train.momentum=0"], "home.moments is a format of moments, and SGD keeps none"),
    ],
)
def test_where_the_training_state_cannot_lie(changes, fault):
    assert any(fault in line for line in faults(GOOD, *changes)), faults(GOOD, *changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (["wire.gradients=float8"], "with dp2.tp2 each keeps all that it computes with; write layout=dp2.tp2.z1 (or z2, z3)"),
        (["wire.weights=float8", "layout=tp2.recompute-full"], "write layout=tp2.recompute-full.z1 (or z2, z3)"),
        (["wire.gradients=int4", "layout=dp4.z2"], "wire.gradients: 'int4' is not one of float32, bf16, float8"),
        (["wire.weights=bf16", "layout=dp4.z2"], "wire.weights: 'bf16' is not one of compute, float8"),
        (["wire.weight=float8", "layout=dp4.z2"], "weights"),
        (["wire.weights=float8", "layout=[{upto: 1K, use: dp4}, {upto: 4K, use: tp4}]"], "wire.weights: float8 is for one layout"),
        (["wire.weights=float8", "layout=auto"], "wire.weights: float8 is for one layout"),
        (["wire.gradients=bf16", "layout={auto: {ranks: 4, z: [0]}}"], "write z: [1, 2, 3]"),
    ],
)
def test_what_does_not_travel_in_fewer_bits(changes, fault):
    assert any(fault in line for line in faults(GOOD, *changes)), faults(GOOD, *changes)


def test_formats_on_the_wire_are_those_of_the_run():
    groups = "layout=[{upto: 1K, use: dp4}, {upto: 4K, use: tp4}]"
    given = (
        [],
        ["wire.gradients=float8", groups],
        ["wire={gradients: bf16, weights: float8}", "layout=dp4.z3"],
        ["wire.gradients=bf16", "layout=dp1"],
    )
    configs = [parse_config(GOOD, changes) for changes in given]
    assert [config.formats.wire for config in configs] == [Wire(), Wire("float8"), Wire("bf16", "float8"), Wire("bf16")]
    assert [parse_config(config.to_yaml()) for config in configs] == configs


def test_a_group_has_a_pack_of_its_own():
    config = parse_config(GOOD, ["layout=[{upto: 1K, use: dp4, pack: 16K}, {upto: 4K, use: tp4}]"])
    assert [(edge.upto, edge.pack) for edge in config.edges] == [(1024, 16384), (4096, 4096)]
    assert parse_config(config.to_yaml()) == config
    assert config.to_yaml().count("pack:") == 1
    one = parse_config(GOOD, ["layout=[{upto: 4K, use: dp2.tp2}]"])
    assert one.edges == parse_config(GOOD).edges


@pytest.mark.parametrize("text", ["", "- a", "just text"])
def test_a_config_is_a_mapping(text):
    with pytest.raises(UsageError, match="a config is a mapping with the keys model, data, train, layout, home, save"):
        parse_config(text)


def test_a_file_that_is_no_yaml_or_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"is not YAML: .*line 1"):
        parse_config("a: [")
    with pytest.raises(UsageError, match="longshift init --to"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path / "bytes.yaml")


def test_a_model_folder_brings_its_spec(tmp_path):
    change = f"model={{path: {tmp_path}}}"
    assert any("holds no config.json" in line for line in faults(GOOD, change))
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(PRESETS["tiny-qwen3"])))
    config = parse_config(GOOD, [change])
    assert config.spec == PRESETS["tiny-qwen3"]
    assert config.model.init == "pretrained"
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert any("did you mean 'llama'" in line for line in faults(GOOD, change))


def test_a_config_is_frozen():
    config = parse_config(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0


@pytest.mark.parametrize("model", ["tiny-llama", "gpt2", "llama-3-8b"])
def test_the_starter_config_is_valid(model):
    data = ("books/*.jsonl", "a b: c.txt") if model == "gpt2" else ()
    config = parse_config(starter(model, data))
    assert config.model.preset == model
    assert len(config.data.train) == len(data) or (not data and config.data.train[0].corpus == "python")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_the_groups_of_the_starter_are_valid(model):
    lines = starter(model, []).splitlines()
    groups = [line.removeprefix("# ") for line in lines if line.startswith(("# layout:", "#   - {upto"))]
    config = parse_config("\n".join([line for line in lines if not line.startswith("layout:")] + groups))
    assert [str(edge.use) for edge in config.edges] == ["dp2", "tp2"]


def test_the_starter_of_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(PRESETS["tiny-llama"])))
    assert parse_config(starter(str(tmp_path), ())).model.path == str(tmp_path)
    odd = tmp_path.rename(tmp_path.with_name("my model, v2: {a}"))
    assert Path(parse_config(starter(str(odd), ())).save.dir).name == odd.name
    with pytest.raises(UsageError, match="did you mean 'tiny-llama'"):
        starter("tiny-lama", ())


def test_every_key_of_the_config_is_in_the_resolved_one():
    written = yaml.safe_load(parse_config(GOOD).to_yaml())
    for name, field in Config.model_fields.items():
        section = field.annotation
        keys = set(getattr(section, "model_fields", {}))
        assert not keys or set(written[name]) == keys


@pytest.mark.parametrize("asked", ["auto", "{auto: {}}", "{auto: {ranks: 4, tp: [1, 2], z: 3}}"])
def test_a_layout_that_is_chosen_later(asked: str):
    config = parse_config(GOOD.replace("dp2.tp2", asked))
    assert isinstance(config.layout, AutoLayout)
    assert parse_config(config.to_yaml()) == config
    with pytest.raises(UsageError, match="chosen before ranks start"):
        _ = config.edges


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("{auto: {tpp: 2}}", "did you mean 'tp'"),
        ("{auto: {tp: two}}", "write a number or a list of numbers"),
        ("{auto: {ranks: [2, 4]}}", "ranks: one number"),
        ("{auto: 4}", "write what is fixed"),
        ("{automatic: {}}", "write layout: auto"),
    ],
)
def test_what_is_asked_of_a_plan_is_checked(asked: str, said: str):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_config(GOOD.replace("dp2.tp2", asked))
