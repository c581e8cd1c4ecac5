"""Gather, reduce and release: what arrives is home's bits; what comes home is the exact sum over the holders, each once."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from forked import DEADLINE_S, Worlds
from mutants import mistaken
from parity import FAMILIES, LAYOUTS, MORE, trial_of
from torch import Tensor
from trial import Trial, build

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.layout.placement import local_boxes, stages_of
from longshift.spec.formats import PrecisionName
from longshift.spec.model import ModelSpec
from longshift.step.runner import Runner
from longshift.step.update import train_step

PRECISIONS: tuple[PrecisionName, ...] = ("float64", "bf16", "float32")


def cases() -> list:
    """Every layout of the parity matrix, without and with sharding; families and precisions in turn, pairs that are not legal left out."""
    found, families = [], list(FAMILIES)
    for number, text in enumerate(LAYOUTS + MORE):
        for zero in (0, 3):
            family, precision = families[(number + zero) % len(families)], PRECISIONS[(number + zero // 3) % len(PRECISIONS)]
            layout = replace(Layout.parse(text), zero=zero)
            if not faults(FAMILIES[family], layout, None):
                found.append(pytest.param(family, precision, str(layout), id=f"{layout}-{family}-{precision}"))
    return found


def numbered(spec: ModelSpec, name: str, box: Box, salt: int) -> Tensor:
    """float64 integers below 1009, a function of the weight, the global position and `salt`. Exact in float32, and so are their sums."""
    positions = torch.arange(spec.by_name[name].elements).view(spec.by_name[name].shape)[box.within(Box.whole(spec.by_name[name].shape))]
    return ((positions * 7 + 13 * salt + 31 * len(name) + 101 * salt * positions) % 1009).double()


def local(spec: ModelSpec, layout: Layout, rank: int, name: str, salt: int) -> Tensor:
    """`numbered`, for the tensor that a rank computes with."""
    boxes = local_boxes(spec.by_name[name], layout, layout.coord(rank))
    return torch.cat([numbered(spec, name, box, salt) for box in boxes], spec.by_name[name].dim or 0)


def holders(spec: ModelSpec, layout: Layout, name: str, box: Box) -> list[int]:
    """The ranks that compute with a box, from what each one holds."""
    param = spec.by_name[name]
    stages = stages_of(spec, layout, param)
    places = {rank: layout.coord(rank) for rank in range(layout.world)}
    return [r for r, at in places.items() if at.pp in stages and any(box in held for held in local_boxes(param, layout, at))]


def verbs(world: World, trial: dict, layout: str) -> dict[str, int]:
    """Runs the checks on a rank; returns how many elements it computes with, keeps and speaks for, and the bytes that it released."""
    what, how = Trial.from_json(trial), Layout.parse(layout)
    _, player = build(what, [how], world)
    (runner,) = player.runners.values()
    spec, home = what.spec, runner.copies.home
    seen = {"held": 0, "kept": 0, "owned": 0, "released_bytes": 0}
    for salt in (0, 1):  # home changes between them
        for shard in home.shards:
            for name, box, view in shard.views(shard.master):
                view.copy_(numbered(spec, name, box, salt))
        gather(runner, salt)
    for unit, copies in runner.copies.units.items():
        runner.copies.release(unit)
        assert copies.memory.flat.untyped_storage().nbytes() == 0
        seen["released_bytes"] += copies.memory.bytes
    seen["held"] = gather(runner, 1)
    for _ in range(2):  # a second micro-batch adds
        for unit, copies in runner.copies.units.items():
            for name, weight in ((name, weight) for name, weight in copies.weights.items() if weight.requires_grad):
                weight.grad = local(spec, how, world.rank, name, world.rank).to(weight.dtype)
            runner.copies.accumulate(unit)
            runner.copies.reduce(unit)
    for _ in range(2):
        for unit in runner.copies.units:
            runner.copies.reduced(unit)
    for shard in home.shards:
        assert (shard.grad is None) == shard.bucket.frozen
        for name, box, view in shard.views(shard.master if shard.grad is None else shard.grad):
            assert spec.by_name[name].frozen == shard.bucket.frozen
            if box:
                parts = [numbered(spec, name, box, rank).to(runner.copies.compute) for rank in holders(spec, how, name, box)]
                if shard.grad is not None:
                    assert torch.equal(view.double(), 2 * torch.stack(parts).double().sum(0)), (name, box)
                seen["kept"] += box.elements
                seen["owned"] += box.elements * shard.owned
    return seen


def gather(runner: Runner, salt: int) -> int:
    """Bring everything here and look at every bit; returns the number of elements."""
    spec, how, copies = runner.spec, runner.layout, runner.copies
    for unit in copies.units:
        copies.gather(unit)
    for unit in copies.units:
        copies.ready(unit)
    weights = {name: weight for unit in copies.units.values() for name, weight in unit.weights.items()}
    for name, weight in weights.items():
        assert torch.equal(weight, local(spec, how, runner.world.rank, name, salt).to(weight.dtype)), name
    for unit, module in runner.modules.items():
        for param in spec.of_unit(unit):
            assert getattr(module, param.role) is weights[param.name]
    return sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize(("family", "precision", "layout"), cases())
def test_the_three_verbs(worlds: Worlds, family: str, precision: PrecisionName, layout: str):
    trial, how, elements = trial_of(family, 1, precision=precision), Layout.parse(layout), FAMILIES[family].parameters
    found = worlds(how.world).call("test_verbs:verbs", DEADLINE_S, trial=trial.to_json(), layout=layout)
    assert sum(rank["owned"] for rank in found) == elements
    held, kept = (sum(rank[what] for rank in found) for what in ("held", "kept"))
    assert kept == (elements if how.zero else held)
    if precision == "bf16" and FAMILIES[family].learned == elements:
        assert [rank["released_bytes"] for rank in found] == [2 * rank["held"] for rank in found]
    elif precision == "bf16":  # what is not trained is home's own where that has it whole: all that some stages have
        assert all(rank["released_bytes"] <= 2 * rank["held"] for rank in found)
        assert any(rank["released_bytes"] for rank in found)


def gathered(world: World, trial: dict, layout: str) -> list[int]:
    """How often a step gathers the weights of a block, at the most, and those of the head; 0 where they are not on this rank."""
    what, counts = Trial.from_json(trial), Counter()
    state, player = build(what, [Layout.parse(layout)], world)
    (runner,) = player.runners.values()
    with pytest.MonkeyPatch.context() as patch:
        for unit, copies in runner.copies.units.items():
            patch.setattr(copies.memory, "hold", lambda unit=unit, hold=copies.memory.hold: (counts.update([unit]), hold()))
        (batch,) = what.batches()
        train_step(state, batch, player)
    world.forget()
    return [max(counts[unit] for unit in range(1, what.spec.layers + 1)), counts[what.spec.layers + 1]]


@pytest.mark.parametrize("layout", ["dp2.z3", "pp2.z3", "pp2.z3.gpipe", "u2.z3.chunk16", "dp2.z2", "pp2.z2"])
def test_weights_come_no_oftener_than_they_are_used(worlds: Worlds, layout: str):
    """ZeRO-3: a block's for forward and backward of each micro-batch, the head's once for both. ZeRO-2: once a step."""
    trial, how = trial_of("llama", 1), Layout.parse(layout)
    found = worlds(2).call("test_verbs:gathered", DEADLINE_S, trial=trial.to_json(), layout=layout)
    of_block, of_head = map(max, zip(*found))
    assert of_block == 2 * of_head if how.zero == 3 else of_block == of_head == 1
    assert of_head > 0


def fails(world: World, mutant: str, trial: dict, layout: str) -> bool:
    """Whether the checks find a mistake on this rank."""
    with mistaken(mutant):
        try:
            verbs(world, trial, layout)
        except AssertionError:
            return True
        return False


@pytest.mark.parametrize("layout", ["dp2.tp2.z3", "dp2.tp2.z1"])
@pytest.mark.parametrize("mutant", ["average_for_sum", "one_gradient_sent_twice", "never_gathered_again", "slices_in_wrong_order"])
def test_a_mistake_shows(worlds: Worlds, mutant: str, layout: str):
    trial = trial_of("llama", 1).to_json()
    assert any(worlds(4).call("test_verbs:fails", DEADLINE_S, mutant=mutant, trial=trial, layout=layout))
