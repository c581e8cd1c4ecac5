"""The keys of a Hugging Face `config.json`: typed values, faults with their key, and what is known
of keys that no family reads.

Every key is read, or known to leave the function of the weights alone, or refused: nothing is
skipped silently."""

from collections.abc import Callable, Mapping
from typing import Any

from longshift.errors import shown

_ACTIVATION = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "residual_dropout",
    "dropout",
)

# Of the auxiliary loss of routers, which is not trained with.
ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")

# Bookkeeping, text generation, classification, and where code is that is never run: nothing that a
# forward pass to logits reads.
_NOT_THE_FUNCTION = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "attn_implementation",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "use_bfloat16",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "tokenizer_class",
        "decoder_start_token_id",
        "prefix",
        "pretraining_tp",
        "n_ctx",
        "reorder_and_upcast_attn",
        "gradient_checkpointing",
        "torchscript",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "finetuning_task",
        "problem_type",
        "task_specific_params",
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "auto_map",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "model_name",
        "return_dict_in_generate",
        "output_scores",
        "remove_invalid_values",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "cross_attention_hidden_size",
        "is_decoder",
        "original_max_position_embeddings",
        "max_sequence_length",
        "cache_implementation",
        "_sliding_window_pattern",
    )
)

# What an export takes from the config.json that a run began with. Other programs read such keys:
# llama.cpp wants n_ctx of GPT-2. Left out: where weights came from, code that is not copied, and
# what an export says anew.
CARRIED = _NOT_THE_FUNCTION - {
    "_name_or_path", "_commit_hash", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers.js_config",
    "_attn_implementation_autoset",
} | set(ROUTER_LOSS)  # fmt: skip

# Keys of other families: the value that changes nothing, and what any other would need.
_NEEDS: Mapping[str, tuple[Any, str]] = {
    "quantization_config": (
        {},
        (
            "the weights are quantized and only plain ones can be trained; use the checkpoint that"
            " it was made from"
        ),
    ),
    "compression_config": (
        {},
        (
            "the weights are compressed and only plain ones can be trained; use the checkpoint that"
            " it was made from"
        ),
    ),
    "attention_bias": (False, "needs biases in attention, which this family has not"),
    "mlp_bias": (False, "needs biases in the MLP, which this family has not"),
    "use_mrope": (
        False,
        "needs rotary embedding of several position axes, which is not implemented",
    ),
    "rope_interleaved": (
        False,
        "needs rotary embedding of neighbouring channels, which is not implemented",
    ),
    "use_sliding_window": (False, "needs a sliding window, which this family has not"),
    "use_bidirectional_attention": (
        False,
        "needs attention to later tokens, which is not implemented",
    ),
    "is_encoder_decoder": (False, "needs an encoder, which is not implemented"),
    "add_cross_attention": (False, "needs cross-attention, which is not implemented"),
    "pruned_heads": ({}, "needs heads left out of some layers, which is not implemented"),
    "scale_attn_weights": (True, "needs attention without its scale, which is not implemented"),
    "scale_attn_by_inverse_layer_idx": (
        False,
        "needs another scale of attention in every layer, which is not implemented",
    ),
    "clip_qkv": (None, "needs queries, keys and values to be clipped, which is not implemented"),
    "attn_logit_softcapping": (
        None,
        "needs attention kernels with soft-capped scores, which are not there",
    ),
    "final_logit_softcapping": (None, "needs soft-capped logits, which are not implemented"),
    "embedding_multiplier": (1.0, "needs scaled embeddings, which this family has not"),
    "residual_multiplier": (1.0, "needs scaled residual branches, which this family has not"),
    "logits_scaling": (1.0, "needs scaled logits, which this family has not"),
    "lm_head_bias": (False, "needs a bias in the output head, which is not implemented"),
    "full_attn_mod": (1, "needs attention that differs between layers, which is not implemented"),
    "interpolate_factor": (1, "needs interpolated positions, which are not implemented"),
    "num_experts": (0, "needs a mixture of experts, which this family has not"),
    "num_local_experts": (0, "needs a mixture of experts, which this family has not"),
}


