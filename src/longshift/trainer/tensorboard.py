"""TensorBoard: `pip install 'longshift[tensorboard]'`. Scalars lie in the run folder's `tensorboard/`, for `tensorboard --logdir runs`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoardLog:
    """Writes below `folder`. A resumed run hides the steps that it computes again."""

    def __init__(self, folder: Path, project: str):
        self._folder = folder / "tensorboard"
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any], first: int) -> None:
        self._writer = SummaryWriter(str(self._folder), purge_step=first)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, ok: bool) -> None:
        if self._writer is not None:
            self._writer.close()
