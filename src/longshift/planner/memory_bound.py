"""Bounds: bytes of a device that a candidate needs at least, for arrays of candidates at once.

    home       masters and moments, of this rank's share, if they are on the device
    copies     of all units (z0 to z2) or of two (z3)
    sums       of gradients: all units on the way home (z0, z1) or at home (z2, z3), from the second
               micro-batch on; of a home outside the device, those of z1 alone
    kept       of the packs in flight, what each block keeps for its backward
    turn       what the backward of one block, or the loss of some rows, needs besides

What a block keeps and needs is recorded from the model (`simulate.turn_calls`), for each token of a
pack. No bound is above what the ledger says of the same step (`weigh.needs`); tests compare. The
ledger alone knows the rest: rounding of shares, messages, what does not grow with the pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from longshift.planner.candidates import ORDERS, Candidates
from longshift.simulate.cost import RECOMPUTE
from longshift.simulate.mesh import Mesh
from longshift.simulate.turn_calls import TurnKind, turn_calls
from longshift.spec.formats import Format, adds_inside
from longshift.spec.model import ModelSpec
from longshift.weigh.needs import micro_count
from longshift.weigh.recorder import Transport
from longshift.weigh.turn_profile import Part, Phase
from longshift.workload.groups import Edge, home_layout

# Of a stage's share of home, that the fullest rank has at least under a layout of other stages.
MIN_HOME_SHARE = 0.9


@dataclass(frozen=True)
class Training:
    """What is trained.

    `formats`: of weights, sums and moments.
    `transport`: NCCL stands for GPUs, gloo for CPUs.
    `outside`: whether all of home may be outside the device.
    """

    spec: ModelSpec
    formats: Format
    transport: Transport
    outside: bool = False


@dataclass(frozen=True)
class RankElements:
    """Weights of one rank of a pipeline coordinate, in elements, float64 [candidates].

    blocks   number of its blocks
    block    elements of one
    total    of all its units
    sharded  its share of them if home is sharded
    """

    blocks: np.ndarray
    block: np.ndarray
    total: np.ndarray
    sharded: np.ndarray


def stage_elements(spec: ModelSpec, candidates: Candidates, is_first: bool) -> RankElements:
    """Weights on the first or the last pipeline coordinate."""
    weight_ranks = candidates.weight_ranks

    # 1. A block. Ranks beyond the key/value heads have copies of these.
    cut, uncut, keys = _block_elements(spec)
    copies = np.maximum(1.0, weight_ranks / spec.kv_heads) if keys else 1.0
    block_queries = (cut - keys) / weight_ranks
    block = block_queries + keys / weight_ranks * copies + uncut
    sharded_block = block_queries + keys / weight_ranks + uncut / weight_ranks
    blocks = num_blocks(spec, candidates, is_first)

    # 2. Embeddings and head.
    table = spec.vocab * spec.width
    has_embeddings = is_first | (candidates.pp == 1)
    has_head = (not is_first) | (candidates.pp == 1)
    if spec.tied:
        tables = np.full(len(candidates), float(table))
        sharded_tables = np.where(candidates.pp == 1, 1.0, 0.5) * table
    else:
        tables = (has_embeddings.astype(float) + has_head) * table
        sharded_tables = tables
    positions = has_embeddings * (spec.max_positions * spec.width * spec.learned_positions)
    norms = has_head * spec.width

    total = blocks * block + tables / weight_ranks + positions + norms
    sharded = blocks * sharded_block + sharded_tables / weight_ranks
    sharded = sharded + (positions + norms) / weight_ranks
    return RankElements(blocks, block, total, sharded / candidates.holders)


def num_blocks(spec: ModelSpec, candidates: Candidates, is_first: bool) -> np.ndarray:
    """Blocks of the first or the last pipeline coordinate,
    of all its model chunks, int64 [candidates]."""
    # Chunk c of a rank is stage c * pp + coord; the first `extra` stages have a block more.
    blocks, extra = np.divmod(spec.layers, candidates.pp * candidates.virtual)
    coord = np.where(is_first, 0, candidates.pp - 1)
    total = np.zeros(len(candidates), np.int64)
    for chunk in range(int(candidates.virtual.max(initial=1))):
        chunk_blocks = blocks + (chunk * candidates.pp + coord < extra)
        total += np.where(chunk < candidates.virtual, chunk_blocks, 0)
    return total


class InFlight(NamedTuple):
    """Packs in flight on a pipeline coordinate, arrays [candidates].

    `passes`: forwards through one of its model chunks before the first backward.
    `refills`: whether as many are in flight again when every unit has a sum of gradients.
    `accumulates`: whether one is, then.
    """

    passes: np.ndarray
    refills: np.ndarray
    accumulates: np.ndarray


def in_flight(candidates: Candidates, micros: np.ndarray, is_first: bool) -> InFlight:
    """Packs in flight on the first or the last pipeline coordinate. `micros`: of a replica."""
    pp = candidates.pp
    virtual = candidates.virtual
    is_interleaved = virtual > 1
    is_gpipe = candidates.order == ORDERS.index("gpipe")
    coord = np.where(is_first, 0, pp - 1)
    interleaved_warmup = 2 * (pp - 1 - coord) + (virtual - 1) * pp
    warmup = np.where(virtual == 1, pp - 1 - coord, interleaved_warmup)

    # An interleaved order takes rounds of pp micro-batches through each chunk, then begins with as
    # many others.
    rounds, remainder = np.divmod(np.minimum(warmup + 1, pp * virtual), pp)
    round_micros = np.minimum(pp, micros)
    later_micros = np.clip(micros - pp, 0, np.maximum(0, warmup + 1 - pp * virtual))
    interleaved_passes = rounds * round_micros + np.minimum(remainder, round_micros) + later_micros
    passes = np.where(is_interleaved, interleaved_passes, np.minimum(warmup + 1, micros))

    # After so many backwards each chunk has had one.
    first_backwards = pp * (virtual - 1) + 1
    accumulates = np.where(is_interleaved, micros > pp, micros > 1)
    full_rounds = np.where(is_interleaved, micros // pp * pp, micros)
    refills = accumulates & ~is_gpipe & (full_rounds * virtual - warmup > first_backwards)
    return InFlight(np.where(is_gpipe, micros, passes), refills, accumulates)


def min_device_bytes(
    training: Training,
    candidates: Candidates,
    tokens: np.ndarray | float,
    micros: np.ndarray | float,
    home_elements: float | None = None,
) -> np.ndarray:
    """Bytes that the fullest rank of each candidate needs at least, float64 [candidates].

    `tokens`: of a pack, on all ranks that share it.
    `micros`: packs of a replica.
    `home_elements`: that a rank has of home where another layout cuts home.
    """
    tokens = np.asarray(tokens, dtype=float)
    micros = np.broadcast_to(np.asarray(micros, dtype=np.int64), (len(candidates),))
    block = block_bytes(training, candidates)
    stages = [
        _stage_bytes(training, candidates, block, tokens, micros, home_elements, is_first)
        for is_first in (True, False)
    ]
    return np.max(stages, axis=0)


def min_plan_bytes(training: Training, edges: Sequence[Edge], tokens: int) -> float:
    """Bytes that some rank needs of its device at least in the largest step of `tokens` with
    documents for these groups.

    Streamed groups and uneven stages are left out.
    """
    home_elements = None
    if len(edges) > 1:
        home = home_layout(edges)
        home_elements = 0.0
        if not home.stages:
            candidates = Candidates.of([home])
            ends = [
                stage_elements(training.spec, candidates, is_first) for is_first in (True, False)
            ]
            home_elements = MIN_HOME_SHARE * min(float(end.sharded[0]) for end in ends)

    min_bytes = 0.0
    for edge in edges:
        if edge.use.chunk or edge.use.stages:
            continue
        # With several groups every state is sharded.
        use = edge.use if len(edges) == 1 else replace(edge.use, zero=max(1, edge.use.zero))
        candidates = Candidates.of([use])
        micros = micro_count(tokens, edge, edge.upto)
        needs = min_device_bytes(training, candidates, edge.pack, micros, home_elements)
        min_bytes = max(min_bytes, float(needs[0]))
    return min_bytes


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """Bytes of a block on one rank per token of a pack, float64 [candidates].

    `kept`: until its backward.
    `turn`: in its backward besides.
    `stream`: of the residual stream.
    """

    kept: np.ndarray
    turn: np.ndarray
    stream: np.ndarray


def block_bytes(training: Training, candidates: Candidates) -> BlockBytes:
    """What blocks keep and need under each candidate's mesh and recomputation."""
    formats = training.formats
    meshes, index = Mesh.of(candidates).distinct

    def recorded_bytes(part: Part, phase: Phase, selective: bool = False) -> np.ndarray:
        """Bytes of the graph and at the peak, [2, candidates]."""
        rows = []
        for degrees in meshes:
            kind = TurnKind(
                spec=training.spec,
                mesh=degrees,
                unit="block",
                part=part,
                phase=phase,
                selective=selective,
                compute_bytes=formats.compute_bytes,
                transport=training.transport,
                float8=formats.float8,
                compiled=False,
            )
            rows.append(turn_calls(kind).held_bytes)
        return np.array(rows).reshape(-1, 2).T[:, index]

    stream = formats.compute_bytes * training.spec.width / candidates.sequence
    kept = recorded_bytes("block", "forward")[0]
    turn = recorded_bytes("block", "backward")[1]
    if training.transport == "nccl" and formats.compute_bytes > 2:
        turn = np.zeros(len(candidates))  # scores of float32 grow with the square of a document
    is_full = candidates.recompute == RECOMPUTE.index("full")
    if is_full.any():
        # The backward makes the graph again, except for attention's output.
        output = recorded_bytes("block with output", "pass")[0]
        turn = np.where(is_full, turn + np.maximum(0.0, kept - output), turn)
        kept = np.where(is_full, output, kept)
    is_selective = candidates.recompute == RECOMPUTE.index("selective")
    if is_selective.any():
        selective_kept = recorded_bytes("block", "forward", selective=True)[0]
        kept = np.where(is_selective, selective_kept, kept)
    return BlockBytes(kept=kept + stream, turn=turn + stream, stream=stream)


