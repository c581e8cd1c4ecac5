"""`config.json` files in the words that published checkpoints carry. `shrunk` makes them small enough to compute with."""

from typing import Any

_LLAMA3_ROPE = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}


def _config(model_type: str, architecture: str, sizes: str, **more: Any) -> dict[str, Any]:
    """`sizes`: width, MLP width, layers, heads, key/value heads, vocabulary, positions."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    values = map(int, sizes.split())
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **dict(zip((*keys, "max_position_embeddings"), values)),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        **more,
    }


def _llama(sizes: str, **more: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", sizes, **more)


def _qwen(number: int, sizes: str, **more: Any) -> dict[str, Any]:
    return _config(f"qwen{number}", f"Qwen{number}ForCausalLM", sizes, **{"attention_dropout": 0.0, "rms_norm_eps": 1e-06, **more})


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(
        "4096 11008 32 32 32 32000 4096",
        **{"_name_or_path": "meta-llama/Llama-2-7b-hf", "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0"},
    ),
    "tinyllama-1.1b": _llama(
        "2048 5632 22 32 4 32000 2048",
        **{"attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "codellama-7b": _llama(
        "4096 11008 32 32 32 32016 16384",
        **{"bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None},
        **{"rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.33.0.dev0"},
    ),
    "llama-3.1-8b-instruct": _llama(
        "4096 14336 32 32 8 128256 131072",
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        **{"mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, **_LLAMA3_ROPE}},
        **{"rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3"},
    ),
    "llama-3.2-1b": _llama(
        "2048 8192 16 32 8 128256 131072",
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64},
        **{"mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, **_LLAMA3_ROPE}},
        **{"rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0"},
    ),
    "llama-3.2-1b, saved by transformers 5": _llama(
        "2048 8192 16 32 8 128256 131072",
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64},
        **{"mlp_bias": False, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": True},
        **{"rope_parameters": {"factor": 32.0, "rope_theta": 500000.0, **_LLAMA3_ROPE}, "dtype": "bfloat16"},
        **{"transformers_version": "5.0.0"},
    ),
    "deepseek-coder": _llama(
        "2048 5504 24 16 16 32256 16384",
        **{"bos_token_id": 32013, "eos_token_id": 32014, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_theta": 100000},
        **{"rope_scaling": {"factor": 4.0, "type": "linear"}, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "smollm2-135m": _llama(
        "576 1536 30 9 3 49152 8192",
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "is_llama_config": True},
        **{"mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None},
        **{"rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1"},
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    ),
    "mistral-7b-v0.1": _config(
        *("mistral", "MistralForCausalLM", "4096 14336 32 32 8 32000 32768"),
        **{"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096},
        **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0"},
    ),
    "mistral-7b-v0.3": _config(
        *("mistral", "MistralForCausalLM", "4096 14336 32 32 8 32768 32768"),
        **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
        **{"sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0"},
    ),
    "mistral-nemo": _config(
        *("mistral", "MistralForCausalLM", "5120 14336 40 32 8 131072 131072"),
        **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "rms_norm_eps": 1e-05},
        **{"rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "qwen2.5-7b": _qwen(
        *(2, "3584 18944 28 28 4 152064 131072"),
        **{"bos_token_id": 151643, "eos_token_id": 151643, "max_window_layers": 28, "rope_theta": 1000000.0},
        **{"sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_mrope": False},
        **{"use_sliding_window": False, "transformers_version": "4.40.1"},
    ),
    "qwen2.5-0.5b": _qwen(
        *(2, "896 4864 24 14 2 151936 32768"),
        **{"bos_token_id": 151643, "eos_token_id": 151645, "max_window_layers": 21, "rope_theta": 1000000.0},
        **{"sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False},
    ),
    "qwen2.5, saved by transformers 4.56": _qwen(
        *(2, "896 4864 24 14 2 151936 32768"),
        **{"bos_token_id": 151643, "eos_token_id": 151645, "max_window_layers": 21, "rope_theta": 1000000.0, "rope_scaling": None},
        **{"layer_types": ["full_attention"] * 24, "sliding_window": None, "tie_word_embeddings": True, "dtype": "bfloat16"},
        **{"use_sliding_window": False, "transformers_version": "4.56.0"},
    ),
    "qwen3-0.6b": _qwen(
        *(3, "1024 3072 28 16 8 151936 40960"),
        **{"attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "max_window_layers": 28},
        **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
        **{"use_sliding_window": False, "transformers_version": "4.51.0"},
    ),
    "qwen3-8b": _qwen(
        *(3, "4096 12288 36 32 8 151936 40960"),
        **{"attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "max_window_layers": 36},
        **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False},
    ),
    "olmo-2-7b": _config(
        *("olmo2", "Olmo2ForCausalLM", "4096 11008 32 32 32 100352 4096"),
        **{"attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257, "pad_token_id": 100277, "rms_norm_eps": 1e-06},
        **{"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32"},
        **{"transformers_version": "4.47.0.dev0"},
    ),
    "olmo-2-32b": _config(
        *("olmo2", "Olmo2ForCausalLM", "5120 27648 64 40 8 100352 4096"),
        **{"attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257, "pad_token_id": 100277, "rms_norm_eps": 1e-06},
        **{"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32"},
    ),
    "granite-3.1-2b": _config(
        *("granite", "GraniteForCausalLM", "2048 8192 40 32 8 49155 131072"),
        **{"attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625, "bos_token_id": 0, "eos_token_id": 0},
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False, "pad_token_id": 0, "residual_multiplier": 0.22},
        **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    ),
    "smollm3-3b": _config(
        *("smollm3", "SmolLM3ForCausalLM", "2048 11008 36 16 4 128256 65536"),
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128012, "max_window_layers": 28},
        **{"layer_types": ["full_attention"] * 36, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9},
        **{"pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0},
        **{"sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_sliding_window": False},
    ),
    "phi-3-mini-4k": _config(
        *("phi3", "Phi3ForCausalLM", "3072 8192 32 32 32 32064 4096"),
        **{"_name_or_path": "Phi-3-mini-4k-instruct", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1},
        **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}},
        **{"embd_pdrop": 0.0, "eos_token_id": 32000, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0},
        **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False},
    ),
    "phi-4": _config(
        *("phi3", "Phi3ForCausalLM", "5120 17920 40 40 10 100352 16384"),
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265},
        **{"original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "phi-4-mini, at its original length": _config(
        *("phi3", "Phi3ForCausalLM", "3072 8192 32 24 8 200064 4096"),
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999},
        **{"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "original_max_position_embeddings": 4096},
        **{"mlp_bias": False, "partial_rotary_factor": 0.75, "pad_token_id": 199999, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True},
    ),
    "gemma-2-2b": _config(
        *("gemma2", "Gemma2ForCausalLM", "2304 9216 26 8 4 256000 8192"),
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2, "eos_token_id": 1},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
        **{"rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4"},
    ),
    "gemma-3-1b": _config(
        *("gemma3_text", "Gemma3ForCausalLM", "1152 6912 26 4 1 262144 32768"),
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256, "hidden_act": None},
        **{"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
        **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512},
        **{"sliding_window_pattern": 6, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"},
    ),
    "gpt2": {
        **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256},
        **{"embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2"},
        **{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index"},
        **{"summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    },
    "distilgpt2": {
        **{"_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
        **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02},
        **{"label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12},
        **{"n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1, "summary_first_dropout": 0.1, "vocab_size": 50257},
    },
    "mixtral-8x7b": _config(
        *("mixtral", "MixtralForCausalLM", "4096 14336 32 32 8 32000 32768"),
        **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2, "num_local_experts": 8},
        **{"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02},
        **{"sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0"},
    ),
    "qwen3-30b-a3b": _config(
        *("qwen3_moe", "Qwen3MoeForCausalLM", "2048 6144 48 32 4 151936 40960"),
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "decoder_sparse_step": 1},
        **{"head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None},
        **{"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False},
        **{"torch_dtype": "bfloat16", "use_sliding_window": False},
    ),
    "olmoe-1b-7b": _config(
        *("olmoe", "OlmoeForCausalLM", "2048 1024 16 16 16 50304 4096"),
        **{"attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "eos_token_id": 50279, "norm_topk_prob": False},
        **{"num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False},
    ),
}


def shrunk(name: str, layers: int = 4) -> dict[str, Any]:
    """The config `name` with few, narrow layers and 257 tokens: the same keys, query heads for a key/value head and shape of heads."""
    config = dict(PUBLISHED[name])
    config |= {key: 0.0 for key in config if key.endswith(("pdrop", "dropout"))}
    if config["model_type"] == "gpt2":
        return config | {"n_embd": 48, "n_head": 6, "n_layer": layers, "n_positions": 64, "vocab_size": 257}
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    config |= {"num_hidden_layers": layers, "vocab_size": 257, "num_key_value_heads": 2, "num_attention_heads": 2 * group}
    config |= {"hidden_size": 16 * group, "intermediate_size": 40}
    config |= {"pad_token_id": None} if "pad_token_id" in config else {}  # transformers keeps gradients of such a token from its embedding
    if "head_dim" in config:
        config["head_dim"] = 16
    config |= {key: size for key, size in {"moe_intermediate_size": 24, "num_experts": 12, "num_local_experts": 5}.items() if key in config}
    if config.get("sliding_window"):
        config["sliding_window"] = 64
    return config | {key: config[key][:layers] for key in ("layer_types", "no_rope_layers") if key in config}
