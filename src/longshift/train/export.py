"""A run's newest checkpoint as a Hugging Face folder."""

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
    """Write weights in `dtype`, config.json and the tokenizer to the new folder `to`. Raises CheckpointError."""
    saved = Checkpoint.latest(run, World.alone())
    tokenizer = open_tokenizer(config)
    if tokenizer.fingerprint != Facts.of(saved).fingerprints.tokenizer:
        raise CheckpointError(f"the tokenizer changed since {saved.folder} was written; an export with it would be useless")
    whole = ((p.name, saved.read("master", p.name, Box.whole(p.shape))) for p in config.spec.params)
    carried = Path(config.model.path) if config.model.path else tokenizer.file
    write_folder(to, config.spec, whole, getattr(torch, FORMATS[dtype].compute), carried)
