"""Who knows other trainers' words is told what does the same here, and every hint is true."""

import re

import pytest

from longshift.config import Config
from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.other_tools import KEYS, LAYOUT_WORDS, family_hint
from longshift.spec.families import FAMILIES, from_hugging_face

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
        UsageError, match="model_type 'mixtral' is not a supported model family; it needs experts, which are not implemented"
    ):
        from_hugging_face({"model_type": "mixtral"})
    with pytest.raises(UsageError, match="did you mean 'mistral'"):
        from_hugging_face({"model_type": "mistrall"})
    assert not any(map(family_hint, FAMILIES))


def test_what_a_hint_names_is_there():
    fields = {f"{name}.{key}" for name in ("model", "data", "train", "save") for key in Config.model_fields[name].annotation.model_fields}  # pyright: ignore
    for hint in {*KEYS.values(), *LAYOUT_WORDS.values()}:
        for key in re.findall(r"\b(?:model|data|train|save)\.[a-z_]+", hint):
            assert key in fields, hint
        for layout in re.findall(r"\b(?:dp|pp|tp|u|ring)\d+(?:\.[a-z0-9-]+)*\b", hint):
            Layout.parse(layout)
    assert all(field in KEYS.get(field.split(".")[1], field) for field in fields)  # a key here hints at nothing but itself elsewhere
