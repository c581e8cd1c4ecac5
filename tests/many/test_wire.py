"""Gradients and weights in fewer bits on the wire: what comes home is the sum of what each rank's own gradient is coded as, in float32
and in the order of ranks; the same bits under every stage of ZeRO and wherever home is; what is not finite is found; a model learns."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from forked import DEADLINE_S, Worlds
from home_ranks import made
from parity import FAMILIES, uneven_lengths
from torch import Tensor
from trial import Trial, build

from longshift.dist.world import World
from longshift.errors import NonFiniteError
from longshift.layout import strips
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import pieces_of
from longshift.spec.formats import GradientWire, WeightWire, Wire
from longshift.spec.model import ModelSpec
from longshift.state import block_codec, wire
from longshift.state.copies import AlignedCopies
from longshift.step.update import train_step

BLOCK = 128
# Rows of one block, and of several, which tensor parallelism cuts inside; a vocabulary that is prime.
SPEC = replace(FAMILIES["llama"], family="qwen2", qkv_bias=True, heads=4, kv_heads=2, head_width=40, width=128, ffn=300, layers=2)
LAYOUTS = ("dp2.z1", "dp3.z3", "tp2.z1", "dp2.tp2.z2", "pp2.dp2.z3", "ring2.z2")


def trial(gradients: GradientWire = "float32", weights: WeightWire = "compute", steps: int = 3, **more: object) -> Trial:
    return Trial(SPEC, uneven_lengths(steps, 3, 20, (6,)), "float32", gradients=gradients, weights=weights, **more)  # pyright: ignore[reportArgumentType]


# What a sum is, in numpy


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of three bits after the first, an exponent of -6 at the least, and 448 at the most."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 1, -6) - 3).astype(np.float32)
    return (np.rint(x / step) * step).clip(-448, 448)


def arrives(x: np.ndarray, column: int, sent: str) -> np.ndarray:
    """What arrives of a box that begins in this column of the weight, float32."""
    if sent == "bf16":
        return torch.from_numpy(x).bfloat16().float().numpy()
    if sent == "float32" or x.ndim == 1:
        return x
    found = x.copy()
    edges = [0, *range(BLOCK - column % BLOCK, x.shape[-1], BLOCK), x.shape[-1]]
    for first, last in pairwise(edges):
        part = x[..., first:last]
        scale = np.maximum(np.abs(part).max(-1, keepdims=True) / np.float32(448), np.float32(2.0**-126))
        found[..., first:last] = e4m3(part / scale) * scale
    return found


def values(spec: ModelSpec, name: str, rank: int) -> Tensor:
    """A rank's gradient of a whole weight: magnitudes over eight powers of ten, a row of zeros, and one of the smallest numbers."""
    generator = torch.Generator().manual_seed(1000 * rank + spec.params.index(spec.by_name[name]))
    shape = spec.by_name[name].shape
    found = torch.randn(shape, generator=generator) * 10.0 ** (torch.rand(shape, generator=generator) * 8 - 6)
    if len(shape) > 1:
        found[0], found[1] = 0.0, found[1] * 1e-30
    return found


def sums(world: World, trial: dict, layout: str, mutant: str = "", run: int = strips.AT_ONCE) -> float:
    """The largest difference between what comes home on this rank and what should, relative to the largest of each weight; the copies
    are compared with what should be gathered, too."""
    what, how = Trial.from_json(trial), Layout.parse(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips, "AT_ONCE", run)
        if mutant:
            MUTANTS[mutant](patch)
        _, player = build(what, [how], world)
        (runner,) = player.runners.values()
        copies, spec, worst = runner.copies, what.spec, 0.0
        for unit in copies.units:
            copies.gather(unit)
            copies.ready(unit)
        drawn = what.source()
        for name, weight in ((name, weight) for unit in copies.units.values() for name, weight in unit.weights.items()):
            expected = torch.cat(
                [gathered(drawn(name, box), spec, how, name, box, what.weights) for box in copies.boxes[name]], spec.by_name[name].dim or 0
            )
            worst = max(worst, float((weight - expected).abs().max()))
            whole = values(spec, name, world.rank)
            weight.grad = torch.cat([whole[slices(box)] for box in copies.boxes[name]], spec.by_name[name].dim or 0)
        for unit in copies.units:
            copies.accumulate(unit)
            copies.reduce(unit)
            copies.reduced(unit)
    for shard in copies.home.shards:
        assert shard.grad is not None
        for name, box, view in shard.views(shard.grad):
            if box:
                total = np.zeros(box.shape, np.float32)
                (piece,) = (piece for piece in pieces_of(spec, how, spec.by_name[name]) if box in piece.box)
                sent = what.gradients if len(piece.holders) > 1 else "float32"
                for rank in piece.holders:
                    own = values(spec, name, rank)[slices(piece.box)].numpy()
                    total += arrives(own, piece.box.start[-1], sent)[box.within(piece.box)]
                worst = max(worst, float(np.nan_to_num(np.abs(view.numpy() - total), nan=np.inf).max()))
    world.forget()
    return worst


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in zip(box.start, box.stop))


