"""The chunk of a streamed layout, from a machine's profile: the smallest power of two for which

    transfers hide         the lists of a block, played by the simulator (`simulate.chunk_clock`),
                           take little longer than without transfers
    kernels are efficient  attention of a chunk to a chunk reaches nearly the best rate of any chunk
    it fits                on the device: what the ledger says of a whole step (`weigh.needs`)

A long document is simulated by its first MAX_SIMULATED chunks. Attention is shorter in them than
later and hides less, so that the chunk is large enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from longshift.cluster.cluster import Cluster, Heads
from longshift.layout import legal
from longshift.layout.layout import Layout
from longshift.layout.placement import rank_heads
from longshift.simulate.chunk_clock import ChunkClock
from longshift.simulate.cost import Cost
from longshift.spec.model import ModelSpec
from longshift.weigh.recorder import AttentionCall

SMALLEST = 256  # tokens
MAX_SIMULATED = 32  # chunks
HIDDEN = 0.95  # seconds without transfers over seconds with them
EFFICIENT = 0.9  # attention's rate over its best one
NEARLY = 0.98  # of the best score, where none reaches both
DIRECTIONS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


@dataclass(frozen=True)
class ChunkCandidate:
    """A chunk of `tokens`; `hidden` and `efficient` as above;
    `bytes` that a rank needs on its device."""

    tokens: int
    hidden: float
    efficient: float
    bytes: float

    @property
    def score(self) -> float:
        return min(self.hidden / HIDDEN, 1.0) * min(self.efficient / EFFICIENT, 1.0)


@dataclass(frozen=True)
class Machine:
    """The machine that a chunk is chosen for.

    `cost`: how the run computes there.
    `free_bytes`: of a device.
    """

    cluster: Cluster
    cost: Cost
    free_bytes: float


def choose_chunk(
    spec: ModelSpec,
    layout: Layout,
    longest: int,
    machine: Machine,
    bytes_of: Callable[[int], int],
    pack_tokens: int = 0,
) -> tuple[int, str]:
    """Choose a chunk for documents of up to `longest` tokens. Returns its tokens, and the reason.

    `bytes_of(tokens)`: what a rank needs on its device with such chunks.
    `pack_tokens`: capacity of a pack; one such document if 0.
    Raises UsageError for what the machine's profile does not know.
    """
    min_tokens = legal.min_chunk(longest, max(longest, pack_tokens))
    min_tokens = max(SMALLEST, layout.sequence, min_tokens)
    sizes = powers(max(longest, layout.sequence), min_tokens)
    attention_rates = [_attention_rate(spec, layout, tokens, machine) for tokens in sizes]
    fitting = []
    for tokens, rate in zip(sizes, attention_rates):
        candidate = ChunkCandidate(
            tokens=tokens,
            hidden=_hidden_share(spec, layout, tokens, longest, machine),
            efficient=rate / max(attention_rates),
            bytes=bytes_of(tokens),
        )
        if candidate.bytes > machine.free_bytes:  # larger ones need more
            break
        fitting.append(candidate)
        if candidate.hidden >= HIDDEN and candidate.efficient >= EFFICIENT:
            why = "the smallest that hides transfers and keeps kernels efficient"
            return tokens, _reason(candidate, machine, why)
    if not fitting:
        return sizes[0], _reason(candidate, machine, "the smallest, and more than is free")
    best_score = max(candidate.score for candidate in fitting)
    chosen = next(candidate for candidate in fitting if candidate.score >= NEARLY * best_score)
    why = "the best that fits, or nearly; none hides transfers and keeps kernels efficient"
    return chosen.tokens, _reason(chosen, machine, why)


def powers(longest: int, smallest: int = SMALLEST) -> list[int]:
    """Powers of two, from the first that is at least `smallest` to the first that holds
    the longest document."""
    sizes = [1 << (smallest - 1).bit_length()]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return sizes


def _reason(candidate: ChunkCandidate, machine: Machine, why: str) -> str:
    hidden = f"{candidate.hidden:.0%} of a block's time is computing"
    efficient = f"attention at {candidate.efficient:.0%} of its best rate"
    room = f"{candidate.bytes / 2**30:.2f} of {machine.free_bytes / 2**30:.2f} GiB"
    return f"{why}: {hidden}, {efficient}, {room}"


def _hidden_share(
    spec: ModelSpec,
    layout: Layout,
    tokens: int,
    longest: int,
    machine: Machine,
) -> float:
    """Seconds of a block's forward and backward without transfers, over those with them."""
    pack = [min(longest, MAX_SIMULATED * tokens)]
    layout = replace(layout, chunk=tokens)

    def seconds(moving: bool) -> float:
        # Until the last operation: stores go on beside the next block.
        chunk_clock = ChunkClock(machine.cost, machine.cluster, layout, moving)
        total_s = 0.0
        for window, share in spec.windows.items():
            for direction in DIRECTIONS:
                total_s += share * chunk_clock.turn(pack, direction, window)[0]
        return total_s

    return seconds(moving=False) / seconds(moving=True)


def _attention_rate(spec: ModelSpec, layout: Layout, tokens: int, machine: Machine) -> float:
    """FLOP/s of attention of a chunk to a chunk, forward and backward."""
    query_heads, kv_heads = rank_heads(spec, layout, layout.coord(0))
    heads = Heads(query_heads, kv_heads, spec.head_width)
    rows = tokens // layout.two_ended_ranks
    calls = [AttentionCall(back, rows, tokens, rows * tokens, heads) for back in (False, True)]
    return sum(call.flops for call in calls) / sum(map(machine.cost.piece_s, calls))
