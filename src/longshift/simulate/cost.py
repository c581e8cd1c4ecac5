"""Cost: seconds of one turn of a unit on one rank, from the kernels and collectives that it was
recorded with.

A kernel takes the longer of its arithmetic and its memory traffic; a turn takes the longer of the
sum of its kernels and of its launches. On a CPU nothing hides a launch: its seconds are among the
elementwise ones. What travels between ranks during a turn is said apart, so that who puts turns on
lanes overlaps it as the runtime does. Numbers or arrays of meshes, tokens and pairs that broadcast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from longshift.cluster.cluster import Number
from longshift.layout import axes
from longshift.layout.blocks import BLOCK
from longshift.layout.layout import Layout
from longshift.model.packed_attention import EVEN, LONG
from longshift.simulate.habits import Habits
from longshift.simulate.mesh import Mesh
from longshift.simulate.rates import CUDNN_BACKEND, Rates
from longshift.simulate.sizes import Sizes, sizes
from longshift.simulate.turn_calls import (
    DEGREES,
    TurnCalls,
    TurnKind,
    UnitKind,
    exact_calls,
    turn_calls,
)
from longshift.simulate.work import Work
from longshift.spec.model import ModelSpec
from longshift.weigh.recorder import AttentionCall, DeviceCall, Transport
from longshift.weigh.turn_profile import Part, Phase

RECOMPUTE = ("none", "selective", "full")  # codes: positions here
# Gains of FlashAttention-3, and of the kernels of cuDNN and Transformer Engine from Hopper on, over
# FlashAttention-2, for long sequences (FlashAttention-3, arXiv 2407.08608: 1.5 to 2.0 forward, 1.5
# to 1.75 backward on H100).
CUDNN_GAINS = {"forward_gain": 2.0, "backward_gain": 1.75}
# Seconds of a pair of tokens in what is left of EVEN, where few queries see many keys, over those
# of a pair in a whole document. Both are by the kernel of short documents; adding up the parts is
# included. Documents of 10,000, 17,000 and 33,000 tokens went 1.43, 1.51 and 1.68 times as fast by
# both kernels as by that one on an H100, whole ones some 1.8 times
# (benchmarks/results/gpu_kernels.json).
REST = 1.9
# Where factors of a matmul are multiplied as codes: elements of the compute format that making the
# codes in one kernel reads and writes, and how many times as fast codes are multiplied as bf16. On
# an H100 8192 x 4096 elements take 36 us, and products of 8192 tokens with weights of Llama 3 8B's
# MLP 0.75 ms and 1.21 to 1.23 ms, with one of 4096 x 4096 0.27 and 0.37
# (benchmarks/results/gpu_first_day.json).
CODED = 1.5
CODED_KERNELS = 2.0
CODES_GAIN = 1.6
# Bytes over those that were recorded, of memory passes, by transport: those that broadcast or mix
# formats have half of the bytes/s of a plain one. On GPUs such that steps of two layers of Llama 3
# 8B, not compiled and compiled, take what a profile of their H100 or H200 says
# (benchmarks/results/gpu_kernels.json; 0.99 to 1.04 of it, a step that recomputed attention 1.06).
# On a CPU all but matmuls and attention took 1.7 to 2.2 times as long as the bytes of the formulas
# of before, which had 0.75 of what is recorded.
PASSES = {"nccl": 1.4, "gloo": 1.5}
FUSED_PASSES = {"nccl": 1.5, "gloo": 1.5}
# Seconds of Longshift's matmuls over those that a preset says, whose constants are fitted to steps
# of other trainers: of 20 steps on an H100 and an H200 that were compared with presets
# (benchmarks/results/gpu_first_day.json; then 0.90 to 0.98 of what is said).
OF_PRESETS = 0.87
# Seconds of a launch, with what Longshift's Python does for it, over those of published trainers: a
# visit of Qwen3 0.6B with a pack of 667 tokens, 28 blocks of 128 kernels, took 0.14 s on an H200,
# not compiled (benchmarks/results/gpu_auto.json).
LAUNCHES = 4.0


def recompute_code(layout: Layout) -> int:
    """Where in RECOMPUTE a layout's recomputation stands."""
    return RECOMPUTE.index(layout.recompute)


