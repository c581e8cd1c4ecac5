"""Rate cards: seconds of groups of documents under arrays of candidates at once.

A rank computes micro-batches on the slowest stage, waits while the pipeline fills and drains, and updates:

    group = micro-batches * slot + filling + stalls + messages
    once  = gathers and reductions that a step has once + optimizer

    slot: forward, recomputation and backward of a stage's units, and the traffic that they do not hide

What a turn takes is `simulate.cost`'s, what hides what is the program's: ZeRO-3 gathers a unit under the one before, gradients are
reduced under the backward, keys travel under attention. For even stages a slot is that of the clock, which has the last word.

Of a group only sums over its documents are known. A step has the group with probability p = 1 - exp(-documents). Where it has, the busiest
replica has its share of the tokens, or one document if that is more, in packs that are not quite full.
"""

from dataclasses import dataclass

import numpy as np

from longshift.layout.loss_rows import rows_at_once
from longshift.planner.candidates import Candidates, unevenness
from longshift.simulate.clock import update_bytes
from longshift.simulate.cost import Cost, Mesh, Work

AT_ONCE = 8192  # candidates in one array; of 30,000 in one, each took a third longer
UNFILLED = 0.25  # of a document's length, that a pack leaves empty at its end: assumed
# What is left of the wait for the dearest pack: dp8.ring2.u2 and dp4.u8 of 13B on real draws of lognormal(6.5, 1.65) take 6 to 8 % longer
# under ZeRO-2 and 3 than replicas that wait at the end, and packs dealt at random would take 30 %.
ALIGNED = 0.25


@dataclass(frozen=True)
class Load:
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

    def take(self, index: np.ndarray | slice) -> "Load":
        """Those of some of the groups."""
        return Load(**{name: values[index] for name, values in vars(self).items()})

    @property
    def probability(self) -> np.ndarray:
        """That a step has a document of the group."""
        return -np.expm1(-np.asarray(self.documents, dtype=float))


@dataclass(frozen=True, eq=False)
class GroupSeconds:
    """Float64 [candidates]. `group`: of a mean step's documents; `once`: of a step besides, however many groups it has."""

    group: np.ndarray
    once: np.ndarray