class _ResidentBytes(NamedTuple):
    """Bytes of a rank that do not depend on its packs, arrays [candidates].

    `state`: masters and moments.
    `copies`: of weights that are computed with.
    `sums`, `home_sums`: of gradients, during a step and at its update.
    """

    state: np.ndarray
    copies: np.ndarray
    sums: np.ndarray
    home_sums: np.ndarray


def _resident_bytes(
    training: Training,
    candidates: Candidates,
    rank: RankElements,
    home_elements: float | None,
) -> _ResidentBytes:
    formats = training.formats
    zero = candidates.zero
    compute_bytes = formats.compute_bytes

    # 1. Home and sums of gradients. Weights that are not trained have neither masters nor moments.
    trained = _min_trained_share(training.spec)
    sum_bytes = formats.home_bytes * trained
    moment_bytes = formats.moments * formats.moment_bytes * trained
    home = np.where(zero == 0, rank.total, rank.sharded)
    if home_elements is not None:
        home = np.full(len(candidates), home_elements)

    state = (sum_bytes + moment_bytes + compute_bytes * (1 - trained)) * home
    home_sums = sum_bytes * home
    if training.outside:
        state = home_sums = np.zeros(len(candidates))
    sums = np.where(zero == 1, sum_bytes * rank.total, home_sums)

    # 2. Working copies. Under ZeRO-0 masters of the compute format are the copies; ZeRO-3 gathers a
    #    block while it computes another.
    are_masters = formats.compute == formats.home and not training.outside
    replicated = 0.0 if are_masters else compute_bytes * trained * rank.total
    copies = np.where(zero == 0, replicated, compute_bytes * rank.total)
    wire_bytes = formats.wire.bytes_of("weights", compute_bytes)
    block_copies = np.where(rank.blocks > 1, 2 * compute_bytes + wire_bytes, compute_bytes)
    has_experts = training.spec.experts > 0
    is_gathered = (zero == 3) & (candidates.state_holders(has_experts) > 1)
    copies = np.where(is_gathered, rank.block * block_copies, copies)
    return _ResidentBytes(state, copies, sums, home_sums)


