"""torch's own pipeline (`torch.distributed.pipelining`, 1F1B) over Longshift's units; `variant` pp2:A-B gives the blocks of each stage."""

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from trial import Trial

from longshift.dist.world import World
from longshift.documents.micro import micro_batch
from longshift.layout.layout import Layout
from longshift.model.decoder import Decoder, Ops
from longshift.model.functions import alone
from longshift.model.loss import CrossEntropySum
from longshift.state.precision import Precision
from peers.session import Step, adamw, weights


class Stage(nn.Module):
    """Some units of the decoder on one pack: [1, T] tokens or [1, T, D] in, [1, T, D] or the last stage's [1, T, V] logits out. All
    packs are alike but for their tokens, so that one micro-batch's positions serve for all."""

    def __init__(self, trial: Trial, units: nn.ModuleList, last: bool):
        super().__init__()
        documents = trial.batches()[0].documents[: trial.capacity // trial.lengths[0][0]]
        self.autocast = Precision.of(trial.precision).compute == torch.bfloat16
        self.micro = micro_batch(trial.spec, documents, Layout(), 0, Precision.of(trial.precision).compute, torch.device("cpu"))
        self.units, self.ops, self.last = units, Ops(trial.spec), last

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = x[0]
            for unit in self.units[: -1 if self.last else None]:  # pyright: ignore[reportGeneralTypeIssues]
                x = unit(x, self.micro, self.ops) if x.is_floating_point() else self.ops.embed(unit.embed, x)  # pyright: ignore
            return (self.units[-1].logits(x, self.ops) if self.last else x).unsqueeze(0)  # pyright: ignore[reportCallIssue]


def build(world: World, trial: Trial, variant: str) -> Step:
    model, layout = Decoder(trial.spec).load(weights(trial)), Layout.parse(variant)
    mine = layout.units_of(trial.spec.layers, world.rank)[0]
    held = {p.name for p in trial.spec.params if p.unit in mine}
    params = {name: weight for name, weight in model.weights().items() if name in held}
    first, last = world.rank == 0, world.rank == world.size - 1
    units = nn.ModuleList([model.units[unit] for unit in mine])
    stage = PipelineStage(Stage(trial, units, last), world.rank, world.size, torch.device("cpu"))
    batches, rows = trial.batches(), trial.capacity // trial.lengths[0][0]
    targets = batches[0].target_tokens

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return CrossEntropySum.apply(logits[0], labels[0], 0, alone, alone) / targets  # pyright: ignore

    schedule = Schedule1F1B(stage, len(trial.lengths[0]) // rows, loss_of, scale_grads=False)
    optimizer = adamw(trial, params)

    def step(number: int) -> float:
        documents = batches[number % len(batches)].documents
        ids, labels = (
            torch.stack([torch.from_numpy(getattr(d, kind)) for d in documents]).view(-1, trial.capacity) for kind in ("ids", "labels")
        )
        losses: list[Tensor] = []
        schedule.step(*([ids] if first else []), **({"target": labels, "losses": losses} if last else {}))
        norm = torch.nn.utils.get_total_norm([p.grad for p in params.values() if p.grad is not None], foreach=True)
        both = torch.stack((torch.stack(losses).sum().detach() if last else torch.zeros(()), norm.square()))
        loss, squared = world.everyone.all_reduce(both).unbind()
        torch.nn.utils.clip_grads_with_norm_(params.values(), trial.clip or float("inf"), squared.sqrt(), foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = trial.schedule.at(number)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step
