"""Rates: how long one operation takes on one device of a cluster,
as numbers or arrays that broadcast.

A cluster that was measured answers from its curves. Else its constants do, and what a step reaches
of them (`Constants`):

    matmul [m, k] @ [k, n]   tiles of 128 x 256, a last wave of tiles that is not full, a start
                             before the first k; or its bytes
    attention                pairs of tokens, and rows as if each saw EXTRA_PAIRS more: short
                             documents reach less
    elementwise              bytes

Letters: m rows, k summed, n columns.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from longshift.cluster.cluster import Cluster, Number
from longshift.cluster.network import Fabric, collective_s, fabric
from longshift.layout.layout import Tier
from longshift.spec.formats import FORMATS, arithmetic

TILE = (128, 256)  # rows and columns of an output tile: cuBLAS's and CUTLASS's largest common ones
# H100, compute-attn-megatron.csv of the DistCA repository: 50 % of the rate of 32K-token documents
# at 512 tokens, 69 at 1K, 79 at 2K, 83 at 4K. That is n / (n + 512), so a causal row costs 256
# pairs more than it has.
EXTRA_PAIRS = 256.0
CUDNN_BACKEND = "cudnn"
# Peak TFLOP/s a watt of an A100, whose share of matmuls was measured under its limit.
POWER_KNOWN = 312 / 400
MULTIPROCESSORS = 108.0  # where a cluster does not say: A100's
# Of a CPU with 2 cores. A micro-batch of tiny-llama takes 9 ms however short it is; some 5 of them
# are charged to its operations, 16 us each, where an addition in place takes 2.6. A collective of
# such a step takes two ranks on gloo 0.4 ms longer than in a loop of its own.
DISPATCHES = 6.0
LATE_S = 4e-4


@dataclass(frozen=True)
class Constants:
    """What a training step reaches of the figures of a cluster, and what a cluster does not say. As
    they stand: before any step was seen.

    matmul, attention, memory,
    node, network                  shares of the rate that the operation reaches alone
    hot                            share of a measured curve that matmuls reach at a step's power
                                   and heat
    launch                         times the cluster's launch_s: what published trainers' launches
                                   take over a bare one
    power                          peak TFLOP/s a watt at which the power limit halves the clock
    ramp, tail                     summed elements that a matmul's start is worth; waves of tiles
                                   lost at its end
    eager, compiled, scores, loss  bytes over those that the formulas of published trainers count:
                                   of elementwise operations, not fused and fused, of unfused
                                   attention scores, of logits
    update                         bytes over those of the optimizer
    jitter                         share of a step that ranks wait for the slowest, for each
                                   doubling of ranks
    messages                       seconds of a pipeline's messages over those of their bytes
    crowd                          share of hidden traffic's seconds that it takes from a GPU's
                                   computation beside it, whose multiprocessors and memory it uses
                                   (Calculon's presets: 0.15 inside a node, 0.02 between)
    begin_s                        seconds of a step outside all of this
    """

    matmul: Number = 1.0
    attention: Number = 1.0
    memory: Number = 1.0
    node: Number = 1.0
    network: Number = 1.0
    launch: Number = 2.5
    power: Number = 2.0
    ramp: Number = 256.0
    tail: Number = 0.4
    eager: Number = 1.0
    compiled: Number = 1.0
    scores: Number = 1.0
    loss: Number = 1.0
    update: Number = 1.0
    jitter: Number = 0.004
    messages: Number = 1.0
    crowd: Number = 0.1
    begin_s: Number = 0.005
    hot: Number = 1.0


# Fitted to 174 published rows of seven sources by benchmarks/published.py, which prints them.
FITTED = Constants(
    matmul=1.036,
    attention=1.083,
    memory=1.02,
    node=1.088,
    network=1.124,
    launch=2.538,
    power=1.066,
    ramp=197.8,
    tail=0.6571,
    eager=1.102,
    compiled=0.8463,
    scores=0.8635,
    loss=1.003,
    update=1.101,
    jitter=0.003404,
    messages=0.8501,
    crowd=0.1933,
    begin_s=0.005629,
)
# What steps reach of a GPU's own curves, which are measured one operation at a time:
# torch.profiler's sums of kernels of two layers of Llama 3 8B at 8K and 16K tokens on an H100 at
# its limit of 700 W, where its clock fell from 1,980 to 1,400 MHz
# (benchmarks/results/gpu_kernels.json). `launch`: makes a launch of a profile with a floor of 7.3
# us, an H200's, what it is of a preset, whose floor is 3.8 us;
# floors of 6.8 to 10.6 us were measured.
OF_CURVES = {"launch": 1.3, "hot": 0.92}
# What steps reach of a CPU's curves. On one Xeon a process trained a Llama 16 times narrower than
# 7B, and tiny-llama, on packs of 32 to 4,096 tokens in float32; processor seconds of its thread
# were added up by operation. Matmuls took 1.05 to 1.26 times as long as by the curves of the same
# machine: their factors are in no cache.
OF_CPU_CURVES = {"launch": 1.0, "hot": 0.9}


@dataclass(frozen=True)
class Rates:
    """Rates of a device as a step reaches them, in FLOP/s and bytes/s; seconds of one launch.
    `cluster`: where curves come from, in `dtype`. Of a CPU: `dispatch_s`, seconds before each
    operation, which nothing hides; `late_s`, by which ranks come to a collective one after another;
    and `core_shares`, shares of a rank's cores that traffic takes inside a node
    and between nodes."""

    matmul_flops_per_s: Number
    forward_flops_per_s: Number
    backward_flops_per_s: Number
    memory_bytes_per_s: Number
    launch_s: Number
    multiprocessors: Number
    fabric: Fabric
    constants: Constants
    element_bytes: Number = 2
    cluster: Cluster | None = None
    dtype: str = "bf16"
    dispatch_s: Number = 0.0
    late_s: Number = 0.0
    core_shares: tuple[float, float] | None = None

    def matmul_s(self, m: Number, k: Number, n: Number) -> np.ndarray:
        """Seconds of [m, k] @ [k, n], without its launch."""
        if self.cluster is not None:
            return self.cluster.matmul_s(m, k, n, self.dtype) / self.constants.hot

        # `tail` waves of tiles are lost at the end; a start is worth `ramp` elements of k.
        tile_rows, tile_columns = TILE
        tiles = np.ceil(np.asarray(m) / tile_rows) * np.ceil(np.asarray(n) / tile_columns)
        tiles = tiles + self.constants.tail * self.multiprocessors
        depth = k + self.constants.ramp
        compute_s = 2.0 * tile_rows * tile_columns * depth * tiles / self.matmul_flops_per_s

        moved_bytes = self.element_bytes * (m * k + k * n + m * n)
        return np.maximum(compute_s, moved_bytes / self.memory_bytes_per_s)

    def attention_s(
        self, rows: Number, pairs: Number, heads: Number, width: Number, backward: bool
    ) -> np.ndarray:
        """Seconds of attention of `rows` queries to `pairs` (query, key) pairs in each of `heads`
        heads of `width`, by the kernel that short documents go to: not by cuDNN's."""
        if self.has_attention:
            return self._measured_attention_s(rows, pairs, heads, width, backward)
        # Two matmuls forward and five backward, of 2 FLOP a pair and element of a head.
        pair_flops = 10.0 if backward else 4.0
        paid_pairs = pairs + EXTRA_PAIRS * np.asarray(rows, dtype=float)
        flops = pair_flops * heads * width * paid_pairs

        return flops / (self.backward_flops_per_s if backward else self.forward_flops_per_s)

    def elementwise_s(self, moved_bytes: Number) -> np.ndarray:
        """Seconds of operations that read and write so many bytes, without their launches."""
        if self.cluster is not None and f"elementwise {self.dtype}" in self.cluster.curves:
            return self.cluster.elementwise_s(moved_bytes, self.dtype)
        return np.asarray(moved_bytes) / self.memory_bytes_per_s

    def collective_s(
        self, operation, size_bytes: Number, ranks: Number, ranks_per_node: Number
    ) -> np.ndarray:
        """Seconds of a collective; see `cluster.network`. On a CPU ranks come to it one after
        another: both of a send, or all."""
        if self.cluster is not None:
            seconds = collective_s(self.cluster, operation, size_bytes, ranks, ranks_per_node)
        else:
            seconds = self.fabric.collective_s(operation, size_bytes, ranks, ranks_per_node)

        # Ranks of a send wait for one other, whatever the group.
        late_s = self.late_s
        if self.cluster is not None and "late" in self.cluster.curves:
            members = np.minimum(ranks, 2.0) if operation == "send" else ranks
            late_s = self.cluster.curves["late"](members)

        return seconds + np.where(np.asarray(ranks) > 1, late_s, 0.0)

    def crowd(self, between: Number) -> np.ndarray:
        """Share of hidden traffic's seconds that it takes from the computation beside it, inside a
        node or `between` nodes."""
        inside, across = self.core_shares or (self.constants.crowd, self.constants.crowd)
        return np.where(between, across, inside)

    @property
    def has_attention(self) -> bool:
        """Whether attention was measured in `dtype`: on GPUs it is in formats of 16 bits."""
        return self.cluster is not None and self.cluster.knows_attention(self.dtype)

    @property
    def by_cudnn(self) -> bool:
        """Whether cuDNN's attention was measured."""
        return self.cluster is not None and self.cluster.knows_attention(self.dtype, CUDNN_BACKEND)

    def cudnn_gain(self, length: Number, width: Number, backward: bool) -> np.ndarray:
        """Speed of cuDNN's measured attention to one causal document of this length over that of
        the fastest other kernel, where it is faster, else 1: who trains takes it only there."""
        tokens = np.asarray(length, dtype=float)
        pairs = tokens**2 / 2
        slow_s = self._measured_attention_s(tokens, pairs, 1, width, backward, cudnn=False)
        fast_s = self._measured_attention_s(tokens, pairs, 1, width, backward, cudnn=True)
        return np.maximum(1.0, slow_s / fast_s)

    def _measured_attention_s(
        self,
        rows: Number,
        pairs: Number,
        heads: Number,
        width: Number,
        backward: bool,
        cudnn: bool = False,
    ) -> np.ndarray:
        """Seconds of the attention of documents with so many causal pairs a row.

        They are the curve of one such document, as often as it fits, by cuDNN or by the fastest
        other kernel. A document shorter than all measured ones takes as long as the shortest of
        them if it has a call of its own, as on a CPU. In a call for a whole pack its rows take what
        rows of that one take, in proportion to their pairs, EXTRA_PAIRS included.
        """
        assert self.cluster is not None
        length = np.maximum(2.0 * np.asarray(pairs) / np.maximum(rows, 1.0), 1.0)
        direction: Literal["forward", "backward"] = "backward" if backward else "forward"
        mean_width = np.mean(width)
        nearest = min(
            self.cluster.measured_heads, key=lambda choice: abs(np.log(choice.width / mean_width))
        )
        shortest = self.cluster.shortest_attention(nearest, self.dtype, direction)
        curve_length = np.maximum(length, shortest)
        document_s = self.cluster.attention_s(
            curve_length,
            curve_length,
            nearest,
            self.dtype,
            direction,
            causal=True,
            backend=CUDNN_BACKEND if cudnn else None,
            without=None if cudnn else CUDNN_BACKEND,
        )
        if self.dispatch_s:
            row_factor = curve_length / length
        else:
            row_factor = (length / 2 + EXTRA_PAIRS) / (curve_length / 2 + EXTRA_PAIRS)
        head_factor = heads * width / (nearest.query * nearest.width)
        return document_s * np.asarray(rows) / curve_length * row_factor * head_factor


def clock_share(flops_per_s: Number, watts: Number | None, power: Number) -> Number:
    """Share of the clock that a device keeps in long dense arithmetic under its power limit, beside
    an A100."""
    if watts is None:
        return 1.0
    a100_demand = 1.0 + POWER_KNOWN / power
    demand = 1.0 + flops_per_s / 1e12 / watts / power
    return np.minimum(1.0, a100_demand / demand)


def rates(cluster: Cluster, precision: str = "bf16", constants: Constants | None = None) -> Rates:
    """Rates of a device of `cluster` in a run of this precision."""
    dtype = arithmetic(precision)
    reached = constants or FITTED
    device = cluster.device
    shares = cluster.shares
    on_cpu = device.kind == "cpu"
    flops_per_s = device.flops_per_s[dtype]
    peak = flops_per_s * clock_share(flops_per_s, device.watts, reached.power)
    links = fabric(cluster)
    if cluster.curves and constants:
        reached = replace(reached, launch=1.0)
    elif cluster.curves:
        reached = replace(reached, **(OF_CPU_CURVES if on_cpu else OF_CURVES))
    core_shares = None
    if on_cpu:
        core_shares = cluster.cores_share("node"), cluster.cores_share("network")
    return Rates(
        matmul_flops_per_s=peak * shares["matmul"] * reached.matmul,
        forward_flops_per_s=peak * shares["attention forward"] * reached.attention,
        backward_flops_per_s=peak * shares["attention backward"] * reached.attention,
        memory_bytes_per_s=device.memory_bytes_per_s * shares["memory"] * reached.memory,
        launch_s=0.0 if on_cpu else device.launch_s * reached.launch,
        multiprocessors=device.multiprocessors or MULTIPROCESSORS,
        fabric=replace(
            links,
            node_bytes_per_s=links.node_bytes_per_s * reached.node,
            network_bytes_per_s=links.network_bytes_per_s * reached.network,
        ),
        constants=reached,
        element_bytes=FORMATS[dtype].compute_bytes,
        cluster=cluster if cluster.curves else None,
        dtype=dtype,
        dispatch_s=DISPATCHES * device.launch_s if on_cpu else 0.0,
        late_s=LATE_S if on_cpu else 0.0,
        core_shares=core_shares,
    )


def tier_copy_s(
    cluster: Cluster, tier: Tier, ranks: int, moved_bytes: float, direction: Literal["out", "in"]
) -> float:
    """Seconds of a copy between a device and a tier outside it, of each of `ranks`. The ranks of a
    node share its disk."""
    if not moved_bytes:
        return 0.0
    if tier == "host":
        copy = "to_host pinned both" if direction == "out" else "to_device pinned both"
        return float(cluster.copy_s(copy, moved_bytes))
    sharers = min(ranks, cluster.devices_per_node)
    access = "write" if direction == "out" else "read"
    block_s = cluster.disk_s(access, moved_bytes)
    return sharers * float(block_s)
