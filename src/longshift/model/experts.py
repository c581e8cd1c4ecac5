"""Mixture of experts: each token passes through the few feed-forward networks that a router picks.

Paper: Shazeer et al., arXiv 1701.06538; without capacity and without dropped tokens, as MegaBlocks
(arXiv 2211.15841). Experts are sharded as all weights are, by ZeRO; ranks that share tokens by
tensor or sequence parallelism each route their own, so that nothing is sent.

    x [T, D] ─ router ─ softmax ─ the K best of E ─ w [T, K]
       │                              │ sorted by expert: R = T K rows
       └── rows ─ gate, up ─ act(gate) up w ─ down ─ sum over a token's K ── y [T, D]

    saved    x, gate and up [R, F] each, w and the order of rows
    peak     + one of [R, D] and of [R, F] forward;  one of [R, D], three of [R, F] backward,
             and the gradients of the weights

The number of rows and every size are known before the router speaks: what a block holds does not
depend on where tokens go. Only the rows of each expert's matmuls do.

Weights of all experts of a block are one matrix: gate and up [E F, D], down [E D, F].

Letters: T tokens, D model width, E experts, K of them a token, R rows, F an expert's width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longshift.model.functions import Elementwise
from longshift.spec.param import share


@dataclass(frozen=True)
class ExpertBatch:
    """Experts one after another with as many rows each, which one batched matmul serves: most often
    one expert.

    `start`, `end`: of their rows. `first`, `last`: half-open range of the experts."""

    start: int
    end: int
    first: int
    last: int

    def rows(self, x_RI: Tensor) -> Tensor:
        """Rows of these experts, [experts, rows, I]."""
        return x_RI[self.start : self.end].unflatten(0, (self.last - self.first, -1))

    def matrices(self, weights_EOI: Tensor) -> Tensor:
        """Their matrices, [experts, O, I]."""
        return weights_EOI[self.first : self.last]


class Routes(NamedTuple):
    """Which rows go through which expert.

    `slots_R`: of each row, sorted by expert, its place in [T, K]. `rows_TK`: of each place its
    row. `experts`: E. `batches`: of those that have rows."""

    slots_R: Tensor
    rows_TK: Tensor
    experts: int
    batches: tuple[ExpertBatch, ...]

    def by_expert(self, weights: Tensor) -> Tensor:
        """A matrix of all experts as one for each, [E, O, I]."""
        return weights.unflatten(0, (self.experts, -1))


def route(logits_TE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights, both [T, K]; weights of at least
    float32. Equal scores go to the expert of the lower number, on every device and in every
    layout. `normalize`: weights of a token add up to 1."""
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
    # `topk` breaks ties by device and by shape, a stable sort does not.
    order_TE = scores_TE.detach().sort(dim=-1, descending=True, stable=True).indices
    experts_TK = order_TE[:, :top_k].contiguous()
    weights_TK = scores_TE.gather(-1, experts_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return experts_TK, weights_TK


def plan_routes(experts_TK: Tensor, experts: int) -> Routes:
    """Sort the rows by expert, tokens of an expert in their order. `experts`: E."""
    sorted_R, slots_R = experts_TK.flatten().sort(stable=True)
    # The inverse permutation, without a scatter.
    rows_TK = slots_R.argsort().view_as(experts_TK)
    # Without numbers nothing says where tokens go.
    find_ends = even_ends if sorted_R.is_meta else row_ends
    ends = find_ends(sorted_R, experts)
    return Routes(slots_R, rows_TK, experts, tuple(_batches(ends)))


def row_ends(sorted_R: Tensor, experts: int) -> tuple[int, ...]:
    """Of each expert the end of its rows. The host waits for the device."""
    numbers = torch.arange(experts, device=sorted_R.device)
    return tuple(torch.searchsorted(sorted_R, numbers, right=True).tolist())


def even_ends(sorted_R: Tensor, experts: int) -> tuple[int, ...]:
    """The same where each expert has as many rows."""
    return tuple(share(len(sorted_R), experts, expert)[1] for expert in range(experts))


def _batches(ends: tuple[int, ...]) -> Iterator[ExpertBatch]:
    """The batches of experts that have rows. `ends`: of the rows of each expert."""
    starts = (0, *ends)
    first = 0
    for height, members in groupby(end - start for start, end in pairwise(starts)):
        last = first + len(list(members))
        if height:
            yield ExpertBatch(starts[first], starts[last], first, last)
        first = last


class Experts(torch.autograd.Function):
    """apply(x [T, D], weights [T, K], routes, gate [E F, D], up [E F, D], down [E D, F],
    activation, arithmetic) -> [T, D] of x's dtype; sums over a token's experts in at least
    float32, in the order of its slots."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        x_TD: Tensor,
        weights_TK: Tensor,
        routes: Routes,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        activation: str,
        by: Elementwise,
    ) -> Tensor:
        top_k = weights_TK.shape[1]
        rows_RD = x_TD[routes.slots_R // top_k]
        gate_RF = _times(rows_RD, gate, routes)
        up_RF = _times(rows_RD, up, routes)
        del rows_RD  # before the hidden activations are made
        ctx.save_for_backward(
            x_TD, weights_TK, routes.slots_R, routes.rows_TK, gate_RF, up_RF, gate, up, down
        )
        ctx.experts = routes.experts
        ctx.batches = routes.batches
        ctx.activation = activation
        ctx.by = by
        hidden_RF = by.gated(gate_RF, up_RF, activation)
        hidden_RF.mul_(_of_rows(weights_TK, routes))
        return _sum_of_tokens(_times(hidden_RF, down, routes), routes)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TD, weights_TK, slots_R, rows_TK, gate_RF, up_RF, gate, up, down = ctx.saved_tensors
        routes = Routes(slots_R, rows_TK, ctx.experts, ctx.batches)
        _, needs_weights, _, trains_gate, trains_up, trains_down, _, _ = ctx.needs_input_grad
        tokens_R = slots_R // weights_TK.shape[1]
        weight_R1 = _of_rows(weights_TK, routes)

        # 1. Through `down`. The gradient of a token's weight is that of its hidden activations
        #    times these, so that the output of experts need not be saved.
        grad_RD = grad_TD[tokens_R]
        d_hidden_RF = _times_transposed(grad_RD, down, routes)
        hidden_RF = ctx.by.gated(gate_RF, up_RF, ctx.activation)
        d_weights_TK = None
        if needs_weights:
            products_RF = d_hidden_RF * hidden_RF
            d_weights_R = products_RF.sum(-1, dtype=weights_TK.dtype)
            del products_RF
            d_weights_TK = d_weights_R[rows_TK]
        hidden_RF.mul_(weight_R1)
        d_down = _weight_grad(grad_RD, hidden_RF, down, routes) if trains_down else None
        del grad_RD, hidden_RF

        # 2. Through the activation, `gate` and `up`.
        d_hidden_RF.mul_(weight_R1)
        d_gate_RF, d_up_RF = ctx.by.gated_grad(d_hidden_RF, gate_RF, up_RF, ctx.activation)
        del d_hidden_RF
        rows_RD = x_TD[tokens_R]
        d_gate = _weight_grad(d_gate_RF, rows_RD, gate, routes) if trains_gate else None
        d_up = _weight_grad(d_up_RF, rows_RD, up, routes) if trains_up else None
        del rows_RD
        d_rows_RD = _times_transposed(d_gate_RF, gate, routes)
        up_EFD = routes.by_expert(up)
        for batch in routes.batches:
            batch.rows(d_rows_RD).baddbmm_(batch.rows(d_up_RF), batch.matrices(up_EFD))
        d_x_TD = _sum_of_tokens(d_rows_RD, routes)
        return d_x_TD, d_weights_TK, None, d_gate, d_up, d_down, None, None


def _times(rows_RI: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """Each row times the matrix [O, I] of its expert: [R, O]."""
    weights_EOI = routes.by_expert(weights)
    out_RO = rows_RI.new_empty(len(rows_RI), weights_EOI.shape[1])
    for batch in routes.batches:
        torch.bmm(batch.rows(rows_RI), batch.matrices(weights_EOI).mT, out=batch.rows(out_RO))
    return out_RO


def _times_transposed(rows_RO: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """Each row times the transposed matrix of its expert: [R, I]."""
    weights_EOI = routes.by_expert(weights)
    out_RI = rows_RO.new_empty(len(rows_RO), weights_EOI.shape[2])
    for batch in routes.batches:
        torch.bmm(batch.rows(rows_RO), batch.matrices(weights_EOI), out=batch.rows(out_RI))
    return out_RI


def _weight_grad(left_RO: Tensor, right_RI: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """The gradient of a matrix of all experts; zeros of an expert without rows."""
    grad = torch.zeros_like(weights)
    grad_EOI = routes.by_expert(grad)
    for batch in routes.batches:
        left_OR = batch.rows(left_RO).mT
        torch.bmm(left_OR, batch.rows(right_RI), out=batch.matrices(grad_EOI))
    return grad


def _of_rows(weights_TK: Tensor, routes: Routes) -> Tensor:
    """The weight of each row, [R, 1]."""
    return weights_TK.flatten()[routes.slots_R].unsqueeze(-1)


def _sum_of_tokens(rows_RD: Tensor, routes: Routes) -> Tensor:
    """The sum of the rows of each token, [T, D]."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    # Slot by slot: a scatter would add in an order that differs from run to run.
    first, *others = routes.rows_TK.unbind(-1)
    total_TD = rows_RD[first].to(wide)
    for rows_T in others:
        total_TD += rows_RD[rows_T]
    return total_TD.to(rows_RD.dtype)
