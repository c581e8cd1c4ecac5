"""Bounds: bytes of a device that a candidate needs at the least, for arrays of candidates at once.

    home       masters and moments, of this rank's share, where they lie on the device
    copies     of all units (z0 to z2) or of two (z3)
    sums       of gradients: all units on the way home (z0, z1) or at home (z2, z3), from the second micro-batch on; of a home outside
               the device, those of z1 alone
    kept       of the packs in flight, what each block keeps for its backward
    turn       what the backward of one block, or the loss of some rows, needs beside these

What a block keeps and needs is recorded from the model (`simulate.turn_calls`), for each token of a pack. No bound is above what the ledger
says of the same step (`weigh.needs`); tests compare. What only the ledger knows is left out: rounding of shares, messages, what does not
grow with the pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from longshift.planner.candidates import ORDERS, Candidates
from longshift.simulate.cost import RECOMPUTE, Mesh
from longshift.simulate.turn_calls import TurnKind, turn_calls
from longshift.spec.formats import Format, adds_inside
from longshift.spec.model import ModelSpec
from longshift.weigh.needs import micro_count
from longshift.weigh.recorder import Transport
from longshift.weigh.turn_profile import Part, Phase
from longshift.workload.groups import Edge, home_layout

LEAST_SHARE = 0.9  # of a stage's share of home, that the rank has at the least which needs most under a layout of other stages


@dataclass(frozen=True)
class Training:
    """What is trained. `formats`: of weights, sums and moments; `transport`: NCCL stands for GPUs, gloo for CPUs; `outside`: whether all of
    home may lie outside the device."""

    spec: ModelSpec
    formats: Format
    transport: Transport
    outside: bool = False


@dataclass(frozen=True)
class Elements:
    """Weights of one rank of a pipeline coordinate, in elements, arrays by candidate. `block`: of one block; `all`: of all units here;
    `own`: its share of them where home is sharded."""

    blocks: np.ndarray
    block: np.ndarray
    all: np.ndarray
    own: np.ndarray


def elements(spec: ModelSpec, at: Candidates, first: bool) -> Elements:
    """Weights on the first or the last pipeline coordinate."""
    cut, whole, keys = _weights(spec, spec.layers)
    replicated = np.maximum(1.0, at.weight_ranks / spec.kv_heads) if keys else 1.0
    block = (cut - keys) / at.weight_ranks + keys / at.weight_ranks * replicated + whole
    own_block = (cut - keys) / at.weight_ranks + keys / at.weight_ranks + whole / at.weight_ranks
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
    all_here = blocks * block + ends_cut / at.weight_ranks + starts * positions + norms
    own = (blocks * own_block + own_ends / at.weight_ranks + (starts * positions + norms) / at.weight_ranks) / at.holders
    return Elements(blocks, block, all_here, own)


def blocks_of(spec: ModelSpec, at: Candidates, first: bool) -> np.ndarray:
    """Blocks of the first or the last pipeline coordinate, all its model chunks."""
    each, extra = np.divmod(spec.layers, at.pp * at.virtual)
    stage = np.where(first, 0, at.pp - 1)
    found = np.zeros(len(at), np.int64)
    for chunk in range(int(at.virtual.max(initial=1))):
        found += np.where(chunk < at.virtual, each + (chunk * at.pp + stage < extra), 0)
    return found


def in_flight(at: Candidates, micros: np.ndarray, first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs whose forward is done when the first backward begins on a coordinate, in passes through one of its model chunks; whether as
    many are there again, and whether one is, when every unit has a sum of gradients."""
    coord = np.where(first, 0, at.pp - 1)
    ahead = np.where(at.virtual == 1, at.pp - 1 - coord, 2 * (at.pp - 1 - coord) + (at.virtual - 1) * at.pp)
    summed = at.pp * (at.virtual - 1) + 1  # backwards after which each chunk has had one
    interleaved, gpipe = at.virtual > 1, at.order == ORDERS.index("gpipe")
    # An interleaved order takes pp micro-batches through all chunks, then begins with as many others.
    rounds, rest = np.divmod(np.minimum(ahead + 1, at.pp * at.virtual), at.pp)
    few, others = np.minimum(at.pp, micros), np.clip(micros - at.pp, 0, np.maximum(0, ahead + 1 - at.pp * at.virtual))
    begun = np.where(interleaved, rounds * few + np.minimum(rest, few) + others, np.minimum(ahead + 1, micros))
    once = np.where(interleaved, micros > at.pp, micros > 1)
    full_groups = np.where(interleaved, micros // at.pp * at.pp, micros)
    again = once & ~gpipe & (full_groups * at.virtual - ahead > summed)
    return np.where(gpipe, micros, begun), again, once


def device_bytes(
    training: Training, at: Candidates, tokens: np.ndarray | float, micros: np.ndarray | float, at_home: float | None = None
) -> np.ndarray:
    """Bytes that the worst rank of each candidate needs at the least, float64 [candidates].

    `tokens`: of a pack, on all ranks that share it; `micros`: packs of a replica; `at_home`: elements of home that a rank has where
    another layout cuts home.
    """
    tokens = np.asarray(tokens, dtype=float)
    micros = np.broadcast_to(np.asarray(micros, dtype=np.int64), (len(at),))
    block = block_bytes(training, at)
    stages = (_stage_bytes(training, at, block, tokens, micros, at_home, first) for first in (True, False))
    return np.maximum(*stages)


def least_of_way(training: Training, edges: Sequence[Edge], tokens: int) -> float:
    """Bytes that some rank needs of its device at the least in the largest step of `tokens` with documents for these groups. Streamed
    groups and uneven stages are left out."""
    home, at_home = home_layout(edges), None
    if len(edges) > 1:
        at = Candidates.of([home])
        shares = (float(elements(training.spec, at, first).own[0]) for first in (True, False))
        at_home = LEAST_SHARE * min(shares) if not home.stages else 0.0
    least = 0.0
    for edge in edges:
        use = edge.use if len(edges) == 1 else replace(edge.use, zero=max(1, edge.use.zero))
        if not use.chunk and not use.stages:
            found = device_bytes(training, Candidates.of([use]), edge.pack, micro_count(tokens, edge), at_home)
            least = max(least, float(found[0]))
    return least


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """Bytes of a block on one rank per token of a pack, float64 [candidates]. `kept`: until its backward; `turn`: in its backward besides;
    `stream`: of the residual stream."""

    kept: np.ndarray
    turn: np.ndarray
    stream: np.ndarray


def block_bytes(training: Training, at: Candidates) -> BlockBytes:
    """What blocks keep and need under each candidate's mesh and recomputation."""
    mesh = Mesh.of(at)
    meshes, index = mesh.distinct

    def held(part: Part, phase: Phase, selective: bool = False) -> np.ndarray:
        """Bytes of the graph and at the peak, [2, candidates]."""
        formats = training.formats
        kinds = (
            TurnKind(
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
            for degrees in meshes
        )
        return np.array([turn_calls(kind).held_bytes for kind in kinds]).reshape(-1, 2).T[:, index]

    stream = training.formats.compute_bytes * training.spec.width / at.sequence
    kept, turn = held("block", "forward")[0], held("block", "backward")[1]
    if training.transport == "nccl" and training.formats.compute_bytes > 2:
        turn = np.zeros(len(at))  # scores of float32 grow with the square of a document
    is_selective, is_full = (at.recompute == RECOMPUTE.index(name) for name in ("selective", "full"))
    if is_full.any():  # its backward makes the graph again, but for attention's output
        output = held("block with output", "pass")[0]
        kept, turn = np.where(is_full, output, kept), np.where(is_full, turn + np.maximum(0.0, kept - output), turn)
    if is_selective.any():
        kept = np.where(is_selective, held("block", "forward", selective=True)[0], kept)
    return BlockBytes(kept=kept + stream, turn=turn + stream, stream=stream)


def _stage_bytes(
    training: Training,
    at: Candidates,
    block: BlockBytes,
    tokens: np.ndarray,
    micros: np.ndarray,
    at_home: float | None,
    first: bool,
) -> np.ndarray:
    spec, formats = training.spec, training.formats
    own = elements(spec, at, first)
    small, least = formats.compute_bytes, _least_trained(spec)

    # 1. Home, working copies and sums of gradients.
    wide = formats.home_bytes * least  # of a mean weight
    kept_at_home = np.where(at.zero == 0, own.all, own.own) if at_home is None else np.full(len(at), at_home)
    moments = formats.moments * formats.moment_bytes
    state = (wide + moments * least + small * (1 - least)) * kept_at_home
    sums_at_home = wide * kept_at_home
    if training.outside:
        state = sums_at_home = np.zeros(len(at))
    same = formats.compute == formats.home
    copies = np.where(at.zero == 0, 0.0 if same and not training.outside else small * least * own.all, small * own.all)
    gathered = formats.wire.bytes_of("weights", small)
    copies = np.where((at.zero == 3) & (at.holders > 1), own.block * np.where(own.blocks > 1, 2 * small + gathered, small), copies)
    sums = np.where(at.zero >= 2, sums_at_home, np.where(at.zero == 1, wide * own.all, sums_at_home))

    # 2. Packs in flight, and the turn that needs most.
    passes, again, once = in_flight(at, micros, first)
    has_head = (not first) | (at.pp == 1)
    rows = block.stream * tokens / (small * spec.width)
    logits = np.minimum(np.maximum(spec.loss_rows, rows * spec.width / spec.vocab), rows) * spec.vocab
    turn_of_block, kept = block.turn * tokens, block.kept * tokens
    full = passes * own.blocks / at.virtual * kept
    single = np.minimum(passes, 1) * own.blocks / at.virtual * kept

    # 3. Under ZeRO-2 and 3 the sum of a unit is reduced while gradients are added to the next one's. Where matmuls add to it, it lies
    # there during the whole turn: of the last block beside the head's, of the block before it beside that block's.
    is_coded = formats.wire.gradients != "float32"  # then both what goes out and what comes in lie there, and the sum does not
    leaving = min(wide, 2 * formats.wire.bytes_of("gradients", formats.home_bytes) * least) if is_coded else wide
    is_reduced = (at.zero >= 2) & (at.holders > 1)
    has_two_blocks = own.blocks >= 2 * at.virtual
    beside_turn = np.zeros(len(at))
    if adds_inside(small, formats.home_bytes, training.transport == "nccl"):
        of_head = has_head * (not spec.tied) * leaving * spec.vocab * spec.width / at.weight_ranks
        of_two_blocks = (wide + leaving) * own.block - kept
        beside_turn = np.maximum(wide * own.block + of_head, np.where(has_two_blocks, of_two_blocks, 0.0))
    turn = turn_of_block + np.where(is_reduced, beside_turn, 0.0)
    turn = np.maximum(turn, has_head * (small + max(4, small)) * logits)
    reducing = (wide + leaving) * own.block * (is_reduced & has_two_blocks)
    at_sum = state + copies + np.where(once & (at.zero >= 2), sums, 0.0) + reducing
    at_sum += np.maximum(0.0, np.where(again | ~once, full, single) - 2 * kept)

    at_first = state + copies + full + turn
    at_last = state + copies + sums + np.where(again, full, single) + turn
    at_end = state + sums_at_home + np.where(at.zero == 3, 0.0, copies)
    peaks = at_first, np.where(reducing > 0, at_sum, 0.0), at_end, np.where(once, at_last, 0.0)
    return np.max(np.broadcast_arrays(*peaks), axis=0)


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
