"""What a rank does to compare homes: it trains a trial, under limits of time and of memory where wanted, and answers with the bits of its
training state."""

import fcntl
import hashlib
import mmap
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
from common import give_freed_memory_back
from torch import Tensor
from trial import Trial, build, parse_layouts

from longshift.dist.world import World
from longshift.documents.batch import StepBatch, document_from_ids
from longshift.layout.blocks import scales_of
from longshift.layout.box import Box
from longshift.layout.home_tiers import StateBytes
from longshift.layout.placement import buckets_of
from longshift.program.operations import Op
from longshift.state.checkpoint import Checkpoint, save
from longshift.state.home import Home, Source
from longshift.state.moments import SCALE
from longshift.state.optimizer import torch_optimizer
from longshift.state.precision import Precision
from longshift.state.records import PIECE, THREADS, DiskVector, Extent, Records
from longshift.state.records import in_memory as held_in_memory
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.workload.groups import home_layout


def made(world: World, trial: Trial, layout: str) -> tuple[State, Player]:
    """State and player of a trial, whose switches are planned for nodes of two ranks."""
    world.per_node = min(2, world.size)
    return build(trial, parse_layouts(layout), world)


def half_of_home(trial: Trial, layout: str) -> int:
    """Half of the bytes that rank 0 keeps of the training state."""
    home, how = home_layout(trial.groups(parse_layouts(layout))), Precision.of(trial.precision)
    each = StateBytes(how.compute.itemsize, how.home.itemsize, len(trial.rule.moments), trial.packed)
    return sum(each.state_of(bucket, 0) for bucket in buckets_of(trial.spec, home, 0)) // 2


