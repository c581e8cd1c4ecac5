"""Seconds of a turn of a block by formulas, for trainers that cannot be recorded: numbers or arrays of models and meshes.

Longshift's own turns are recorded from the code that trains (`simulate.cost`). Published steps are of other trainers, whose kernels are
only known from papers. A turn is a list of operations: matmuls, attention, elementwise bytes, launches. Each takes the longer of its
arithmetic and its memory traffic; a turn takes the longer of their sum and of its launches.

    forward    qkv [T, D, A+2B]  attention  o [T, A, D]   gate, up [T, D, F]  down [T, F, D]     each 1/tp, T of one rank of u and ring
    backward   each matmul twice: its input's gradient and its weight's; attention 2.5 times

Letters: T tokens, D model width, A query heads * head width, B key/value heads * head width, F feed-forward width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from longshift.cluster.cluster import Number
from longshift.model.packed_attention import EVEN, LONG
from longshift.simulate.cost import CUDNN_GAINS, RECOMPUTE, REST
from longshift.simulate.mesh import Mesh
from longshift.simulate.rates import Rates
from longshift.simulate.work import Work
from longshift.spec.model import ModelSpec

Half = Literal["attention half", "mlp half"]
UnitKind = Literal["embeddings", "block", "head"]

# Elements read and written by the elementwise operations of a block's forward, as multiples of D, A and F a token: norms (read, write and
# a float32 copy), residual sums (two reads, a write), rotary angles and head layouts, activation and gate. Compiled: fused into one kernel
# between two matmuls. `norm`: of D, a norm beyond a block's two; of A + B, norms of queries and keys. Backward: read the input again and
# write its gradient.
EAGER = {"wide": 14.0, "inner": 8.0, "gated": 5.0, "plain": 3.0, "norm": 4.0}
COMPILED = {"wide": 9.0, "inner": 5.0, "gated": 3.0, "plain": 2.0, "norm": 2.0}
BACKWARD = 1.6
# Bytes a score of unfused attention: the product's write, masked softmax, dropout with its mask, the product's read; and their gradients.
SCORE_BYTES = {"forward": 13.0, "backward": 18.0}
LOGIT_FUSED_BYTES = 8.0  # the product, read for its maxima, its sums of exponentials and its gradient, which is written
LOGIT_BYTES = 26.0  # bf16 product, float32 copy, log-softmax, its gradient in float32 and bf16: reads and writes, forward and backward
KERNELS = {"eager": 30.0, "compiled": 14.0, "unfused": 5.0}  # launches of a block's forward; backward twice as many
# Of each norm beyond a block's two: a block of Qwen3, with norms of queries and of keys, has 174 operations both ways, of Llama 126.
NORM_KERNELS = {"eager": 8.0, "compiled": 3.0}
EMBEDDINGS_KERNELS, HEAD_KERNELS = 6.0, 20.0  # of a turn


@dataclass(frozen=True)
class Sizes:
    """A model in numbers or arrays of them. `inner`: query heads * head width; `keys`: key/value heads * head width; `gated`, `tied`: 0
    or 1. `trained`: trained weights of a block over those of its matmuls; `head_trained`: the same of the head. `norms`: of a block's
    residual stream; `head_norms`: 1 where queries and keys have norms."""

    layers: Number
    width: Number
    heads: Number
    inner: Number
    keys: Number
    ffn: Number
    vocab: Number
    gated: Number
    tied: Number
    trained: Number = 1.0
    head_trained: Number = 1.0
    norms: Number = 2.0
    head_norms: Number = 0.0
    idle_elements: Number = 0  # of experts, which no published trainer here has

    @classmethod
    def of(cls, spec: ModelSpec) -> "Sizes":
        """Of a model that is trained whole."""
        inner, keys = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
        norms = {"norms": 4.0 if spec.norm_place == "both" else 2.0, "head_norms": float(spec.qk_norm or spec.qk_norm_whole)}
        return cls(spec.layers, spec.width, spec.heads, inner, keys, spec.ffn, spec.vocab, float(spec.gated), float(spec.tied), **norms)

    @property
    def block_elements(self) -> Number:
        """Weights of a block's matmuls."""
        return self.width * (2 * self.inner + 2 * self.keys + (2 + self.gated) * self.ffn)

    @property
    def head_elements(self) -> Number:
        return self.width * self.vocab


