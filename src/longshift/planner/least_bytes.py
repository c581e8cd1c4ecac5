"""Bounds: bytes of a device that a candidate needs at the least, in closed form, for arrays of candidates at once.

    home       masters and moments, of this rank's share, where they lie on the device
    copies     of all units (z0 to z2) or of two (z3)
    sums       of gradients: all units on the way home (z0, z1) or at home (z2, z3), from the second micro-batch on; of a home outside
               the device, those of z1 alone
    kept       of the packs in flight, what each block keeps for its backward, T' tokens a rank
    turn       what the backward of one block, or the loss of some rows, needs beside these

No bound is above what the ledger says of the same step (`weigh.needs`); tests compare. What only the ledger knows is left out: norms'
statistics, rounding of shares, messages, what operations of a block need one after another.

Letters: T tokens of a rank in linear layers, T' = T / tp, D model width, A query heads * head width, B key/value heads * head width,
F feed-forward width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.planner.enumerated import ORDERS, Meshes
from longshift.simulate.cost import RECOMPUTE
from longshift.spec.formats import Format
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import home_layout
from longshift.weigh.needs import micros_of
from longshift.workload.groups import Edge

# Assumed, not measured: what the driver's context and NCCL's buffers take, and the share of memory that an allocator leaves no holes in.
CONTEXT_BYTES = float(1 << 30)
FILLED = 0.94
LEAST_SHARE = 0.9  # of a stage's share of home, that the rank has at the least which needs most under a layout of other stages


def reserved(allocated_bytes: np.ndarray | float, on_cpu: bool = False) -> np.ndarray:
    """Bytes that a process takes of its device for tensors of so many."""
    return (np.asarray(allocated_bytes) + (0.0 if on_cpu else CONTEXT_BYTES)) / FILLED


def beyond_device(cluster: Cluster) -> tuple[float, float]:
    """Bytes that a rank may have of its host's memory, and of a disk; none of a disk that is not known."""
    ranks = cluster.devices_per_node
    return FILLED * cluster.host_bytes / ranks, cluster.disk.bytes / ranks if cluster.disk else 0.0


@dataclass(frozen=True)
class Elements:
    """Weights of one rank of a pipeline coordinate, in elements, arrays by candidate. `block`: of one block; `all`: of all units here;
    `own`: its share of them where home is sharded."""

    blocks: np.ndarray
    block: np.ndarray
    all: np.ndarray
    own: np.ndarray


def elements(spec: ModelSpec, at: Meshes, first: bool) -> Elements:
    """Weights on the first or the last pipeline coordinate."""
    cut, whole, keys = _weights(spec, spec.layers)
    replicated = np.maximum(1.0, at.tp / spec.kv_heads) if keys else 1.0
    block = (cut - keys) / at.tp + keys / at.tp * replicated + whole
    own_block = (cut - keys) / at.tp + keys / at.tp + whole / at.tp
    blocks = blocks_of(spec, at, first)
    table = spec.vocab * spec.width
    starts, ends = (first | (at.pp == 1)), ((not first) | (at.pp == 1))
    positions = spec.max_positions * spec.width * spec.learned_positions
    if spec.tied:
        ends_cut = np.full(len(at), float(table))
        own_ends = np.where(at.pp == 1, 1.0, 0.5) * table
    else:
        ends_cut = own_ends = (starts.astype(float) + ends) * table
    norms = ends * spec.width
    all_here = blocks * block + ends_cut / at.tp + starts * positions + norms
    own = (blocks * own_block + own_ends / at.tp + (starts * positions + norms) / at.tp) / at.holders
    return Elements(blocks, block, all_here, own)


def blocks_of(spec: ModelSpec, at: Meshes, first: bool) -> np.ndarray:
    """Blocks of the first or the last pipeline coordinate, all its model chunks."""
    each, extra = np.divmod(spec.layers, at.pp * at.virtual)
    stage = np.where(first, 0, at.pp - 1)
    found = np.zeros(len(at), np.int64)
    for chunk in range(int(at.virtual.max(initial=1))):
        found += np.where(chunk < at.virtual, each + (chunk * at.pp + stage < extra), 0)
    return found


