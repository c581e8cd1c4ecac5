"""Attention: which kernels run here, and their seconds by length, heads and direction.

Two kinds of piece, as ring attention and streaming cut it: `causal`, a square on the diagonal, and `full`, queries that see all keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshift.cluster.cluster import Backend, Heads, attention_flops
from longshift.cluster.curves import Axis, Curve
from longshift.model.chosen_kernel import gradients, probe
from longshift.model.kernels import CUDNN, FLASH, TILED, Kernel
from longshift.profile.bench import Bench, Plan, Run
from longshift.profile.time_compute import DTYPES, noise

# Of 8 heads, 1,024 tokens are 64 tiles, which leave half of a GPU idle: an H100 took as long for them as for those of 32.
HEADS = {"cpu": (Heads(8, 2, 64), Heads(32, 8, 128)), "cuda": (Heads(32, 8, 64), Heads(32, 8, 128))}
TOKENS = {  # (device, quick): lengths on the diagonal; queries and keys of full pieces
    ("cpu", True): ((32, 256, 1024, 2048), (256, 1024)),
    ("cpu", False): ((32, 128, 512, 1024, 2048), (256, 1024)),
    ("cuda", True): ((1024, 4096, 16384), (1024, 8192)),
    ("cuda", False): ((1024, 2048, 4096, 8192, 16384, 32768, 65536), (1024, 8192, 65536)),
}
MOST_FLOPS = {("cpu", True): 1.2e10, ("cpu", False): 1.2e10, ("cuda", True): 2e13, ("cuda", False): 1.5e14}  # of one operation


def dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Fused kernels of GPUs take 16-bit numbers only."""
    return DTYPES if device.type == "cpu" else {"bf16": torch.bfloat16}


def tried(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """All kernels that are worth a measurement."""
    own = (TILED,) if device.type == "cpu" and dtype == torch.bfloat16 else ()
    return FLASH, *own, CUDNN


def attention(bench: Bench, budget_s: float) -> tuple[tuple[Backend, ...], dict[str, Curve]]:
    """Every kernel's verdict, and the curves `attention KERNEL DTYPE DIRECTION causal|full HEADS` of those that run."""
    verdicts, plans = [], {}
    kind = bench.device.type, bench.quick
    shown = HEADS["cpu"][:1] if kind == ("cpu", True) else HEADS[bench.device.type]
    for name, dtype in dtypes(bench.device).items():
        inputs = {heads: _inputs(heads, max(max(lengths) for lengths in TOKENS[kind]), dtype, bench.device) for heads in shown}
        for kernel in tried(bench.device, dtype):
            verdict = probe(kernel, dtype, name, bench.device)
            verdicts.append(verdict)
            if verdict.why_not:
                continue
            for heads in shown:
                for rest, plan in _plans(kernel, heads, inputs[heads], kind).items():
                    plans[f"attention {kernel.name} {name} {rest} {heads}"] = plan
    return tuple(verdicts), bench.curves(plans, budget_s)


def _inputs(heads: Heads, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Gradient, q, k and v of the longest attention; shorter ones take their beginning."""
    counts = (heads.query, heads.query, heads.key, heads.key)
    return [noise(tokens * n * heads.width, dtype, device).view(tokens, n, heads.width) for n in counts]


def _plans(kernel: Kernel, heads: Heads, inputs: list[Tensor], kind: tuple[str, bool]) -> dict[str, Plan]:
    square, pairs = TOKENS[kind]
    plans = {}
    for causal, lengths in ((True, square), (False, pairs)):
        fitting = tuple(n for n in lengths if attention_flops(n, n, heads, "backward", causal) <= MOST_FLOPS[kind])
        if fitting:
            axes = (Axis("tokens", fitting, 2.0),) if causal else (Axis("queries", fitting), Axis("keys", fitting))
            for direction in ("forward", "backward"):
                piece = _Piece(kernel, inputs, causal, direction == "backward")
                plans[f"{direction} {'causal' if causal else 'full'}"] = Plan(axes, piece)
    return plans


@dataclass(frozen=True)
class _Piece:
    """Prepares the points of one curve: attention of the first queries to the first keys."""

    kernel: Kernel
    inputs: list[Tensor]
    causal: bool
    back: bool

    def __call__(self, queries: int, keys: int | None = None) -> Run:
        keys = keys or queries
        grad, q, k, v = (t[:n] for t, n in zip(self.inputs, (queries, queries, keys, keys)))
        scale = q.shape[-1] ** -0.5
        if self.back:
            return gradients(self.kernel, grad, q, k, v, self.causal, scale)
        return lambda: self.kernel.forward(q, k, v, self.causal, scale)
