"""Published configurations: they are read, they compute what transformers computes with them, and they survive an export."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from against_transformers import by_canonical_name, documents, ours, random_model, read_all, theirs, worst
from published import PUBLISHED, shrunk
from safetensors.torch import load_file

from longshift.errors import UsageError
from longshift.model.write_folder import write_folder
from longshift.spec.families import PRESETS, from_hugging_face, to_hugging_face
from longshift.spec.family_table import FAMILIES

BOUND = 1e-10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a published config, shrunk, and weights that transformers made for it."""
    root = tmp_path_factory.mktemp("published")

    @cache
    def folder(name: str) -> Path:
        made, config = root / name, json.dumps(shrunk(name))
        made.mkdir()
        (made / "config.json").write_text(config)
        random_model(transformers.AutoConfig.from_pretrained(made)).save_pretrained(made)
        (made / "config.json").write_text(config)  # as it was published
        return made

    return folder


@pytest.mark.filterwarnings("ignore:.*asks for dropout")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_survives(name: str):
    spec = from_hugging_face(PUBLISHED[name])
    assert from_hugging_face(json.loads(json.dumps(to_hugging_face(spec)))) == spec


@pytest.mark.filterwarnings("ignore:.*asks for dropout")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_is_the_model_of_transformers(name: str):
    """Names and shapes of all weights, at full width, of few blocks."""
    few = {"num_hidden_layers": 4, "layer_types": None, "no_rope_layers": None}
    config = PUBLISHED[name] | ({"n_layer": 4} if PUBLISHED[name]["model_type"] == "gpt2" else few)
    with torch.device("meta"):
        other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    weights = by_canonical_name(dict(other.named_parameters()), config["model_type"])
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {p.name: p.shape for p in from_hugging_face(config).params}


@pytest.mark.filterwarnings("ignore:.*asks for dropout")
@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() & PRESETS.keys()))
def test_a_preset_is_the_published_model(name: str):
    assert PRESETS[name] == from_hugging_face(PUBLISHED[name])


@pytest.mark.filterwarnings("ignore:.*asks for dropout")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_default_configuration_is_read(family: str):
    """What this transformers writes for the family, and that without its rotary keys, which older ones wrote otherwise."""
    config = transformers.AutoConfig.for_model(family).to_dict()
    assert len(config) > 30
    spec = from_hugging_face({**config, "architectures": None})
    rope = config.pop("rope_parameters", {})
    assert from_hugging_face({**config, "rope_theta": rope.get("rope_theta"), "rope_scaling": None}) == spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str, folders):
    found = worst(ours(folders(name), torch.float64, documents()), theirs(folders(name), torch.float64, documents()))
    assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_has_the_same_bits_and_the_same_function(name: str, folders, tmp_path: Path):
    spec, tensors = read_all(folders(name))
    write_folder(tmp_path / "out", spec, iter(tensors.items()), torch.float32)
    before, after = (load_file(folder / "model.safetensors") for folder in (folders(name), tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
    first, second = (theirs(folder, torch.float64, documents()[:1]) for folder in (folders(name), tmp_path / "out"))
    assert torch.equal(first.logits, second.logits)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama-3.1-8b-instruct", {"rope_scaling": None}),
        ("llama-3.2-1b", {"rms_norm_eps": 1e-3}),
        ("tinyllama-1.1b", {"rope_theta": 1000.0}),
    ],
)
def test_a_key_that_is_not_read_is_noticed(name: str, change: dict, folders, tmp_path: Path):
    """The mutant: a reader that passes over one key."""
    reference = theirs(folders(name), torch.float64, documents())
    (tmp_path / "model.safetensors").hardlink_to(folders(name) / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(shrunk(name) | change))
    assert worst(ours(tmp_path, torch.float64, documents()), reference)["logits"] > 1e-4


REFUSED = [
    ("quantization_config", {"quant_method": "awq", "bits": 4}, "the weights are quantized"),
    ("use_mrope", True, "needs rotary embedding of several position axes"),
    ("attn_logit_softcapping", 50.0, "needs attention kernels with soft-capped scores"),
    ("final_logit_softcapping", 30.0, "needs soft-capped logits"),
    ("query_pre_attn_scalar", 256, "supported: 128, the head width"),
    ("attention_multiplier", 0.0078125, "of the head width"),
    ("residual_multiplier", 0.22, "needs scaled residual branches"),
    ("partial_rotary_factor", 0.75, "needs rotary embedding of a part of each head"),
    ("no_rope_layers", [1, 1, 1, 0] * 8, "needs blocks without rotary embedding"),
    ("layer_types", ["sliding_attention"] * 32, "needs a sliding window"),
    ("sliding_window", 4096, "needs a sliding window"),
    ("num_local_experts", 8, "needs a mixture of experts"),
    ("mystery", 1, "is not understood"),
]


@pytest.mark.parametrize(("key", "value", "why"), REFUSED)
def test_what_changes_the_function_is_refused_with_what_it_needs(key: str, value: object, why: str):
    with pytest.raises(UsageError) as caught:
        from_hugging_face({**PUBLISHED["llama-3.1-8b-instruct"], key: value})
    (line,) = str(caught.value).splitlines()[1:]
    assert key in line
    assert why in line


def test_keys_of_other_families_that_say_nothing_new_are_read():
    llama = PUBLISHED["llama-3.1-8b-instruct"]
    more = {
        **{"use_mrope": False, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
        **{"no_rope_layers": [1] * 32, "query_pre_attn_scalar": 128, "attention_multiplier": 128**-0.5, "partial_rotary_factor": 1.0},
        **{"embedding_multiplier": 1, "residual_multiplier": 1.0, "logits_scaling": 1, "attn_logit_softcapping": None, "head_dim": None},
        **{"final_logit_softcapping": None, "auto_map": {"AutoModelForCausalLM": "code.Model"}, "resid_pdrop": 0.0, "num_experts": 0},
        **{"is_encoder_decoder": False, "pruned_heads": {}, "quantization_config": None, "rope_interleaved": False, "clip_qkv": None},
    }
    assert from_hugging_face({**llama, **more}) == from_hugging_face(llama)
    assert from_hugging_face({**llama, "layer_types": ["full_attention"] * 32, "sliding_window": 4096}) == from_hugging_face(llama)


def test_an_absent_tie_means_what_the_family_means_by_it():
    for name in ("llama-2-7b", "mistral-7b-v0.3", "qwen3-0.6b"):
        config = {key: value for key, value in PUBLISHED[name].items() if key != "tie_word_embeddings"}
        assert from_hugging_face(config) == replace(from_hugging_face(PUBLISHED[name]), tied=False)
    with pytest.warns(UserWarning, match="asks for dropout"):
        assert from_hugging_face(PUBLISHED["gpt2"]).tied
