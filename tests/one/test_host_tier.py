"""The host tier's streams, without a GPU: each operation of a streamed step is ordered against whatever else touches its memory.

CUDA is modelled by what it promises. Operations of one stream run in order; those of two in any, unless an event, a wait for a stream or a
synchronisation lies between. So each stream has a vector clock, and two accesses to the same memory of which one writes are a race where
the later one's stream has not seen the earlier one. Memory that is freed may be given out again to the stream that it came from, at
once, but for what `record_stream` has named. Tensors lie on the CPU, where copies are done in the order of the program.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Rope
from longshift.step import player as player_module
from longshift.step.update import train_step
from longshift.stream import tiers
from longshift.stream.tiers import HostTier
from longshift.trainer.check import Trial, build

TRIAL = Trial(
    ModelSpec("llama", 61, 24, 3, 6, 3, 4, 40, 128, rope=Rope()), lengths=((40, 21), (47,), (53, 6)), precision="bf16", capacity=61
)
LAYOUTS = (
    "chunk13.host",
    "chunk13.host.kv-offload",
    "chunk13.host.kv-offload.keep-input",
    "chunk13.host.keep-input.fpdt",
    "chunk13.host.kv-offload.fpdt",
    "chunk61.host",
    "chunk13.every2.host",
    "recompute-full.host",
    "recompute-full.keep-output.host",
)
Clock = dict[int, int]  # how far each stream had come


class Event(Clock):
    """What a stream had come to. `cuda`: whose host can wait for it."""

    def __init__(self, cuda: "Cuda", seen: Clock):
        super().__init__(seen)
        self.cuda = cuda

    def synchronize(self) -> None:
        if self.cuda.heeds():
            self.cuda.host.after(self)


class Stream:
    """Mutable: what its next operation comes after."""

    def __init__(self, cuda: "Cuda", number: int):
        self.cuda, self.number, self.seen = cuda, number, Clock()

    def wait_event(self, event: Event) -> None:
        if self.cuda.heeds():
            self.after(event)

    def wait_stream(self, other: "Stream") -> None:
        if self.cuda.heeds():
            self.after(other.seen)

    def record_event(self) -> Event:
        return Event(self.cuda, self.seen)

    def after(self, event: Clock) -> None:
        self.seen |= {number: max(time, self.seen.get(number, 0)) for number, time in event.items()}


class Memory:
    """A storage. Mutable: the last access by (stream, whether it wrote), and the streams that `record_stream` has named."""

    def __init__(self, owner: int):
        self.owner = owner
        self.last: dict[tuple[int, bool], int] = {}
        self.recorded: set[int] = set()


class Cuda(TorchDispatchMode):
    """`ignored`: the line of tiers.py whose waits do nothing. Mutable: what has happened."""

    def __init__(self, ignored: int = 0):
        super().__init__()
        self.ignored = ignored
        self.streams: list[Stream] = []
        self.current, self.host = self.new(), Stream(self, -1)
        self.memory: dict[int, Memory] = {}
        self.pool: list[tuple[int, Tensor]] = []  # what streams other than the first have asked for, of which some is free again
        self.races: list[str] = []
        self.waits: set[int] = set()
        self.pinned: dict[int, int] = {}  # bytes by address
        self.most_pinned = 0

    def new(self, device: object = None) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def heeds(self) -> bool:
        """Whether the wait that tiers.py calls for is to be done. Not what paces the host: all must be in order without it."""
        frame: Any = sys._getframe()
        while frame.f_code.co_filename != tiers.__file__:
            frame = frame.f_back
        if frame.f_code.co_name == "_pace":
            return False
        self.waits.add(frame.f_lineno)
        return frame.f_lineno != self.ignored

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: object = None) -> None:
        for stream in self.streams:
            self.host.after(stream.seen)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        if self.heeds():
            self.memory[tensor.untyped_storage().data_ptr()].recorded.add(stream.number)

    def pin(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))
        return 0

    def unpin(self, address: int) -> None:
        self.pinned.pop(address)
        for (number, _), time in self.memory[address].last.items():
            if self.host.seen.get(number, 0) < time:
                self.races.append(f"host memory is given back that stream {number} may still use")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        out, stream = func(*args, **(kwargs or {})), self.current
        if func is torch.ops.aten.empty.memory_format and stream.number:
            out = self._given_out_again(out)
        stream.after(self.host.seen)
        stream.seen[stream.number] = stream.seen.get(stream.number, 0) + 1
        there = {place: name in written for name, value in given.items() for place in _storages(value)}
        for place in set(_storages(out)) - there.keys():
            self._new(place)
            there[place] = True
        for place, writes in there.items():
            self._access(place, writes, str(func))
        return out

    def _given_out_again(self, new: Tensor) -> Tensor:
        """What a stream asks for is what it had before, where nothing refers to it any more."""
        for number, old in self.pool:
            storage = old.untyped_storage()
            free = torch._C._storage_Use_Count(storage._cdata) == 2  # pyright: ignore  (`old` and `storage`)
            if free and number == self.current.number and len(storage) == len(new.untyped_storage()):
                return torch.empty(0, dtype=new.dtype).set_(storage, 0, new.shape, new.stride())  # pyright: ignore
        self.pool.append((self.current.number, new.detach()))
        return new

    def _new(self, place: int) -> None:
        """Memory that is given out: at once where its last owner was this stream, else it cannot be the same."""
        old, stream = self.memory.get(place), self.current.number
        fresh = self.memory[place] = Memory(stream)
        if old is not None and old.owner == stream:
            fresh.last = {(by, wrote): time for (by, wrote), time in old.last.items() if by not in old.recorded}

    def resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """`UntypedStorage.resize_`: memory is given back, or given out, by no operation."""
        before = storage.data_ptr()
        torch._C.StorageBase.resize_(storage, size)  # pyright: ignore[reportAttributeAccessIssue]
        if (place := storage.data_ptr()) and place != before:
            self._new(place)
        return storage

    def _access(self, place: int, writes: bool, what: str) -> None:
        stream, memory = self.current, self.memory.setdefault(place, Memory(self.current.number))
        for (number, wrote), time in memory.last.items():
            if (writes or wrote) and stream.seen.get(number, 0) < time:
                self.races.append(f"{what} on stream {stream.number} {'writes' if writes else 'reads'} what stream {number} may still use")
        memory.last[stream.number, writes] = stream.seen[stream.number]


def _storages(value: object) -> list[int]:
    places = [t.untyped_storage().data_ptr() for t in tree_leaves(value) if isinstance(t, Tensor)]
    return [place for place in places if place]


@contextmanager
def modelled(patch: pytest.MonkeyPatch, ignored: int = 0) -> Iterator[Cuda]:
    cuda = Cuda(ignored)
    runtime = SimpleNamespace(cudaHostRegister=cuda.pin, cudaHostUnregister=cuda.unpin)
    with patch.context() as patched, cuda:
        for name, value in (
            ("Stream", cuda.new),
            ("current_stream", lambda device=None: cuda.current),
            ("stream", cuda.on),
            ("synchronize", cuda.synchronize),
            ("cudart", lambda: runtime),
        ):
            patched.setattr(torch.cuda, name, value)
        patched.setattr(Tensor, "record_stream", lambda tensor, stream: cuda.record_stream(tensor, stream))
        patched.setattr(torch.UntypedStorage, "resize_", lambda storage, size: cuda.resized(storage, size))
        patched.setattr(player_module, "tier_of", lambda offload, device, folder, checked: HostTier(device))
        patched.setattr(tiers, "ALIGN", 16)  # sizes here are less than a page
        yield cuda


def wander(seed: int, operations: int = 120) -> tuple[int, bool]:
    """Puts, fetches, recycles and drops in any order that a tier's contract allows. The most bytes that were held, and whether what came
    back was right."""
    draw, tier = random.Random(seed), HostTier(torch.device("cpu"))
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


def test_whatever_a_tier_is_asked_for_accesses_are_ordered_and_no_more_is_pinned_than_was_held(monkeypatch: pytest.MonkeyPatch):
    for seed in SEEDS:
        with modelled(monkeypatch) as cuda:
            most, right = wander(seed)
        assert right
        assert not cuda.races
        assert cuda.most_pinned <= most


def test_without_any_one_of_its_waits_they_are_not(monkeypatch: pytest.MonkeyPatch):
    with modelled(monkeypatch) as cuda:
        for seed in SEEDS:
            wander(seed)
    assert len(cuda.waits) > 5
    for line in sorted(cuda.waits):
        assert any(_races_without(monkeypatch, line, seed) for seed in SEEDS), f"line {line} of tiers.py orders nothing"


def _races_without(patch: pytest.MonkeyPatch, line: int, seed: int) -> bool:
    with modelled(patch, ignored=line) as cuda:
        wander(seed)
    return bool(cuda.races)


def test_the_host_is_few_puts_ahead_of_the_device(monkeypatch: pytest.MonkeyPatch):
    """Memory of what is being put is not free: it must not grow with the length of a sequence."""
    waited: list[Event] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    with modelled(monkeypatch):
        tier = HostTier(torch.device("cpu"))
        for number in range(10):
            tier.put(number, torch.zeros(8))
            assert waited == [tier.objects[key].ready for key in range(number + 1 - tiers.UNDER_WAY)]


def losses(layout: str) -> list[float]:
    state, player = build(TRIAL, [Layout.parse(layout)], World.alone())
    found = [train_step(state, batch, player).loss for batch in TRIAL.batches()]
    for runner in player.runners.values():
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
