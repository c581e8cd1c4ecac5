"""The next step's batch, made while this step computes.

    this thread   │ step 1          │ step 2          │ step 3 ...
    another       │ draw and pack 2 │ draw and pack 3 │

What is made is a function of the data, the seed and the cursor, so that it is the same as without.
A checkpoint's cursor is the state's, which only a trained step moves.
"""

from concurrent.futures import Future, wait

from longshift.documents.batch import Batches, StepBatch
from longshift.files import in_background
from longshift.step.player import Player, Ready


class BatchPrefetcher:
    """Batches of steps, each with what the player needs of it. Mutable: the one that is being
    made."""

    def __init__(self, batches: Batches, player: Player):
        self._batches = batches
        self._player = player
        self._coming: tuple[int, Future[tuple[StepBatch, Ready]]] | None = None

    def take(self, cursor: int, more: bool) -> tuple[StepBatch, Ready]:
        """The step that begins at a cursor. `more`: whether another follows, which is begun in the
        background. Raises what drawing this step raised."""
        coming = self._coming
        self._coming = None
        if coming and coming[0] == cursor:
            batch, ready = coming[1].result()
        else:
            batch, ready = self._make(cursor)
        if more:
            next_cursor = batch.next_cursor
            self._coming = next_cursor, in_background(lambda: self._make(next_cursor))
        return batch, ready

    def close(self) -> None:
        """Wait for what is being made. Nobody wants it any more."""
        if self._coming:
            wait([self._coming[1]])

    def _make(self, cursor: int) -> tuple[StepBatch, Ready]:
        batch = self._batches.at(cursor)
        return batch, self._player.ready(batch.documents)
