"""Workers of one machine: started, watched and ended together, by the elastic agent of torch itself.

    longshift train -> launch -> LocalElasticAgent -> longshift worker RUN (rank 0)
                          |                           longshift worker RUN (rank 1) ...
                          +-- TCPStore on 127.0.0.1  <- every rank connects

[Note: loopback only]  torch's TCPStore listens on every interface, and so do its stock rendezvous backends. Here a socket bound
to 127.0.0.1 is given to the store. Ranks seal what they leave there (`dist.sealed`) with a secret that they find in their environment,
which only processes of the same user can read. The agent has nobody to meet and keeps what it knows in its own memory.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from longshift.cluster.host import core_count
from longshift.dist.memory import host_memory
from longshift.dist.sealed import SealedStore, new_secret
from longshift.dist.world import allocator, check_gpus, launchers_store
from longshift.errors import LongshiftError, OutOfMemoryError, PeerError, UsageError
from longshift.files import OF_DISKS, refused, temporary_folder
from longshift.trainer.frozen import watched
from longshift.trainer.interrupt import ENDING, stopping
from longshift.trainer.run_folder import Cause, RunFolder, as_error, clear_causes, read_causes, root_cause

HOST = "127.0.0.1"
RANKS_A_CORE = 8  # of ranks that compute on cores: enough to try a layout, not to lose the machine
TOLD, TELLING = "longshift-cause", timedelta(seconds=5)
RANK_BYTES = 300 << 20  # of a rank that has joined and holds nothing


class _OneMachine(RendezvousHandler):
    """A rendezvous of one agent: always complete."""

    def __init__(self, port: int):
        self._port = port

    use_agent_store = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(HOST, self._port))

    def get_backend(self) -> str:
        return "one-machine"

    def get_run_id(self) -> str:
        return "longshift"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class _HoldingAgent(LocalElasticAgent):
    """An agent whose ranks begin with SIGINT blocked."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(
    command: Sequence[str],
    world: int,
    folder: RunFolder,
    say: Callable[[str], None],
    frozen_s: float = 60.0,
    crowded: bool = False,
    held: bool = False,
) -> None:
    """Run `command` once per local rank, until all have ended well or one has failed; then the rest are ended too.

    The first Ctrl-C, SIGTERM, SIGHUP or SIGQUIT goes on to the ranks, which finish their step and save; the second ends them. `say` shows a
    line to the person; `frozen_s`: how long a rank may be stopped; `crowded`: whether more ranks may start than the machine is made for;
    `held`: ranks find SIGINT blocked, so that none is lost before their `Interrupt` lets it through.
    Raises UsageError where there are fewer GPUs than ranks, or too few cores or too little memory; the LongshiftError of the rank that
    failed first; KeyboardInterrupt when the ranks were ended before they could save."""
    check_gpus(world)
    _check_room(world, crowded)
    clear_causes(folder)
    _quiet(logging.getLogger("torch.distributed.elastic"))
    listening, secret = _loopback_store(), new_secret()
    store = SealedStore(listening, secret)
    told: list[Cause] = []
    with temporary_folder() as logs, _environment(_worker_environment(listening, secret, world)):
        spec = WorkerSpec(
            role="longshift",
            local_world_size=world,
            rdzv_handler=_OneMachine(listening.port),
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=0,
            monitor_interval=0.1,
        )
        agent = (_HoldingAgent if held else LocalElasticAgent)(spec, DefaultLogsSpecs(log_dir=str(logs)))
        with _forward_interrupts(agent, say) as interrupted, watched(lambda: _ranks(agent), folder, frozen_s, told.append):
            try:
                result: RunResult = agent.run()  # pyright: ignore[reportAssignmentType]
            except SignalException as stop:
                if interrupted:
                    raise KeyboardInterrupt from None
                raise PeerError(f"the launcher was ended by {stop.sigval.name}, and its ranks with it") from None
    if result.is_failed():
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        if interrupted and all(-code == signal.SIGINT for code in codes.values()):
            raise KeyboardInterrupt
        raise as_error(root_cause(_causes(store, world, folder, told), codes))