def in_flight(at: Meshes, micros: np.ndarray, first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs whose forward is done when the first backward begins on a coordinate, in passes through one of its model chunks; whether as
    many are there again, and whether one is, when every unit has a sum of gradients."""
    coord = np.where(first, 0, at.pp - 1)
    ahead = np.where(at.virtual == 1, at.pp - 1 - coord, 2 * (at.pp - 1 - coord) + (at.virtual - 1) * at.pp)
    summed = at.pp * (at.virtual - 1) + 1  # backwards after which each chunk has had one
    interleaved, gpipe = at.virtual > 1, at.order == ORDERS.index("gpipe")
    rounds, rest = np.divmod(np.minimum(ahead + 1, at.pp * at.virtual), at.pp)  # of an interleaved order, of its first pp micro-batches
    few = np.minimum(at.pp, micros)
    begun = np.where(interleaved, rounds * few + np.minimum(rest, few), np.minimum(ahead + 1, micros))
    once = np.where(interleaved, micros > at.pp, micros > 1)
    again = once & ~gpipe & (micros * at.virtual - ahead > summed) & (~interleaved | (micros >= 2 * at.pp))
    return np.where(gpipe, micros, begun), again, once


def device_bytes(
    spec: ModelSpec,
    at: Meshes,
    formats: Format,
    tokens: np.ndarray | float,
    micros: np.ndarray | float,
    at_home: float | None = None,
    outside: bool = False,
) -> np.ndarray:
    """Bytes that the worst rank of each candidate needs at the least, float64 [candidates].

    `tokens`: of a pack, on all ranks that share it; `micros`: packs of a replica; `at_home`: elements of home that a rank has where
    another layout cuts home; `outside`: whether all of home may lie outside the device.
    """
    return np.maximum(*(_of_stage(spec, at, formats, tokens, micros, at_home, outside, first) for first in (True, False)))


def least_of_way(spec: ModelSpec, edges: Sequence[Edge], formats: Format, tokens: int, outside: bool) -> float:
    """Bytes that some rank needs of its device at the least in the largest step of `tokens` with documents for these groups. Streamed
    groups and uneven stages are left out. `outside`: whether all of home may lie outside the device."""
    home, at_home = home_layout(edges), None
    if len(edges) > 1:
        at = Meshes.of([home])
        at_home = LEAST_SHARE * min(float(elements(spec, at, first).own[0]) for first in (True, False)) if not home.stages else 0.0
    found = 0.0
    for edge in edges:
        use = edge.use if len(edges) == 1 else replace(edge.use, zero=max(1, edge.use.zero))
        if not use.chunk and not use.stages:
            micros = micros_of(tokens, edge)
            found = max(found, float(device_bytes(spec, Meshes.of([use]), formats, edge.pack, micros, at_home, outside)[0]))
    return found


def _of_stage(
    spec: ModelSpec,
    at: Meshes,
    formats: Format,
    tokens: np.ndarray | float,
    micros: np.ndarray | float,
    at_home: float | None,
    outside: bool,
    first: bool,
) -> np.ndarray:
    own, micros = elements(spec, at, first), np.broadcast_to(np.asarray(micros, dtype=np.int64), (len(at),))
    small, least = formats.compute_bytes, _least_trained(spec)
    wide = formats.home_bytes * least  # of a mean weight
    kept_at_home = np.where(at.zero == 0, own.all, own.own) if at_home is None else np.full(len(at), at_home)
    moments = formats.moments * formats.moment_bytes
    state = (wide + moments * least + small * (1 - least)) * kept_at_home
    sums_at_home = wide * kept_at_home
    if outside:
        state = sums_at_home = np.zeros(len(at))
    same = formats.compute == formats.home
    copies = np.where(at.zero == 0, 0.0 if same and not outside else small * least * own.all, small * own.all)
    gathered = formats.wire.bytes_of("weights", small)
    copies = np.where((at.zero == 3) & (at.holders > 1), own.block * np.where(own.blocks > 1, 2 * small + gathered, small), copies)
    sums = np.where(at.zero >= 2, sums_at_home, np.where(at.zero == 1, wide * own.all, sums_at_home))

    rows = np.asarray(tokens, dtype=float) / (at.ulysses * at.ring)
    kept, graph = small * _kept(spec, at, rows), small * _graph(spec, at, rows)
    passes, again, once = in_flight(at, micros, first)
    block_turn = np.maximum(graph, kept) - kept + 2 * small * rows / at.tp * spec.width
    head = (not first) | (at.pp == 1)
    logits = np.minimum(np.maximum(spec.loss_rows, rows / at.tp * spec.width / spec.vocab), rows / at.tp) * spec.vocab
    turn = np.maximum(block_turn, head * (small + max(4, small)) * logits)
    full = passes * own.blocks / at.virtual * kept
    one = np.minimum(passes, 1) * own.blocks / at.virtual * kept
    at_first = state + copies + full + turn
    at_last = state + copies + sums + np.where(again, full, one) + turn
    # Under ZeRO-2 and 3 the sum of one block is reduced while the next block's gradients are added to theirs.
    coded = formats.wire.gradients != "float32"  # then both what goes out and what comes in lie there, and the sum does not
    leaving = min(wide, 2 * formats.wire.bytes_of("gradients", formats.home_bytes) * least) if coded else wide
    reducing = (wide + leaving) * own.block * ((at.zero >= 2) & (at.holders > 1) & (own.blocks >= 2 * at.virtual))
    at_sum = state + copies + np.where(once, np.where(at.zero >= 2, sums, 0.0), 0.0) + reducing
    at_sum += np.maximum(0.0, np.where(again | ~once, full, one) - 2 * kept)
    at_first = np.maximum(at_first, np.where(reducing > 0, at_sum, 0.0))
    at_end = state + sums_at_home + np.where(at.zero == 3, 0.0, copies)
    return np.maximum(np.maximum(at_first, at_end), np.where(once, at_last, 0.0))


def _kept(spec: ModelSpec, at: Meshes, rows: np.ndarray) -> np.ndarray:
    """Elements that a block keeps of a pack until its backward."""
    stream, attended = rows / at.tp * spec.width, rows / at.tp * spec.heads * spec.head_width
    return np.where(at.recompute == RECOMPUTE.index("full"), stream + attended, _graph(spec, at, rows))


def _graph(spec: ModelSpec, at: Meshes, rows: np.ndarray) -> np.ndarray:
    """Elements of a block's graph with its input: x, normalized x, queries, keys, values and output of attention, x; and those of the
    MLP."""
    stream = rows / at.tp * spec.width
    inner, keys = rows / at.tp * spec.heads * spec.head_width, rows / at.tp * spec.kv_heads * spec.head_width
    normalized = rows * spec.width * _all_trained(spec)
    return 2 * stream + normalized + 2 * inner + 2 * keys + _mlp_graph(spec, at, rows)


def _mlp_graph(spec: ModelSpec, at: Meshes, rows: np.ndarray) -> np.ndarray:
    """Elements of an MLP's graph without its input: normalized x, gate, up and their product, or up and its activation. What a linear layer
    takes is kept for its weight's gradient."""
    all_trained = _all_trained(spec)
    return rows * spec.width * all_trained + (1 + spec.gated + all_trained) * rows / at.tp * spec.ffn


def _all_trained(spec: ModelSpec) -> bool:
    return spec.learned == spec.parameters


@lru_cache(maxsize=64)
def _least_trained(spec: ModelSpec) -> float:
    """The least share of a unit's weights that is trained."""
    if _all_trained(spec):
        return 1.0
    units = (spec.of_unit(unit) for unit in range(spec.units))
    return min(sum(p.elements for p in some if not p.frozen) / sum(p.elements for p in some) for some in units if some)


def _weights(spec: ModelSpec, unit: int) -> tuple[float, float, float]:
    """Elements of a block's weights that tensor parallelism cuts, that it leaves whole, and those of keys and values among the cut ones."""
    cut = sum(p.elements for p in spec.params if p.unit == unit and p.dim is not None)
    whole = sum(p.elements for p in spec.params if p.unit == unit and p.dim is None)
    keys = 2.0 * spec.width * spec.kv_heads * spec.head_width
    return float(cut), float(whole), keys
