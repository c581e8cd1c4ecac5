"""AdamW at home, one global clip, and the learning-rate schedule.

Decoupled weight decay (arXiv 1711.05101) through torch's fused kernel, over the flat vectors of home: norms and biases do not decay.
The gradient norm is one number for the whole model: every element counts once, whatever the layout.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from longshift.layout.box import Box
from longshift.state.home import Home, Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: `warmup` steps up to `lr`, then `kind` down to `min_lr` at `steps`, all counted from update `begin`."""

    lr: float
    steps: int
    min_lr: float = 0.0
    warmup: int = 0
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    begin: int = 0

    def at(self, step: int) -> float:
        """Rate of update number `step`, from 0."""
        step = max(0, step - self.begin)
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.min_lr + (self.lr - self.min_lr) * falling


class Optimizer:
    """AdamW over home. Mutable: holds the moments, and `steps` done."""

    def __init__(self, home: Home, betas: tuple[float, float], eps: float, weight_decay: float):
        self.home, self.steps = home, 0
        self._vectors: list[tuple[nn.Parameter, Shard, slice]] = []
        for shard in home.learning:
            for part in (slice(0, shard.decaying), slice(shard.decaying, shard.master.numel())):
                if part.stop > part.start:
                    self._vectors.append((nn.Parameter(shard.master[part]), shard, part))
        groups = [
            {"params": [v for v, s, part in self._vectors if (part.stop <= s.decaying) == decays], "weight_decay": wd}
            for decays, wd in ((True, weight_decay), (False, 0.0))
        ]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]] or [nn.Parameter(torch.zeros(0))], betas=betas, eps=eps, fused=True
        )
        self._moments = {name: [torch.zeros_like(shard.master) for shard in home.learning] for name in MOMENTS}
        for vector, shard, part in self._vectors:
            number = home.learning.index(shard)
            moments = {name: self._moments[name][number][part] for name in MOMENTS}
            self._adamw.state[vector] = {"step": torch.tensor(0.0, device=vector.device), **moments}

    def update(self, lr: float) -> None:
        """One AdamW step with the gradients at home, which are dropped."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for vector, shard, part in self._vectors:
            vector.grad = shard.grad[part] if shard.grad is not None else None
        self._adamw.step()
        for vector, _, _ in self._vectors:
            vector.grad = None
        self.home.drop_gradients()
        self.steps += 1

    def resume(self, steps: int) -> None:
        """Take `steps` as done: AdamW's bias correction depends on it."""
        self.steps = steps
        for vector, _, _ in self._vectors:
            self._adamw.state[vector]["step"].fill_(float(steps))

    def state(self) -> Iterator[tuple[str, Box, bool, dict[str, Tensor]]]:
        """Every trained weight and box at home, whether this rank speaks for it, and its views of "master", "exp_avg" and "exp_avg_sq"."""
        for number, shard in enumerate(self.home.learning):
            flats = {"master": shard.master} | {name: self._moments[name][number] for name in MOMENTS}
            for views in zip(*(shard.views(flat) for flat in flats.values())):
                name, box, _ = views[0]
                yield name, box, shard.owned, {kind: view for kind, (_, _, view) in zip(flats, views)}
