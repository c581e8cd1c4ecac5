"""What test_fake_gpu.py runs in a process of its own: training steps on a device that is not the CPU, with torch's fake tensors, which have
shapes, dtypes and devices but no numbers, as one rank of a world whose collectives do nothing. An operation on tensors of two devices, or
with arguments that its GPU kernel does not take, is an error as on a GPU. Prints by case what went wrong, or nothing."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup

from longshift.data import micro
from longshift.dist.world import World
from longshift.model import kernels
from longshift.spec.model import ModelSpec, Rope
from longshift.state.precision import Name
from longshift.train import team as teams
from longshift.train.check import Trial, build, parse_layouts
from longshift.train.step import train_step

LLAMA = ModelSpec("llama", 61, 64, 2, 4, 2, 16, 96, 128, rope=Rope())
GPT2 = ModelSpec("gpt2", 61, 64, 2, 4, 4, 16, 96, 128)
LAYOUTS = (
    "dp1",
    "recompute-selective",
    "recompute-full",
    "recompute-full.host",
    "chunk24",
    "chunk24.host.every2",
    "chunk24.host.kv-offload.fpdt",
)
RANKS = {  # which one of as many as the layout has
    "dp3.z1": 1,
    "pp2.dp2.tp2.z2": 5,
    "ring2.u2.z3": 3,
    "pp2.u2.z3.chunk24.host.kv-offload": 2,
    "dp4.z2 > dp2.tp2.z3 > pp2.ring2": 2,
}
CASES = {
    **{layout: (LLAMA, layout, "bf16", kernels.FLASH) for layout in (*LAYOUTS, *RANKS)},
    **{f"chunk24.host {kernel.name}": (LLAMA, "chunk24.host", "bf16", kernel) for kernel in (kernels.CUDNN, kernels.VARLEN)},
    **{f"gpt2 chunk24.host {name}": (GPT2, "chunk24.host", name, kernels.FLASH) for name in ("float32", "fp16")},
}


class Stream:
    """Of a device on which nothing takes time. Its event too."""

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None: ...


def tensor(data: Any, dtype: torch.dtype | None = None, device: Any = "cpu") -> torch.Tensor:
    """torch.tensor without its numbers: the real one wants memory on the device."""
    found = np.asarray(data)
    return torch.empty(found.shape, dtype=dtype or (torch.int64 if found.dtype.kind == "i" else None), device=device)


def step(spec: ModelSpec, text: str, precision: Name, kernel: kernels.Kernel) -> None:
    layouts = parse_layouts(text)
    trial = Trial(spec, ((40, 21, 5, 7, 3),), precision, capacity=61, edges=(8, 24))
    batches = trial.batches()
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS.get(text, 0), world_size=layouts[0].world)
    world = World(RANKS.get(text, 0), layouts[0].world, torch.device("gpu", 0))
    runtime = SimpleNamespace(cudaHostRegister=lambda *how: 0, cudaHostUnregister=lambda address: 0)
    with (
        patch.multiple(torch.cuda, Stream=lambda device: Stream(), current_stream=lambda device: Stream(), cudart=lambda: runtime),
        patch.multiple(torch.cuda, stream=contextlib.nullcontext, synchronize=lambda device: None),
        patch.multiple(torch.Tensor, record_stream=lambda *how: None, data_ptr=lambda x: id(x)),
        patch.object(torch, "tensor", tensor),
        patch.object(FakeTensor, "tolist", lambda x: [1.0] * x.numel()),  # the loss and the norm, once a step
        patch.object(FakeTensor, "__int__", lambda x: 1, create=True),  # what ranks agree on about a switch, once a plan
        patch.object(World, "gather_text", lambda world, text: [text] * world.size),
        patch.object(teams, "choose", lambda *how: (kernel, "")),
        FakeTensorMode(),
    ):
        state, team = build(trial, layouts, world)
        for batch in batches:
            train_step(state, batch, team)


def fault(*case: Any) -> str:
    try:
        step(*case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""


def main() -> None:
    setup("gpu")
    found = {name: fault(*case) for name, case in CASES.items()}
    rotary = micro.rotary_table
    with patch.object(micro, "rotary_table", lambda rope, width, positions, dtype: rotary(rope, width, positions.cpu(), dtype)):
        found["positions on the CPU"] = fault(*CASES["chunk24.host.every2"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
