"""The run on one rank: a generator of steps. Checkpoints are its business; what a person sees is its caller's."""

import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from longshift.cluster.host import profile_of_host
from longshift.config import Config
from longshift.data.batch import Batches, StepBatch
from longshift.dist.memory import host_memory
from longshift.dist.world import World, be_deterministic, own_device
from longshift.errors import NonFiniteError, OutOfMemoryError
from longshift.explain import shape_of
from longshift.layout.placement import buckets
from longshift.model.huggingface import WeightFolder
from longshift.program.needs import most, needs
from longshift.schedule.inside_rank import Transport
from longshift.state.checkpoint import Checkpoint, save
from longshift.state.home import Home, Source, random_source
from longshift.state.optimizer import MOMENTS, Optimizer, Schedule
from longshift.state.precision import LossScale, Precision
from longshift.step.player import Player
from longshift.step.timeline import Timeline, predicted, write
from longshift.step.update import Outcome, State, train_step
from longshift.stream.tiers import Moved
from longshift.stream.trace import Recorder
from longshift.switch.itinerary import home_layout
from longshift.switch.links import agreed, links_of
from longshift.train.corpus import open_on_ranks
from longshift.train.facts import ChosenKernel, Facts, Fingerprints, changed_kernel, expect
from longshift.train.metrics import GroupMetrics, StepMetrics
from longshift.train.run_folder import RunFolder, adopt

CONTROL_GROUPS = Path("/proc/self/cgroup")


def train(
    config: Config, run: Path, resume: bool, stop: Callable[[], bool] = lambda: False, trace: Path | None = None
) -> Iterator[StepMetrics]:
    """Train as the rank that the environment says this process is, saving into `run`. `stop` is asked after each step; a yes on any
    rank saves and ends the run on all. `trace`: a file for what rank 0 plays in its first step, and what was predicted of it. Raises
    LongshiftError."""
    if config.train.deterministic:
        be_deterministic()
    world = World.from_environment(config.timeout_s(own_device().type))
    with Timeline(world.device) if trace and world.rank == 0 else nullcontext() as timeline:
        yield from _steps(config, run, resume, stop, world, timeline, trace)
    world.everyone.all_reduce(torch.zeros(1, device=world.device))  # nobody leaves while another still needs it
    world.close()


def _steps(
    config: Config,
    run: Path,
    resume: bool,
    stop: Callable[[], bool],
    world: World,
    timeline: Timeline | None = None,
    trace: Path | None = None,
) -> Iterator[StepMetrics]:
    """`timeline`: records the first step, for `trace`, and is closed after it."""
    _fits(config, world, run)
    batches, fingerprints = open_data(config, world)
    start, state, facts = _begin(config, world, fingerprints, run if resume else None)
    if resume and world.rank == 0:
        adopt(RunFolder(run), config)
    player = build_player(config, world, state, run)
    if world.rank == 0 and world.device.type != "cpu":
        print(f"longshift: attention by {player.kernel.name}: {player.why_kernel}", file=sys.stderr)
    attention = ChosenKernel.of(player.kernel, world.device)
    if world.rank == 0 and (warning := changed_kernel(facts, attention)):
        print(f"longshift: {warning}", file=sys.stderr)
    recorder = Recorder()
    if timeline:
        player.record(recorder)
        timeline.watch(player)
    for step in range(start + 1, config.train.steps + 1):
        began = world.now()
        batch = batches.at(state.cursor)
        try:
            outcome = train_step(state, batch, player)
        except NonFiniteError as fault:
            raise NonFiniteError(f"step {step}: {fault}\n  first document: {batches.where(batch.cursor)}") from None
        seconds = world.now() - began
        if timeline and trace:
            player.record(None)
            player.after = None
            timeline.close()
            write(trace, world.rank, timeline.played, predicted(player), recorder)
            timeline = None
        most, stopping = _most(world, _memory_bytes(world), stop())
        try:
            yield _metrics(config, step, batch, outcome, seconds, most, _groups(player))
        except GeneratorExit:  # the caller leaves; among others it would wait for them here
            if world.size > 1:
                raise
            stopping = True
        if stopping or step == config.train.steps or step % config.save.every == 0:
            kept = Facts.now(config, state, fingerprints, attention).model_dump()
            save(run, step, state.optimizer.state(), kept, world, config.save.keep)
        if stopping:
            return


