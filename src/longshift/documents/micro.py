"""Documents of a pack to the tensors of one rank: the tokens that `schedule.sequence` gives to its
place in the layout, all at once or by chunk.

    documents of a pack -> a rank's share in host memory -> tensors on its device
                           any thread, ahead of time        the step, where it loads a micro-batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from longshift.documents.batch import Document
from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.model.decoder import MicroBatch
from longshift.model.loss import IGNORE
from longshift.model.rotary import rotary_table
from longshift.schedule.chunks import cut_chunks
from longshift.schedule.sequence import PADDING, Run, TokenOrder, pack_order
from longshift.spec.model import ModelSpec


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's tokens of a pack, or of a chunk of a pack, in host memory: ids, labels and
    positions, int64 [T] each; and where its runs of tokens begin and the last one ends, int32 [runs
    + 1]. Arrays, as tensors count as memory of a step where the device is the host; tensors where
    they are pinned."""

    tokens: np.ndarray | Tensor
    labels: np.ndarray | Tensor
    positions: np.ndarray | Tensor
    ends: np.ndarray | Tensor
    order: TokenOrder

    def pinned(self, device: torch.device) -> "Share":
        """The same in memory that a GPU copies from while the host goes on."""
        arrays = ("tokens", "labels", "positions", "ends")
        with torch.cuda.device(device):  # a thread begins with the first GPU
            tensors = {name: torch.from_numpy(getattr(self, name)).pin_memory() for name in arrays}
        return replace(self, **tensors)


@dataclass(frozen=True, eq=False)
class HostPack:
    """One rank's tokens of a pack in host memory. `chunks` and a share of each where the layout has
    chunks, else one share."""

    shares: tuple[Share, ...]
    chunks: tuple[tuple[Run, ...], ...] = ()


def host_pack(
    documents: Sequence[Document], layout: Layout, rank: int, device: torch.device
) -> HostPack:
    """This rank's share of a pack, in host memory that `device` copies from: pinned for a GPU.

    Without documents, it is one token without a target.
    """
    documents = documents or [_padding_document()]
    chunks = ()
    if layout.chunk:
        chunks = cut_chunks([len(d.ids) for d in documents], layout.chunk)
        shares = tuple(_share_of_chunk(documents, runs, layout, rank) for runs in chunks)
    else:
        shares = (share(documents, layout, rank),)
    if device.type == "cuda":
        shares = tuple(share.pinned(device) for share in shares)
    return HostPack(shares, chunks)


def share(
    documents: Sequence[Document], layout: Layout, rank: int, starts: Sequence[int] | None = None
) -> Share:
    """This rank's share of a pack.

    Ranks that differ in their cut of the weights alone see the same tokens between `enter` and
    `leave`, elsewhere a contiguous share of them.
    `starts`: of chunks, where each document begins in the whole document.
    """
    coord = layout.coord(rank)
    order = pack_order(layout, [len(d.ids) for d in documents])
    piece = layout.place(coord, axes.deal_axes("two-ended"))
    runs = order.runs[piece]
    run_lengths = [run.length for run in runs]

    # 1. The tokens of the pieces from each end. Index -1 is padding, which has no target.
    index = order.index(piece)
    is_token = index >= 0
    tokens = np.where(is_token, np.concatenate([d.ids for d in documents])[index], 0)
    labels = np.where(is_token, np.concatenate([d.labels for d in documents])[index], IGNORE)

    # 2. Their positions in whole documents, which chunks cut.
    positions = order.positions(piece)
    if starts is not None:
        run_starts = [0 if run.document == PADDING else starts[run.document] for run in runs]
        positions += np.repeat(run_starts, run_lengths)

    # 3. The contiguous slice of them that this rank's weights see.
    number = layout.place(coord, axes.neighbor_axes())
    begin = number * len(index) // layout.neighbor_ranks
    end = (number + 1) * len(index) // layout.neighbor_ranks
    ends = np.cumsum([0, *run_lengths], dtype=np.int32)
    return Share(tokens[begin:end], labels[begin:end], positions[begin:end], ends, order)


def _share_of_chunk(
    documents: Sequence[Document], runs: Sequence[Run], layout: Layout, rank: int
) -> Share:
    pieces = list[Document]()
    for run in runs:
        document = documents[run.document]
        end = run.start + run.length
        pieces.append(Document(document.ids[run.start : end], document.labels[run.start : end]))
    return share(pieces, layout, rank, starts=[run.start for run in runs])


def micro_batch(
    spec: ModelSpec,
    documents: Sequence[Document],
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    """This rank's share of a pack on the device, with the angles of its positions."""
    rank_share = share(documents or [_padding_document()], layout, rank)
    return place_pack(spec, rank_share, layout, rank, dtype, device)


def place_pack(
    spec: ModelSpec,
    share: Share,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    angles: bool = True,
) -> MicroBatch:
    """A share on the device. `angles`: whether with those of its positions."""
    tokens_T = _to_device(share.tokens, device)
    labels_T = _to_device(share.labels, device)
    positions_T = _to_device(share.positions, device)
    ends = _to_device(share.ends, device)

    rotary = {}
    if angles:
        rotary = {
            rope: rotary_table(rope, spec.rotary_width, positions_T, dtype) for rope in spec.ropes
        }

    # Between the weights that are cut a rank has a contiguous slice of the tokens.
    rank_tokens = len(tokens_T) // layout.weight_ranks
    begin = layout.place(layout.coord(rank), axes.weight_axes()) * rank_tokens
    positions = positions_T[begin : begin + rank_tokens]
    return MicroBatch(tokens_T, labels_T, positions_T, positions, rotary, share.order, ends)


def _to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Memory that is not pinned would make the host wait for the device.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class ChunkedPack:
    """A pack in chunks of `layout.chunk` tokens, as one rank sees it. Tokens, labels and positions
    of all chunks stay; a chunk's angles are made where they are used."""

    def __init__(
        self,
        spec: ModelSpec,
        pack: HostPack,
        layout: Layout,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.spec = spec
        self.dtype = dtype
        self.chunks = pack.chunks
        self.micros = [
            place_pack(spec, share, layout, rank, dtype, device, angles=False)
            for share in pack.shares
        ]

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def tokens_here(self) -> int:
        """This rank's tokens of the residual stream, of all chunks."""
        return sum(micro.tokens_here for micro in self.micros)

    def rotated(self, chunk: int, block: int) -> MicroBatch:
        """A chunk with the angles of the block of this unit, where it has any."""
        micro = self.micros[chunk]
        rope = self.spec.rope_of(block)
        if rope is None:
            return micro
        angles = rotary_table(rope, self.spec.rotary_width, micro.positions_T, self.dtype)
        return replace(micro, rotary={rope: angles})


def _padding_document() -> Document:
    """One token without a target."""
    return Document(np.zeros(1, np.int64), np.full(1, IGNORE))