def tell(cause: Cause) -> None:
    """Tell the launcher of this rank, if it has one, why it fails: what cannot be written to the run folder may be the cause."""
    with suppress(dist.DistError, RuntimeError):  # the launcher is gone
        if store := launchers_store(TELLING):
            store.set(f"{TOLD}-{cause.rank}", cause.to_json())


def _causes(store: SealedStore, world: int, folder: RunFolder, told: Sequence[Cause]) -> list[Cause]:
    """Why ranks failed: what the launcher saw, what they told, and what they wrote."""
    keys = [key for key in (f"{TOLD}-{rank}" for rank in range(world)) if store.check([key])]
    found = [*told, *(Cause.from_json(store.get(key).decode()) for key in keys)]
    return found + [cause for cause in read_causes(folder) if cause.rank not in {known.rank for known in found}]


def _check_room(world: int, crowded: bool) -> None:
    """Raises UsageError for more ranks than this machine's cores, or its memory, are made for, where ranks compute on cores."""
    cores, free = core_count(), host_memory()[1]
    if crowded or torch.cuda.is_available():
        return
    instead = "take a layout of fewer ranks, or write train.crowded=true"
    if world > RANKS_A_CORE * cores:
        raise UsageError(f"{world} ranks on {cores} cores, and at most {RANKS_A_CORE * cores} are started here: {instead}")
    if world * RANK_BYTES > free:
        need, there = (f"{size / 2**30:.1f} GiB" for size in (world * RANK_BYTES, free))
        raise UsageError(f"{world} ranks need {need} before they hold a number, and {there} are free: {instead}")


def _loopback_store() -> TCPStore:
    """A store that listens on loopback only."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)


def _worker_environment(store: TCPStore, secret: str, world: int) -> dict[str, str]:
    """What the ranks find in their environment, beside their place, which the agent tells them."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        "LONGSHIFT_STORE": f"{HOST}:{store.port}",
        "LONGSHIFT_SECRET": secret,
        "LONGSHIFT_LAUNCHER": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(max(1, core_count() // world)),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR2",  # of the agent; those that end processes are ours
        **allocator(),
    }


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment, which the agent passes on to the ranks, and put them back after."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ranks(agent: LocalElasticAgent) -> dict[int, int]:
    """The process of each rank that was started."""
    return {worker.global_rank: worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)}


@contextmanager
def _forward_interrupts(agent: LocalElasticAgent, say: Callable[[str], None]) -> Iterator[list[int]]:
    """Pass the first Ctrl-C, or what schedulers and terminals send before they end a job, on to the ranks (they are in sessions of their
    own and do not see it) and end them at the second. Yields the list of those received."""
    received: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        pids = list(_ranks(agent).values())
        if len(received) > 1 or not pids:
            raise SignalException("stopped twice", signal.SIGTERM)  # a rank that waits for a peer would not see SIGINT
        say(stopping(number))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    watched = (signal.SIGINT, *ENDING)
    before = [(number, signal.getsignal(number)) for number in watched]
    for number in watched:
        signal.signal(number, on_interrupt)
    try:
        yield received
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _quiet(logger: logging.Logger) -> None:
    """Silence a logger: the agent's own account of a failure would stand beside ours."""
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


def rank_error(error: Exception, rank: int) -> Exception:
    """What a failure on a rank means: lost peers, exhausted memory and what a disk refuses get their own class; the rest stays as it is."""
    text = str(error)
    if isinstance(error, LongshiftError):
        return error
    if isinstance(error, OSError) and error.errno in OF_DISKS:
        return refused(error)
    lacking = any(words in text for words in ("can't allocate memory", "out of memory"))
    if lacking or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return OutOfMemoryError(f"rank {rank}: {text}; in the layout, recompute-full, u2 or ring2, or a higher z takes less")
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL"))):
        return PeerError(f"rank {rank} lost its peers: {text}")
    return error
