"""What forked ranks, and a process with a device that is not there, do for test_turn_profile.py: the turns of a rank, measured."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from longshift.dist import collectives
from longshift.dist.live_bytes import HeldBytes, prompt_release
from longshift.dist.world import World
from longshift.documents.batch import Document
from longshift.documents.micro import micro_batch
from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.layout.placement import local_boxes
from longshift.model import attention
from longshift.model.chosen_kernel import kernels
from longshift.model.cut import cut
from longshift.model.decoder import Block, Head, Unit, build_unit
from longshift.model.functions import WRITTEN_OUT, add_product
from longshift.model.kernels import FLASH
from longshift.model.packed_attention import EVEN, LONG
from longshift.program.operations import Op
from longshift.schedule.event import Event
from longshift.spec.adapters import Lora
from longshift.spec.formats import adds_inside
from longshift.spec.model import ModelSpec, Rope
from longshift.state.precision import Precision
from longshift.step.chunk_runner import ChunkedPacks, ChunkPlayer
from longshift.step.compose import layout_ops, prepare
from longshift.step.runner import loss_of_rows

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))  # last: a script there has the name of one above

from fake_device import fake_device  # pyright: ignore[reportMissingImports]

SPECS = {
    "llama": ModelSpec("llama", 61, 64, 1, 5, 5, 16, 97, 4096, rope=Rope()),
    "llama grouped": ModelSpec("llama", 61, 64, 1, 6, 2, 16, 97, 4096, rope=Rope(), tied=True),
    "llama biases": ModelSpec("llama", 1001, 64, 1, 4, 2, 16, 96, 4096, rope=Rope(), qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen3": ModelSpec("qwen3", 61, 64, 1, 4, 1, 16, 96, 4096, rope=Rope(), qk_norm=True),
    "granite": ModelSpec(
        "granite", 61, 64, 1, 4, 2, 16, 97, 4096, attention_scale=0.1, embed_scale=12.0, residual_scale=0.22, logit_divisor=8.0
    ),
    "smollm3": ModelSpec("smollm3", 61, 64, 1, 4, 2, 16, 97, 4096, rope=Rope(), nope_every=1),
    "phi3": ModelSpec("phi3", 61, 64, 1, 6, 2, 16, 97, 4096, rope=Rope(), fused=True, rotary=12),
    "olmo2": ModelSpec("olmo2", 61, 64, 1, 4, 2, 16, 97, 4096, rope=Rope(), qk_norm_whole=True, norm_place="after"),
    "mistral": ModelSpec("mistral", 61, 64, 1, 4, 2, 16, 97, 4096, rope=Rope(), sliding_window=150),
    "gemma3": ModelSpec(
        *("gemma3_text", 61, 64, 1, 4, 2, 16, 97, 4096, True),
        **{"qk_norm": True, "norm_place": "both", "norm_less_one": True, "sliding_window": 420, "window_rope": Rope(100.0)},
        **{"activation": "gelu_tanh", "embed_scale": 8.0, "attention_scale": 0.3},
    ),
    "gemma2": ModelSpec(
        *("gemma2", 61, 64, 1, 4, 2, 16, 97, 4096, True),
        **{"norm_place": "both", "norm_less_one": True, "sliding_window": 420, "activation": "gelu_tanh", "embed_scale": 8.0},
        **{"score_cap": 2.0, "logit_cap": 1.5},
    ),
    "gpt2": ModelSpec(
        *("gpt2", 61, 64, 1, 5, 5, 16, 128, 4096, True, "layer", 1e-5, "gelu_tanh", False),
        **{"fused_qkv": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope": None, "learned_positions": True},
    ),
}
SPECS |= {
    "lora": replace(SPECS["llama grouped"], lora=Lora(8, 16.0)),
    "lora gpt2": replace(SPECS["gpt2"], lora=Lora(4, 8.0, ("c_attn", "c_proj"))),
    "frozen": replace(SPECS["llama biases"], freeze=("*.q_proj.weight", "*.o_proj.*", "*.up_proj.bias", "*norm.weight", "*embed*")),
    "frozen gpt2": replace(SPECS["gpt2"], freeze=("*.ln_1.*", "*.c_attn.weight", "*.c_fc.*", "*.wpe.*")),
}
SPECS |= {
    "mixtral": ModelSpec("mixtral", 61, 64, 1, 4, 2, 16, 97, 4096, rope=Rope(), experts=5, top_k=2),
    "qwen3 moe": ModelSpec("qwen3_moe", 61, 64, 1, 4, 2, 16, 24, 4096, rope=Rope(), qk_norm=True, experts=16, top_k=4),
}
LENGTHS = (700, 333, 1000, 2)  # of documents, in tokens
TURNS = ("pass", "forward", "backward")
TURNS_OF_CHUNKS: tuple[Any, ...] = ("embed", "forward", "loss", "backward", "embed_back")
PARTS = ("embed", "block", "attention half")


def operations(world: World, spec: str, layout: str, dtype: str, even: int = EVEN, long: int = LONG) -> dict[str, dict]:
    """By "part turn": what was measured, in the terms of `weigh.recorder.TurnProfile`. `even`, `long`: of kernels that are cut."""
    held, device = HeldBytes(), world.device
    with prompt_release(), held:
        return dict(_operations(world, SPECS[spec], Layout.parse(layout), precision_of(dtype), held, device, even, long))


def _operations(
    world: World, spec: ModelSpec, layout: Layout, precision: Precision, held: HeldBytes, device: torch.device, even: int, long: int
) -> Iterator[tuple[str, dict]]:
    dtype = precision.compute
    if world.everyone.handle is not None:
        prepare(world, spec, layout)
    kernel = FLASH if device.type == "cpu" else kernels(torch.device("cuda"), dtype)[0]
    if device.type != "cpu" and dtype.itemsize == 2:
        kernel = cut(kernel, FLASH, even, long)
    ops = layout_ops(spec, layout, world, kernel)
    documents = [Document(np.arange(n) % spec.vocab, np.arange(n) % spec.vocab) for n in LENGTHS]
    micro = micro_batch(spec, documents, layout, world.rank, dtype, device)
    watch = Watch(held, device, ops.groups)
    for part in PARTS:
        unit = filled(build_unit(spec, int(part != "embed"), float8=precision.float8), layout, world, dtype, device)
        function: Callable[..., Tensor] = unit
        if isinstance(unit, Block) and part == "attention half":
            function = unit.attention_half
        x = None if part == "embed" else stream(micro, spec, dtype, device).requires_grad_()
        with watch.counting() as seen, torch.no_grad():
            y = function(x, micro, ops)
        yield f"{part} pass", seen | {"output": size(y), "graph": 0, "grads": 0}
        del y
        with watch.counting() as seen:
            y = function(x, micro, ops)
        yield f"{part} forward", seen | {"output": size(y), "graph": seen["left"] - size(y), "grads": 0}
        dy, graph = stream(micro, spec, dtype, device), seen["left"] - size(y)
        with watch.counting() as seen:
            if y.requires_grad:
                torch.autograd.backward(y, dy)
        found = {"output": 0 if x is None or x.grad is None else size(x.grad), "graph": 0, "grads": grads(unit)}
        assert seen["left"] == found["output"] + found["grads"] - graph, (part, seen, found, graph)
        yield f"{part} backward", seen | found
        del x, y, dy, unit, function
    head = filled(build_unit(spec, spec.layers + 1), layout, world, dtype, device)
    x = stream(micro, spec, dtype, device)
    dx = torch.empty_like(x)
    assert isinstance(head, Head)
    for number in range(loss_blocks(spec, len(x))):
        with watch.counting() as seen:
            loss = loss_of_rows(head, x, dx, micro, ops, number, 1.0)
        yield f"loss {number}", seen | {"output": 0, "graph": 0, "grads": grads(head)}
        assert seen["left"] == grads(head) + size(loss), (seen, grads(head))
        head.zero_grad()
        del loss


def events(world: World, spec: str, layout: str, dtype: str) -> list[dict]:
    """Of a chunked pack through a model of one block, what each event of its lists did."""
    held = HeldBytes()
    with prompt_release(), held:
        return _events(world, SPECS[spec], Layout.parse(layout), precision_of(dtype), held, world.device)


def precision_of(dtype: str) -> Precision:
    """The formats of a run whose working copies have this dtype, or whose matmuls take factors of eight bits."""
    return Precision.of({"bfloat16": "bf16"}.get(dtype, dtype))  # pyright: ignore[reportArgumentType]


def _events(world: World, spec: ModelSpec, layout: Layout, precision: Precision, held: HeldBytes, device: torch.device) -> list[dict]:
    if world.everyone.handle is not None:
        prepare(world, spec, layout)
    dtype = precision.compute
    units: dict[int, Unit] = {}

    def added(unit: int) -> None:
        units[unit].zero_grad()

    copies: Any = SimpleNamespace(fill=lambda unit: filled(unit, layout, world, dtype, device), expect=lambda unit: None)
    runner = ChunkedPacks(spec, layout, world, copies, precision, FLASH, WRITTEN_OUT, tier=Elsewhere(), accumulate=added)
    units |= runner.modules
    watch = Watch(held, device, runner.ops.groups)
    runner.load(0, runner.on_host([Document(np.arange(n) % spec.vocab, np.arange(n) % spec.vocab) for n in LENGTHS]))
    native, found = ChunkPlayer._play, []

    def played(play: ChunkPlayer, event: Event) -> None:
        for buffer in event.reads:
            play._here(buffer)
        with watch.counting() as seen:
            native(play, event)
        found.append({"turn": turn, "number": len([one for one in found if one["turn"] == turn]), **seen})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkPlayer, "_play", played)
        for unit, turn in zip((0, 1, 2, 1, 0), TURNS_OF_CHUNKS):
            runner.compute(Op("compute", unit=unit, micro=0, turn=turn))
    return found


class Elsewhere:
    """A tier whose bytes are not counted. Mutable."""

    def __init__(self) -> None:
        self.kept: dict[tuple, list[tuple[np.ndarray, torch.dtype, torch.Size]]] = {}

    def put(self, key: tuple, *tensors: Tensor) -> None:
        self.kept[key] = [(t.contiguous().view(-1).view(torch.uint8).numpy().copy(), t.dtype, t.shape) for t in tensors]

    def fetch(self, key: tuple) -> Callable[[], tuple[Tensor, ...]]:
        found = []
        for data, dtype, shape in self.kept[key]:
            tensor = torch.empty(shape, dtype=dtype)
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
            found.append(tensor)
        return lambda: tuple(found)

    def recycle(self, tensors: Any) -> None: ...

    def drop(self, key: tuple) -> None:
        del self.kept[key]


def stream(micro: Any, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(micro.tokens_here, spec.width, dtype=dtype, device=device)


def filled(unit: Unit, layout: Layout, world: World, dtype: torch.dtype, device: torch.device) -> Unit:
    """With weights of a rank's shapes, and sums where matmuls add to them."""
    inside = adds_inside(dtype.itemsize, max(4, dtype.itemsize), device.type != "cpu") and unit.spec.multiplied[unit.unit]
    for param in unit.table:
        boxes = local_boxes(param, layout, layout.coord(world.rank))
        parts = [torch.full(box.shape, 0.01, dtype=dtype, device=device) for box in boxes]
        setattr(unit, param.role, nn.Parameter(torch.cat(parts, param.dim or 0), not param.frozen))
        if inside and param.name in inside:
            wide = torch.promote_types(dtype, torch.float32)
            total = torch.zeros(getattr(unit, param.role).shape, dtype=wide, device=device).unsqueeze(0)
            unit.adds[param.role] = partial(add_product, total, first=False)
    return unit


