"""The run on one rank: a generator of steps. Checkpoints are its business; what a person sees is its caller's."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from longshift.config import Config
from longshift.dist.cores import stay_near
from longshift.dist.world import World, be_deterministic, own_device
from longshift.documents.batch import Batches, StepBatch
from longshift.errors import CheckpointError, NonFiniteError
from longshift.state.checkpoint import Checkpoint
from longshift.state.home import Home, fingerprint
from longshift.state.optimizer import Optimizer
from longshift.state.precision import LossScale, Precision
from longshift.state.saver import Saver
from longshift.step.player import Player
from longshift.step.update import Outcome, State, not_finite, train_step
from longshift.stream.tiers import Moved
from longshift.stream.trace import Recorder
from longshift.switch.itinerary import home_layout
from longshift.switch.links import agreed, links_of
from longshift.trainer.admission import admit
from longshift.trainer.ahead import Ahead
from longshift.trainer.corpus import corpus_notes, open_on_ranks
from longshift.trainer.facts import ChosenKernel, Facts, Fingerprints, changed_kernel, changed_moments, expect
from longshift.trainer.foretold import Foretold
from longshift.trainer.initial import continued, initial
from longshift.trainer.measured import profile_here
from longshift.trainer.metrics import GroupMetrics, HomeMetrics, StepMetrics, faults_of_rows
from longshift.trainer.run_folder import RunFolder, adopt
from longshift.trainer.stages import Stage, schedule_of, stages_of
from longshift.trainer.trials import tried
from longshift.trainer.validated import Validator
from longshift.weigh.timeline import Timeline, predicted, write


def train(
    config: Config,
    run: Path,
    resume: bool,
    stop: Callable[[], bool] = lambda: False,
    trace: Path | None = None,
    record: Callable[[StepMetrics], None] = lambda step: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[StepMetrics]:
    """Train as the rank that the environment says this process is, saving into `run`. `stop` is asked after each step; a yes on any
    rank saves and ends the run on all. `trace`: a file for what rank 0 plays in its first step, and what was predicted of it. `record`:
    called by rank 0 with each step before it is yielded; what it raises ends the run, and the step is not saved. `tell`: is told what
    memory is needed and what there is, before the first step under a layout. Raises LongshiftError."""
    if config.train.deterministic:
        be_deterministic()
    stages = list(stages_of(config))
    world = World.from_environment(max(stage.config.timeout_s(own_device().type) for stage in stages))
    stay_near(world.device)
    for stage in stages[1:]:  # nothing that can be known before is found out after hours
        admit(stage.config, world, run)
        open_data(stage.config, world)
        Validator.of(stage.config, world)
    done = _done(run, world) if resume else 0
    with Timeline(world.device) if trace and world.rank == 0 else nullcontext() as timeline:
        traced = [(timeline, trace)]  # the first step of all
        for number, stage in enumerate(stages, 1):
            if done >= stage.end and stage is not stages[-1]:
                continue
            if len(stages) > 1 and world.rank == 0:
                print(f"longshift: stage {number} of {len(stages)}, {stage}", file=sys.stderr)

            def play(config: Config, resume: bool, most: int | None, stage: Stage = stage) -> Iterator[StepMetrics]:
                own = replace(stage, config=config, run=stage.run if len(stages) > 1 else config)
                return _steps(own, run, resume, stop, world, most, *(traced.pop() if traced else (None, None)), record, tell)

            for metrics in tried(stage.config, run, resume, world, play):
                done = metrics.step
                yield metrics
            if done < stage.end:  # stopped
                break
            resume = True
    world.everyone.all_reduce(torch.zeros(1, device=world.device))  # nobody leaves while another still needs it
    world.close()


def _done(run: Path, world: World) -> int:
    """The step that a run goes on from; collective. Where newer checkpoints are there, by a person who went back or a kill before LATEST
    moved, rank 0 says so."""
    saved = Checkpoint.latest(run, world)
    if saved.newer and world.rank == 0:
        newest = f"step-{saved.newer[-1]}"
        there = f"{RunFolder(run).shown}/LATEST names step-{saved.step}, and newer checkpoints are there, up to {newest}"
        print(f"longshift: {there}: the run goes on from step {saved.step} and replaces them as it comes to them", file=sys.stderr)
    if world.rank == 0:
        faults = faults_of_rows(RunFolder(run).metrics, saved.step, saved.facts.get("loss"))
        if faults:
            print(f"longshift: {RunFolder(run).shown}/metrics.jsonl {faults}", file=sys.stderr)
    return saved.step


def _steps(
    stage: Stage,
    run: Path,
    resume: bool,
    stop: Callable[[], bool],
    world: World,
    most: int | None = None,
    timeline: Timeline | None = None,
    trace: Path | None = None,
    record: Callable[[StepMetrics], None] = lambda step: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[StepMetrics]:
    """The steps of a stage that are left, at most so many. `timeline`: records the first step, for `trace`, and is closed after it."""
    admitted = admit(stage.config, world, run)
    tell(admitted.told)
    config = stage.config
    batches, fingerprints = open_data(config, world)
    validator = Validator.of(config, world)
    start, state, facts = _begin(stage, world, fingerprints, run, resume, admitted.early)
    if validator:
        validator.remember(run, world, stage.begin, start)
    if world.rank == 0 and start == stage.begin:
        for note in corpus_notes(config, batches.cache):
            print(f"longshift: note: {note}", file=sys.stderr)
    if world.rank == 0 and batches.learned_share < 1:
        print(f"longshift: {batches.learned_share:.1%} of the tokens are learned; longshift data CONFIG shows which", file=sys.stderr)
    if resume and world.rank == 0:
        adopt(RunFolder(run), stage.run)
    player = build_player(config, world, state, run)
    if world.rank == 0 and world.device.type != "cpu":
        print(f"longshift: attention by {player.kernel.name}: {player.why_kernel}", file=sys.stderr)
    attention = ChosenKernel.of(player.kernel, world.device)
    for warning in (changed_kernel(facts, attention), changed_moments(facts, config), UNDOUBLED * state.home.no_room):
        if world.rank == 0 and warning:
            print(f"longshift: {warning}", file=sys.stderr)
    foretold, recorder = Foretold.of(run, config, world), Recorder()
    if timeline:
        player.record(recorder)
        timeline.watch(player)
    last = config.train.steps if most is None else min(config.train.steps, start + most)
    saver = Saver(run, world, config.save.keep, admitted.background)
    with closing(state.home), closing(Ahead(batches, player)) as ahead, saver:
        for step in range(start + 1, last + 1):
            began = world.now()
            batch, ready = ahead.take(state.cursor, step < last)
            waited = world.now() - began
            if foretold:
                foretold.predict(ready.lengths)
            began = world.now() - waited
            try:
                outcome = train_step(state, batch, player, ready, leave=True)
            except NonFiniteError as fault:
                raise NonFiniteError(f"step {step}: {fault}\n  first document: {batches.where(batch.cursor)}") from None
            seconds = world.now() - began
            if timeline and trace:
                player.record(None)
                player.after = None
                timeline.close()
                write(trace, world.rank, timeline.played, predicted(player), recorder)
                timeline = None
            memory_bytes, stopping, saving = _most(world, _memory_bytes(world), stop(), saver.busy)
            metrics = _metrics(config, step, batch, outcome, seconds, memory_bytes, _groups(player))
            metrics = replace(metrics, first=step == start + 1, home=_moved(state.home, world))
            metrics = foretold.beside(metrics) if foretold else metrics
            metrics = validator.after(metrics, player) if validator else metrics
            if world.rank == 0:
                record(metrics)
            try:
                yield metrics
            except GeneratorExit:  # the caller leaves; among others it would wait for them here
                if world.size > 1:
                    raise
                stopping = True
            best = validator.best if validator else None
            if stopping or step in (last, best) or step % config.save.every == 0 or metrics.early:
                player.finish()
                if wrong := not_finite(state, world):
                    raise NonFiniteError(
                        f"step {step}: the {wrong} is not finite after an update with lr {metrics.lr:.3g}. Nothing is saved: the "
                        "checkpoint before it stays the newest. A lower train.lr or more train.warmup are the usual cures."
                    )
                kept = Facts.now(config, state, fingerprints, attention, metrics.loss).model_dump()
                saver.save(step, state.optimizer, kept, best, last=stopping or metrics.early or step == last)
            elif not saving:
                saver.finish()
            if stopping or metrics.early:
                return


def _begin(stage: Stage, world: World, fingerprints: Fingerprints, run: Path, resume: bool, early: bool) -> tuple[int, State, Facts | None]:
    """Steps done, the state after them and what is known of it: of the newest checkpoint of `run` where the run is resumed. Its files are
    closed again. What the stage before has left is another model's, of other data, as far as stages differ."""
    if not resume:
        state = build_state(stage.config, world, run, early=early)
        state.schedule = stage.schedule
        return 0, state, None
    saved = Checkpoint.latest(run, world)
    facts = Facts.of(saved)
    left = stage.before if saved.step == stage.begin else None
    data = facts.fingerprints.data if left else fingerprints.data
    expect(facts, left or stage.config, fingerprints.model_copy(update={"data": data}), run, saved)
    state = build_state(stage.config, world, run, saved, facts, early)
    if wrong := not_finite(state, world):
        raise CheckpointError(f"{saved.folder}: the {wrong} is not finite. {saved.older}")
    state.schedule = stage.schedule
    if left and facts.fingerprints.data != fingerprints.data:
        state.cursor = 0
    return saved.step, state, facts


