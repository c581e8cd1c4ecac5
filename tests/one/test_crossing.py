"""A home outside a GPU, without a GPU: copies through pinned memory are ordered in a model of CUDA (`cuda_model`), and change no bit."""

import hashlib

import pytest
import torch
from cuda_model import Cuda, Line, modelled
from torch import Tensor
from trial import Trial, build

from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.spec.formats import WeightWire
from longshift.spec.model import ModelSpec, Rope
from longshift.state import crossing
from longshift.state.crossing import SLOTS, runs, slots_in
from longshift.step.update import train_step

SPEC = ModelSpec("llama", 61, 24, 3, 6, 3, 4, 40, 128, rope=Rope())
CASES = (("dp1", "host"), ("dp1.z2", "host"), ("dp1.z2", "disk"), ("dp1.z2.vertical.recompute-full", "device 20K, host rest"))


def trained(layout: str, home: str, world: World, weights: WeightWire = "compute") -> tuple[list[float], dict[str, str], int, int]:
    """Losses of three steps, digests of masters and moments, bytes of gradient sums that may be pinned, and slots on the way in."""
    trial = Trial(SPEC, lengths=((40, 21), (47, 30), (53, 6)), precision="bf16", capacity=61, home=home, weights=weights)
    state, player = build(trial, [Layout.parse(layout)], world)
    found = [train_step(state, batch, player, leave=True).loss for batch in trial.batches()]
    player.finish()
    views = [(f"{kind} {name} {box}", view) for name, box, _, views in state.optimizer.state() for kind, view in views.items()]
    sums = sum(shard.master.nbytes for shard in state.home.learning if state.home.tiers[shard.bucket.unit] == "host")
    slots = slots_in(state.home.tiers, [shard.bucket for shard in state.home.learning], world.rank, 2)
    state.home.close()
    return found, {key: digest(view) for key, view in views}, sums, slots


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def played(patch: pytest.MonkeyPatch, case: tuple[str, str], ignored: Line = ("", 0)) -> tuple[Cuda, tuple]:
    with modelled(patch, ignored) as cuda:
        found = trained(*case, World.alone())
        cuda.synchronize()
    return cuda, found


@pytest.mark.parametrize("case", CASES)
def test_copies_are_ordered_and_the_bits_are_those_of_a_home_on_the_device(monkeypatch: pytest.MonkeyPatch, case: tuple[str, str]):
    cuda, (losses, bits, sums, coming) = played(monkeypatch, case)
    assert not cuda.races
    assert len(cuda.streams) == 3
    assert all(stream.seen[stream.number] > 5 for stream in cuda.streams)
    assert (losses, bits) == trained(case[0], "device", World.alone())[:2]
    slots = cuda.most_pinned - sums
    assert slots % 512 == 0
    assert slots // 512 <= SLOTS + coming
    assert coming >= SLOTS


def ranked(world: World, layout: str, home: str, weights: WeightWire) -> dict:
    """Races on this rank, how far its streams came, and whether its bits are those of a home on the device."""
    with pytest.MonkeyPatch.context() as patch, modelled(patch) as cuda:
        losses, bits, *_ = trained(layout, home, world, weights)
    same = (losses, bits) == trained(layout, "device", world, weights)[:2]
    return {"races": cuda.races, "streams": [stream.seen[stream.number] for stream in cuda.streams], "same": same}


@pytest.mark.parametrize(("home", "weights"), [("host", "compute"), ("disk", "compute"), ("host", "float8")])
def test_ranks_gather_from_home_and_reduce_into_it(home: str, weights: WeightWire):
    with ForkedWorld(2) as world:
        for found in world.call("test_crossing:ranked", 60, layout="dp2.z3", home=home, weights=weights):
            assert found["same"]
            assert not found["races"]
            assert min(found["streams"]) > 5


def test_without_any_one_of_their_waits_they_are_not(monkeypatch: pytest.MonkeyPatch):
    waits = {line for case in CASES for line in played(monkeypatch, case)[0].waits}
    assert len(waits) >= 6
    for line in sorted(waits):
        assert any(played(monkeypatch, case, line)[0].races for case in CASES), f"{line} orders nothing"


def test_runs_fit_into_a_slot_and_cover_all_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crossing, "SLOT_BYTES", 512)
    for shape in ((1, 7), (1, 1000), (3, 50, 4), (2, 5, 8, 4), (1, 0), (0, 4)):
        x = torch.zeros(shape)
        found = list(runs(x))
        assert [row for run in found for row in range(run.start, run.stop)] == list(range(shape[1]))
        assert all(x[:, run].nbytes <= 512 for run in found)
