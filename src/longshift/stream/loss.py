"""Head and cross-entropy of a pack or one of its chunks, some rows at a time (`layout.memory.loss_rows`): where there are many, no
logits tensor holds them all.

As in Liger Kernel's fused linear cross-entropy (arXiv 2410.10989), gradients are formed with the loss, so that logits live once. A sum over
target tokens, times a seed that is known before; nothing is divided here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longshift.model.decoder import Head, MicroBatch, Ops


def loss_and_gradient(
    head: Head, x_TD: Tensor, micro: MicroBatch, ops: Ops, rows: int, seed: float, added: Callable[[], object]
) -> tuple[Tensor, Tensor]:
    """Sum of the target tokens' cross-entropies, and its gradient with respect to x [T', D] times `seed`. `added` is called whenever the
    weights have gradients."""
    total = torch.zeros((), dtype=torch.float64, device=x_TD.device)
    dx_TD = torch.empty_like(x_TD)
    labels = micro.labels_T.view(-1, len(x_TD))  # one row for each tensor-parallel rank's share of the tokens
    for first in range(0, len(x_TD), rows):
        here = slice(first, first + rows)
        x = x_TD[here].detach().requires_grad_()
        loss = ops.loss(head.logits(x, ops), labels[:, here].reshape(-1))
        torch.autograd.backward(loss, torch.full_like(loss, seed))
        assert x.grad is not None
        dx_TD[here] = x.grad
        total += loss.detach()
        added()
    return total, dx_TD
