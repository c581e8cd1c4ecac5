"""Documents of a pack to the tensors of one rank: the tokens that `schedule.sequence` gives to its place in the layout, all at once or by
chunk.

    documents of a pack -> a rank's share in host memory -> tensors on its device
                           any thread, ahead of time        the step, where it loads a micro-batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from longshift.documents.batch import Document
from longshift.layout.layout import Layout
from longshift.model.decoder import MicroBatch, on_device, rotary_table
from longshift.model.loss import IGNORE
from longshift.schedule.chunks import cut
from longshift.schedule.sequence import PADDING, Run, TokenOrder, token_order
from longshift.spec.model import ModelSpec


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's tokens of a pack, or of a chunk of a pack, in host memory: ids, labels and positions, int64 [T] each; and where its runs
    of tokens begin and the last one ends, int32 [runs + 1]."""

    tokens: np.ndarray | Tensor
    labels: np.ndarray | Tensor
    positions: np.ndarray | Tensor
    ends: np.ndarray | Tensor
    order: TokenOrder

    def pinned(self, device: torch.device) -> "Share":
        """The same in memory that a GPU copies from while the host goes on."""
        with torch.cuda.device(device):  # a thread begins with the first GPU
            pins = {name: torch.from_numpy(getattr(self, name)).pin_memory() for name in ("tokens", "labels", "positions", "ends")}
        return replace(self, **pins)


@dataclass(frozen=True, eq=False)
class HostPack:
    """One rank's tokens of a pack in host memory. `chunks` and a share of each where the layout has chunks, else one share."""

    shares: tuple[Share, ...]
    chunks: tuple[tuple[Run, ...], ...] = ()


def host_pack(documents: Sequence[Document], layout: Layout, rank: int, device: torch.device) -> HostPack:
    """This rank's share of a pack, in memory that `device` can be given it from. No documents: one token without a target."""
    documents, chunks = documents or [_nothing()], ()
    if layout.chunk:
        chunks = cut([len(d.ids) for d in documents], layout.chunk)
        shares = tuple(_share_of_chunk(documents, runs, layout, rank) for runs in chunks)
    else:
        shares = (share(documents, layout, rank),)
    return HostPack(tuple(one.pinned(device) for one in shares) if device.type == "cuda" else shares, chunks)


def share(documents: Sequence[Document], layout: Layout, rank: int, starts: Sequence[int] | None = None) -> Share:
    """This rank's share of a pack. Tokens are first dealt over ring and Ulysses coordinates; tensor-parallel ranks of one such coordinate
    see the same tokens between `enter` and `leave` and a contiguous share of them elsewhere. `starts`, of chunks: where each document
    begins in the one that it is a piece of."""
    at = layout.coord(rank)
    order = token_order([len(d.ids) for d in documents], layout.ring, layout.ulysses * layout.tp)
    index, positions = order.index(at.ring), order.positions(at.ring)
    if starts is not None:
        runs = order.runs[at.ring]
        positions += np.repeat([0 if run.document == PADDING else starts[run.document] for run in runs], [run.length for run in runs])
    tokens = np.where(index >= 0, np.concatenate([d.ids for d in documents])[index], 0)
    labels = np.where(index >= 0, np.concatenate([d.labels for d in documents])[index], IGNORE)
    seen = slice(at.ulysses * len(index) // layout.ulysses, (at.ulysses + 1) * len(index) // layout.ulysses)
    ends = np.cumsum([0, *(run.length for run in order.runs[at.ring])], dtype=np.int32)
    return Share(tokens[seen], labels[seen], positions[seen], ends, order)


def _share_of_chunk(documents: Sequence[Document], runs: Sequence[Run], layout: Layout, rank: int) -> Share:
    pieces = [(documents[run.document], slice(run.start, run.start + run.length)) for run in runs]
    return share([Document(d.ids[part], d.labels[part]) for d, part in pieces], layout, rank, [run.start for run in runs])


def micro_batch(
    spec: ModelSpec, documents: Sequence[Document], layout: Layout, rank: int, dtype: torch.dtype, device: torch.device
) -> MicroBatch:
    """This rank's share of a pack on the device, with the angles of its positions."""
    return placed(spec, share(documents or [_nothing()], layout, rank), layout, rank, dtype, device)


def placed(
    spec: ModelSpec, share: Share, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device, angles: bool = True
) -> MicroBatch:
    """A share on the device. `angles`: whether with those of its positions."""
    host = (x if isinstance(x, Tensor) else torch.from_numpy(x) for x in (share.tokens, share.labels, share.positions, share.ends))
    tokens_T, labels_T, positions_T, ends = (on_device(x, device) for x in host)
    own, at = len(tokens_T) // layout.tp, layout.coord(rank)
    rotary = {rope: rotary_table(rope, spec.rotary_width, positions_T, dtype) for rope in (spec.ropes if angles else ())}
    return MicroBatch(tokens_T, labels_T, positions_T, positions_T[at.tp * own : (at.tp + 1) * own], rotary, share.order, ends)


class ChunkedPack:
    """A pack in chunks of `layout.chunk` tokens, as one rank sees it. Tokens, labels and positions of all chunks stay; a chunk's angles are
    made where they are used."""

    def __init__(self, spec: ModelSpec, pack: HostPack, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device):
        self.spec, self.layout, self.dtype, self.chunks = spec, layout, dtype, pack.chunks
        self.micros = [placed(spec, one, layout, rank, dtype, device, angles=False) for one in pack.shares]

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


def _nothing() -> Document:
    """One token without a target."""
    return Document(np.zeros(1, np.int64), np.full(1, IGNORE))
