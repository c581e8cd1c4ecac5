"""Documents of a pack to the tensors of one rank: the tokens that `schedule.sequence` gives to its place in the layout, all at once or by
chunk."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from longshift.documents.batch import Document
from longshift.layout.layout import Layout
from longshift.model.decoder import MicroBatch, on_device, rotary_table
from longshift.model.loss import IGNORE
from longshift.schedule.chunks import cut
from longshift.schedule.sequence import PADDING, token_order
from longshift.spec.model import ModelSpec


class ChunkedPack:
    """A pack in chunks of `layout.chunk` tokens, as one rank sees it. Tokens, labels and positions of all chunks stay; a chunk's angles are
    made where they are used."""

    def __init__(self, spec: ModelSpec, documents: Sequence[Document], layout: Layout, rank: int, dtype: torch.dtype, device: torch.device):
        self.documents = documents or [_nothing()]
        self.spec, self.layout, self.dtype = spec, layout, dtype
        self.chunks = cut([len(d.ids) for d in self.documents], layout.chunk)
        self.micros: list[MicroBatch] = []
        for runs in self.chunks:
            pieces = [(self.documents[run.document], slice(run.start, run.start + run.length)) for run in runs]
            pieces = [Document(document.ids[part], document.labels[part]) for document, part in pieces]
            self.micros.append(micro_batch(spec, pieces, layout, rank, dtype, device, starts=[run.start for run in runs]))

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def tokens_here(self) -> int:
        """This rank's tokens of the residual stream, of all chunks."""
        return sum(micro.tokens_here for micro in self.micros)

    def rotated(self, chunk: int, block: int) -> MicroBatch:
        """A chunk with the angles of the block of this unit, where it has any."""
        micro, rope = self.micros[chunk], self.spec.rope_of(block)
        if rope is None:
            return micro
        return replace(micro, rotary={rope: rotary_table(rope, self.spec.rotary_width, micro.positions_T, self.dtype)})


def micro_batch(
    spec: ModelSpec,
    documents: Sequence[Document],
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    starts: Sequence[int] | None = None,
) -> MicroBatch:
    """This rank's share of a pack. Tokens are first dealt over ring and Ulysses coordinates; tensor-parallel ranks of one such
    coordinate see the same tokens between `enter` and `leave` and a contiguous share of them elsewhere. No documents: one token without a
    target. `starts`, of chunks, which get no angles: where each document begins in the one that it is a piece of."""
    at = layout.coord(rank)
    documents = documents or [_nothing()]
    order = token_order([len(d.ids) for d in documents], layout.ring, layout.ulysses * layout.tp)
    index, positions = order.index(at.ring), order.positions(at.ring)
    if starts is not None:
        runs = order.runs[at.ring]
        positions += np.repeat([0 if run.document == PADDING else starts[run.document] for run in runs], [run.length for run in runs])
    tokens = np.where(index >= 0, np.concatenate([d.ids for d in documents])[index], 0)
    labels = np.where(index >= 0, np.concatenate([d.labels for d in documents])[index], IGNORE)
    seen = slice(at.ulysses * len(index) // layout.ulysses, (at.ulysses + 1) * len(index) // layout.ulysses)
    tokens_T, labels_T, positions_T = (on_device(torch.from_numpy(a[seen]), device) for a in (tokens, labels, positions))
    own = len(tokens_T) // layout.tp
    ropes = spec.ropes if starts is None else ()
    rotary = {rope: rotary_table(rope, spec.rotary_width, positions_T, dtype) for rope in ropes}
    return MicroBatch(tokens_T, labels_T, positions_T, positions_T[at.tp * own : (at.tp + 1) * own], rotary, order)


def _nothing() -> Document:
    """One token without a target."""
    return Document(np.zeros(1, np.int64), np.full(1, IGNORE))
