"""Packed moments: the same bits under every layout, world size and switch; resumed in another format; found where they are not finite."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import DEADLINE_S, Worlds
from home_ranks import logical_bits, made
from parity import PACKED, packed_trial
from trial import Trial, build, parse_layouts

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.spec.formats import MomentFormat
from longshift.state.checkpoint import Checkpoint, save
from longshift.state.home import Home
from longshift.step.update import not_finite, train_step


@pytest.fixture(scope="module")
def bits(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """bits(layout, packed, home, ...): digests of whole masters, moments and scales, by kind and weight."""
    known = dict[tuple, dict]()

    def ask(layout: str, packed: MomentFormat, home: str = "device", mutant: str = "") -> dict:
        key = layout, packed, home, mutant
        if key not in known:
            what = packed_trial(layout, packed, home)  # pyright: ignore[reportArgumentType]
            folder, size = str(tmp_path_factory.mktemp("bits")), Layout.parse(layout.split(" > ")[0]).world
            function = "home_ranks:logical_bits" if not mutant else "test_packed_moments:mutated"
            more = {"mutant": mutant} if mutant else {}
            how = {"trial": what.to_json(), "layout": layout, "folder": folder} | more
            known[key] = worlds(size).call(function, DEADLINE_S, **how)[0]
        return known[key]

    return ask


@pytest.mark.parametrize(("number", "layout"), list(enumerate(PACKED))[1:])
def test_eight_bits_are_the_same_under_every_layout_and_switch(bits: Callable[..., dict], number: int, layout: str):
    found = bits(layout, "float8", ("device", "host", "disk")[number % 3])
    assert any(kind.startswith("exp_avg_sq.scale") for kind in found)
    assert found == bits("dp1", "float8")


@pytest.mark.parametrize("layout", ["dp2.z3", "tp4", "dp4.z3 > tp4"])
def test_so_are_sixteen(bits: Callable[..., dict], layout: str):
    assert bits(layout, "bf16", "disk") == bits("dp1", "bf16") != bits("dp1", "float32")


def resumed(world: World, trial: dict, layouts: list[str], formats: list[MomentFormat], folder: str) -> list[float]:
    """Losses of steps one by one, each in a home of its own that the one before has left as a checkpoint."""
    what, losses = Trial.from_json(trial), []
    state, before = None, formats[0]
    for number, batch in enumerate(what.batches()):
        part = replace(what, packed=formats[number % len(formats)])
        if state is None:
            state, player = made(world, part, layouts[0])
        else:
            save(Path(folder), number, state.optimizer.state(), {}, world, keep=1)
            state.home.close()
            saved = Checkpoint.latest(Path(folder), world)
            state, player = build(part, parse_layouts(layouts[number % len(layouts)]), world, source=saved.source())
            state.optimizer.restore(saved.read, before, number)
        before = part.packed
        losses.append(train_step(state, batch, player).loss)
    return losses


@pytest.mark.parametrize("home", ["device", "disk"])
def test_a_run_goes_on_in_another_format(worlds: Worlds, tmp_path: Path, home: str):
    what = packed_trial("dp2.z3", "float32", home)  # pyright: ignore[reportArgumentType]
    losses = {}
    for formats in (["float8"], ["float8", "float32", "bf16"], ["float32", "float8"]):
        how = {"layouts": ["dp2.z3", "tp2"], "formats": formats, "folder": str(tmp_path / "-".join(formats))}
        losses["-".join(formats)] = worlds(2).call("test_packed_moments:resumed", DEADLINE_S, trial=what.to_json(), **how)[0]
    [eight, *others] = losses.values()
    for some in others:
        assert some == pytest.approx(eight, rel=5e-3)
        assert some != eight


def spoiled(world: World, trial: dict, layout: str) -> str | None:
    """What is said after an update in which a moment of the last rank has become infinite."""
    state, player = made(world, what := Trial.from_json(trial), layout)
    first, second, *_ = what.batches()
    train_step(state, first, player)
    if world.rank == world.size - 1:
        state.home.learning[0].packed["exp_avg"].scales[-1] = torch.inf  # pyright: ignore[reportOptionalSubscript]
    train_step(state, second, player)
    return not_finite(state, world)


def test_a_moment_that_is_not_finite_is_found(worlds: Worlds):
    what = packed_trial("dp2.z3", "float8", "device")
    said = worlds(2).call("test_packed_moments:spoiled", DEADLINE_S, trial=what.to_json(), layout="dp2.z3")
    assert said[0] == said[1]
    assert said[0]


# Mistakes


def own_scales(patch: pytest.MonkeyPatch) -> None:
    """Scales are of a rank's part of a block."""
    patch.setattr(Home, "_share_maxima", lambda home, unit, world: None)


def scales_of_others_lost(patch: pytest.MonkeyPatch) -> None:
    """The last owner of a cut block codes by its own part of it, whose scale is not kept."""
    native = Home._share_maxima

    def share_maxima(home: Home, unit: int, world: World) -> None:
        scales = [moment.scales for moment in home._moments(unit) if moment.scales is not None]
        before = [of_moment.clone() for of_moment in scales]
        native(home, unit, world)
        if world.rank == world.size - 1:
            for of_moment, own in zip(scales, before):
                of_moment.copy_(own)

    patch.setattr(Home, "_share_maxima", share_maxima)


MUTANTS = {mutant.__name__: mutant for mutant in (own_scales, scales_of_others_lost)}


def mutated(world: World, trial: dict, layout: str, folder: str, mutant: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        return logical_bits(world, trial, layout, folder)


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("layout", ["dp4.z3", "tp4"])
def test_a_mistake_shows(bits: Callable[..., dict], layout: str, mutant: str):
    assert bits(layout, "float8", "device", mutant) != bits("dp1", "float8")