def group_seconds(cost: Cost, at: Candidates, capacity: np.ndarray | float, load: Load) -> GroupSeconds:
    """Expected seconds of groups of documents, one for each candidate, in packs of up to `capacity` tokens."""
    shape = (len(at),)
    capacity = np.broadcast_to(np.asarray(capacity, dtype=float), shape)
    load = Load(**{name: np.broadcast_to(values, shape) for name, values in vars(load).items()})
    group, once = np.zeros(shape), np.zeros(shape)
    for start in range(0, len(at), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        group[part], once[part] = _group_seconds(cost, at.take(part), capacity[part], load.take(part))
    return GroupSeconds(group, once)


def _group_seconds(cost: Cost, at: Candidates, capacity: np.ndarray, load: Load) -> tuple[np.ndarray, np.ndarray]:
    spec = cost.spec
    linear = spec.flops_per_token(0)
    quadratic = spec.flops_per_token(0.5) - linear
    tokens = np.maximum(load.tokens, 1e-9)
    probability = np.maximum(load.probability, 1e-9)
    mean_length = load.squares / tokens  # of the document that a token is in
    document = tokens / np.maximum(load.documents, 1e-9)
    longest = np.maximum(load.longest, document)
    seen = 2 * spec.attended(longest) / np.maximum(longest, 1e-9)  # the longest document's length, as far as it is seen

    # 1. Packs of the busiest replica.
    share = load.tokens / probability / at.dp
    is_alone = longest * (linear + quadratic * seen) > share * (linear + quadratic * mean_length)
    filled = np.where(2 * document > capacity, document, capacity - UNFILLED * mean_length)  # two long documents do not fit one pack
    full_packs = np.maximum(1.0, np.ceil(share / filled - 1e-9))
    micros = np.where(is_alone, 1.0, full_packs)
    pack_tokens = np.maximum(np.where(is_alone, longest, share / micros), 1.0)
    pairs = pack_tokens * np.where(is_alone, seen, mean_length) / 2

    # 2. Under ZeRO-3 every micro-batch waits for the dearest of dp packs: sqrt(2 ln dp) deviations above the mean, at most one
    # document, of which ALIGNED is left as replicas come to their dearest packs together.
    spread = np.sqrt(load.fourths / np.maximum(load.squares, 1e-9) / np.maximum(mean_length * capacity, 1.0)) * np.sqrt(2 * np.log(at.dp))
    flat = linear / quadratic
    dearest = (flat + np.minimum(mean_length * (1 + spread), np.minimum(seen, capacity))) / (flat + mean_length)
    waits = np.where((at.zero == 3) & (micros > 1), 1 + ALIGNED * np.maximum(dearest - 1, 0.0), 1.0)

    seconds = step_seconds(cost, at, micros, pack_tokens, pairs)
    group = seconds.group * unevenness(spec, at) * waits * probability
    return np.where(load.documents > 0, group, 0.0), seconds.once


def step_seconds(cost: Cost, at: Candidates, micros: np.ndarray, tokens: np.ndarray, pairs: np.ndarray) -> GroupSeconds:
    """Seconds of a step with `micros` micro-batches a replica, of packs of so many `tokens` and causal `pairs` (sum of n^2/2)."""
    constants, sizes = cost.rates.constants, cost.sizes
    mesh = Mesh.of(at)
    blocks = at.virtual * np.ceil(sizes.layers / (at.pp * at.virtual))  # of the slowest stage
    weights = _weight_traffic(cost, at)
    block = _block(cost, mesh, at, weights, micros, tokens, pairs)

    # 1. Units of the slowest stage; the last one has fewer blocks, and the head.
    head_s, embeddings_s = _ends(cost, mesh, at, tokens, pairs)
    fewer_blocks = at.virtual * np.floor(sizes.layers / (at.pp * at.virtual)) - blocks
    ends_s = np.where(at.pp > 1, np.maximum(embeddings_s, head_s + fewer_blocks * block.seconds), head_s + embeddings_s)
    slot_s = blocks * block.seconds + ends_s

    # 2. The pipeline.
    others_s = np.maximum(0.0, sizes.layers * block.seconds + head_s + embeddings_s - slot_s)
    fill_s = others_s / at.virtual + stalled_s(micros, at.pp, at.virtual, blocks * block.forward_s, blocks * block.backward_s)
    messages_s = 2 * (at.pp - 1.0) * _message_s(cost, at, tokens) * constants.messages

    # 3. What a step gathers and reduces once, under the first forward and the last backward.
    first_s = blocks * block.forward_window_s
    last_s = (blocks - 1) * block.backward_window_s
    gathered_s, reduced_s = weights.once(at.zero, blocks)
    gathered_shown_s = np.maximum(0.0, gathered_s - first_s)
    reduced_shown_s = np.maximum(reduced_s / np.maximum(blocks, 1), np.maximum(0.0, reduced_s - last_s))
    trained = weights.trained(blocks) / np.where(at.zero >= 1, at.holders, 1)
    optimizer_s = cost.rates.elementwise_s(trained * update_bytes() * constants.update) + constants.begin_s

    # 4. Hidden traffic crowds the device; ranks wait for the slowest of them.
    per_node = cost.rates.fabric.per_node
    crowd_of_tokens = cost.rates.crowd(at.sequence > per_node)
    crowd_of_weights = cost.rates.crowd(at.sequence * at.dp > per_node)
    crowded_s = micros * blocks * (crowd_of_tokens * block.hidden_tokens_s + crowd_of_weights * block.hidden_weights_s)
    crowded_once_s = crowd_of_weights * (gathered_s - gathered_shown_s + reduced_s - reduced_shown_s)
    waits = 1 + constants.jitter * np.log2(np.maximum(at.world, 1))
    group_s = micros * slot_s + np.where(at.pp > 1, fill_s + messages_s, 0.0) + crowded_s
    once_s = gathered_shown_s + reduced_shown_s + weights.coded_once(at.zero, blocks) + optimizer_s + crowded_once_s
    return GroupSeconds(group_s * waits, once_s * waits)


def stalled_s(micros: np.ndarray, pp: np.ndarray, virtual: np.ndarray, forward_s: np.ndarray, backward_s: np.ndarray) -> np.ndarray:
    """Seconds that an interleaved order loses where pp does not divide its micro-batches, each of which a stage computes in `forward_s` and
    `backward_s`: the chunks of a group that is not full wait for each other. Where full groups come first, they fill its forward's gaps."""
    left = micros % pp
    alone_s = np.where(micros < pp, forward_s, 0.0)
    return np.where((virtual > 1) & (left > 0), (pp - left) * (virtual - 1) / virtual * (backward_s + alone_s), 0.0)


@dataclass(frozen=True, eq=False)
class _WeightTraffic:
    """Seconds to gather the weights of a block, to sum its gradients at their owners and on all ranks, and to code either for the wire.
    `elements`: a rank's weights of a block; `ends`: those of embeddings and head over these; `trained_shares`: of both."""

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
        in_blocks, in_ends = self.trained_shares
        return self.elements * (blocks * in_blocks + self.ends * in_ends)

    def once(self, zero: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is gathered and reduced once a step: ZeRO-1 and 2 gather all, 0 and 1 reduce all. The ends of the model are left."""
        units = blocks + self.ends
        gather_s = self._gathered_once(zero, units) * self.gather_s
        reduce_s = np.where(zero == 0, units * self.all_reduce_s, np.where(zero == 1, units, self.ends) * self.reduce_s)
        return gather_s, reduce_s

    def coded_once(self, zero: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Of coding what travels once a step."""
        units = blocks + self.ends
        reduced = np.where(zero == 0, 0.0, np.where(zero == 1, units, self.ends))
        return self._gathered_once(zero, units) * self.gather_coded_s + reduced * self.reduce_coded_s

    def _gathered_once(self, zero: np.ndarray, units: np.ndarray) -> np.ndarray:
        return np.where((zero == 1) | (zero == 2), units, np.where(zero == 3, self.ends, 0.0))


def _weight_traffic(cost: Cost, at: Candidates) -> _WeightTraffic:
    sizes, habits, rates = cost.sizes, cost.habits, cost.rates
    elements = sizes.block_elements / at.weight_ranks
    ends = np.where(at.pp > 1, 1.0, 2.0 - sizes.tied) * sizes.head_elements / sizes.block_elements
    per_node = np.maximum(1, rates.fabric.per_node / at.weight_ranks)
    gradient_bytes = elements * habits.gradient_bytes * habits.reduced * sizes.trained
    is_coded = habits.reduce_coded > 0  # then gradients go by an all-to-all
    all_reduce_s = rates.collective_s("all_reduce", gradient_bytes, at.holders, per_node)
    gather_s = rates.collective_s("all_gather", elements * rates.element_bytes * habits.gathered, at.holders, per_node)
    reduce_s = rates.collective_s("all_to_all" if is_coded else "reduce_scatter", gradient_bytes, at.holders, per_node)

    def coded_s(element_bytes: float) -> np.ndarray:
        return np.where(at.holders > 1, rates.elementwise_s(elements * element_bytes), 0.0) if element_bytes else np.zeros(len(at))

    return _WeightTraffic(
        elements=elements,
        ends=ends,
        trained_shares=(sizes.trained, sizes.head_trained),
        gather_s=gather_s,
        reduce_s=reduce_s,
        all_reduce_s=all_reduce_s,
        gather_coded_s=coded_s(habits.gather_coded),
        reduce_coded_s=coded_s(habits.reduce_coded * sizes.trained),
    )


@dataclass(frozen=True, eq=False)
class _Block:
    """Seconds of a block on one pack.

    forward_s, backward_s                 with the traffic that they do not hide; recomputation is the backward's
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


def _block(
    cost: Cost, mesh: Mesh, at: Candidates, weights: _WeightTraffic, micros: np.ndarray, tokens: np.ndarray, pairs: np.ndarray
) -> _Block:
    forward = cost.turn("block", "forward", "block", mesh, tokens, pairs)
    again = cost.again(forward, at.recompute)
    backward = cost.turn("block", "backward", "block", mesh, tokens, pairs)
    backward = backward + cost.accumulated(mesh, cost.sizes.block_elements * cost.sizes.trained)
    turns = forward, again, backward
    forward_s, again_s, backward_s = (turn.exposed_s(cost.launch_s) for turn in turns)
    free_s = [
        np.maximum(0.0, turn_s - turn.waited_s - turn.under_attention_s) for turn, turn_s in zip(turns, (forward_s, again_s, backward_s))
    ]

    # A block's gathers travel under the block before. Its reduction has what they leave of the backward, and of the next forward.
    gather_s = np.where(at.zero == 3, weights.gather_s, 0.0)
    reduce_s = np.where(at.zero >= 2, weights.reduce_s, 0.0)
    windows = free_s[0], free_s[1] + free_s[2]
    gathers_shown = [np.maximum(0.0, gather_s - window) for window in windows]
    left = [np.maximum(0.0, window - gather_s) for window in windows]
    last_shown_s = np.maximum(0.0, reduce_s - left[1])
    shown_s = np.maximum(0.0, reduce_s - sum(left))
    reduce_shown_s = shown_s + (last_shown_s - shown_s) / micros

    gather_coded_s = np.where(at.zero == 3, weights.gather_coded_s, 0.0)
    reduce_coded_s = np.where(at.zero >= 2, weights.reduce_coded_s, 0.0)
    return _Block(
        forward_s=forward_s + gathers_shown[0] + gather_coded_s,
        backward_s=again_s + backward_s + gathers_shown[1] + reduce_shown_s + gather_coded_s + reduce_coded_s,
        forward_window_s=left[0],
        backward_window_s=np.maximum(0.0, left[1] - reduce_s),
        hidden_tokens_s=np.asarray(sum(np.minimum(turn.under_attention_s, turn.attention_s) for turn in turns)),
        hidden_weights_s=2 * gather_s - sum(gathers_shown) + reduce_s - reduce_shown_s,
    )


def _ends(cost: Cost, mesh: Mesh, at: Candidates, tokens: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the head with the loss, and of the embeddings, on one pack."""
    table = cost.sizes.head_elements * cost.sizes.head_trained
    rows = tokens / at.sequence
    loss_blocks = np.ceil(rows / rows_at_once(rows, cost.spec.width, cost.spec.vocab))
    head = cost.turn("head", "loss", "", mesh, tokens, pairs) + cost.accumulated(mesh, table).times(loss_blocks)
    embeddings = cost.accumulated(mesh, table, embeddings=True)
    for turn in ("forward", "backward"):
        embeddings = embeddings + cost.turn("embeddings", turn, "embed", mesh, tokens, pairs)

    def seconds(work: Work) -> np.ndarray:
        return work.compute_s(cost.launch_s) + work.waited_s

    return seconds(head), seconds(embeddings)


def _message_s(cost: Cost, at: Candidates, tokens: np.ndarray) -> np.ndarray:
    """Seconds of one residual stream to the next stage: each rank sends its share through its own card."""
    size_bytes = tokens / at.sequence * cost.spec.width * cost.rates.element_bytes
    ranks_of_stage = at.sequence * at.dp
    near = np.where(ranks_of_stage < cost.rates.fabric.per_node, 2, 1)
    return cost.rates.collective_s("send", size_bytes, 2, near)


def switch_seconds(cost: Cost, at: Candidates, ahead_bytes: float) -> np.ndarray:
    """Seconds that entering each layout's cut takes and bringing its gradients home, float64 [candidates]: every rank gets its weights from
    all others and gives sums back. A slice goes to a node once and is passed on inside it. `ahead_bytes` of weights travel hidden."""
    sizes, fabric, spec = cost.sizes, cost.rates.fabric, cost.spec
    world = at.world
    wanted = (spec.layers * sizes.block_elements + (2.0 - spec.tied) * sizes.head_elements) / at.pp / at.weight_ranks
    per_node = np.minimum(fabric.per_node, world)
    nodes = np.ceil(world / per_node)
    distinct = (
        np.minimum(per_node, np.where(world / at.pp < per_node, at.weight_ranks * per_node * at.pp / world, at.weight_ranks)) / per_node
    )

    def moved_s(size_bytes: np.ndarray) -> np.ndarray:
        inside = size_bytes * (per_node - 1) / per_node / fabric.node_bytes_per_s
        between = size_bytes * distinct * (nodes - 1) / nodes / fabric.network_bytes_per_s
        return np.maximum(inside, between)

    weights = cost.rates.element_bytes * wanted
    hidden = np.minimum(1.0, ahead_bytes / np.maximum(weights, 1.0))
    return moved_s(weights) * (1 - hidden) + moved_s(cost.habits.gradient_bytes * wanted)
