"""Closed form: seconds of one training step of another trainer, for arrays of candidates at once.

A rank computes m micro-batches on the slowest stage, waits while a pipeline fills and drains, moves weights and gradients, and updates:

    step = m * slot + (other stages' slots) / v + stall + messages + gather + reduce + optimizer + wait

slot: forward, recomputation and backward of a stage's units with what their traffic exposes; p stages of v chunks; stall: see `stalled_s`.
For even stages this is what a replay of `schedule.pipeline` takes (exactly where p divides m or v is 1, else within 3 %); for uneven ones
it is an upper bound.

What traffic is hidden under is the trainer's habit (`block_formulas.Trainer`), never a fitted share of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from block_formulas import FormulaCost

from longshift.cluster.cluster import Number
from longshift.layout.loss_rows import rows_at_once
from longshift.planner.group_seconds import stalled_s
from longshift.simulate.calibrate import BAND
from longshift.simulate.mesh import Mesh
from longshift.simulate.op_seconds import update_bytes
from longshift.simulate.work import Work

# In the order of a table. All are seconds that a step shows; what is hidden under computation is in Forecast.hidden.
PARTS = (
    *("matmul", "attention", "elementwise", "launch", "recompute", "head", "tp", "ulysses", "ring", "gather", "reduce", "bubble"),
    *("messages", "optimizer", "crowd", "wait"),
)


@dataclass(frozen=True)
class Candidates:
    """Layouts and what a step has for each, numbers or arrays that broadcast. `recompute`: codes of `cost.RECOMPUTE`. `micros`:
    micro-batches of a replica. `tokens`, `pairs`: of a pack, the causal pairs being the sum of n^2/2 over its documents.
    """

    tp: Number
    ulysses: Number
    ring: Number
    dp: Number
    pp: Number
    virtual: Number
    zero: Number
    recompute: Number
    micros: Number
    tokens: Number
    pairs: Number

    def degree(self, axis: str) -> Number:
        return getattr(self, axis)

    @property
    def ranks(self) -> Number:
        return np.asarray(self.tp) * self.ulysses * self.ring * self.dp * self.pp

    def take(self, index: np.ndarray | slice) -> "Candidates":
        """Some of the candidates; numbers stay."""
        return Candidates(*(value[index] if np.ndim(value := getattr(self, f.name)) else value for f in fields(self)))


@dataclass(frozen=True)
class Forecast:
    """Seconds of one step by part (PARTS), and traffic that is hidden under computation by its part. `once`: those of the parts that a step
    takes once, however many groups of documents it computes from these copies of the weights: what is gathered and reduced once, and the
    optimizer's; `fill`: those in which a pipeline fills and drains. `band`: relative half-width."""

    parts: Mapping[str, np.ndarray]
    hidden: Mapping[str, np.ndarray]
    once: np.ndarray
    fill: np.ndarray
    band: float = BAND

    @property
    def total(self) -> np.ndarray:
        """Seconds of the step."""
        return sum((self.parts[name] for name in PARTS), np.zeros(()))


