"""A model of CUDA's streams, on a CPU: what it promises about order, and no more.

Operations of one stream run in order; those of two in any, unless an event, a wait for a stream or a synchronisation lies between. So each
stream has a vector clock, and two accesses to the same memory of which one writes are a race where the later one's stream has not seen the
earlier one. Memory that is freed may be given out again to the stream that it came from, at once, but for what `record_stream` has named.
Tensors lie on the CPU, where copies are done in the order of the program. What is done with pinned memory outside of the streams for copies
is the host's doing (stream -1): it waits for none that it was not made to wait for.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longshift.state import crossing
from longshift.state import home as home_module
from longshift.state.crossing import Crossing
from longshift.step import player as player_module
from longshift.stream import disk_file, gpu_tiers, tiers
from longshift.stream.gpu_tiers import BouncedTier, HostTier
from longshift.stream.tiers import Tier

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))  # last: a script there has the name of one above

from fake_device import AtOnce  # pyright: ignore[reportMissingImports]

Clock = dict[int, int]  # how far each stream had come
Line = tuple[str, int]  # of a file
# Files whose waits are known by their lines.
WATCHED = {tiers.__file__: "tiers.py", gpu_tiers.__file__: "gpu_tiers.py", crossing.__file__: "crossing.py"}


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
    """`ignored`: the line whose waits do nothing. Mutable: what has happened."""

    def __init__(self, ignored: Line = ("", 0)):
        super().__init__()
        self.ignored = ignored
        self.streams: list[Stream] = []
        self.current, self.host = self.new(), Stream(self, -1)
        self.memory: dict[int, Memory] = {}
        self.pool: list[tuple[int, Tensor]] = []  # what streams other than the first have asked for, of which some is free again
        self.races: list[str] = []
        self.waits: set[Line] = set()
        self.pinned: dict[int, int] = {}  # bytes by address
        self.most_pinned = 0

    def new(self, device: object = None) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def heeds(self) -> bool:
        """Whether the wait that product code calls for is to be done. Not what paces the host: all must be in order without it."""
        frame: Any = sys._getframe()
        while frame.f_code.co_filename not in WATCHED:
            frame = frame.f_back
        if frame.f_code.co_name == "wait_sent":
            return False
        line = WATCHED[frame.f_code.co_filename], frame.f_lineno
        self.waits.add(line)
        return line != self.ignored

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
        self.pinned[address], self.memory[address] = size, Memory(-1)
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
        if any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.returns):
            return out  # a view
        there = {place: name in written for name, value in given.items() for place in _storages(value)}
        for place in set(_storages(out)) - there.keys():
            self._new(place)
            there[place] = True
        if stream is self.streams[0] and there.keys() & self.pinned.keys():
            self._by_host(there, str(func))
            return out
        for place, writes in there.items():
            self._access(place, writes, str(func))
        return out

    def _by_host(self, there: dict[int, bool], what: str) -> None:
        """An operation of the host, which waits for no stream by itself. What it does with memory that no stream copies is in order."""
        self.host.seen[-1] = self.host.seen.get(-1, 0) + 1
        for place, writes in there.items():
            if place in self.pinned:
                self._access(place, writes, what, self.host)

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """The bytes of a tensor, which the host reads or writes now."""
        self.host.seen[-1] = self.host.seen.get(-1, 0) + 1
        self._access(tensor.untyped_storage().data_ptr(), True, "what goes to the disk or comes from it", self.host)
        return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]

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

    def _access(self, place: int, writes: bool, what: str, by: Stream | None = None) -> None:
        by = by or self.current
        memory = self.memory.setdefault(place, Memory(by.number))
        for (number, wrote), time in memory.last.items():
            if (writes or wrote) and by.seen.get(number, 0) < time:
                self.races.append(f"{what} on stream {by.number} {'writes' if writes else 'reads'} what stream {number} may still use")
        memory.last[by.number, writes] = by.seen[by.number]


def _storages(value: object) -> list[int]:
    places = [t.untyped_storage().data_ptr() for t in tree_leaves(value) if isinstance(t, Tensor)]
    return [place for place in places if place]


def made(offload: str, device: torch.device, folder: Path, checked: bool) -> Tier:
    """A tier as a GPU has it."""
    return HostTier(device) if offload == "host" else BouncedTier(device, folder, checked=checked)


@contextmanager
def modelled(patch: pytest.MonkeyPatch, ignored: Line = ("", 0)) -> Iterator[Cuda]:
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
        patched.setattr(player_module, "tier_of", made)
        patched.setattr(disk_file, "ThreadPoolExecutor", AtOnce)
        patched.setattr(gpu_tiers, "BOUNCE_BYTES", 512)
        patched.setattr(gpu_tiers, "bytes_of", cuda.bytes_of)
        patched.setattr(gpu_tiers, "whole_pages", lambda size: -(-size // 16) * 16)  # sizes here are less than a page
        patched.setattr(home_module, "crossing_of", lambda device, slots: Crossing(device, slots))
        patched.setattr(crossing, "SLOT_BYTES", 512)
        yield cuda
