"""The documents of a step: a pure function of the data, the seed and the cursor, whatever the
layout.

    cursor ->  documents in shuffled order, until `tokens_per_step` is reached  -> next cursor

The document that reaches it is included, so nothing is cut or left over; a step goes on until a
token is learned. A document's label i is token i + 1 of the same source document, where that is
learned; the last token has none. So documents that the over-length policy cuts lose no label at a
cut.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longshift.errors import DataError
from longshift.model.loss import IGNORE
from longshift.workload.lengths import Overlong, Spans, cap_loss, spans
from longshift.workload.order import Mixture, Order, held_out, shares_of

if TYPE_CHECKING:  # tensors of a pack need no file formats, and no config
    from longshift.config import Config
    from longshift.config_parts import TrainSource
    from longshift.documents.tokens import TokenCache


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens that attend to each other, at positions from 0; int64 [tokens] each. Label IGNORE
    (-100) is no target."""

    ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The documents of one step. `target_tokens` counts their labels, the step's only divisor, and
    is at least 1. `cursor` is where the step began and `next_cursor` where the next one does."""

    documents: tuple[Document, ...]
    target_tokens: int
    cursor: int
    next_cursor: int

    @property
    def tokens(self) -> int:
        return sum(len(d.ids) for d in self.documents)


def document_from_ids(
    ids: np.ndarray, max_len: int | None = None, learned: np.ndarray | None = None
) -> Document:
    """The first `max_len` tokens of a source document (None: all), each with its next token as
    label.

    The label is IGNORE after the source's last token, and where `learned` [tokens] excludes the
    next token."""
    n = len(ids) if max_len is None else min(max_len, len(ids))

    # The source may go on after the cut, so that the last token kept has a label, too.
    next_ids = np.asarray(ids[1 : n + 1], np.int64)
    if learned is not None:
        next_ids = np.where(learned[1 : n + 1], next_ids, IGNORE)
    labels = np.full(n, IGNORE, np.int64)
    labels[: len(next_ids)] = next_ids
    return Document(np.asarray(ids[:n], np.int64), labels)


class Batches:
    """Every step's documents. Never changes after construction, which costs O(documents); `at`
    costs only the step itself.

    `spans` what is trained on, `order` their order. Two of equal `fingerprint` give the same
    document at the same cursor: tokens, seed and cuts are equal, whatever `tokens_per_step`.
    """

    def __init__(
        self,
        cache: "TokenCache",
        seed: int,
        tokens_per_step: int,
        max_len: int,
        overlong: Overlong | None = None,
        sources: "Sequence[TrainSource]" = (),
        held: float = 0.0,
    ) -> None:
        """Documents of at most `max_len` tokens.

        `overlong`: the policy for longer documents; None where there are none.
        `sources`: of the cache, how often each is read. Where they say nothing, a pass is every
        document once. `held`: the share of documents that is left out, to validate on.
        Raises DataError for documents that are too long without a policy.
        """
        longest = int(cache.lengths.argmax())
        is_too_long = bool(cache.lengths[longest] > max_len)
        if is_too_long and overlong is None:
            raise DataError(_policy_choices(cache, longest, max_len))
        self.cache = cache
        self._tokens_per_step = tokens_per_step
        self.spans: Spans = spans(cache.lengths, max_len, overlong or "split")
        if not len(self.spans):
            raise DataError(
                f"data.overlong: drop leaves nothing: all {len(cache)} documents are longer than"
                f" max_len: {max_len}"
            )
        if held:
            self.spans = self.spans.of(~held_out(self.spans.document, held))
        if not len(self.spans):
            raise DataError(
                f"data.held_out: {held} leaves no document to train on: lower it, or name others to"
                " validate on as data.valid"
            )
        self.order = self._mixture(seed, sources) or Order(len(self.spans), seed)

        # Only what is in use is in the fingerprint: a policy without a long document changes
        # nothing.
        description = f"{cache.fingerprint} {seed} "
        if is_too_long:
            description += f"{overlong} {max_len}"
        if isinstance(self.order, Mixture):
            description += f" {self.order.sizes} {[hex(share) for share in self.order.shares]}"
        if held:
            description += f" without {held}"
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()

    @classmethod
    def of(cls, config: "Config", cache: "TokenCache") -> "Batches":
        """The batches that a run trains on."""
        data = config.data
        return cls(
            cache,
            seed=config.train.seed,
            tokens_per_step=config.train.tokens_per_step,
            max_len=data.max_len,
            overlong=data.overlong,
            sources=data.train,
            held=data.held_out or 0.0,
        )

    def _mixture(self, seed: int, sources: "Sequence[TrainSource]") -> Mixture | None:
        """The order of sources of which some are read more often than others; None if all are read
        alike."""
        if all(source.epochs is None and source.weight is None for source in sources):
            return None
        source_of_span = self.cache.source_of[self.spans.document]
        span_tokens = self.spans.stop - self.spans.start
        documents = np.bincount(source_of_span, minlength=len(sources))
        tokens = np.bincount(source_of_span, weights=span_tokens, minlength=len(sources))
        for source, count in zip(sources, documents):
            if not count:
                raise DataError(
                    f"data.train: {source.name} gives no document, so it cannot be mixed with"
                    " others"
                )
        shares = shares_of(
            tokens=tokens.astype(int).tolist(),
            documents=documents.tolist(),
            epochs=[source.epochs for source in sources],
            weights=[source.weight for source in sources],
        )
        return Mixture(tuple(documents.tolist()), shares, seed)

    @property
    def learned_share(self) -> float:
        """The share of the corpus's tokens that are targets."""
        learned = self.cache.learned_tokens
        return 1.0 if learned is None else learned / int(self.cache.lengths.sum())

    def at(self, cursor: int) -> StepBatch:
        """The step that begins at a global cursor >= 0, which counts documents as cut by the
        policy. O(1) to seek.

        Raises DataError where a whole pass has no target.
        """
        documents = list[Document]()
        tokens = 0
        targets = 0
        next_cursor = cursor
        while tokens < self._tokens_per_step or not targets:
            document = self.document(self.order[next_cursor])
            documents.append(document)
            tokens += len(document.ids)
            targets += int((document.labels != IGNORE).sum())
            next_cursor += 1

            # A step without a target takes further documents: for ever, if no document has one.
            count = len(documents)
            if not targets and count == len(self.spans) + 1 and not self._has_targets():
                raise DataError(
                    "data: no token that is learned is left, since max_len cuts all of them off:"
                    " raise data.max_len"
                )
        return StepBatch(tuple(documents), targets, cursor, next_cursor)

    def _has_targets(self) -> bool:
        """Whether a document has a target after the cut."""
        spans = range(len(self.spans))
        return any((self.document(span).labels != IGNORE).any() for span in spans)

    def where(self, cursor: int) -> str:
        """The document at a cursor, as a person finds it: file, line or row, and its tokens where
        it is a piece."""
        document, start, stop = self.spans.item(self.order[cursor])
        is_piece = stop - start < self.cache.lengths[document]
        return self.cache.where(document) + (f", tokens {start} to {stop}" if is_piece else "")

    def document(self, span: int) -> Document:
        """The document of one of `spans`."""
        document, start, stop = self.spans.item(span)
        return document_part(self.cache, document, start, stop)


def document_part(cache: "TokenCache", document: int, start: int, stop: int) -> Document:
    """Tokens `start` to `stop` of a document of the cache."""
    # One token more than the part has: it is the label of the last.
    ids = cache.tokens(document, start, stop + 1)
    learned = cache.learned(document, start, stop + 1)
    return document_from_ids(ids, max_len=stop - start, learned=learned)


def _policy_choices(cache: "TokenCache", longest: int, max_len: int) -> str:
    """Message: what each policy for over-length documents would lose."""
    loss = cap_loss(cache.lengths, max_len)
    total = int(cache.lengths.sum())
    return (
        f"{loss.documents} of {len(cache)} documents are longer than data.max_len:"
        f" {max_len} tokens; the longest has {cache.lengths[longest]} ({cache.where(longest)}). Say"
        " under data what becomes of them, with one of:\n  overlong: split      #"
        f" {loss.split_pieces} pieces; loses no token, but a piece does not see the one before it\n"
        f"  overlong: truncate   # loses {loss.truncate_tokens} of {total} tokens"
        f" ({loss.truncate_tokens / total:.1%})\n  overlong: drop       # loses"
        f" {loss.drop_tokens} of {total} tokens ({loss.drop_tokens / total:.1%})"
    )
