"""Moments in fewer bits: what codes stand for, what is never lost, what is found; and a noisy quadratic that tells wrong codes from right
ones."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from longshift.layout.blocks import BLOCK
from longshift.layout.box import Box
from longshift.spec.formats import LARGEST, MomentFormat
from longshift.state import moments as kept
from longshift.state.moments import PackedMoment, converted, largest
from longshift.state.records import place_boxes

WHOLE = (5, 300)


def made(x: Tensor, format: MomentFormat = "float8", root: bool = False, box: Box | None = None) -> PackedMoment:
    """A moment of a box with these values, packed in the first update."""
    box = box or Box.whole(tuple(x.shape))
    blocks = sum(1 for _ in range(box.start[-1] // BLOCK, -(-box.stop[-1] // BLOCK))) * (x.numel() // x.shape[-1])
    codes = torch.zeros(x.numel(), dtype=kept.DTYPES[format])
    moment = PackedMoment(
        place_boxes([("", box)]), format, root, x.flatten().clone(), codes, torch.zeros(blocks) if format == "float8" else None
    )
    moment.measure()
    moment.pack(1)
    return moment


def seen(moment: PackedMoment) -> Tensor:
    moment.unpack()
    return moment.wide.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eight_bits_are_within_a_step_of_the_code_and_exact_for_the_largest_of_a_block(dtype: torch.dtype):
    x = torch.randn(WHOLE, dtype=dtype, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 5, dtype=dtype)[:, None]
    first, second = seen(made(x)).view(WHOLE), seen(made(x.square(), root=True)).view(WHOLE)
    scales = largest(x, 0, False).repeat_interleave(BLOCK, 1)[:, : WHOLE[1]] / LARGEST
    step = torch.maximum(x.abs() / 8, scales * 2.0**-9)
    assert (first - x).abs().le(step).all()
    assert (second.sqrt() - x.abs()).abs().le(step * 1.001).all()
    at = x.abs() > largest(x, 0, False).repeat_interleave(BLOCK, 1)[:, : WHOLE[1]] * (1 - 1e-6)
    assert (first[at] / x[at] - 1).abs().max() < 1e-6


@pytest.mark.parametrize(("format", "root"), [("float8", False), ("float8", True), ("bf16", False)])
def test_rounding_has_no_bias(format: MomentFormat, root: bool):
    x = torch.linspace(0.3, 1.0, BLOCK)[None]
    mean = torch.zeros(BLOCK)
    for number in range(BLOCK):
        moment = made(x.square() if root else x, format, root)
        moment.unpack()
        moment.wide.copy_((x.square() if root else x).flatten())
        moment.measure()
        moment.pack(number)
        found = seen(moment)
        mean += found.sqrt() if root else found
    assert (mean / BLOCK / x[0] - 1).abs().max() < 1e-3


def test_a_second_moment_is_zero_only_where_it_was_zero():
    x = torch.zeros(1, BLOCK)
    x[0, 0], x[0, 1], x[0, 2] = 1.0, 1e-30, 1e-12
    assert seen(made(x, root=True)).gt(0).tolist() == x[0].gt(0).tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("root", [False, True])
def test_what_is_not_finite_has_an_infinite_scale_and_stays_so(bad: float, root: bool):
    x = torch.ones(2, 300)
    x[1, 200] = abs(bad) if root else bad
    moment = made(x, root=root)
    assert moment.scales is not None
    assert moment.scales.view(2, 3).isfinite().tolist() == [[True] * 3, [True, False, True]]
    assert not bool(seen(moment).view(2, 300)[1, 200].isfinite())


def test_parts_of_a_block_are_coded_alike():
    x = torch.randn(WHOLE, generator=torch.Generator().manual_seed(3))
    whole = made(x)
    parts = [Box((0, a), (5, b)) for a, b in ((0, 40), (40, 200), (200, 300))]
    found = []
    for box in parts:
        moment = made(x[:, box.start[1] : box.stop[1]], box=box)
        moment.unpack()
        moment.wide.copy_(x[:, box.start[1] : box.stop[1]].flatten())
        first, last = box.start[1] // BLOCK, -(-box.stop[1] // BLOCK)
        assert moment.scales is not None
        moment.scales.copy_(largest(x, 0, False)[:, first:last].flatten())
        moment.pack(1)
        found.append(moment.codes.view(torch.uint8).view(box.shape))
    assert torch.equal(torch.cat(found, 1), whole.codes.view(torch.uint8).view(WHOLE))


@pytest.mark.parametrize("now", ["float32", "bf16", "float8"])
@pytest.mark.parametrize("was", ["float32", "bf16", "float8"])
def test_a_checkpoint_is_converted_box_by_box_as_a_whole(was: MomentFormat, now: MomentFormat):
    x = torch.rand(WHOLE, generator=torch.Generator().manual_seed(4))
    moment = made(x, was, root=was == "float8") if was != "float32" else None
    scales = moment.scales.view(5, 3) if moment is not None and moment.scales is not None else None
    saved = {"exp_avg_sq": moment.codes.view(WHOLE) if moment else x, "exp_avg_sq.scale": scales}
    read: Callable[[str, str, Box], Tensor] = lambda kind, name, box: saved[kind][tuple(map(slice, box.start, box.stop))]  # noqa: E731  # pyright: ignore
    whole, blocks = converted(read, "exp_avg_sq", "", Box.whole(WHOLE), WHOLE, was, now, torch.float32)
    box = Box((1, 100), (4, 260))
    part, own = converted(read, "exp_avg_sq", "", box, WHOLE, was, now, torch.float32)
    assert torch.equal(part.float(), whole[1:4, 100:260].float())
    assert whole.dtype == kept.DTYPES.get(now, torch.float32)
    if blocks is not None and own is not None:
        assert torch.equal(own, blocks[1:4, 0:3])
        values = kept.decoded(whole, blocks, 0, True, torch.float32)
        assert (values.sqrt() / x.sqrt() - 1).abs()[x > 1e-3].max() < 0.3


# A noisy quadratic: curvatures over four powers of ten in each block.


def descended(steps: int = 400) -> float:
    """The loss after steps of AdamW with packed moments; of float32 ones, 0.000588."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-2, 2, BLOCK)[torch.randperm(BLOCK, generator=generator)].repeat(4)
    weight = torch.nn.Parameter(torch.ones(4 * BLOCK))
    adamw = torch.optim.AdamW([weight], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    box = Box((0,), (4 * BLOCK,))
    moments = {name: made(torch.zeros(4 * BLOCK), root=name in kept.ROOTS, box=box) for name in ("exp_avg", "exp_avg_sq")}
    for moment in moments.values():
        moment.memory.hold()
    adamw.state[weight] = {name: moment.wide for name, moment in moments.items()} | {"step": torch.tensor(0.0)}
    for step in range(steps):
        adamw.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        for moment in moments.values():
            moment.unpack()
        weight.grad = curvature * (weight.detach() + 0.3 * torch.randn(weight.shape, generator=generator))
        adamw.step()
        for moment in moments.values():
            moment.measure()
            moment.pack(step + 1)
    return float(weight.detach().square().mean())


def test_a_noisy_quadratic_is_descended():
    assert descended() == pytest.approx(0.000588, rel=0.02)


def test_plain_codes_do_not_descend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "ROOTS", ())
    assert not descended() < 1


# Mistakes


def rounded_to_zero(patch: pytest.MonkeyPatch) -> None:
    """Roots that are small are lost."""
    patch.setattr(kept, "SMALLEST", 0.0)


def saturated(patch: pytest.MonkeyPatch) -> None:
    """What is not finite becomes the largest that is."""

    def saturating(x: Tensor, column: int, root: bool) -> Tensor:
        return largest(x.nan_to_num_(1.0, 1e30, -1e30), column, root)

    patch.setattr(kept, "largest", saturating)


def nearest(patch: pytest.MonkeyPatch) -> None:
    """Values are rounded to the nearest code."""
    patch.setattr(kept, "turn", lambda number, device: torch.full((BLOCK,), BLOCK // 2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("mutant", "notices"),
    [
        (rounded_to_zero, test_a_second_moment_is_zero_only_where_it_was_zero),
        (saturated, partial(test_what_is_not_finite_has_an_infinite_scale_and_stays_so, math.inf, False)),
        (nearest, partial(test_rounding_has_no_bias, "float8", True)),
    ],
)
def test_a_mistake_shows(mutant: Callable, notices: Callable, monkeypatch: pytest.MonkeyPatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        notices()