@dataclass(frozen=True)
class Cost:
    """Work of turns of one model on one kind of device under Longshift's habits."""

    spec: ModelSpec
    rates: Rates
    habits: Habits = Habits()  # noqa: RUF009  (frozen)

    @property
    def transport(self) -> Transport:
        """Gloo stands for CPUs, whose traffic takes a share of their cores."""
        return "nccl" if self.rates.core_shares is None else "gloo"

    @property
    def accumulation_bytes(self) -> Number:
        """To add an element of a gradient to its sum: the one is read, the other read and
        written."""
        return self.rates.element_bytes + 2 * self.habits.gradient_bytes

    @property
    def rounds(self) -> bool:
        """Whether factors of eight bits are rounded, and multiplied as what they stand for."""
        return self.habits.rounded and not self.habits.codes

    @property
    def sizes(self) -> Sizes:
        return sizes(self.spec)

    @property
    def launch_s(self) -> Number:
        """Seconds of a launch, with what Longshift does for it."""
        return self.rates.launch_s * LAUNCHES

    def turn(
        self,
        kind: UnitKind,
        turn: str,
        part: str,
        mesh: Mesh,
        tokens: Number,
        pairs: Number,
        recompute: int = 0,
        loss_blocks: Number = 1,
    ) -> Work:
        """Work of a `compute` operation of `program.operations`, by its turn and part: on a pack of
        so many `tokens` with so many causal `pairs` (sum of n^2/2 over documents), both over all
        ranks that share it. A loss turn has 1/`loss_blocks` of the tokens.
        `recompute`: a code of RECOMPUTE."""
        # A forward again keeps what its backward needs. Turns of other names keep nothing.
        phase: Phase = "pass"
        if turn == "backward":
            phase = "backward"
        elif turn in ("forward", "again"):
            phase = "forward"
        parts: dict[UnitKind, Part] = {"embeddings": "embed", "head": "block"}
        unit_part = parts.get(kind, part)
        is_selective = kind == "block" and recompute == RECOMPUTE.index("selective")
        recorded = self._recorded(mesh, kind, unit_part, phase, is_selective)  # pyright: ignore
        if kind == "head":
            tokens = np.asarray(tokens) / loss_blocks
        index = mesh.distinct[1]
        work = self._work(recorded, index, tokens, kind == "block")
        forward_s = self._attention_s(recorded, index, tokens, pairs, backward=False)
        backward_s = self._attention_s(recorded, index, tokens, pairs, backward=True)
        return replace(work, attention_s=np.zeros(()) + forward_s + backward_s)

    def event(self, mesh: tuple[int, ...], calls: Sequence[DeviceCall], is_block: bool) -> Work:
        """Work of an event of a chunk, recorded with these calls. `is_block`: whether its matmuls
        are a block's, whose factors may have eight bits."""
        attention = [call for call in calls if isinstance(call, AttentionCall)]
        remainder = [call for call in calls if not isinstance(call, AttentionCall)]
        # `_work` counts no launches of attention: they are none of the remainder's.
        work = self._work([exact_calls(mesh, remainder)], 0, 0.0, is_block)
        attention_s = sum((self.piece_s(call) for call in attention), 0.0)
        return replace(work, attention_s=attention_s, kernels=work.kernels + len(attention))

    def _recorded(
        self, mesh: Mesh, kind: UnitKind, part: Part, phase: Phase, is_selective: bool
    ) -> list[TurnCalls]:
        """The turn's calls on each of the different meshes."""
        recorded = []
        for degrees in mesh.distinct[0]:
            turn_kind = TurnKind(
                spec=self.spec,
                mesh=degrees,
                unit=kind,
                part=part,
                phase=phase,
                selective=is_selective,
                compute_bytes=int(self.rates.element_bytes),
                transport=self.transport,
                float8=kind == "block" and self.rounds,
                compiled=self.habits.compiled,
            )
            recorded.append(turn_calls(turn_kind))
        return recorded

    def _work(
        self, recorded: Sequence[TurnCalls], index: np.ndarray | int, tokens: Number, is_block: bool
    ) -> Work:
        """All but attention."""
        tokens = np.asarray(tokens, dtype=float)
        has_codes = is_block and self.habits.codes
        matmul_s, coding_kernels = self._matmuls(recorded, index, tokens, has_codes)
        pass_bytes = _value(_stack(recorded, "pass_bytes"), index, tokens)
        kernels = _pick(np.array([calls.kernels for calls in recorded]), index, tokens)
        kernels = kernels + coding_kernels

        byte_factor = (FUSED_PASSES if self.habits.compiled else PASSES)[self.transport]
        elementwise_s = self.rates.elementwise_s(byte_factor * pass_bytes)
        elementwise_s = elementwise_s + kernels * self.rates.dispatch_s

        return Work(
            matmul_s=matmul_s,
            elementwise_s=elementwise_s,
            kernels=kernels,
            traffic_s={
                axis.name: self._collectives_s(axis.name, recorded, index, tokens)
                for axis in axes.token_axes()
            },
        )

    def _matmuls(
        self,
        recorded: Sequence[TurnCalls],
        index: np.ndarray | int,
        tokens: np.ndarray,
        has_codes: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of all matmuls, with making their codes; and how many kernels make codes. Meshes
        of one model have as many matmuls, in one order."""
        counts = _stack(recorded, "counts")  # [meshes, kinds]
        kinds = _stack(recorded, "matmuls")  # [meshes, kinds, 5, degrees]
        # All kinds of one pack are one array; of many packs each kind is, which stays in the cache.
        is_one_pack = not tokens.ndim and not np.ndim(index)
        parts = [slice(None)]
        if not is_one_pack:
            parts = [slice(number, number + 1) for number in range(kinds.shape[1])]
        matmul_s = np.zeros(())
        coded_elements = np.zeros(())
        coding_kernels = np.zeros(())
        for part in parts:
            sides = (_value(kinds[:, part, side], index, tokens) for side in range(5))
            batch, rows, inner, columns, sums_tokens = sides
            count = _pick(counts[:, part], index, tokens)
            # A mesh that has fewer kinds than others has none of the last, of no size, and curves
            # know positive sizes.
            is_there = count > 0
            seconds = self.rates.matmul_s(
                np.where(is_there, rows, 1.0),
                np.where(is_there, inner, 1.0),
                np.where(is_there, columns, 1.0),
            )
            if has_codes:
                has_code = (sums_tokens == 0) & (inner % BLOCK == 0) & (columns % BLOCK == 0)
                seconds = np.where(has_code, seconds / CODES_GAIN, seconds)
                elements = np.where(has_code, rows * inner + inner * columns, 0.0)
                kernels = np.where(has_code, 2 * CODED_KERNELS, 0.0)
                coded_elements = coded_elements + (count * elements).sum(0)
                coding_kernels = coding_kernels + (count * kernels).sum(0)
            matmul_s = matmul_s + (count * batch * seconds).sum(0)
        if self.rates.cluster is None:
            matmul_s = matmul_s * OF_PRESETS
        if has_codes:
            matmul_s = matmul_s + self.rates.elementwise_s(
                CODED * coded_elements * self.rates.element_bytes
            )
        return matmul_s, coding_kernels

    def _collectives_s(
        self, axis: str, recorded: Sequence[TurnCalls], index: np.ndarray | int, tokens: np.ndarray
    ) -> np.ndarray:
        """Seconds of the collectives along one axis, of which those of one kind are as large as
        their mean."""
        degrees = np.array([calls.mesh for calls in recorded])
        place = [token_axis.name for token_axis in axes.token_axes()].index(axis)
        ranks = _pick(degrees[:, place], index, tokens)
        # Ranks of the inner axes are neighbors: an axis has one of each such group on a node.
        inner_ranks = _pick(np.prod(degrees[:, :place], axis=1), index, tokens)
        per_node = np.maximum(1, self.rates.fabric.per_node / inner_ranks)
        seconds = np.zeros(())
        keys = dict.fromkeys(key for calls in recorded for key in calls.collectives)
        for key in keys:
            if key[0] != axis:
                continue
            rows = np.array([calls.collectives.get(key, np.zeros(4)) for calls in recorded])
            number = _pick(rows[:, 0], index, tokens)
            size_bytes = _value(rows[:, 1:], index, tokens) / np.maximum(number, 1)
            seconds = seconds + number * self.rates.collective_s(
                key[1], size_bytes, ranks, per_node
            )
        return seconds

    def _attention_s(
        self,
        recorded: Sequence[TurnCalls],
        index: np.ndarray | int,
        tokens: Number,
        pairs: Number,
        backward: bool,
    ) -> np.ndarray:
        """Seconds of a pack's attention on this rank."""
        attention = _stack(recorded, "attention")[:, int(backward)]
        if not attention.any():
            return np.zeros(())
        columns = (_pick(attention[:, column], index, np.asarray(tokens)) for column in range(4))
        calls, row_share, pair_share, heads = columns
        calls = np.maximum(calls, 1)
        rows = row_share * tokens
        rank_pairs = pair_share * pairs
        width = float(attention[:, 4].max())
        flash_s = self.rates.attention_s(rows, rank_pairs, heads, width, backward)
        two_ended = np.array([turn.layout.two_ended_ranks for turn in recorded])
        ranks = _pick(two_ended, index, np.asarray(tokens))
        # Calls have one or two of these pieces, and some more than others.
        piece = tokens / np.where(ranks > 1, 2 * ranks, 1)
        return flash_s / self.attention_gain(rows / calls, rank_pairs / calls, backward, piece)

    def piece_s(self, call: AttentionCall) -> float:
        """Seconds of one call of attention, by the curve of its kind where there is one."""
        rates = self.rates
        heads = call.heads
        if rates.cluster is None or not rates.has_attention:
            flash_s = rates.attention_s(
                call.rows, call.pairs, heads.query, heads.width, call.backward
            )
            return float(flash_s / self.attention_gain(call.rows, call.pairs, call.backward))

        # The calls that training gives to cuDNN's kernel, as in `attention_gain`.
        has_cudnn = call.rows % EVEN == 0 or min(call.rows, call.keys) >= LONG
        return float(
            rates.cluster.attention_s(
                call.rows,
                call.keys,
                heads,
                rates.dtype,
                "backward" if call.backward else "forward",
                causal=call.pairs < call.rows * call.keys,
                without=None if has_cudnn else CUDNN_BACKEND,
            )
        )

    def attention_gain(
        self, queries: Number, pairs: Number, backward: bool, piece: Number | None = None
    ) -> np.ndarray:
        """Speed of attention over that of the kernel that short documents go to. `queries` see
        `pairs`: documents are 2 * pairs / queries long on average, weighed by their tokens; where
        that is more than the queries, they are a piece of one. `piece`: tokens that all calls have
        multiples of; the queries if None."""
        rates = self.rates
        is_measured = rates.cluster is not None
        length = np.maximum(2.0 * np.asarray(pairs) / np.maximum(queries, 1), 1.0)
        multiple = np.asarray(queries if piece is None else piece)
        is_even = (multiple % EVEN == 0) & (length >= queries)
        is_long = (length >= LONG) & (np.asarray(queries) >= LONG)
        has_cudnn = rates.by_cudnn if is_measured else self.habits.cudnn
        uses_cudnn = has_cudnn & (is_even | is_long)
        if not np.any(uses_cudnn):
            return np.ones(())
        gain = CUDNN_GAINS["backward_gain" if backward else "forward_gain"]
        if is_measured:
            gain = rates.cudnn_gain(length, self.spec.head_width, backward)
        # Half of EVEN rows at the end, which see every key.
        rest = np.where(is_even, 0.0, np.minimum(1.0, EVEN / length))
        speed = 1 / (REST * rest + (1 - rest) / gain)
        return np.maximum(1.0, np.where(uses_cudnn, speed, 1.0))

    def again(self, forward: Work, code: np.ndarray) -> Work:
        """What a backward computes again of a block's `forward`: attention alone, or all but
        attention. `code`: of RECOMPUTE."""
        # Keys travel again where attention is computed again; other traffic goes with the rest.
        traffic_s = {}
        for axis in axes.AXES:
            if axis.overlaps and axis.name in forward.traffic_s:
                traffic_s[axis.name] = forward.traffic_s[axis.name]
        attention = Work(attention_s=forward.attention_s, traffic_s=traffic_s)
        remainder = forward + attention.times(-1)
        is_selective = code == RECOMPUTE.index("selective")
        is_full = code == RECOMPUTE.index("full")
        return attention.times(is_selective) + remainder.times(is_full)

    def accumulated(self, mesh: Mesh, elements: Number, embeddings: bool = False) -> Work:
        """Of adding the gradients of so many weights of matmuls, or of `embeddings`, to their sum
        where matmuls do not."""
        if not (embeddings or self.habits.accumulated):
            return Work()
        moved_bytes = np.asarray(elements) / mesh.weight_ranks * self.accumulation_bytes
        return Work(elementwise_s=self.rates.elementwise_s(moved_bytes))


def _stack(recorded: Sequence[TurnCalls], name: str) -> np.ndarray:
    """A field of the calls of each mesh, in one array; matmuls that a mesh has not are none."""
    arrays = [getattr(calls, name) for calls in recorded]
    length = max(len(array) for array in arrays)
    rows = []
    for array in arrays:
        padding = np.zeros((length - len(array), *array.shape[1:]))
        rows.append(np.concatenate((array, padding)))
    return np.stack(rows)


def _pick(values: np.ndarray, index: np.ndarray | int, tokens: np.ndarray) -> np.ndarray:
    """Values [meshes, ...] of the mesh that goes with each of these tokens: [..., tokens], or [...,
    1] where all meshes have the same."""
    if (values == values[0]).all():
        return np.reshape(values[0], (*values.shape[1:], *[1] * max(tokens.ndim, np.ndim(index))))
    return np.moveaxis(values, 0, -1)[..., index]


def _value(sizes: np.ndarray, index: np.ndarray | int, tokens: np.ndarray) -> np.ndarray:
    """Sizes [meshes, ..., degrees] at these tokens, as `_pick` gives them."""
    total = _pick(sizes[..., 0], index, tokens) * tokens ** DEGREES[0]
    for degree in DEGREES[1:]:
        if sizes[..., degree].any():
            total = total + _pick(sizes[..., degree], index, tokens) * tokens**degree
    return total
