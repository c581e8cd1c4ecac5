"""Where the weights of a run come from: a model folder, the seed, a checkpoint."""

from pathlib import Path

import torch

from longshift.config import Config
from longshift.model.huggingface import WeightFolder
from longshift.state.checkpoint import Checkpoint
from longshift.state.home import Source, random_source


def initial(config: Config, dtype: torch.dtype) -> Source:
    """Weights to begin with: of the model folder, but for adapters, or drawn. Raises CheckpointError for a folder that does not hold
    them."""
    drawn = random_source(config.spec, config.train.seed, dtype)
    if config.model.path is None or config.model.init != "pretrained":
        return drawn
    base = config.spec.base
    folder = WeightFolder(Path(config.model.path), base)
    return lambda name, box: folder.read(name, box) if name in base.by_name else drawn(name, box)


def continued(config: Config, saved: Checkpoint, dtype: torch.dtype) -> Source:
    """Weights after a checkpoint: its own, and those that are not trained from where they came from."""
    trained = saved.source()
    if config.spec.learned == config.spec.parameters:
        return trained
    first = initial(config, dtype)
    return lambda name, box: first(name, box) if config.spec.by_name[name].frozen else trained(name, box)
