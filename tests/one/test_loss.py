"""The summed cross-entropy against torch's, whole and with the vocabulary in slices."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshift.model.functions import WRITTEN_OUT, Elementwise, alone, compiled
from longshift.model.loss import IGNORE, CrossEntropySum

TOKENS, VOCAB = 23, 257


def case(dtype: torch.dtype = torch.float64, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCAB - 1])
    labels[5:9] = IGNORE
    return logits.requires_grad_(), labels


@pytest.fixture(scope="module", params=["written out", "compiled"])
def by(request: pytest.FixtureRequest) -> Elementwise:
    return WRITTEN_OUT if request.param == "written out" else compiled(torch.device("cpu"))


def ours(
    logits: Tensor, labels: Tensor, first: int = 0, all_max: Callable = alone, all_sum: Callable = alone, by: Elementwise = WRITTEN_OUT
) -> tuple[Tensor, Tensor]:
    """Loss and gradient, with a gradient of 3 coming in."""
    loss = CrossEntropySum.apply(logits, labels, first, all_max, all_sum, by)
    return loss.detach(), torch.autograd.grad(3 * loss, logits)[0]  # pyright: ignore


def torchs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.double()
    loss = F.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="sum")
    return loss.detach(), torch.autograd.grad(3 * loss, logits)[0]


def difference(found: Tensor, expected: Tensor) -> float:
    assert expected.norm() > 1e-3
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("dtype", "spread", "bound"), [(torch.float64, 3.0, 1e-14), (torch.float64, 1e4, 1e-14), (torch.float32, 3.0, 1e-6)]
)
def test_sum_and_gradient_are_those_of_torch(dtype, spread, bound, by):
    logits, labels = case(dtype, spread)
    loss, grad = ours(logits, labels, by=by)
    expected_loss, expected_grad = torchs(logits, labels)
    assert (loss.dtype, grad.dtype) == (dtype, dtype)
    assert difference(loss, expected_loss) < bound
    assert difference(grad, expected_grad) < bound
    assert not grad[5:9].any()


def test_bf16_logits_are_summed_in_float32(by):
    logits, labels = case(torch.bfloat16)
    loss, grad = ours(logits, labels, by=by)
    expected_loss, expected_grad = torchs(logits, labels)
    assert (loss.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
    assert difference(loss, expected_loss) < 1e-6
    assert torch.equal(grad, expected_grad) or difference(grad, expected_grad) < 1e-4


def test_the_logits_are_left_alone(by):
    logits, labels = case(torch.float32)
    before = logits.detach().clone()
    ours(logits, labels, by=by)
    assert torch.equal(logits, before)


def test_no_targets_are_zero_loss_and_zero_gradient():
    logits, labels = case()
    loss, grad = ours(logits, torch.full_like(labels, IGNORE))
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(grad))


class Other:
    """The holder of the other columns, as all_max and all_sum show it."""

    def __init__(self, logits: Tensor, labels: Tensor, first: int):
        self.logits, self.column = logits.detach(), labels - first

    def all_max(self, x: Tensor) -> Tensor:
        self.highest = torch.maximum(x, self.logits.amax(-1))
        return self.highest

    def all_sum(self, x: Tensor) -> Tensor:
        wide = self.logits - self.highest.unsqueeze(-1)
        here = (self.column >= 0) & (self.column < wide.shape[1])
        target = torch.where(here, wide.gather(1, self.column.clamp(0, wide.shape[1] - 1)[:, None])[:, 0], 0.0)
        return x + torch.stack((wide.exp().sum(-1), target))


def sliced(logits: Tensor, labels: Tensor, cut: int, shift: int = 0, by: Elementwise = WRITTEN_OUT) -> list[tuple[Tensor, Tensor]]:
    """What the holders of the columns before `cut` and of those from `cut` on find; `shift` misplaces the second."""
    left, right = (half.detach().requires_grad_() for half in (logits[:, :cut], logits[:, cut:]))
    others = Other(right, labels, cut), Other(left, labels, 0)
    return [
        ours(left, labels, 0, others[0].all_max, others[0].all_sum, by),
        ours(right, labels, cut + shift, others[1].all_max, others[1].all_sum, by),
    ]


@pytest.mark.parametrize("cut", [1, 128, 256])
def test_slices_of_the_vocabulary_agree_with_the_whole(cut, by):
    logits, labels = case()
    (loss, left), (same_loss, right) = sliced(logits, labels, cut, by=by)
    expected_loss, expected_grad = torchs(logits, labels)
    assert difference(loss, expected_loss) < 1e-14
    assert difference(same_loss, expected_loss) < 1e-14
    assert difference(torch.cat((left, right), 1), expected_grad) < 1e-14


def test_a_slice_that_starts_elsewhere_is_noticed():
    logits, labels = case()
    loss, right = sliced(logits, labels, 128, shift=1)[1]
    expected_loss, expected_grad = torchs(logits, labels)
    assert difference(loss, expected_loss) > 1e-3
    assert difference(right, expected_grad[:, 128:]) > 1e-3