def _loss_bytes(spec: ModelSpec, compute_bytes: int, stream_bytes: np.ndarray) -> np.ndarray:
    """Logits of one block of rows and their gradient, float64 [candidates]. `stream_bytes`: of the
    rows that enter the head."""
    rows = stream_bytes / (compute_bytes * spec.width)
    block_rows = np.minimum(np.maximum(spec.loss_rows, rows * spec.width / spec.vocab), rows)
    return (compute_bytes + max(4, compute_bytes)) * (block_rows * spec.vocab)


def _leaving_bytes(formats: Format, sum_bytes: float) -> float:
    """Of a weight whose gradients are being reduced. Coded ones are there as they go out and as
    they come in, and their sum, which has `sum_bytes`, is not."""
    if formats.wire.gradients == "float32":
        return sum_bytes
    coded_bytes = formats.wire.bytes_of("gradients", formats.home_bytes)
    return min(sum_bytes, 2 * coded_bytes * sum_bytes / formats.home_bytes)


def _stage_bytes(
    training: Training,
    candidates: Candidates,
    block: BlockBytes,
    tokens: np.ndarray,
    micros: np.ndarray,
    home_elements: float | None,
    is_first: bool,
) -> np.ndarray:
    """`min_device_bytes` of the first or the last pipeline coordinate."""
    spec = training.spec
    formats = training.formats
    zero = candidates.zero
    compute_bytes = formats.compute_bytes
    rank = stage_elements(spec, candidates, is_first)
    resident = _resident_bytes(training, candidates, rank, home_elements)

    # 1. Packs in flight, and the loss.
    packs = in_flight(candidates, micros, is_first)
    kept = block.kept * tokens
    in_flight_bytes = packs.passes * rank.blocks / candidates.virtual * kept
    one_pack_bytes = np.minimum(packs.passes, 1) * rank.blocks / candidates.virtual * kept
    has_head = (not is_first) | (candidates.pp == 1)
    loss = has_head * _loss_bytes(spec, compute_bytes, block.stream * tokens)

    # 2. Under ZeRO-2 and 3 the sum of a unit is reduced while gradients are added to the next.
    sum_bytes = formats.home_bytes * _min_trained_share(spec)
    leaving_bytes = _leaving_bytes(formats, sum_bytes)
    is_reduced = (zero >= 2) & (candidates.state_holders(spec.experts > 0) > 1)
    has_two_blocks = rank.blocks >= 2 * candidates.virtual
    two_sums = (sum_bytes + leaving_bytes) * rank.block

    # 3. Where matmuls add to the sum, it is there during the whole turn: of the last block beside
    #    the head's, of the block before it beside that block's.
    turn = block.turn * tokens
    if adds_inside(compute_bytes, formats.home_bytes, training.transport == "nccl"):
        head_leaving = has_head * (not spec.tied) * leaving_bytes * spec.vocab * spec.width
        beside_head = sum_bytes * rank.block + head_leaving / candidates.weight_ranks
        beside_block = np.where(has_two_blocks, two_sums - kept, 0.0)
        turn = turn + np.where(is_reduced, np.maximum(beside_head, beside_block), 0.0)
    turn = np.maximum(turn, loss)

    # 4. The largest of four moments: the first backward; where a unit's sum is reduced; the last
    #    backward; the update.
    refilled = np.where(packs.refills, in_flight_bytes, one_pack_bytes)
    weights = resident.state + resident.copies
    first_backward = weights + in_flight_bytes + turn
    reducing = two_sums * (is_reduced & has_two_blocks)
    reduced_kept = np.where(packs.accumulates, refilled, in_flight_bytes) - 2 * kept
    reduction = weights + np.where(packs.accumulates & (zero >= 2), resident.sums, 0.0) + reducing
    reduction = np.where(reducing > 0, reduction + np.maximum(0.0, reduced_kept), 0.0)
    last_backward = weights + resident.sums + refilled + turn
    last_backward = np.where(packs.accumulates, last_backward, 0.0)
    update = resident.state + resident.home_sums + np.where(zero == 3, 0.0, resident.copies)
    peaks = np.broadcast_arrays(first_backward, reduction, update, last_backward)
    return np.max(peaks, axis=0)


@lru_cache(maxsize=64)
def _min_trained_share(spec: ModelSpec) -> float:
    """The least share of a unit's weights that is trained."""
    if spec.learned == spec.parameters:
        return 1.0
    shares = []
    for unit in range(spec.units):
        params = spec.of_unit(unit)
        if params:
            trained = sum(param.elements for param in params if not param.frozen)
            shares.append(trained / sum(param.elements for param in params))

    return min(shares)


def _block_elements(spec: ModelSpec) -> tuple[float, float, float]:
    """Elements of a block that tensor parallelism cuts, that it leaves uncut, and those of keys and
    values among the cut ones."""
    cut = uncut = 0.0
    for param in spec.params:
        if param.unit == spec.layers:
            if param.dim is None:
                uncut += param.elements
            else:
                cut += param.elements
    keys = 2.0 * spec.width * spec.kv_heads * spec.head_width
    return cut, uncut, keys