def size(x: Tensor) -> int:
    return x.untyped_storage().nbytes()


def grads(unit: Unit) -> int:
    return sum(size(p.grad) for p in unit.parameters() if p.grad is not None)


class Watch:
    """Bytes held and sent while an operation runs. Mutable."""

    def __init__(self, held: HeldBytes, device: torch.device, groups: dict[str, collectives.Group]):
        self.held, self.device = held, device.type
        self.axes = {group.handle: axis for axis, group in groups.items() if group.handle is not None}
        self.before = 0

    @contextmanager
    def counting(self) -> Iterator[dict]:
        found, sent = {}, Counter()

        def counted(native: Callable, elements: Callable[..., int]) -> Callable:
            def call(*arguments: Any, **more: Any) -> Any:
                peers = dist.get_world_size(more["group"])
                sent[self.axes[more["group"]]] += elements(peers, *arguments)
                return native(*arguments, **more)

            return call

        def traded(peers: int, out: Tensor, x: Tensor, out_sizes: Any = None, in_sizes: Any = None) -> int:
            return (sum(in_sizes) if in_sizes is not None else x.numel() * (peers - 1) // peers) * x.itemsize

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", counted(dist.all_to_all_single, traded))
            gather = counted(collectives._all_gather, lambda peers, out, x: (peers - 1) * x.nbytes)
            patch.setattr(collectives, "_all_gather", gather)
            scatter = counted(collectives._reduce_scatter, lambda peers, out, x: x.nbytes // peers * (peers - 1))
            patch.setattr(collectives, "_reduce_scatter", scatter)
            reduce = counted(dist.all_reduce, lambda peers, x, op=None: 2 * x.nbytes * (peers - 1) // peers)
            patch.setattr(dist, "all_reduce", reduce)
            self._settle()
            self.held.restart()
            self.before = self.held.now[self.device]
            yield found
            self._settle()
            found["peak"] = self.held.most[self.device] - self.before
            found["left"] = self.held.now[self.device] - self.before
            found["sent"] = dict(sent)

    def _settle(self) -> None:
        """gloo's threads end some storages late: [Note: late release] in dist.live_bytes."""
        if self.axes and self.device == "cpu":
            time.sleep(1e-3)


def on_fake_device(spec: str, layout: str, dtype: str, rank: int, even: int = EVEN, long: int = LONG) -> dict[str, dict]:
    """As `operations`, as one rank of a world whose collectives do nothing. `even`, `long`: tokens whose multiples a kernel takes, and of a
    document that is a call of its own."""
    size = Layout.parse(layout).world
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with fake_device() as (device, _), patch.object(attention, "LONG", long):
            return operations(World(rank, size, device), spec, layout, dtype, even, long)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps([on_fake_device(**case) for case in json.loads(sys.argv[1])]))
