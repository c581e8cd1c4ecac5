"""The streams of a GPU's host and disk tiers, without a GPU: each operation of a streamed step is ordered against whatever else touches
its memory, in a model of CUDA (`cuda_model`)."""

import random
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_model import Event, Line, made, modelled
from torch import Tensor
from trial import Trial, build

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Rope
from longshift.step import player
from longshift.step.update import train_step
from longshift.stream import gpu_tiers
from longshift.stream.gpu_tiers import BOUNCES, BouncedTier, HostTier, tier_of
from longshift.stream.tiers import CopyTier, DeviceTier, StoredObject, Tensors

TRIAL = Trial(
    ModelSpec("llama", 61, 24, 3, 6, 3, 4, 40, 128, rope=Rope()), lengths=((40, 21), (47,), (53, 6)), precision="bf16", capacity=61
)
LAYOUTS = (
    "chunk13.host",
    "chunk13.host.kv-offload",
    "chunk13.host.kv-offload.every1",
    "chunk13.host.fpdt",
    "chunk13.host.kv-offload.fpdt",
    "chunk61.host",
    "chunk13.every2.host",
    "recompute-full.host",
    "chunk13.disk.kv-offload",
    "recompute-full.disk",
)


def wander(seed: int, kind: str, operations: int = 120) -> tuple[int, bool]:
    """Puts, fetches, recycles and drops in any order that a tier's contract allows. The most bytes that were held, and whether what came
    back was right."""
    draw, tier = random.Random(seed), made(kind, torch.device("cpu"), Path(tempfile.gettempdir()), checked=True)
    values: dict[int, Tensor] = {}
    arriving: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
    here: dict[int, tuple[Tensor, ...]] = {}
    most, right = 0, True
    for number in range(operations):
        keys = sorted(values)
        what = draw.choice(("put", "put", "fetch", "fetch", "wait", "wait", "pass on", "recycle", "recycle", "drop", "drop", "empty"))
        key = draw.choice(keys) if keys else -1
        if what == "put":
            values[number] = torch.full((draw.choice((8, 16, 40)) + seed % 3 * (number > operations // 2), 3), float(number))
            tier.put(number, values[number] * 1)
        elif what == "fetch" and key >= 0 and key not in arriving and key not in here:
            arriving[key] = tier.fetch(key)
        elif what == "wait" and arriving:
            key, wait = arriving.popitem()
            here[key] = wait()
            right = right and torch.equal(here[key][0], values[key])
            here[key][0].add_(1)
        elif what == "pass on" and here:
            key, found = here.popitem()
            tier.put(number, *found)
            values[number] = found[0].clone()
            tier.recycle(found)
        elif what == "recycle" and here:
            tier.recycle(here.popitem()[1])
        elif what == "drop" and key >= 0 and key not in arriving:
            tier.drop(key)
            del values[key]
        elif what == "empty" and not arriving and not here and draw.random() < 0.5:
            for key in keys:
                tier.drop(key)
            values = {}
        most = max(most, sum(-(-value.nbytes // 16) * 16 for value in values.values()))
    tier.close()
    return most, right


SEEDS = range(40)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_whatever_a_tier_is_asked_for_accesses_are_ordered_and_no_more_is_pinned_than_was_held(monkeypatch: pytest.MonkeyPatch, kind: str):
    """A disk's tier has pinned memory for a few pieces, whatever it holds."""
    for seed in SEEDS:
        with modelled(monkeypatch) as cuda:
            most, right = wander(seed, kind)
        assert right
        assert not cuda.races
        assert cuda.most_pinned <= (most if kind == "host" else BOUNCES * 512)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_without_any_one_of_its_waits_they_are_not(monkeypatch: pytest.MonkeyPatch, kind: str):
    with modelled(monkeypatch) as cuda:
        for seed in SEEDS:
            wander(seed, kind)
    assert len(cuda.waits) >= (6 if kind == "host" else 4)
    for line in sorted(cuda.waits):
        assert any(_races_without(monkeypatch, line, seed, kind) for seed in SEEDS), f"{line} orders nothing"


def _races_without(patch: pytest.MonkeyPatch, line: Line, seed: int, kind: str) -> bool:
    with modelled(patch, ignored=line) as cuda:
        wander(seed, kind)
    return bool(cuda.races)


def test_a_tier_of_a_gpu_for_each_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with modelled(monkeypatch):
        for name, kind in (("device", DeviceTier), ("host", HostTier), ("disk", BouncedTier)):
            tier = tier_of(name, torch.device("cuda"), tmp_path, checked=False)
            assert type(tier) is kind
            tier.close()


def test_the_host_is_few_puts_ahead_of_the_device(monkeypatch: pytest.MonkeyPatch):
    """Memory of what is being put is not free: it must not grow with the length of a sequence."""
    waited: list[Event] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    with modelled(monkeypatch):
        tier = HostTier(torch.device("cpu"))
        for number in range(10):
            tier.put(number, torch.zeros(8))
            assert waited == [tier.objects[key].left for key in range(number + 1 - gpu_tiers.UNDER_WAY)]


def test_the_host_is_one_large_put_ahead_of_the_device(monkeypatch: pytest.MonkeyPatch):
    waited: list[Event] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    monkeypatch.setattr(gpu_tiers, "UNDER_WAY_BYTES", 100)
    with modelled(monkeypatch):
        tier = HostTier(torch.device("cpu"))
        for number, size in enumerate((10, 50, 10, 8, 2)):
            tier.put(number, torch.zeros(size))
        assert waited == [tier.objects[key].left for key in range(2)]


def losses(layout: str) -> list[float]:
    state, played = build(TRIAL, [Layout.parse(layout)], World.alone())
    found = [train_step(state, batch, played).loss for batch in TRIAL.batches()]
    for runner in played.runners.values():
        assert runner.tier is not None
        runner.tier.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_ordered_and_its_numbers_are_those_of_the_device_tier(monkeypatch: pytest.MonkeyPatch, layout: str):
    with modelled(monkeypatch) as cuda:
        found = losses(layout)
    assert not cuda.races
    assert all(stream.seen[stream.number] > 20 for stream in cuda.streams)
    assert found == losses(layout)


class PackedTier(CopyTier):
    """A tier that is made here: objects wait in the host's memory, compressed. `forgets`: it mixes up what was put last."""

    def __init__(self, device: torch.device, forgets: bool = False):
        super().__init__(device, 1, 1)
        self.forgets = forgets

    def send(self, tensors: Tensors, size: int) -> tuple[list[bytes], None]:
        assert size == sum(tensor.nbytes for tensor in tensors)
        return [zlib.compress(tensor.view(-1).view(torch.uint8).numpy().tobytes(), 1) for tensor in tensors], None

    def bring(self, stored: StoredObject) -> Callable[[], Tensors]:
        tensors = tuple(self.memory(*shape) for shape in stored.shapes)
        for tensor, packed in zip(tensors, stored.place):
            values = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=tensor.dtype).view(tensor.shape)
            tensor.copy_(values.zero_() if self.forgets else values)
        return lambda: tensors

    def fill_after(self, copy: object) -> None:
        raise AssertionError("nothing is on its way")

    wait_sent = fill_after

    def forget(self, stored: StoredObject) -> None:
        stored.place.clear()

    def close(self) -> None:
        self.objects.clear()


@pytest.mark.parametrize("layout", ["chunk13.disk.kv-offload", "chunk61.disk", "recompute-full.disk"])
def test_a_tier_of_another_file_trains(monkeypatch: pytest.MonkeyPatch, layout: str):
    expected = losses(layout)
    for forgets in (False, True):
        monkeypatch.setattr(player, "tier_of", lambda offload, device, *how, forgets=forgets: PackedTier(device, forgets))
        assert (losses(layout) == expected) == (not forgets)