@dataclass(frozen=True)
class Trainer:
    """What another trainer does: 1 or 0, shares, or arrays of them.

    compiled             elementwise operations of norms, rotary embedding, gates and the loss are one kernel each
    sequence_parallel    tensor-parallel ranks share the tokens of norms and residuals
    tensor_hidden        tensor traffic travels under the matmuls that make it (asynchronous tensor parallelism)
    gather_hidden        weights are gathered one unit ahead, else before each
    reduce_hidden        gradients travel under the backward that makes them
    messages_hidden      a stage computes while its messages travel
    ring_hidden          keys and values travel under attention
    gradient_bytes       of an element of gradient sums
    gathered, reduced    bytes of weights, and of gradient sums, on the wire over those where they are kept
    gather_coded, reduce_coded                bytes that a rank reads and writes for each element that it gathers, or reduces, in another
                         format than it is kept in; then gradients go by an all-to-all
    accumulated          gradients of matmuls are added to their sum in a pass of its own, else where they are made
    embeddings_accumulated    gradients of embeddings are
    shard_group          ranks that share one copy of the weights under ZeRO-3 (hybrid sharding); 0: all
    rounded              matmuls of blocks take factors of eight bits
    cudnn                attention to long documents goes to a faster kernel (CUDNN_GAINS)
    flash                attention in one kernel, else scores go through memory
    selective_matmuls, selective_attention    share of a block's matmuls, and of attention, that recompute selective computes again
    full_attention       share of attention that recompute full computes again
    forward_gain, backward_gain               times the speed of a preset's attention kernel, FlashAttention-2 (as in CUDNN_GAINS)
    fused_loss           cross entropy and its gradient are compiled
    """

    compiled: Number = 0.0
    sequence_parallel: Number = 1.0
    tensor_hidden: Number = 0.0
    gather_hidden: Number = 1.0
    reduce_hidden: Number = 1.0
    messages_hidden: Number = 0.0
    ring_hidden: Number = 1.0
    gradient_bytes: Number = 4.0
    gathered: Number = 1.0
    reduced: Number = 1.0
    gather_coded: Number = 0.0
    reduce_coded: Number = 0.0
    accumulated: Number = 0.0
    embeddings_accumulated: Number = 0.0
    shard_group: Number = 0.0
    rounded: Number = 0.0
    cudnn: Number = 0.0
    flash: Number = 1.0
    selective_matmuls: Number = 0.0
    selective_attention: Number = 1.0
    full_attention: Number = 0.0
    forward_gain: Number = 1.0
    backward_gain: Number = 1.0
    fused_loss: Number = 0.0


