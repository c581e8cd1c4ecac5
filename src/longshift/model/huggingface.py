"""Hugging Face model folders: `config.json`, safetensors weights (one file, or shards with an
index), tokenizer files.

Reading is lazy, box by box: a rank reads no byte of a weight that it does not hold. What is written
appears whole or not at all. Nothing here opens a pickle.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longshift.errors import CheckpointError, shown
from longshift.files import publish, read_json_object, read_small, usual_mode
from longshift.layout.box import Box
from longshift.spec.adapters import ALL, adapter_faults, linear_modules
from longshift.spec.families import to_hugging_face
from longshift.spec.model import ModelSpec, Param

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that older checkpoints carry: GPT-2's causal mask, Llama's rotary frequencies.
_BUFFER = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_ROW_BLOCK = 4096
MAX_FAULTS = 50  # that are listed
MAX_CONFIG_BYTES = 1 << 20  # of an adapter_config.json
PEFT = "base_model.model."  # before the names of weights that PEFT stores


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


class _TensorFolder:
    """The tensors of safetensors files in a folder, verified against weights of the parameter table
    when opened. Values are read on demand.

    `files`: opened, by path. `places`: by the name of a weight, of each tensor whose rows it has,
    its file and the name that it has there; `others`: the file of each tensor that is none of the
    weights. `faults`: a line for each tensor that is missing or there twice, or has another shape
    or dtype than something `says`; `names`: those under which a tensor of a weight may be stored,
    of its usual name, the usual one first.
    """

    def __init__(
        self,
        files: Sequence[Path],
        params: Iterable[Param],
        names: Callable[[str], Sequence[str]],
        says: str,
    ):
        self.files = {path: _open(path) for path in files}
        self.places: dict[str, list[tuple[Path, str]]] = {}
        self.others: dict[str, Path] = {}
        self.faults: list[str] = []

        # 1. Every name of every file, a weight or not.
        for path, file in self.files.items():
            for name in file.keys():  # noqa: SIM118
                if name in self.others:
                    self.faults.append(
                        f"twice       {name} in {self.others[name].name} and {path.name}"
                    )
                self.others[name] = path

        # 2. Each tensor of a weight under the first of its names that is there.
        for p in params:
            self.places[p.name] = []
            rows = p.shape[0] // len(p.stored_names)
            for usual_name in p.stored_names:
                self._place(p.name, usual_name, names(usual_name), [rows, *p.shape[1:]], says)

    def _place(
        self, weight: str, usual_name: str, names: Sequence[str], shape: list[int], says: str
    ) -> None:
        """Find a tensor of a weight, or say what is wrong with it."""
        stored_name = next((name for name in names if name in self.others), None)
        if stored_name is None:
            self.faults.append(f"missing     {names[0]} {shape}")
            return
        place = self.others.pop(stored_name), stored_name
        self.places[weight].append(place)
        view = self._view(*place)
        if list(view.get_shape()) != shape:
            self.faults.append(
                f"wrong shape {usual_name}: {view.get_shape()} in the folder, {says} {shape}"
            )
        if view.get_dtype() not in _DTYPES:
            self.faults.append(
                f"wrong dtype {usual_name}: {view.get_dtype()}; supported: {', '.join(_DTYPES)}"
            )

    def check(self, title: str) -> None:
        """Raise CheckpointError with all faults under a `title`, if there are any."""
        unexpected = [
            f"unexpected  {name} in {path.name}"
            for name, path in self.others.items()
            if not _BUFFER.search(name)
        ]
        faults = self.faults + unexpected
        if len(faults) > MAX_FAULTS:
            faults = [*faults[:MAX_FAULTS], f"and {len(faults) - MAX_FAULTS} more"]
        if faults:
            raise CheckpointError("\n  ".join([f"{title}:", *faults]))

    def read(self, name: str, box: Box) -> Tensor:
        """The part of weight `name` inside `box`, on the CPU, in the dtype that the folder has."""
        places = self.places[name]
        first_view = self._view(*places[0])
        if not box:
            return torch.empty(box.shape, dtype=_DTYPES[first_view.get_dtype()])
        height = first_view.get_shape()[0]  # as that of every tensor of the weight
        parts = []
        for number in range(box.start[0] // height, -(-box.stop[0] // height)):
            path, stored_name = places[number]
            above = number * height
            rows = slice(max(0, box.start[0] - above), min(height, box.stop[0] - above))
            others = (slice(start, stop) for start, stop in zip(box.start[1:], box.stop[1:]))
            with _reading(path):
                parts.append(self._view(path, stored_name)[(rows, *others)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _view(self, path: Path, stored_name: str) -> Any:
        with _reading(path):
            return self.files[path].get_slice(stored_name)


class WeightFolder(_TensorFolder):
    """The weights of a folder, verified against the parameter table of `spec`: names, shapes and
    dtypes, all faults listed in one CheckpointError.

    A name may lack the table's first part, as in folders of the model without its head
    (`wte.weight`). A tied head that is stored all the same must equal the embedding.
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        def names(usual_name: str) -> Sequence[str]:
            short_name = usual_name.removeprefix("model.").removeprefix("transformer.")
            return usual_name, short_name

        super().__init__(_weight_files(folder), spec.params, names, "config.json says")
        tied_head = self.others.pop("lm_head.weight", None) if spec.tied else None
        self.check(f"{folder} does not hold the weights of its config.json")
        if tied_head:
            self._check_tied(spec, tied_head)

    def _check_tied(self, spec: ModelSpec, path: Path) -> None:
        """Raise CheckpointError where a stored head differs from the embedding that it is tied
        to."""
        embedding = spec.params[0]
        with _reading(path):
            head = self.files[path].get_slice("lm_head.weight")
        is_equal = tuple(head.get_shape()) == embedding.shape
        # Blocks of rows, because the embedding of a large vocabulary is gigabytes.
        for row in range(0, spec.vocab if is_equal else 0, _ROW_BLOCK):
            rows = Box.whole(embedding.shape).cut(0, row, min(row + _ROW_BLOCK, spec.vocab))
            with _reading(path):
                is_equal = is_equal and torch.equal(
                    head[row : row + _ROW_BLOCK], self.read(embedding.name, rows)
                )
        if not is_equal:
            raise CheckpointError(
                f"{path}: lm_head.weight differs from {embedding.name}, but config.json ties them; "
                'set "tie_word_embeddings": false in config.json to train both'
            )