def gathered(x: Tensor, spec: ModelSpec, how: Layout, name: str, box: Box, weights: WeightWire) -> Tensor:
    """What is gathered of a box of a weight, x at home: what one rank alone has is its own."""
    for piece in pieces_of(spec, how, spec.by_name[name]):
        if weights == "float8" and len(piece.holders) > 1 and piece.box in box:
            part = x[piece.box.within(box)]
            part.copy_(torch.from_numpy(arrives(part.numpy(), piece.box.start[-1], weights)))
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gradients", "weights"), [("float32", "compute"), ("bf16", "float8"), ("float8", "float8")])
def test_sums_and_copies_are_those_of_the_definition(worlds: Worlds, gradients: GradientWire, weights: WeightWire, layout: str):
    how = {"trial": trial(gradients, weights, 1).to_json(), "layout": layout}
    assert max(worlds(Layout.parse(layout).world).call("test_wire:sums", DEADLINE_S, **how)) == 0.0


def test_they_are_where_few_rows_are_coded_at_one_time(worlds: Worlds):
    how = {"trial": trial("float8", "float8", 1).to_json(), "layout": "dp2.tp2.z3", "run": 2000}
    assert max(worlds(4).call("test_wire:sums", DEADLINE_S, **how)) == 0.0


# The same bits


@pytest.fixture(scope="module")
def bits(worlds: Worlds) -> Callable[..., list[dict]]:
    """bits(layout, trial): of every rank, digests of masters and moments after three steps of one micro-batch."""

    def ask(layout: str, what: Trial) -> list[dict]:
        found = worlds(Layout.parse(layout).world).call("home_ranks:trained", DEADLINE_S, trial=what.to_json(), layout=layout)
        return [answer["bits"] for answer in found]

    return ask


@pytest.mark.parametrize(("gradients", "weights"), [("bf16", "compute"), ("float8", "float8")])
@pytest.mark.parametrize("degrees", ["dp2", "dp2.tp2"])
def test_the_bits_are_those_of_every_stage_and_memory(bits: Callable, gradients: GradientWire, weights: WeightWire, degrees: str):
    what = trial(gradients, weights, capacity=256)
    first = bits(f"{degrees}.z1", what)
    assert first != bits(f"{degrees}.z1", trial(capacity=256))
    assert bits(f"{degrees}.z2", what) == first
    assert bits(f"{degrees}.z3", what) == first
    assert bits(f"{degrees}.z3", replace(what, home="host")) == first
    assert bits(f"{degrees}.z1", replace(what, home="disk")) == first


# What is not finite


def spoiled(world: World, trial: dict, layout: str, mutant: str = "") -> str:
    """What is said of a step in which one rank's gradient has an infinite element; nothing, where nothing is."""
    state, player = made(world, Trial.from_json(trial), layout)
    (batch,) = Trial.from_json(trial).batches()
    reduce = AlignedCopies.reduce

    def infinite(self: AlignedCopies, unit: int) -> None:
        if unit == 2 and world.rank == world.size - 1:
            self.sum_of(unit, "model.layers.1.mlp.up_proj.weight")[0][0][0, 0, 5] = -torch.inf
        reduce(self, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignedCopies, "reduce", infinite)
        if mutant:
            MUTANTS[mutant](patch)
        try:
            train_step(state, batch, player)
        except NonFiniteError as fault:
            return str(fault)
        finally:
            world.forget()
    return ""


