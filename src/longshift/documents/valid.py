"""The documents of a validation: the same at every one, whatever the layout, with the loss of each range of lengths by itself.

    all documents -> a sample of `tokens`, in an order of its own -> ranges (16, 32], (32, 64] ... -> batches of one range

The ranges are powers of two and no layout's groups, so that runs under other layouts can be compared. A share of data.train may be held out
instead of documents of its own: a document is, or is not, by its number alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longshift.documents.batch import Document, document_part
from longshift.documents.tokens import TokenCache
from longshift.errors import DataError
from longshift.model.loss import IGNORE
from longshift.workload.lengths import Overlong, spans
from longshift.workload.order import Order, held_out


@dataclass(frozen=True, eq=False)
class ValidSet:
    """What is validated on. `batches`: of each range, by its longest length, the spans (document, start, stop) of each batch."""

    cache: TokenCache
    batches: tuple[tuple[int, tuple[tuple[tuple[int, int, int], ...], ...]], ...]

    @classmethod
    def of(
        cls, cache: TokenCache, max_len: int, overlong: Overlong | None, tokens: int, tokens_per_step: int, share: float = 0.0
    ) -> "ValidSet":
        """Documents of at most `max_len` tokens, until there are `tokens`, in batches of about `tokens_per_step`. `share`: those that were
        held out; 0: all of them. Raises DataError where there is none, or one is too long without a policy."""
        if overlong is None and cache.lengths.max() > max_len:
            longest = int(cache.lengths.argmax())
            raise DataError(
                f"data.valid: {cache.where(longest)} has {cache.lengths[longest]} tokens, more than data.max_len; set data.overlong"
            )
        cut = spans(cache.lengths, max_len, overlong or "split")
        chosen = np.flatnonzero(held_out(cut.document, share)) if share else np.arange(len(cut))
        if not len(chosen):
            raise DataError("no document is left to validate on: raise data.held_out, or name others as data.valid")
        sample, total, order = list[tuple[int, int, int]](), 0, Order(len(chosen), 0)
        for nth in range(len(chosen)):
            if total >= tokens:
                break
            span = int(chosen[order[nth]])
            sample.append((int(cut.document[span]), int(cut.start[span]), int(cut.stop[span])))
            total += sample[-1][2] - sample[-1][1]
        ranges: dict[int, list[list[tuple[int, int, int]]]] = {}
        for piece in sorted(sample, key=lambda piece: (piece[2] - piece[1], piece)):
            some = ranges.setdefault(1 << (piece[2] - piece[1] - 1).bit_length(), [])
            if not some or sum(stop - start for _, start, stop in some[-1]) >= tokens_per_step:
                some.append([])
            some[-1].append(piece)
        return cls(cache, tuple((upto, tuple(map(tuple, some))) for upto, some in sorted(ranges.items())))

    def losses(self, score: Callable[[Sequence[Document]], float]) -> tuple[tuple[int, float, int], ...]:
        """Longest length, mean loss and targets of each range of lengths that has targets; `score`: the loss sum of documents. Raises
        DataError where none has."""
        found = []
        for upto, batches in self.batches:
            total, targets = 0.0, 0
            for batch in batches:
                documents = [document_part(self.cache, *piece) for piece in batch]
                targets += (count := sum(int((d.labels != IGNORE).sum()) for d in documents))
                total += score(documents) if count else 0.0
            if targets:
                found.append((upto, total / targets, targets))
        if not found:
            raise DataError("data.valid: no token that is learned is left in it: raise data.max_len, or validation.tokens")
        return tuple(found)