def _fits(config: Config, world: World, run: Path) -> None:
    """Refuse a run whose largest step cannot have room, on the device or where it waits. Raises OutOfMemoryError with the arithmetic."""
    cpu = world.device.type == "cpu"
    shape = shape_of(config, world.per_node)
    transport: Transport = "gloo" if cpu else "nccl"
    where = transport, cpu
    room, process = _room(world)
    need = most(needs(shape, config.edges, *where))
    if need.device.total + process > room:
        alive = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in need.device.alive[:6])
        raise OutOfMemoryError(
            f"rank {need.rank} needs {need.device.total / 2**30:.2f} GiB for tensors, in {need.device.op} ({alive}), besides "
            f"{process / 2**30:.2f} GiB that the process has, and there are {room / 2**30:.2f} GiB for it; recompute-full, more tp, u or "
            "ring, z3, chunks, a smaller upto or train.pack_tokens take less"
        )
    waiting: dict[str, dict[str, int]] = {"host": {}, "disk": {}}
    for edge in config.edges:
        if edge.use.offload == "disk" or (edge.use.offload == "host" and not cpu):
            place = edge.use.offload
            waiting[place][str(edge.use)] = most(needs(shape, [edge], *where), place).of(place)
    folder = config.stream.options(run).folder
    if waiting["disk"]:
        _room_for(waiting["disk"], world.per_node, shutil.disk_usage(folder).free, f"{folder} has", "another stream.folder")
    if waiting["host"]:
        _room_for(waiting["host"], world.per_node, host_memory()[1], "this machine's memory has", "disk")


