"""A local world of processes that stays and answers calls. Calls and answers are JSON over pipes: a
function by its dotted name.

Forked ranks start in 0.1 s, where spawned ones take 6 to 18 s. They are for `longshift check`,
tests and benchmarks on CPU: the parent must have imported what the calls need, and must not have
run a backward pass or started threads, since neither survives a fork. CUDA does not either: ranks
with a GPU are spawned.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

# torch.optim imports it at first use: 1.5 s in every rank that does not inherit it.
import torch._dynamo
import torch.distributed as dist

from longshift import errors
from longshift.dist.launcher import end_with_parent
from longshift.dist.world import (
    TIMEOUT,
    World,
    check_gpus,
    gpu_of,
    keep_freed_memory,
    stay_on_loopback,
    use_gpu,
)
from longshift.errors import LongshiftError, PeerError
from longshift.user_code import printing_aside

# After one rank's error, how long to wait for the others', among which may be the cause.
GRACE_S = 2.0


class ForkedWorld:
    """`size` ranks over gloo on loopback. Use as a context manager, or `close` it; a call that
    fails or is late ends all ranks, and the next call starts new ones."""

    device = "cpu"

    def __init__(self, size: int):
        self.size = size
        self._pids: list[int] = []
        self._pipes: list[Connection] = []  # per rank

    def call(self, function: str, deadline_s: float = 60.0, **arguments: object) -> list:
        """Answers, by rank, of `function` ("package.module:name"), called as function(world,
        **arguments) on every rank. Raises
        the LongshiftError of the rank that failed first, as far as that shows (dead before failed,
        failed before peer lost), and PeerError with its traceback where it is another, or when an
        answer is late."""
        if not self._pids:
            self._start()
        message = json.dumps({"function": function, "arguments": arguments}).encode()
        for pipe in self._pipes:
            with suppress(OSError):  # that rank has died: its answer will say so
                pipe.send_bytes(message)
        answers = self._answers(deadline_s)

        failures = sorted((a["cause"], rank) for rank, a in answers.items() if "error" in a)
        if failures:
            self.close()
            cause, rank = failures[0]
            answer = answers[rank]
            error = answer["error"]
            if "kind" in answer:
                raise getattr(errors, answer["kind"])(error)
            outcome = error if cause == 0 else f"failed: {error}"
            raise PeerError(f"{function}: rank {rank} {outcome}")
        if len(answers) < self.size:
            self.close()
            silent = sorted(set(range(self.size)) - set(answers))
            raise PeerError(f"{function}: no answer from ranks {silent} in {deadline_s} s")
        return [answers[rank]["value"] for rank in range(self.size)]

    def _answers(self, deadline_s: float) -> dict[int, dict]:
        """What ranks answer in time, by rank."""
        answers: dict[int, dict] = {}
        until = time.monotonic() + deadline_s
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                answers[rank] = _answer(pipe)
                # Ranks that wait for the failed one may never answer.
                if "error" in answers[rank]:
                    until = min(until, time.monotonic() + GRACE_S)
        return answers

    def close(self) -> None:
        """End the ranks, by pid."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()
        self._pids = []
        self._pipes = []

    def __enter__(self) -> "ForkedWorld":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, rank: int) -> None:
        """The first thing that a rank's process does."""
        stay_on_loopback()

    def listener(self) -> socket.socket:
        """A bound socket, at whose address the ranks meet."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        return listener

    def _start(self) -> None:
        listener = self.listener()
        listener.listen(self.size + 1)
        # What is buffered here would be printed by every fork, too.
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.size):
            pipe, rank_pipe = Pipe()
            self._pids.append(self._begin(rank, listener, rank_pipe))
            rank_pipe.close()
            self._pipes.append(pipe)
        listener.close()

    def _begin(self, rank: int, listener: socket.socket, pipe: Connection) -> int:
        """Start a rank that reads calls from a pipe and writes answers there; its process id."""
        pid = os.fork()
        if pid == 0:
            _serve(self, rank, listener, pipe)
        return pid


class SpawnedWorld(ForkedWorld):
    """As a ForkedWorld, of fresh processes: on the GPUs of this machine, a rank each, or on the
    CPU. What they call must be importable."""

    def __init__(self, size: int, device: str = "cpu"):
        """`device`: its type. Raises UsageError for more ranks than GPUs."""
        super().__init__(size)
        self.device = device
        self._children: list[subprocess.Popen] = []
        if device == "cuda":
            check_gpus(size)

    def close(self) -> None:
        super().close()
        for child in self._children:
            child.wait()  # it is gone; Popen is told
        self._children.clear()

    def _begin(self, rank: int, listener: socket.socket, pipe: Connection) -> int:
        arguments = (rank, self.size, self.device, listener.fileno(), pipe.fileno())
        code = f"from longshift.dist.fork import serve_spawned; serve_spawned{arguments}"
        child = subprocess.Popen([sys.executable, "-P", "-c", code], pass_fds=arguments[-2:])
        self._children.append(child)
        return child.pid


def local_world(size: int, type: str, device: str) -> ForkedWorld:
    """Ranks on devices of a `type`: forked where the caller's `device` is the CPU, so that none of
    its ranks uses a GPU, else spawned. Raises UsageError for more ranks than GPUs."""
    return ForkedWorld(size) if device == "cpu" else SpawnedWorld(size, type)


def serve_spawned(rank: int, size: int, device: str, listener: int, pipe: int) -> None:
    """Life of a spawned rank; handles are those that it was given."""
    host = SpawnedWorld(size, device)
    _serve(host, rank, socket.socket(fileno=listener), Connection(pipe))


def _serve(host: ForkedWorld, rank: int, listener: socket.socket, pipe: Connection) -> None:
    """Life of a rank; never returns. It leaves by os._exit: a forked gloo world now and then hangs
    in an orderly shutdown."""
    try:
        end_with_parent(signal.SIGKILL)
        host.enter(rank)
        keep_freed_memory()
        for other_pipe in host._pipes:
            other_pipe.close()
        torch.set_num_threads(1)
        device = gpu_of(rank, rank) if host.device == "cuda" else torch.device("cpu")
        world = _join(rank, host.size, listener, device)
        answer = {}
        # After an error it ends, so that peers which wait for this rank learn of it.
        while "error" not in answer:
            answer = _called(world, **json.loads(pipe.recv_bytes()))
            pipe.send_bytes(json.dumps(answer).encode())
    except EOFError:  # it is closed
        pass
    finally:
        os._exit(0)


def _called(world: World, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a function answers, or its error."""
    module, name = function.split(":")
    try:
        # Standard output belongs to the process that prints the answer.
        with printing_aside():
            return {"value": getattr(importlib.import_module(module), name)(world, **arguments)}
    except LongshiftError as fault:
        return {"error": str(fault), "kind": type(fault).__name__, "cause": 1}
    except Exception as fault:
        # Torch tells a lost peer by its backend's words alone.
        is_transport = any(word in str(fault) for word in ("gloo", "NCCL"))
        lost_peer = isinstance(fault, (dist.DistError, RuntimeError)) and is_transport
        return {"error": traceback.format_exc(), "cause": 2 if lost_peer else 1}


def _answer(pipe: Connection) -> dict[str, Any]:
    """What a rank has answered."""
    try:
        return json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return {"error": "died", "cause": 0}


def _join(rank: int, size: int, listener: socket.socket, device: torch.device) -> World:
    if device.type == "cuda":
        use_gpu(device, rank)
    if size == 1:
        return World(0, 1, device)
    address, port = listener.getsockname()
    options = {"is_master": False}
    if rank == 0:
        # The parent has bound the port, so no other process can take it meanwhile.
        options = {"is_master": True, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(address, port, wait_for_workers=False, timeout=TIMEOUT, **options)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, device)
