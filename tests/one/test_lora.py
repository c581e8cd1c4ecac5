"""Adapters and frozen weights in runs: against PEFT, resumed, exported; what is not trained does not change."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from against_transformers import decoder_logits, read_all
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, Qwen3Config

import longshift as ls
from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents.batch import Batches, Document
from longshift.documents.micro import micro_batch
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import CheckpointError, UsageError
from longshift.layout.box import Box
from longshift.layout.layout import Layout as Degrees
from longshift.model.decoder import Decoder, Ops
from longshift.model.loss import IGNORE
from longshift.spec.adapters import Lora, partly_trained
from longshift.spec.families import preset, read_spec
from longshift.state.checkpoint import Checkpoint
from longshift.trainer.build_run import build_state
from longshift.trainer.corpus import open_corpus
from longshift.trainer.export import export
from longshift.trainer.metrics import read_rows

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "llama": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=False),
    "phi3": Phi3Config(**LLAMA, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, sliding_window=None),
    "gpt2": GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}
TARGETS = {"llama": "all", "qwen3": "[q_proj, v_proj]", "phi3": "[qkv_proj, down_proj]", "gpt2": "[c_attn, c_proj]"}
RUN = """
model: {{path: {place}/{family}, {more}}}
data:
  train: [{{path: {place}/a.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 128, steps: 4, lr: 5e-2, precision: {precision}}}
save: {{dir: {run}, every: 2}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("place")
    (place / "a.txt").write_text(text := Path(json.__file__).read_text()[:6000])
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    for family, config in MODELS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(place / family)
        (place / family / "tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes())
    return place


def config_of(place: Path, run: Path, family: str = "llama", more: str = "", precision: str = "float32") -> ls.Config:
    more = more or f"lora: {{rank: 4, alpha: 6, targets: {TARGETS[family]}}}"
    return parse_config(RUN.format(place=place, run=run, family=family, more=more, precision=precision))


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.mark.parametrize("family", MODELS)
def test_what_is_exported_is_the_adapter_that_was_trained(place: Path, tmp_path: Path, family: str):
    config = config_of(place, tmp_path / "run", family)
    list(ls.train(config))
    export(config, tmp_path / "run", tmp_path / "adapter")
    export(config, tmp_path / "run", tmp_path / "merged", merge=True)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / family), tmp_path / "adapter").eval()
    saved = Checkpoint.latest(tmp_path / "run", World.alone())
    masters = {p.name: saved.read("master", p.name, Box.whole(p.shape)) for p in config.spec.params if not p.frozen}
    theirs = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
    assert theirs.keys() == {"base_model.model." + name for name in masters}
    for name, master in masters.items():
        assert torch.equal(theirs["base_model.model." + name], master), name
    ids = torch.arange(60) * 7 % 300
    with_adapter = logits_of(model, ids)
    without = logits_of(AutoModelForCausalLM.from_pretrained(place / family).eval(), ids)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), ids)
    spec, tensors = read_all(place / family)
    adapted = partly_trained(spec, config.spec.lora, ())
    micro = micro_batch(
        adapted, [Document(ids.numpy(), np.append(ids[1:].numpy(), IGNORE))], Degrees(), 0, torch.float32, torch.device("cpu")
    )
    ours = decoder_logits(Decoder(adapted).load(tensors | masters), micro, Ops(adapted))
    assert (with_adapter - without).abs().max() > 1e-2
    assert (merged - with_adapter).abs().max() < 1e-5
    assert (ours - with_adapter).abs().max() < 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_those_of_peft(place: Path, family: str):
    targets = json.loads(TARGETS[family].replace("[", '["').replace("]", '"]').replace(", ", '", "')) if family != "llama" else "all-linear"
    model = AutoModelForCausalLM.from_pretrained(place / family, dtype=torch.float32)
    model = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=5, target_modules=targets, fan_in_fan_out=family == "gpt2", init_lora_weights=False)
    )
    ids = torch.arange(50) * 11 % 300
    model(ids[None], labels=ids[None]).loss.backward()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    spec, tensors = read_all(place / family)
    spec = partly_trained(spec, Lora(3, 5.0, ("all",) if family == "llama" else tuple(targets)), ())
    decoder = Decoder(spec).load(tensors | {name: weight.detach().clone() for name, weight in theirs.items()})
    document = Document(ids.numpy(), np.append(ids[1:].numpy(), IGNORE))
    (decoder(micro_batch(spec, [document], Degrees(), 0, torch.float32, torch.device("cpu")), Ops(spec)) / 49).backward()
    ours = {name: weight for name, weight in decoder.weights().items() if weight.requires_grad}
    assert ours.keys() == theirs.keys()
    assert not any(weight.grad is not None for name, weight in decoder.weights().items() if name not in ours)
    for name, weight in theirs.items():
        assert torch.linalg.norm(ours[name].grad - weight.grad) <= 1e-4 * torch.linalg.norm(weight.grad), name


