"""Numbers and kinds that no model, layout or run has are refused by name, in a moment."""

import json
import time
import warnings

import pytest

from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.layout import legal
from longshift.layout.layout import MOST_RANKS, Layout
from longshift.spec.config_json import MAX_BLOCKS
from longshift.spec.families import PRESETS, from_hugging_face, read_spec, to_hugging_face

GOOD = """\
model: {preset: tiny-llama}
data: {train: [{corpus: python}], max_len: 4K}
train: {tokens_per_step: 16K, steps: 100, lr: 3e-4}
save: {dir: runs/demo}
"""
MOST_S = 5.0  # each takes milliseconds where nothing else runs
KINDS = [True, False, 0, -1, 2, 3, 10**18, 10**60, 1e300, -1e300, 1e-300, float("inf"), float("nan"), "", "x", [], [1], [[]], {}, ["x"]]
KINDS += [[None], {"a": 1}, {"rope_type": []}, {"rope_type": "yarn", "factor": 1e60}, {"rope_type": "llama3", "factor": "x"}]
KINDS += [{"full_attention": {"rope_type": "default"}, "sliding_attention": []}, {"sliding_attention": {"rope_theta": True}}]
MORE_KEYS = (
    "rope_parameters",
    "head_dim",
    "layer_types",
    "no_rope_layers",
    "partial_rotary_factor",
    "max_window_layers",
    "attn_pdrop",
    "x",
)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "qwen3-0.6b", "smollm3-3b", "gemma-3-1b", "phi-4", "granite-3.1-2b"])
def test_any_value_of_any_key_is_read_or_refused_by_file_and_key(name):
    base, refused, started = to_hugging_face(PRESETS[name]), 0, time.monotonic()
    for key in (*base, *MORE_KEYS):
        for value in KINDS:
            said = None
            try:
                with warnings.catch_warnings(action="ignore"):
                    _ = from_hugging_face({**base, key: value}, "there/config.json").params
            except UsageError as fault:
                said = str(fault)
            if said is not None:
                refused += 1
                assert said.startswith("there/config.json:")
                assert len(said) < 2000
    assert refused > len(base) * len(KINDS) / 2
    assert time.monotonic() - started < 4 * MOST_S


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("architectures", True, "architectures = True: must be a list"),
        ("hidden_act", [], r"hidden_act = \[\]: supported: silu"),
        ("model_type", ["llama"], r"model_type \['llama'\] is not a supported"),
        ("num_hidden_layers", 10**18, f"must be a positive whole number, at most {MAX_BLOCKS}"),
        ("vocab_size", 10**30, "vocab_size = 1000"),
        ("rope_scaling", {"rope_type": "linear", "factor": 10**60}, r"rope_scaling.factor = 1000.* must be a positive number"),
        ("zzz", "y" * 10**6, "zzz = 'yyy.* is not understood"),
    ],
)
def test_a_fault_of_config_json_names_key_and_value(key, value, why):
    with pytest.raises(UsageError, match=why) as caught:
        from_hugging_face({**to_hugging_face(PRESETS["tiny-llama"]), key: value})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{" + '"a":{' * 50_000, '{"a": ' + "9" * 5000 + "}", "[]", "\0", '"\\ud800"', "x" * (2 << 20)]
)
def test_a_config_json_that_cannot_be_read_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        read_spec(tmp_path)
    assert len(str(caught.value)) < 600


def test_a_model_folder_that_is_none_is_refused(tmp_path):
    for folder in (tmp_path / "none", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=r"holds no config\.json|cannot be read"):
            read_spec(folder)
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="no plain file"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    "text", ["dp1048577", "dp1024.tp1025", "dp" + "9" * 5000, "pp2:" + "1" * 30, "chunk" + "9" * 13, "v9999999", "x" * 10**6]
)
def test_layouts_beyond_any_cluster_are_refused(text):
    with pytest.raises(UsageError, match=r"^layout ") as caught:
        Layout.parse(text)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text", [f"dp{MOST_RANKS}", f"tp{MOST_RANKS}", f"pp{MOST_RANKS}:3-1", f"u{MOST_RANKS}.z3", f"pp{MOST_RANKS}.v{MOST_RANKS}"]
)
def test_whether_a_layout_is_possible_costs_no_loop_over_ranks(text):
    started = time.monotonic()
    layout = Layout.parse(text)
    assert bool(legal.faults(PRESETS["small-llama"], layout, None, 4096)) == (layout.dp == 1)
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("train.steps=" + "1" + "0" * 30, "train.steps: input should be less than or equal to"),
        ("data.max_len=1e300", "data.max_len: input should be less than or equal to"),
        ("train.timeout=1e300", "train.timeout: input should be less than or equal to"),
        ("train.stall_timeout=1e9", "train.stall_timeout: input should be less than or equal to"),
        ("train.lr=1e30", "train.lr: input should be less than or equal to"),
        ("layout=[{upto: 1" + "0" * 30 + ", use: dp4}]", "is not a number of tokens of at most"),
        ("layout=[{upto: 1e300, use: dp4}]", "is not a number of tokens of at most"),
        ("layout={auto: {ranks: 10000000}}", "auto: ranks: 10000000: write a number"),
        ("layout=dp1" + "0" * 18, "layout: "),
    ],
)
def test_every_number_of_a_config_has_a_range(change, why):
    with pytest.raises(UsageError) as caught:
        parse_config(GOOD, [change])
    assert why in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_legal_and_large_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(PRESETS["llama-3-70b"])))
    assert read_spec(tmp_path) == PRESETS["llama-3-70b"]
    assert parse_config(GOOD, [f"layout=dp{MOST_RANKS}"]).world == MOST_RANKS