MAX_SIZE = 1 << 31  # of every number of a model: the ids of tensors of that width are 32 bits
MAX_EXPERTS = 1 << 12  # each is a matmul
MAX_BLOCKS = 1 << 12  # lists of blocks are walked, and no model has a tenth of them
MAX_NUMBER = 1e15  # and its inverse: fp32 squares them


class Reader:
    """Takes typed values out of a config (mutable: it gathers what was asked for and what is
    wrong). A value that is refused is replaced by a harmless one, so that all faults are found and
    raised together."""

    def __init__(self, config: Mapping[str, Any], where: str = ""):
        self.config = config
        self.where = where
        self.known: set[str] = set()
        self.faults: list[str] = []
        self.dropout: dict[str, float] = {}

    def fault(self, key: str, value: object, reason: str) -> None:
        """Add a fault of a key to the list."""
        self.faults.append(f"{self.where}{str(key)[:80]} = {shown(value)}: {reason}")

    def value(self, key: str, default: Any, is_good: Callable[[Any], bool], reason: str) -> Any:
        """`config[key]` if `is_good(value)`, else a fault with this `reason`;
        absent or null means `default`."""
        self.known.add(key)
        value = self.config.get(key)
        # Some writers put null where others leave a key out.
        if value is None:
            return default
        if not is_good(value):
            self.fault(key, value, reason)
            return default
        return value

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        return self._positive(
            key, default, (int,), 1, limit, f"must be a positive whole number, at most {limit}"
        )

    def number(self, key: str, default: float | None = None) -> float:
        reason = f"must be a positive number, from {1 / MAX_NUMBER:g} to {MAX_NUMBER:g}"
        return self._positive(key, default, (int, float), 1 / MAX_NUMBER, MAX_NUMBER, reason)

    def _positive(
        self, key: str, default: Any, kinds: tuple[type, ...], low: float, high: float, reason: str
    ) -> Any:
        """Required where there is no default."""
        if default is None and self.config.get(key) is None:
            self.fault(key, None, "is required")
        # `isinstance` would take true for 1.
        return self.value(
            key, default or 1, lambda v: type(v) in kinds and low <= v <= high, reason
        )

    def whole(self, key: str, default: int) -> int:
        return self.value(
            key, default, lambda v: type(v) is int and v >= 0, "must be a whole number"
        )

    def flag(self, key: str, default: bool) -> bool:
        return self.value(key, default, lambda v: isinstance(v, bool), "must be true or false")

    def only(self, key: str, supported: Any, reason: str) -> None:
        """A key of which one value is supported, which is also what its absence means."""
        self.value(key, supported, lambda v: v == supported, reason)

    def activation(self, key: str, default: str) -> str:
        reason = f"supported: {', '.join(_ACTIVATION)}"
        # A list cannot be looked up.
        name = self.value(key, default, lambda v: isinstance(v, str) and v in _ACTIVATION, reason)
        return _ACTIVATION[name]

    def no_dropout(self, key: str, default: float = 0.0) -> None:
        """A rate of dropout, which is not applied: one above 0 is kept for a warning."""
        rate = self.value(
            key,
            default,
            lambda v: type(v) in (int, float) and 0 <= v <= 1,
            "must be a number from 0 to 1",
        )
        if rate:
            self.dropout[key] = rate

    def refuse_the_rest(self) -> None:
        """Go through the keys that nobody has asked for."""
        # Sorted, so that a config always has the same message.
        for key in sorted(self.config.keys() - self.known - _NOT_THE_FUNCTION):
            if key in _DROPOUT:
                self.no_dropout(key)
            elif key in _NEEDS:
                supported, need = _NEEDS[key]
                self.only(key, supported, need)
            elif self.config[key] is not None:
                self.fault(
                    key,
                    self.config[key],
                    "is not understood; if it does not change what the model computes, delete it"
                    " from config.json",
                )
