"""Tensor parallelism with Megatron sequence parallelism.

Papers: Megatron-LM (arXiv 1909.08053), Reducing Activation Recomputation (arXiv 2205.05198,
"sequence parallelism").

Sharding over t tensor-parallel ranks: weights that enter wide, W[F_t, D] (q, k, v, gate, up), are
cut by output; weights that leave, W[D, F_t] (o, down), by input; embedding and head by vocabulary,
E[V_t, D]. The residual stream x[T_t, D] and the norms see a share of the tokens, so that every
weight's gradient, the uncut norms' too, is a partial sum over the ranks that hold it.

    x[T_t, D] ─ norm ─ all-gather ─ [T, D]
              ─ W[F_t, D] ─ [T, F_t] ─ W[D, F_t]
              ─ partial [T, D] ─ reduce-scatter ─ x[T_t, D]

Bytes in and out of a rank, per block: forward 2 all-gathers and 2 reduce-scatters of T*D*(t-1)/t
elements; backward the same. The loss moves three numbers a token; a loss of the user's own moves
logits, of which every rank then has whole rows.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longshift.dist.collectives import GatherTokens, Group, ScatterTokens
from longshift.model.functions import Elementwise
from longshift.model.loss import CrossEntropySum, TokenLossSum
from longshift.parallel.seams import LayoutOps
from longshift.spec.param import share


class TensorSeams(LayoutOps):
    """Tensor parallelism around the halves of a block, the embedding and the loss."""

    @property
    def tensor_group(self) -> Group:
        return self.groups["tp"]

    def enter(self, x: Tensor) -> Tensor:
        """All tokens from each rank's share, [T/t, D] -> [T, D]; backward: reduce-scatter."""
        return GatherTokens.apply(x, self.tensor_group)  # pyright: ignore[reportReturnType]

    def leave(self, x: Tensor) -> Tensor:
        """Each rank's share of the sum of partial sums, [T, D] -> [T/t, D]; backward:
        all-gather."""
        return ScatterTokens.apply(x, self.tensor_group)  # pyright: ignore[reportReturnType]

    def all_sum(self, x: Tensor) -> Tensor:
        return self.tensor_group.all_reduce(x)

    def embed(self, weight_VD: Tensor, tokens_T: Tensor) -> Tensor:
        """This rank's share [T/t, D] of the embeddings, of which it holds rows of the
        vocabulary."""
        # Tokens of other ranks' rows add nothing to the sum over the group.
        first = self.vocab_first
        is_local = (tokens_T >= first) & (tokens_T < first + weight_VD.shape[0])
        rows_TD = F.embedding(torch.where(is_local, tokens_T - first, 0), weight_VD)
        return self.leave(rows_TD * is_local.unsqueeze(-1))

    def loss(self, logits_TV: Tensor, labels_T: Tensor, by: Elementwise) -> Tensor:
        """Sum of the losses over a head cut by vocabulary; the same number on every rank of the
        group. Of a loss of the user's own every rank computes the whole rows, and takes the
        gradient of its columns."""
        group = self.tensor_group
        if self.token_loss is None:
            return CrossEntropySum.apply(  # pyright: ignore[reportReturnType]
                logits_TV, labels_T, self.vocab_first, self._all_max, group.all_reduce, by
            )
        vocab = self.spec.vocab
        first, stop = share(vocab, group.size, group.index)
        return TokenLossSum.apply(  # pyright: ignore[reportReturnType]
            logits_TV,
            labels_T,
            self.token_loss,
            lambda rank_logits: gather_columns(rank_logits, vocab, group),
            lambda grad: grad[:, first:stop].contiguous(),  # a view would keep all columns
        )

    def _all_max(self, x: Tensor) -> Tensor:
        return self.tensor_group.all_reduce(x, dist.ReduceOp.MAX)


def gather_columns(x: Tensor, total: int, group: Group) -> Tensor:
    """[T, V_i] on each rank -> [T, V] on all; narrower shares are filled up for the way."""
    spans = [share(total, group.size, index) for index in range(group.size)]
    widths = [stop - first for first, stop in spans]

    # No share is wider than the first.
    filled = F.pad(x, (0, widths[0] - x.shape[1]))
    parts = x.new_empty((group.size, *filled.shape))
    group.all_gather(parts, filled.contiguous()).wait()

    return torch.cat([part[:, :width] for part, width in zip(parts, widths)], dim=1)
