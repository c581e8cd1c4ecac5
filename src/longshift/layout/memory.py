"""The least memory that a rank needs under a layout: what must be there at one time, whatever the kernels do. A run that lacks it is
refused before its first step; one that has it may still need more.

    state         master, gradient sum and two moments of this rank's home
    copies        weights of its units and their gradient sums (ZeRO-3: of the largest unit)
    activations   what a backward needs of one pack: the residual stream before every block (recompute-full: nothing else, and of one block
                  only where the others are offloaded); else also the inputs of its linear layers, queries, keys, values and the output
                  of attention. In chunks: the given buffers
    logits        of the few rows of the last stage that are there at one time, in the compute format and once more in float32, as the loss
                  keeps them; none in chunks, whose other buffers are not there at that time
"""

from dataclasses import dataclass, fields

from longshift.layout.layout import Layout
from longshift.layout.placement import buckets, local_boxes, moving_unit, stages_of
from longshift.spec.model import ModelSpec

LEAST_ROWS = 1024  # fewer make small matmuls, and the head's weight gradient is added to its sum once for each


@dataclass(frozen=True)
class LeastBytes:
    """Of the rank that needs most."""

    state: int
    copies: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = [f"{field.name} {getattr(self, field.name) / 2**30:.2f}" for field in fields(self)]
        return f"{' + '.join(parts)} = {self.total / 2**30:.2f} GiB"


def loss_rows(spec: ModelSpec, rows: int) -> int:
    """Of so many rows of the residual stream, a pack's or a chunk's, how many have logits at one time, at the most: as many as make them no
    larger than the rows are, but no fewer than LEAST_ROWS."""
    return max(LEAST_ROWS, rows * spec.width // spec.vocab)


def loss_blocks(spec: ModelSpec, rows: int) -> int:
    """In how many blocks of `loss_rows` the loss of so many rows is computed."""
    return -(-rows // loss_rows(spec, rows))


def least_bytes(
    spec: ModelSpec, layout: Layout, home: Layout, tokens: int, compute_bytes: int, home_bytes: int, buffers: int = 0
) -> LeastBytes:
    """For a pack of `tokens` under `layout`, with home cut by `home`. `buffers`: of a layout in chunks, `schedule.streamed`'s."""
    each = (_of_rank(spec, layout, home, rank, tokens, compute_bytes, home_bytes, buffers) for rank in range(layout.world))
    return max(each, key=lambda least: least.total)


def _of_rank(
    spec: ModelSpec, layout: Layout, home: Layout, rank: int, tokens: int, compute_bytes: int, home_bytes: int, buffers: int
) -> LeastBytes:
    at = layout.coord(rank)
    kept = sum(box.elements for bucket in buckets(spec, home) if rank in bucket.holders for _, box in bucket.home(rank))
    units: dict[int, int] = {}
    for param in spec.params:
        if at.pp in stages_of(spec, layout, param):
            elements = sum(box.elements for box in local_boxes(param, layout, at.tp))
            units[moving_unit(spec, param)] = units.get(moving_unit(spec, param), 0) + elements
    resident = max(units.values()) if layout.zero == 3 else sum(units.values())
    copies = resident * (compute_bytes + home_bytes)
    if layout.chunk:
        return LeastBytes(4 * kept * home_bytes, copies, buffers, 0)
    spans = layout.layers_of(spec.layers)
    blocks = sum(stop - start for stage, (start, stop) in enumerate(spans) if stage % layout.pp == at.pp)
    blocks = blocks if layout.offload == "device" else 1
    local = tokens / layout.sequence
    wide = tokens / (layout.ulysses * layout.ring) / layout.tp  # tokens x (columns of a tensor-parallel rank)
    per_block = local * spec.width
    if layout.recompute != "full":
        heads = 2 * spec.heads + 2 * spec.kv_heads  # query, output; key, value
        per_block += local * spec.width + wide * (heads * spec.head_width + (3 if spec.gated else 2) * spec.ffn)
    rows = min(int(local), loss_rows(spec, int(local))) if (len(spans) - 1) % layout.pp == at.pp else 0
    return LeastBytes(
        state=4 * kept * home_bytes,
        copies=copies,
        activations=int(blocks * per_block * compute_bytes),
        logits=rows * spec.vocab * (compute_bytes + 4),
    )