@pytest.mark.parametrize("more", ["", "freeze: ['model.embed_tokens.*', 'model.layers.0.*']"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resumed_anywhere_it_is_the_same_run(place: Path, tmp_path: Path, more: str, precision: str):
    whole = config_of(place, tmp_path / "whole", more=more, precision=precision)
    parts = config_of(place, tmp_path / "parts", more=more, precision=precision)
    list(ls.train(whole))
    for step in ls.train(parts):
        if step.step == 2:
            break
    list(ls.train(parts, resume=True))
    losses = [[row["loss"] for row in read_rows(tmp_path / run / "metrics.jsonl")] for run in ("whole", "parts")]
    assert losses[0] == losses[1]
    files = [load_file(next((tmp_path / run / "checkpoints" / "step-4").glob("*.safetensors"))) for run in ("whole", "parts")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][key]) for key, value in files[0].items())
    learned = {p.name for p in whole.spec.params if not p.frozen}
    assert {key.split("|")[1] for key in files[0]} == learned
    assert len(learned) < len(whole.spec.params)


def test_another_base_is_noticed(place: Path, tmp_path: Path):
    folder = tmp_path / "llama"
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MODELS["llama"])
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes())
    config = config_of(place, tmp_path / "run").model_copy(deep=True)
    text = RUN.format(place=place, run=tmp_path / "run", family="llama", more="lora: {rank: 2}", precision="float32")
    config = parse_config(text.replace(f"{place}/llama", str(folder)))
    for step in ls.train(config):
        if step.step == 2:
            break
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="weights that are not trained are others than"):
        list(ls.train(config, resume=True))


def test_what_is_frozen_stays_and_the_rest_learns(place: Path, tmp_path: Path):
    freeze = ("model.embed_tokens.*", "*.q_proj.*", "*norm*")
    config = config_of(place, tmp_path / "run", "qwen3", f"freeze: {list(freeze)}")
    list(ls.train(config))
    export(config, tmp_path / "run", tmp_path / "export")
    before, after = (read_all(folder)[1] for folder in (place / "qwen3", tmp_path / "export"))
    frozen = {p.name for p in config.spec.params if p.frozen}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert "model.embed_tokens.weight" in frozen
    assert read_spec(tmp_path / "export").base == read_spec(place / "qwen3").base


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("lora: {targets: [w_proj]}", "no linear layer of this model is called 'w_proj': it has q_proj, k_proj"),
        ("lora: {targets: []}", "lora.targets is empty"),
        ("lora: {rank: 0}", "rank"),
        ("lora: {rank: 4}, freeze: ['*']", "lora trains its adapters alone: leave freeze out"),
        ("freeze: ['*mistyped*']", "no weight of this model matches '\\*mistyped\\*'"),
        ("freeze: ['*']", "nothing would be trained"),
    ],
)
def test_what_cannot_be_meant_is_refused(place: Path, tmp_path: Path, more: str, fault: str):
    with pytest.raises(UsageError, match=fault):
        config_of(place, tmp_path / "run", more=more)


def test_a_pattern_that_matches_nothing_is_told_the_nearest_names():
    mixtral = replace(preset("tiny-llama"), family="mixtral", experts=4, top_k=2)
    with pytest.raises(UsageError, match=r"most alike first: model\.layers\.0\.block_sparse_moe\.gate\.weight, ") as caught:
        partly_trained(mixtral, None, ("*.mlp.gate.*",))
    first_block = [p.name for p in mixtral.params if p.unit <= 1]
    assert all(name in str(caught.value) for name in first_block)
    with pytest.raises(UsageError, match=r"most alike first: model\.layers\.0\.self_attn\.q_proj\.weight, "):
        partly_trained(preset("tiny-llama"), None, ("*.q_porj.*",))


def test_there_must_be_something_to_merge_and_something_beside_adapters(place: Path, tmp_path: Path):
    plain = config_of(place, tmp_path / "plain", more="init: pretrained")
    list(ls.train(plain))
    with pytest.raises(UsageError, match="trained without adapters: leave --merge out"):
        export(plain, tmp_path / "plain", tmp_path / "to", merge=True)
    drawn = config_of(place, tmp_path / "drawn", more="init: scratch, lora: {rank: 2}")
    list(ls.train(drawn))
    with pytest.raises(CheckpointError, match="which no folder holds: write --merge"):
        export(drawn, tmp_path / "drawn", tmp_path / "to")
    export(drawn, tmp_path / "drawn", tmp_path / "to", merge=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "to").num_parameters() == drawn.spec.base.parameters


def peft_of(place: Path, family: str, rank: int = 4, alpha: float = 6, **other: object):
    """A model with adapters that PEFT has drawn, neither of them zeros."""
    torch.manual_seed(7)
    targets = "all-linear" if TARGETS[family] == "all" else TARGETS[family].strip("[]").split(", ")
    how = {"fan_in_fan_out": family == "gpt2", "init_lora_weights": False} | other
    model = AutoModelForCausalLM.from_pretrained(place / family, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **how)).eval()  # pyright: ignore


