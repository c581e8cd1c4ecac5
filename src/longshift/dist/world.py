"""The processes of a run, the device of this one, and groups of them.

A rank's place comes from torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK). Ranks meet at
LONGSHIFT_STORE (host:port, set by `longshift train` for workers that it starts, loopback only) or,
under torchrun, Slurm or Kubernetes, at MASTER_ADDR and MASTER_PORT.

[Note: ranks of a GPU] A GPU has one rank, unless LONGSHIFT_RANKS_PER_GPU says that it may have
more: to try NCCL's code on one card, not to train. NCCL refuses two ranks on one GPU of one host,
and takes the name of the host from NCCL_HOSTID (up to 2.29; NCCL 2.30 has
NCCL_MULTI_RANK_GPU_ENABLE beside it). So every rank gets a host of its own, and all traffic goes
over sockets.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from longshift import errors
from longshift.cluster.host import core_count
from longshift.dist.collectives import Group
from longshift.dist.launcher import end_with_parent, place
from longshift.dist.sealed_store import SealedStore
from longshift.errors import LongshiftError, PeerError, UsageError

TIMEOUT = timedelta(minutes=10)
LARGE = 32 << 20  # bytes, from which on the C library maps memory anew each time
# What torch reads, the second where there is no first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# For what some ranks do alone, such as the tokens of a large corpus.
ALONE_TIMEOUT = timedelta(days=7)
RANKS_PER_GPU = "LONGSHIFT_RANKS_PER_GPU"
# For ranks that share a GPU: no network but sockets, and few blocks of the GPU for a collective, as
# two ranks take turns there.
OF_SHARED_GPUS = (("NCCL_IB_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_MAX_CTAS", "2"))


def launchers_store(timeout: timedelta) -> SealedStore | None:
    """The store of the launcher that started this rank; None where `longshift train` did not.
    Raises torch's DistError where it is gone."""
    host, _, port = os.environ.get("LONGSHIFT_STORE", "").rpartition(":")
    if not host:
        return None
    return SealedStore(
        dist.TCPStore(host, int(port), is_master=False, timeout=timeout),
        os.environ["LONGSHIFT_SECRET"],
    )


def on_loopback() -> dict[str, str]:
    """What the environment is to hold for the listeners of gloo and NCCL to stay on the loopback
    interface."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def stay_on_loopback() -> None:
    """Keep listeners of this process, and of those it starts, on the loopback interface."""
    os.environ.update(on_loopback())


def keep_freed_memory() -> None:
    """glibc: let the heap keep up to 1 GiB of freed memory, as caching allocators of GPUs do. What
    goes back to the system costs a page fault for every 4 KiB when it is used again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        mallopt(-3, LARGE)  # M_MMAP_THRESHOLD: the largest that glibc would come to by itself