def closed_form(cost: FormulaCost, at: Candidates) -> Forecast:
    """Seconds of one step of each candidate."""
    pp, virtual, zero, micros = (np.asarray(value, dtype=float) for value in (at.pp, at.virtual, at.zero, at.micros))
    sizes, habits, launch_s, mesh = cost.sizes, cost.habits, cost.launch_s, Mesh.of(at)
    forward, again, backward = _block(cost, mesh, at)
    blocks = virtual * np.ceil(sizes.layers / (pp * virtual))  # of the slowest stage
    held = _held(cost, at, blocks)

    turns = {name: _turn(cost, mesh, work) for name, work in (("forward", forward), ("again", again), ("backward", backward))}
    free = {name: turn.free_s for name, turn in turns.items()}
    works = forward + again + backward
    # A block's gathers under the block before, forward and backward, then its reduction in what they leave: of the backward, and of the
    # forward of the next micro-batch where there is one.
    gather_s, reduce_s = np.where(zero == 3, held.gather_s, 0.0), np.where(zero >= 2, held.scatter_s, 0.0)
    forward_s, backward_s = free["forward"], free["again"] + free["backward"]
    gathers = [_exposed(gather_s, window_s, habits.gather_hidden) for window_s in (forward_s, backward_s)]
    left_s, next_s = np.maximum(0.0, backward_s - gather_s), np.maximum(0.0, forward_s - gather_s)
    reduced_s, last_reduced_s = (_exposed(reduce_s, window_s, habits.reduce_hidden) for window_s in (left_s + next_s, left_s))
    reduced_s = reduced_s + (last_reduced_s - reduced_s) / micros
    coded_s = held.coded(zero)
    sides = (
        turns["forward"].seconds + gathers[0] + coded_s.gather,
        turns["again"].seconds + turns["backward"].seconds + gathers[1] + reduced_s + coded_s.gather + coded_s.reduce,
    )
    block_s = sides[0] + sides[1]

    table, rows = sizes.head_elements * sizes.head_trained, np.asarray(at.tokens) / (np.asarray(at.ulysses) * at.ring * at.tp)
    summed = cost.accumulated(mesh, table)
    head = cost.turn("head", "loss", "", mesh, at.tokens, at.pairs) + summed.times(
        np.ceil(rows / rows_at_once(rows, sizes.width, sizes.vocab))
    )
    embeddings = cost.accumulated(mesh, table, embeddings=True)
    for turn in ("forward", "backward"):
        embeddings = embeddings + cost.turn("embeddings", turn, "embed", mesh, at.tokens, at.pairs)
    ends = [np.maximum(work.device_s, work.kernels * launch_s) + work.waited_s for work in (head, embeddings)]
    fewer = virtual * np.floor(sizes.layers / (pp * virtual)) - blocks  # of the last stage, which has the head
    ends_s = np.where(pp > 1, np.maximum(ends[1], ends[0] + fewer * block_s), ends[0] + ends[1])
    slot_s = blocks * block_s + ends_s
    others_s = np.maximum(0.0, sizes.layers * block_s + ends[0] + ends[1] - slot_s)
    stall_s = stalled_s(micros, pp, virtual, *(blocks * side for side in sides))
    fill_s = np.where(pp > 1, others_s / virtual, 0.0)
    bubble_s = fill_s + np.where(pp > 1, stall_s, 0.0)

    message_s = _message_s(cost, at)
    messages = 2 * np.where(np.asarray(habits.messages_hidden) == 1, pp - 1.0, micros * virtual + pp - 1)
    messages_s = np.where(pp > 1, messages * message_s * cost.rates.constants.messages, 0.0)

    once_gather_s, once_reduce_s = held.once(zero)
    first_s = blocks * np.maximum(0.0, forward_s - gather_s)
    last_s = (blocks - 1) * np.maximum(0.0, backward_s - gather_s - reduce_s)
    gathered_once_s = _exposed(once_gather_s, first_s, habits.gather_hidden)
    reduced_once_s = np.maximum(once_reduce_s / np.maximum(blocks, 1), _exposed(once_reduce_s, last_s, habits.reduce_hidden))

    owned = held.learned / np.where(zero >= 1, held.ranks, 1)
    optimizer_s = cost.rates.elementwise_s(owned * update_bytes(moments=2) * cost.rates.constants.update) + cost.rates.constants.begin_s
    per_step = micros * blocks
    plain = forward + backward
    tensor_s, ring_s = sum(turn.tensor_s for turn in turns.values()), sum(turn.ring_s for turn in turns.values())
    launched_s = sum(turn.launched_s for turn in turns.values())
    parts = {
        "matmul": per_step * plain.matmul_s,
        "attention": per_step * plain.attention_s,
        "elementwise": per_step * plain.elementwise_s,
        "launch": per_step * launched_s,
        "recompute": per_step * again.device_s,
        "head": micros * ends_s,
        "tp": per_step * tensor_s,
        "ulysses": per_step * works.traffic_s.get("ulysses", 0.0),
        "ring": per_step * ring_s,
        "gather": per_step * (gathers[0] + gathers[1] + 2 * coded_s.gather) + gathered_once_s + coded_s.gather_once,
        "reduce": per_step * (reduced_s + coded_s.reduce) + reduced_once_s + coded_s.reduce_once,
        "bubble": bubble_s,
        "messages": messages_s,
        "optimizer": optimizer_s,
    }
    hidden = {
        "tp": per_step * (works.traffic_s.get("tp", 0.0) - tensor_s),
        "ring": per_step * (works.traffic_s.get("ring", 0.0) - ring_s),
        "gather": per_step * (2 * gather_s - gathers[0] - gathers[1]) + once_gather_s - gathered_once_s,
        "reduce": per_step * (reduce_s - reduced_s) + once_reduce_s - reduced_once_s,
    }
    tensor, sequence = np.asarray(at.tp), np.asarray(at.tp) * at.ulysses * at.ring
    spans = {"tp": tensor, "ring": sequence, "gather": sequence * at.dp, "reduce": sequence * at.dp}  # ranks, neighbours in the world
    crowds = {name: cost.rates.crowd(ranks > cost.rates.fabric.per_node) for name, ranks in spans.items()}
    parts["crowd"] = sum(crowds[name] * seconds for name, seconds in hidden.items())
    waiting = cost.rates.constants.jitter * np.log2(np.maximum(at.ranks, 1))
    parts["wait"] = waiting * sum(parts.values())
    once_s = gathered_once_s + coded_s.gather_once + reduced_once_s + coded_s.reduce_once + optimizer_s
    once_s = once_s + crowds["gather"] * (once_gather_s - gathered_once_s) + crowds["reduce"] * (once_reduce_s - reduced_once_s)
    shape = np.broadcast_shapes(*(np.shape(part) for part in parts.values()))
    whole, under = ({name: np.broadcast_to(part, shape) for name, part in some.items()} for some in (parts, hidden))
    once_s, fill_s = (np.broadcast_to(seconds * (1 + waiting), shape) for seconds in (once_s, fill_s))
    return Forecast(whole, under, once_s, fill_s)


