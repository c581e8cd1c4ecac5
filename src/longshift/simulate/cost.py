"""Cost: what one turn of a unit takes on one rank, from the model's sizes, the mesh and the tokens; numbers or arrays that broadcast.

A turn is a list of operations: matmuls, attention, elementwise bytes, launches. Each takes the longer of its arithmetic and its memory
traffic; a turn takes the longer of their sum and of its launches. On a CPU nothing hides a launch: its seconds are among the elementwise
ones. What travels between ranks during a turn is said apart, so that who puts
turns on lanes overlaps it as the runtime does.

    forward    qkv [T, D, A+2B]  attention  o [T, A, D]   gate, up [T, D, F]  down [T, F, D]     each 1/tp, T of one rank of u and ring
    backward   each matmul twice: its input's gradient and its weight's; attention 2.5 times

Letters: T tokens, D model width, A query heads * head width, B key/value heads * head width, F feed-forward width, V vocabulary.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from longshift.cluster.cluster import Device, Number
from longshift.layout.blocks import BLOCK
from longshift.layout.layout import Layout
from longshift.model.kernel_calls import EVEN, LONG
from longshift.simulate.rates import Rates
from longshift.spec.formats import FORMATS, Wire, adds_inside
from longshift.spec.model import ModelSpec
from longshift.weigh.coding import gradient_passes, weight_passes

Seam = Literal["qkv", "tail", "qkv_back", "tail_back"]
Half = Literal["attention half", "mlp half"]
UnitKind = Literal["embeddings", "block", "head"]

RECOMPUTE = ("none", "selective", "full")  # codes: positions here

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
# Gains of FlashAttention-3, and of the kernels of cuDNN and Transformer Engine from Hopper on, over FlashAttention-2, for long sequences
# (FlashAttention-3, arXiv 2407.08608: 1.5 to 2.0 forward, 1.5 to 1.75 backward on H100).
FLASH3 = {"forward_gain": 2.0, "backward_gain": 1.75}
# Seconds of a pair of tokens in what is left of EVEN, where few queries see many keys, over those of a pair in a whole document. Both are
# by the kernel of short documents; adding up the parts is included. Documents of 10,000, 17,000 and 33,000 tokens went 1.43, 1.51 and 1.68
# times as fast by both kernels as by that one on an H100, whole ones some 1.8 times (benchmarks/results/gpu_kernels.json).
REST = 1.9
KERNELS = {"eager": 30.0, "compiled": 14.0, "unfused": 5.0}  # launches of a block's forward; backward twice as many
# Of each norm beyond a block's two: a block of Qwen3, with norms of queries and of keys, has 174 operations both ways, of Llama 126.
NORM_KERNELS = {"eager": 8.0, "compiled": 3.0}
EMBEDDINGS_KERNELS, HEAD_KERNELS = 6.0, 20.0  # of a turn
# Elements of the compute format read and written, and launches, where a factor of a matmul is rounded (`model.float8`): largest
# magnitudes are a read, division, cast, copy and product each a read and a write, of which two are of a code.
ROUNDED, ROUNDED_KERNELS = 8.0, 10.0
# The same where codes are made in one kernel, and how many times as fast codes are multiplied as bf16: on an H100 8192 x 4096 elements take
# 36 us, and products of 8192 tokens with weights of Llama 3 8B's MLP 0.75 ms and 1.21 to 1.23 ms, with one of 4096 x 4096 0.27 and 0.37
# (benchmarks/results/gpu_first_day.json).
CODED, CODED_KERNELS, CODES_GAIN = 1.5, 2.0, 1.6
HOPPER, CUDNN = re.compile(r"\bG?H(20|100|200|800)\b"), re.compile(r"\b(G?H(20|100|200|800)|G?B[123]00)\b")  # names of devices


@dataclass(frozen=True)
class Habits:
    """What a trainer does: 1 or 0, shares, or arrays of them.

    flash                attention in one kernel, else scores go through memory
    compiled             elementwise operations between two matmuls are one kernel
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
    selective_matmuls, selective_attention    share of a block's matmuls, and of attention, that recompute selective computes again
    full_attention       share of attention that recompute full computes again
    forward_gain, backward_gain               times the speed of a preset's attention kernel, FlashAttention-2 (as in FLASH3)
    shard_group          ranks that share one copy of the weights under ZeRO-3 (hybrid sharding); 0: all
    rounded              matmuls of blocks round their factors to eight bits, but those that form gradients of weights
    codes                those factors are multiplied as codes (`model.float8`)
    cudnn                on a preset, attention to documents and pieces of at least LONG tokens, or of whole multiples of EVEN, goes to
                         a kernel that is as much faster as FLASH3 says, but for what is left of EVEN (`model.cut`); a profile has its curve
    fused_loss           cross entropy and its gradient are compiled
    launches             seconds of a launch, with what this trainer does for it, over those of published trainers
    """

    flash: Number = 1.0
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
    selective_matmuls: Number = 0.0
    selective_attention: Number = 1.0
    full_attention: Number = 0.0
    forward_gain: Number = 1.0
    backward_gain: Number = 1.0
    shard_group: Number = 0.0
    rounded: Number = 0.0
    codes: Number = 0.0
    cudnn: Number = 0.0
    fused_loss: Number = 0.0
    launches: Number = 1.0


# Longshift: tensor and Ulysses traffic exposed, ring under attention, ZeRO-3 one unit ahead, gradients under the backward in float32.
# Receives are posted one event ahead and sends are awaited pp events later (`program.turns`), so messages travel beside computation.
# Gradients of matmuls are added to their sums as they are formed, where the machine can. `launches` is fitted to one visit: a pack of 667
# tokens through Qwen3 0.6B, 28 blocks of 138 launches by the counts here, took 0.14 s on an H200, not compiled
# (benchmarks/results/gpu_auto.json).
LONGSHIFT = Habits(messages_hidden=1.0, embeddings_accumulated=1.0, launches=3.75)


def habits(compile: bool, precision: str, device: Device, wire: Wire = Wire()) -> Habits:  # noqa: B008  (frozen)
    """Longshift's, with `train.compile` or without, in this precision on this device, with these formats on the wire."""
    weight_bytes, sum_bytes = FORMATS[precision].compute_bytes, FORMATS[precision].home_bytes
    gathered = wire.bytes_of("weights", weight_bytes) / weight_bytes
    reduced = wire.bytes_of("gradients", sum_bytes) / sum_bytes
    inside = adds_inside(weight_bytes, sum_bytes, device.kind == "cuda")
    coded = {
        "gather_coded": float(weight_passes(wire, weight_bytes, sum_bytes)[1]),  # what is sent is a share of what is taken
        "reduce_coded": float(sum(gradient_passes(wire, sum_bytes))),
    }
    rounded, cudnn = float(FORMATS[precision].float8), float(weight_bytes == 2 and CUDNN.search(device.name) is not None)
    kernels = {"rounded": rounded, "codes": rounded * (HOPPER.search(device.name) is not None), "cudnn": cudnn}
    found = replace(LONGSHIFT, compiled=float(compile), fused_loss=float(compile), accumulated=float(not inside), **kernels)
    return replace(found, gathered=gathered, reduced=reduced, **coded)


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

    @property
    def block_elements(self) -> Number:
        """Weights of a block's matmuls."""
        return self.width * (2 * self.inner + 2 * self.keys + (2 + self.gated) * self.ffn)

    @property
    def head_elements(self) -> Number:
        return self.width * self.vocab


