"""The first step of a run beside what was predicted of it: as a trace of rank 0 while the run
trains, and as bytes of all ranks for `longshift check --timeline`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from longshift.command_results import MemoryCheck, MemoryDifference, RankPeak
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.dist.fork import local_world
from longshift.dist.world import World
from longshift.files import temporary_folder
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.stream.trace import Recorder
from longshift.trainer.build_run import build_player, build_state, open_data
from longshift.weigh.timeline import (
    ROWS,
    Timeline,
    compare_step,
    difference_order,
    predict_step,
    write_timeline,
)

DEADLINE_S = 1800.0


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


def timeline(config: Config, device: str = "cpu") -> MemoryCheck:
    """The first step of a run, played on devices of this type and recorded beside what the ledger
    predicts: peaks of every rank, and the largest differences in bytes after an operation. Raises
    LongshiftError."""
    with temporary_folder() as scratch, local_world(config.world, device, device) as world:
        answers = world.call(
            f"{__name__}:record_step", DEADLINE_S, config=config.to_yaml(), scratch=str(scratch)
        )
    differences = []
    for rank, answer in enumerate(answers):
        differences += [{"rank": rank, **row} for row in answer.pop("differences")]
    largest = sorted(differences, key=difference_order)[:ROWS]
    return MemoryCheck(
        within=all(answer["within"] for answer in answers),
        ranks=tuple(RankPeak(rank=rank, **answer) for rank, answer in enumerate(answers)),
        differences=tuple(MemoryDifference(**row) for row in largest),
    )


def record_step(world: World, config: str, scratch: str) -> dict[str, Any]:
    """What `weigh.timeline.compare_step` says of a run's first step on this rank."""
    run = parse_config(config)
    # Entered before the state is built, so that it sees all memory.
    with Timeline(world.device) as memory:
        state = build_state(run, world, Path(scratch))
        player = build_player(run, world, state, Path(scratch))
        batches, _ = open_data(run, world)
        batch = batches.at(state.cursor)
        memory.watch(player)
        train_step(state, batch, player)
        player.after = None
    return compare_step(memory, predict_step(player))
