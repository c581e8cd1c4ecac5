"""config.json to ModelSpec and back: every key is read, harmless or refused."""

import json
import warnings
from dataclasses import replace

import pytest

from longshift.errors import UsageError
from longshift.spec.families import PRESETS, from_hugging_face, preset, read_spec, to_hugging_face
from longshift.spec.model import Rope

# The config.json files as their authors published them.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_31_with_rope_scaling():
    spec = from_hugging_face(LLAMA_31_8B)
    assert spec.parameters == 8_030_261_248
    assert spec.rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (spec.family, spec.kv_heads, spec.head_width, spec.tied, spec.norm_eps) == ("llama", 8, 128, False, 1e-5)


def test_old_and_new_rope_keys_mean_the_same():
    new = without(LLAMA_31_8B, "rope_scaling", "rope_theta")
    new["rope_parameters"] = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert from_hugging_face(new) == from_hugging_face(LLAMA_31_8B)
    old_word = {**LLAMA_31_8B, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hugging_face(old_word).rope == Rope(500000.0, "linear", 2.0)
    assert from_hugging_face({**LLAMA_31_8B, "rope_scaling": None}).rope == Rope(500000.0)
    assert from_hugging_face(without(LLAMA_31_8B, "rope_scaling", "rope_theta")).rope == Rope(10000.0)


def test_rope_parameters_of_kinds_of_blocks_are_nothing_else():
    """As in transformers, which reads neither a mapping for all blocks nor kinds of blocks in rope_scaling."""
    linear = {"rope_type": "linear", "factor": 2.0}
    config = {**to_hugging_face(preset("gemma-3-1b")), "rope_theta": None, "rope_local_base_freq": None}
    spec = from_hugging_face({**config, "rope_parameters": {"full_attention": linear}})
    assert (spec.rope, spec.window_rope) == (Rope(1e6, "linear", 2.0), Rope(1e4))
    for key, section in (("rope_parameters", linear), ("rope_scaling", {"full_attention": linear})):
        with pytest.raises(UsageError, match=f"{key}[.a-z_]* = "):
            from_hugging_face({**config, key: section})


def test_qwen_has_biases_and_no_window_unless_asked():
    config = QWEN25_05B
    spec = from_hugging_face(config)
    assert spec.parameters == 494_032_768
    assert (spec.tied, spec.qkv_bias, spec.out_bias, spec.sliding_window) == (True, True, False, None)
    assert from_hugging_face({**config, "use_sliding_window": True}).sliding_window is None  # from layer 24 of 24 on
    every = {**config, "use_sliding_window": True, "max_window_layers": 0}
    assert from_hugging_face(every).sliding_window == 32768
    some = from_hugging_face({**every, "max_window_layers": 10})
    assert (some.sliding_window, some.full_blocks) == (32768, tuple(range(1, 11)))


def test_mistral_window_absent_and_null_differ():
    assert from_hugging_face(MISTRAL_7B).sliding_window == 4096
    assert from_hugging_face(without(MISTRAL_7B, "sliding_window")).sliding_window == 4096
    assert from_hugging_face({**MISTRAL_7B, "sliding_window": None}).sliding_window is None


def test_gpt2_warns_of_dropout_once_and_reads_on():
    with pytest.warns(UserWarning, match="attn_pdrop 0.1") as caught:
        spec = from_hugging_face(GPT2)
    assert len(caught) == 1
    assert spec == PRESETS["gpt2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_hugging_face({**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0, "resid_pdrop": 0.0})


def test_a_router_loss_that_is_not_trained_with_is_warned_of_once():
    config = {**to_hugging_face(preset("tiny-qwen3-moe")), "router_aux_loss_coef": 0.3}
    with pytest.warns(UserWarning, match=r"auxiliary loss of routers \(output_router_logits: true\); training here adds none") as caught:
        assert from_hugging_face({**config, "output_router_logits": True}) == preset("tiny-qwen3-moe")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_hugging_face({**config, "output_router_logits": False})
    with pytest.raises(UsageError, match=r"output_router_logits = 'yes': must be true or false"):
        from_hugging_face({**config, "output_router_logits": "yes"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        (
            {"model_type": "opt"},
            "supported: llama, mistral, qwen2, qwen3, olmo2, granite, smollm3, phi3, gemma2, gemma3_text, mixtral, qwen3_moe, olmoe, gpt2",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = 'LlamaForSequenceClassification'"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu': supported: silu"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_type = 'longrope': supported: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor = None: is required"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
            "rope_scaling.finetuned = True",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "but rope_type says 'default'"),
        ({"rope_scaling": "linear"}, "must be a mapping"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": None}, "but rope_theta says 500000.0"),
        ({"rope_parameters": {"rope_type": "default"}}, "given twice"),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.full_attention = {'rope_type': 'linear', 'factor': 2.0}: this family has one rotary embedding for all blocks",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: needs rotary embedding of a part"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "32: does not divide into 5 key/value heads"),
        ({"hidden_size": 4100}, "4100: does not divide into 32 heads"),
        ({"head_dim": 63}, "need an even head width"),
        ({"vocab_size": "128256"}, "vocab_size = '128256': must be a positive whole number"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
        ({"rms_norm_eps": None, "intermediate_size": None}, "intermediate_size = None: is required"),
        ({"sliding_window": 4096}, "sliding_window = 4096: needs a sliding window"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(UsageError) as caught:
        from_hugging_face({**LLAMA_31_8B, **change})
    assert message in str(caught.value)


def test_folders_are_read_or_refused_with_their_path(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(UsageError, match="holds no config"):
        read_spec(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object"), ('{"model_type": "lama"}', "did you mean 'llama'")):
        file.write_text(text)
        with pytest.raises(UsageError, match=message) as caught:
            read_spec(tmp_path)
        assert str(file) in str(caught.value)
    file.write_text(json.dumps(LLAMA_31_8B))
    assert read_spec(tmp_path) == from_hugging_face(LLAMA_31_8B)


def test_gpt2_variants_that_compute_something_else_are_refused():
    for change in ({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"add_cross_attention": True}):
        with pytest.raises(UsageError, match=next(iter(change))):
            from_hugging_face({**GPT2, **change})


def test_all_faults_are_listed_at_once():
    with pytest.raises(UsageError) as caught:
        from_hugging_face({**without(LLAMA_31_8B, "vocab_size"), "hidden_act": "relu", "mystery": 1})
    assert all(word in str(caught.value) for word in ("vocab_size", "relu", "mystery"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json(name):
    config = json.loads(json.dumps(to_hugging_face(PRESETS[name])))
    assert from_hugging_face(config) == PRESETS[name]


@pytest.mark.parametrize("config", [LLAMA_31_8B, MISTRAL_7B, QWEN25_05B])
def test_published_configs_survive_a_round_trip(config):
    spec = from_hugging_face(config)
    assert from_hugging_face(to_hugging_face(spec)) == spec


def test_a_spec_without_words_in_its_family_is_refused():
    with pytest.raises(UsageError, match="qk_norm=True"):
        to_hugging_face(replace(PRESETS["tiny-llama"], qk_norm=True))


def test_presets_are_found_or_suggested():
    assert preset("qwen3-8b") is PRESETS["qwen3-8b"]
    with pytest.raises(UsageError, match="did you mean 'tiny-llama'"):
        preset("tinyllama")
    with pytest.raises(UsageError, match="known: tiny-llama"):
        preset("zzz")
