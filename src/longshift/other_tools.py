"""Words of other trainers and of earlier versions, and what does the same here, for hints where a
config, a layout or a model has an unknown word; and how the config of an older run reads today.

The trainers are transformers' Trainer and TRL, PyTorch FSDP, DeepSpeed, Megatron-LM, torchtitan,
Axolotl and LLaMA-Factory.

run/config.yaml        train: {frozen: 45.0, crowded: false}
of an older version    switch: {planner: algorithm1}
as it is read          train: {stall_timeout: 45.0}
what is said           switch was {'planner': 'algorithm1'} in the run: fan_out always plans
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
_EXPERTS = "nothing to set: experts are sharded as all weights are, by z1 to z3 in the layout"


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
        "expert_parallel_size expert_model_parallel_size ep moe": _EXPERTS,
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
        "ep moe": "not there yet: experts are sharded by z1 to z3",
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
        "qwen2_moe deepseek_v2 deepseek_v3 phimoe granitemoe gpt_oss glm4_moe": (
            "experts of another kind"
        ),
        "gemma3 llava qwen2_vl qwen2_5_vl mllama llama4": "images",
        "mamba mamba2 jamba falcon_mamba rwkv zamba2 bamba": "state-space layers",
        "deepseek grok dbrx": "experts of another kind",
        "t5 bert roberta bart mbart whisper": "an encoder",
    }
)


# Keys of a config that earlier versions had.
RENAMED = {"train.frozen": "train.stall_timeout"}


class RemovedKey(NamedTuple):
    """`defaults`: values with which a run does today what it did, the first one where the key is
    absent; `instead`: what does it now, or why nothing has to."""

    defaults: tuple[Any, ...]
    instead: str


REMOVED = {
    "train.crowded": RemovedKey(
        (False,), "it is a flag of the command line now: longshift train CONFIG --crowded"
    ),
    "data.valid.epochs": RemovedKey((None,), "what is validated on is read once: leave it out"),
    "data.valid.weight": RemovedKey((None,), "what is validated on is read once: leave it out"),
    "home.early": RemovedKey(
        (True,),
        "units on disk are updated before the norm wherever memory and disk have room: leave"
        " it out",
    ),
    "save.background": RemovedKey(
        (False, True),
        "checkpoints are written while training goes on wherever memory has room: leave it out",
    ),
    "stream.ahead": RemovedKey(
        (1,), "an object is always fetched one operation ahead: leave it out"
    ),
    "stream.checked": RemovedKey(
        (False,),
        "longshift check compares what comes back from disk, and a run does not: leave it out",
    ),
    "switch": RemovedKey(
        (
            {"ahead": 256 << 20},
            {"bucket": 32 << 20, "ahead": 256 << 20},
            {"planner": "fan_out", "bucket": 32 << 20, "ahead": 256 << 20},
        ),
        "fan_out always plans, in exchanges of 32 MiB, and 256 MiB of weights arrive ahead: leave"
        " it out",
    ),
    "window": RemovedKey(
        ({"gather": None, "reduce": None},),
        "as many bytes as the largest block's are always under way: leave it out",
    ),
}
STAGE = {
    "max_len": "data.max_len",
    "data": "data.train",
    "overlong": "data.overlong",
    "tokens_per_step": "train.tokens_per_step",
    "pack_tokens": "train.pack_tokens",
    "rope": "model.rope",
    "lr": "train.lr",
    "min_lr": "train.min_lr",
    "warmup": "train.warmup",
    "schedule": "train.schedule",
}
SOURCES = "data.train", "data.valid"
FORMATS = {  # keys that a source had, which named fields, and its format now
    "text": "text: body",
    "messages": "messages: chat",
    "prompt": "prompt: question, completion: answer",
    "completion": "prompt: question, completion: answer",
}
PACK = "it is pack of a group now, as in layout: [{upto: 4K, use: dp2, pack: 16K}]"
# Of each key that was, what it is now. Numbers of stages and of sources are left out.
SUCCESSORS = {
    **{key: f"it is {new_key} now" for key, new_key in RENAMED.items()},
    **{key: removed.instead for key, removed in REMOVED.items()},
    **{f"train.stages.{key}": f"it is {new_key} now" for key, new_key in STAGE.items()},
    **{f"{above}pack_tokens": PACK for above in ("train.", "train.stages.", "train.stages.train.")},
    **{
        f"{source}.{key}": f"it is format now, as in format: {{{fields}}}"
        for source in (*SOURCES, "train.stages.data", "train.stages.data.train")
        for key, fields in FORMATS.items()
    },
}


def key_hint(path: Sequence[str | int]) -> str:
    """The end of a sentence about an unknown key of a config that an earlier version had, or other
    trainers have; empty where none has it."""
    successor = SUCCESSORS.get(".".join(name for name in path if isinstance(name, str)))
    return f"; {successor}" if successor else _hint(KEYS.get(str(path[-1]), ""))


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
    as `phimoe-mini` does."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    families = [family for family in FAMILIES if plain == family or plain.startswith(f"{family}_")]
    # The longest says most, as deepseek_v2 does beside deepseek.
    return family_hint(max(families, key=len)) if families else ""


def translate(values: dict[str, Any]) -> Iterator[str]:
    """Give the config of an older run today's keys, in place. Yields a sentence for each setting
    that is no more."""
    # 1. Keys of the run.
    for key, new_key in RENAMED.items():
        *path, name = key.split(".")
        for section in _mappings(values, path):
            if name in section:
                section[new_key.rpartition(".")[2]] = section.pop(name)
    for key, removed in REMOVED.items():
        *path, name = key.split(".")
        for section in _mappings(values, path):
            value = section.pop(name, removed.defaults[0])
            if value not in removed.defaults:
                yield f"{key} was {value!r} in the run: {removed.instead}"

    # 2. A stage had keys of its own, and is a list of overrides now.
    for stage in _mappings(values, ["train", "stages"]):
        overrides = {
            STAGE.get(key, key): value for key, value in stage.items() if value is not None
        }
        stage.clear()
        stage.update(overrides)

    # 3. A single layout had its packs in another section, and has them as the only group now.
    for train in _mappings(values, ["train"]):
        data = next(_mappings(values, ["data"]), {})
        run = {
            "layout": values.get("layout"),
            "data.max_len": data.get("max_len"),
            "train.pack_tokens": train.pop("pack_tokens", None),
        }
        for stage in _mappings(train, ["stages"]):
            part = run | stage
            stage.pop("train.pack_tokens", None)
            stage.update(_group_of_packs(part))
        values.update(_group_of_packs(run))

    # 4. A source named fields by keys of its own, and has a format now.
    for path in (*(path.split(".") for path in SOURCES), ["train", "stages", "data.train"]):
        for source in _mappings(values, path):
            fields = {name: source.pop(name, None) for name in FORMATS}
            fields = {name: field for name, field in fields.items() if field is not None}
            if fields:
                source["format"] = fields


def _group_of_packs(part: dict[str, Any]) -> dict[str, Any]:
    """The `layout` of a part of a run whose single layout has packs of a size of their own; empty
    for others."""
    layout = part["layout"]
    pack = part["train.pack_tokens"]
    if pack is None or not isinstance(layout, str) or layout == "auto":
        return {}
    return {"layout": [{"upto": part["data.max_len"], "use": layout, "pack": pack}]}


def _mappings(value: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The mapping under a path of keys; each of a list of them."""
    if isinstance(value, list):
        for item in value:
            yield from _mappings(item, path)
    elif isinstance(value, dict):
        if path:
            yield from _mappings(value.get(path[0]), path[1:])
        else:
            yield value