@pytest.mark.parametrize("gradients", ["float32", "bf16", "float8"])
@pytest.mark.parametrize("layout", ["dp2.z1", "dp3.z3"])
def test_an_infinite_gradient_is_found(worlds: Worlds, gradients: GradientWire, layout: str):
    what = trial(gradients, steps=1)
    said = worlds(Layout.parse(layout).world).call("test_wire:spoiled", DEADLINE_S, trial=what.to_json(), layout=layout)
    assert len(set(said)) == 1
    assert "the gradient of model.layers.1.mlp.up_proj.weight" in said[0]


# How well it learns


def test_a_model_learns_as_with_float32(worlds: Worlds):
    """The mean loss of the last twenty of 120 steps, on Python's own sources."""
    spec = replace(FAMILIES["llama"], vocab=256, width=64, layers=2, heads=4, kv_heads=2, head_width=16, ffn=128)
    losses = {}
    for formats in (Wire(), Wire("float8"), Wire("float8", "float8")):
        how = {"gradients": formats.gradients, "weights": formats.weights}
        what = Trial(spec, ((64,) * 4,) * 120, "float32", 128, warmup=20, **how)  # pyright: ignore[reportArgumentType]
        told = {"trial": what.to_json(), "tokens": 64, "documents": 4, "layout": "dp2.z1"}
        found = worlds(2).call("home_ranks:learned", 2 * DEADLINE_S, **told)
        losses[formats] = float(np.mean(found[0]["losses"][-20:]))
    print(losses)
    assert losses[Wire()] < 3.6
    assert len(set(losses.values())) == len(losses)
    assert list(losses.values()) == pytest.approx([losses[Wire()]] * len(losses), rel=0.01)


# Mistakes


def sums_in_bf16(patch: pytest.MonkeyPatch) -> None:
    native = wire.add_in_order

    def wrong(total: Tensor, sent: Tensor) -> None:
        short = torch.empty_like(total, dtype=torch.bfloat16)
        native(short, sent)
        total.copy_(short)

    patch.setattr(wire, "add_in_order", wrong)


def infinity_saturates(patch: pytest.MonkeyPatch) -> None:
    """What is not finite is made the largest number before it is coded."""
    native = block_codec.encode
    patch.setattr(block_codec, "encode", lambda x, *how: native(x.nan_to_num(0.0, 448.0, -448.0), *how))


def scales_of_whole_rows(patch: pytest.MonkeyPatch) -> None:
    native = block_codec.encode

    def wrong(x: Tensor, column: int, scales: Tensor, codes: Tensor) -> None:
        native(x, column, scales, codes)
        scales.copy_(scales.amax(-1, keepdim=True).expand_as(scales))

    patch.setattr(block_codec, "encode", wrong)


def last_sender_forgotten(patch: pytest.MonkeyPatch) -> None:
    native = wire.add_in_order
    patch.setattr(wire, "add_in_order", lambda total, sent: native(total, sent[:-1]))


MUTANTS = {one.__name__: one for one in (sums_in_bf16, infinity_saturates, scales_of_whole_rows, last_sender_forgotten)}


@pytest.mark.parametrize("mutant", ["sums_in_bf16", "scales_of_whole_rows", "last_sender_forgotten"])
@pytest.mark.parametrize("layout", ["dp3.z3", "dp2.tp2.z2"])
def test_a_wrong_sum_shows(worlds: Worlds, mutant: str, layout: str):
    how = {"trial": trial("float8", steps=1).to_json(), "layout": layout, "mutant": mutant}
    assert max(worlds(Layout.parse(layout).world).call("test_wire:sums", DEADLINE_S, **how)) > 0


def test_an_infinity_that_saturates_shows(worlds: Worlds):
    how = {"trial": trial("float8", steps=1).to_json(), "layout": "dp2.z1", "mutant": "infinity_saturates"}
    assert worlds(2).call("test_wire:spoiled", DEADLINE_S, **how) == ["", ""]
