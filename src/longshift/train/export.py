"""A run's newest checkpoint as a Hugging Face folder."""

from dataclasses import replace
from pathlib import Path

import torch

from longshift.config import Config
from longshift.dist.world import World
from longshift.errors import CheckpointError
from longshift.layout.box import Box
from longshift.model.huggingface import write_folder
from longshift.spec.formats import FORMATS
from longshift.state.checkpoint import Checkpoint
from longshift.train.corpus import open_tokenizer
from longshift.train.facts import Facts


def export(config: Config, run: Path, to: Path, dtype: str = "float32") -> None:
    """Write weights in `dtype`, config.json and the tokenizer to the new folder `to`. A model with rotary embedding has at least as many
    positions as the longest document that it was trained on. Raises CheckpointError."""
    saved = Checkpoint.latest(run, World.alone())
    tokenizer = open_tokenizer(config)
    if tokenizer.fingerprint != Facts.of(saved).fingerprints.tokenizer:
        raise CheckpointError(f"the tokenizer changed since {saved.folder} was written; an export with it would be useless")
    spec = config.spec
    if not spec.learned_positions:
        spec = replace(spec, max_positions=max(spec.max_positions, config.data.max_len))
    whole = ((p.name, saved.read("master", p.name, Box.whole(p.shape))) for p in spec.params)
    carried = Path(config.model.path) if config.model.path else tokenizer.file
    write_folder(to, spec, whole, getattr(torch, FORMATS[dtype].compute), carried)
