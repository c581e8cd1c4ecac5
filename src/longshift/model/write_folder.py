"""Writing Hugging Face model folders: `config.json`, safetensors weights (one file, or shards with
an index), tokenizer files; and adapters as PEFT stores them.

What is written appears whole or not at all.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from longshift.errors import CheckpointError
from longshift.files import publish, read_json_object, usual_mode
from longshift.model.weight_folder import INDEX, PEFT, SINGLE
from longshift.spec.adapters import ALL, linear_modules
from longshift.spec.families import to_hugging_face
from longshift.spec.model import ModelSpec

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    "generation_config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class FolderExtras:
    """What goes with the weights of a folder.

    `files`: by the name that they get.
    `end`: the token that ends a text, as it is written, and its id.
    `ids`: of special tokens, as a config.json named them.
    `stops`: ids of tokens after which generation ends: the end of a text, and of a turn where turns
    were learned. `config`: keys of the source's config.json that say nothing of the function.
    `template`: the chat template that was trained with, if there was one.
    """

    files: Mapping[str, Path]
    end: tuple[str, int]
    ids: Mapping[str, Any]
    stops: tuple[int, ...]
    config: Mapping[str, Any]
    template: str | None


def write_folder(
    folder: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    carried: FolderExtras | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model that transformers opens. `tensors` come whole, in the order of the parameter
    table, and are cast to `dtype`; at most one shard is in memory at a time.

    Raises CheckpointError when `folder` exists and is not empty, or cannot be written; nothing is
    left behind then."""

    def fill(scratch: Path) -> None:
        _write_weights(scratch, spec, iter(tensors), dtype, max_shard_bytes)
        ids = _write_tokenizer(scratch, carried)
        source_config = carried.config if carried else {}
        dtype_name = str(dtype).removeprefix("torch.")
        _write_json(
            scratch / "config.json",
            {**source_config, **to_hugging_face(spec), **ids, "torch_dtype": dtype_name},
        )

    _write_new(folder, fill)


def write_adapters(
    folder: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    base: str,
    carried: FolderExtras,
) -> None:
    """Write the adapters of a model, which `tensors` are by name, as a folder that PEFT opens
    beside the model folder `base`. Raises CheckpointError as `write_folder` does."""
    lora = spec.lora
    assert lora is not None
    # PEFT names every layer; `all` is a word of ours.
    targets = linear_modules(spec.base.params, spec.layers) if ALL in lora.targets else lora.targets
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": spec.fused_qkv,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }

    def fill(scratch: Path) -> None:
        _save(
            scratch / "adapter_model.safetensors",
            ((PEFT + name, tensor) for name, tensor in tensors),
            dtype,
        )
        _write_json(scratch / "adapter_config.json", config)
        _write_tokenizer(scratch, carried)

    _write_new(folder, fill)


def _write_new(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that appears whole or not at all. Raises CheckpointError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        # No command to remove it: the model that a run began with may lie there, or the run.
        raise CheckpointError(f"{folder} exists and is not empty; choose another folder")
    try:
        publish(folder, fill)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error


def _write_weights(
    folder: Path,
    spec: ModelSpec,
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    limit: int,
) -> None:
    """Write files of at most `limit` bytes and, for several, their index. Raises ValueError for
    tensors that come in another order."""
    shards = _shards(spec, dtype, limit)
    stored = _as_stored(spec, tensors)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        saved_names = _save(folder / file, islice(stored, len(names)), dtype)
        if saved_names != names:
            raise ValueError(f"{file}: expected {', '.join(names)}, got {', '.join(saved_names)}")
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": spec.parameters * dtype.itemsize},
            "weight_map": weight_map,
        }
        _write_json(folder / INDEX, index)


def _as_stored(
    spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder: those of each expert where a weight is of all of them."""
    for name, tensor in tensors:
        names = spec.by_name[name].stored_names
        yield from zip(names, tensor.chunk(len(names)))


def _save(path: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> list[str]:
    """Write tensors as they come, in this format. Returns their names."""
    file = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors}
    with usual_mode(path):
        save_file(file, path, {"format": "pt"})
    return list(file)


def _shards(spec: ModelSpec, dtype: torch.dtype, limit: int) -> list[list[str]]:
    """Names of each file: consecutive, each within `limit` bytes or a single weight."""
    shards: list[list[str]] = []
    filled = 0
    for p in spec.params:
        size = p.elements // len(p.stored_names) * dtype.itemsize
        for name in p.stored_names:
            # A tensor larger than the limit has a file of its own.
            if not shards or filled + size > limit:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
    return shards


def _write_tokenizer(folder: Path, carried: FolderExtras | None) -> dict[str, Any]:
    """Write the files beside the tokenizer; the ids of special tokens as a config.json names
    them."""
    # Ids are null at first, because a family's default ids belong to another tokenizer.
    ids: dict[str, Any] = dict.fromkeys(TOKEN_IDS)
    if carried is None:
        return ids

    # 1. The source's files as they are, and its ids of special tokens.
    end_word, end_id = carried.end
    ids |= {"eos_token_id": end_id, **carried.ids}
    for name, source in carried.files.items():
        shutil.copyfile(source, folder / name)

    # 2. What the tokenizer's config lacks: the end of a text, and the chat template that was
    # trained with.
    path = folder / "tokenizer_config.json"
    source_config = (
        json.loads(path.read_text("utf-8"))
        if path.exists()
        else {"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    config = dict(source_config)
    if not config.get("eos_token"):
        config["eos_token"] = end_word
    if carried.template is not None:  # in one place alone: readers differ in which of two they take
        config.pop("chat_template", None)
        (folder / TEMPLATE).unlink(missing_ok=True)
        (folder / TEMPLATE).write_text(carried.template, "utf-8")
    if config != source_config:
        path.unlink(missing_ok=True)  # a copy of a file that may not be written to
        _write_json(path, config)

    # 3. After which tokens generation ends.
    _write_generation(folder / "generation_config.json", ids, carried.stops)
    return ids


def _write_generation(path: Path, ids: Mapping[str, Any], stops: Sequence[int]) -> None:
    """Say after which tokens generation ends; what the source's file says besides stays."""
    source_config = read_json_object(path)
    source_ends = source_config.get("eos_token_id", ids["eos_token_id"])
    if not isinstance(source_ends, list):
        source_ends = [source_ends]
    ends = list(dict.fromkeys([*source_ends, *stops]))
    special_ids = {key: value for key, value in ids.items() if value is not None}
    path.unlink(missing_ok=True)
    _write_json(
        path, {**special_ids, **source_config, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
