"""The ranks of one machine: started, watched and ended together.

    longshift train -> launch -> longshift worker RUN (rank 0)
                          |      longshift worker RUN (rank 1) ...
                          +-- TCPStore on 127.0.0.1  <- every rank connects

[Note: loopback only] torch's TCPStore listens on every interface. Here a socket bound to 127.0.0.1
is given to the store. Ranks seal what they leave there (`dist.sealed_store`) with a secret, which
they get by a pipe or find in their environment, as only processes of their user can.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from longshift.cluster.host import core_count
from longshift.dist.memory import allow_files, host_memory, lacks_memory
from longshift.dist.ranks import RankProcesses, Ranks, Seed
from longshift.dist.sealed_store import SealedStore, new_secret
from longshift.dist.world import allocator, check_gpus, launchers_store, on_loopback
from longshift.errors import LongshiftError, OutOfMemoryError, PeerError, UsageError
from longshift.files import OF_DISKS, refused
from longshift.terminal import Say
from longshift.trainer.interrupt import ENDING, not_ignored, stopping
from longshift.trainer.run_folder import (
    Cause,
    RunFolder,
    as_error,
    clear_causes,
    read_causes,
    root_cause,
    silent_cause,
    write_cause,
)

HOST = "127.0.0.1"
RANKS_A_CORE = 8  # of ranks that compute on cores: enough to try a layout, not to lose the machine
CAUSE_KEY = "longshift-cause"  # in the store, followed by the rank
TELL_TIMEOUT = timedelta(seconds=5)
POLL_S = 0.5
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# What backends put into messages: lines of their source, and who may be to blame.
SOURCE_LINE = re.compile(r"\[?[^\s\[]*/[^\s\]]+\.(?:cc|cpp|cu|h|hpp):\d+\]?,? ?")
ADVICE_OF_GLOO = re.compile(r" This is typically caused by a remote worker hanging.*", re.DOTALL)
RANK_BYTES = 300 << 20  # of a rank that has joined and holds nothing


class StopAtOnce(Exception):
    """Raised where the main thread is, to end ranks without waiting for them."""


class Interrupts:
    """Passes the first Ctrl-C, or what schedulers and terminals send before they end a job, on to
    ranks: they are in sessions of their own and do not see it. Raises StopAtOnce at the second;
    after the first, too, where ranks have not begun. A context manager. Mutable: `received`
    signals, and the ranks that it reaches."""

    def __init__(self, say: Say):
        self.received: list[int] = []
        self._say = say
        self._ranks: Ranks | None = None

    def __enter__(self) -> "Interrupts":
        self._before = [
            (number, signal.signal(number, self._on_signal))
            for number in (signal.SIGINT, *not_ignored(ENDING))
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def reach(self, ranks: Ranks) -> None:
        """Ranks that have just been started. Raises StopAtOnce where Ctrl-C came before."""
        self._ranks = ranks
        if self.received:
            raise StopAtOnce

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) > 1:
            raise StopAtOnce  # a rank that waits for a peer would not see SIGINT
        if self._ranks is not None:
            self._say(stopping(number))
            self._ranks.send(signal.SIGINT)


def launch(
    command: Sequence[str],
    world: int,
    folder: RunFolder,
    say: Say,
    stall_timeout_s: float = 60.0,
    crowded: bool = False,
    held: bool = False,
    seed: Seed | None = None,
) -> None:
    """Run `command` once per local rank, until all have ended well or one has failed; then the rest
    are ended too.

    The first Ctrl-C, SIGTERM, SIGHUP or SIGQUIT goes on to the ranks, which finish their step and
    save; the second ends them. `say` shows a line to the person; `stall_timeout_s`: how long a rank
    may be stopped; `crowded`: whether more ranks may start than the machine is made for; `held`:
    ranks find SIGINT blocked, so that none is lost before their `Interrupt` lets it through;
    `seed`: is forked for each rank, and `command` is its arguments.
    Raises UsageError where there are fewer GPUs than ranks, or too few cores or too little memory;
    the LongshiftError of the rank that failed first; KeyboardInterrupt when the ranks were ended
    before they could save."""
    check_gpus(world)
    check_room(world, crowded)
    allow_files(world)
    clear_causes(folder)
    with Interrupts(say) as interrupts:
        try:
            parent = os.getpid() if seed is None else seed.pid
            store = open_store()
            environments = [
                local_environment(store, rank, world) | {"LONGSHIFT_PARENT": str(parent)}
                for rank in range(world)
            ]
            ranks = (RankProcesses if seed is None else seed.start)(command, environments, held)
            causes = _watch(ranks, folder, stall_timeout_s, interrupts)
        except StopAtOnce:
            raise KeyboardInterrupt from None
    failed = {rank: code for rank, code in ranks.codes().items() if code}
    if failed:
        # Ranks that SIGINT itself has ended could not save.
        if interrupts.received and all(-code == signal.SIGINT for code in failed.values()):
            raise KeyboardInterrupt
        causes = gather_causes(store, world, folder, causes)
        raise as_error(root_cause(causes, failed))


def _watch(
    ranks: Ranks, folder: RunFolder, stall_timeout_s: float, interrupts: Interrupts
) -> list[Cause]:
    """Wait until all ranks have ended, or one has failed and the others were made to.
    Why some were ended."""
    causes = list[Cause]()
    stopped_since_s: dict[int, float] = {}
    try:
        interrupts.reach(ranks)
        while len(codes := ranks.codes()) < len(ranks.pids) and not any(codes.values()):
            ranks.wait(min(POLL_S, stall_timeout_s / 4))
            causes += _end_stopped(ranks.pids, stopped_since_s, folder, stall_timeout_s)
        causes += terminated_ranks(ranks)
    finally:
        ranks.end()
    return causes


def terminated_ranks(ranks: Ranks) -> Iterator[Cause]:
    """The ranks that SIGTERM has ended before the launcher sends it to those that are left. Yields
    why they failed."""
    ranks.wait(0.0)
    for rank, code in ranks.codes().items():
        if -code == signal.SIGTERM:
            yield silent_cause(rank, code)


def _end_stopped(
    pids: Mapping[int, int], since_s: dict[int, float], folder: RunFolder, allowed_s: float
) -> Iterator[Cause]:
    """End ranks that stand still: stopped by SIGSTOP, by a debugger or by a batch system that
    suspends single processes. Yields why.

    Their peers wait in a collective until it fails, which may be many minutes, and then name each
    other. So a rank that stays stopped for longer than the run allows is named as the cause and
    ended, and with it the run. `pids`: the process of each rank; `since_s`: when each stopped rank
    was first seen so, which is kept up to date."""
    now_s = time.monotonic()
    for rank, pid in pids.items():
        if not _is_stopped(pid):
            since_s.pop(rank, None)
        elif now_s - since_s.setdefault(rank, now_s) >= allowed_s:
            message = (
                f"rank {rank} (process {pid}) has been stopped for"
                f" {now_s - since_s.pop(rank):.0f} s, and was ended"
            )
            yield write_cause(
                folder,
                rank,
                PeerError(
                    f"{message}; a run that may be suspended needs a larger train.stall_timeout"
                ),
            )
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in STOPPED
    except psutil.Error:  # it has ended
        return False


def tell(cause: Cause) -> None:
    """Tell the launcher of this rank, if it has one, why it fails: what cannot be written to the
    run folder may be the cause."""
    with suppress(dist.DistError, RuntimeError):  # the launcher is gone
        if store := launchers_store(TELL_TIMEOUT):
            store.set(f"{CAUSE_KEY}-{cause.rank}", cause.to_json())


def gather_causes(
    store: SealedStore | None, world: int, folder: RunFolder, observed: Sequence[Cause]
) -> list[Cause]:
    """Why ranks failed: what the launcher observed, what they told by the launcher's store, if it
    has one, and what they wrote."""
    causes = list(observed)
    for rank in range(world):
        key = f"{CAUSE_KEY}-{rank}"
        if store is not None and store.check([key]):
            causes.append(Cause.model_validate_json(store.get(key)))

    # What a rank wrote is a copy of what it told, if it could do both.
    ranks = {cause.rank for cause in causes}
    return causes + [cause for cause in read_causes(folder) if cause.rank not in ranks]


def check_room(world: int, crowded: bool) -> None:
    """Raises UsageError for more ranks than this machine's cores, or its memory, are made for,
    where ranks compute on cores."""
    cores = core_count()
    free = host_memory()[1]
    if crowded or torch.cuda.is_available():
        return
    instead = "take a layout of fewer ranks, or start them all the same with --crowded"
    max_ranks = RANKS_A_CORE * cores
    if world > max_ranks:
        raise UsageError(
            f"{world} ranks on {cores} cores, and at most {max_ranks} are started here: {instead}"
        )
    need = world * RANK_BYTES
    if need > free:
        raise UsageError(
            f"{world} ranks need {need / 2**30:.1f} GiB before they hold a number, and"
            f" {free / 2**30:.1f} GiB are free: {instead}"
        )


def open_store() -> SealedStore:
    """A new store for the ranks of this machine. [Note: loopback only]"""
    with socket.create_server((HOST, 0)) as listener:
        # The store closes the socket, so Python must not.
        store = TCPStore(
            HOST,
            listener.getsockname()[1],
            is_master=True,
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
        )
    return SealedStore(store, new_secret())


def local_environment(store: SealedStore, rank: int, world: int) -> dict[str, str]:
    """What a rank of this machine finds in its environment, beside what is in the environment of
    who starts it."""
    # Without OMP_NUM_THREADS each rank would start a thread on every core.
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "LONGSHIFT_STORE": f"{HOST}:{store.port}",
        "LONGSHIFT_SECRET": store.secret,
        "OMP_NUM_THREADS": str(max(1, core_count() // world)),
        **on_loopback(),
        **allocator(),
    }


def rank_error(error: Exception, rank: int) -> Exception:
    """What a failure on a rank means: lost peers, exhausted memory and what a disk refuses get
    their own class; the rest stays as it is."""
    text = str(error)
    if isinstance(error, LongshiftError):
        return error
    if isinstance(error, OSError) and error.errno in OF_DISKS:
        return refused(error)
    if lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
        return OutOfMemoryError(
            f"rank {rank}: {text}; in the layout, recompute-full, u2 or ring2, or a higher z takes"
            " less"
        )
    # Backends raise plain RuntimeErrors, which name them, where a connection breaks.
    is_of_backend = isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    if isinstance(error, dist.DistError) or is_of_backend:
        text = ADVICE_OF_GLOO.sub("", SOURCE_LINE.sub("", text))
        return PeerError(f"rank {rank} lost its peers: {text}")
    return error