def sizes(spec: ModelSpec) -> Sizes:
    """Sizes of a model."""
    inner, keys = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
    switches = float(spec.gated), float(spec.tied)
    norms = {"norms": 4.0 if spec.norm_place == "both" else 2.0, "head_norms": float(spec.qk_norm or spec.qk_norm_whole)}
    found = Sizes(spec.layers, spec.width, spec.heads, inner, keys, spec.ffn, spec.vocab, *switches, **norms)
    if spec.learned == spec.parameters:
        return found
    learned = [p for p in spec.params if not p.frozen]
    in_blocks = sum(p.elements for p in learned if 1 <= p.unit <= spec.layers)
    in_head = sum(p.elements for p in learned if len(p.shape) > 1 and spec.layers + 1 in (p.unit, p.also_unit))
    return replace(found, trained=in_blocks / (spec.layers * found.block_elements), head_trained=in_head / found.head_elements)


@dataclass(frozen=True)
class Mesh:
    """Degrees of the axes that share a pack."""

    tp: Number = 1
    ulysses: Number = 1
    ring: Number = 1


def recompute_code(layout: Layout) -> int:
    """Where in RECOMPUTE a layout's recomputation stands."""
    return RECOMPUTE.index(layout.recompute)


@dataclass(frozen=True)
class Work:
    """Seconds of one turn on one rank, by kind; `kernels`: launches. `tensor_s`, `ulysses_s`, `ring_s`: traffic during the turn."""

    matmul_s: Number = 0.0
    attention_s: Number = 0.0
    elementwise_s: Number = 0.0
    kernels: Number = 0.0
    tensor_s: Number = 0.0
    ulysses_s: Number = 0.0
    ring_s: Number = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: Number) -> "Work":
        return Work(*(getattr(self, f.name) * factor for f in fields(self)))

    @property
    def device_s(self) -> Number:
        """Seconds that the device computes."""
        return self.matmul_s + self.attention_s + self.elementwise_s

    def compute_s(self, launch_s: Number) -> np.ndarray:
        """Seconds without traffic: the longer of the device's work and of its launches."""
        return np.maximum(self.device_s, np.asarray(self.kernels) * launch_s)

    def exposed_s(self, launch_s: Number) -> np.ndarray:
        """Seconds in Longshift: tensor and Ulysses traffic exposed, ring under attention, or what the launches take if that is longer."""
        busy_s = self.device_s + self.tensor_s + self.ulysses_s + np.maximum(0.0, np.asarray(self.ring_s) - self.attention_s)
        return np.maximum(busy_s, np.asarray(self.kernels) * launch_s)


