"""torch FSDP2 (`fully_shard`) around every unit of Longshift's decoder, so that only the parallel runtime differs.

    z3    weights resharded after every forward and backward; gradients reduced after every backward
    z2    weights kept from the first forward to the last backward; gradients reduced after every backward
    z1    as z2, gradients reduced after the last backward only

bf16: weights gathered and used in bf16, gradients reduced in float32.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trial import Trial

from longshift.dist.world import World
from longshift.model.decoder import Decoder, Ops
from longshift.state.precision import Precision
from peers.session import Step, adamw, micro_batches, weights


def build(world: World, trial: Trial, variant: str) -> Step:
    compute = Precision.of(trial.precision).compute
    model, ops = Decoder(trial.spec).load(weights(trial)), Ops(trial.spec)
    mesh = init_device_mesh("cpu", (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for unit in model.units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=variant == "z3")
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=variant == "z3")
    optimizer, batches = adamw(trial, model.weights()), trial.batches()
    params = list(model.parameters())

    def step(number: int) -> float:
        batch = batches[number % len(batches)]
        micros = list(micro_batches(trial, batch, world, compute))
        total = torch.zeros(())
        for i, micro in enumerate(micros):
            last = i == len(micros) - 1
            model.set_reshard_after_backward(variant == "z3" or last)  # pyright: ignore[reportCallIssue]
            model.set_requires_gradient_sync(variant != "z1" or last)  # pyright: ignore[reportCallIssue]
            loss = model(micro, ops)
            (loss * (world.size / batch.target_tokens)).backward()  # FSDP2 divides by the number of ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(params, trial.clip, foreach=True)  # pyright: ignore[reportArgumentType]
        for group in optimizer.param_groups:
            group["lr"] = trial.schedule.at(number)
        optimizer.step()
        optimizer.zero_grad()
        return float(world.everyone.all_reduce(total)) / batch.target_tokens

    return step
