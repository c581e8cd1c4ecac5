"""What test_fake_gpu.py runs in a process of its own: training steps on a device that is not there, as one rank of a world whose
collectives do nothing. Prints by case what went wrong, or nothing."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trial import Trial, build, parse_layouts

from longshift.dist.world import World
from longshift.documents import micro
from longshift.model import chosen_kernel, kernels
from longshift.spec.formats import PrecisionName
from longshift.spec.model import ModelSpec, Rope
from longshift.step.update import train_step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

from fake_device import fake_device

LLAMA = ModelSpec("llama", 61, 64, 2, 4, 2, 16, 96, 128, rope=Rope())
GPT2 = ModelSpec("gpt2", 61, 64, 2, 4, 4, 16, 96, 128)
WINDOWED = replace(LLAMA, sliding_window=16)
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
FLASH, CUT = chosen_kernel.kernels(torch.device("cuda"), torch.bfloat16)
CUDNN = replace(kernels.CUDNN, packed=CUT.packed)
CASES = {
    **{layout: (LLAMA, layout, "bf16", FLASH) for layout in (*LAYOUTS, *RANKS)},
    "chunk24.host cudnn": (LLAMA, "chunk24.host", "bf16", replace(CUDNN, rest=None)),
    **{
        f"gpt2 chunk24.host {name}": (GPT2, "chunk24.host", name, chosen_kernel.kernels(torch.device("cuda"), dtype)[0])
        for name, dtype in (("float32", torch.float32), ("fp16", torch.float16))
    },
    "dp1 a call for each document": (LLAMA, "dp1", "bf16", kernels.FLASH),
    "windows in one call": (WINDOWED, "dp1", "bf16", FLASH),
}


def step(spec: ModelSpec, text: str, precision: PrecisionName, kernel: kernels.Kernel) -> None:
    layouts = parse_layouts(text)
    trial = Trial(spec, ((40, 21, 5, 7, 3),), precision, capacity=61, edges=(8, 24))
    batches = trial.batches()
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS.get(text, 0), world_size=layouts[0].world)
    with fake_device(kernel) as (device, _):
        world = World(RANKS.get(text, 0), layouts[0].world, device)
        state, player = build(trial, layouts, world)
        for batch in batches:
            train_step(state, batch, player)
        for runner in player.runners.values():
            if runner.tier is not None:
                runner.tier.close()


def fault(*case: Any) -> str:
    try:
        step(*case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""


def main() -> None:
    found = {name: fault(*case) for name, case in CASES.items()}
    rotary = micro.rotary_table
    with patch.object(micro, "rotary_table", lambda rope, width, positions, dtype: rotary(rope, width, positions.cpu(), dtype)):
        found["positions on the CPU"] = fault(*CASES["chunk24.host.every2"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
