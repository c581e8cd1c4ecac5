"""The decoder and its folders against transformers, for every family: logits, loss, every gradient; export and re-import."""

import json
import resource
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from against_transformers import LENGTHS, by_canonical_name, documents, ours, random_model, read_all, theirs, worst
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longshift.documents.batch import Document
from longshift.errors import CheckpointError
from longshift.layout.box import Box
from longshift.model.decoder import Decoder, build_unit, embed_scale
from longshift.model.weight_folder import INDEX, WeightFolder
from longshift.model.write_folder import TOKEN_IDS, FolderExtras, write_folder
from longshift.spec.families import PRESETS, from_hugging_face, read_spec
from longshift.spec.model import ModelSpec
from longshift.spec.positions import stretched

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Wavelengths of head width 16 and this theta: 6 to 350 tokens, so that all three regimes of the scaling occur.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA2: dict[str, Any] = {
    **{"head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window": 9, "pad_token_id": None},
    **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
}
GEMMA3: dict[str, Any] = {
    **{"head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window": 9, "pad_token_id": None},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama2": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama3": LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3_ROPE),
    "llama-linear-biases": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=53),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-some-windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    "gemma2": Gemma2Config(**SIZES, **GEMMA2),
    "gemma3": Gemma3TextConfig(**SIZES, **GEMMA3),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=24, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True),
    "qwen3-moe-all": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=4),
    "olmoe": OlmoeConfig(**{**SIZES, "num_key_value_heads": 6}, num_experts=6, num_experts_per_tok=1, pad_token_id=None),
    "gpt2": GPT2Config(**GPT2_SIZES, n_inner=40),
    "gpt2-untied": GPT2Config(**GPT2_SIZES, tie_word_embeddings=False),
}
EXACT = 1e-12
FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a family, written by transformers once: random weights, norms and biases away from one and zero."""
    root = tmp_path_factory.mktemp("hf")

    @cache
    def folder(name: str) -> Path:
        random_model(CONFIGS[name]).save_pretrained(root / name)
        return root / name

    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_every_gradient_agree_document_by_document(name, folders):
    truth = theirs(folders(name), torch.float64, documents())
    found = worst(ours(folders(name), torch.float64, documents()), truth)
    assert not {what: value for what, value in found.items() if not value < EXACT}


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_as_near_to_float64_as_theirs(name, folders):
    """A weight whose gradient nearly cancels is as far off as the processor's sums are, so theirs sets the bound there."""
    truth = theirs(folders(name), torch.float64, documents())
    mine, other = (worst(way(folders(name), torch.float32, documents()), truth) for way in (ours, theirs))
    assert not {what: (value, other[what]) for what, value in mine.items() if not value < max(FLOAT32, 1.5 * other[what])}


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_documents_run_together_are_noticed(name, folders):
    """The mutant: one document instead of three, so that attention and positions run across."""
    docs = documents()[:1] + documents()[3:]
    merged = [Document(np.concatenate([d.ids for d in docs]), np.concatenate([d.labels for d in docs]))]
    found = worst(ours(folders(name), torch.float64, merged), theirs(folders(name), torch.float64, docs))
    assert found["logits"] > 1e-3
    assert max(found.values()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gemmas_embeddings_are_scaled_as_its_format_has_the_scale(dtype):
    for width in (48, 1152, 2560, 3840, 5376):
        spec = replace(PRESETS["gemma-3-1b"], width=width, embed_scale=width**0.5)
        assert embed_scale(spec, dtype) == float(torch.tensor(width**0.5, dtype=dtype))


def test_our_sum_over_the_count_is_their_mean_loss(folders):
    docs = documents()[2:3]
    model = AutoModelForCausalLM.from_pretrained(folders("qwen3"), dtype=torch.float32)
    ids = torch.from_numpy(docs[0].ids)[None]
    mean = float(model(input_ids=ids, labels=ids).loss.detach())
    assert float(ours(folders("qwen3"), torch.float32, docs).loss) / (LENGTHS[2] - 1) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_spec_is_read_whole(name, folders):
    """From the folder, and from the config of a transformers that wrote older keys."""
    spec = read_spec(folders(name))
    assert from_hugging_face(CONFIGS[name].to_diff_dict()) == spec
    assert spec.vocab == 257
    assert spec.tied == CONFIGS[name].tie_word_embeddings


@pytest.mark.parametrize("name", [*CONFIGS, "tiny-llama", "tiny-qwen3", "tiny-gpt2"])
def test_the_table_is_the_model(name, folders):
    """Parameters built on the meta device, against the table; and, for families of transformers, against its model."""
    spec = read_spec(folders(name)) if name in CONFIGS else PRESETS[name]
    for unit in range(spec.units):
        built = {role: tuple(weight.shape) for role, weight in build_unit(spec, unit).named_parameters()}
        assert built == {p.role: p.shape for p in spec.of_unit(unit)}
    model = Decoder(spec)
    assert all(weight.is_meta for weight in model.parameters())
    assert [(name, tuple(w.shape)) for name, w in model.weights().items()] == [(p.name, p.shape) for p in spec.params]
    if name in CONFIGS:
        with torch.device("meta"):
            other = AutoModelForCausalLM.from_config(CONFIGS[name])
        weights = by_canonical_name(dict(other.named_parameters()), other.config.model_type)
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == {p.name: p.shape for p in spec.params}


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
@pytest.mark.parametrize("name", ["llama3", "qwen2-tied", "gpt2", "mistral", "mixtral", "qwen3-moe"])
def test_export_is_bit_exact_and_transformers_opens_it(name, shard_bytes, folders, tmp_path):
    spec, tensors = read_all(folders(name))
    write_folder(tmp_path / "out", spec, iter(tensors.items()), torch.float32, None, shard_bytes)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (1 if shard_bytes > 10**8 else len_shards(spec, shard_bytes))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again, back = read_all(tmp_path / "out")
    assert again == spec
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (folders(name), tmp_path / "out")]
    assert models[1].dtype == torch.float32
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def len_shards(spec, limit: int) -> int:
    count, filled = 0, limit
    for p in spec.params:
        size = 4 * p.elements // len(p.stored_names)
        for _ in p.stored_names:
            count, filled = (count + 1, size) if filled + size > limit else (count, filled + size)
    return count


