"""Reading Hugging Face model folders: safetensors weights (one file, or shards with an index), and
adapters as PEFT stores them.

Reading is lazy, box by box: a rank reads no byte of a weight that it does not hold. Nothing here
opens a pickle.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longshift.errors import CheckpointError, shown
from longshift.files import read_small
from longshift.layout.box import Box
from longshift.spec.adapters import adapter_faults
from longshift.spec.config_json import MAX_EXPERTS
from longshift.spec.model import ModelSpec
from longshift.spec.param import Param

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that older checkpoints carry: GPT-2's causal mask, Llama's rotary frequencies.
_BUFFER = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_ROW_BLOCK = 4096
# Tensors of all experts, and the matrices of each expert that they have one below another.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# transformers fuses experts under its own names for them.
_MIXTRAL_FUSED = {
    "block_sparse_moe": "mlp",
    "w1.": "gate_proj.",
    "w2.": "down_proj.",
    "w3.": "up_proj.",
}
MAX_FAULTS = 50  # that are listed
MAX_CONFIG_BYTES = 1 << 20  # of an adapter_config.json
PEFT = "base_model.model."  # before the names of weights that PEFT stores


class _ExpertRows(NamedTuple):
    """Some rows of an expert in a tensor of all experts [E, rows, columns], as safetensors shows a
    tensor of its own."""

    tensor: Any
    expert: int
    first: int
    rows: int

    def get_shape(self) -> list[int]:
        return [self.rows, self.tensor.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = index
        shifted = slice(self.first + rows.start, self.first + rows.stop)
        return self.tensor[(self.expert, shifted, columns)]


class _SplitExperts:
    """A safetensors file that shows three matrices for each expert, also where transformers 5 saved
    two tensors of all experts of a block."""

    def __init__(self, file: Any):
        self._file = file
        self._experts: dict[str, tuple[str, int, int, int]] = {}
        self._names: list[str] = []
        for name in file.keys():  # noqa: SIM118
            stem, _, role = name.rpartition(".experts.")
            parts = _FUSED.get(role, ())
            shape = file.get_slice(name).get_shape() if parts else []
            # Anything else is listed under its name, as unexpected.
            if len(shape) != 3 or shape[0] > MAX_EXPERTS or shape[1] % len(parts):
                self._names.append(name)
                continue
            rows = shape[1] // len(parts)
            for expert in range(shape[0]):
                for number, part in enumerate(parts):
                    place = name, expert, number * rows, rows
                    self._experts[f"{stem}.experts.{expert}.{part}.weight"] = place

    def keys(self) -> list[str]:
        return [*self._names, *self._experts]

    def get_slice(self, name: str) -> Any:
        if name not in self._experts:
            return self._file.get_slice(name)
        fused_name, *rows = self._experts[name]
        return _ExpertRows(self._file.get_slice(fused_name), *rows)


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
        # Buffers of older checkpoints are not read: the model computes them.
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
    (`wte.weight`). Experts of a block may be fused. A tied head that is stored all the same must
    equal the embedding.
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        def names(usual_name: str) -> Sequence[str]:
            short_name = usual_name.removeprefix("model.").removeprefix("transformer.")
            fused_name = usual_name
            for old, new in _MIXTRAL_FUSED.items() if ".block_sparse_moe." in usual_name else ():
                fused_name = fused_name.replace(old, new)
            return usual_name, short_name, fused_name

        super().__init__(_weight_files(folder), spec.params, names, "config.json says")
        # A tied head is none of the table's weights.
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
    pickles = [path.name for end in ("*.bin", "*.pt*") for path in sorted(folder.glob(end))]
    if pickles:
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
        return _SplitExperts(safe_open(path, framework="pt"))


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