def allocator() -> dict[str, str]:
    """What the environment is to hold before CUDA starts: segments of its allocator grow in place,
    so that steps of other lengths fit into what is free together. Nothing where a person has set
    the allocator."""
    if any(name in os.environ for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def be_deterministic() -> None:
    """Have torch take kernels that give the same bits every time, and raise where there is none.
    Before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore


def ranks_per_gpu() -> int:
    """How many ranks a GPU may have. [Note: ranks of a GPU] Raises UsageError where the environment
    does not say it in a number."""
    text = os.environ.get(RANKS_PER_GPU, "1")
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(
            f"{RANKS_PER_GPU} is {text!r}, and how many ranks a GPU may have is a number, from 1 on"
        )
    return int(text)


def gpu_of(local: int, rank: int) -> torch.device:
    """The GPU of the rank that has this number on its machine, the only one that it sees. Raises
    UsageError for a rank too many."""
    count = torch.cuda.device_count()
    index = local // ranks_per_gpu()
    # A rank that is shown one GPU alone finds it under number 0.
    if index >= count > 1:
        raise UsageError(
            f"rank {rank} is number {local} (from 0) on its machine, which shows it {count} GPUs"
        )
    return torch.device("cuda", min(index, count - 1))


def own_device() -> torch.device:
    """The GPU of this rank by its place on its machine, or the CPU. Raises UsageError for a rank
    too many."""
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    rank = int(os.environ.get("RANK", "0"))
    place = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
    return gpu_of(int(place) if place else rank % (count * ranks_per_gpu()), rank)


def use_gpu(device: torch.device, rank: int) -> None:
    """Have this process compute on a GPU, and NCCL know it for a host of its own where GPUs have
    several ranks. Before NCCL starts."""
    torch.cuda.set_device(device)
    if ranks_per_gpu() > 1:
        for name, value in (("NCCL_HOSTID", f"rank{rank}"), *OF_SHARED_GPUS):
            os.environ.setdefault(name, value)


def check_gpus(ranks: int) -> None:
    """Raise UsageError where the machine has GPUs, but not one for each rank."""
    count = torch.cuda.device_count()
    if 0 < count * ranks_per_gpu() < ranks:
        raise UsageError(
            f"{ranks} ranks need a GPU each, and this machine has {count}: name a layout of fewer"
            " ranks, or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )


class World:
    """This process among its peers. Mutable: it remembers the groups it has made. `per_node`: ranks
    on each machine; `timeout`: after which a collective of those groups fails. `cores`: how many
    this process might use when it joined."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        per_node: int | None = None,
        timeout: timedelta = TIMEOUT,
    ):
        self.rank = rank
        self.size = size
        self.device = device
        self.per_node = per_node or size
        self.cores = core_count()
        self.everyone = Group(tuple(range(size)), rank, dist.group.WORLD if size > 1 else None)
        self._groups: dict[tuple[tuple[int, ...], str], Group | None] = {}
        self._timeout = timeout
        self._store: SealedStore | None = None
        self._waits = 0

    @classmethod
    def from_environment(cls, timeout_s: float = TIMEOUT.total_seconds()) -> "World":
        """Join the peers that the environment describes; a collective with them fails after
        `timeout_s`. Raises PeerError when they cannot be reached, or the launcher's store holds
        what none of them has written, UsageError without a GPU for this rank where there are
        some."""
        keep_freed_memory()
        os.environ.update(allocator())
        rank, size = place()
        if size is None:
            return cls.alone()
        device = own_device()
        cuda = device.type == "cuda"
        backend = "nccl" if cuda else "gloo"
        if cuda:
            use_gpu(device, rank)
        timeout = timedelta(seconds=timeout_s)
        try:
            store = launchers_store(TIMEOUT)
            if store is not None:
                # NCCL's own threads go on asking, also when Python has ended.
                meeting = store.plain if cuda else store
                dist.init_process_group(
                    backend, store=meeting, rank=rank, world_size=size, timeout=timeout
                )
            else:
                dist.init_process_group(backend, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as fault:
            raise PeerError(f"rank {rank} of {size} could not join the others: {fault}") from fault
        if store is not None:
            end_with_parent(signal.SIGKILL)
        world = cls(rank, size, device, int(os.environ.get("LOCAL_WORLD_SIZE", size)), timeout)
        world._store = store  # torch keeps only its native half
        return world

    @classmethod
    def alone(cls) -> "World":
        """One process, no peers."""
        return cls(
            0, 1, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        )

    def prepare(self, groups: Iterable[tuple[int, ...]], purpose: str = "") -> None:
        """Make process groups for these sets of ranks. Every rank of the world calls it with the
        same sets in the same order, members or not: torch names a group by how many were made
        before. `purpose` keeps traffic apart that may cross (the two directions of a pipeline)."""
        for ranks in groups:
            if len(ranks) > 1 and (ranks, purpose) not in self._groups:
                handle: Any = dist.new_group(list(ranks), timeout=self._timeout)
                self._groups[ranks, purpose] = (
                    Group(ranks, self.rank, handle) if self.rank in ranks else None
                )

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> Group:
        """The group of these ranks, made before by `prepare`; a group of one needs no making."""
        if len(ranks) == 1:
            return Group(ranks, self.rank, None)
        group = self._groups[ranks, purpose]
        assert group is not None, f"rank {self.rank} is not in {ranks}"
        return group

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank, on every rank."""
        data = text.encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        self.everyone.all_gather(sizes, torch.tensor([len(data)], device=self.device)).wait()
        longest = max(1, int(sizes.max()))

        # An all-gather takes as much of every rank: texts are filled up to the longest.
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        if data:  # `frombuffer` refuses an empty one
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = padded.new_empty((self.size, longest))
        self.everyone.all_gather(rows, padded).wait()
        texts = []
        for row, size in zip(rows.cpu(), sizes.tolist()):
            texts.append(bytes(row[:size].tolist()).decode())
        return texts

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)

    def now(self) -> float:
        """Seconds on a clock, when this rank's device has done all that it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def wait_for(self, ranks: Iterable[int]) -> None:
        """Wait until these ranks have come here too, for longer than a collective may take. Every
        rank calls it with the same ranks."""
        # The store keeps keys for the whole run: each wait has its own.
        self._waits += 1
        keys = {rank: f"longshift-wait-{self._waits}-{rank}" for rank in ranks}
        if self.size > 1 and self.rank in keys:
            _get_default_store().set(keys[self.rank], "")
        if self.size > 1:
            _get_default_store().wait(list(keys.values()), ALONE_TIMEOUT)

    def agree(self, fault: LongshiftError | None) -> None:
        """Raise on every rank when one of them has a fault: its own there, the lowest faulty rank's
        elsewhere, of the same class."""
        text = f"{type(fault).__name__} {fault}" if fault else ""
        # Ranks with a fault gather, too, or the others would wait for them.
        faults = [rank_text.partition(" ") for rank_text in self.gather_text(text)]
        if fault is not None:
            raise fault
        for kind, _, message in faults:
            if kind:
                raise getattr(errors, kind)(message)

    def forget(self) -> None:
        """Take all prepared groups down; collective. A process that tries many layouts should:
        every gloo group keeps a thread that wakes a hundred times a second."""
        self.everyone.all_reduce(torch.zeros(1, device=self.device))  # nobody uses them any more
        for group in self._groups.values():
            if group is not None and group.handle is not None:
                dist.destroy_process_group(group.handle)
                group.handle = None
        self._groups.clear()

    def close(self) -> None:
        """After a success only: NCCL waits here for all traffic, and after a failure on this rank
        some would never end."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