UNDOUBLED = "the disk has no room for second places of masters and moments: none is updated before the norm (docs/home.md)"


def build_state(
    config: Config, world: World, folder: Path, saved: Checkpoint | None = None, facts: Facts | None = None, early: bool = True
) -> State:
    """Home, optimizer and cursor: from a checkpoint and its facts, a model folder or the seed. `folder`: of a home on disk, unless the
    config names one; `early`: whether its units may be updated before the norm."""
    spec, train, precision = config.spec, config.train, Precision.of(config.train.precision)
    source = continued(config, saved, precision.home) if saved else initial(config, precision.home)
    where = config.home.at, config.stream.folder or folder, train.rule, config.home.moments, early
    home = Home.made(spec, home_layout(config.edges), world, precision, source, *where)
    optimizer = Optimizer(home, train.rule)
    state = State(spec, home, optimizer, schedule_of(config), train.clip, LossScale() if precision.scaled else None)
    state.base = fingerprint(home, world)
    if saved and facts:
        if state.base != facts.base:
            raise CheckpointError(
                f"the weights that are not trained are others than {saved.folder} was trained beside: put the old model folder back, and "
                f"the train.precision and train.seed that it began with"
            )
        optimizer.restore(saved.read, facts.config.home.moments)
        optimizer.resume(facts.updates)
        state.cursor = facts.cursor
        if state.scale and facts.loss_scale:
            state.scale.scale, state.scale.good_steps = facts.loss_scale
    return state


