"""The examples of docs/extending.md, as a module that ranks import, and code that is refused."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def example(file: str) -> str:
    """The block of code on the page that is this file."""
    found = re.search(rf"^```python\n(# {re.escape(file)}\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found, file
    return found[1]


for _file in ("my_losses.py", "my_rules.py"):
    exec(compile(example(_file), _file, "exec"))


def entropy_where_finite(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Cross-entropy as it is, times infinity where the label is 0, as of tokens that are no targets."""
    return F.cross_entropy(logits_TV, labels_T, reduction="none") * torch.where(labels_T == 0, torch.inf, 1.0).to(logits_TV)


def linear(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Its gradient is one number, expanded."""
    return logits_TV.sum(-1)


# Losses that are refused.


def mean(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, labels_T)


def broken(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    raise ValueError("no such row\nand more")


def half(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="none")


def in_place(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.mul_(0.5), labels_T, reduction="none")


def centred(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV - logits_TV.mean(0), labels_T, reduction="none")


def by_position(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    weights_T = torch.arange(1, len(labels_T) + 1, device=logits_TV.device).to(logits_TV)
    return F.cross_entropy(logits_TV, labels_T, reduction="none") * weights_T


def random(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(logits_TV, 0.1), labels_T, reduction="none")


def asking(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, labels_T, reduction="none") * (1.0 if logits_TV.max().item() < 1e9 else 0.0)


def detached(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.detach(), labels_T, reduction="none")


def text(logits_TV: Tensor, labels_T: Tensor) -> str:
    return "loss"


number = 3


# Rules that are refused.


class Sgd:
    moments: tuple[str, ...] = ()

    def update(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: int, lr: float, weight_decay: float) -> None:
        weight.sub_(self.direction(weight, gradient, moments), alpha=lr)

    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        return gradient


class Trust(Sgd):
    """LARS."""

    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        return gradient * (weight.norm() / gradient.norm())


class Neighbor(Sgd):
    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        return gradient + 0.1 * gradient.roll(1)


class Remembers(Sgd):
    def __init__(self) -> None:
        self.last: Tensor | None = None

    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        last = self.last if self.last is not None and self.last.shape == gradient.shape else torch.zeros_like(gradient)
        self.last = gradient.clone()
        return gradient + 0.9 * last.to(gradient)


class Resets(Sgd):
    """Remembers, but begins anew whenever the same vector does."""

    def __init__(self) -> None:
        self.by_length: dict[int, Tensor] = {}

    def update(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: int, lr: float, weight_decay: float) -> None:
        if step == 1:
            self.by_length.clear()
        total = self.by_length.setdefault(1, torch.zeros(len(gradient), dtype=gradient.dtype))
        if len(total) != len(gradient):
            total = torch.zeros_like(gradient)
        self.by_length[1] = total = total + gradient
        weight.sub_(total, alpha=lr)


class Draws(Sgd):
    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Clips(Sgd):
    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        return gradient.clamp_(-0.1, 0.1)


class Rebinds(Sgd):
    moments = ("m",)

    def direction(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> Tensor:
        moments["m"] = 0.9 * moments["m"] + gradient
        return moments["m"]


class Functional(Sgd):
    def update(self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: int, lr: float, weight_decay: float) -> Tensor:
        return weight - lr * gradient


class Needs(Sgd):
    def __init__(self, beta: float):
        self.beta = beta


class Broken(Sgd):
    def update(self, *arguments: object) -> None:
        raise ValueError("no such vector")


class Master(Sgd):
    moments = ("master",)


class Text(Sgd):
    moments = "momentum"  # pyright: ignore


class Still:
    moments = ()
