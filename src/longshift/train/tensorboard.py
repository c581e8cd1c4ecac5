"""Steps as TensorBoard scalars: `save: {tensorboard: true}`, and `pip install longshift[tensorboard]`."""

from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

from longshift.train.metrics import StepMetrics


class TensorBoardLog:
    """Writes each step's numbers below `folder`. A resumed run hides the steps that it computes again."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def write(self, step: StepMetrics) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step.step)
        for name, value in asdict(step).items():
            if name not in ("step", "groups", "layout", "valid") and value is not None:
                self._writer.add_scalar(name, value, step.step)
        for part in step.valid:
            self._writer.add_scalar(f"valid/to {part.upto}", part.loss, step.step)
        for group in step.groups:
            for name, value in asdict(group).items():
                if name not in ("layout", "upto") and value is not None:
                    self._writer.add_scalar(f"{group.layout}/{name}", value, step.step)
        self._writer.flush()
