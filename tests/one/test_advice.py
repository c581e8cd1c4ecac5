"""What a refusal of a model folder advises is done here, word by word: the function is then what `transformers` has of the folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from against_transformers import LENGTHS, difference, documents, ours, random_model, theirs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, GPT2Config, LlamaConfig, Qwen3Config

from longshift.errors import CheckpointError, LongshiftError, UsageError
from longshift.model.weight_folder import WeightFolder
from longshift.spec.families import read_spec
from longshift.spec.family_table import FAMILIES

SIZES: dict[str, Any] = {
    **{"vocab_size": 257, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=257, n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=40, tie_word_embeddings=True, **NO_DROPOUT),
}
IDS = torch.randint(0, 257, (max(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model folder of the family that the test asks for."""
    random_model(CONFIGS[request.param]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def truth_of(folder: Path) -> torch.Tensor:
    """Logits [T, V] by transformers in float64, of documents end to end."""
    return theirs(folder, torch.float64, documents()).logits


def same(folder: Path, truth: torch.Tensor) -> bool:
    """Whether the folder's function is the same, read by Longshift."""
    return difference(ours(folder, torch.float64, documents()).logits, truth) < 1e-10


def refusal(folder: Path) -> str:
    with pytest.raises(LongshiftError) as caught:
        WeightFolder(folder, read_spec(folder))
    return str(caught.value)


def edit(folder: Path, **keys: Any) -> None:
    """Change keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("folder", ["qwen3", "gpt2", "llama"], indirect=True)
def test_a_tied_head_that_differs(folder):
    """`set "tie_word_embeddings": false in config.json to train both`."""
    tensors = load_file(folder / "model.safetensors")
    embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**tensors, "lm_head.weight": tensors[embedding] * 2 + 1}, folder / "model.safetensors", {"format": "pt"})
    edit(folder, tie_word_embeddings=True)
    truth = truth_of(folder)
    assert 'set "tie_word_embeddings": false in config.json' in refusal(folder)
    edit(folder, tie_word_embeddings=False)
    assert same(folder, truth)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_weights_that_are_pickles(folder):
    """The command of the message is run as it stands."""
    truth = truth_of(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    command = refusal(folder).splitlines()[1].strip().replace("python ", f"{sys.executable} ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same(folder.with_name("model-safetensors"), truth)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
@pytest.mark.parametrize("value", [True, "some text", [1, 2]], ids=str)
def test_a_key_that_is_not_understood(folder, value):
    """`if it does not change what the model computes, delete it`: transformers does not know it either."""
    edit(folder, made_by_somebody=value)
    truth = truth_of(folder)
    assert "made_by_somebody" in (said := refusal(folder))
    assert "delete it from config.json" in said
    edit(folder, made_by_somebody=None)
    assert same(folder, truth)


@pytest.mark.parametrize("folder", ["llama", "qwen3"], indirect=True)
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_dynamic_scaling_of_documents_that_are_no_longer_than_it_says(folder, factor):
    """`documents of at most 64 tokens have the same angles without it: for these, set rope_scaling to null`."""
    edit(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"rope_type": "dynamic", "factor": factor})
    truth = truth_of(folder)
    said = refusal(folder)
    assert "documents of at most 64 tokens have the same angles without it: for these, set rope_scaling to null" in said
    assert "rope_theta" not in said, "it is a key that counts"
    assert max(LENGTHS) <= 64
    edit(folder, rope_scaling=None)
    assert same(folder, truth)


@pytest.mark.parametrize("kind", ["longrope", "ntk", "su"])
def test_scalings_that_change_short_documents_are_refused_without_such_advice(tmp_path, kind):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters=None, rope_theta=10000.0, rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(UsageError, match="rope_type") as caught:
        read_spec(tmp_path)
    assert "null" not in str(caught.value)


def test_the_text_model_in_a_model_of_text_and_images(tmp_path):
    """`the text model in it, text_config, is of the family gemma3_text: save it as a folder of its own`."""
    text = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "pad_token_id": None, "model_type": "gemma3_text"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, image_token_id=250, mm_tokens_per_image=4)  # pyright: ignore[reportArgumentType]
    )
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(UsageError, match="text_config, is of the family gemma3_text, which is supported: save it as a folder of its own"):
        read_spec(tmp_path / "whole")
    with torch.no_grad():
        truth = whole.eval()(IDS[None] % 200).logits[0]
    model = AutoModelForCausalLM.from_config(whole.config.text_config)
    model.load_state_dict(
        {
            name.replace("model.language_model.", "model."): x
            for name, x in whole.state_dict().items()
            if "vision" not in name and "multi_modal" not in name
        }
    )
    model.save_pretrained(tmp_path / "own")
    with torch.no_grad():
        assert (model.eval()(IDS[None] % 200).logits[0] - truth).norm() < 1e-5 * truth.norm()
    assert same(tmp_path / "own", truth_of(tmp_path / "own"))


@pytest.mark.parametrize("folder", ["llama", "qwen3", "gpt2"], indirect=True)
def test_a_link_out_of_the_folder(folder, tmp_path_factory):
    """`copy the file there`."""
    truth, outside = truth_of(folder), tmp_path_factory.mktemp("elsewhere") / "x.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="copy the file there"):
        WeightFolder(folder, read_spec(folder))
    (folder / "model.safetensors").unlink()
    shutil.copy(outside, folder / "model.safetensors")
    assert same(folder, truth)


@pytest.mark.parametrize("name", ["lama", "mistal", "qwen_3"])
def test_a_family_that_is_named_is_the_one_with_a_typing_error(tmp_path, name):
    config = LlamaConfig(**SIZES).to_dict() | {"model_type": name}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="did you mean") as caught:
        read_spec(tmp_path)
    meant = str(caught.value).rsplit("'", 2)[1]
    assert meant in FAMILIES
    assert meant == {"lama": "llama", "mistal": "mistral", "qwen_3": "qwen3"}[name]
