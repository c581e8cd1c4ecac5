"""Rate cards: seconds of groups of documents under arrays of candidates at once.

A rank computes micro-batches on the slowest stage, waits while the pipeline fills and drains, and
updates:

    group = micro-batches * slot + filling + stalls + messages
    once  = gathers and reductions that a step has once + optimizer

    slot: forward, recomputation and backward of a stage's units, and the traffic that they do not
    hide

The seconds of a turn are those of `simulate.cost`, and overlap is that of the program: ZeRO-3
gathers a unit under the one before, gradients are reduced under the backward, keys travel under
attention. For even stages a slot is that of the clock, which has the last word.

Of a group only sums over its documents are known. A step has the group with
probability p = 1 - exp(-documents). Where it has, the busiest replica has its share of the tokens,
or one document if that is more, in packs that are not quite full."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longshift.layout.loss_rows import rows_at_once
from longshift.planner.candidates import Candidates, unevenness
from longshift.simulate.cost import Cost
from longshift.simulate.mesh import Mesh
from longshift.simulate.op_seconds import update_bytes
from longshift.simulate.work import Work

AT_ONCE = 8192  # candidates in one array; of 30,000 in one, each took a third longer
TINY = 1e-9  # keeps divisions by the sums of an empty group finite
UNFILLED = 0.25  # of a document's length, that a pack leaves empty at its end: assumed
# What is left of the wait for the largest pack: dp8.ring2.u2 and dp4.u8 of 13B on real draws of
# lognormal(6.5, 1.65) take 6 to 8 % longer under ZeRO-2 and 3 than replicas that wait at the end,
# and packs in random order would take 30 %.
ALIGNED = 0.25


@dataclass(frozen=True)
class GroupLoad:
    """Documents of one or more groups, of a mean step. Arrays of one length, or numbers.

    documents  number
    tokens     sum of n
    squares    sum of n^2, as far as the model's windows let tokens see
    fourths    sum of the squares of these
    longest    median length of a step's longest document
    """

    documents: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray
    fourths: np.ndarray
    longest: np.ndarray

    def take(self, index: np.ndarray | slice) -> "GroupLoad":
        """The groups at an index, mask or slice."""
        return GroupLoad(**{name: values[index] for name, values in vars(self).items()})

    @property
    def probability(self) -> np.ndarray:
        """That a step has a document of the group."""
        return -np.expm1(-np.asarray(self.documents, dtype=float))


@dataclass(frozen=True, eq=False)
class GroupSeconds:
    """Expected seconds of groups, float64 [candidates].

    `group`: of a mean step's documents.
    `once`: of a step besides, however many groups it has.
    """

    group: np.ndarray
    once: np.ndarray


def group_seconds(
    cost: Cost,
    candidates: Candidates,
    capacity: np.ndarray | float,
    load: GroupLoad,
) -> GroupSeconds:
    """Expected seconds of groups of documents, one for each candidate,
    in packs of up to `capacity` tokens."""
    shape = (len(candidates),)
    capacity = np.broadcast_to(np.asarray(capacity, dtype=float), shape)
    sums = {name: np.broadcast_to(values, shape) for name, values in vars(load).items()}
    load = GroupLoad(**sums)
    group = np.zeros(shape)
    once = np.zeros(shape)
    for start in range(0, len(candidates), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        seconds = _group_seconds(cost, candidates.take(part), capacity[part], load.take(part))
        group[part] = seconds.group
        once[part] = seconds.once
    return GroupSeconds(group, once)


def _group_seconds(
    cost: Cost,
    candidates: Candidates,
    capacity: np.ndarray,
    load: GroupLoad,
) -> GroupSeconds:
    spec = cost.spec
    dp = candidates.dp
    linear = spec.flops_per_token(0)
    quadratic = spec.flops_per_token(0.5) - linear

    # 1. In a step that has the group, the busiest replica gets its share of the tokens. `length` is
    #    that of the document which a token is in on average.
    tokens = np.maximum(load.tokens, TINY)
    probability = np.maximum(load.probability, TINY)
    replica_tokens = load.tokens / probability / dp
    length = load.squares / tokens

    # 2. Or it gets one document, if the longest one costs more. A sliding window sees only a part
    #    of that document, which counts as if it were so long.
    mean_length = tokens / np.maximum(load.documents, TINY)
    longest = np.maximum(load.longest, mean_length)
    seen_length = 2 * spec.attended(longest) / np.maximum(longest, TINY)
    longest_flops = longest * (linear + quadratic * seen_length)
    share_flops = replica_tokens * (linear + quadratic * length)
    is_one_document = longest_flops > share_flops

    # 3. Pack it. Two long documents do not fit one pack.
    holds_one = 2 * mean_length > capacity
    filled = np.where(holds_one, mean_length, capacity - UNFILLED * length)
    micros = np.maximum(1.0, np.ceil(replica_tokens / filled - 1e-9))
    micros = np.where(is_one_document, 1.0, micros)
    pack_tokens = np.where(is_one_document, longest, replica_tokens / micros)
    pack_tokens = np.maximum(pack_tokens, 1.0)
    pack_pairs = pack_tokens * np.where(is_one_document, seen_length, length) / 2

    # 4. Under ZeRO-3 every micro-batch waits for the largest of dp packs. That is sqrt(2 ln dp)
    #    deviations above the mean, and at most a pack with one document. ALIGNED of the wait is
    #    left, as replicas come to their largest packs together.
    variance = load.fourths / np.maximum(load.squares, TINY)
    variance = variance / np.maximum(length * capacity, 1.0)
    spread = np.sqrt(variance) * np.sqrt(2 * np.log(dp))
    largest_length = np.minimum(length * (1 + spread), np.minimum(seen_length, capacity))
    linear_length = linear / quadratic  # at which attention costs as much as all matmuls
    largest_ratio = (linear_length + largest_length) / (linear_length + length)
    wait = 1 + ALIGNED * np.maximum(largest_ratio - 1, 0.0)
    wait = np.where((candidates.zero == 3) & (micros > 1), wait, 1.0)

    seconds = step_seconds(cost, candidates, micros, pack_tokens, pack_pairs)
    group_s = seconds.group * unevenness(spec, candidates) * wait * probability
    return GroupSeconds(np.where(load.documents > 0, group_s, 0.0), seconds.once)


def step_seconds(
    cost: Cost,
    candidates: Candidates,
    micros: np.ndarray,
    tokens: np.ndarray,
    pairs: np.ndarray,
) -> GroupSeconds:
    """Seconds of a step with `micros` micro-batches a replica.

    `tokens`, `pairs`: of each pack; causal pairs of tokens, the sum of n^2/2.
    """
    constants = cost.rates.constants
    layers = cost.sizes.layers
    pp = candidates.pp
    virtual = candidates.virtual
    zero = candidates.zero
    mesh = Mesh.of(candidates)
    weights = _weight_traffic(cost, candidates)
    block = _block_seconds(cost, mesh, candidates, weights, micros, tokens, pairs)
    head_s, embeddings_s = _end_seconds(cost, mesh, candidates, tokens, pairs)

    # 1. Units of the slowest stage. The last one has fewer blocks, and the head.
    blocks = virtual * np.ceil(layers / (pp * virtual))
    fewer_blocks = virtual * np.floor(layers / (pp * virtual)) - blocks
    last_stage_s = head_s + fewer_blocks * block.seconds
    ends_s = np.where(pp > 1, np.maximum(embeddings_s, last_stage_s), head_s + embeddings_s)
    slot_s = blocks * block.seconds + ends_s

    # 2. The pipeline.
    other_stages_s = np.maximum(0.0, layers * block.seconds + head_s + embeddings_s - slot_s)
    stall_s = stalled_s(micros, pp, virtual, blocks * block.forward_s, blocks * block.backward_s)
    fill_s = other_stages_s / virtual + stall_s
    messages_s = 2 * (pp - 1.0) * _message_s(cost, candidates, tokens) * constants.messages

    # 3. What a step gathers and reduces once, under the first forward and the last backward.
    first_s = blocks * block.forward_window_s
    last_s = (blocks - 1) * block.backward_window_s
    gathered_s, reduced_s, coded_s = weights.once(zero, blocks)
    gathered_exposed_s = np.maximum(0.0, gathered_s - first_s)
    last_unit_s = reduced_s / np.maximum(blocks, 1)
    reduced_exposed_s = np.maximum(last_unit_s, np.maximum(0.0, reduced_s - last_s))
    holders = candidates.state_holders(cost.spec.experts > 0)
    trained = weights.trained(blocks) / np.where(zero >= 1, holders, 1)
    optimizer_bytes = trained * update_bytes(cost.habits.moments) * constants.update
    optimizer_s = cost.rates.elementwise_s(optimizer_bytes) + constants.begin_s

    # 4. Hidden traffic crowds the device; ranks wait for the slowest of them.
    per_node = cost.rates.fabric.per_node
    token_crowd = cost.rates.crowd(candidates.sequence > per_node)
    weight_crowd = cost.rates.crowd(candidates.sequence * candidates.dp > per_node)
    crowded_block_s = token_crowd * block.hidden_tokens_s + weight_crowd * block.hidden_weights_s
    hidden_once_s = gathered_s - gathered_exposed_s + reduced_s - reduced_exposed_s
    wait = 1 + constants.jitter * np.log2(np.maximum(candidates.world, 1))

    pipeline_s = np.where(pp > 1, fill_s + messages_s, 0.0)
    group_s = micros * slot_s + pipeline_s + micros * blocks * crowded_block_s
    once_s = gathered_exposed_s + reduced_exposed_s + coded_s + optimizer_s
    once_s += weight_crowd * hidden_once_s
    return GroupSeconds(group_s * wait, once_s * wait)


def stalled_s(
    micros: np.ndarray,
    pp: np.ndarray,
    virtual: np.ndarray,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
) -> np.ndarray:
    """Seconds that an interleaved order loses where pp does not divide its micro-batches.

    The chunks of a group that is not full wait for each other.

    `forward_s`, `backward_s`: of a micro-batch on a stage.
    """
    remainder = micros % pp
    # Where full groups come first, they fill the gaps of the last group's forward.
    alone_s = np.where(micros < pp, forward_s, 0.0)
    lost_s = (pp - remainder) * (virtual - 1) / virtual * (backward_s + alone_s)
    return np.where((virtual > 1) & (remainder > 0), lost_s, 0.0)


class _OnceSeconds(NamedTuple):
    """Seconds of gathers, of reductions, and of coding both for the wire, float64 [candidates]."""

    gathered_s: np.ndarray
    reduced_s: np.ndarray
    coded_s: np.ndarray


@dataclass(frozen=True, eq=False)
class _WeightTraffic:
    """Seconds of what happens to the weights of a block, float64 [candidates].

    elements                        a rank's weights of a block
    ends                            its weights of embeddings and head, over `elements`
    trained_shares                  trained share of a block, and of the ends
    gather_s                        to gather the weights
    reduce_s, all_reduce_s          to sum gradients at their owners, and on all ranks
    gather_coded_s, reduce_coded_s  to code either for the wire
    """

    elements: np.ndarray
    ends: np.ndarray
    trained_shares: tuple[float, float]
    gather_s: np.ndarray
    reduce_s: np.ndarray
    all_reduce_s: np.ndarray
    gather_coded_s: np.ndarray
    reduce_coded_s: np.ndarray

    def trained(self, blocks: np.ndarray) -> np.ndarray:
        """Trained weights of a rank."""
        block_share, ends_share = self.trained_shares
        return self.elements * (blocks * block_share + self.ends * ends_share)

    def once(self, zero: np.ndarray, blocks: np.ndarray) -> _OnceSeconds:
        """Seconds of what is gathered and reduced once a step."""
        # ZeRO-1 and 2 gather all units after the update, ZeRO-3 the ends of the model.
        units = blocks + self.ends
        gathered_ends = np.where(zero == 3, self.ends, 0.0)
        gathered = np.where((zero == 1) | (zero == 2), units, gathered_ends)
        reduced = np.where(zero == 1, units, self.ends)
        all_reduce_s = units * self.all_reduce_s
        coded_s = gathered * self.gather_coded_s
        return _OnceSeconds(
            gathered_s=gathered * self.gather_s,
            reduced_s=np.where(zero == 0, all_reduce_s, reduced * self.reduce_s),
            coded_s=coded_s + np.where(zero == 0, 0.0, reduced) * self.reduce_coded_s,
        )


def _weight_traffic(cost: Cost, candidates: Candidates) -> _WeightTraffic:
    sizes = cost.sizes
    habits = cost.habits
    rates = cost.rates
    holders = candidates.state_holders(cost.spec.experts > 0)
    elements = np.asarray(sizes.rank_elements(candidates.weight_ranks))
    num_ends = np.where(candidates.pp > 1, 1.0, 2.0 - sizes.tied)
    strides = candidates.world / candidates.pp / holders
    per_node = np.maximum(1, rates.fabric.per_node / strides)
    weight_bytes = elements * rates.element_bytes * habits.gathered
    gradient_bytes = elements * habits.gradient_bytes * habits.reduced * sizes.trained
    # The owner decodes coded gradients before it sums them.
    reduce = "all_to_all" if habits.reduce_coded > 0 else "reduce_scatter"

    def coded_s(element_bytes: float) -> np.ndarray:
        if not element_bytes:
            return np.zeros(len(candidates))
        return np.where(holders > 1, rates.elementwise_s(elements * element_bytes), 0.0)

    return _WeightTraffic(
        elements=elements,
        ends=num_ends * sizes.head_elements / sizes.block_elements,
        trained_shares=(sizes.trained, sizes.head_trained),
        gather_s=rates.collective_s("all_gather", weight_bytes, holders, per_node),
        reduce_s=rates.collective_s(reduce, gradient_bytes, holders, per_node),
        all_reduce_s=rates.collective_s("all_reduce", gradient_bytes, holders, per_node),
        gather_coded_s=coded_s(habits.gather_coded),
        reduce_coded_s=coded_s(habits.reduce_coded * sizes.trained),
    )


@dataclass(frozen=True, eq=False)
class _BlockSeconds:
    """Seconds of a block on one pack, float64 [candidates].

    forward_s, backward_s                 with the traffic that they do not hide;
                                          recomputation is the backward's
    forward_window_s, backward_window_s   in which links are free
    hidden_tokens_s, hidden_weights_s     traffic under computation
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    forward_window_s: np.ndarray
    backward_window_s: np.ndarray
    hidden_tokens_s: np.ndarray
    hidden_weights_s: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        return self.forward_s + self.backward_s