@dataclass(frozen=True)
class FormulaCost:
    """Work of turns of one model on one kind of device under one trainer's habits."""

    sizes: Sizes
    rates: Rates
    habits: Trainer = Trainer()

    @property
    def launch_s(self) -> Number:
        """Seconds of a launch."""
        return self.rates.launch_s

    def turn(
        self, kind: UnitKind, turn: str, part: str, mesh: Mesh, tokens: Number, pairs: Number, recompute: int = 0, loss_blocks: Number = 1
    ) -> Work:
        """Work of a turn of a unit, as of `simulate.cost.Cost.turn`."""
        if kind == "embeddings":
            return self.embeddings(mesh, tokens, turn == "backward")
        if kind == "head":
            return self.head(mesh, np.asarray(tokens) / loss_blocks)
        of = self.backward if turn == "backward" else self.forward
        return of("attention half", mesh, tokens, pairs) + of("mlp half", mesh, tokens, pairs)

    def forward(self, half: Half, mesh: Mesh, tokens: Number, pairs: Number) -> Work:
        """Of half a block, forward."""
        s, rows = self.sizes, _rows(mesh, tokens)
        tensor_s = self._tensor_s(mesh, rows)
        if half == "mlp half":
            matmul_s = self._linear_s(rows, s.width, (1 + s.gated) * s.ffn / mesh.degrees["tp"])
            matmul_s = matmul_s + self._linear_s(rows, s.ffn / mesh.degrees["tp"], s.width)
            return Work(matmul_s, 0.0, self._elementwise_s(mesh, rows, half), self._kernels(mesh, half), {"tp": tensor_s})
        matmul_s = self._linear_s(rows, s.width, (s.inner + 2 * self._keys(mesh)) / mesh.degrees["tp"])
        matmul_s = matmul_s + self._linear_s(rows, s.inner / mesh.degrees["tp"], s.width)
        attention_s = self.attention_s(mesh, tokens, pairs, False)
        ring_s = self._ring_s(mesh, tokens, False)
        elementwise_s = self._elementwise_s(mesh, rows, half)
        return Work(
            matmul_s,
            attention_s,
            elementwise_s,
            self._kernels(mesh, half),
            {"tp": tensor_s, "ulysses": self._ulysses_s(mesh, rows), "ring": ring_s},
        )

    def backward(self, half: Half, mesh: Mesh, tokens: Number, pairs: Number) -> Work:
        """Of half a block, backward: gradients of inputs and of weights."""
        s, rows = self.sizes, _rows(mesh, tokens)
        elementwise_s, tensor_s = BACKWARD * self._elementwise_s(mesh, rows, half), self._tensor_s(mesh, rows)
        if half == "mlp half":
            matmul_s = self._linear_back_s(rows, s.width, (1 + s.gated) * s.ffn / mesh.degrees["tp"])
            matmul_s = matmul_s + self._linear_back_s(rows, s.ffn / mesh.degrees["tp"], s.width)
            return Work(matmul_s, 0.0, elementwise_s, 2 * self._kernels(mesh, half), {"tp": tensor_s})
        matmul_s = self._linear_back_s(rows, s.width, (s.inner + 2 * self._keys(mesh)) / mesh.degrees["tp"])
        matmul_s = matmul_s + self._linear_back_s(rows, s.inner / mesh.degrees["tp"], s.width)
        attention_s, ring_s = self.attention_s(mesh, tokens, pairs, True), self._ring_s(mesh, tokens, True)
        return Work(
            matmul_s,
            attention_s,
            elementwise_s,
            2 * self._kernels(mesh, half),
            {"tp": tensor_s, "ulysses": self._ulysses_s(mesh, rows), "ring": ring_s},
        )

    def again(self, forward: Work, code: np.ndarray) -> Work:
        """What a backward computes again of a block's `forward`. `code`: of RECOMPUTE."""
        share, is_full = np.asarray(self.habits.selective_matmuls), code == RECOMPUTE.index("full")
        inside = Work(
            forward.matmul_s * share,
            forward.attention_s * self.habits.selective_attention,
            forward.elementwise_s * (share > 0),
            forward.kernels * share,
        )
        left_out = np.asarray(self.habits.full_attention) - 1
        full = forward + Work(attention_s=forward.attention_s * left_out, traffic_s={"ring": forward.traffic_s["ring"] * left_out})
        return full.times(is_full) + inside.times(code == RECOMPUTE.index("selective"))

    def attention_s(self, mesh: Mesh, tokens: Number, pairs: Number, backward: bool) -> np.ndarray:
        """Seconds of a rank's attention: its heads of tp and Ulysses, its queries of the ring, in as many pieces as keys arrive in."""
        s, h, r = self.sizes, self.habits, self.rates
        heads = s.heads / (np.asarray(mesh.degrees["tp"]) * mesh.degrees["ulysses"])
        own_rows, own_pairs, width = np.asarray(tokens) / mesh.degrees["ring"], np.asarray(pairs) / mesh.degrees["ring"], s.inner / s.heads
        flash_s = r.attention_s(own_rows * (1 + np.asarray(mesh.degrees["ring"])) / 2, own_pairs, heads, width, backward)
        pieces = np.where(np.asarray(mesh.degrees["ring"]) > 1, 2 * np.asarray(mesh.degrees["ring"]), 1)
        flash_s = flash_s / self.attention_gain(np.asarray(tokens) / pieces, np.asarray(pairs) / pieces**2, backward)
        if np.all(np.asarray(h.flash) == 1):
            return flash_s
        way = "backward" if backward else "forward"
        flops = (8.0 if backward else 4.0) * heads * width * 2 * own_pairs
        slowed = 1 + r.constants.ramp / width
        unfused_s = flops * slowed / r.matmul_flops_per_s
        unfused_s = unfused_s + heads * 2 * own_pairs * SCORE_BYTES[way] * r.constants.scores / r.memory_bytes_per_s
        return np.where(np.asarray(h.flash) == 1, flash_s, unfused_s)

    def attention_gain(self, queries: Number, pairs: Number, backward: bool) -> np.ndarray:
        """Speed of attention over that of the kernel that short documents go to. `queries` see `pairs`: documents are 2 * pairs / queries
        long on average, weighed by their tokens; where that is more than the queries, they are a piece of one."""
        s, h, r, way = self.sizes, self.habits, self.rates, "backward_gain" if backward else "forward_gain"
        measured, least = r.cluster is not None, np.asarray(getattr(h, way), dtype=float)
        length = np.maximum(2.0 * np.asarray(pairs) / np.maximum(queries, 1), 1.0)
        even = (np.asarray(queries) % EVEN == 0) & (length >= queries)
        there = np.asarray(r.by_cudnn) if measured else np.asarray(h.cudnn) == 1
        takes = there & (even | ((length >= LONG) & (np.asarray(queries) >= LONG)))
        if not np.any(takes):
            return least
        fast = r.cudnn_gain(length, s.inner / s.heads, backward) if measured else CUDNN_GAINS[way]
        rest = np.where(even, 0.0, np.minimum(1.0, EVEN / length))  # half of EVEN rows at the end, which see every key
        return np.maximum(least, np.where(takes, 1 / (REST * rest + (1 - rest) / fast), 1.0))

    def embeddings(self, mesh: Mesh, tokens: Number, backward: bool) -> Work:
        """Of the embeddings' turn: rows read and written; tensor-parallel ranks sum what each found."""
        rows = _rows(mesh, tokens)
        moved_bytes = 4.0 * self.rates.element_bytes * rows * self.sizes.width
        elementwise_s = self.rates.elementwise_s(moved_bytes) + EMBEDDINGS_KERNELS * self.rates.dispatch_s
        return Work(0.0, 0.0, elementwise_s, EMBEDDINGS_KERNELS, {"tp": self._tensor_s(mesh, rows) / 2})

    def accumulated(self, mesh: Mesh, elements: Number, embeddings: bool = False) -> Work:
        """Of adding the gradients of so many weights of matmuls, or of `embeddings`, to their sum: the gradient is read, the sum
        read and written."""
        moved_bytes = np.asarray(elements) / mesh.degrees["tp"] * (self.rates.element_bytes + 2 * np.asarray(self.habits.gradient_bytes))
        share = self.habits.embeddings_accumulated if embeddings else self.habits.accumulated
        return Work(elementwise_s=share * self.rates.elementwise_s(moved_bytes))

    def head(self, mesh: Mesh, tokens: Number, learns: bool = True) -> Work:
        """Of the head's turn on so many tokens: final norm, logits, cross entropy, and, where it `learns`, their backward."""
        s, rows = self.sizes, _rows(mesh, tokens)
        columns = s.vocab / np.asarray(mesh.degrees["tp"])
        matmul_s = self.rates.matmul_s(rows, s.width, columns)
        matmul_s = matmul_s + (self._gradients_s(rows, s.width, columns, s.head_trained) if learns else 0.0)
        of_logit = np.where(np.asarray(self.habits.fused_loss) == 1, LOGIT_FUSED_BYTES, LOGIT_BYTES * self.rates.constants.loss)
        moved_bytes = rows * (columns * of_logit + 8.0 * s.width * self.rates.element_bytes)
        elementwise_s = self.rates.elementwise_s(moved_bytes) + HEAD_KERNELS * self.rates.dispatch_s
        return Work(matmul_s, 0.0, elementwise_s, HEAD_KERNELS, {"tp": self._tensor_s(mesh, rows)})

    def _linear_s(self, rows: Number, k: Number, n: Number) -> np.ndarray:
        """A block's matmul forward."""
        return self.rates.matmul_s(rows, k, n)

    def _linear_back_s(self, rows: Number, k: Number, n: Number) -> np.ndarray:
        return self._gradients_s(rows, k, n, self.sizes.trained)

    def _gradients_s(self, rows: Number, k: Number, n: Number, trained: Number) -> np.ndarray:
        """Gradients of inputs, and of the trained part of the weights."""
        return self.rates.matmul_s(rows, n, k) + self.rates.matmul_s(k, rows, n) * trained

    def _keys(self, mesh: Mesh) -> Number:
        """Key/value width over all tensor-parallel ranks: each has at least one head."""
        return np.maximum(self.sizes.keys, self.sizes.inner / self.sizes.heads * np.asarray(mesh.degrees["tp"]))

    def _elementwise_s(self, mesh: Mesh, rows: Number, half: Half) -> np.ndarray:
        s, h, c = self.sizes, self.habits, self.rates.constants
        wide_ranks = np.where(np.asarray(h.sequence_parallel) == 1, mesh.degrees["tp"], 1)

        def elements(passes: dict[str, float]) -> Number:
            wide = (passes["wide"] / 2 + passes["norm"] * (s.norms / 2 - 1)) * s.width / wide_ranks
            if half == "attention half":
                return wide + (passes["inner"] / 2 + passes["norm"] * s.head_norms) * (s.inner + s.keys) / mesh.degrees["tp"]
            return wide + (s.gated * passes["gated"] + (1 - s.gated) * passes["plain"]) * s.ffn / mesh.degrees["tp"]

        moved = np.where(np.asarray(h.compiled) == 1, c.compiled * elements(COMPILED), c.eager * elements(EAGER))
        return self.rates.elementwise_s(moved * rows * self.rates.element_bytes) + self._kernels(mesh, half) * self.rates.dispatch_s

    def _kernels(self, mesh: Mesh, half: Half) -> Number:
        h, s = self.habits, self.sizes

        def kernels(of: dict[str, float]) -> np.ndarray:
            return np.where(np.asarray(h.compiled) == 1, of["compiled"], of["eager"])

        found = kernels(KERNELS) / 2
        norms = s.norms / 2 - 1 + (2 * s.head_norms if half == "attention half" else 0)
        return found + norms * kernels(NORM_KERNELS) + ((1 - np.asarray(h.flash)) * KERNELS["unfused"] if half == "attention half" else 0)

    def _tensor_s(self, mesh: Mesh, rows: Number) -> np.ndarray:
        """An all-gather and a reduce-scatter, or an all-reduce, of a residual stream."""
        size_bytes, per_node = rows * self.sizes.width * self.rates.element_bytes, self.rates.fabric.per_node
        split = 2 * self.rates.collective_s("all_gather", size_bytes, mesh.degrees["tp"], per_node)
        if np.all(np.asarray(self.habits.sequence_parallel) == 1):
            return split
        whole = self.rates.collective_s("all_reduce", size_bytes, mesh.degrees["tp"], per_node)
        return np.where(np.asarray(self.habits.sequence_parallel) == 1, split, whole)

    def _ulysses_s(self, mesh: Mesh, rows: Number) -> np.ndarray:
        """All-to-alls of queries, keys, values and outputs of `parallel.ulysses`, and what is copied before and after each."""
        if np.all(np.asarray(mesh.degrees["ulysses"]) == 1):
            return np.zeros(())
        per_node, found = np.maximum(1, self.rates.fabric.per_node / np.asarray(mesh.degrees["tp"])), np.zeros(())
        for copies, elements in ((3, self.sizes.inner + 2 * self._keys(mesh)), (2, self.sizes.inner)):  # to heads, to tokens
            size_bytes = rows * elements / mesh.degrees["tp"] * self.rates.element_bytes
            copied_s = np.where(np.asarray(mesh.degrees["ulysses"]) > 1, self.rates.elementwise_s(2 * copies * size_bytes), 0.0)
            found = found + copied_s + self.rates.collective_s("all_to_all", size_bytes, mesh.degrees["ulysses"], per_node)
        return found

    def _ring_s(self, mesh: Mesh, tokens: Number, backward: bool) -> np.ndarray:
        """Keys and values round the ring; backward their gradients in float32 behind them: bytes as in `parallel.ring`."""
        if np.all(np.asarray(mesh.degrees["ring"]) == 1):
            return np.zeros(())
        inside = np.asarray(mesh.degrees["tp"]) * mesh.degrees["ulysses"]
        elements = 2 * np.asarray(tokens) / mesh.degrees["ring"] * self._keys(mesh) / inside
        per_node = np.maximum(1, self.rates.fabric.per_node / inside)
        hops = np.asarray(mesh.degrees["ring"]) - 1
        found = hops * self.rates.collective_s("send", elements * self.rates.element_bytes, mesh.degrees["ring"], per_node)
        return (
            found + mesh.degrees["ring"] * self.rates.collective_s("send", elements * 4, mesh.degrees["ring"], per_node)
            if backward
            else found
        )


def _rows(mesh: Mesh, tokens: Number) -> np.ndarray:
    """Tokens of a rank in linear layers."""
    return np.asarray(tokens, dtype=float) / (np.asarray(mesh.degrees["ulysses"]) * mesh.degrees["ring"])
