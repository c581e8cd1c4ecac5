"""Rotary embeddings stretched to longer documents: the angles of transformers, read and written as its keys; a warning with the numbers."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.model.rotary import rotary_table
from longshift.spec.families import from_hugging_face, preset, to_hugging_face
from longshift.spec.model import Rope
from longshift.spec.positions import beyond, replaced_scaling, stretched

SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
CONFIG = """
model: {{preset: tiny-llama{rope}}}
data: {{train: [{{corpus: python}}], max_len: {max_len}, overlong: split}}
train: {{tokens_per_step: {max_len}, steps: 4, lr: 1e-3}}
save: {{dir: run}}
"""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 0.7},
        {"truncate": False},
        {"mscale": 0.8, "mscale_all_dim": 0.4},
        {"factor": 1.0},
        {"factor": 40.0, "original_max_position_embeddings": 64, "rope_theta": 500.0},
    ],
    ids=str,
)
def test_yarn_is_that_of_transformers(more: dict):
    config = LlamaConfig(**SIZES, max_position_embeddings=1024, rope_parameters={**YARN, **more})  # pyright: ignore[reportArgumentType]
    theirs = LlamaRotaryEmbedding(config)
    spec = from_hugging_face(config.to_diff_dict())
    assert spec.rope is not None
    positions = torch.arange(0, 1024, 7)
    cos, sin = rotary_table(spec.rope, spec.rotary_width, positions, torch.float64)
    for mine, other in zip((cos, sin), theirs(torch.zeros(1), positions[None])):
        assert (mine[:, 0] - other[0]).abs().max() < 2e-4, "float32 angles of up to 1024 radians"
    assert from_hugging_face(json.loads(json.dumps(to_hugging_face(spec)))) == spec
    assert float(theirs.attention_scaling) == pytest.approx(spec.rope.magnitude)


def test_faults_of_yarn_are_told():
    config = LlamaConfig(**SIZES, rope_parameters=YARN).to_diff_dict()  # pyright: ignore[reportArgumentType]
    config["rope_parameters"] = {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}
    with pytest.raises(UsageError, match=r"beta_fast = 1\.0: must exceed beta_slow 2\.0"):
        from_hugging_face(config)


def test_each_way_to_stretch():
    spec = preset("tiny-llama")
    long = 4 * spec.max_positions
    linear = stretched(spec, "linear", long)
    assert linear.rope == Rope(spec.rope.theta, "linear", 4.0)  # pyright: ignore[reportOptionalMemberAccess]
    slow, positions = torch.tensor([[0, long]]).flatten(), torch.tensor([spec.max_positions])
    assert torch.equal(*(rotary_table(rope, 32, at, torch.float64)[0] for rope, at in ((linear.rope, slow[1:]), (spec.rope, positions))))  # pyright: ignore[reportArgumentType]
    base = stretched(spec, "dynamic", long).rope
    assert base is not None
    slowest = [rope.theta ** -((32 - 2) / 32) * length for rope, length in ((base, long), (Rope(), spec.max_positions))]
    assert slowest[0] == pytest.approx(slowest[1]), "the slowest channel turns as far as it did"
    yarn = stretched(spec, "yarn", long, trained=4096).rope
    assert yarn is not None
    assert (yarn.factor, yarn.original_positions, yarn.magnitude) == (32.0, 4096, 0.1 * math.log(32) + 1)
    assert stretched(spec, "theta", long, theta=5e6).rope == Rope(5e6)
    assert replaced_scaling(spec, stretched(spec, "yarn", long)) is None
    with pytest.raises(UsageError, match="type: theta needs theta"):
        stretched(spec, "theta", long)
    with pytest.raises(UsageError, match="learned positions"):
        stretched(preset("tiny-gpt2"), "yarn", long)


@pytest.mark.parametrize(
    "own",
    [
        Rope(5e5, "llama3", 32.0, original_positions=8192),
        Rope(1e6, "yarn", 4.0, original_positions=32768, magnitude=1.13),
        Rope(1e4, "linear", 8.0),
    ],
    ids=lambda rope: rope.scaling,
)
def test_a_scaling_that_the_model_has_stays_or_is_named(own):
    """Another base keeps the scaling, as in `transformers`; each other way takes its place and says so."""
    spec = replace(preset("tiny-llama"), rope=own)
    assert stretched(spec, "theta", 131072, theta=4e6).rope == replace(own, theta=4e6)
    assert replaced_scaling(spec, stretched(spec, "theta", 131072, theta=4e6)) is None
    for kind in ("dynamic", "linear", "llama3", "yarn"):
        note = replaced_scaling(spec, stretched(spec, kind, 1 << 21))
        assert note is not None
        assert f"({own.scaling} by {own.factor:g}): it is " in note
        assert ("a base of" in note) == (kind == "dynamic")


def test_a_config_stretches_and_an_unstretched_one_warns():
    plain = parse_config(CONFIG.format(rope="", max_len="64K"))
    told = beyond(plain.spec, plain.data.max_len)
    assert told is not None
    assert "65536 tokens and the model was trained on 32768 positions" in told
    assert "model.rope={type: yarn} (by 2)" in told.replace("{{", "{")
    yarn = parse_config(CONFIG.format(rope=", rope: {type: yarn}", max_len="64K"))
    assert yarn.spec.rope == stretched(plain.spec, "yarn", 65536).rope
    assert parse_config(yarn.to_yaml()) == yarn
    assert beyond(yarn.spec, 65536) is None
    assert beyond(yarn.spec, 65537 * 2) is not None
    assert beyond(plain.spec, 32768) is None
    with pytest.raises(UsageError, match=r"model\.rope: type: theta needs theta"):
        parse_config(CONFIG.format(rope=", rope: {type: theta}", max_len="64K"))
    with pytest.raises(UsageError, match=r"'yarm' is not one of.*did you mean 'yarn'"):
        parse_config(CONFIG.format(rope=", rope: {type: yarm}", max_len="64K"))
