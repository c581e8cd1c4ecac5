"""Trackio: `pip install 'longshift[trackio]'`. It writes into its own folder (TRACKIO_DIR) and sends nothing unless the user's environment
names a Space (TRACKIO_SPACE_ID); `trackio show` shows it. The parts of a resumed run share a group."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio

from longshift.trainer.trackers import part_name


class TrackioLog:
    """Writes one run of Trackio."""

    def __init__(self, folder: Path, project: str):
        self._folder, self._project = folder, project
        self._run: Any = None

    def start(self, config: Mapping[str, Any], first: int) -> None:
        name, group = part_name(self._folder, first), self._folder.name
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project=self._project, name=name, group=group, config=dict(config), **quiet)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, ok: bool) -> None:
        trackio.finish()  # that of the run would be called again when Python ends
