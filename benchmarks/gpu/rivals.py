"""Training a few layers by torch FSDP2 on one device, with torch's own checkpointing or torch.compile. The decoder and the attention kernel
are Longshift's, so that only what runs them differs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from steps import PRECISION, Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from longshift.cluster.cluster import Heads
from longshift.dist.world import stay_on_loopback
from longshift.documents.batch import Document
from longshift.documents.micro import micro_batch
from longshift.model.chosen_kernel import choose, kernels
from longshift.model.decoder import Block, Decoder, Ops
from longshift.state.precision import Precision


def build(name: str, case: Case, device: torch.device) -> Callable[[], float]:
    """What makes one update and returns the loss: weights used in bf16, gradients reduced in float32, one norm and clip, fused AdamW."""
    spec, compute = case.spec, Precision.of(PRECISION).compute
    if not dist.is_initialized():
        stay_on_loopback()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    make = torch.Generator(device).manual_seed(0)
    weights = {p.name: torch.empty(p.shape, device=device).normal_(0, 0.02, generator=make) for p in spec.params}
    model = Decoder(spec).load({p.name: weights[p.name].fill_(1.0) if p.init == "ones" else weights[p.name] for p in spec.params})
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for unit in model.units:
        if isinstance(unit, Block) and name == "fsdp2 checkpoint":
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
        if isinstance(unit, Block) and name == "fsdp2 compiled":
            unit.compile()
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    params: list[nn.Parameter] = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    kernel, _ = choose(
        kernels(device, compute), Heads(spec.heads, spec.kv_heads, spec.head_width), compute, device, lambda seconds: seconds
    )
    ids = torch.randint(0, spec.vocab, (case.tokens,), generator=torch.Generator().manual_seed(0)).split(list(case.lengths))
    documents = [Document(part.numpy(), torch.cat((part[1:], part.new_tensor([-100]))).numpy()) for part in ids]
    micro, ops = micro_batch(spec, documents, case.layout, 0, compute, device), Ops(spec, kernel)

    def step() -> float:
        loss = model(micro, ops)
        (loss / (case.tokens - len(documents))).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss) / (case.tokens - len(documents))

    return step
