"""A run's newest checkpoint as a Hugging Face folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longshift.config import Config
from longshift.data.template import FILE as TEMPLATE
from longshift.data.tokenizer import Tokenizer
from longshift.dist.world import World
from longshift.errors import CheckpointError
from longshift.layout.box import Box
from longshift.model.huggingface import TOKEN_IDS, TOKENIZER_FILES, Carried, write_folder
from longshift.spec.formats import FORMATS, PrecisionName
from longshift.state.checkpoint import Checkpoint
from longshift.train.corpus import open_tokenizer
from longshift.train.facts import Facts
from longshift.train.stages import stages_of


def export(config: Config, run: Path, to: Path, precision: PrecisionName | None = None, best: bool = False) -> None:
    """Write weights, config.json and the tokenizer that was trained with to the new folder `to`. `best`: of the checkpoint with the lowest
    validation loss, else of the newest. `precision`: of the weights; that of the
    model folder that the run began with where not given, else float32. A model with rotary embedding has at least as many positions as
    the longest document that it was trained on. Raises CheckpointError."""
    saved = (Checkpoint.best if best else Checkpoint.latest)(run, World.alone())
    tokenizer = open_tokenizer(config)
    if tokenizer.fingerprint != Facts.of(saved).fingerprints.tokenizer:
        raise CheckpointError(f"the tokenizer changed since {saved.folder} was written; an export with it would be useless")
    trained = [stage.config for stage in stages_of(config) if stage.begin < saved.step]
    spec, longest = trained[-1].spec, max(part.data.max_len for part in trained)
    if not spec.learned_positions:
        spec = replace(spec, max_positions=max(spec.max_positions, longest))
    whole = ((p.name, saved.read("master", p.name, Box.whole(p.shape))) for p in spec.params)
    source = _config_json(Path(config.model.path)) if config.model.path else {}
    kept = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16)}
    named = getattr(torch, FORMATS[precision].compute) if precision else None
    dtype = named or kept.get(source.get("dtype") or source.get("torch_dtype") or "", torch.float32)
    write_folder(to, spec, whole, dtype, _carried(config, tokenizer))


def _carried(config: Config, tokenizer: Tokenizer) -> Carried:
    """The files beside the tokenizer, the model's settings of generation, and the chat template that was trained with."""
    beside = tokenizer.file.parent
    files = {name: beside / name for name in TOKENIZER_FILES if (beside / name).is_file()} | {"tokenizer.json": tokenizer.file}
    if config.model.path and (settings := Path(config.model.path) / "generation_config.json").is_file():
        files[settings.name] = settings
    if config.data.template:
        files[TEMPLATE] = Path(config.data.template)
    ids = {key: value for key, value in _config_json(beside).items() if key in TOKEN_IDS and value is not None}
    return Carried(files, (tokenizer.end, tokenizer.eos), ids)


def _config_json(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; nothing where there is none."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