def build_player(config: Config, world: World, state: State, run: Path) -> Player:
    """The player of a run's steps. `run`: the run's folder, for what waits on disk. Collective: ranks agree on links."""
    links = links_of(profile_here(world), world.per_node, -(-world.size // world.per_node))
    return Player(
        config.spec,
        config.edges,
        world,
        state.home,
        Precision.of(config.train.precision, config.formats.wire),
        config.switch.options,
        config.stream.options(run),
        links=agreed(links, world.gather_text),
        compile=config.train.compile,
    )


def open_data(config: Config, world: World) -> tuple[Batches, Fingerprints]:
    tokenizer, cache = open_on_ranks(config, world)
    batches = Batches.of(config, cache)
    return batches, Fingerprints(tokenizer=tokenizer.fingerprint, data=batches.fingerprint)


def _groups(player: Player) -> tuple[GroupMetrics, ...]:
    """Metrics of the last step's groups, with the times of the slowest rank; none for a single layout that neither streams nor offloads."""
    if len(player.edges) == 1 and all(runner.tier is None for runner in player.runners.values()):
        return ()
    everyone, own = player.world.everyone, list[tuple[float, ...]]()
    for visit in player.visited:
        moved = visit.moved or Moved()
        copies = moved.waited_s, moved.copying_s, moved.put_bytes, moved.fetched_bytes, moved.peak_bytes
        own.append((visit.seconds, visit.exposed_s, visit.hidden_s, *copies))
    sums = torch.tensor(own, dtype=torch.float64, device=player.world.device)
    most = everyone.all_reduce(sums.clone(), dist.ReduceOp.MAX).tolist()
    found = []
    for visit, slowest, total in zip(player.visited, most, everyone.all_reduce(sums).tolist()):
        seconds, exposed_s, hidden_s, waited_most_s, *_, peak_bytes = slowest
        waited_s, copying_s, put_bytes, fetched_bytes = total[3:-1]
        group, tier = visit.group, player.runners[visit.group.layout].tier
        timed = tier is not None and tier.timed
        found.append(
            GroupMetrics(
                layout=str(group.layout),
                upto=group.hi,
                documents=len(group.documents),
                packs=len(group.packs),
                tokens=visit.tokens,
                balance=group.balance,
                seconds=seconds,
                tokens_per_s=visit.tokens / seconds,
                switch_exposed_s=exposed_s,
                switch_hidden_s=hidden_s,
                intra_node_bytes=visit.intra_node_bytes,
                inter_node_bytes=visit.inter_node_bytes,
                put_bytes=int(put_bytes),
                fetched_bytes=int(fetched_bytes),
                waited_s=waited_most_s if timed else None,
                hidden_share=max(0.0, 1 - waited_s / copying_s) if timed and copying_s else None,
                tier_peak_bytes=int(peak_bytes),
            )
        )
    return tuple(found)


def _moved(home: Home, world: World) -> HomeMetrics | None:
    """Metrics of the last step's home, where that is on disk; collective then."""
    records = home.records
    if records is None:
        return None
    own = torch.tensor([records.read_bytes, records.written_bytes, records.waited_s], dtype=torch.float64, device=world.device)
    records.restart()
    waited_s = float(world.everyone.all_reduce(own[2].clone(), dist.ReduceOp.MAX))
    read, written, _ = world.everyone.all_reduce(own).tolist()
    return HomeMetrics(int(read), int(written), waited_s)


def _metrics(
    config: Config, step: int, batch: StepBatch, outcome: Outcome, seconds: float, memory_bytes: int, groups: tuple[GroupMetrics, ...]
) -> StepMetrics:
    tokens = batch.tokens
    context = sum(float(config.spec.attended(len(d.ids))) for d in batch.documents) / tokens
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
        layout=config.model_dump(mode="json")["layout"],
    )


def _most(world: World, memory_bytes: int, stopping: bool, saving: bool) -> tuple[int, bool, bool]:
    """The largest memory of any rank, whether any wants to stop, and whether any still writes a checkpoint."""
    own = torch.tensor([memory_bytes, int(stopping), int(saving)], device=world.device)
    memory, stop, busy = world.everyone.all_reduce(own, dist.ReduceOp.MAX).tolist()
    return memory, bool(stop), bool(busy)


def _memory_bytes(world: World) -> int:
    """Peak so far: allocated on the GPU, resident on a CPU machine."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