class AdapterFolder(_TensorFolder):
    """The adapters of a folder of PEFT, verified against `spec`: what `adapter_config.json` says
    that changes the function, names, shapes and dtypes, all faults listed in one
    CheckpointError."""

    def __init__(self, folder: Path, spec: ModelSpec):
        path = folder / "adapter_model.safetensors"
        config = _read_adapter_config(folder / "adapter_config.json")
        if not path.is_file():
            reason = "no such file"
            if (folder / "adapter_model.bin").is_file():
                reason = (
                    "only a pickle, adapter_model.bin, which can run any code and is never opened"
                    " here"
                )
            raise CheckpointError(f"{folder} holds no adapter_model.safetensors: {reason}")
        adapters = (p for p in spec.params if not p.frozen)
        super().__init__(
            [_inside(folder, path)],
            adapters,
            lambda usual_name: (PEFT + usual_name,),
            "the model and model.lora say",
        )
        self.faults = adapter_faults(config, spec) + self.faults
        self.check(f"model.lora.init_from: {folder} does not hold the adapters of this run")


def _read_adapter_config(path: Path) -> dict[str, Any]:
    """What the JSON object of a small file says. Raises CheckpointError."""
    try:
        config = json.loads(read_small(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as fault:
        raise CheckpointError(f"model.lora.init_from: {path} cannot be read: {fault}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"model.lora.init_from: {path} is no JSON object")
    return config


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
        raise CheckpointError(
            f"{folder} exists and is not empty; export to another folder, or remove it: rm -r"
            f" {folder}"
        )
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
            # A weight larger than the limit has a file of its own.
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


def _is_plain(name: str) -> bool:
    """Whether a name is one of a file in a folder, and nothing else."""
    return bool(name) and "\0" not in name and len(name) <= 255 and Path(name).name == name


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or every one that the index names, which must be
    there."""
    if (folder / SINGLE).is_file():  # as `transformers` does, also beside an index
        return [_inside(folder, folder / SINGLE)]
    if (folder / INDEX).is_file():
        try:
            names = sorted(
                set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
            )
            strangers = [name for name in names if not (isinstance(name, str) and _is_plain(name))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{folder / INDEX} cannot be read as an index of weight files: {error!r}"
            ) from error
        if strangers:
            raise CheckpointError(
                f"{folder / INDEX} names {shown(strangers[0])}, which is no file name: weights lie"
                " in the folder itself"
            )
        files = [folder / name for name in names]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {INDEX} names {len(missing)} of {len(files)} files that are missing:"
                f" {', '.join(missing[:20])}"
            )
        return [_inside(folder, file) for file in files]
    if pickles := sorted(path.name for path in folder.glob("*.bin")) + sorted(
        path.name for path in folder.glob("*.pt*")
    ):
        raise CheckpointError(
            f"{folder} holds its weights as pickles ({', '.join(pickles[:3])}), which can run any"
            " code and are never opened here; convert them once, if you trust them:\n  python -c"
            f" \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}',"
            f" dtype='auto').save_pretrained('{folder}-safetensors')\""
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _inside(folder: Path, file: Path) -> Path:
    """The file, where it lies in the folder, where the cache of the Hugging Face hub keeps what its
    snapshots link to, or below the working folder, as stores of dvc and git-annex do. Raises
    CheckpointError for a link to elsewhere."""
    target = file.resolve()
    folder = folder.resolve()
    allowed = [folder, folder.parent.parent / "blobs"]
    with suppress(FileNotFoundError):  # the working folder may be gone
        working = Path.cwd()
        if working != working.parent:  # everything is below the root
            allowed.append(working)
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{file} is a link out of its folder, to {target}: copy the file there, name the folder"
            " that holds it, or start from a folder that holds both"
        )
    return file


def _open(path: Path) -> Any:
    with _reading(path):
        return safe_open(path, framework="pt")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns a fault of a weight file into a CheckpointError that names it."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        # RuntimeError: torch could not map the file.
        raise CheckpointError(
            f"{path} is damaged or unreadable: {error}; fetch it again"
        ) from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
