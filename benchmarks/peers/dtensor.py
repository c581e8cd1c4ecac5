"""torch's own tensor parallelism (`parallelize_module`, DTensor weights, `loss_parallel`) of transformers' `LlamaForCausalLM`.

Weights are cut as in Megatron-LM; norms are whole on both ranks. bf16 is autocast over float32 weights.
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, loss_parallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from trial import Trial

from longshift.dist.world import World
from longshift.spec.families import to_hugging_face
from longshift.state.precision import Precision
from peers.session import Step, adamw, weights


def build(world: World, trial: Trial, variant: str) -> Step:
    config = LlamaConfig(**to_hugging_face(trial.spec), attn_implementation="sdpa", use_cache=False)  # pyright: ignore[reportCallIssue]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights(trial), strict=True)
    block: dict[str, ParallelStyle] = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        block[name] = ColwiseParallel()
    plan = {f"model.layers.*.{name}": style for name, style in block.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (world.size,)), plan)
    optimizer, batches = adamw(trial, dict(model.named_parameters())), trial.batches()  # pyright: ignore[reportArgumentType]
    half = Precision.of(trial.precision).compute == torch.bfloat16
    rows = trial.capacity // trial.lengths[0][0]

    def step(number: int) -> float:
        batch = batches[number % len(batches)]
        total = torch.zeros(())
        for first in range(0, len(batch.documents), rows):
            documents = batch.documents[first : first + rows]
            ids, labels = (torch.stack([torch.from_numpy(getattr(d, kind)) for d in documents]) for kind in ("ids", "labels"))
            with loss_parallel():
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    logits = model(input_ids=ids).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
                (loss / batch.target_tokens).backward()
            total += loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()
        _clip(list(model.parameters()), trial.clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = trial.schedule.at(number)
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / batch.target_tokens

    return step


def _clip(params: list[torch.nn.Parameter], limit: float) -> None:
    """One global norm over cut weights, which are DTensors, and whole ones: torch's own clip takes either kind alone."""
    cut = [p for p in params if isinstance(p, DTensor)]
    whole = [p for p in params if not isinstance(p, DTensor)]
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None], foreach=True) for kind in (cut, whole)]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for kind in (cut, whole):
        torch.nn.utils.clip_grads_with_norm_(kind, limit, norm, foreach=True)
