"""Fused buffers in fewer bits on the wire: what a rank codes of a bucket, and what the others make
of it. Papers: ZeRO++ (arXiv 2306.10209: qwZ, qgZ), FP8-LM (arXiv 2310.18313).

    gradients   the rank's sums ── code, a slot for each holder ── all-to-all
                ──> decode each, add in the order of ranks, in the home format
    weights     home rows ── code at the source ── all-gather ──> decode into the copies

Eight bits are e4m3 codes, and a float32 scale for each block (`layout.blocks`) of the sender's part
of a row: scale = max|x| / 448. Norms and biases travel as they are ([Note: wide vectors] of
`layout.strips`). Bytes out of a rank, P holders: S (P-1) where a slot takes S bytes
(`layout.strips.areas`), about W/P (1 + 4/128) of W elements.

A gradient is coded once, by the rank that has it, and decoded once, by the owner of its row.
Nothing is summed in fewer bits than home has, and no sum is coded. A rank's own part goes the same
way, so that a sum does not depend on who owns it. A block with a value that is not finite arrives
as NaN: the global norm is not finite then, as without codes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longshift.layout.blocks import scales_of
from longshift.layout.strips import Strip, areas
from longshift.spec.formats import GradientWire
from longshift.state import block_codec
from longshift.state.strip_views import Strips, StripViews


class CodedSlots:
    """The slots of a bucket in eight bits. Immutable. `size`: bytes of a slot; `wide`: type of what
    travels as it is."""

    def __init__(self, strips: Strips, wide: torch.dtype):
        self.strips = strips
        self.wide = wide
        self.areas = areas(tuple(views.strip for views in strips.strips), wide.itemsize)
        self.size = self.areas.size

    def pieces(self, buffer: Tensor) -> Tensor:
        """uint8 [slots, size]: the fused buffer [slots, width]."""
        out = torch.empty((self.strips.slots, self.size), dtype=torch.uint8, device=buffer.device)
        for views in self.strips.strips:
            strip = views.strip
            self._encode(strip, views.in_buffer(buffer), out[strip.first : strip.last])
        return out

    def own(self, flat: Tensor) -> Tensor:
        """uint8 [size]: this rank's slot, whose elements are `flat`."""
        out = torch.zeros(self.size, dtype=torch.uint8, device=flat.device)
        for views, part in self._own(flat):
            self._encode(views.strip, part[None], out[None])
        return out

    def summed(self, received: Tensor) -> Tensor:
        """[own] in the format `wide`: the sum over holders, in their order, of what each sent of
        this rank's slot, received [holders, size]."""
        strips = self.strips
        out = torch.empty(strips.width, dtype=self.wide, device=received.device)[: strips.own]
        for views, part in self._own(out):
            for rows in _runs(views.strip, len(received)):
                add_in_order(part[rows], self._decoded(views.strip, received, rows, self.wide))
        return out

    def decode(self, views: StripViews, gathered: Tensor, out: Tensor) -> None:
        """out [slots, rows, ...] = a strip of all slots as they were sent:
        gathered [slots, size]."""
        strip = views.strip
        dtype = torch.promote_types(self.wide, torch.float32)
        slots = gathered[strip.first : strip.last]
        for rows in _runs(strip, len(slots)):
            out[:, rows].copy_(self._decoded(strip, slots, rows, dtype))

    def _own(self, flat: Tensor) -> Iterator[tuple[StripViews, Tensor]]:
        """The strips that this rank's slot is in, and its rows of each in `flat`."""
        for views in self.strips.strips:
            strip = views.strip
            if strip.first <= self.strips.index < strip.last:
                end = strip.offset + strip.elements
                yield views, flat[strip.offset : end].view(views.shape[1:])

    def _encode(self, strip: Strip, x: Tensor, out: Tensor) -> None:
        """out [slots, size]: where x [slots, rows, ...] goes."""
        if not strip.coded:
            self._vectors(strip, out).copy_(x)
            return
        scales = self._scales(strip, out)
        codes = self._codes(strip, out)
        column = strip.piece.box.start[-1]
        # Some rows at a time, as coding needs several times their memory.
        for rows in _runs(strip, len(x)):
            block_codec.encode(x[:, rows], column, scales[:, rows], codes[:, rows])

    def _decoded(self, strip: Strip, packed: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """[n, rows, ...]: some rows of a strip, of packed [n, size]."""
        if not strip.coded:
            return self._vectors(strip, packed)
        codes = self._codes(strip, packed)[:, rows]
        scales = self._scales(strip, packed)[:, rows]
        return block_codec.decode(codes, scales, strip.piece.box.start[-1], dtype)

    def _vectors(self, strip: Strip, packed: Tensor) -> Tensor:
        start = strip.wire_offset * self.wide.itemsize
        size = strip.elements * self.wide.itemsize
        return packed[:, start : start + size].view(self.wide)

    def _scales(self, strip: Strip, packed: Tensor) -> Tensor:
        start = self.areas.scales + 4 * strip.scale_offset
        size = 4 * strip.rows * strip.scales
        row_shape = scales_of(strip.piece.box).shape[1:]
        scales = packed[:, start : start + size].view(torch.float32)
        return scales.view((-1, strip.rows, *row_shape))

    def _codes(self, strip: Strip, packed: Tensor) -> Tensor:
        start = self.areas.codes + strip.wire_offset
        row_shape = strip.piece.box.shape[1:]
        codes = packed[:, start : start + strip.elements].view(block_codec.CODES)
        return codes.view((-1, strip.rows, *row_shape))


class RoundedSlots:
    """The slots of a bucket in bf16. Immutable. `wide`: the format of sums."""

    def __init__(self, strips: Strips, wide: torch.dtype):
        self.strips = strips
        self.wide = wide

    def pieces(self, buffer: Tensor) -> Tensor:
        """bf16 [slots, width]: the fused buffer."""
        return buffer.to(torch.bfloat16)

    def summed(self, received: Tensor) -> Tensor:
        """As `CodedSlots.summed`, of received [holders, width]."""
        out = torch.empty(self.strips.width, dtype=self.wide, device=received.device)
        add_in_order(out, received)
        return out[: self.strips.own]


def sent_gradients(
    format: GradientWire, strips: Strips, wide: torch.dtype
) -> CodedSlots | RoundedSlots | None:
    """How the gradients of a bucket travel, whose sums have the format `wide`;
    None: as they are."""
    if format == "float32":
        return None
    return RoundedSlots(strips, wide) if format == "bf16" else CodedSlots(strips, wide)


def add_in_order(total: Tensor, sent: Tensor) -> None:
    """total [...] = the sum of sent [holders, ...], holder by holder, in the format of `total`."""
    total.copy_(sent[0])
    for part in sent[1:]:
        total.add_(part)


def _runs(strip: Strip, slots: int) -> Iterator[slice]:
    """Some rows of a strip at a time; all where it is not coded."""
    step = strip.rows_at_once(slots) if strip.coded else strip.rows
    for row in range(0, strip.rows, step):
        yield slice(row, row + step)