def beginning_with(place: Path, run: Path, family: str, folder: Path) -> ls.Config:
    return config_of(place, run, family, f"lora: {{rank: 4, alpha: 6, targets: {TARGETS[family]}, init_from: {folder}}}")


@pytest.mark.parametrize("family", MODELS)
def test_training_begins_with_the_adapters_that_peft_wrote(place: Path, tmp_path: Path, family: str):
    theirs = peft_of(place, family)
    theirs.save_pretrained(tmp_path / "theirs")
    config = beginning_with(place, tmp_path / "run", family, tmp_path / "theirs")
    (first, *_) = ls.train(config)
    batch = Batches.of(config, open_corpus(config)[1]).at(0)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                logits_of(theirs, torch.from_numpy(d.ids)), torch.from_numpy(d.labels), ignore_index=IGNORE, reduction="sum"
            )
            for d in batch.documents
        ]
        with theirs.disable_adapter():
            without = logits_of(theirs, torch.arange(60))
    assert first.loss == pytest.approx(float(sum(losses)) / batch.target_tokens, rel=1e-5)
    assert (logits_of(theirs, torch.arange(60)) - without).abs().max() > 1e-3  # else any adapters would do
    given, seen = load_file(tmp_path / "theirs/adapter_model.safetensors"), 0
    for name, box, _, views in build_state(config, World.alone(), tmp_path).optimizer.state():
        whole = given[f"base_model.model.{name}"]
        assert torch.equal(views["master"], whole[box.within(Box.whole(tuple(whole.shape)))])
        seen += box.elements
    assert seen == sum(value.numel() for value in given.values())


def test_what_was_exported_goes_on_where_it_was(place: Path, tmp_path: Path):
    config = config_of(place, tmp_path / "first")
    list(ls.train(config))
    export(config, tmp_path / "first", tmp_path / "adapter")
    begun = beginning_with(place, tmp_path / "second", "llama", tmp_path / "adapter")
    saved = Checkpoint.latest(tmp_path / "first", World.alone())
    for name, box, _, views in build_state(begun, World.alone(), tmp_path).optimizer.state():
        assert torch.equal(views["master"], saved.read("master", name, box))
    for step in ls.train(begun):
        if step.step == 2:
            break
    (tmp_path / "adapter").rename(tmp_path / "gone")  # what goes on has its adapters in the checkpoint
    assert [step.step for step in ls.train(begun, resume=True)] == [3, 4]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"rank": 3},
            ["r is 3, and model.lora.rank is 4", "wrong shape model.layers.0.self_attn.q_proj.lora_A.weight: [3, 32] in the folder"],
        ),
        ({"alpha": 12}, ["lora_alpha is 12, and model.lora.alpha is 6"]),
        ({"use_rslora": True}, ["use_rslora is True, which is not there"]),
        ({"use_dora": True}, ["use_dora is True", "unexpected  base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"]),
        ({"alpha_pattern": {"q_proj": 2}}, ["alpha_pattern is {'q_proj': 2}"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa': PEFT changed the model's own weights"]),
        ({"target_modules": ["q_proj"]}, ["missing     base_model.model.model.layers.1.mlp.down_proj.lora_B.weight [32, 4]"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save is ['lm_head']"]),
    ],
)
def test_adapters_of_another_kind_are_refused_with_every_reason(place: Path, tmp_path: Path, other: dict, said: list[str]):
    if "target_modules" in other:
        model = AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float32)
        get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **other)).save_pretrained(tmp_path / "theirs")
    else:
        peft_of(place, "llama", **other).save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError) as told:
        list(ls.train(beginning_with(place, tmp_path / "run", "llama", tmp_path / "theirs")))
    for text in ("model.lora.init_from: ", *said):
        assert text in str(told.value)
    lines = str(told.value).splitlines()[1:]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("adapter_config.json", None, "adapter_config.json cannot be read: [Errno 2]"),
        ("adapter_config.json", "{", "adapter_config.json cannot be read"),
        ("adapter_config.json", "[]", "is no JSON object"),
        ("adapter_config.json", '{"peft_type": "IA3"}', "peft_type is 'IA3', not LORA"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": [1]}', "r is [1], and model.lora.rank is 4"),
        ("adapter_model.safetensors", None, "holds no adapter_model.safetensors"),
        ("adapter_model.safetensors", "x", "is damaged or unreadable"),
    ],
)
def test_a_damaged_folder_is_refused_by_its_file(place: Path, tmp_path: Path, file: str, text: str | None, said: str):
    peft_of(place, "llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / file).unlink()
    if text is not None:
        (tmp_path / "theirs" / file).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        list(ls.train(beginning_with(place, tmp_path / "run", "llama", tmp_path / "theirs")))
