"""Collectives on streams of their own, as NCCL has them, without a GPU: two or four ranks train over gloo, and a model of CUDA
(`cuda_model`) orders each collective against whatever else touches its memory.

A group has a stream. A collective waits there for all that the current stream was given, reads what it sends and writes what it receives;
only a `wait` brings the current stream behind it. Until then no other stream may write what it reads or touch what it writes, and the
memory of neither may be given back: what keeps it is the product's doing, as a recorded work keeps nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cuda_model import Cuda, Event, Stream, modelled
from mutants import STREAM_MUTANTS, mistaken
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from trial import Trial, build, parse_layouts

from longshift.dist.collectives import Group
from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.errors import NonFiniteError
from longshift.spec.model import ModelSpec, Rope
from longshift.step.update import train_step

SPEC = ModelSpec("llama", 61, 24, 3, 6, 3, 4, 40, 128, rope=Rope())
LENGTHS = ((40, 21, 5, 7, 3), (47, 30), (53, 6, 2))
EDGES = (8, 24)
DEADLINE_S = 120.0
CASES = (
    *(("dp2.z0", "device"), ("dp2.z1", "device"), ("dp2.z2", "device"), ("dp2.z3", "host"), ("dp2.z3.vertical.recompute-full", "host")),
    *(("tp2", "device"), ("u2.z3", "device"), ("ring2", "device"), ("pp2", "device"), ("pp2.v2.z1", "device"), ("pp2.gpipe", "device")),
    *(("u2.chunk16.host.kv-offload", "device"), ("ring2.chunk16.host", "host"), ("dp2.z1 > u2 > tp2", "device")),
    *(("tp2.pp2", "device"), ("u2.ring2.z3", "device"), ("dp4.z2 > dp2.tp2.z3 > u4.chunk16.host", "device")),
)


class Memory:
    """Where a tensor lies, which this does not keep."""

    def __init__(self, tensor: Tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def fill(self, values: Tensor) -> None:
        """Write there, if it has not been given back."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # pyright: ignore[reportAttributeAccessIssue]
        if storage is not None:
            torch.empty(0, dtype=self.dtype).set_(storage, *self.place).copy_(values)  # pyright: ignore


class RecordedWork:
    """A collective that has been posted. It keeps no tensor of the product's. Mutable: whether it was waited for. `memory`: what it reads
    and writes; `into`: where what has `arrived` belongs; `end`: what its stream comes to with it."""

    def __init__(self, cuda: Cuda, work: dist.Work | None, end: Event, memory: list[Memory], into: Memory | None, arrived: Tensor | None):
        self.cuda, self.work, self.end = cuda, work, end
        self.memory, self.into, self.arrived = memory, into, arrived
        self.is_over = False

    def wait(self) -> None:
        if any(memory.storage.expired() for memory in self.memory):
            self.cuda.races.append("memory is given back that a collective may still use")
        with _disable_current_modes():
            if self.work is not None:
                self.work.wait()
            if self.into is not None and self.arrived is not None:
                self.into.fill(self.arrived)
        self.cuda.current.after(self.end)
        self.is_over = True

    def is_completed(self) -> bool:
        return self.is_over


