"""MLflow: `pip install 'longshift[mlflow]'`. Writes where MLFLOW_TRACKING_URI says, else into `mlflow.db` in the current folder, for
`mlflow ui`. The parts of a resumed run have the tag longshift.run."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from longshift.trainer.trackers import flat, part_name

MOST_PARAMS, MOST_LETTERS = 100, 500  # of one call, and of a value


class MlflowLog:
    """Writes one MLflow run, in the experiment that is named as the project."""

    def __init__(self, folder: Path, project: str):
        self._folder, self._project = folder, project
        self._client: Any = None
        self._run = ""

    def start(self, config: Mapping[str, Any], first: int) -> None:
        self._client = MlflowClient()
        name, tags = part_name(self._folder, first), {"longshift.run": str(self._folder)}
        self._run = self._client.create_run(self._experiment(), run_name=name, tags=tags).info.run_id
        told = [Param(key, (value if isinstance(value, str) else json.dumps(value))[:MOST_LETTERS]) for key, value in flat(config)]
        for begin in range(0, len(told), MOST_PARAMS):
            self._client.log_batch(self._run, params=told[begin : begin + MOST_PARAMS])

    def log(self, step: int, row: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now_ms, step) for name, value in row.items()])

    def finish(self, ok: bool) -> None:
        self._client.set_terminated(self._run, status="FINISHED" if ok else "FAILED")

    def _experiment(self) -> str:
        """The experiment's number. Another process may make it at the same time."""
        for last in (False, True):
            if found := self._client.get_experiment_by_name(self._project):
                return found.experiment_id
            try:
                return self._client.create_experiment(self._project)
            except MlflowException:
                if last:
                    raise
        raise AssertionError
