"""The optional TensorBoard log holds every step's scalars."""

from pathlib import Path

import pytest

from longshift.train.metrics import StepMetrics
from longshift.train.tensorboard import TensorBoardLog


def test_scalars_of_every_step_are_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = TensorBoardLog(tmp_path)
    for step in (1, 2, 3):
        log.write(StepMetrics(step, 8.0 / step, 1.0, 3e-4, 100, 99, 4, 0.5, 200.0, 1e9, 2**20, 4 * step))
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert found.Tags()["scalars"]
    name = next(tag for tag in found.Tags()["scalars"] if "loss" in tag)
    assert [(event.step, round(event.value, 4)) for event in found.Scalars(name)] == [(1, 8.0), (2, 4.0), (3, 2.6667)]
