"""A trace of the first step of a run: what rank 0 played, beside what was predicted of it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from longshift.dist.world import World
from longshift.step.player import Player
from longshift.stream.trace import Recorder
from longshift.weigh.timeline import Timeline, predict_step, write_timeline


class StepTrace(ExitStack):
    """Traces one step into a file, or nothing without a file and on other ranks than 0.

    A context that is entered before the state is built, so that it sees all memory. Mutable: it is
    done after the first step.
    """

    def __init__(self, path: Path | None, world: World):
        super().__init__()
        self._path = path
        self._rank = world.rank
        self._recorder = Recorder()
        self._timeline: Timeline | None = None
        if path is not None and world.rank == 0:
            self._timeline = Timeline(world.device)

    def __enter__(self) -> Self:
        if self._timeline is not None:
            self.enter_context(self._timeline)
        return self

    def watch(self, player: Player) -> None:
        """Record the next step of a player, unless a step has been recorded before."""
        if self._timeline is not None:
            player.record(self._recorder)
            self._timeline.watch(player)

    def write(self, player: Player) -> None:
        """Write the step that was played, if it was recorded, and leave the player alone."""
        if self._timeline is None or self._path is None:
            return
        player.record(None)
        player.after = None
        self._timeline.close()
        prediction = predict_step(player)
        write_timeline(self._path, self._rank, self._timeline.ops, prediction, self._recorder)
        self._timeline = None
