"""Attention: which kernels run here, and their seconds by length, heads and direction.

Two kinds of piece, as ring attention and streaming cut it: `causal`, a square on the diagonal, and
`full`, queries that see all keys."""

from functools import partial
from itertools import product

import torch
from torch import Tensor

from longshift.cluster.cluster import Backend, Heads
from longshift.cluster.curves import Curve, SampledSizes
from longshift.model.chosen_kernel import gradients, probe
from longshift.model.kernels import CUDNN, FLASH, TILED, Kernel
from longshift.profile.bench import Bench, CurveSpec, Run
from longshift.profile.time_compute import DTYPES, noise
from longshift.weigh.recorder import AttentionCall

# Of 8 heads, 1,024 tokens are 64 tiles, which leave half of a GPU idle: an H100 took as long for
# them as for those of 32.
HEADS = {"cpu": (Heads(8, 2, 64), Heads(32, 8, 128)), "cuda": (Heads(32, 8, 64), Heads(32, 8, 128))}
TOKENS = {  # (device, quick): lengths on the diagonal; queries and keys of full pieces
    ("cpu", True): ((32, 256, 1024, 2048), (256, 1024)),
    ("cpu", False): ((32, 128, 512, 1024, 2048), (256, 1024)),
    ("cuda", True): ((1024, 4096, 16384), (1024, 8192)),
    ("cuda", False): ((1024, 2048, 4096, 8192, 16384, 32768, 65536), (1024, 8192, 65536)),
}
# The largest operation that is timed.
MOST_FLOPS = {
    ("cpu", True): 1.2e10,
    ("cpu", False): 1.2e10,
    ("cuda", True): 2e13,
    ("cuda", False): 1.5e14,
}


def dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Fused kernels of GPUs take 16-bit numbers only."""
    return DTYPES if device.type == "cpu" else {"bf16": torch.bfloat16}


def tried(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """All kernels that are worth a measurement."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return FLASH, TILED, CUDNN
    return FLASH, CUDNN


def attention(bench: Bench, budget_s: float) -> tuple[tuple[Backend, ...], dict[str, Curve]]:
    """Every kernel's verdict, and the curves `attention KERNEL DTYPE DIRECTION causal|full HEADS`
    of those that run."""
    verdicts = []
    specs = {}
    kind = bench.device.type, bench.quick
    longest = max(map(max, TOKENS[kind]))
    shown = HEADS["cpu"][:1] if kind == ("cpu", True) else HEADS[bench.device.type]
    for name, dtype in dtypes(bench.device).items():
        # One set of inputs for all kernels, which take its beginning.
        inputs = {heads: _inputs(heads, longest, dtype, bench.device) for heads in shown}
        for kernel in tried(bench.device, dtype):
            verdict = probe(kernel, dtype, name, bench.device)
            verdicts.append(verdict)
            if verdict.why_not:
                continue
            for heads, direction, causal in product(shown, ("forward", "backward"), (True, False)):
                spec = _spec(kernel, heads, inputs[heads], kind, direction == "backward", causal)
                shape = "causal" if causal else "full"
                specs[f"attention {kernel.name} {name} {direction} {shape} {heads}"] = spec
    return tuple(verdicts), bench.curves(specs, budget_s)


def _inputs(heads: Heads, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Gradient, q, k and v of the longest attention; shorter ones take their beginning."""
    counts = (heads.query, heads.query, heads.key, heads.key)
    return [
        noise(tokens * n * heads.width, dtype, device).view(tokens, n, heads.width) for n in counts
    ]


def _spec(
    kernel: Kernel,
    heads: Heads,
    inputs: list[Tensor],
    kind: tuple[str, bool],
    is_backward: bool,
    causal: bool,
) -> CurveSpec:
    """Attention of the first queries to the first keys."""
    # Lengths of which the backward, which takes longer, is not too large.
    causal_lengths, full_lengths = TOKENS[kind]
    lengths = []
    for length in causal_lengths if causal else full_lengths:
        pairs = length**2 * (0.5 if causal else 1.0)
        if AttentionCall(True, length, length, pairs, heads).flops <= MOST_FLOPS[kind]:
            lengths.append(length)

    def prepare(queries: int, keys: int | None = None) -> Run:
        keys = keys or queries
        grad, q, k, v = (t[:n] for t, n in zip(inputs, (queries, queries, keys, keys)))
        if is_backward:
            return gradients(kernel, grad, q, k, v, causal, heads.width**-0.5)
        return partial(kernel.forward, q, k, v, causal, heads.width**-0.5)

    if causal:
        return CurveSpec((SampledSizes("tokens", tuple(lengths), 2.0),), prepare)
    return CurveSpec(
        (SampledSizes("queries", tuple(lengths)), SampledSizes("keys", tuple(lengths))), prepare
    )
