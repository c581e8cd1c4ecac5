"""The documents of a step: a pure function of the data, the seed and the cursor, whatever the layout.

    cursor ->  documents in shuffled order, until `tokens_per_step` is reached  -> next cursor

The document that reaches it is included, so nothing is cut or left over; a step goes on until a token is learned. A document's label i is
token i + 1 of the same source document, where that is learned; the last token has none. So documents that the over-length policy cuts lose
no label at a cut.
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
    """Tokens that attend to each other, at positions from 0; int64 [tokens] each. Label IGNORE (-100) is no target."""

    ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The documents of one step. `target_tokens` counts their labels, the step's only divisor, and is at least 1. `cursor` is where
    the step began and `next_cursor` where the next one does."""

    documents: tuple[Document, ...]
    target_tokens: int
    cursor: int
    next_cursor: int

    @property
    def tokens(self) -> int:
        return sum(len(d.ids) for d in self.documents)


def document_from_ids(ids: np.ndarray, max_len: int | None = None, learned: np.ndarray | None = None) -> Document:
    """The first `max_len` tokens of a source document (None: all), and the token after each; IGNORE after the source's last, and where
    `learned` [tokens] says that the token after is no target."""
    n = len(ids) if max_len is None else min(max_len, len(ids))
    labels = np.full(n, IGNORE, np.int64)
    following = np.asarray(ids[1 : n + 1], np.int64)
    labels[: len(following)] = following if learned is None else np.where(learned[1 : n + 1], following, IGNORE)
    return Document(np.asarray(ids[:n], np.int64), labels)


class Batches:
    """Every step's documents. Never changes after construction, which costs O(documents); `at` costs only the step itself.

    `spans` what is trained on, `order` their order. Two of equal `fingerprint` give the same document at the same cursor: tokens,
    seed and cuts are equal, whatever `tokens_per_step`.
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
        """Documents of at most `max_len` tokens; `overlong` says what becomes of longer ones and may be None when there are none;
        `sources`, of the cache, say how often each is read: a pass is every document once where they say nothing; `held`: the share of
        documents that is left out, to validate on. Raises DataError for documents that are too long without a policy."""
        longest = int(cache.lengths.argmax())
        too_long = bool(cache.lengths[longest] > max_len)
        if too_long and overlong is None:
            raise DataError(_which_policy(cache, longest, max_len))
        self.cache = cache
        self._tokens_per_step = tokens_per_step
        self.spans: Spans = spans(cache.lengths, max_len, overlong or "split")
        if held:
            self.spans = self.spans.of(~held_out(self.spans.document, held))
        if not len(self.spans):
            raise DataError(f"data.overlong: drop leaves nothing: all {len(cache)} documents are longer than max_len: {max_len}")
        self.order = self._mixed(seed, sources) or Order(len(self.spans), seed)
        cut = f"{overlong} {max_len}" if too_long else ""
        mixed = f" {self.order.sizes} {[hex(share) for share in self.order.shares]}" if isinstance(self.order, Mixture) else ""
        mixed += f" without {held}" if held else ""
        self.fingerprint = hashlib.sha256(f"{cache.fingerprint} {seed} {cut}{mixed}".encode()).hexdigest()

    @classmethod
    def of(cls, config: "Config", cache: "TokenCache") -> "Batches":
        """The batches that a run trains on."""
        data, train = config.data, config.train
        return cls(cache, train.seed, train.tokens_per_step, data.max_len, data.overlong, data.train, data.held_out or 0.0)

    def _mixed(self, seed: int, sources: "Sequence[TrainSource]") -> Mixture | None:
        """The order of sources of which some are read more often than others."""
        if all(source.epochs is None and source.weight is None for source in sources):
            return None
        of = self.cache.source_of[self.spans.document]
        documents = np.bincount(of, minlength=len(sources))
        tokens = np.bincount(of, weights=self.spans.stop - self.spans.start, minlength=len(sources))
        for source, n in zip(sources, documents):
            if not n:
                raise DataError(f"data.train: {source.path or source.corpus} gives no document, so it cannot be mixed with others")
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
        """The step that begins at a global cursor >= 0, which counts documents as cut by the policy. O(1) to seek."""
        documents, tokens, targets, after = [], 0, 0, cursor
        while tokens < self._tokens_per_step or not targets:
            documents.append(self.document(self.order[after]))
            tokens += len(documents[-1].ids)
            targets += int((documents[-1].labels != IGNORE).sum())
            after += 1
            if not targets and tokens > self._tokens_per_step and len(documents) > len(self.spans):
                raise DataError("data: no token that is learned is left, since max_len cuts all of them off: raise data.max_len")
        return StepBatch(tuple(documents), targets, cursor, after)

    def where(self, cursor: int) -> str:
        """The document at a cursor, as a person finds it: file, line or row, and its tokens where it is a piece."""
        span = self.order[cursor]
        document, start, stop = (int(a[span]) for a in (self.spans.document, self.spans.start, self.spans.stop))
        piece = f", tokens {start} to {stop}" if stop - start < self.cache.lengths[document] else ""
        return self.cache.where(document) + piece

    def document(self, span: int) -> Document:
        """The document of one of `spans`."""
        document, start, stop = (int(of_spans[span]) for of_spans in (self.spans.document, self.spans.start, self.spans.stop))
        return document_part(self.cache, document, start, stop)


def document_part(cache: "TokenCache", document: int, start: int, stop: int) -> Document:
    """Tokens `start` to `stop` of a document of the cache."""
    piece = document, start, stop + 1
    return document_from_ids(cache.tokens(*piece), stop - start, cache.learned(*piece))


def _which_policy(cache: "TokenCache", longest: int, max_len: int) -> str:
    loss, total = cap_loss(cache.lengths, max_len), int(cache.lengths.sum())
    return (
        f"{loss.documents} of {len(cache)} documents are longer than data.max_len: {max_len} tokens; the longest has "
        f"{cache.lengths[longest]} ({cache.where(longest)}). Say under data what becomes of them, with one of:\n"
        f"  overlong: split      # {loss.split_pieces} pieces; loses no token, but a piece does not see the one before it\n"
        f"  overlong: truncate   # loses {loss.truncate_tokens} of {total} tokens ({loss.truncate_tokens / total:.1%})\n"
        f"  overlong: drop       # loses {loss.drop_tokens} of {total} tokens ({loss.drop_tokens / total:.1%})"
    )