@dataclass(frozen=True)
class Cost:
    """Work of turns of one model on one kind of device under one trainer's habits."""

    sizes: Sizes
    rates: Rates
    habits: Habits = LONGSHIFT

    @property
    def launch_s(self) -> Number:
        """Seconds of a launch."""
        return self.rates.launch_s * self.habits.launches

    def turn(
        self,
        kind: UnitKind,
        turn: str,
        part: str,
        mesh: Mesh,
        tokens: Number,
        pairs: Number,
        recompute: Number = 0,
        loss_blocks: Number = 1,
    ) -> Work:
        """Work of a `compute` operation of `program.operations`, by its turn and part: on a pack of so many `tokens` with so many causal
        `pairs` (sum of n^2/2 over documents), both over all ranks that share it. A loss turn has 1/`loss_blocks` of the tokens.
        `recompute`: a code of RECOMPUTE."""
        if kind == "embeddings":
            return self.embeddings(mesh, tokens, turn == "backward")
        if kind == "head":
            return self.head(mesh, np.asarray(tokens) / loss_blocks)
        halves: tuple[Half, ...] = ("attention half", "mlp half") if part not in ("attention half", "mlp half") else (part,)
        found = Work()
        for half in halves:
            if turn == "backward":
                found = found + self.backward(half, mesh, tokens, pairs)
                if half == "attention half":
                    found = found + self.again_inside(mesh, tokens, pairs).times(np.asarray(recompute) == RECOMPUTE.index("selective"))
            else:
                found = found + self.forward(half, mesh, tokens, pairs, attends=not (turn == "again" and part == "block with output"))
        return found

    def forward(self, half: Half, mesh: Mesh, tokens: Number, pairs: Number, attends: bool = True) -> Work:
        """Of half a block, forward. `attends` False: all but attention itself."""
        s, rows = self.sizes, _rows(mesh, tokens)
        tensor_s = self._tensor_s(mesh, rows)
        if half == "mlp half":
            matmul_s = self._linear_s(mesh, rows, s.width, (1 + s.gated) * s.ffn / mesh.tp, 1 + s.gated)
            matmul_s = matmul_s + self._linear_s(mesh, rows, s.ffn / mesh.tp, s.width)
            return Work(matmul_s, 0.0, self._elementwise_s(mesh, rows, half), self._kernels(mesh, half), tensor_s)
        matmul_s = self._linear_s(mesh, rows, s.width, (s.inner + 2 * self._keys(mesh)) / mesh.tp, 3)
        matmul_s = matmul_s + self._linear_s(mesh, rows, s.inner / mesh.tp, s.width)
        attention_s = self.attention_s(mesh, tokens, pairs, False) if attends else 0.0
        ring_s = self._ring_s(mesh, tokens, False) if attends else 0.0
        elementwise_s = self._elementwise_s(mesh, rows, half)
        return Work(matmul_s, attention_s, elementwise_s, self._kernels(mesh, half), tensor_s, self._ulysses_s(mesh, rows), ring_s)

    def backward(self, half: Half, mesh: Mesh, tokens: Number, pairs: Number) -> Work:
        """Of half a block, backward: gradients of inputs and of weights."""
        s, rows = self.sizes, _rows(mesh, tokens)
        elementwise_s, tensor_s = BACKWARD * self._elementwise_s(mesh, rows, half), self._tensor_s(mesh, rows)
        if half == "mlp half":
            matmul_s = self._linear_back_s(mesh, rows, s.width, (1 + s.gated) * s.ffn / mesh.tp)
            matmul_s = matmul_s + self._linear_back_s(mesh, rows, s.ffn / mesh.tp, s.width)
            return Work(matmul_s, 0.0, elementwise_s, 2 * self._kernels(mesh, half), tensor_s)
        matmul_s = self._linear_back_s(mesh, rows, s.width, (s.inner + 2 * self._keys(mesh)) / mesh.tp)
        matmul_s = matmul_s + self._linear_back_s(mesh, rows, s.inner / mesh.tp, s.width)
        attention_s, ring_s = self.attention_s(mesh, tokens, pairs, True), self._ring_s(mesh, tokens, True)
        return Work(matmul_s, attention_s, elementwise_s, 2 * self._kernels(mesh, half), tensor_s, self._ulysses_s(mesh, rows), ring_s)

    def seam(self, name: Seam, mesh: Mesh, tokens: Number) -> Work:
        """Of a seam of a block on a chunk, without attention: `qkv`, or `tail`, the output projection and the MLP. `tail_back` computes its
        forward again. What a backward leaves on weights is added to their sum after each chunk."""
        s, rows = self.sizes, _rows(mesh, tokens)
        qkv, out = (rows, s.width, (s.inner + 2 * self._keys(mesh)) / mesh.tp), (rows, s.inner / mesh.tp, s.width)
        norm = Work(0.0, 0.0, self._elementwise_s(mesh, rows, "attention half"), self._kernels(mesh, "attention half"))
        travels = Work(tensor_s=self._tensor_s(mesh, rows) / 2)  # into a seam, or out of it
        if name == "qkv":
            return norm + travels + Work(self._linear_s(mesh, *qkv, 3))
        if name == "qkv_back":
            elements = s.width * (s.inner + 2 * s.keys) * s.trained
            return norm.times(BACKWARD) + travels + Work(self._linear_back_s(mesh, *qkv)) + self.accumulated(mesh, elements)
        tail = Work(self._linear_s(mesh, *out)) + travels + self.forward("mlp half", mesh, tokens, 0.0)
        if name == "tail":
            return tail
        elements = (s.block_elements - s.width * (s.inner + 2 * s.keys)) * s.trained
        back = Work(self._linear_back_s(mesh, *out)) + travels + self.backward("mlp half", mesh, tokens, 0.0)
        return tail + back + self.accumulated(mesh, elements)

    def again_inside(self, mesh: Mesh, tokens: Number, pairs: Number) -> Work:
        """What recompute selective adds to a block's backward: attention, or where the habit says so, a share of the matmuls."""
        whole = self.forward("attention half", mesh, tokens, pairs) + self.forward("mlp half", mesh, tokens, pairs)
        share, attends = self.habits.selective_matmuls, self.habits.selective_attention
        return Work(
            whole.matmul_s * share, whole.attention_s * attends, whole.elementwise_s * (np.asarray(share) > 0), whole.kernels * share
        )

    def attention_s(self, mesh: Mesh, tokens: Number, pairs: Number, backward: bool) -> np.ndarray:
        """Seconds of a rank's attention: its heads of tp and Ulysses, its queries of the ring, in as many pieces as keys arrive in."""
        s, h, r = self.sizes, self.habits, self.rates
        heads = s.heads / (np.asarray(mesh.tp) * mesh.ulysses)
        own_rows, own_pairs, width = np.asarray(tokens) / mesh.ring, np.asarray(pairs) / mesh.ring, s.inner / s.heads
        flash_s = r.attention_s(own_rows * (1 + np.asarray(mesh.ring)) / 2, own_pairs, heads, width, backward)
        pieces = np.where(np.asarray(mesh.ring) > 1, 2 * np.asarray(mesh.ring), 1)
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
        fast = r.cudnn_gain(length, s.inner / s.heads, backward) if measured else FLASH3[way]
        rest = np.where(even, 0.0, np.minimum(1.0, EVEN / length))  # half of EVEN rows at the end, which see every key
        return np.maximum(least, np.where(takes, 1 / (REST * rest + (1 - rest) / fast), 1.0))

    def embeddings(self, mesh: Mesh, tokens: Number, backward: bool) -> Work:
        """Of the embeddings' turn: rows read and written; tensor-parallel ranks sum what each found."""
        rows = _rows(mesh, tokens)
        moved_bytes = 4.0 * self.rates.element_bytes * rows * self.sizes.width
        elementwise_s = self.rates.elementwise_s(moved_bytes) + EMBEDDINGS_KERNELS * self.rates.dispatch_s
        return Work(0.0, 0.0, elementwise_s, EMBEDDINGS_KERNELS, self._tensor_s(mesh, rows) / 2)

    def accumulated(self, mesh: Mesh, elements: Number, embeddings: bool = False) -> Work:
        """Of adding the gradients of so many weights of matmuls, or of `embeddings`, to their sum: the gradient is read, the sum
        read and written."""
        moved_bytes = np.asarray(elements) / mesh.tp * (self.rates.element_bytes + 2 * np.asarray(self.habits.gradient_bytes))
        share = self.habits.embeddings_accumulated if embeddings else self.habits.accumulated
        return Work(elementwise_s=share * self.rates.elementwise_s(moved_bytes))

    def head(self, mesh: Mesh, tokens: Number, learns: bool = True) -> Work:
        """Of the head's turn on so many tokens: final norm, logits, cross entropy, and, where it `learns`, their backward."""
        s, rows = self.sizes, _rows(mesh, tokens)
        columns = s.vocab / np.asarray(mesh.tp)
        matmul_s = self.rates.matmul_s(rows, s.width, columns)
        matmul_s = matmul_s + (self._gradients_s(rows, s.width, columns, s.head_trained) if learns else 0.0)
        of_logit = np.where(np.asarray(self.habits.fused_loss) == 1, LOGIT_FUSED_BYTES, LOGIT_BYTES * self.rates.constants.loss)
        moved_bytes = rows * (columns * of_logit + 8.0 * s.width * self.rates.element_bytes)
        elementwise_s = self.rates.elementwise_s(moved_bytes) + HEAD_KERNELS * self.rates.dispatch_s
        return Work(matmul_s, 0.0, elementwise_s, HEAD_KERNELS, self._tensor_s(mesh, rows))

    def _linear_s(self, mesh: Mesh, rows: Number, k: Number, n: Number, weights: Number = 1) -> np.ndarray:
        """A block's matmul forward, of so many `weights` side by side, each of which rounds what it takes by itself."""
        return self.rates.matmul_s(rows, k, n) / self._codes_gain(mesh) + self._rounded_s(mesh, weights * rows * k + k * n)

    def _linear_back_s(self, mesh: Mesh, rows: Number, k: Number, n: Number) -> np.ndarray:
        return self._gradients_s(rows, k, n, self.sizes.trained, self._codes_gain(mesh)) + self._rounded_s(mesh, rows * n + k * n)

    def _codes_gain(self, mesh: Mesh) -> np.ndarray:
        """Times the speed of a matmul of bf16."""
        return np.where(self._by_codes(mesh), CODES_GAIN, 1.0)

    def _by_codes(self, mesh: Mesh) -> np.ndarray:
        """Whether all weights of a block have sides of whole blocks of a scale, and the device multiplies codes."""
        s, tp = self.sizes, np.asarray(mesh.tp)
        if not np.any(self.habits.codes):
            return np.asarray(False)
        whole = np.asarray(s.width) % BLOCK == 0
        for side in (s.inner, self._keys(mesh), s.ffn):
            whole = whole & (np.asarray(side) / tp % BLOCK == 0)
        return whole & (np.asarray(self.habits.codes) == 1)

    def _rounded_s(self, mesh: Mesh, elements: Number) -> np.ndarray:
        if not np.any(self.habits.rounded):
            return np.asarray(0.0)
        each = np.where(self._by_codes(mesh), CODED, ROUNDED)
        return self.habits.rounded * self.rates.elementwise_s(each * elements * self.rates.element_bytes)

    def _gradients_s(self, rows: Number, k: Number, n: Number, trained: Number, gain: Number = 1.0) -> np.ndarray:
        """Gradients of inputs, so many times as fast as matmuls are, and of the trained part of the weights."""
        return self.rates.matmul_s(rows, n, k) / gain + self.rates.matmul_s(k, rows, n) * trained

    def _keys(self, mesh: Mesh) -> Number:
        """Key/value width over all tensor-parallel ranks: each has at least one head."""
        return np.maximum(self.sizes.keys, self.sizes.inner / self.sizes.heads * np.asarray(mesh.tp))

    def _elementwise_s(self, mesh: Mesh, rows: Number, half: Half) -> np.ndarray:
        s, h, c = self.sizes, self.habits, self.rates.constants
        wide_ranks = np.where(np.asarray(h.sequence_parallel) == 1, mesh.tp, 1)

        def elements(passes: dict[str, float]) -> Number:
            wide = (passes["wide"] / 2 + passes["norm"] * (s.norms / 2 - 1)) * s.width / wide_ranks
            if half == "attention half":
                return wide + (passes["inner"] / 2 + passes["norm"] * s.head_norms) * (s.inner + s.keys) / mesh.tp
            return wide + (s.gated * passes["gated"] + (1 - s.gated) * passes["plain"]) * s.ffn / mesh.tp

        moved = np.where(np.asarray(h.compiled) == 1, c.compiled * elements(COMPILED), c.eager * elements(EAGER))
        return self.rates.elementwise_s(moved * rows * self.rates.element_bytes) + self._kernels(mesh, half) * self.rates.dispatch_s

    def _kernels(self, mesh: Mesh, half: Half) -> Number:
        h, s = self.habits, self.sizes

        def kernels(of: dict[str, float]) -> np.ndarray:
            return np.where(np.asarray(h.compiled) == 1, of["compiled"], of["eager"])

        launches = np.where(self._by_codes(mesh), CODED_KERNELS, ROUNDED_KERNELS) * 2
        found = kernels(KERNELS) / 2 + h.rounded * launches * (4 if half == "attention half" else 2 + s.gated)
        norms = s.norms / 2 - 1 + (2 * s.head_norms if half == "attention half" else 0)
        return found + norms * kernels(NORM_KERNELS) + ((1 - np.asarray(h.flash)) * KERNELS["unfused"] if half == "attention half" else 0)

    def _tensor_s(self, mesh: Mesh, rows: Number) -> np.ndarray:
        """An all-gather and a reduce-scatter, or an all-reduce, of a residual stream."""
        size_bytes, per_node = rows * self.sizes.width * self.rates.element_bytes, self.rates.fabric.per_node
        split = 2 * self.rates.collective_s("all_gather", size_bytes, mesh.tp, per_node)
        if np.all(np.asarray(self.habits.sequence_parallel) == 1):
            return split
        whole = self.rates.collective_s("all_reduce", size_bytes, mesh.tp, per_node)
        return np.where(np.asarray(self.habits.sequence_parallel) == 1, split, whole)

    def _ulysses_s(self, mesh: Mesh, rows: Number) -> np.ndarray:
        """All-to-alls of queries, keys, values and outputs of `parallel.ulysses`, and what is copied before and after each."""
        if np.all(np.asarray(mesh.ulysses) == 1):
            return np.zeros(())
        per_node, found = np.maximum(1, self.rates.fabric.per_node / np.asarray(mesh.tp)), np.zeros(())
        for copies, elements in ((3, self.sizes.inner + 2 * self._keys(mesh)), (2, self.sizes.inner)):  # to heads, to tokens
            size_bytes = rows * elements / mesh.tp * self.rates.element_bytes
            copied_s = np.where(np.asarray(mesh.ulysses) > 1, self.rates.elementwise_s(2 * copies * size_bytes), 0.0)
            found = found + copied_s + self.rates.collective_s("all_to_all", size_bytes, mesh.ulysses, per_node)
        return found

    def _ring_s(self, mesh: Mesh, tokens: Number, backward: bool) -> np.ndarray:
        """Keys and values round the ring; backward their gradients in float32 behind them: bytes as in `parallel.ring`."""
        if np.all(np.asarray(mesh.ring) == 1):
            return np.zeros(())
        inside = np.asarray(mesh.tp) * mesh.ulysses
        elements = 2 * np.asarray(tokens) / mesh.ring * self._keys(mesh) / inside
        per_node = np.maximum(1, self.rates.fabric.per_node / inside)
        hops = np.asarray(mesh.ring) - 1
        found = hops * self.rates.collective_s("send", elements * self.rates.element_bytes, mesh.ring, per_node)
        return found + mesh.ring * self.rates.collective_s("send", elements * 4, mesh.ring, per_node) if backward else found


def _rows(mesh: Mesh, tokens: Number) -> np.ndarray:
    """Tokens of a rank in linear layers."""
    return np.asarray(tokens, dtype=float) / (np.asarray(mesh.ulysses) * mesh.ring)
