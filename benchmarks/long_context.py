"""One long document on one rank: how much memory a training step takes and how fast it is, by length, under each way to keep less.

    plain              everything a backward needs is kept
    recompute          each block from its input (recompute-full)
    selective          each block from its input and the output of attention with its log-sum-exp, by torch's selective checkpointing and
                       with torch's kernel; `tiled`: with that of CPUs without AMX (`model/tiled_attention.py`)
    recompute+offload  as recompute, with the inputs in the tier
    fpdt               the paper's order: keys and values outside in backward, attention computed again, all in the tier
    stream             as before, with the output of attention kept
    stream kv-offload  as before, with keys and values in the tier
    ... every1         of each block its input waits, and attention is computed again; for --layers 2 and more
    ... every4         of four blocks the first one's input waits, and their forward is played again; for --layers 4 and more

A step is forward, backward and update in bf16. Each is measured in a process of its own, after a step of a short document; methods are
interleaved, length by length. Memory: the most that was resident during the step beyond what the process held before the model was
built. The C library is told to give freed memory back at once, else what is resident is an accident of its pools. Disk: files go through
the page cache.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, zip_longest
from pathlib import Path

import torch
from common import arguments, give_freed_memory_back, publish, say
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from trial import Trial, build

from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.documents.micro import micro_batch
from longshift.errors import LongshiftError
from longshift.layout.box import Box
from longshift.layout.layout import Layout, parse_size
from longshift.model.decoder import Decoder, MicroBatch, Ops
from longshift.model.kernels import TILED
from longshift.spec.model import ModelSpec, Rope
from longshift.state.optimizer import decay_groups, torch_optimizer
from longshift.step.update import train_step

Run = Callable[[int], tuple[dict, float]]  # tokens -> what was moved, mean loss
MIB = 2**20
METHODS: Mapping[str, str] = {  # layouts; C: the chunk
    "plain": "dp1",
    "recompute": "recompute-full",
    "selective": "",
    "selective tiled": "",
    "recompute+offload": "recompute-full.disk",
    "fpdt": "chunkC.disk.kv-offload.fpdt",
    "stream": "chunkC.disk",
    "stream kv-offload": "chunkC.disk.kv-offload",
    "stream every1": "chunkC.disk.every1",
    "stream every4": "chunkC.disk.every4",
}
LENGTHS = ("16K", "32K", "64K", "128K", "256K")
WARM_TOKENS = 512
DEADLINE_S = 4 * 3600.0
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@torch.library.custom_op("longshift_benchmark::tiled", mutates_args=())
def tiled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention as one operation, whose output selective checkpointing can be told to keep."""
    return TILED.forward(q, k, v, True, scale)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[3]


def _tiled_backward(ctx, grad: Tensor, _: Tensor):
    assert TILED.backward is not None
    return *TILED.backward(grad, *ctx.saved_tensors, True, ctx.scale), None


tiled.register_autograd(_tiled_backward, setup_context=_keep)


class TiledOps(Ops):
    """Of one document."""

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch, window: int | None = None) -> Tensor:
        return tiled(*self.to_heads(q_TNH, k_TKH, v_TKH), self.attention.scale)[0]


