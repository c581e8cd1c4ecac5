"""torch DistributedDataParallel around Longshift's decoder, so that only the parallel runtime differs.

Gradients live in its buckets (`gradient_as_bucket_view`) and are reduced with the last micro-batch's backward (`no_sync` before).
bf16 is autocast over float32 weights, gradients reduced in float32.
"""

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from trial import Trial

from longshift.dist.world import World
from longshift.model.decoder import Decoder, Ops
from longshift.state.precision import Precision
from peers.session import Step, adamw, micro_batches, weights


def build(world: World, trial: Trial, variant: str) -> Step:
    compute = Precision.of(trial.precision).compute
    model, ops = Decoder(trial.spec).load(weights(trial)), Ops(trial.spec)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, batches = adamw(trial, model.weights()), trial.batches()
    params = list(model.parameters())

    def step(number: int) -> float:
        batch = batches[number % len(batches)]
        micros = list(micro_batches(trial, batch, world, compute))
        total = torch.zeros(())
        for i, micro in enumerate(micros):
            with nullcontext() if i == len(micros) - 1 else replica.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16):
                    loss = replica(micro, ops)
                (loss * (world.size / batch.target_tokens)).backward()  # DDP divides by the number of ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(params, trial.clip, foreach=True)  # pyright: ignore[reportArgumentType]
        for group in optimizer.param_groups:
            group["lr"] = trial.schedule.at(number)
        optimizer.step()
        optimizer.zero_grad()
        return float(world.everyone.all_reduce(total)) / batch.target_tokens

    return step
