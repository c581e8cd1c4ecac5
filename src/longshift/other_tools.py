"""Words of other trainers and of before, and what does the same here, for hints where a config, a
layout or a model has an unknown word.

The trainers are transformers' Trainer and TRL, PyTorch FSDP, DeepSpeed, Megatron-LM, torchtitan,
Axolotl and LLaMA-Factory."""

import re
from collections.abc import Mapping

_BATCH = (
    "train.tokens_per_step: a step takes documents until it has so many tokens, in as many"
    " micro-batches as that needs"
)
_LENGTH = "data.max_len, the longest document in tokens"
_SHARDED = "a layout such as dp8.z3 (ZeRO-3, as FSDP's full shard)"
_RECOMPUTE = "recompute-full or recompute-selective in the layout, as in dp8.recompute-full"
_CONTEXT = "ring2 or u2 (ring attention, Ulysses) in the layout"
_TENSOR = "tp2 in the layout, which has sequence parallelism in it"
_ABSENT = "not there yet"


def _by_word(successors: Mapping[str, str]) -> Mapping[str, str]:
    """The successor of each word. A key is one or more words."""
    return {word: successor for words, successor in successors.items() for word in words.split()}


KEYS = _by_word(
    {
        "learning_rate peak_lr max_lr": "train.lr",
        "max_grad_norm clip_grad grad_clip gradient_clipping gradient_clip_val max_norm": (
            "train.clip"
        ),
        "gradient_clip clip_norm": "train.clip",
        "warmup_steps warmup_ratio lr_warmup_iters num_warmup_steps": "train.warmup, in steps",
        "lr_scheduler lr_scheduler_type lr_decay_style": "train.schedule",
        "adam_beta1 adam_beta2 beta1 beta2": "train.betas, as in betas: [0.9, 0.95]",
        "adam_epsilon adam_eps": "train.eps",
        "wd decay": "train.weight_decay",
        "epochs num_epochs num_train_epochs": (
            "train.steps: a run is so many steps; `longshift data CONFIG` counts the tokens of an"
            " epoch"
        ),
        "max_steps train_iters num_steps total_steps iterations": "train.steps",
        "batch_size global_batch_size train_batch_size per_device_train_batch_size"
        " micro_batch_size": _BATCH,
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches": _BATCH,
        "seq_len seq_length sequence_length sequence_len max_length max_seq_len": _LENGTH,
        "max_seq_length model_max_length cutoff_len block_size context_length": _LENGTH,
        "packing sample_packing pack_sequences": (
            "nothing to set: documents are always packed, exactly"
        ),
        "bf16 fp16 dtype torch_dtype mixed_precision": "train.precision, as in precision: bf16",
        "fp8 float8 fp8_recipe enable_fp8": (
            "train.precision: float8, multiplied as codes by Hopper GPUs and emulated elsewhere"
        ),
        "gradient_checkpointing activation_checkpointing recompute_granularity ac": _RECOMPUTE,
        "fsdp fsdp_config deepspeed zero_stage zero_optimization distributed": _SHARDED,
        "zero zero3 hsdp reshard_after_forward": _SHARDED,
        "tp sp tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree"
        " sequence_parallel": _TENSOR,
        "cp context_parallel context_parallel_size context_parallel_degree"
        " sequence_parallel_size cp_size": _CONTEXT,
        "pp pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree": (
            "pp2 in the layout"
        ),
        "dp ddp data_parallel_size num_gpus nproc_per_node world_size": "dp2 in the layout",
        "output_dir checkpoint_dir save_dir run_name": "save.dir",
        "save_steps save_interval checkpoint_every": "save.every",
        "save_total_limit keep_latest_k": "save.keep",
        "resume_from_checkpoint resume load": "longshift train CONFIG --resume",
        "model_name_or_path base_model pretrained_model_name_or_path": (
            "model.path, a folder on this machine"
        ),
        "dataset datasets train_file data_path dataset_name": (
            "data.train, as in train: [{path: books.jsonl}]"
        ),
        "rope_scaling rope_theta rope_parameters": "model.rope, as in rope: {type: yarn}",
        "offload cpu_offload offload_optimizer": (
            "home: host or disk; of activations, host or disk in a layout"
        ),
        "lora peft lora_r lora_rank lora_alpha lora_target_modules adapter": (
            "model.lora, as in lora: {rank: 16}"
        ),
        "qlora load_in_4bit load_in_8bit": _ABSENT,
        "flash_attention attn_implementation use_flash_attn": (
            "nothing to set: the fastest exact kernel is chosen"
        ),
        "random_seed": "train.seed",
        "optim optimizer optimizer_type": "train.optimizer: adamw, or sgd with train.momentum",
        "eval_steps eval_interval evaluation_strategy eval_strategy val_interval": (
            "validation.every, in steps"
        ),
        "eval_dataset val_data validation_file eval_file": (
            "data.valid, or data.held_out for a share of data.train"
        ),
        "logging_steps log_interval log_freq": (
            "nothing to set: every step is a row of metrics.jsonl"
        ),
        "num_workers dataloader_num_workers streaming": (
            "nothing to set: tokens are made once, and mapped"
        ),
        "expert_parallel_size expert_model_parallel_size ep moe": _ABSENT,
        "report_to logger loggers wandb mlflow trackio tensorboard tensorboard_dir": (
            "save.trackers, as in trackers: [tensorboard]"
        ),
        "wandb_project project_name experiment_name": "save.project",
    }
)
LAYOUT_WORDS = _by_word(
    {
        "cp context context_parallel context-parallel": "ring or u (ring attention, Ulysses)",
        "sp sequence": (
            "u or ring where tokens are shared by themselves; tp has sequence parallelism in it"
        ),
        "fsdp hsdp full_shard deepspeed": "dp with a stage of ZeRO, as in dp8.z3",
        "ep moe": "not there yet: there are no mixtures of experts",
        "ac ckpt remat checkpointing": "recompute-full or recompute-selective",
        "vpp interleaved": "v, as in pp2.v2",
        "cpu offload": "host or disk, with chunks or recompute-full",
        "rows rows-auto": "nothing to set: the loss is computed in blocks of rows",
        "keep-output keep_output": "recompute-full, which keeps the output of attention",
        "keep-input keep_input": "every1 in a layout of chunks, and nothing more with fpdt",
        "recompute-attention": (
            "recompute-full, with as many blocks that keep all as fit: recompute-full.keep8"
        ),
        "lora": "no layout but model.lora, as in lora: {rank: 16}",
    }
)
FAMILIES = _by_word(
    {
        "mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 phimoe granitemoe gpt_oss": "experts",
        "gemma3 llava qwen2_vl qwen2_5_vl mllama llama4": "images",
        "mamba mamba2 jamba falcon_mamba rwkv zamba2 bamba": "state-space layers",
        "deepseek grok dbrx olmoe": "experts",
        "t5 bert roberta bart mbart whisper": "an encoder",
    }
)


def key_hint(word: str) -> str:
    """The end of a sentence about an unknown key of a config that other trainers have; empty where
    they have not."""
    return _hint(KEYS.get(word, ""))


def layout_hint(letters: str) -> str:
    """The same of a word of a layout, without its number."""
    return _hint(LAYOUT_WORDS.get(letters, ""))


def _hint(successor: str) -> str:
    """The end of a sentence about an unknown word that has a successor."""
    if successor.startswith("nothing to set"):
        return f"; there is {successor}"
    verb = "it is" if successor.startswith(_ABSENT) else "here it is"
    return f"; {verb} {successor}" if successor else ""


def family_hint(name: str) -> str:
    """The same of a model family: what it would need."""
    if name not in FAMILIES:
        return ""
    return (
        f"; it needs {FAMILIES[name]}, which"
        f" {'is' if FAMILIES[name].startswith('an ') else 'are'} not implemented"
    )


def preset_hint(name: str) -> str:
    """The same of the name of a model, which begins with that of its family,
    as `mixtral-8x7b` does."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    families = [family for family in FAMILIES if plain == family or plain.startswith(f"{family}_")]
    return family_hint(max(families, key=len)) if families else ""