def _room(world: World) -> tuple[int, int]:
    """Bytes that this rank may have, those of the process included, and how many the process has already. Ranks of one control group share
    what it allows; collective."""
    if world.device.type != "cpu":
        free, total = torch.cuda.mem_get_info(world.device)
        return total, total - free
    settle(world.device)
    own = f"{socket.gethostname()} {CONTROL_GROUPS.read_text() if CONTROL_GROUPS.exists() else ''}"
    sharing = world.gather_text(own).count(own)
    return min(host_memory()[0] // sharing, psutil.virtual_memory().total // world.per_node), psutil.Process().memory_info().rss


def settle(device: torch.device) -> None:
    """Have the process take what it takes once, whatever is trained: what a first backward, optimizer and matmul in bf16 load."""
    x = torch.ones(64, 64, requires_grad=True, device=device)
    (x @ x).sum().backward()
    torch.optim.AdamW([x], fused=True).step()
    torch.mm(x.detach().bfloat16(), x.detach().bfloat16())


def _room_for(waiting: dict[str, int], ranks: int, free: int, where: str, instead: str) -> None:
    """Refuse what waits, in bytes of a rank by layout, where there is no room. A group's memory is kept while others run."""
    need = sum(waiting.values())
    if need * ranks > free:
        parts = " + ".join(f"{size / 2**30:.2f} ({layout})" for layout, size in waiting.items())
        raise OutOfMemoryError(
            f"what waits for the backward of the longest documents needs {parts} = {need / 2**30:.2f} GiB of each of {ranks} ranks, "
            f"together {need * ranks / 2**30:.2f} GiB, and {where} {free / 2**30:.2f} GiB free: try {instead}, keep-input, every4, more "
            "tp, u or ring, or a smaller upto"
        )


def _begin(config: Config, world: World, fingerprints: Fingerprints, run: Path | None) -> tuple[int, State, Facts | None]:
    """Steps done, the state after them and what is known of it: of the newest checkpoint of `run` where given. Its files are closed
    again."""
    if run is None:
        return 0, build_state(config, world), None
    saved = Checkpoint.latest(run, world)
    facts = Facts.of(saved)
    expect(facts, config, fingerprints, run, saved)
    return saved.step, build_state(config, world, saved, facts), facts


def build_state(config: Config, world: World, saved: Checkpoint | None = None, facts: Facts | None = None) -> State:
    """Home, optimizer and cursor: from a checkpoint and its facts, a model folder or the seed."""
    spec, train, precision = config.spec, config.train, Precision.of(config.train.precision)
    source = saved.source() if saved else _initial(config, precision.home)
    home = Home(spec, buckets(spec, home_layout(config.edges)), world.rank, precision.home, world.device, source)
    optimizer = Optimizer(home, train.betas, train.eps, train.weight_decay)
    schedule = Schedule(train.lr, train.steps, train.min_lr, train.warmup, train.schedule)
    state = State(spec, home, optimizer, schedule, train.clip, LossScale() if precision.scaled else None)
    if saved and facts:
        saved.restore(optimizer.state(), MOMENTS)  # masters are there
        optimizer.resume(facts.updates)
        state.cursor = facts.cursor
        if state.scale and facts.loss_scale:
            state.scale.scale, state.scale.good_steps = facts.loss_scale
    return state


def build_player(config: Config, world: World, state: State, run: Path) -> Player:
    """The player of a run's steps. `run`: the run's folder, for what waits on disk. Collective: ranks agree on links."""
    nodes = -(-world.size // world.per_node)
    links = links_of(profile_of_host(world.per_node, nodes, world.device.type), world.per_node, nodes)
    return Player(
        config.spec,
        config.edges,
        world,
        state.home,
        Precision.of(config.train.precision),
        config.switch.options,
        config.stream.options(run),
        links=agreed(links, world.gather_text),
        windows=config.window.options,
    )


def _initial(config: Config, dtype: torch.dtype) -> Source:
    if config.model.path is not None and config.model.init == "pretrained":
        return WeightFolder(Path(config.model.path), config.spec).read
    return random_source(config.spec, config.train.seed, dtype)


def open_data(config: Config, world: World) -> tuple[Batches, Fingerprints]:
    tokenizer, cache = open_on_ranks(config, world)
    train, data = config.train, config.data
    batches = Batches(cache, train.seed, train.tokens_per_step, data.max_len, data.overlong)
    return batches, Fingerprints(tokenizer=tokenizer.fingerprint, data=batches.fingerprint)


def _groups(player: Player) -> tuple[GroupMetrics, ...]:
    """Of the step that was made, times of the slowest rank; none for a single layout that neither streams nor offloads."""
    if len(player.edges) == 1 and all(runner.tier is None for runner in player.runners.values()):
        return ()
    times = torch.tensor([(v.seconds, v.exposed_s, v.hidden_s) for v in player.visited], dtype=torch.float64, device=player.world.device)
    slowest = player.world.everyone.all_reduce(times, dist.ReduceOp.MAX).tolist()
    return tuple(
        GroupMetrics(
            layout=str(visit.group.layout),
            upto=visit.group.hi,
            documents=len(visit.group.documents),
            packs=len(visit.group.packs),
            tokens=visit.tokens,
            balance=visit.group.balance,
            seconds=seconds,
            tokens_per_s=visit.tokens / seconds,
            switch_exposed_s=exposed_s,
            switch_hidden_s=hidden_s,
            intra_node_bytes=visit.intra_node_bytes,
            inter_node_bytes=visit.inter_node_bytes,
            **offloaded,
        )
        for visit, (seconds, exposed_s, hidden_s), offloaded in zip(player.visited, slowest, _offloaded(player))
    )


def _offloaded(player: Player) -> list[dict[str, Any]]:
    """What the tiers did, in the fields of GroupMetrics, for each visit."""
    everyone, moved = player.world.everyone, [visit.moved or Moved() for visit in player.visited]
    own = [(m.waited_s, m.copying_s, m.put_bytes, m.fetched_bytes, m.peak_bytes) for m in moved]
    sums = torch.tensor(own, dtype=torch.float64, device=player.world.device)
    most = everyone.all_reduce(sums.clone(), dist.ReduceOp.MAX).tolist()
    found = []
    for visit, most_of, total in zip(player.visited, most, everyone.all_reduce(sums).tolist()):
        tier, (waited_s, copying_s, put_bytes, fetched_bytes, _) = player.runners[visit.group.layout].tier, total
        timed = tier is not None and tier.timed
        found.append(
            {
                "put_bytes": int(put_bytes),
                "fetched_bytes": int(fetched_bytes),
                "waited_s": most_of[0] if timed else None,
                "hidden_share": max(0.0, 1 - waited_s / copying_s) if timed and copying_s else None,
                "tier_peak_bytes": int(most_of[-1]),
            }
        )
    return found


def _metrics(
    config: Config, step: int, batch: StepBatch, outcome: Outcome, seconds: float, memory_bytes: int, groups: tuple[GroupMetrics, ...]
) -> StepMetrics:
    tokens = batch.tokens
    context = sum(len(d.ids) ** 2 for d in batch.documents) / 2 / tokens
    return StepMetrics(
        step=step,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens=tokens,
        target_tokens=batch.target_tokens,
        documents=len(batch.documents),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        model_flops_per_s=tokens * config.spec.flops_per_token(context) / seconds,
        memory_bytes=memory_bytes,
        cursor=batch.next_cursor,
        skipped=outcome.skipped,
        groups=groups,
    )


def _most(world: World, memory_bytes: int, stopping: bool) -> tuple[int, bool]:
    """The largest memory of any rank, and whether any wants to stop."""
    both = torch.tensor([memory_bytes, int(stopping)], device=world.device)
    memory, stop = world.everyone.all_reduce(both, dist.ReduceOp.MAX).tolist()
    return memory, bool(stop)


def _memory_bytes(world: World) -> int:
    """Peak so far: allocated on the GPU, resident on a CPU machine."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
