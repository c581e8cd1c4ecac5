"""Cutting a pack into chunks of consecutive tokens: their tokens, the keys that they see, and the
bytes of what a block reads and writes of them (`schedule.block_events`).

[Note: pairs] Documents lie end to end, so only a chunk's first document can have begun in an
earlier chunk, and only a chunk's last one goes on. A pair (c, j), j < c, is one rectangle without a
mask: the first piece of c against the last piece of j.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longshift.layout.layout import Coord, Layout
from longshift.layout.placement import rank_heads, tensor_heads
from longshift.schedule.sequence import Run, TokenOrder, pack_order
from longshift.spec.model import ModelSpec

BufferBytes = Mapping[str, Sequence[int]]  # of each chunk, by name


@dataclass(frozen=True)
class StreamOptions:
    """How a run streams.

    `folder`: where the disk tier keeps its file.
    `checked`: whether what comes back from disk is compared.
    """

    folder: str = "."
    checked: bool = False


def cut_chunks(lengths: Sequence[int], chunk_tokens: int) -> tuple[tuple[Run, ...], ...]:
    """Cut documents of these lengths, end to end, into chunks of `chunk_tokens`, the last one
    shorter."""
    chunks: list[list[Run]] = []
    room = 0  # tokens that the last chunk can take
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                chunks.append([])
                room = chunk_tokens
            tokens = min(room, length - start)
            chunks[-1].append(Run(document, start, tokens))
            start += tokens
            room -= tokens

    return tuple(map(tuple, chunks))


def first_key_chunks(chunks: Sequence[Sequence[Run]], window: int | None = None) -> tuple[int, ...]:
    """The first chunk whose keys each chunk's queries see, in blocks with this sliding window.
    [Note: pairs]"""
    first_keys: list[int] = []
    for number, runs in enumerate(chunks):
        first = number
        if number > 0 and runs[0].start > 0:
            # Its first document has begun earlier: in the chunk before, or where that one's first
            # document has, if it is the same.
            previous = chunks[number - 1]
            begins_there = len(previous) > 1 or previous[0].start == 0
            first = number - 1 if begins_there else first_keys[number - 1]
        first_keys.append(first)
    if window is None:
        return tuple(first_keys)

    visible = []
    for number, first in enumerate(first_keys):
        hidden_position = chunks[number][0].start - window  # the last one that is out of sight
        while first < number and _last_position(chunks[first]) <= hidden_position:
            first += 1
        visible.append(first)
    return tuple(visible)


def _last_position(runs: Sequence[Run]) -> int:
    return runs[-1].start + runs[-1].length - 1


def chunk_orders(chunks: Sequence[Sequence[Run]], layout: Layout) -> list[TokenOrder]:
    """How the tokens of each chunk lie over the ranks that share them. Its runs are documents of
    their own."""
    return [pack_order(layout, [run.length for run in runs]) for runs in chunks]


def buffer_bytes(
    spec: ModelSpec,
    layout: Layout,
    coord: Coord,
    orders: Sequence[TokenOrder],
    compute_bytes: int,
) -> BufferBytes:
    """Bytes on the rank at `coord`, of chunks in these orders."""
    heads = len(tensor_heads(spec, layout, coord)[0])
    queries, keys = rank_heads(spec, layout, coord)
    kv_heads = -(-heads * spec.kv_heads // spec.heads)
    accum_bytes = max(4, compute_bytes)
    row = spec.width * compute_bytes
    head = spec.head_width * compute_bytes
    accum_head = spec.head_width * accum_bytes

    # 1. Inside attention: all tokens of a ring coordinate, heads of this rank.
    attention = {
        "q": queries * head,
        "do": queries * head,
        "kv": 2 * keys * head,
        "o": queries * (head + accum_bytes),  # log-sum-exp is in the accumulation format
        "dq": queries * accum_head,
        "dkv": 2 * keys * accum_head,
    }
    # 2. Before the exchange of tokens for heads: tokens of this rank.
    local = {
        "o_tokens": heads * head,
        "do_tokens": heads * head,
        "qkv": (heads + 2 * kv_heads) * head,
        "dqkv": (heads + 2 * kv_heads) * head,
    }
    # 3. The residual stream.
    stream = dict.fromkeys(("x", "y", "dx", "dy", "dr"), row)

    sizes: dict[str, list[int]] = {}
    for ranks, token_bytes in (
        (1, attention),
        (layout.neighbor_ranks, local),
        (layout.contiguous_ranks, stream),
    ):
        for name, size in token_bytes.items():
            sizes[name] = [order.local_tokens // ranks * size for order in orders]
    return sizes