class Recorder:
    """Has collectives go through `cuda`. Mutable: the stream of each group and each pair, and what was posted."""

    def __init__(self, cuda: Cuda):
        self.cuda = cuda
        self.streams: dict[object, Stream] = {}
        self.works: list[RecordedWork] = []

    def post(self, group: object, reads: Tensor | None, writes: Tensor | None, start: Callable[..., dist.Work | None]) -> RecordedWork:
        """Record a collective that `start(sent, arrived)` starts, on tensors in place of what it reads and writes."""
        stream = self.streams.get(group) or self.streams.setdefault(group, self.cuda.new())
        stream.after(self.cuda.current.seen)
        stream.seen[stream.number] = stream.seen.get(stream.number, 0) + 1
        for tensor, is_written in ((reads, False), (writes, True)):
            if tensor is not None and tensor.numel():
                self.cuda._access(tensor.untyped_storage().data_ptr(), is_written, "a collective", stream)
        with _disable_current_modes():  # what torch does inside is no operation of a stream
            sent = None if reads is None else reads.clone()
            arrived = None if writes is None else sent if writes is reads else torch.empty_like(writes)
            native = start(sent, arrived)
        memory = [Memory(tensor) for tensor in (reads, writes) if tensor is not None and tensor.numel()]
        into = None if writes is None else Memory(writes)
        work = RecordedWork(self.cuda, native, stream.record_event(), memory, into, arrived)
        self.works.append(work)
        return work

    @contextmanager
    def recording(self, patch: pytest.MonkeyPatch, everyone: Group) -> Iterator["Recorder"]:
        """Groups take the ways of NCCL, `everyone` of before too, and what they post is recorded."""
        begin, all_reduce, isend, irecv = Group.__init__, Group._native_all_reduce, dist.isend, dist.irecv

        def natively(group: Group, *how: object) -> None:
            begin(group, *how)  # pyright: ignore[reportArgumentType]
            group.direct = group.swaps = False

        def recorded(native: Callable) -> Callable:
            def post(group: Group, out: Tensor, x: Tensor, *sizes: list[int]) -> RecordedWork:
                return self.post(group.handle, x, out, lambda sent, arrived: native(group, arrived, sent, *sizes))

            return post

        def reduced(group: Group, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, later: bool = False) -> RecordedWork:
            work = self.post(group.handle, x, x, lambda sent, arrived: all_reduce(group, arrived, op, later))
            if not later:
                work.wait()
            return work

        def sent_to(x: Tensor, group: dist.ProcessGroup, group_dst: int, tag: int) -> RecordedWork:
            start = partial(isend, group=group, group_dst=group_dst, tag=tag)
            return self.post((group, group_dst), x, None, lambda sent, arrived: start(sent))

        def received_from(x: Tensor, group: dist.ProcessGroup, group_src: int, tag: int) -> RecordedWork:
            start = partial(irecv, group=group, group_src=group_src, tag=tag)
            return self.post((group, group_src), None, x, lambda sent, arrived: start(arrived))

        for name in ("_native_all_to_all", "_native_all_gather", "_native_reduce_scatter"):
            patch.setattr(Group, name, recorded(getattr(Group, name)))
        patch.setattr(Group, "_native_all_reduce", reduced)
        patch.setattr(Group, "__init__", natively)
        patch.setattr(everyone, "direct", False)
        patch.setattr(everyone, "swaps", False)
        patch.setattr(dist, "isend", sent_to)
        patch.setattr(dist, "irecv", received_from)
        yield self


def train(world: World, layout: str, home: str) -> list[float]:
    """Losses of three steps."""
    trial = Trial(SPEC, LENGTHS, "float32", capacity=61, edges=EDGES, home=home)
    state, player = build(trial, parse_layouts(layout), world)
    losses = [train_step(state, batch, player).loss for batch in trial.batches()]
    player.finish()
    state.home.close()
    for runner in player.runners.values():
        if runner.tier is not None:
            runner.tier.close()
    world.forget()
    return losses


def train_recorded(world: World, layout: str, home: str, mutant: str | None = None) -> dict:
    """Races on this rank, and how many collectives were posted on how many streams."""
    alone = train(world, layout, home) if mutant is None else []
    with pytest.MonkeyPatch.context() as patch, modelled(patch) as cuda, Recorder(cuda).recording(patch, world.everyone) as recorder:
        if mutant is None:
            losses = train(world, layout, home)
        else:
            losses = []
            with mistaken(mutant), suppress(NonFiniteError):
                train(world, layout, home)
    never = sum(not work.is_over for work in recorder.works)
    return {
        "races": cuda.races + ["a collective is never waited for"] * never,
        "works": len(recorder.works),
        "streams": len(recorder.streams),
        "same": losses == pytest.approx(alone, rel=1e-6),
    }


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., list[dict]]]:
    """call(layout, home, mutant): what `train_recorded` returns on each rank."""
    worlds = {size: ForkedWorld(size) for size in (2, 4)}

    def run(layout: str, home: str, mutant: str | None = None) -> list[dict]:
        world = worlds[parse_layouts(layout)[0].world]
        return world.call("test_collective_streams:train_recorded", DEADLINE_S, layout=layout, home=home, mutant=mutant)

    yield run
    for world in worlds.values():
        world.close()


@pytest.mark.parametrize(("layout", "home"), CASES)
def test_memory_of_a_collective_stays_as_it_is_until_it_has_ended(call: Callable[..., list[dict]], layout: str, home: str):
    for found in call(layout, home):
        assert not found["races"], found["races"][:3]
        assert found["works"] > 10
        assert found["streams"] > 1
        assert found["same"]


@pytest.mark.parametrize("mutant", [mutant.__name__ for mutant in STREAM_MUTANTS])
def test_a_collective_that_is_not_waited_for_or_not_kept_is_a_race(call: Callable[..., list[dict]], mutant: str):
    assert any(found["races"] for found in call("dp2.z1 > u2 > tp2", "device", mutant))