def test_bf16_export_rounds_once(folders, tmp_path):
    spec, tensors = read_all(folders("qwen3"))
    write_folder(tmp_path / "out", spec, iter(tensors.items()), torch.bfloat16)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    back = read_all(tmp_path / "out")[1]
    assert all(back[n].dtype == torch.bfloat16 and torch.equal(back[n], tensors[n].bfloat16()) for n in tensors)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_boxes_are_read_alone(folders):
    spec, tensors = read_all(folders("llama3"))
    weights = WeightFolder(folders("llama3"), spec)
    for name, whole in tensors.items():
        box = Box(tuple(n // 3 for n in whole.shape), tuple(n // 2 + 1 for n in whole.shape))
        assert torch.equal(weights.read(name, box), whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop))])
    empty = weights.read("model.norm.weight", Box((3,), (3,)))
    assert (empty.shape, empty.dtype) == ((0,), torch.float32)


def test_names_without_the_head_prefix_and_old_buffers(folders, tmp_path):
    """As in the original `gpt2` folder."""
    spec, tensors = read_all(folders("gpt2"))
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "h.2.attn.masked_bias": torch.tensor(-1e4)}
    copy_folder(folders("gpt2"), tmp_path, old)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_all(tmp_path)[1].items())
    copy_folder(folders("gpt2"), tmp_path, {**old, "h.3.attn.c_attn.bias": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"unexpected  h\.3\.attn\.c_attn\.bias in model\.safetensors"):
        WeightFolder(tmp_path, spec)


def test_a_stored_tied_head_must_equal_the_embedding(folders, tmp_path):
    spec, tensors = read_all(folders("qwen3"))
    head = tensors["model.embed_tokens.weight"].clone()
    copy_folder(folders("qwen3"), tmp_path, {**tensors, "lm_head.weight": head})
    WeightFolder(tmp_path, spec)
    head[-1, -1] += 1
    copy_folder(folders("qwen3"), tmp_path, {**tensors, "lm_head.weight": head})
    with pytest.raises(CheckpointError, match='set "tie_word_embeddings": false'):
        WeightFolder(tmp_path, spec)


def test_all_faults_of_a_folder_are_listed_at_once(folders, tmp_path):
    spec, tensors = read_all(folders("llama2"))
    tensors["model.extra.weight"] = torch.ones(3)
    tensors["model.norm.weight"] = torch.ones(7)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    copy_folder(folders("llama2"), tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        WeightFolder(tmp_path, spec)
    for line in (
        "unexpected  model.extra.weight",
        "wrong shape model.norm.weight: [7] in the folder, config.json says [48]",
        "wrong dtype lm_head.weight: I8",
        "missing     model.layers.1.mlp.up_proj.weight [40, 48]",
    ):
        assert line in str(caught.value)


def test_pickles_are_refused_with_the_line_that_converts(folders, tmp_path):
    copy_folder(folders("llama2"), tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    spec = read_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        WeightFolder(tmp_path, spec)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"never opened here.*\n.*save_pretrained"):
        WeightFolder(tmp_path, spec)


def test_damaged_and_incomplete_folders_are_named(folders, tmp_path):
    spec, tensors = read_all(folders("llama2"))
    write_folder(tmp_path / "out", spec, iter(tensors.items()), torch.float32, None, 30_000)
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        WeightFolder(tmp_path / "out", spec)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"are missing: {shard.name}"):
        WeightFolder(tmp_path / "out", spec)
    first = sorted((tmp_path / "out").glob("*.safetensors"))[0]
    shard.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=f"twice .* in {first.name} and {shard.name}"):
        WeightFolder(tmp_path / "out", spec)
    for text in ("{", "{}", '{"weight_map": {"a": []}}', '{"weight_map": []}'):
        (tmp_path / "out" / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read as an index"):
            WeightFolder(tmp_path / "out", spec)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "sub/model.safetensors", "x" * 300, "a\0b", "", 1, None]
)
def test_names_in_an_index_do_not_lead_out_of_the_folder(tmp_path, name):
    spec = from_hugging_face({"model_type": "llama", **SIZES})
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match="which is no file name: weights lie in the folder itself"):
        WeightFolder(folder, spec)