def _block(cost: FormulaCost, mesh: Mesh, at: Candidates) -> tuple[Work, Work, Work]:
    """Work of a block: forward, computed again, backward."""
    given = mesh, at.tokens, at.pairs
    forward, backward = (cost.turn("block", turn, "block", *given) for turn in ("forward", "backward"))
    code = np.asarray(at.recompute)
    again = cost.again(forward, code)
    return forward, again, backward + cost.accumulated(mesh, cost.sizes.block_elements * cost.sizes.trained)


@dataclass(frozen=True)
class _Shown:
    """Seconds of one turn of a block: all, tensor and ring traffic that shows, waiting for launches, and those in which its own traffic
    leaves the links free."""

    seconds: np.ndarray
    tensor_s: np.ndarray
    ring_s: np.ndarray
    launched_s: np.ndarray
    free_s: np.ndarray


def _turn(cost: FormulaCost, mesh: Mesh, work: Work) -> _Shown:
    """A turn shows the longer of what its device does or waits for and of its launches. Ring traffic travels under attention; asynchronous
    tensor traffic, all but the first of tp pieces, under matmuls."""
    habits, tensor_s, ring_s = cost.habits, np.asarray(work.traffic_s.get("tp", 0.0)), np.asarray(work.under_attention_s)
    under_s = np.minimum(tensor_s * (1 - 1 / np.asarray(mesh.degrees["tp"])), work.matmul_s) * (np.asarray(habits.tensor_hidden) == 1)
    tensor_s = tensor_s - under_s
    ring_s = ring_s - np.minimum(ring_s, work.attention_s) * (np.asarray(habits.ring_hidden) == 1)
    busy_s = work.device_s + tensor_s + work.traffic_s.get("ulysses", 0.0) + ring_s
    launched_s = np.maximum(0.0, np.asarray(work.kernels) * cost.launch_s - busy_s)
    free_s = np.maximum(0.0, busy_s + launched_s - work.waited_s - work.under_attention_s)
    return _Shown(busy_s + launched_s, tensor_s, ring_s, launched_s, free_s)


@dataclass(frozen=True)
class _Coding:
    """Seconds in which a device codes or decodes what travels: for each gather and each reduction of a block in a turn, and once a step."""

    gather: np.ndarray
    reduce: np.ndarray
    gather_once: np.ndarray
    reduce_once: np.ndarray