def bits(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def state_bits(state: State) -> dict[str, str]:
    """A digest of every master and moment that this rank has, by kind, name and box."""
    return {f"{kind} {name} {box}": bits(view) for name, box, _, views in state.optimizer.state() for kind, view in views.items() if box}


def in_memory(home: Home) -> int:
    """Bytes of what is on disk that are in memory."""
    vectors = (vector for shard in home.shards for vector in shard.vectors.values())
    on_disk = (vector for vector in vectors if isinstance(vector, DiskVector))
    return sum(vector.flat.nbytes for vector in on_disk if vector.users or vector.memory.held)


def trained(world: World, trial: dict, layout: str) -> dict:
    """What a rank's home has after all steps, and where, by unit; what the steps answered; how much of what is on disk was in memory after
    a step at the most; the bytes that the last step read and wrote."""
    state, player = made(world, what := Trial.from_json(trial), layout)
    outcomes, left = [], 0
    for batch in what.batches():
        outcomes.append(train_step(state, batch, player, leave=True))
        left = max(left, in_memory(state.home))
    player.finish()
    found = state_bits(state) | {"steps": str([(one.loss.hex(), one.grad_norm.hex(), one.skipped) for one in outcomes])}
    records = state.home.records
    moved = (records.moved.fetched_bytes, records.moved.put_bytes) if records else ()
    state.home.close()
    return {"bits": found, "left": left, "moved": moved, "tiers": {str(unit): tier for unit, tier in state.home.tiers.items()}}


def logical_bits(world: World, trial: dict, layout: str, folder: str) -> dict[str, str]:
    """A digest of every whole master, moment and tensor of scales after all steps, whose gradients, as they are after the norm, are
    replaced by values that depend on step, weight and place alone: sums over ranks differ in their last bits from layout to layout."""
    state, player = made(world, what := replace(Trial.from_json(trial), clip=None), layout)
    for step, batch in enumerate(what.batches()):
        player.after = partial(_given_gradients, state.home, replace(what, seed=1000 + step).source())
        train_step(state, batch, player, leave=True)
    player.after = None
    player.finish()
    run = Path(folder)
    save(run, 1, state.optimizer.state(), {}, world, keep=1)
    saved, found = Checkpoint.latest(run, world), {}
    kinds = ("master", *state.home.saved)
    saved.expect(what.spec, kinds[1:])
    for param in what.spec.params if world.rank == 0 else ():
        for kind in kinds if not param.frozen else ():
            whole = Box.whole(param.shape)
            found[f"{kind} {param.name}"] = bits(saved.read(kind, param.name, scales_of(whole) if kind.endswith(SCALE) else whole))
    world.gather_text("")
    state.home.close()
    return found


def _given_gradients(home: Home, source: Source, op: Op) -> None:
    for shard in home.learning if op.kind == "norm" else ():
        with held_in_memory([shard.vectors["grad"]], True) if shard.on_disk else nullcontext():
            grad = shard.vectors["grad"].flat if shard.on_disk else shard.grad
            assert grad is not None
            for name, box, view in shard.views(grad):
                view.copy_(source(name, box))


def learned(world: World, trial: dict, tokens: int, documents: int, layout: str = "dp1") -> dict:
    """Losses of a training on Python's standard library, byte by byte, in `documents` of so many tokens a step, drawn by the trial's seed;
    and bytes of its training state between steps, of a parameter."""
    what = Trial.from_json(trial)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    corpus, drawn = np.frombuffer(text, np.uint8), np.random.default_rng(what.seed)
    state, player = made(world, what, layout)
    losses = []
    for _ in what.lengths:
        starts = drawn.integers(0, len(corpus) - tokens - 1, documents)
        batch = StepBatch(tuple(document_from_ids(corpus[at : at + tokens + 1], tokens) for at in starts), tokens * documents, 0, 1)
        losses.append(train_step(state, batch, player).loss)
    kept = [shard.master for shard in state.home.learning]
    kept += [shard.vectors[kind].flat for shard in state.home.learning for kind in state.home.saved]
    return {"losses": losses, "state_bytes": sum(some.untyped_storage().nbytes() for some in kept) / what.spec.parameters}


class Link:
    """A disk that moves so many bytes a second. Several threads may use it."""

    def __init__(self, bandwidth: float):
        self.bandwidth, self.free_at, self._lock = bandwidth, 0.0, threading.Lock()

    @contextmanager
    def busy(self, nbytes: int) -> Iterator[None]:
        """Enter it to move these bytes. The link serves callers in their order; leaving takes until the link would have moved the bytes."""
        with self._lock:
            self.free_at = max(self.free_at, time.perf_counter()) + nbytes / self.bandwidth
            until = self.free_at
        yield
        time.sleep(max(0.0, until - time.perf_counter()))


@cache
def throttled(bandwidth: float) -> None:
    """Hold every home on disk of this process to a bandwidth."""
    link = Link(bandwidth)

    def slow(move: Callable[[Records, Extent], None]) -> Callable[[Records, Extent], None]:
        def moved(records: Records, piece: Extent) -> None:
            with link.busy(piece.nbytes):
                move(records, piece)

        return moved

    Records.read_piece, Records.write_piece = slow(Records.read_piece), slow(Records.write_piece)


_built: dict[tuple[str, float | None, str], tuple[State, Player]] = {}


def timed_step(world: World, trial: dict, layout: str, bandwidth: float) -> dict:
    """Seconds of a step, until the end of its first loss (`forward_s`) and in all, and the bytes that it had begun to move from and to the
    disk by then. The updates of the step before are part of it, its own are not. A state is made, and trained for one step, when it is
    first asked for."""
    throttled(bandwidth)
    what = Trial.from_json(trial)
    key = what.home, what.clip, layout
    [batch] = what.batches()
    if key not in _built:
        _built[key] = made(world, what, layout)
        train_step(_built[key][0], batch, _built[key][1], leave=True)
    state, player = _built[key]
    records = state.home.records
    if records:
        records.moved.restart()
    began, found = time.perf_counter(), list[dict]()

    def now() -> dict:
        return {"seconds": time.perf_counter() - began, "moved": records.moved.fetched_bytes + records.moved.put_bytes if records else 0}

    player.after = lambda op: found.append(now()) if op.turn == "loss" and not found else None
    train_step(state, batch, player, leave=True)
    return now() | {"forward_s": found[0]["seconds"], "forward_moved": found[0]["moved"]}


def forget(world: World) -> None:
    """Give back the states of `timed_step`."""
    for state, _ in _built.values():
        state.home.close()
    _built.clear()


def moved_records(world: World, folder: str, mebibytes: int, rounds: int) -> dict:
    """Bytes a second of records of 32 MiB that are read and written one after the other, the next one read meanwhile, and of a plain file
    in blocks of PIECE, half of the threads reading and half writing; in turn."""
    records = Records(Path(folder))
    vectors = [records.vector(8 << 20, torch.float32) for _ in range(mebibytes // 32)]
    found: dict = {"ours": [], "plain": [], "direct": records.direct}
    with tempfile.TemporaryFile(dir=folder, buffering=0) as plain:
        os.posix_fallocate(plain.fileno(), 0, mebibytes << 20)
        if records.direct:
            fcntl.fcntl(plain.fileno(), fcntl.F_SETFL, fcntl.fcntl(plain.fileno(), fcntl.F_GETFL) | os.O_DIRECT)
        for number in range(rounds + 1):
            ways = {"ours": lambda: _all_records(vectors), "plain": lambda: _plain_file(plain.fileno(), mebibytes)}
            for name in sorted(ways, reverse=bool(number % 2)):
                began = time.perf_counter()
                ways[name]()
                os.sync()
                if number:
                    found[name].append(2 * (mebibytes << 20) / (time.perf_counter() - began))
    records.close()
    return found


def _all_records(vectors: Sequence[DiskVector]) -> None:
    """As `update` of a home on disk: a window of one record each way."""
    vectors[0].read()
    for number, vector in enumerate(vectors):
        if number + 1 < len(vectors):
            vectors[number + 1].read()
        vector.ready()
        vector.write()
        if number:
            vectors[number - 1].written()
    vectors[-1].written()


def _plain_file(file: int, mebibytes: int) -> None:
    """Every block is read and written once."""
    blocks = SimpleQueue[int]()
    for at in range(0, mebibytes << 20, PIECE):
        blocks.put(at)

    def work() -> None:
        page = mmap.mmap(-1, PIECE)  # at a page boundary
        with suppress(Empty):
            while True:
                at = blocks.get_nowait()
                os.preadv(file, [page], at)
                os.pwrite(file, page, at)

    threads = [threading.Thread(target=work) for _ in range(2 * THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed_update(world: World, trial: dict, rounds: int) -> dict:
    """Seconds of updates of a home, without and with a clip, and of torch's fused AdamW on one vector of as many elements, in turn."""
    what = Trial.from_json(trial)
    state, _ = made(world, what, "dp1")
    elements = sum(shard.master.numel() for shard in state.home.learning)
    vector = torch.nn.Parameter(torch.randn(elements))
    adamw = torch_optimizer(what.rule, [vector], fused=True)
    found: dict[str, list[float]] = {"ours_s": [], "clipped_s": [], "torch_s": []}
    for _ in range(rounds + 1):
        for name, factor in (("ours_s", 1.0), ("clipped_s", 0.5)):
            gradients = [shard.begin().fill_(1e-3) for shard in state.home.learning]  # held here, so that no update gives their memory back
            began = time.perf_counter()
            state.optimizer.update(what.lr, factor)
            for unit in sorted({shard.bucket.unit for shard in state.home.learning}) if state.home.by_unit else ():
                state.optimizer.update_unit(unit)
                state.home.pack(unit, world)
            found[name].append(time.perf_counter() - began)
            gradients.clear()
        vector.grad = torch.full_like(vector, 1e-3)
        began = time.perf_counter()
        adamw.step()
        found["torch_s"].append(time.perf_counter() - began)
    return {"elements": elements} | {name: some[1:] for name, some in found.items()}


def capped(world: World, trial: dict, layout: str, limit: int | None) -> dict:
    """What `trained` finds where the process's memory for data may grow by `limit` bytes; by how many it grew at the most that was seen,
    and the error, if one ended the run."""
    give_freed_memory_back(256 << 10)
    before, grew, done = data_bytes(), [0], threading.Event()
    watch = threading.Thread(target=lambda: _watch(before, grew, done))
    watch.start()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit, resource.RLIM_INFINITY))
    found, failed = {}, ""
    try:
        found = trained(world, trial, layout)["bits"]
    except (MemoryError, RuntimeError) as fault:
        failed = str(fault).splitlines()[0]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    done.set()
    watch.join()
    return {"bits": found, "grew": grew[0], "failed": failed}


def data_bytes() -> int:
    """Bytes of this process's private writable memory, as RLIMIT_DATA counts them."""
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))


def _watch(before: int, grew: list[int], done: threading.Event) -> None:
    """In a thread."""
    while not done.wait(0.01):
        grew[0] = max(grew[0], data_bytes() - before)
