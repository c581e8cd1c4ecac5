"""An optimizer rule of the user's own: arithmetic on flat vectors of weights, gradients and
moments, element by element.

[Note: what a rule may do] Home cuts weights anywhere, lays them end to end, and updates them in any
order, some before the norm is known. So an element's update depends on its own weight, gradient and
moments, on the step and on the rates: no norm of a weight, no shape, no neighbour. What a rule
remembers is in its moments, which are moved, packed, saved and resumed; gradients stay as they are,
for an early update may be made again. All of it is tried once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longshift.errors import UsageError
from longshift.spec.rule import KEY, load_rule
from longshift.user_code import describe_error, printing_aside, split_object

PIECE = 1 << 22  # elements that are updated at one time: a rule's temporaries are no larger
CHECK_ELEMENTS = 64  # elements on which a rule is tried
CHECK_STEPS = 4
CHECK_LR = 0.01
CHECK_DECAY = 0.1
TOLERANCE = 1e-9  # relative


def update_in_pieces(
    rule: Any,
    weight: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    step: int,
    lr: float,
    weight_decay: float,
) -> None:
    """Update flat vectors in place. `step`: of the update, from 1."""
    for start in range(0, len(weight), PIECE):
        piece = slice(start, start + PIECE)
        of_piece = {name: moment[piece] for name, moment in moments.items()}
        rule.update(weight[piece], gradient[piece], of_piece, step, lr, weight_decay)


class RuleOptimizer(torch.optim.Optimizer):
    """A rule as an optimizer of torch: a weight after another, each as a whole. `longshift check`
    compares layouts with it."""

    def __init__(self, rule: Any, params: Any, lr: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state |= {name: torch.zeros_like(weight) for name in self._rule.moments}
                    state["step"] = 0
                state["step"] += 1
                # As flat vectors, which is all that a rule sees at home.
                moments = {name: state[name].view(-1) for name in self._rule.moments}
                gradient = weight.grad.reshape(-1)
                self._rule.update(
                    weight.view(-1),
                    gradient,
                    moments,
                    state["step"],
                    group["lr"],
                    group["weight_decay"],
                )


@lru_cache(maxsize=16)
def checked_rule(text: str) -> Any:
    """The rule that a config names "package.module:Rule", tried on random vectors. Raises
    UsageError where it is not elementwise, or remembers something outside its moments."""
    check = RuleCheck(text)
    with printing_aside():
        check.run()
    return check.rule


class RuleCheck:
    """A rule is tried on random vectors, cut in several ways. `text`: its name in the config."""

    def __init__(self, text: str):
        self.text = text
        self.rule = load_rule(text)
        generator = torch.Generator().manual_seed(0)
        self.start, *self.gradients = torch.randn(
            1 + CHECK_STEPS, CHECK_ELEMENTS, generator=generator, dtype=torch.float64
        )

    def run(self) -> None:
        """Raises UsageError that says what the rule may not do."""
        elements = torch.arange(CHECK_ELEMENTS)
        parts = elements.split([1, CHECK_ELEMENTS // 2 - 1, CHECK_ELEMENTS // 2])
        generator = torch.Generator().manual_seed(1)
        try:
            whole = self._train([elements])
            again = self._train([elements], copies=True)
            one_by_one = torch.stack([self._train([part]) for part in parts]).sum(0)
            mixed = self._train([torch.randperm(CHECK_ELEMENTS, generator=generator)])
            in_turn = self._train(parts)
            self._train([elements], dtype=torch.float32)
        except UsageError:
            raise
        except Exception as fault:
            error = describe_error(fault, split_object(self.text)[0])
            raise self._fault(
                f"fails on random vectors of {CHECK_ELEMENTS} elements: {error}"
            ) from fault
        self._compare(
            again,
            whole,
            "remembers something outside its moments, or draws random numbers: the same updates"
            " differ",
        )
        self._compare(
            one_by_one,
            whole,
            "is not elementwise: parts of a vector are updated otherwise than the whole",
        )
        self._compare(
            mixed,
            whole,
            "is not elementwise: the order of a vector's elements changes their updates",
        )
        self._compare(
            in_turn,
            whole,
            "remembers something outside its moments: vectors that are updated in turn differ from"
            " each alone",
        )

    def _train(
        self, parts: Sequence[Tensor], dtype: torch.dtype = torch.float64, copies: bool = False
    ) -> Tensor:
        """Weight and moments [1 + moments, CHECK_ELEMENTS] after some steps, zero where no part is.
        `parts`: indices of the elements of each vector; `copies`: every step has vectors of its
        own."""
        # 1. The weights of each part, and its moments.
        vectors = []
        for part in parts:
            moments = [torch.zeros(len(part), dtype=dtype) for _ in self.rule.moments]
            vectors.append([self.start[part].to(dtype), *moments])

        # 2. Their updates.
        for step, gradient in enumerate(self.gradients, 1):
            for number, part in enumerate(parts):
                if copies:
                    vectors[number] = [vector.clone() for vector in vectors[number]]
                self._update(*vectors[number], gradient=gradient[part].to(dtype), step=step)

        # 3. All parts in one tensor.
        result = torch.zeros(1 + len(self.rule.moments), CHECK_ELEMENTS, dtype=torch.float64)
        for part, of_part in zip(parts, vectors):
            result[:, part] = torch.stack(of_part).double()
        return result

    def _update(self, weight: Tensor, *moments: Tensor, gradient: Tensor, step: int) -> None:
        moments_by_name = dict(zip(self.rule.moments, moments))
        weight_before = weight.clone()
        gradient_before = gradient.clone()
        self.rule.update(weight, gradient, moments_by_name, step, CHECK_LR / step, CHECK_DECAY)
        if weight.equal(weight_before):
            raise self._fault(
                "does not change the weight: update it in place, as with weight.add_(...)"
            )
        if not gradient.equal(gradient_before):
            raise self._fault(
                "changes the gradient, which an update may need again; compute on a copy"
            )
        has_same_names = list(moments_by_name) == list(self.rule.moments)
        if not has_same_names or any(x is not y for x, y in zip(moments_by_name.values(), moments)):
            raise self._fault(
                "puts other tensors into its moments: change them in place, as with"
                ' moments["m"].mul_(...)'
            )

    def _compare(self, result: Tensor, expected: Tensor, reason: str) -> None:
        difference = float((result - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        # NaN is no equality, either.
        if not difference <= TOLERANCE:
            raise self._fault(f"{reason} (by {difference:.1g} after {CHECK_STEPS} steps)")

    def _fault(self, reason: str) -> UsageError:
        return UsageError(f"{KEY}: {self.text} {reason}")