@dataclass(frozen=True)
class _Shares:
    """Trained weights of the fullest rank, which `ranks` hold or share. Seconds to gather a block, and to sum it to its owners and to
    all; in which a device codes what is gathered, and reduced, of a block."""

    learned: Number
    blocks: Number
    ranks: Number
    gather_s: np.ndarray
    scatter_s: np.ndarray
    all_reduce_s: np.ndarray
    ends: Number  # weights of embeddings and head over those of a block
    gather_coded_s: np.ndarray
    reduce_coded_s: np.ndarray

    def coded(self, zero: np.ndarray) -> _Coding:
        """What coding takes under a stage of ZeRO, in turns and once: see `once`."""
        units, gather_s, reduce_s = self.blocks + self.ends, self.gather_coded_s, self.reduce_coded_s
        gathered = np.where((zero == 1) | (zero == 2), units, np.where(zero == 3, self.ends, 0.0)) * gather_s
        reduced = np.where(zero == 0, 0.0, np.where(zero == 1, units, self.ends)) * reduce_s
        return _Coding(np.where(zero == 3, gather_s, 0.0), np.where(zero >= 2, reduce_s, 0.0), gathered, reduced)

    def once(self, zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gathered and reduced once a step, seconds: ZeRO 1 and 2 gather, 0 and 1 reduce; 3 does the ends of the model only."""
        units = self.blocks + self.ends
        gather_s = np.where((zero == 1) | (zero == 2), units, np.where(zero == 3, self.ends, 0.0)) * self.gather_s
        reduce_s = np.where(zero == 0, units * self.all_reduce_s, np.where(zero == 1, units, self.ends) * self.scatter_s)
        return gather_s, reduce_s


def _held(cost: FormulaCost, at: Candidates, blocks: np.ndarray) -> _Shares:
    sizes, habits = cost.sizes, cost.habits
    ranks = np.asarray(at.dp) * at.ulysses * at.ring
    shard = np.where(np.asarray(habits.shard_group) > 0, np.minimum(habits.shard_group, ranks), ranks)
    ends = np.where(np.asarray(at.pp) > 1, 1.0, 2.0 - sizes.tied) * sizes.head_elements / sizes.block_elements
    per_node = np.maximum(1, cost.rates.fabric.per_node / np.asarray(at.tp))
    elements = sizes.block_elements / np.asarray(at.tp)
    gradient_bytes = elements * habits.gradient_bytes * habits.reduced * sizes.trained
    collective_s = cost.rates.collective_s
    gather_s = collective_s("all_gather", elements * cost.rates.element_bytes * habits.gathered, shard, per_node)
    scattered = (collective_s(operation, gradient_bytes, shard, per_node) for operation in ("all_to_all", "reduce_scatter"))
    scatter_s = np.where(np.asarray(habits.reduce_coded) > 0, *scattered)
    across, across_per_node = ranks / shard, np.maximum(1, per_node / shard)
    scatter_s = scatter_s + np.where(shard < ranks, collective_s("all_reduce", gradient_bytes / shard, across, across_per_node), 0.0)
    all_reduce_s = collective_s("all_reduce", gradient_bytes, ranks, per_node)
    learned = elements * (blocks * sizes.trained + ends * sizes.head_trained)
    coded = (
        np.where(ranks > 1, cost.rates.elementwise_s(elements * size) * (np.asarray(size) > 0), 0.0)
        for size in (np.asarray(habits.gather_coded), np.asarray(habits.reduce_coded) * sizes.trained)
    )
    return _Shares(learned, blocks, ranks, gather_s, scatter_s, all_reduce_s, ends, *coded)


def _exposed(traffic_s: np.ndarray, window_s: np.ndarray, hidden: Number) -> np.ndarray:
    """Seconds of traffic that show where it travels in a window of computation, if it is `hidden` at all."""
    return np.where(np.asarray(hidden) == 1, np.maximum(0.0, traffic_s - window_s), traffic_s)


def _message_s(cost: FormulaCost, at: Candidates) -> np.ndarray:
    """Seconds of one boundary activation to the next stage: each tensor-parallel rank sends its share through its own card, and gathers the
    others' where all of them need all (Megatron-LM's scatter-gather, arXiv 2104.04473)."""
    collective_s, per_node = cost.rates.collective_s, cost.rates.fabric.per_node
    size_bytes = np.asarray(at.tokens) / (np.asarray(at.ulysses) * at.ring) * cost.sizes.width * cost.rates.element_bytes
    near = np.where(np.asarray(at.ranks) / at.pp < per_node, 2, 1)
    whole = np.where(np.asarray(cost.habits.sequence_parallel) == 1, 0.0, collective_s("all_gather", size_bytes, at.tp, per_node))
    return collective_s("send", size_bytes / at.tp, 2, near) + whole
