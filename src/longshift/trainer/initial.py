"""Where the weights of a run come from: a model folder, the seed, a checkpoint."""

from functools import cache
from pathlib import Path

import torch

from longshift.config import Config
from longshift.layout.box import Box
from longshift.model.huggingface import AdapterFolder, WeightFolder
from longshift.state.checkpoint import Checkpoint
from longshift.state.home import Source, random_source


def initial(config: Config, dtype: torch.dtype) -> Source:
    """Weights to begin with: of the model folder, and adapters of the folder of PEFT that the config names, or drawn. The adapters'
    folder is opened for the first of them: a run that goes on needs none. Raises CheckpointError for a folder that does not hold them."""
    drawn, base, model = random_source(config.spec, config.train.seed, dtype), config.spec.base, config.model
    folder = WeightFolder(Path(model.path), base) if model.path and model.init == "pretrained" else None
    named = model.lora.init_from if model.lora else None
    adapters = cache(lambda: AdapterFolder(Path(named or ""), config.spec)) if named else None

    def read(name: str, box: Box) -> torch.Tensor:
        if name in base.by_name:
            return folder.read(name, box) if folder else drawn(name, box)
        return adapters().read(name, box) if adapters else drawn(name, box)

    return read


def continued(config: Config, saved: Checkpoint, dtype: torch.dtype) -> Source:
    """Weights after a checkpoint: its own, and those that are not trained from where they came from."""
    trained = saved.source()
    if config.spec.learned == config.spec.parameters:
        return trained
    first = initial(config, dtype)
    return lambda name, box: first(name, box) if config.spec.by_name[name].frozen else trained(name, box)