def test_a_failed_export_leaves_nothing(folders, tmp_path):
    spec, tensors = read_all(folders("llama2"))
    short = list(tensors.items())[:-1]
    for wrong in (short, short[1:]):
        with pytest.raises(ValueError, match="expected"):
            write_folder(tmp_path / "out", spec, iter(wrong), torch.float32)
        assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out/keep").touch()
    with pytest.raises(CheckpointError, match=r"exists and is not empty; choose another folder$"):
        write_folder(tmp_path / "out", spec, iter(tensors.items()), torch.float32)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["keep"]
    with pytest.raises(CheckpointError, match="cannot write"):
        write_folder(tmp_path / "out/keep/deeper", spec, iter(tensors.items()), torch.float32)


def test_a_full_disk_leaves_nothing_and_is_named(folders, tmp_path):
    spec, tensors = read_all(folders("llama2"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # every file ends here, as on a full disk
    try:
        with pytest.raises(CheckpointError, match=f"cannot write {tmp_path / 'out'}"):
            write_folder(tmp_path / "out", spec, iter(tensors.items()), torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_tokenizer_files_and_token_ids_are_carried_along(folders, tmp_path):
    spec, tensors = read_all(folders("llama2"))
    source = tmp_path / "source"
    source.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    files = {name: source / name for name in ("tokenizer.json", "chat_template.jinja")}
    for number, ids in enumerate(({"eos_token_id": [2, 1]}, {"pad_token_id": 0}, None)):
        out = tmp_path / f"out{number}"
        carried = None if ids is None else FolderExtras(files, ("<end>", 2), ids, (2,), {}, None)
        write_folder(out, spec, iter(tensors.items()), torch.float32, carried)
        config = json.loads((out / "config.json").read_text())
        assert [config[name] for name in TOKEN_IDS] == [[None, [2, 1], None], [None, 2, 0], [None] * 3][number]
        assert (out / "chat_template.jinja").exists() == (number < 2)
        if number < 2:
            assert AutoTokenizer.from_pretrained(out).eos_token_id == 2


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_fused_experts_are_read_as_matrices_of_each(name, folders, tmp_path):
    """As transformers 5 saves them with save_original_format=False."""
    spec, tensors = read_all(folders(name))
    model = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    stored = load_file(tmp_path / "fused/model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    again, fused = read_all(tmp_path / "fused")
    assert again == spec
    assert all(torch.equal(fused[weight], tensor) for weight, tensor in tensors.items())
    weights = WeightFolder(tmp_path / "fused", spec)
    for p in (p for p in spec.params if p.experts):  # from the middle of an expert to that of another
        box = Box((p.shape[0] // p.experts // 2, 1), (p.shape[0] - 3, p.shape[1] - 1))
        assert torch.equal(weights.read(p.name, box), tensors[p.name][tuple(slice(a, b) for a, b in zip(box.start, box.stop))])
    stored["model.layers.0.mlp.experts.gate_up_proj"] = stored["model.layers.0.mlp.experts.gate_up_proj"][:, 1:].clone()
    save_file(stored, tmp_path / "fused/model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected  model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        WeightFolder(tmp_path / "fused", spec)


def test_the_pad_token_is_trained_as_any_other(folders, tmp_path):
    """As docs/models.md says; transformers gives its embedding no gradient."""
    copy_folder(folders("olmoe"), tmp_path, load_file(folders("olmoe") / "model.safetensors"))
    pad = int(documents()[0].ids[0])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    mine, other = (way(tmp_path, torch.float64, documents()).grads["model.embed_tokens.weight"] for way in (ours, theirs))
    assert mine[pad].norm() > 1e-6
    assert not other[pad].any()
    other[pad] = mine[pad]
    assert (mine - other).norm() / mine.norm() < EXACT


YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
RAMP = 1e-6  # transformers forms the ramp between YaRN's bounds in float32; other positions change logits by 1e-2


@pytest.mark.parametrize("inside", [None, 16])
@pytest.mark.parametrize("outside", [None, 32])
@pytest.mark.parametrize(("name", "rope"), [("qwen3", YARN_ROPE), ("qwen3-moe", YARN_ROPE), ("llama3", LLAMA3_ROPE), ("gemma3", YARN_ROPE)])
def test_original_positions_beside_the_section_count_as_in_transformers(name, rope, outside, inside, folders, tmp_path):
    """They count before those in the section, but not where each kind of block has a section."""
    copy_folder(folders(name), tmp_path, load_file(folders(name) / "model.safetensors"))
    section = rope | ({ORIGINAL: inside} if inside else {})
    config = json.loads((tmp_path / "config.json").read_text())
    local = config["rope_parameters"].get("sliding_attention")
    config["rope_parameters"] = {"full_attention": section, "sliding_attention": local} if local else section
    (tmp_path / "config.json").write_text(json.dumps(config | ({ORIGINAL: outside} if outside else {})))
    found = worst(ours(tmp_path, torch.float64, documents()), theirs(tmp_path, torch.float64, documents()))
    assert max(found.values()) < (RAMP if rope is YARN_ROPE else EXACT)


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_an_export_with_another_scaling_has_its_own_original_positions(kind, folders, tmp_path):
    spec, tensors = read_all(folders("qwen3"))
    long = stretched(spec, kind, 256)
    carried = FolderExtras({}, ("<end>", 2), {}, (2,), {ORIGINAL: 16}, None)
    write_folder(tmp_path / "out", long, iter(tensors.items()), torch.float32, carried)
    assert read_spec(tmp_path / "out") == long
    found = worst(ours(tmp_path / "out", torch.float64, documents()), theirs(tmp_path / "out", torch.float64, documents()))
    assert max(found.values()) < (RAMP if kind == "yarn" else EXACT)


def test_a_box_is_read_without_the_rest_of_its_weight(tmp_path):
    """A sparse file of 4 GiB."""
    spec = ModelSpec("llama", 2**20, 1024, 1, 1, 1, 1024, 1, 1, tied=True)
    header, at = {}, 0
    for p in spec.params:
        header[p.name] = {"dtype": "F32", "shape": p.shape, "data_offsets": [at, at + 4 * p.elements]}
        at += 4 * p.elements
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = WeightFolder(tmp_path, spec).read("model.embed_tokens.weight", Box((2**19, 0), (2**19 + 3, 1024)))
    assert torch.equal(rows, torch.zeros(3, 1024))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB


def copy_folder(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")


def test_reading_agrees_with_safetensors(folders):
    stored = load_file(folders("qwen3") / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in read_all(folders("qwen3"))[1].items())
