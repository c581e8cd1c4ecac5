"""Documents of a pack to the tensors of one rank: the tokens that `schedule.sequence` gives to its place in the layout."""

from collections.abc import Sequence

import numpy as np
import torch

from longshift.data.batch import Document
from longshift.layout.layout import Layout
from longshift.model.decoder import MicroBatch, rotary_table
from longshift.model.loss import IGNORE
from longshift.schedule.sequence import token_order
from longshift.spec.model import ModelSpec


def micro_batch(
    spec: ModelSpec, documents: Sequence[Document], layout: Layout, rank: int, dtype: torch.dtype, device: torch.device
) -> MicroBatch:
    """This rank's share of a pack. Tokens are first dealt over ring and Ulysses coordinates; tensor-parallel ranks of one such
    coordinate see the same tokens between `enter` and `leave` and a contiguous share of them elsewhere. No documents: one token without a
    target."""
    at = layout.coord(rank)
    documents = documents or [Document(np.zeros(1, np.int64), np.full(1, IGNORE))]
    order = token_order([len(d.ids) for d in documents], layout.ring, layout.ulysses * layout.tp)
    index, positions = order.index(at.ring), order.positions(at.ring)
    tokens = np.where(index >= 0, np.concatenate([d.ids for d in documents])[index], 0)
    labels = np.where(index >= 0, np.concatenate([d.labels for d in documents])[index], IGNORE)
    seen = slice(at.ulysses * len(index) // layout.ulysses, (at.ulysses + 1) * len(index) // layout.ulysses)
    tokens_T, labels_T, positions_T = (torch.from_numpy(a[seen]).to(device) for a in (tokens, labels, positions))
    own = len(tokens_T) // layout.tp
    rotary = rotary_table(spec.rope, spec.head_width, positions_T, dtype) if spec.rope else None
    return MicroBatch(tokens_T, labels_T, positions_T[at.tp * own : (at.tp + 1) * own], rotary, order)
