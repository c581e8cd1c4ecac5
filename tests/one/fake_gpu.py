"""What test_fake_gpu.py runs in a process of its own: training steps on a device that is not the CPU, with torch's fake tensors, which have
shapes, dtypes and devices but no numbers. An operation on tensors of two devices, or with arguments that its GPU kernel does not take, is
an error as on a GPU. Prints by case what went wrong, or nothing."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup

from longshift.data import micro
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.model import kernels
from longshift.spec.model import ModelSpec, Rope
from longshift.state.precision import Name
from longshift.train import team as teams
from longshift.train.check import Trial, build
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
CASES = {
    **{layout: (LLAMA, layout, "bf16", kernels.FLASH) for layout in LAYOUTS},
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


def step(spec: ModelSpec, layout: str, precision: Name, kernel: kernels.Kernel) -> None:
    trial = Trial(spec, ((40, 21),), precision, capacity=61)
    batches = trial.batches()
    runtime = SimpleNamespace(cudaHostRegister=lambda *how: 0, cudaHostUnregister=lambda address: 0)
    with (
        patch.multiple(torch.cuda, Stream=lambda device: Stream(), current_stream=lambda device: Stream(), cudart=lambda: runtime),
        patch.multiple(torch.cuda, stream=contextlib.nullcontext, synchronize=lambda device: None),
        patch.multiple(torch.Tensor, record_stream=lambda *how: None, data_ptr=lambda x: id(x)),
        patch.object(torch, "tensor", tensor),
        patch.object(FakeTensor, "tolist", lambda x: [1.0] * x.numel()),  # the loss and the norm, once a step
        patch.object(teams, "choose", lambda *how: (kernel, "")),
        FakeTensorMode(),
    ):
        state, team = build(trial, [Layout.parse(layout)], World(0, 1, torch.device("gpu", 0)))
        for batch in batches:
            train_step(state, batch, team)


def fault(*case: Any) -> str:
    try:
        step(*case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
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