def spec_of(width: int, heads: int, kv_heads: int, layers: int, longest: int) -> ModelSpec:
    """A small Llama over bytes."""
    return ModelSpec("llama", 257, width, layers, heads, kv_heads, width // heads, width * 11 // 4, longest, rope=Rope())


def measure(world: World, method: str, layout: str, trial: dict, tokens: int, threads: int, folder: str, give_back: int) -> dict:
    """In a process of its own: seconds and peak memory of one step of a document of `tokens`."""
    give_freed_memory_back(give_back)
    tempfile.tempdir = folder
    torch.set_num_threads(threads)
    base = _resident("VmRSS")
    given = Trial.from_json(trial)
    peers = {"selective": Ops, "selective tiled": TiledOps}
    run = _selective(given, peers[method](given.spec)) if method in peers else _longshift(given, layout, world)
    run(WARM_TOKENS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    began = time.perf_counter()
    moved, loss = run(tokens)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_mib": (_resident("VmHWM") - base) / MIB, "loss": loss, **moved}


def _resident(what: str) -> int:
    """Bytes that are resident (VmRSS), or the most that were (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024


def _longshift(trial: Trial, layout: str, world: World) -> Run:
    state, player = build(trial, [Layout.parse(layout)], world)
    (runner,) = player.runners.values()

    def run(tokens: int) -> tuple[dict, float]:
        (batch,) = Trial(trial.spec, ((tokens,),)).batches()
        loss = train_step(state, batch, player).loss
        if runner.tier is None:
            return {}, loss
        moved = runner.tier.moved
        return {
            "put_mib": moved.put_bytes / MIB,
            "fetched_mib": moved.fetched_bytes / MIB,
            "tier_mib": moved.peak_bytes / MIB,
            "waited_s": moved.waited_s,
        }, loss

    return run


def _selective(trial: Trial, ops: Ops) -> Run:
    """torch's checkpointing of each block, all but the output of attention computed again."""
    spec, dtype = trial.spec, torch.bfloat16
    source = trial.source()
    model = Decoder(spec).load({p.name: source(p.name, Box.whole(p.shape)).to(dtype) for p in spec.params})
    masters = {name: weight.detach().float() for name, weight in model.weights().items()}
    adamw = torch_optimizer(trial.rule, decay_groups(spec, trial.rule, masters), fused=True)
    updates = count()
    device, kept = torch.device("cpu"), (flash, torch.ops.longshift_benchmark.tiled.default)

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(tokens: int) -> tuple[dict, float]:
        (batch,) = Trial(spec, ((tokens,),)).batches()
        micro = micro_batch(spec, batch.documents, Layout(), 0, dtype, device)
        x = model.units[0](None, micro, ops)
        for block in model.units[1:-1]:
            x = checkpoint(block, x, micro, ops, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        loss = model.units[-1](x, micro, ops)
        (loss / batch.target_tokens).backward()
        for name, weight in model.weights().items():
            masters[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(list(masters.values()), 1.0)
        for group in adamw.param_groups:
            group["lr"] = trial.schedule.at(next(updates))
        adamw.step()
        with torch.no_grad():
            for name, weight in model.weights().items():
                weight.copy_(masters[name])
        return {}, float(loss.detach()) / batch.target_tokens

    return run


def fit(points: Sequence[tuple[int, float]]) -> dict:
    """Seconds a token = a + b * tokens, by least squares of relative differences; and the worst of these."""
    weights = [1 / y for _, y in points]
    rows = torch.tensor([[w, w * x] for (x, _), w in zip(points, weights)], dtype=torch.float64)
    found = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten()
    worst = (rows @ found - 1).abs().max()
    return {"a_us": float(found[0]) * 1e6, "b_ns": float(found[1]) * 1e9, "worst": float(worst)}


def summarise(rows: Sequence[dict]) -> dict:
    """Ratios at each length, memory growth, and the fit of `stream`."""
    rate = {(row["method"], row["tokens"]): row["tokens_per_s"] for row in rows}
    peak = {(row["method"], row["tokens"]): row["peak_mib"] for row in rows}
    lengths = sorted({row["tokens"] for row in rows})
    pairs = (
        ("stream", "recompute"),
        ("stream", "selective"),
        ("stream", "selective tiled"),
        ("stream", "fpdt"),
    )
    summary: dict = {
        f"{mine} / {theirs}": {n: rate[mine, n] / rate[theirs, n] for n in lengths if (mine, n) in rate and (theirs, n) in rate}
        for mine, theirs in pairs
    }
    for method in ("stream", "stream kv-offload"):
        summary[f"{method} peak_mib"] = {n: peak[method, n] for n in lengths if (method, n) in peak}
        points = [(n, 1 / rate[method, n]) for n in lengths if (method, n) in rate]
        summary[f"{method} seconds a token"] = fit(points) if len(points) > 2 else None
    return summary


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lengths", nargs="*", default=LENGTHS, help="tokens, such as 16K")
    usual = [method for method in METHODS if method != "selective tiled" and "every" not in method]
    parser.add_argument("--methods", nargs="*", default=usual, choices=list(METHODS))
    parser.add_argument("--longest", metavar="TOKENS", help="one document of so many tokens, by `stream kv-offload` alone")
    parser.add_argument("--chunk", default="4K", help="tokens")
    parser.add_argument("--rounds", type=int, nargs="*", default=[2], help="of each length, the last for all others; medians are reported")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--give-back", default="4M", help="memory of this size and more is given back to the system when it is freed")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the disk tier")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.chunk, options.rounds = ("2K", "4K", "8K"), "512", [1]
    if options.longest:
        options.lengths, options.methods, options.rounds = (options.longest,), ["stream kv-offload"], [1]
    lengths, chunk, give_back = [parse_size(text) for text in options.lengths], parse_size(options.chunk), parse_size(options.give_back)
    spec = spec_of(options.width, options.heads, options.kv_heads, options.layers, max(lengths))
    rows = []
    for tokens, rounds in zip_longest(lengths, options.rounds[: len(lengths)], fillvalue=options.rounds[-1]):
        found: dict[str, list[dict]] = {method: [] for method in options.methods}
        for _ in range(rounds):
            for method in options.methods:
                layout = METHODS[method].replace("chunkC", f"chunk{chunk}")
                trial = Trial(spec, ((1,),), "bf16", capacity=max(tokens, WARM_TOKENS)).to_json()
                what = {"method": method, "layout": layout, "trial": trial, "tokens": tokens, "give_back": give_back}
                try:
                    with ForkedWorld(1) as world:
                        (row,) = world.call("long_context:measure", DEADLINE_S, **what, threads=options.threads, folder=options.folder)
                except LongshiftError as fault:
                    say(f"{method} at {tokens}: {str(fault)[-200:]}")
                    continue
                rate = tokens / row["seconds"]
                say(f"{method} at {tokens} tokens: {rate:.0f} tokens/s, {row['peak_mib']:.0f} MiB, loss {row['loss']:.4f}")
                found[method].append(row)
        for method, some in found.items():
            if some:
                middle = {key: statistics.median(row[key] for row in some) for key in some[0]}
                layout = METHODS[method].replace("chunkC", f"chunk{options.chunk}") or "torch checkpoint, output of attention saved"
                rate = {"tokens_per_s": tokens / middle["seconds"], "rounds": len(some)}
                rows.append({"method": method, "layout": layout, "tokens": tokens} | rate | middle)
    model = {"width": spec.width, "heads": spec.heads, "kv_heads": spec.kv_heads, "layers": spec.layers, "ffn": spec.ffn}
    publish("long_context", {"model": model, "chunk": chunk, "threads": options.threads, **summarise(rows)}, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
