"""Weights & Biases: `pip install 'longshift[wandb]'`. Offline, into the run folder's `wandb/`, unless the environment or settings of the
user say otherwise (WANDB_MODE=online); `wandb sync RUN/wandb/offline-run-*` sends it later. The parts of a resumed run share a group."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from longshift.trainer.trackers import part_name


class WandbLog:
    """Writes one W&B run below `folder`. It is asked nothing: no code, no console, no git."""

    def __init__(self, folder: Path, project: str):
        self._folder, self._project = folder, project
        self._run: Any = None

    def start(self, config: Mapping[str, Any], first: int) -> None:
        said = "mode" in wandb.setup().settings.model_fields_set  # by WANDB_MODE, or a settings file
        settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, login_timeout=30)
        name, group = part_name(self._folder, first), self._folder.name
        where: dict[str, Any] = {"project": self._project, "name": name, "group": group, "dir": str(self._folder)}
        self._run = wandb.init(**where, config=dict(config), mode=None if said else "offline", settings=settings, reinit="create_new")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)
