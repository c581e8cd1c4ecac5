"""The chunk of a streamed layout, from what a machine does in how many seconds: the smallest power of two for which

    transfers hide        the lists of a block, played by the simulator (`simulate.chunk_clock`), take little longer than without transfers
    kernels are efficient attention of a chunk to a chunk reaches nearly the best rate of any chunk
    it fits               on the device: what the ledger says of a whole step (`weigh.needs`)

A long document is simulated by its first MOST_CHUNKS chunks. Attention is shorter in them than later and hides less, so that the chunk is
no smaller than is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from longshift.cluster.cluster import Cluster, Heads, attention_flops
from longshift.layout import legal
from longshift.layout.heads import own_heads
from longshift.layout.layout import Layout
from longshift.simulate.chunk_clock import ChunkClock
from longshift.simulate.cost import Cost
from longshift.simulate.rates import rates
from longshift.spec.model import ModelSpec

SMALLEST = 256  # tokens
MOST_CHUNKS = 32  # that are simulated
HIDDEN = 0.95  # seconds without transfers over seconds with them
EFFICIENT = 0.9  # attention's rate over its best one
NEARLY = 0.98  # of the best score, where none reaches both
DIRECTIONS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


@dataclass(frozen=True)
class Candidate:
    """A chunk of `tokens`; `hidden` and `efficient` as above; `bytes` that a rank needs on its device."""

    tokens: int
    hidden: float
    efficient: float
    bytes: float

    @property
    def score(self) -> float:
        return min(self.hidden / HIDDEN, 1.0) * min(self.efficient / EFFICIENT, 1.0)


@dataclass(frozen=True)
class Machine:
    """What a choice needs to know: the cluster, the format that is computed in, whether the device's memory is the host's, and the bytes
    that are free on a device."""

    cluster: Cluster
    dtype: str
    device_is_host: bool
    free_bytes: float


def choose(
    spec: ModelSpec, layout: Layout, longest: int, machine: Machine, bytes_of: Callable[[int], int], pack_tokens: int = 0
) -> tuple[int, str]:
    """A chunk for documents of up to `longest` tokens, and why. `bytes_of(tokens)`: what a rank needs on its device with such chunks;
    `pack_tokens`: capacity of a pack, one such document where not given. Raises UsageError for what the machine's profile does not know."""
    least = legal.least_chunk(longest, max(longest, pack_tokens))
    sizes = powers(max(longest, layout.sequence), max(SMALLEST, layout.sequence, least))
    rates = [_rate(spec, layout, tokens, machine) for tokens in sizes]
    fitting: list[Candidate] = []
    for tokens, rate in zip(sizes, rates):
        one = Candidate(tokens, _hidden(spec, layout, tokens, longest, machine), rate / max(rates), bytes_of(tokens))
        if one.bytes > machine.free_bytes:  # larger ones need more
            break
        fitting.append(one)
        if one.hidden >= HIDDEN and one.efficient >= EFFICIENT:
            return tokens, _reason(one, machine, "the smallest that hides transfers and keeps kernels efficient")
    if not fitting:
        return sizes[0], _reason(one, machine, "the smallest, and more than is free")
    best = max(one.score for one in fitting)
    nearly = next(one for one in fitting if one.score >= NEARLY * best)
    return nearly.tokens, _reason(nearly, machine, "the best that fits, or nearly; none hides transfers and keeps kernels efficient")


def powers(longest: int, least: int = SMALLEST) -> list[int]:
    """Powers of two, from the first that is at least `least` to the first that holds the longest document."""
    found = [1 << (least - 1).bit_length()]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return found


def _reason(one: Candidate, machine: Machine, why: str) -> str:
    room = f"{one.bytes / 2**30:.2f} of {machine.free_bytes / 2**30:.2f} GiB"
    return f"{why}: {one.hidden:.0%} of a block's time is computing, attention at {one.efficient:.0%} of its best rate, {room}"


def _hidden(spec: ModelSpec, layout: Layout, tokens: int, longest: int, machine: Machine) -> float:
    """Seconds of a block's forward and backward without transfers, over those with them. Each is until its last operation: stores go on
    beside the next block."""
    pack = [min(longest, MOST_CHUNKS * tokens)]
    layout = replace(layout, chunk=tokens)
    cost = Cost(spec, rates(machine.cluster, machine.dtype))

    def seconds(moving: bool) -> float:
        chunk_clock = ChunkClock(cost, machine.cluster, layout, moving)
        return sum(share * chunk_clock.turn(pack, turn, window)[0] for window, share in spec.windows.items() for turn in DIRECTIONS)

    return seconds(moving=False) / seconds(moving=True)


def _rate(spec: ModelSpec, layout: Layout, tokens: int, machine: Machine) -> float:
    """Of attention of a chunk to a chunk, forward and backward, in FLOP/s."""
    heads, sizes = Heads(*own_heads(spec, layout, layout.coord(0)), spec.head_width), (tokens / layout.two_ended_ranks, tokens)
    flops = sum(float(attention_flops(*sizes, heads, way, causal=False)) for way in DIRECTIONS)
    return flops / sum(float(machine.cluster.attention_s(*sizes, heads, machine.dtype, way, beyond=True)) for way in DIRECTIONS)
