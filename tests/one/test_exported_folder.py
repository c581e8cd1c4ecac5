"""What is exported is read by others as it was learned: where answers end, by which template, with which keys and permissions."""

import json
import os
import stat
from pathlib import Path

import pytest
import tokenizers
import torch
from chat_templates import FAMILIES
from gguf.vocab import SpecialVocab
from test_chat import folder_of, plain  # noqa: F401  (plain: a fixture)
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

import longshift as ls
from longshift.config_file import parse_config
from longshift.documents.tokenizer import load
from longshift.errors import CheckpointError, DataError
from longshift.model.weight_folder import INDEX, WeightFolder
from longshift.spec.families import read_spec

CHAT = [{"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "Pong."}]
RUN = """
model: {model}
data: {{train: [{{path: {place}/chats.jsonl, format: messages}}], tokenizer: {place}/tokenizer, max_len: 128, cache: {place}/cache}}
train: {{tokens_per_step: 128, steps: {steps}, lr: 1e-2, precision: float32}}
save: {{dir: {place}/run}}
"""


def chat_folder(plain: tokenizers.Tokenizer, place: Path, family: str) -> Path:  # noqa: F811
    """A tokenizer whose end of text is not what ends a turn, and conversations."""
    folder = folder_of(FAMILIES[family], FAMILIES[family].plain(), plain, place / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    (place / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 4)
    return folder


def export(place: Path, steps: int = 1, model: str = "{preset: tiny-llama}", to: str = "out") -> Path:
    config = parse_config(RUN.format(place=place, steps=steps, model=model))
    list(ls.train(config))
    ls.export(place / "run", place / to)
    return place / to


@pytest.mark.parametrize(("family", "end"), [("qwen", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")])
def test_generation_ends_where_a_learned_turn_ends(plain, tmp_path, family, end):  # noqa: F811
    chat_folder(plain, tmp_path, family)
    out = export(tmp_path)
    peer = AutoTokenizer.from_pretrained(out)
    stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [peer.convert_tokens_to_ids("<|endoftext|>"), peer.convert_tokens_to_ids(end)]
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == stops


def test_a_model_that_has_learned_an_answer_stops_after_it(plain, tmp_path):  # noqa: F811
    chat_folder(plain, tmp_path, "qwen")
    out = export(tmp_path, steps=30)
    peer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    asked = peer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=40, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert peer.decode(said) == "Pong.<|im_end|>"


def test_texts_end_with_the_end_of_text_alone(plain, tmp_path):  # noqa: F811
    chat_folder(plain, tmp_path, "qwen")
    config = parse_config(
        RUN.format(place=tmp_path, steps=1, model="{preset: tiny-llama}").replace(", format: messages", ", format: {text: text}")
    )
    (tmp_path / "chats.jsonl").write_text('{"text": "Ping"}\n')
    list(ls.train(config))
    ls.export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 0


def test_there_is_one_template_and_it_is_the_one_that_was_trained_with(plain, tmp_path):  # noqa: F811
    folder = chat_folder(plain, tmp_path, "qwen")
    (folder / "chat_template.jinja").write_text(FAMILIES["chatml"].plain())
    out = export(tmp_path)
    assert (out / "chat_template.jinja").read_text() == FAMILIES["chatml"].plain()
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert AutoTokenizer.from_pretrained(out).chat_template == FAMILIES["chatml"].plain()


def test_settings_of_generation_stay_and_stops_are_added(plain, tmp_path):  # noqa: F811
    chat_folder(plain, tmp_path, "qwen")
    made = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True, "eos_token_id": [7, 0]}))
    out = export(tmp_path, model=f"{{path: {tmp_path}/model}}")
    found = json.loads((out / "generation_config.json").read_text())
    assert (found["temperature"], found["do_sample"]) == (0.5, True)
    assert found["eos_token_id"] == [7, 0, load(tmp_path / "tokenizer").core.token_to_id("<|im_end|>")]


SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
SOURCES: dict[str, tuple[PreTrainedConfig, dict[str, object]]] = {
    "phi3": (Phi3Config(**SMALL, pad_token_id=0), {"original_max_position_embeddings": 4096, "chunk_size_feed_forward": 0}),
    "gpt2": (GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=4, n_positions=256), {"n_ctx": 256, "summary_type": "cls_index"}),
    "llama": (LlamaConfig(**SMALL), {"pretraining_tp": 1, "max_length": 20}),
    "mixtral": (MixtralConfig(**SMALL, num_key_value_heads=4), {"output_router_logits": True, "router_aux_loss_coef": 0.3}),
}


@pytest.mark.filterwarnings("ignore:.*asks for the auxiliary loss")
@pytest.mark.parametrize("family", SOURCES)
def test_keys_that_say_nothing_of_the_function_are_carried_over(plain, tmp_path, family):  # noqa: F811
    chat_folder(plain, tmp_path, "qwen")
    config, keys = SOURCES[family]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | keys | {"_name_or_path": "/somewhere", "auto_map": {"AutoModel": "code.Model"}})
    )
    out = export(tmp_path, model=f"{{path: {tmp_path}/model}}")
    found = json.loads((out / "config.json").read_text())
    assert {key: found.get(key) for key in keys} == keys
    assert not {"_name_or_path", "auto_map"} & found.keys()
    assert read_spec(out) == read_spec(tmp_path / "model")