def _block_seconds(
    cost: Cost,
    mesh: Mesh,
    candidates: Candidates,
    weights: _WeightTraffic,
    micros: np.ndarray,
    tokens: np.ndarray,
    pairs: np.ndarray,
) -> _BlockSeconds:
    # 1. The turns, and the seconds of each in which links are free.
    forward = cost.turn("block", "forward", "block", mesh, tokens, pairs)
    recompute = cost.again(forward, candidates.recompute)
    backward = cost.turn("block", "backward", "block", mesh, tokens, pairs)
    trained = cost.sizes.block_elements * cost.sizes.trained
    backward = backward + cost.accumulated(mesh, trained)

    def turn_seconds(work: Work) -> tuple[np.ndarray, np.ndarray]:
        exposed_s = work.exposed_s(cost.launch_s)
        free_s = np.maximum(0.0, exposed_s - work.waited_s - work.under_attention_s)
        return exposed_s, free_s

    forward_s, forward_free_s = turn_seconds(forward)
    recompute_s, recompute_free_s = turn_seconds(recompute)
    backward_s, backward_free_s = turn_seconds(backward)
    backward_free_s = recompute_free_s + backward_free_s

    # 2. A block's gathers travel under the block before. Its reduction has what they leave of the
    #    backward, and of the next forward.
    is_gathered = candidates.zero == 3
    is_reduced = candidates.zero >= 2
    gather_s = np.where(is_gathered, weights.gather_s, 0.0)
    reduce_s = np.where(is_reduced, weights.reduce_s, 0.0)
    forward_exposed_s = np.maximum(0.0, gather_s - forward_free_s)
    backward_exposed_s = np.maximum(0.0, gather_s - backward_free_s)
    forward_window_s = np.maximum(0.0, forward_free_s - gather_s)
    backward_window_s = np.maximum(0.0, backward_free_s - gather_s)
    last_exposed_s = np.maximum(0.0, reduce_s - backward_window_s)  # no forward follows
    reduce_exposed_s = np.maximum(0.0, reduce_s - (forward_window_s + backward_window_s))
    reduce_exposed_s = reduce_exposed_s + (last_exposed_s - reduce_exposed_s) / micros

    # 3. What travels in another format is coded on the device.
    gather_coded_s = np.where(is_gathered, weights.gather_coded_s, 0.0)
    reduce_coded_s = np.where(is_reduced, weights.reduce_coded_s, 0.0)
    turns = (forward, recompute, backward)
    hidden_tokens_s = sum(np.minimum(turn.under_attention_s, turn.attention_s) for turn in turns)
    total_backward_s = recompute_s + backward_s + backward_exposed_s + reduce_exposed_s
    total_backward_s = total_backward_s + gather_coded_s + reduce_coded_s
    hidden_gathers_s = 2 * gather_s - (forward_exposed_s + backward_exposed_s)
    return _BlockSeconds(
        forward_s=forward_s + forward_exposed_s + gather_coded_s,
        backward_s=total_backward_s,
        forward_window_s=forward_window_s,
        backward_window_s=np.maximum(0.0, backward_window_s - reduce_s),
        hidden_tokens_s=np.asarray(hidden_tokens_s),
        hidden_weights_s=hidden_gathers_s + reduce_s - reduce_exposed_s,
    )


