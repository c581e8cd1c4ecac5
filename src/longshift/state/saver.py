"""When the checkpoints of a run are written: in the background from a copy of the state where
memory has room for one, else at once.

    this thread   │ step 2 │ copy │ step 3        │ step 4 │ finish 2, copy │ step 5 ...
    another                       │ files of step 2 │                       │ files of step 4

A rank's thread writes, syncs and hashes the rank's own files and speaks to no other rank. What
ranks agree on, the manifest and the move of LATEST, is done by the ranks' own threads, after the
first step at whose end every rank has written, and at the latest before the next checkpoint and at
the end of the run. So collectives of a checkpoint never cross those of a step, and a failure to
write ends the run with the error that it would end with at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from longshift.dist.memory import lacks_memory
from longshift.dist.world import World
from longshift.errors import CheckpointError, NonFiniteError, OutOfMemoryError
from longshift.layout.box import Box
from longshift.state.checkpoint import UnfinishedCheckpoint, save
from longshift.state.optimizer import Optimizer
from longshift.stream.gpu_tiers import Arena


class StateCopy:
    """Host memory for what a rank saves of its state, `nbytes` in all. Mutable: it is filled again
    for every checkpoint."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        # 1. What is saved. Without storage: on disk, only one shard is in memory at a time.
        views: dict[tuple[str, Box, str], Tensor] = {}
        on_gpu = False
        for name, box, kind, view in self._saved():
            views[name, box, kind] = torch.empty_like(view, device="meta")
            on_gpu = on_gpu or view.device.type == "cuda"
        self.nbytes = sum(view.nbytes for view in views.values())

        # 2. Memory for it, the widest first, so that all are aligned.
        self._arena = Arena(self.nbytes) if on_gpu else None
        memory = self._arena.bytes if self._arena else torch.empty(self.nbytes, dtype=torch.uint8)
        self._copies: dict[tuple[str, Box, str], Tensor] = {}
        start = 0
        for key, view in sorted(views.items(), key=lambda item: -item[1].itemsize):
            part = memory[start : start + view.nbytes]
            self._copies[key] = part.view(view.dtype).view(view.shape)
            start += view.nbytes

    def _saved(self) -> Iterator[tuple[str, Box, str, Tensor]]:
        """Weight, box, kind and view of what this rank saves."""
        for name, box, owned, kinds in self._optimizer.state():
            for kind, view in kinds.items() if owned and box else ():
                yield name, box, kind, view

    def filled(self) -> list[tuple[str, Box, bool, dict[str, Tensor]]]:
        """The state as it is now, like `Optimizer.state`, of what this rank saves."""
        entries = []
        for name, box, kind, view in self._saved():
            copy = self._copies[name, box, kind].copy_(view, non_blocking=True)
            entries.append((name, box, True, {kind: copy}))
        # The thread that writes must find the copies done.
        if self._arena:
            torch.cuda.synchronize()
        return entries


class Saver:
    """Saves the checkpoints of a run; a context, which ends when the last of them is whole.
    Mutable: the one that is being written, and the copy that it is written from. Collective, but
    for `busy`."""

    def __init__(self, run: Path, world: World, keep: int, background: bool):
        self.run = run
        self.world = world
        self.keep = keep
        self.background = background
        self._under_way: UnfinishedCheckpoint | None = None
        self._copy: StateCopy | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self._under_way is not None and not self._under_way.written

    def save(
        self,
        step: int,
        optimizer: Optimizer,
        facts: Mapping[str, Any],
        best: int | None,
        last: bool,
    ) -> None:
        """Save `step`, when the checkpoint before it is whole; at once where it is the last. The
        arguments, and what is raised, are those of `checkpoint.save`."""
        self.finish()
        if not last and self.background and self._copy is None:
            self._copy = self._allocate(optimizer)
            self.background = self._copy is not None
        if last or self._copy is None:
            save(self.run, step, optimizer.state(), facts, self.world, self.keep, best)
            return
        self._under_way = UnfinishedCheckpoint(self.run, step, facts, self.world, self.keep, best)
        self._under_way.write(self._copy.filled())

    def _allocate(self, optimizer: Optimizer) -> StateCopy | None:
        """Memory for a copy of the state; None where some rank gets none."""
        copy = None
        fault = ""
        try:
            copy = StateCopy(optimizer)
        except Exception as error:
            # Torch has no class for memory that a CPU lacks, and a map of pages raises OSError.
            if not isinstance(error, OutOfMemoryError) and not lacks_memory(error):
                raise
            fault = str(error) or "no memory"
        return None if any(self.world.gather_text(fault)) else copy

    def finish(self) -> None:
        """Have the checkpoint that is being written take its place, if there is one. Raises
        CheckpointError where a rank could not write."""
        under_way = self._under_way
        self._under_way = None  # also where it fails: it is not tried again
        if under_way:
            under_way.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the last checkpoint where all ranks end in the same way: well, or by a loss that
        is not finite, which stays the error. An error of one rank alone leaves the checkpoint that
        is being written unfinished."""
        if kind is None:
            self.finish()
        elif kind is NonFiniteError or self.world.size == 1:
            with suppress(CheckpointError):
                self.finish()