def test_files_have_the_permissions_of_any_new_file(plain, tmp_path):  # noqa: F811
    chat_folder(plain, tmp_path, "qwen")
    before = os.umask(0o027)
    try:
        out = export(tmp_path)
    finally:
        os.umask(before)
    weights = [*out.glob("*.safetensors"), *(tmp_path / "run/checkpoints").rglob("*.safetensors")]
    assert len(weights) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in [*weights, out / "config.json"]} == {0o640}


def test_the_reader_of_gguf_finds_ends_and_the_template(plain, tmp_path):  # noqa: F811
    chat_folder(plain, tmp_path, "qwen")
    out = export(tmp_path)
    vocab = SpecialVocab(out)
    assert vocab.special_token_ids["eos"] == 0
    assert vocab.chat_template == FAMILIES["qwen"].plain()


# What lies beside a tokenizer.json or a weight file


def split_folder(plain: tokenizers.Tokenizer, folder: Path, older: bool, flags: dict) -> Path:  # noqa: F811
    """A tokenizer whose chat tokens are in a file beside it."""
    folder.mkdir()
    plain.save(str(folder / "tokenizer.json"))
    tokens = {300: AddedToken("<|im_start|>", **flags), 301: AddedToken("<|im_end|>", **flags)}
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if older:
        (folder / "added_tokens.json").write_text(json.dumps({token.content: number for number, token in tokens.items()}))
        special = [token.content for token in tokens.values() if token.special]
        (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": special}))
    else:
        names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        config["added_tokens_decoder"] = {number: {name: getattr(token, name) for name in names} for number, token in tokens.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("flags", [{"special": True, "normalized": False}, {"special": False}])
def test_tokens_beside_the_file_are_those_of_transformers(plain, tmp_path, older, flags):  # noqa: F811
    folder = split_folder(plain, tmp_path / "t", older, flags)
    text = "<|im_start|>user\n Hi <|im_end|> x<|im_end|>"
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = load(folder).core.encode(text).ids
    assert ids == peer(text)["input_ids"]
    assert {300, 301} <= set(ids)
    (tmp_path / "bare").mkdir()
    plain.save(str(tmp_path / "bare/tokenizer.json"))
    assert load(folder).fingerprint != load(tmp_path / "bare").fingerprint


def test_tokens_with_other_ids_or_none_are_refused(plain, tmp_path):  # noqa: F811
    folder = split_folder(plain, tmp_path / "t", True, {"special": True})
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 305, "<|im_end|>": 306}')
    with pytest.raises(DataError, match=r"'<\|im_start\|>' has id 305 beside tokenizer\.json, and gets 300"):
        load(folder)
    (folder / "added_tokens.json").unlink()
    with pytest.raises(DataError, match=r"the special token '<\|im_start\|>' has no id"):
        load(folder)


def test_a_tokenizer_that_draws_its_tokens_is_refused_and_the_advice_helps(plain, tmp_path):  # noqa: F811
    written = json.loads(plain.to_str())
    for dropout in (0.1, None):
        written["model"]["dropout"] = dropout
        (tmp_path / "tokenizer.json").write_text(json.dumps(written))
        if dropout:
            with pytest.raises(DataError, match=r"model\.dropout is 0\.1.*; set it to null"):
                load(tmp_path)
    assert load(tmp_path).encode(["a text"])[0][:-1] == plain.encode("a text").ids


def test_one_weight_file_is_read_before_an_index_beside_it(tmp_path):
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    for seed, name in ((1, "single"), (2, "shards")):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name, max_shard_size="1GB" if seed == 1 else "50KB")
    for path in (tmp_path / "shards").glob("model*"):
        path.rename(tmp_path / "single" / path.name)
    assert (tmp_path / "single" / INDEX).exists()
    folder = WeightFolder(tmp_path / "single", spec := read_spec(tmp_path / "single"))
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "single", dtype=torch.float32).state_dict()
    from longshift.layout.box import Box

    for p in spec.params:
        assert torch.equal(folder.read(p.name, Box.whole(p.shape)), peer[p.name]), p.name
    (tmp_path / "single/model.safetensors").unlink()
    (tmp_path / "single" / INDEX).write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"1 of 1 files that are missing: gone\.safetensors"):
        WeightFolder(tmp_path / "single", spec)
