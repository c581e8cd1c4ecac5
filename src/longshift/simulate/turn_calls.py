"""Kernels and collectives of a turn as functions of the tokens of a pack.

A turn is recorded once, on one document. Its number of tokens has a prime factor that no size of
the model has. So the factor divides the size of a tensor as often as it has dims of tokens: never
where it is as large whatever the pack. Attention's work is in pairs of tokens, which the lengths of
a pack's documents tell; its share on this rank is that of the recorded document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, lcm
from typing import Any, Literal, NamedTuple

import numpy as np

from longshift.layout import axes
from longshift.layout.layout import Layout, Recompute
from longshift.model.packed_attention import EVEN
from longshift.schedule.sequence import pack_order
from longshift.spec.model import ModelSpec
from longshift.weigh.recorder import (
    AttentionCall,
    Collective,
    DeviceCall,
    Matmul,
    MemoryPass,
    Transport,
)
from longshift.weigh.turn_profile import Part, Phase, RankSetup, layout_of, loss_turn, unit_turn

UnitKind = Literal["embeddings", "block", "head"]
DEGREES = np.arange(3)  # of sizes, in tokens

Collectives = dict[tuple[str, str], np.ndarray]  # by axis and operation


class TurnKind(NamedTuple):
    """Which turn of which model, on the first rank of a mesh: degrees of the axes that share
    tokens, fastest first. `selective`: recompute-selective."""

    spec: ModelSpec
    mesh: tuple[int, ...]
    unit: UnitKind
    part: Part
    phase: Phase
    selective: bool
    compute_bytes: int
    transport: Transport
    float8: bool
    compiled: bool


@dataclass(frozen=True, eq=False)
class TurnCalls:
    """Calls of a turn. The last dim of sizes has their coefficients by degree in the tokens of the
    pack: 1, T, T^2.

    mesh         degrees of the axes that share tokens
    matmuls      float64 [kinds, 5, 3]    as `weigh.recorder.Matmul`
    counts       float64 [kinds]          of matmuls of each kind
    pass_bytes   float64 [3]              that all memory passes read and write
    kernels      float64                  launches
    attention    float64 [2, 5]           forward, backward: calls, rows per token of the pack,
                                          pairs per pair of the pack, query heads, width
    collectives  (axis, operation): float64 [4]      number, bytes of all by degree
    held_bytes   float64 [2]              bytes per token of the pack: of a forward's graph, and at
                                          the peak, gradients of weights left out; of blocks that
                                          are not alike the least
    """

    mesh: tuple[int, ...]
    matmuls: np.ndarray
    counts: np.ndarray
    pass_bytes: np.ndarray
    kernels: float
    attention: np.ndarray
    collectives: Collectives
    held_bytes: np.ndarray

    @property
    def layout(self) -> Layout:
        return layout_of(self.mesh)


@lru_cache(maxsize=4096)
def turn_calls(kind: TurnKind) -> TurnCalls:
    """Calls of a turn of a mean block, or of another unit. Meshes whose turns differ in known
    numbers alone are not all recorded:

    units    embeddings and head know no sequence parallelism: a rank's tokens are what counts
    Ulysses  a rank has as many elements in its heads of all tokens as in all heads of its tokens,
             where no head is on two ranks
    ring     every rank more is one step more, like the steps that a ring of four has and a ring of
             two has not
    """
    layout = layout_of(kind.mesh)

    def recorded(**degrees: int) -> TurnCalls:
        """Those of the mesh with other degrees."""
        return turn_calls(kind._replace(mesh=layout.with_degrees(degrees).mesh))

    if kind.unit != "block" and layout.sequence > layout.weight_ranks:
        sharing = {axis.name: 1 for axis in axes.token_axes() if axis.shares == "tokens"}
        return _on_mesh(recorded(**sharing), kind.mesh)

    # Where ranks do not divide the key/value heads, some heads are on two ranks.
    if layout.ulysses > 2 and kind.spec.kv_heads % (layout.weight_ranks * layout.ulysses) == 0:
        return _on_mesh(recorded(ulysses=2), kind.mesh)
    if layout.ring > 4:
        return _longer_ring(recorded(ring=2), recorded(ring=4), kind.mesh)
    return _mean_calls(kind)


def _on_mesh(calls: TurnCalls, mesh: tuple[int, ...]) -> TurnCalls:
    """The same for ranks with as many tokens each, on a mesh of more sequence-parallel ranks, among
    which heads are shared."""
    recorded = calls.layout
    layout = layout_of(mesh)
    # Column 3 has the query heads of a rank, which are fewer.
    attention = calls.attention.copy()
    attention[:, 3] *= recorded.neighbor_ranks / layout.neighbor_ranks
    share = recorded.sequence * layout.weight_ranks / (recorded.weight_ranks * layout.sequence)
    fewer_tokens = share**DEGREES
    return replace(
        calls,
        mesh=mesh,
        matmuls=calls.matmuls * fewer_tokens,
        pass_bytes=calls.pass_bytes * fewer_tokens,
        attention=attention,
        collectives={key: row * [1.0, *fewer_tokens] for key, row in calls.collectives.items()},
        held_bytes=calls.held_bytes * fewer_tokens[1],
    )


def _longer_ring(two: TurnCalls, four: TurnCalls, mesh: tuple[int, ...]) -> TurnCalls:
    """Of a mesh with a ring of more than four, from the calls of rings of two and four."""
    ring = layout_of(mesh).ring
    steps = (ring - 2) / 2

    def number(small: Any, large: Any) -> Any:
        return small + (large - small) * steps

    def sizes(small: np.ndarray, large: np.ndarray, degrees: np.ndarray = DEGREES) -> np.ndarray:
        """Linear in the ring for as many tokens on each rank."""
        return number(2**degrees * small, 4**degrees * large) / ring**degrees

    attention = four.attention.copy()
    attention[:, :3] = sizes(two.attention[:, :3], four.attention[:, :3], np.array([0, 1, 1]))
    collectives = {
        key: sizes(two.collectives[key], row, np.array([0, *DEGREES]))
        for key, row in four.collectives.items()
    }
    return TurnCalls(
        mesh=mesh,
        matmuls=sizes(two.matmuls, four.matmuls),
        counts=four.counts,
        pass_bytes=sizes(two.pass_bytes, four.pass_bytes),
        kernels=number(two.kernels, four.kernels),
        attention=attention,
        collectives=collectives,
        # As many for as many tokens on each rank, at the least.
        held_bytes=np.minimum(2 * two.held_bytes, 4 * four.held_bytes) / ring,
    )


def _mean_calls(kind: TurnKind) -> TurnCalls:
    """Recorded calls of a turn of a unit; of blocks that do not all compute alike, their mean."""
    # Blocks that compute alike are recorded once, as the first of them.
    shares = {1: 1.0}
    if kind.unit == "block":
        layers = kind.spec.layers
        alike = [kind.spec.like(block) for block in range(1, layers + 1)]
        shares = {block: alike.count(block) / layers for block in dict.fromkeys(alike)}
    recorded = [(share, _recorded_calls(kind, block)) for block, share in shares.items()]

    collectives: Collectives = {}
    for share, calls in recorded:
        for key, row in calls.collectives.items():
            collectives[key] = collectives.get(key, np.zeros(4)) + share * row
    return TurnCalls(
        mesh=kind.mesh,
        matmuls=np.concatenate([calls.matmuls for _, calls in recorded]),
        counts=np.concatenate([share * calls.counts for share, calls in recorded]),
        pass_bytes=sum((share * calls.pass_bytes for share, calls in recorded), np.zeros(3)),
        kernels=sum(share * calls.kernels for share, calls in recorded),
        attention=sum((share * calls.attention for share, calls in recorded), np.zeros((2, 5))),
        collectives=collectives,
        held_bytes=np.min([calls.held_bytes for _, calls in recorded], axis=0),
    )


def _recorded_calls(kind: TurnKind, block: int) -> TurnCalls:
    recompute: Recompute = "selective" if kind.selective else "none"
    layout = replace(layout_of(kind.mesh), recompute=recompute)
    spec = replace(kind.spec, loss_rows=EVEN)
    setup = RankSetup(
        spec=spec,
        layout=layout,
        coord=layout.coord(0),
        compute_bytes=kind.compute_bytes,
        transport=kind.transport,
        float8=kind.float8,
        compiled=kind.compiled,
    )
    prime = _token_prime(kind.spec, kind.mesh)
    rows = _rows_per_prime(kind, prime)
    length = rows * prime * layout.sequence
    order = pack_order(layout, [length])
    if kind.unit == "head":
        profile = loss_turn(setup, order, 0)
    else:
        profile = unit_turn(setup, order, kind.part, kind.phase, block)
    calls = calls_by_degree(
        kind.mesh, profile.calls, length, float(kind.spec.attended(length)), prime
    )
    return replace(
        calls, held_bytes=np.array([profile.graph, profile.peak - profile.grads]) / length
    )


def _rows_per_prime(kind: TurnKind, prime: int) -> int:
    """Tokens of a rank in the pack to record, divided by the prime: no multiple of it again."""
    # 1. Logits of up to EVEN rows are computed at once.
    if kind.unit == "head":
        rows = EVEN // prime
        return rows - (rows % prime == 0)

    # 2. Attention to whole multiples of EVEN is one call.
    rows = 2 * EVEN
    if not kind.spec.experts:
        return rows

    # 3. Each expert has as many rows, with the prime factor.
    step = kind.spec.experts // gcd(kind.spec.experts, kind.spec.top_k)
    if kind.transport == "nccl" and kind.compute_bytes == 2:
        return lcm(rows, step)
    # Kernels of other formats are one call whatever the tokens. Their matmuls are played one by
    # one, so that time goes with the square of the tokens. Two halves of a ring are alike.
    step = lcm(2, step)
    steps = max(1, rows // step)
    return step * (steps - (steps % prime == 0))


@lru_cache(maxsize=1024)
def _token_prime(spec: ModelSpec, mesh: tuple[int, ...]) -> int:
    """The smallest prime from 11 on that divides no side of a weight, no rank's share of one and no
    degree of the mesh."""
    layout = layout_of(mesh)
    sides = {side for param in spec.params for side in param.shape}
    sides |= {spec.heads, spec.kv_heads, spec.head_width}
    shares = set()
    for side in sides:
        for ranks in (layout.weight_ranks, layout.contiguous_ranks):
            shares |= {side // ranks, side // ranks + 1}  # nearly equal ones
    sizes = (sides | shares | set(mesh)) - {0}

    def is_prime(number: int) -> bool:
        return all(number % divisor for divisor in range(3, number, 2))

    primes = (number for number in range(11, EVEN, 2) if is_prime(number))
    return next(prime for prime in primes if all(size % prime for size in sizes))


def calls_by_degree(
    mesh: tuple[int, ...], calls: Sequence[DeviceCall], tokens: int, pairs: float, prime: int
) -> TurnCalls:
    """The calls of a turn on a document of so many tokens and causal pairs. `prime`: divides what
    has tokens."""
    matmuls: dict[Matmul, int] = {}
    pass_bytes = np.zeros(3)
    attention = np.zeros((2, 5))
    collectives: Collectives = {}
    for call in calls:
        match call:
            case Matmul():
                matmuls[call] = matmuls.get(call, 0) + 1
            case MemoryPass():
                for size in call.sizes:
                    pass_bytes += _by_degree(size, tokens, prime)
            case AttentionCall():
                row = attention[int(call.backward)]
                row[:3] += 1.0, call.rows / tokens, call.pairs / pairs
                row[3:] = call.heads.query, call.heads.width
            case Collective():
                row = collectives.setdefault((call.axis, call.operation), np.zeros(4))
                # What ranks send in a turn is tokens. Sums of their heads may have
                # the prime factor again.
                row += (
                    (1.0, 0.0, call.size_bytes / tokens, 0.0)
                    if prime
                    else (1.0, call.size_bytes, 0.0, 0.0)
                )
    sizes = [[_by_degree(size, tokens, prime) for size in matmul] for matmul in matmuls]
    return TurnCalls(
        mesh=mesh,
        matmuls=np.array(sizes, dtype=float).reshape(-1, 5, 3),
        counts=np.array(list(matmuls.values()), dtype=float),
        pass_bytes=pass_bytes,
        kernels=float(sum(not isinstance(call, Collective) for call in calls)),
        attention=attention,
        collectives=collectives,
        held_bytes=np.zeros(2),
    )


def exact_calls(mesh: tuple[int, ...], calls: Sequence[DeviceCall]) -> TurnCalls:
    """The calls of a turn as they were recorded, whatever the tokens."""
    return calls_by_degree(mesh, calls, tokens=1, pairs=1.0, prime=0)


def _by_degree(size: int, tokens: int, prime: int) -> tuple[float, float, float]:
    """Coefficients of a size: all but one are 0."""
    if not prime or not size or size % prime:
        return float(size), 0.0, 0.0
    return (0.0, size / tokens, 0.0) if size % prime**2 else (0.0, 0.0, size / tokens**2)
