"""When the checkpoints of a run are written: in the background from a copy of the state where memory has room for one, else at once.

    this thread   │ step 2 │ copy │ step 3        │ step 4 │ finish 2, copy │ step 5 ...
    another                       │ files of step 2 │                       │ files of step 4

A rank's thread writes, syncs and hashes the rank's own files and speaks to no other rank. What ranks agree on, the manifest and the move of
LATEST, is done by the ranks' own threads, after the first step at whose end every rank has written, and at the latest before the next
checkpoint and at the end of the run. So collectives of a checkpoint never cross those of a step, and a failure to write ends the run with
the error that it would end with at once.
"""

from collections.abc import Mapping
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
from longshift.state.checkpoint import Unfinished, save
from longshift.state.optimizer import Optimizer
from longshift.stream.tiers import Arena


class StateCopy:
    """Host memory for what a rank saves of its state, `nbytes` in all. Mutable: it is filled again for every checkpoint."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        saved = [view for _, box, owned, views in optimizer.state() if owned and box for view in views.values()]
        self._starts: dict[int, int] = {}  # by bytes of an element, the widest first: where they begin
        self.nbytes = 0
        for itemsize in sorted({view.itemsize for view in saved}, reverse=True):
            self._starts[itemsize] = self.nbytes
            self.nbytes += sum(view.nbytes for view in saved if view.itemsize == itemsize)
        self._gpu = bool(saved) and saved[0].device.type == "cuda"
        self._arena = Arena(self.nbytes) if self._gpu else None
        self._bytes = self._arena.bytes if self._arena else torch.empty(self.nbytes, dtype=torch.uint8)

    def filled(self) -> list[tuple[str, Box, bool, dict[str, Tensor]]]:
        """The state as it is now, like `Optimizer.state`, of what this rank saves."""
        found, starts = [], dict(self._starts)
        for name, box, owned, views in self._optimizer.state():
            if owned and box:
                there = {}
                for kind, view in views.items():
                    start = starts[view.itemsize]
                    there[kind] = self._bytes[start : start + view.nbytes].view(view.dtype).view(view.shape)
                    there[kind].copy_(view, non_blocking=True)
                    starts[view.itemsize] += view.nbytes
                found.append((name, box, owned, there))
        if self._gpu:
            torch.cuda.synchronize()
        return found


class Saver:
    """Saves the checkpoints of a run; a context, which ends when the last of them is whole. Mutable: the one that is being written, and the
    copy that it is written from. Collective, but for `busy`."""

    def __init__(self, run: Path, world: World, keep: int, background: bool):
        self.run, self.world, self.keep, self.background = run, world, keep, background
        self._under_way: Unfinished | None = None
        self._copy: StateCopy | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self._under_way is not None and not self._under_way.written

    def save(self, step: int, optimizer: Optimizer, facts: Mapping[str, Any], best: int | None, last: bool) -> None:
        """Save `step`, when the checkpoint before it is whole; at once where it is the last. The arguments, and what is raised, are those
        of `checkpoint.save`."""
        self.finish()
        if not last and self.background and self._copy is None:
            self._copy = self._allocate(optimizer)
            self.background = self._copy is not None
        if last or self._copy is None:
            save(self.run, step, optimizer.state(), facts, self.world, self.keep, best)
            return
        self._under_way = Unfinished(self.run, step, facts, self.world, self.keep, best)
        self._under_way.write(self._copy.filled())

    def _allocate(self, optimizer: Optimizer) -> StateCopy | None:
        """Memory for a copy of the state; None where some rank gets none."""
        copy, fault = None, ""
        try:
            copy = StateCopy(optimizer)
        except (OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not lacks_memory(error):
                raise
            fault = str(error)
        return None if any(self.world.gather_text(fault)) else copy

    def finish(self) -> None:
        """Have the checkpoint that is being written take its place, if there is one. Raises CheckpointError where a rank could not
        write."""
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the last checkpoint where all ranks end in the same way: well, or by a loss that is not finite, which stays the error.
        An error of one rank alone leaves the checkpoint that is being written unfinished."""
        if kind is None:
            self.finish()
        elif kind is NonFiniteError or self.world.size == 1:
            with suppress(CheckpointError):
                self.finish()
