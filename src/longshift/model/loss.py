"""Cross-entropy as a *sum* over target tokens; labels of -100 contribute nothing. The only division
is by the step's global count of target tokens, and it happens elsewhere.

Works on a slice of the vocabulary too (Megatron-LM, arXiv 1909.08053, section 3): a rank that holds
rows [first, first + V_i) of the head passes how to take the maximum and the sum over the ranks that
hold the others; [T] numbers travel, never logits.

A loss of the user's own is a function of logits and labels that gives each token's loss, summed as
cross-entropies are.

    rows [T, V], at least float32 ─ function(rows, labels) ─ losses [T] ─ sum over target tokens

Its gradient is formed in the forward, and waits for the backward in place of the function's graph:
[T, V_i] of a rank that holds V_i columns. A token that is no target has label 0 when the function
sees it, and its loss and gradient are dropped.

[Note: what a token loss may do] A layout cuts tokens anywhere, into packs, chunks and blocks of
rows, and the numbers must stay. So the loss of a token depends on its own row and label. The ledger
and the clock play the function on tensors without values, so it may not ask for values (`.item()`,
`if loss > 0`, boolean indices), nor use tensors that lie elsewhere than the logits. All of it is
tried once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longshift.errors import UsageError
from longshift.model.functions import WRITTEN_OUT, Elementwise, accum_dtype
from longshift.user_code import describe_error, load_object, printing_aside, split_object

IGNORE = -100
KEY = "train.loss"
CHECK_ROWS = (1, 3, 4)  # parts of the rows on which a function is tried
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative

Columns = Callable[[Tensor], Tensor]


class CrossEntropySum(torch.autograd.Function):
    """apply(logits [T, V_i], labels [T] global ids, first, all_max, all_sum, arithmetic) -> scalar,
    float32 (float64 for float64)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        logits,
        labels,
        first: int,
        all_max: Callable[[Tensor], Tensor],
        all_sum: Callable[[Tensor], Tensor],
        by: Elementwise = WRITTEN_OUT,
    ):
        # 1. Each row's highest logit, over all ranks, is taken off before logits are raised to e.
        highest = all_max(logits.amax(-1).to(accum_dtype(logits)))

        # 2. Sums of the weights, and the target's logit from the rank that holds its column, in one
        # message.
        is_held = (labels >= first) & (labels < first + logits.shape[1])
        column = torch.where(is_held, labels - first, 0).unsqueeze(-1)
        weights, total, target = by.weights(logits, highest, column)
        total, target = all_sum(torch.stack((total, torch.where(is_held, target, 0.0)))).unbind()

        # 3. The sum over target tokens.
        is_target = labels != IGNORE
        ctx.save_for_backward(weights, highest, total, column, is_held, is_target)
        ctx.dtype = logits.dtype
        ctx.by = by
        return torch.where(is_target, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, highest, total, column, is_held, is_target = ctx.saved_tensors
        grad_T = grad * is_target
        dlogits = ctx.by.weights_grad(
            weights, highest, grad_T / total, column, grad_T * is_held, ctx.dtype
        )
        return dlogits, None, None, None, None, None


class TokenLossSum(torch.autograd.Function):
    """apply(logits [T, V_i], labels [T], function, gather, select) -> scalar, float32 (float64 for
    float64). `gather`: all columns [T, V] of the rows; `select`: of [T, V] the columns [T, V_i] of
    this rank."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx,
        logits: Tensor,
        labels: Tensor,
        function: "CheckedLoss",
        gather: Columns,
        select: Columns,
    ) -> Tensor:
        counted = labels != IGNORE
        rows = gather(logits)
        rows = rows.to(accum_dtype(rows))
        total, grad = function.sum_and_gradient(rows, labels, counted, ctx.needs_input_grad[0])
        del rows
        if grad is not None:
            ctx.save_for_backward(select(grad))
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (saved_grad,) = ctx.saved_tensors
        return saved_grad.mul_(grad).to(ctx.dtype), None, None, None, None


@dataclass(frozen=True)
class CheckedLoss:
    """A token loss, each of whose results is looked at. `text`: its name in the config."""

    text: str
    function: Callable[..., Any]

    def sum_and_gradient(
        self, rows: Tensor, labels: Tensor, counted: Tensor, learns: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of the losses of the counted tokens, and its gradient [T, V] if it `learns`."""
        rows = rows.detach().requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            # The label of a token that is no target may be no column.
            losses = self.losses(rows, torch.where(counted, labels, 0))
            total = torch.where(counted, losses, 0.0).sum()
        if not learns:
            return total, None

        (grad,) = torch.autograd.grad(total, rows)
        # A gradient may be one number expanded. Zero times a derivative that is not finite is not
        # zero.
        return total.detach(), grad.contiguous().masked_fill_(~counted.unsqueeze(-1), 0.0)

    def losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss [T] of each token. Raises UsageError for a result of another shape or format, or
        logits that were changed."""
        version = rows._version
        losses = self.function(rows, labels)
        if rows._version != version:
            raise self._fault("changes its logits in place; compute on a copy")
        if not isinstance(losses, Tensor):
            raise self._fault(
                f"returns {type(losses).__name__}, and a tensor with the loss of each token is"
                " needed"
            )
        if losses.shape != labels.shape:
            shape = list(losses.shape)
            raise self._fault(
                f"returns shape {shape} for {len(labels)} tokens; return the loss of each, neither"
                " sum nor mean"
            )
        if losses.dtype != rows.dtype:
            raise self._fault(
                f"returns {losses.dtype} for logits of {rows.dtype}; leave the format as it is"
            )
        if rows.requires_grad and not losses.requires_grad:
            raise self._fault(
                "returns losses that have no gradient; compute them from the logits, without detach"
                " or no_grad"
            )
        return losses

    def check(self, vocab: int) -> None:
        """Try the function once, on random rows. Raises UsageError where it is no sum over tokens,
        or cannot be played without values."""
        generator = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(sum(CHECK_ROWS), vocab, generator=generator, dtype=torch.float64)
        labels = torch.randint(vocab, (sum(CHECK_ROWS),), generator=generator)
        for dtype in (torch.float32, torch.float64):
            self._check_independence(logits.to(dtype), labels)
        try:
            with torch.enable_grad():
                self.losses(logits.to("meta").requires_grad_(), labels.to("meta"))
        except UsageError:
            raise
        except Exception as fault:
            raise self._fault(
                "cannot be played on tensors without values, by which memory is predicted:"
                f" {self._describe(fault)}; it may not ask for values (.item(), if, boolean"
                " indices), and must make tensors where the logits are (device=logits.device)"
            ) from fault

    def _check_independence(self, logits: Tensor, labels: Tensor) -> None:
        """Compare the whole with its parts: losses, and gradients."""
        try:
            with torch.no_grad():  # or autograd would refuse a change in place, in other words
                self.losses(logits.clone(), labels)
            expected = self._losses_and_gradient(logits, labels)
            parts = [
                self._losses_and_gradient(*part)
                for part in zip(logits.split(CHECK_ROWS), labels.split(CHECK_ROWS))
            ]
        except UsageError:
            raise
        except Exception as fault:
            raise self._fault(
                f"fails on random logits [{len(labels)}, {logits.shape[1]}]:"
                f" {self._describe(fault)}"
            ) from fault
        for noun, values, part_values in zip(("loss", "gradient"), expected, zip(*parts)):
            difference = (values - torch.cat(part_values)).abs().max()
            difference = float(difference / values.abs().max().clamp_min(1.0))
            if not difference <= TOLERANCE[logits.dtype]:
                raise self._fault(
                    f"is no sum over tokens: the {noun} of a token differs by {difference:.1g} with"
                    " the tokens that are computed beside it. Layouts cut tokens into packs and"
                    " chunks anywhere, so the loss of a token must depend on its own row and label"
                    " alone"
                )

    def _losses_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and gradients of some rows."""
        rows = logits.clone().requires_grad_()
        with torch.enable_grad():
            losses = self.losses(rows, labels)
            (grad,) = torch.autograd.grad(losses.sum(), rows)
        return losses.detach(), grad

    def _describe(self, fault: Exception) -> str:
        return describe_error(fault, split_object(self.text)[0])

    def _fault(self, reason: str) -> UsageError:
        return UsageError(f"{KEY}: {self.text} {reason}")


@lru_cache(maxsize=16)
def token_loss(text: str, vocab: int) -> CheckedLoss:
    """The token loss that a config names "package.module:name", tried on rows of so many columns.
    Raises UsageError."""
    function = load_object(text, KEY)
    if not callable(function):
        raise UsageError(f"{KEY}: {text} is no function of logits and labels")
    loss = CheckedLoss(text, function)
    with printing_aside():
        loss.check(vocab)
    return loss