def _end_seconds(
    cost: Cost,
    mesh: Mesh,
    candidates: Candidates,
    tokens: np.ndarray,
    pairs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the head with the loss, and of the embeddings, on one pack."""
    trained = cost.sizes.head_elements * cost.sizes.head_trained
    rows = tokens / candidates.sequence
    # Each block of the loss adds its gradients of the head to their sum.
    loss_blocks = np.ceil(rows / rows_at_once(rows, cost.spec.width, cost.spec.vocab))
    head = cost.turn("head", "loss", "", mesh, tokens, pairs)
    head = head + cost.accumulated(mesh, trained).times(loss_blocks)
    embeddings = cost.accumulated(mesh, trained, embeddings=True)
    for turn in ("forward", "backward"):
        embeddings = embeddings + cost.turn("embeddings", turn, "embed", mesh, tokens, pairs)
    head_s = head.compute_s(cost.launch_s) + head.waited_s
    return head_s, embeddings.compute_s(cost.launch_s) + embeddings.waited_s


def _message_s(cost: Cost, candidates: Candidates, tokens: np.ndarray) -> np.ndarray:
    """Seconds of one residual stream to the next stage."""
    # Each rank sends its share through its own card.
    rank_tokens = tokens / candidates.sequence
    size_bytes = rank_tokens * cost.spec.width * cost.rates.element_bytes
    stage_ranks = candidates.sequence * candidates.dp
    per_node = np.where(stage_ranks < cost.rates.fabric.per_node, 2, 1)
    return cost.rates.collective_s("send", size_bytes, 2, per_node)
