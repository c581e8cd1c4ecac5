"""The documents of a validation: the same at every one, whatever the layout, with the loss of each
range of lengths by itself.

    all documents -> a sample of `tokens`, in an order of its own -> ranges (16, 32], (32, 64] ...
    -> batches of one range

The ranges are powers of two and no layout's groups, so that runs under other layouts can be
compared. A share of data.train may be held out instead of documents of its own: a document is, or
is not, by its number alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longshift.documents.batch import Document, document_part
from longshift.documents.tokens import TokenCache
from longshift.errors import DataError
from longshift.model.loss import IGNORE
from longshift.workload.lengths import Overlong, Spans, spans
from longshift.workload.order import Order, held_out


@dataclass(frozen=True, eq=False)
class ValidSet:
    """What is validated on. `spans` of documents; `batches`: by the longest length of a range, from
    short to long, the spans of each of its batches, by their numbers."""

    cache: TokenCache
    spans: Spans
    batches: Mapping[int, Sequence[Sequence[int]]]

    @classmethod
    def of(
        cls,
        cache: TokenCache,
        max_len: int,
        overlong: Overlong | None,
        tokens: int,
        tokens_per_step: int,
        share: float = 0.0,
    ) -> "ValidSet":
        """Documents of at most `max_len` tokens, until there are `tokens`, in batches of about
        `tokens_per_step`.

        `share`: the share of documents that was held out; 0: all documents are candidates.
        Raises DataError where there is none, or one is too long without a policy.
        """
        if overlong is None and cache.lengths.max() > max_len:
            longest = int(cache.lengths.argmax())
            raise DataError(
                f"data.valid: {cache.where(longest)} has {cache.lengths[longest]} tokens, more than"
                " data.max_len; set data.overlong"
            )
        candidates = spans(cache.lengths, max_len, overlong or "split")
        if share:
            candidates = candidates.of(held_out(candidates.document, share))
        if not len(candidates):
            raise DataError(
                "no document is left to validate on: raise data.held_out, or name others as"
                " data.valid"
            )

        # 1. Draw a sample. Its seed is fixed, so that runs of any seed validate on the same
        # documents.
        lengths = (candidates.stop - candidates.start).tolist()
        order = Order(len(candidates), 0)
        sample = list[int]()
        total = 0
        while total < tokens and len(sample) < len(candidates):
            sample.append(order[len(sample)])
            total += lengths[sample[-1]]

        # 2. Fill batches of each range of lengths, from short to long.
        ranges: dict[int, list[list[int]]] = {}
        for span in sorted(sample, key=lambda span: (lengths[span], span)):
            max_length = 1 << (lengths[span] - 1).bit_length()
            batches = ranges.setdefault(max_length, [])
            if not batches or sum(lengths[other] for other in batches[-1]) >= tokens_per_step:
                batches.append([])
            batches[-1].append(span)
        return cls(cache, candidates, ranges)

    def losses(
        self, score: Callable[[Sequence[Document]], float]
    ) -> tuple[tuple[int, float, int], ...]:
        """Longest length, mean loss and targets of each range of lengths that has targets.

        `score`: the loss sum of documents. Raises DataError where no range has a target.
        """
        rows = []
        for max_length, batches in self.batches.items():
            loss = 0.0
            targets = 0
            for batch in batches:
                documents = [document_part(self.cache, *self.spans.item(span)) for span in batch]
                batch_targets = sum(int((d.labels != IGNORE).sum()) for d in documents)
                targets += batch_targets
                if batch_targets:  # a forward pass without a target would tell nothing
                    loss += score(documents)
            if targets:
                rows.append((max_length, loss / targets, targets))
        if not rows:
            raise DataError(
                "data.valid: no token that is learned is left in it: raise data.max_len, or"
                " validation.tokens"
            )
        return tuple(rows)
