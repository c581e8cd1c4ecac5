"""Who knows other trainers' words is told what does the same here, and every hint is true."""

import re

import pytest

from longshift.config import Config, ValidationConfig
from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.other_tools import KEYS, LAYOUT_WORDS, family_hint, preset_hint
from longshift.spec.families import PRESETS, from_hugging_face, preset
from longshift.spec.family_table import FAMILIES

BASE = "model: {preset: tiny-llama}\ndata: {train: [{corpus: python}], max_len: 1K}\n"
RUN = "train: {tokens_per_step: 4K, steps: 4, lr: 1e-3%s}\nsave: {dir: run}\n%s"


def refusal(section: str = "", top: str = "", overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UsageError) as caught:
        parse_config(BASE + RUN % (section, top), overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("learning_rate", "here it is train.lr"),
        ("max_grad_norm", "here it is train.clip"),
        ("gradient_accumulation_steps", "here it is train.tokens_per_step"),
        ("epochs", "here it is train.steps: a run is so many steps"),
        ("lora", "here it is model.lora"),
        ("fsdp", "dp8.z3"),
        ("cp", "here it is ring2 or u2 (ring attention, Ulysses) in the layout"),
        ("sp", "here it is tp2 in the layout, which has sequence parallelism in it"),
        ("optim", "here it is train.optimizer: adamw, or sgd with train.momentum"),
        ("eval_steps", "here it is validation.every"),
        ("report_to", "here it is save.trackers"),
        ("packing", "there is nothing to set: documents are always packed"),
        ("warmupp", "did you mean 'warmup'"),
        ("qwertz", "known: tokens_per_step"),
    ],
)
def test_keys(word: str, hint: str):
    assert hint in refusal(f", {word}: 1")
    assert f"train.{word}: no such key" in refusal(f", {word}: 1")


def test_keys_at_the_top_and_on_the_command_line():
    assert "config:5: learning_rate: no such key; here it is train.lr" in refusal(top="learning_rate: 1e-3\n")
    assert "command line: train.learning_rate: no such key; here it is train.lr" in refusal(overrides=("train.learning_rate=1",))


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ("cp2", "here it is ring or u"),
        ("dp2.rows8K", "there is nothing to set: the loss is computed in blocks of rows"),
        ("dp2.rows-auto", "there is nothing to set"),
        ("recompute-full.keep-output", "here it is recompute-full, which keeps the output of attention"),
        ("chunk64K.keep-input", "here it is every1 in a layout of chunks"),
        ("tp2.recompute-attention", "here it is recompute-full, with as many blocks that keep all as fit"),
        ("dp2.sp2", "here it is u or ring"),
        ("fsdp8", "here it is dp with a stage of ZeRO"),
        ("ep4", "it is not there yet"),
        ("dp2.vpp2", "here it is v, as in pp2.v2"),
        ("dpp2", "did you mean 'pp2'"),
    ],
)
def test_layouts(layout: str, hint: str):
    with pytest.raises(UsageError, match=re.escape(hint)):
        Layout.parse(layout)


def test_families():
    with pytest.raises(
        UsageError,
        match="model_type 'gpt_oss' is not a supported model family; it needs experts of another kind, which are not implemented",
    ):
        from_hugging_face({"model_type": "gpt_oss"})
    with pytest.raises(UsageError, match="did you mean 'mistral'"):
        from_hugging_face({"model_type": "mistrall"})
    with pytest.raises(UsageError, match="model_type 't5' is not a supported model family; it needs an encoder, which is not implemented"):
        from_hugging_face({"model_type": "t5"})
    assert not any(map(family_hint, FAMILIES))


@pytest.mark.parametrize("name", ["phimoe", "gpt-oss-20b", "qwen2-moe", "Qwen2-MoE-A14B", "deepseek-v3"])
def test_a_preset_of_a_family_that_is_not_here_says_what_it_needs(name: str):
    with pytest.raises(UsageError, match=f"preset '{name}' does not exist; it needs experts of another kind, which are not implemented"):
        preset(name)
    with pytest.raises(UsageError, match="did you mean 'qwen3-8b'"):
        preset("qwen3-9b")
    assert not any(map(preset_hint, PRESETS))


def test_what_a_hint_names_is_there():
    fields = {f"{name}.{key}" for name in ("model", "data", "train", "save") for key in Config.model_fields[name].annotation.model_fields}  # pyright: ignore
    fields |= {f"validation.{key}" for key in ValidationConfig.model_fields}
    for hint in {*KEYS.values(), *LAYOUT_WORDS.values()}:
        for key in re.findall(r"\b(?:model|data|train|save|validation)\.[a-z_]+", hint):
            assert key in fields, hint
        for layout in re.findall(r"\b(?:dp|pp|tp|u|ring)\d+(?:\.[a-z0-9-]+)*\b", hint):
            Layout.parse(layout)
    assert all(field in KEYS.get(field.split(".")[1], field) for field in fields)  # a key here hints at nothing but itself elsewhere


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama", "did you mean 'llama'"),
        ("mistrall", "did you mean 'mistral'"),
        ("qwen_3", "did you mean 'qwen3'"),
        ("qwen4", "supported: llama"),
        ("phi4", "supported: llama"),
        ("gemma", "supported: llama"),
        ("granite_speech", "supported: llama"),
        ("exaone", "supported: llama"),
    ],
)
def test_a_family_is_named_only_where_it_is_a_typing_error(name: str, hint: str):
    with pytest.raises(UsageError, match=f"model_type {name!r} is not a supported model family; {hint}"):
        from_hugging_face({"model_type": name})


@pytest.mark.parametrize(("name", "text"), [("gemma3", "gemma3_text"), ("llava", "llama"), ("mistral3", "mistral")])
def test_the_text_model_in_a_model_of_images_is_named(name: str, text: str):
    with pytest.raises(UsageError, match=f"the text model in it, text_config, is of the family {text}, which is supported"):
        from_hugging_face({"model_type": name, "text_config": {"model_type": text}})
