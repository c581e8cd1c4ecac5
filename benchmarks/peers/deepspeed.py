"""DeepSpeed ZeRO-1/2/3 (`variant` z1, z2, z3) around Longshift's decoder, with torch's fused AdamW; ZeRO-Offload (z2,host) with
DeepSpeed's own Adam for CPUs.

On a CPU it compiles shared-memory collectives of its own on first use, and uses them where it can.
"""

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore
from trial import Trial

from longshift.dist.world import World
from longshift.model.decoder import Decoder, Ops
from longshift.state.precision import Precision
from peers.session import Step, adamw, micro_batches, pose_as_launched, weights


def build(world: World, trial: Trial, variant: str) -> Step:
    compute = Precision.of(trial.precision).compute
    model, ops, batches = Decoder(trial.spec).load(weights(trial)), Ops(trial.spec), trial.batches()
    count = len(list(micro_batches(trial, batches[0], world, compute)))
    stage, _, offload = variant.partition(",")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "gradient_clipping": trial.clip,
        "zero_optimization": {"stage": int(stage[1:])} | ({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        "bf16": {"enabled": compute == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    pose_as_launched(world)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)  # pyright: ignore
    optimizer = adamw(trial, model.weights())
    if offload:
        betas, eps = trial.rule.betas, trial.rule.eps
        optimizer = DeepSpeedCPUAdam(optimizer.param_groups, betas=betas, eps=eps, adamw_mode=True)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)  # pyright: ignore

    def step(number: int) -> float:
        batch = batches[number % len(batches)]
        for group in optimizer.param_groups:
            group["lr"] = trial.schedule.at(number)
        total = torch.zeros(())
        for micro in micro_batches(trial, batch, world, compute):
            loss = engine(micro, ops)
            engine.backward(loss * (world.size * count / batch.target_tokens))  # it divides by ranks and micro-batches
            engine.step()
            total += loss.detach()
        return float(world.everyone.all_reduce(total)) / batch.target_tokens

    return step
